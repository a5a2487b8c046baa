"""``deepthin bench SOURCE``: tokens per second here, against peers on the same weights, beside the memory's ceiling."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepthin.cli.arguments import MAX_CONTEXT, add_source, argument, one_of, parse_threads, real, whole
from deepthin.cli.outcome import Outcome
from deepthin.cli.progress import Progress
from deepthin.cli.ranges import parse_pairs, parse_ranges
from deepthin.cli.sizes import bytes_text, seconds_text
from deepthin.cli.source import QUANT_HELP, open_source, parse_scheme, require_runnable
from deepthin.cli.table import markdown, table
from deepthin.engine.errors import UnsupportedError, UsageError
from deepthin.engine.formats import STORED
from deepthin.engine.kv_cache import CACHE_FORMATS

if TYPE_CHECKING:
    from deepthin.engine.model import Model
    from deepthin.export.exported import ExportedModel
    from deepthin.profiles.bench import BenchConfig

PEERS = ("llama.cpp", "onnxruntime", "genai")
FORMATS = ("table", "md", "json", "llama-bench")
_MAX_TOKENS = 1 << 20
EXAMPLES = """examples:
  deepthin bench model.gguf --against llama.cpp,onnxruntime
  deepthin bench model.gguf --quant q8_0 --threads 1,2,4 --gen 64 --prompt 0
  deepthin bench smollm2-135m --depth 1024              random weights in a known shape
  deepthin bench L=15,d=768,heads=12,kv=4,ff=2048,vocab=49152,tied --json
  deepthin bench model.gguf -p 512 -n 128 -d 0,512,2048 -t 1-2 --format llama-bench
  deepthin bench model.gguf -p 0 -n 0 -pg 512,128 -pg 64,256      a prompt and its answer, timed together
  deepthin bench bundle --against onnxruntime,genai,llama.cpp       the files of an export as they are, format by format
  deepthin bench model.gguf -p 0 -n 0 --kernels         which kernel runs for each tensor; times nothing
  deepthin bench model.gguf -p 0 -n 0 --layers          where the time of a token goes

