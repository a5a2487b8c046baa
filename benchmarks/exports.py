"""Exported files against their own f32 sibling, in each runtime that loads them: what a format costs or gains.

    python benchmarks/exports.py                                     both models, three runtimes; store, print the table
    python benchmarks/exports.py --models 60m --runtimes onnxruntime --threads 2       one part, added to today's results
    python benchmarks/exports.py --no-measure --docs                 rewrite the table of docs/exports.md from stored results

The files are those of ``deepthin export``. All formats of one runtime take turns within each round, every one in a process of
its own, so that a ratio is made of pairs of one round. One JSON line per file, test and thread count goes to
``results/<machine>/<date>-<commit>-exports.jsonl``; runs of one day and commit add up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from runs import RESULTS, ROOT, commit, stored_at, write_lines

from deepthin.engine.errors import DeepthinError, UsageError

SCHEMA = "deepthin/exports-benchmark/1"
ENDING = "-exports"
REAL = "smollm2-135m"
SHAPES = {"60m": "L=12,d=512,heads=8,kv=4,ff=1408,vocab=49152,tied"}  # random weights
MODELS = (REAL, *SHAPES)
QUANTS = ("f32", "f16", "q8_0", "q4_0", "q4_1")
RUNTIMES = ("onnxruntime", "genai", "llama.cpp")
SIBLING = "f32"
SETTLE_S = 0.05  # threads of the one before spin for some milliseconds
MARKS = ("<!-- results -->", "<!-- /results -->")


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    try:
        lines = measure(options, arguments) if options.measure else newest(RESULTS)
        text = render(lines)
        print(text)
        if options.docs:
            rewrite(ROOT / "docs" / "exports.md", render(newest(RESULTS)))
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--quants", default=",".join(QUANTS), help="comma-separated; f32 is always among them")
    parser.add_argument("--threads", default="1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--gen", type=int, default=32, help="tokens decoded (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds per batch (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=20.0, help="seconds per case for more batches (default: %(default)s)")
    parser.add_argument("--files", type=Path, help="folder that keeps the exports made (default: a temporary one)")
    parser.add_argument("--no-save", dest="save", action="store_false", help="do not store the results")
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="use the newest stored results")
    parser.add_argument("--docs", action="store_true", help="rewrite the table of docs/exports.md from stored results")
    return parser


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Time every file asked for, storing as it goes; returns the lines of this run.

    Raises:
        UsageError: an unknown model or runtime.
        DeepthinError: a model cannot be exported, or a runtime refuses a file.
    """
    from deepthin.profiles.machine import machine_record

    models, runtimes = options.models.split(","), options.runtimes.split(",")
    quants = list(dict.fromkeys([SIBLING, *options.quants.split(",")]))
    for name, known in [*((name, MODELS) for name in models), *((name, RUNTIMES) for name in runtimes)]:
        if name not in known:
            raise UsageError(f"{name!r} is none of {', '.join(known)}")
    head = {
        "schema": SCHEMA,
        "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python benchmarks/exports.py", *_public(arguments)]),
        **commit(),
        "machine": machine_record(),
    }
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = options.files or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepthin-exports-")))
        for name in models:
            bundle = exported(name, quants, folder)
            for runtime, threads in itertools.product(runtimes, map(int, options.threads.split(","))):
                print(f"{name}: {runtime}, {threads} threads", file=sys.stderr)
                new = [{**head, "model": name, **line} for line in timed(bundle, runtime, threads, options)]
                lines += new
                if options.save:
                    save(new)
    return lines


def exported(name: str, quants: Sequence[str], folder: Path) -> Path:
    """The bundle of model ``name`` in ``folder``, made unless it is there."""
    from deepthin.engine.load import load_model
    from deepthin.engine.model import random_model
    from deepthin.engine.shape import Shape
    from deepthin.export.bundle import export_bundle

    bundle = folder / name
    if bundle.is_dir():
        return bundle
    if name in SHAPES:
        model = random_model(Shape.parse(SHAPES[name]), seed=0)
    else:
        from speed_models import smollm2_path

        model = load_model(smollm2_path())
    export_bundle(model, bundle, targets=("genai", "gguf"), quants=quants)
    return bundle


