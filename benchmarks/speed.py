"""Decode and prefill of the engine against llama.cpp: same files, same threads, interleaved, beside the ceiling.

    python benchmarks/speed.py                            SmolLM2-135M in each format; store, print the table
    python benchmarks/speed.py --models 12x768,62x384 --formats q4_0,q8_0     other shapes, added to the same run's results
    python benchmarks/speed.py --tests tg32@d4096 --formats q4_0              decode with 4096 tokens cached
    python benchmarks/speed.py --no-measure --docs        rewrite the tables of README.md and docs/speed.md from stored results

Both sides load the very same GGUF. Before anything is timed their logits must agree along greedy text. One JSON line per
runtime, test, file and thread count goes to ``results/<machine>/<date>-<commit>.jsonl``; runs of one day and commit add up.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from runs import RESULTS, ROOT, commit, stored_at, warm_kernels
from speed_models import REAL, check_names, model_file, short_name
from speed_tables import PEER, SCHEMA, case, newest, ratios, read, render, render_depth, rewrite, save

from deepthin.engine.errors import DeepthinError, UsageError

FORMATS = ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k_m")
_TEST = re.compile(r"(tg|pp)([1-9]\d*)(?:@d([1-9]\d*))?")


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    try:
        lines = measure(options, arguments) if options.measure else newest(RESULTS)[0]
        print(render(lines))
        if depth := render_depth(lines):
            print("\n" + depth)
        if options.docs:
            rewrite_documents(RESULTS, ROOT / "README.md", ROOT / "docs" / "speed.md")
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({"schema": SCHEMA, "lines": len(lines), "ratios": ratios(lines)}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=REAL, help="comma-separated names or GGUF files (default: %(default)s)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--tests", default="tg64,pp256", help="as llama-bench names them, also tg32@d4096 (default: %(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=9, help="interleaved rounds per batch (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=30.0, help="seconds per case for more batches (default: %(default)s)")
    parser.add_argument("--files", type=Path, help="folder that keeps the models made (default: a temporary one)")
    parser.add_argument("--continue", dest="again", action="store_true", help="skip what this commit's results of today hold")
    parser.add_argument("--no-save", dest="save", action="store_false", help="do not store the results")
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="use the newest stored results")
    parser.add_argument(
        "--docs", action="store_true", help="rewrite the tables of README.md and docs/speed.md from stored results"
    )
    return parser


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Time every model and file asked for, storing as it goes; returns the lines of this run.

    Raises:
        VerificationError: llama.cpp computes another model than the engine.
        PeerMissingError: llama.cpp is not installed.
        UsageError: an unknown model, format or test.
    """
    from deepthin.engine.load import load_model
    from deepthin.profiles.bench import bench
    from deepthin.profiles.machine import frequencies_hz, machine_record

    models, formats = options.models.split(","), options.formats.split(",")
    check_names(models, formats)
    configs = plan(options)
    start = time.perf_counter()
    warm_kernels()
    head = {
        "schema": SCHEMA,
        "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python benchmarks/speed.py", *_public(arguments)]),
        **commit(),
        "machine": machine_record(),
        "frequencies_hz": frequencies_hz(),
        "kernel_load_s": time.perf_counter() - start,
    }
    path = stored_at(head, RESULTS)
    had = {case(line)[:-1] for line in read(path)} if options.again and path.exists() else set()
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = options.files or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepthin-speed-")))
        folder.mkdir(parents=True, exist_ok=True)
        for name in models:
            for fmt in formats:
                for config in configs:
                    short = short_name(name)
                    cases = {(short, fmt, test.name, threads) for test in config.tests for threads in config.threads}
                    if cases <= had:
                        continue
                    file = model_file(name, fmt, folder)
                    body = bench(
                        load_model(file), config, files={PEER: file}, progress=partial(_say, f"{short} {fmt}"), strict=True
                    )
                    new = [{**head, **record, "model": short, "file": fmt} for record in records(body)]
                    lines += new
                    if options.save:
                        print(f"stored in {save(new, RESULTS).relative_to(ROOT)}", file=sys.stderr)
    if not lines:
        raise UsageError("--continue: everything asked for is stored already; leave --continue out to measure it again")
    return lines


def plan(options: argparse.Namespace) -> list[Any]:
    """One bench per depth, the tests in it crossed as llama-bench crosses them.

    Raises:
        UsageError: a test is not named as llama-bench names it.
    """
    from deepthin.profiles.bench import BenchConfig

    by_depth: dict[int, dict[str, list[int]]] = {}
    for text in options.tests.split(","):
        match = _TEST.fullmatch(text)
        if match is None:
            raise UsageError(f"--tests: {text!r} is no test; give names such as tg64, pp256 or tg32@d4096")
        kind, tokens, depth = match.groups()
        by_depth.setdefault(int(depth or 0), {"tg": [], "pp": []})[kind].append(int(tokens))
    return [
        BenchConfig(
            threads=tuple(int(part) for part in options.threads.split(",")),
            prompt=tuple(tests["pp"]),
            gen=tuple(tests["tg"]),
            depth=(depth,),
            against=(PEER,),
            repetitions=options.repetitions,
            budget_s=options.budget_s,
        )
        for depth, tests in by_depth.items()
    ]


def records(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one bench document, each with what it needs to be understood alone."""
    lines = []
    for row in body["results"]:
        mine = {"test": row["test"], "threads": row["threads"]}
        session = [one for one in body["sessions"] if mine.items() <= one.items()]
        context = {
            "shape": body["shape"]["text"],
            "config": body["config"],
            "agreement": [one for one in body["agreement"] if one["threads"] == row["threads"]],
            "bandwidth": [one for one in body["bandwidth"] if mine.items() <= one.items()],
            "session": session[0] if session else None,
        }
        lines.append({**row, **context})
    return lines


def rewrite_documents(results: Path, readme: Path, docs: Path) -> None:
    """The real model of the newest run goes to the README, every machine's newest run to ``docs``."""
    runs = newest(results)
    rewrite(readme, "results", render(runs[0], models=[REAL]))
    sections = []
    for lines in runs:
        machine = lines[0]["machine"]
        sections.append(f"### {machine.get('cpu_model', machine['arch'])}, {machine['simd']}\n\n{render(lines)}")
        if depth := render_depth(lines):
            sections.append(f"Decode with tokens cached:\n\n{depth}")
    rewrite(docs, "results", "\n\n".join(sections))


def _public(arguments: Sequence[str]) -> list[str]:
    """The arguments that matter to a reader: no folders, nothing about documents."""
    kept: list[str] = []
    skip = False
    for part in arguments:
        if not skip and part not in ("--docs", "--continue") and not part.startswith("--files"):
            kept.append(Path(part).name if "/" in part else part)
        skip = part == "--files"
    return kept


def _say(about: str, text: str) -> None:
    print(f"{about}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