tg128 is 128 single-token steps, pp256 a prompt of 256 tokens, pp256+tg128 both in turn, as in llama-bench; lists (128,256)
and ranges (0-4096+1024, 128-2048*2) give one test each. Runtimes take turns within each round; an interval wider than 3 % is
measured again or flagged. The share is weight bytes per token x tok/s over the read bandwidth.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    add_source(parser)
    parser.add_argument(
        "--quant",
        type=argument(lambda text: STORED if text.strip() == STORED else parse_scheme(text)),
        metavar="Q",
        help=f"convert the weights first: {QUANT_HELP} or stored (default: as stored, else q4_0); "
        "of an export folder, only the files in that format",
    )
    parser.add_argument(
        "--kv", choices=list(CACHE_FORMATS), default="f16", help="how the engine caches keys and values (default: %(default)s)"
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=argument(_thread_counts),
        metavar="N,N,..",
        help="thread counts, kept to throughout (default: one per physical core, fast ones where they differ)",
    )
    parser.add_argument(
        "-p", "--prompt", type=_numbers(0), default=(256,), metavar="N,N,..", help="prompt tokens; 0 is no such test (256)"
    )
    parser.add_argument(
        "-n", "--gen", type=_numbers(0), default=(128,), metavar="N,N,..", help="decoded tokens; 0 is no such test (128)"
    )
    parser.add_argument(
        "-pg",
        "--prompt-gen",
        type=argument(lambda text: parse_pairs(text, low=0, high=_MAX_TOKENS)),
        action=_Gather,
        default=(),
        metavar="PP,TG",
        help="a prompt of PP tokens and TG decoded after it, timed together; may be repeated (none)",
    )
    parser.add_argument(
        "-d", "--depth", type=_numbers(0), default=(0,), metavar="N,N,..", help="tokens cached before timing (0)"
    )
    parser.add_argument(
        "--against", type=one_of(*PEERS), default=[], metavar="R,R", help=f"peers to time too, of {','.join(PEERS)}"
    )
    parser.add_argument(
        "-r", "--repetitions", type=whole(1, 1000), default=9, metavar="N", help="interleaved rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s", type=real(0, 1e6), default=60.0, metavar="S", help="seconds a test may be repeated for (60)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of random tokens and weights (default: 0)")
    parser.add_argument("--kernels", action="store_true", help="print kernel, format and packed size of each tensor too")
    parser.add_argument("--layers", action="store_true", help="time each block and product of our engine too")
    parser.add_argument(
        "-o",
        "--format",
        choices=FORMATS,
        default="table",
        help="md for Markdown, json as --json, llama-bench for the JSON of llama-bench -o json (default: table)",
    )


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Time SOURCE.

    Raises:
        UsageError: llama-bench's format has no place for what is asked.
        DeepthinError: SOURCE cannot be read, or the engine cannot run it.
    """
    if options.format == "llama-bench" and (options.kernels or options.layers or options.json):
        other = "--json" if options.json else "--kernels" if options.kernels else "--layers"
        raise UsageError(f"--format llama-bench has no place for {other}; leave one of them out")
    options.json = options.json or options.format == "json"
    if max(options.depth) + max(*options.prompt, *options.gen, *map(sum, options.prompt_gen)) > MAX_CONTEXT:
        raise UsageError(
            f"--depth with --prompt, --gen or -pg is over {MAX_CONTEXT} tokens, the most this engine caches; ask for less"
        )
    config = _config(options)
    exported = _exported(options)
    body = _time_exported(exported, config, progress) if exported else _time_source(options, config, progress)
    if options.format == "llama-bench":
        from deepthin.profiles.llama_bench import llama_bench_rows
        from deepthin.profiles.machine import machine_record

        for result in body["results"]:
            if result["status"] != "ran":
                progress(f"{result['runtime']} {result['status']}: {result['why']}")
        text = json.dumps(llama_bench_rows(body, machine_record(), options.source), indent=2, allow_nan=False)
    else:
        text = bench_text(body, markdown if options.format == "md" else _plain)
    return Outcome("bench", {"source": options.source, **body}, text)


def _config(options: argparse.Namespace) -> BenchConfig:
    from deepthin.engine.cores import default_threads
    from deepthin.profiles.bench import BenchConfig

    return BenchConfig(
        threads=options.threads or (default_threads(),),
        prompt=options.prompt,
        gen=options.gen,
        prompt_gen=options.prompt_gen,
        depth=options.depth,
        against=tuple(options.against),
        repetitions=options.repetitions,
        budget_s=options.budget_s,
        kv_format=options.kv,
        seed=options.seed,
        kernels=options.kernels,
        layers=options.layers,
    )


def _time_source(options: argparse.Namespace, config: BenchConfig, progress: Progress) -> dict[str, Any]:
    """Weights or a shape: each peer's file is written for it, but for the GGUF that SOURCE may be."""
    source = open_source(options.source)
    require_runnable(source.shape)
    progress("reading weights" if source.model is not None else "making random weights")
    model = source.weights(seed=options.seed, quant=None if options.quant == STORED else options.quant)
    progress("loading kernels (compiled once per machine)")
    from deepthin.export.gguf_writer import write_gguf
    from deepthin.profiles.bench import bench

    is_own_gguf = source.model is not None and options.quant in (None, STORED) and Path(options.source).is_file()
    return bench(
        model,
        config,
        files={"llama.cpp": Path(options.source)} if is_own_gguf else {},
        writers={"llama.cpp": write_gguf, "onnxruntime": write_onnx_for_timing, "genai": write_genai_for_timing},
        progress=progress,
    )


def _exported(options: argparse.Namespace) -> list[ExportedModel]:
    """What SOURCE holds for runtimes as an export folder, in the wanted format; nothing when it is something else.

    Raises:
        UsageError: it is one, but not in that format.
    """
    from deepthin.export.exported import exported_models

    found = exported_models(Path(options.source))
    wanted = [model for model in found if options.quant in (None, model.quant)]
    if found and not wanted:
        held = ", ".join(model.quant for model in found)
        raise UsageError(
            f"{options.source} is an export folder that holds {held}, not {options.quant}; its files are timed as they are, "
            f"so export it with --quant {options.quant} first"
        )
    if options.kernels and len(wanted) > 1:
        held = ",".join(model.quant for model in wanted)
        raise UsageError(
            f"--kernels shows one format, but {options.source} holds several; choose one of them with --quant ({held})"
        )
    return wanted


