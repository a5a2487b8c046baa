"""Does the measuring protocol find differences between equal things, and how far does the same thing move within minutes?

    python benchmarks/aa.py                      some 3 minutes; store, print
    python benchmarks/aa.py --no-measure         print the newest stored run

An A/A test: one model is timed as two subjects by the protocol that every timing of the product goes through, and the 95 %
interval of their ratio should hold 1. Over many pairs it may miss 1 in one case of twenty. Pairs come in turns over the models,
each opened anew, so the medians of one model, minutes apart, also tell how well a time repeats on this machine: where its
arrays lie against the caches is another each time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from runs import RESULTS, commit, stored_at, warm_kernels, write_lines

from deepthin.engine.errors import DeepthinError, FormatError
from deepthin.engine.shape import Shape

SCHEMA = "deepthin/aa-benchmark/1"
ENDING = "-aa"
MODELS = {  # from all caches to memory, from few to many layers
    "48x128 q8_0": "L=48,d=128,heads=4,kv=2,ff=384,vocab=2048,tied",
    "12x512 q8_0": "L=12,d=512,heads=8,kv=4,ff=1536,vocab=8192,tied",
    "30x576 q4_0": "L=30,d=576,heads=9,kv=3,ff=1536,vocab=49152,tied",
}
ALLOWED = 0.05  # of the pairs may differ


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="pairs of each model and thread count (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one pair (default: %(default)s)")
    parser.add_argument("--no-measure", action="store_true", help="print the newest stored run")
    options = parser.parse_args(argv)
    try:
        if not options.no_measure:
            lines = measure(options.turns, options.seconds)
            print(f"stored in {write_lines(stored_at(lines[0], RESULTS, ENDING), lines)}", file=sys.stderr)
        else:
            lines = newest()
        print(report(lines))
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure(turns: int, seconds: float) -> list[dict[str, Any]]:
    """One line per pair."""
    from deepthin.engine.cores import default_threads
    from deepthin.profiles.machine import machine_record
    from deepthin.profiles.probe_shapes import ProbeModel
    from deepthin.profiles.probing import open_engine
    from deepthin.profiles.protocol import Instruments, Rule
    from deepthin.profiles.protocol import measure as timed

    warm_kernels()
    base = {"schema": SCHEMA, **commit(), "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    base["machine"] = machine_record()
    lines = []
    for turn in range(turns):
        for name, text in MODELS.items():
            for threads in sorted({1, default_threads()}):
                model = ProbeModel(Shape.parse(text), name.split()[1])
                with closing(open_engine(model, threads)) as opened:
                    subject = opened.decode(0)[0]
                    subjects = {"a": subject, "b": subject}
                    tools = Instruments.real(threads=threads)
                    session = timed(subjects, Rule(rounds=11, budget_s=seconds), instruments=tools)
                lines.append(
                    {
                        **base,
                        "turn": turn,
                        "model": name,
                        "threads": threads,
                        "ratio": session.speed_ratio("a", "b", "seconds").to_json(),
                        "seconds": {key: session.measured(key, "seconds").to_json() for key in subjects},
                        "sentinel_s": list(session.sentinel_s),
                        "flags": list(session.flags),
                    }
                )
        print(f"turn {turn + 1} of {turns}", file=sys.stderr)
    return lines


def newest() -> list[dict[str, Any]]:
    """The run stored last on any machine.

    Raises:
        FormatError: there is none.
    """
    found = sorted(RESULTS.glob(f"*/*{ENDING}.jsonl"), key=lambda path: path.name)
    if not found:
        raise FormatError(f"{RESULTS}: no run is stored; run without --no-measure first")
    return [json.loads(line) for line in found[-1].read_text(encoding="utf-8").splitlines()]


def differs(line: Mapping[str, Any]) -> bool:
    """Whether the interval of a pair's ratio leaves 1 out."""
    return not line["ratio"]["ci_low"] <= 1.0 <= line["ratio"]["ci_high"]


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: by model and threads the pairs, how many differ, widths, and how far medians move."""
    rows = [
        "| model | threads | pairs | differ | width of the ratio's interval | medians move by (median, p90) | flagged |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for model, threads in dict.fromkeys((line["model"], line["threads"]) for line in lines):
        mine = [line for line in lines if (line["model"], line["threads"]) == (model, threads)]
        rows.append(f"| {model} | {threads} | {_cells(mine)} |")
    rows.append(f"| all | | {_cells(lines, moves=False)} |")
    return "\n".join([*rows, "", f"Allowed to differ: {ALLOWED:.0%}."])


def _cells(lines: Sequence[Mapping[str, Any]], *, moves: bool = True) -> str:
    widths = [(line["ratio"]["ci_high"] - line["ratio"]["ci_low"]) / line["ratio"]["median"] for line in lines]
    count, flagged = sum(map(differs, lines)), sum(bool(line["flags"]) for line in lines)
    medians = np.array([line["seconds"]["a"]["median"] for line in lines])
    gaps = np.abs(medians / np.median(medians) - 1)
    moved = f"{np.median(gaps):.1%}, {np.quantile(gaps, 0.9):.1%}" if moves else ""
    return f"{len(lines)} | {count} ({count / len(lines):.0%}) | {np.median(widths):.1%} | {moved} | {flagged / len(lines):.0%}"


if __name__ == "__main__":
    sys.exit(main())