def timed(bundle: Path, runtime: str, threads: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line for each format of ``bundle`` and test, all timed in the same rounds."""
    from deepthin.export.exported import exported_models
    from deepthin.export.manifest import read_manifest
    from deepthin.profiles.contestants import Peer
    from deepthin.profiles.protocol import Instruments, Rule, measure

    shape = read_manifest(bundle).shape
    rule = Rule(rounds=options.rounds, budget_s=options.budget_s, settle_s=SETTLE_S)
    lines = []
    with ExitStack() as stack:
        peers, sizes = {}, {}
        for model in exported_models(bundle):
            path = model.files[runtime]
            peers[model.quant] = stack.enter_context(closing(Peer(runtime, path, threads, max(options.prompt, options.gen))))
            sizes[model.quant] = sum(each.stat().st_size for each in ([path] if path.is_file() else path.glob("model.onnx*")))
        for test, count in ((f"pp{options.prompt}", options.prompt), (f"tg{options.gen}", options.gen)):
            subjects = {quant: _subject(peer, test, count, shape.vocab_size) for quant, peer in peers.items()}
            pids = [peer.pid for peer in peers.values()]
            session = measure(subjects, rule, instruments=Instruments.real(pids, threads))
            for quant in subjects:
                if quant in session.failures:
                    print(f"{runtime} {quant}: {session.failures[quant]}", file=sys.stderr)
                    continue
                lines.append(
                    {
                        "shape": shape.text,
                        "runtime": runtime,
                        "runtime_version": peers[quant].version,
                        "quant": quant,
                        "file_bytes": sizes[quant],
                        "threads": threads,
                        "test": test,
                        "tok_s": session.rate(quant, "seconds", count, "tok/s").to_json(),
                        "ratio_to_f32": session.speed_ratio(quant, SIBLING, "seconds").to_json(),
                        "flags": list(session.flags_of(quant, "seconds")),
                    }
                )
    return lines


def _subject(peer: Any, test: str, count: int, vocab: int) -> Callable[[], Mapping[str, float]]:
    seeds = itertools.count(1)

    def run() -> Mapping[str, float]:
        ids = np.random.Generator(np.random.PCG64(next(seeds))).integers(0, vocab, count).tolist()
        return {"seconds": (peer.prompt if test.startswith("pp") else peer.decode)(ids, ())}

    return run


def _public(arguments: Iterable[str]) -> list[str]:
    """The arguments without the folder of files, which is nobody's business."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--files" and not argument.startswith("--files="):
            kept.append(argument)
        skip = argument == "--files"
    return kept


def case(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a line is about; a later one of the same takes its place."""
    return tuple(line[key] for key in ("model", "runtime", "quant", "threads", "test"))


def save(lines: Sequence[Mapping[str, Any]]) -> Path:
    """Add ``lines`` to the results of their day and commit."""
    path = stored_at(lines[0], RESULTS, ENDING)
    held = {case(line): line for line in read(path)} | {case(line): line for line in lines}
    return write_lines(path, held.values())


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of ``path``, none if it is not there."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def newest(results: Path) -> list[dict[str, Any]]:
    """The stored run that was made last.

    Raises:
        UsageError: there is none.
    """
    runs = [lines for path in sorted(results.glob(f"*/*{ENDING}.jsonl")) if (lines := read(path))]
    if not runs:
        raise UsageError("there are no stored results; run without --no-measure first")
    return max(runs, key=lambda lines: max(line["created_utc"] for line in lines))


def render(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, one row for each file, both thread counts in a cell; then machine, versions and flags."""
    threads = sorted({line["threads"] for line in lines})
    tests = list(dict.fromkeys(line["test"] for line in lines))
    columns = [f"{text} {test}" for test in tests for text in ("tok/s", "times f32,")]
    rows = ["| model | runtime | format | MB | " + " | ".join(columns) + " |", "|---|---|---|--:|" + "--:|" * len(columns)]
    found = {case(line): line for line in lines}
    marks: dict[tuple[str, ...], str] = {}
    for model, runtime, quant in dict.fromkeys((line["model"], line["runtime"], line["quant"]) for line in lines):
        cells, size = [], 0
        for test in tests:
            here = [found.get((model, runtime, quant, count, test)) for count in threads]
            size = next((line["file_bytes"] for line in here if line), size)
            cells.append(" / ".join(f"{line['tok_s']['median']:.4g}" if line else "" for line in here))
            cells.append("" if quant == SIBLING else " / ".join(_ratio(line, marks) for line in here))
        rows.append(f"| {model} | {runtime} | {quant} | {size / 1e6:.1f} | " + " | ".join(cells) + " |")
    first = lines[0]
    machine = first["machine"]
    versions = dict.fromkeys(f"{line['runtime']} {line['runtime_version']}" for line in lines)
    about = (
        f"Threads: {' / '.join(map(str, threads))}. Medians; ratios with 95 % intervals, from pairs of one round, "
        f"above 1 is faster than the f32 file of the same weights. Measured {first['created_utc'][:10]} on "
        f"{machine.get('cpu_model', machine['arch'])} "
        f"({machine['usable_cpus']} CPUs, {machine['simd']}, {machine['os']}), commit {first['commit']}, "
        f"{', '.join(versions)}, `{first['command'].split(' --')[0]}`."
    )
    flags = "; ".join(f"[{mark}] {', '.join(names)}" for names, mark in marks.items())
    return "\n".join([*rows, "", about, *([f"Flagged by the measuring protocol: {flags}."] if flags else [])])


def _ratio(line: Mapping[str, Any] | None, marks: dict[tuple[str, ...], str]) -> str:
    if line is None:
        return ""
    ratio = line["ratio_to_f32"]
    mark = f" [{marks.setdefault(tuple(line['flags']), chr(ord('a') + len(marks)))}]" if line["flags"] else ""
    return f"{ratio['median']:.2f} ({ratio['ci_low']:.2f}..{ratio['ci_high']:.2f}){mark}"


def rewrite(path: Path, text: str) -> None:
    """Put ``text`` between the marks in ``path``.

    Raises:
        UsageError: the marks are not there.
    """
    whole = path.read_text(encoding="utf-8")
    before, start, rest = whole.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not start or not end:
        raise UsageError(f"{path}: the marks {MARKS[0]} and {MARKS[1]} are missing")
    path.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