def _time_exported(exported: Sequence[ExportedModel], config: BenchConfig, progress: Progress) -> dict[str, Any]:
    """One bench for each stored format, joined: every row names its format, and ``files`` what each runtime loaded."""
    from deepthin.profiles.bench import bench

    bodies = []
    for one in exported:
        progress(f"reading weights, {one.quant}")
        model = one.load()
        require_runnable(model.shape)

        def refuse(_model: Model, _path: Path, runtime: str, one: ExportedModel = one) -> None:
            raise UnsupportedError(one.missing(runtime))

        absent = {name: partial(refuse, runtime=name) for name in config.against if name not in one.files}
        body = bench(model, config, files=one.files, writers=absent, progress=progress)
        for key in ("results", "agreement", "bandwidth", "sessions", *(["layers"] if config.layers else [])):
            body[key] = [{**entry, "quant": one.quant} for entry in body[key]]
        body["results"] = [{**entry, "model_bytes": body["model_bytes"]} for entry in body["results"]]
        files = {name: str(path) for name, path in one.files.items() if name in config.against}
        bodies.append({**body, "quant": one.quant, "files": {one.quant: files}})
    joined = bodies[0]
    for body in bodies[1:]:
        joined["quant"] += f", {body['quant']}"
        for key in ("results", "agreement", "bandwidth", "sessions", "layers"):
            if key in joined:
                joined[key] += body[key]
        joined["files"] |= body["files"]
    return joined


