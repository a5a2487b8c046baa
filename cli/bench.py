"""``deepthin bench SOURCE``: tokens per second here, against peers on the same weights, beside the memory's ceiling."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepthin.cli.arguments import MAX_CONTEXT, add_source, listed, one_of, parse_threads, real, whole
from deepthin.cli.outcome import Outcome
from deepthin.cli.progress import Progress
from deepthin.cli.sizes import bytes_text
from deepthin.cli.source import open_source, require_runnable
from deepthin.cli.table import table
from deepthin.engine.errors import UnsupportedError, UsageError
from deepthin.engine.formats import BODY_QUANTS
from deepthin.engine.kv_cache import CACHE_FORMATS

if TYPE_CHECKING:
    from deepthin.engine.model import Model

PEERS = ("llama.cpp", "onnxruntime")
EXAMPLES = """examples:
  deepthin bench model.gguf --against llama.cpp,onnxruntime
  deepthin bench model.gguf --quant q8_0 --threads 1,2,4 --gen 64 --prompt 0
  deepthin bench smollm2-135m --depth 1024              random weights in a known shape
  deepthin bench L=15,d=768,heads=12,kv=4,ff=2048,vocab=49152,tied --json

tg128 is 128 single-token steps, pp256 a prompt of 256 tokens, as in llama-bench. Runtimes take turns within each round; an
interval wider than 3 % is measured again or flagged. The share is weight bytes per token x tok/s over the read bandwidth.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    add_source(parser)
    parser.add_argument("--quant", choices=BODY_QUANTS, help="convert the weights first (default: as stored, else q4_0)")
    parser.add_argument(
        "--threads",
        type=listed(parse_threads),
        metavar="N,N,..",
        help="thread counts (default: every CPU this process may use)",
    )
    parser.add_argument(
        "--prompt", type=whole(0, 1 << 20), default=256, metavar="N", help="prompt tokens; 0 leaves it out (256)"
    )
    parser.add_argument("--gen", type=whole(0, 1 << 20), default=128, metavar="N", help="decoded tokens; 0 leaves it out (128)")
    parser.add_argument("--depth", type=whole(0, 1 << 20), default=0, metavar="N", help="tokens cached before timing (0)")
    parser.add_argument(
        "--kv", choices=list(CACHE_FORMATS), default="f16", help="how the engine caches keys and values (default: %(default)s)"
    )
    parser.add_argument(
        "--against", type=one_of(*PEERS), default=[], metavar="R,R", help=f"peers to time too, of {','.join(PEERS)}"
    )
    parser.add_argument(
        "--repetitions", type=whole(1, 1000), default=9, metavar="N", help="interleaved rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s", type=real(0, 1e6), default=60.0, metavar="S", help="seconds a test may be repeated for (60)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of random tokens and weights (default: 0)")


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Time SOURCE.

    Raises:
        DeepthinError: SOURCE cannot be read, or the engine cannot run it.
    """
    if options.depth + max(options.prompt, options.gen) > MAX_CONTEXT:
        raise UsageError(
            f"--depth with --prompt or --gen is over {MAX_CONTEXT} tokens, the most this engine caches; ask for less"
        )
    source = open_source(options.source)
    require_runnable(source.shape)
    progress("reading weights" if source.model is not None else "making random weights")
    model = source.weights(seed=options.seed, quant=options.quant)
    progress("loading kernels (compiled once per machine)")
    from deepthin.engine.decoder import default_threads
    from deepthin.export.gguf_writer import write_gguf
    from deepthin.profiles.bench import BenchConfig, bench

    config = BenchConfig(
        threads=tuple(options.threads or (default_threads(),)),
        prompt=options.prompt,
        gen=options.gen,
        depth=options.depth,
        against=tuple(options.against),
        repetitions=options.repetitions,
        budget_s=options.budget_s,
        seed=options.seed,
        kv_format=options.kv,
    )
    is_own_gguf = source.model is not None and options.quant is None and Path(options.source).is_file()
    body = bench(
        model,
        config,
        files={"llama.cpp": Path(options.source)} if is_own_gguf else {},
        writers={"llama.cpp": write_gguf, "onnxruntime": _write_onnx},
        progress=progress,
    )
    return Outcome("bench", {"source": options.source, **body}, bench_text(body))


def _write_onnx(model: Model, path: Path) -> None:
    """Write ``model`` as onnxruntime runs it fastest: 8-bit activations beside quantised weights, as engine and llama.cpp do.

    Raises:
        UnsupportedError: the file would hold other weights than the model, or the shape has no operator.
    """
    from deepthin.export.onnx_model import write_onnx
    from deepthin.export.onnx_weights import BITS

    halves = sorted({tensor.format.name for tensor in model.tensors.values()} - {"f32", *BITS})
    if halves:
        raise UnsupportedError(
            f"our ONNX files hold {halves[0]} weights as f32, so this would compare unequal bytes; try --quant f32 or q8_0"
        )
    write_onnx(model, path, accuracy_level=4)


def bench_text(body: Mapping[str, Any]) -> str:
    """One row per runtime, test and thread count, then who did not run, and the ceilings."""
    rows, notes = [], []
    for result in body["results"]:
        if result["status"] != "ran":
            notes.append(
                f"{result['runtime']} {result['status']} ({result['test']}, {result['threads']} threads): {result['why']}"
            )
            continue
        rate, share, ratio = result["tok_s"], result["roofline_share"], result["ratio_to_engine"]
        rows.append(
            (
                result["runtime"],
                result["test"],
                result["threads"],
                f"{rate['median']:.1f}",
                f"{rate['ci_low']:.1f}..{rate['ci_high']:.1f}",
                "" if result["bytes_per_token"] is None else bytes_text(result["bytes_per_token"]),
                "" if share is None else f"{share['median']:.0%}",
                "" if ratio is None else f"{ratio['median']:.2f}",
                ", ".join(result["flags"]),
            )
        )
    headers = ("runtime", "test", "threads", "tok/s", "interval", "bytes/token", "of ceiling", "x engine", "flags")
    lines = [f"{body['shape']['text']}, {body['quant']}", table(headers, rows, left=2), *notes]
    for ceiling in body["bandwidth"]:
        rate = ceiling["bytes_per_s"]["median"]
        lines.append(
            f"read bandwidth with {ceiling['threads']} threads over {bytes_text(ceiling['num_bytes'])}: {rate / 1e9:.1f} GB/s"
        )
    return "\n".join(lines)