class _Gather(argparse.Action):
    """Values of every time the option is given, one behind the other, in place of the default."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None) -> None:
        held = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (() if held is self.default else held) + values)


def _thread_counts(text: str) -> tuple[int, ...]:
    """Thread counts as llama-bench lists them, each one that makes sense here."""
    return tuple(parse_threads(str(count)) for count in parse_ranges(text, low=0, high=1 << 40))


def _numbers(low: int, high: int = _MAX_TOKENS) -> Callable[[str], tuple[int, ...]]:
    return argument(lambda text: parse_ranges(text, low=low, high=high))


def _plain(headers: Sequence[str], rows: Sequence[Sequence[object]], *, left: int) -> str:
    return table(headers, rows, left=left)


def write_onnx_for_timing(model: Model, path: Path) -> None:
    """Write ``model`` as onnxruntime runs it fastest: 8-bit activations beside quantised weights, as engine and llama.cpp do.

    Raises:
        UnsupportedError: the file would hold other weights than the model, or the shape has no operator.
    """
    from deepthin.export.onnx_model import write_onnx
    from deepthin.export.onnx_weights import BITS

    halves = sorted({tensor.format.name for tensor in model.tensors.values()} - {"f32", "f16", *BITS})
    if halves:
        raise UnsupportedError(
            f"our ONNX files hold {halves[0]} weights as f32, so this would compare unequal bytes; try --quant f32 or q8_0"
        )
    write_onnx(model, path, accuracy_level=4)


def write_genai_for_timing(model: Model, path: Path) -> None:
    """Write the file of :func:`write_onnx_for_timing` and the configuration that genai wants, into the new folder ``path``.

    Raises:
        UnsupportedError: as there.
    """
    from deepthin.export.genai_folder import genai_config
    from deepthin.export.onnx_model import shares_buffer
    from deepthin.export.text_files import write_json

    path.mkdir()
    write_onnx_for_timing(model, path / "model.onnx")
    config = genai_config(model.shape, None, filename="model.onnx", shares_buffer=shares_buffer(model.shape))
    write_json(path / "genai_config.json", config)


def bench_text(body: Mapping[str, Any], draw: Callable[..., str] = _plain) -> str:
    """Results, who did not run, the ceilings, then kernels and layers where they were asked for; ``draw`` makes each table."""
    parts = [f"{body['shape']['text']}, {body['quant']}"]
    if body["results"]:
        parts.append(_results_text(body, draw))
    if "kernels" in body:
        parts.append(_kernels_text(body["kernels"], draw))
    parts += [_layers_text(entry, draw) for entry in body.get("layers", ())]
    return "\n\n".join(parts) if draw is markdown or len(parts) > 2 else "\n".join(parts)


def _results_text(body: Mapping[str, Any], draw: Callable[..., str]) -> str:
    rows, notes = [], []
    several = len({result["quant"] for result in body["results"]}) > 1  # an export folder's formats
    for result in body["results"]:
        of_format = f", {result['quant']}" if several else ""
        if result["status"] != "ran":
            notes.append(
                f"{result['runtime']} {result['status']} ({result['test']}, {result['threads']} threads{of_format}): "
                f"{result['why']}"
            )
            continue
        rate, ratio = result["tok_s"], result["ratio_to_engine"]
        rows.append(
            (
                *([result["quant"]] if several else []),
                result["runtime"],
                result["test"],
                result["threads"],
                f"{rate['median']:.1f}",
                f"{rate['ci_low']:.1f}..{rate['ci_high']:.1f}",
                "" if result["bytes_per_token"] is None else bytes_text(result["bytes_per_token"]),
                _share(result["roofline_share"]),
                "" if ratio is None else f"{ratio['median']:.2f}",
                ", ".join(result["flags"]),
            )
        )
    headers = (
        *(["format"] if several else []),
        "runtime",
        "test",
        "threads",
        "tok/s",
        "interval",
        "bytes/token",
        "of ceiling",
        "x engine",
        "flags",
    )
    for ceiling in body["bandwidth"]:
        rate = ceiling["bytes_per_s"]["median"]
        notes.append(
            f"read bandwidth with {ceiling['threads']} threads over {bytes_text(ceiling['num_bytes'])}: {rate / 1e9:.1f} GB/s"
        )
    gap = "\n\n" if draw is markdown else "\n"
    return gap.join([draw(headers, rows, left=3 if several else 2), "\n".join(notes)])


def _kernels_text(found: Mapping[str, Any], draw: Callable[..., str]) -> str:
    rows = [
        (
            group["role"],
            group["product"],
            group["decode_kernel"],
            group["prefill_kernel"],
            group["count"],
            group["format"],
            f"{group['rows']} x {group['cols']}",
            bytes_text(group["packed_bytes"]),
            f"{group['bits_per_weight']:.2f}",
        )
        for group in found["groups"]
    ]
    headers = ("role", "tensor", "kernel, decode", "kernel, prefill", "count", "format", "rows x cols", "packed", "bits/weight")
    padding = found["packed_bytes"] / found["stored_bytes"] - 1
    return "\n".join(
        [
            f"kernels for {found['simd']}, {found['lanes']} rows a tile; {bytes_text(found['packed_bytes'])} packed, "
            f"{padding:+.1%} against the file's blocks",
            *([""] if draw is markdown else []),
            draw(headers, rows, left=4),
        ]
    )


def _layers_text(entry: Mapping[str, Any], draw: Callable[..., str]) -> str:
    token = entry["token_s"]["median"]
    embedding = {"name": "embedding row", "seconds": entry["embed_s"], "bytes": 0, "roofline_share": None}
    gap = [""] if draw is markdown else []
    tables = []
    for title, parts in (("block", [embedding, *entry["blocks"]]), ("operation", entry["operations"])):
        rows = [
            (
                part["name"],
                _time(part["seconds"]["median"]),
                f"{_time(part['seconds']['ci_low'])}..{_time(part['seconds']['ci_high'])}",
                f"{part['seconds']['median'] / token:.1%}",
                bytes_text(part["bytes"]) if part["bytes"] else "",
                _share(part["roofline_share"]),
            )
            for part in parts
        ]
        tables += [*gap, draw((title, "time", "interval", "of token", "weights", "of ceiling"), rows, left=1)]
    flags = f"; {', '.join(entry['flags'])}" if entry["flags"] else ""
    of_format = f" in {entry['quant']}" if "quant" in entry else ""  # of an export folder
    return "\n".join(
        [
            f"a token{of_format} at depth {entry['depth']} with {entry['threads']} threads: {seconds_text(token)}; "
            f"read bandwidth {entry['bytes_per_s']['median'] / 1e9:.1f} GB/s{flags}",
            *tables,
            *gap,
            "an operation's time is what a token is shorter by without it; everything else is norms, attention, barriers",
        ]
    )


def _share(share: Mapping[str, Any] | None) -> str:
    return "" if share is None else f"{share['median']:.0%}"


def _time(seconds: float) -> str:
    return f"-{seconds_text(-seconds)}" if seconds < 0 else seconds_text(seconds)
