"""How well latency is predicted: a profile of this machine against shapes that were never used in fitting it.

    python benchmarks/prediction.py --budget-s 600      measure for so long, append, print what there is; repeat to continue
    python benchmarks/prediction.py --report            print the tables of what is stored, write docs/prediction.md
    python benchmarks/prediction.py --sample            also rewrite the committed sample that a test holds the model to

Measured in this order, each into one line of ``results/<machine>/prediction.jsonl``: the profile (as ``deepthin profile
measure`` makes it), the probe kit on llama.cpp and onnxruntime as if they were a foreign device, then 64 held-out models on
every runtime and thread count, and a second time, which gives the noise floor; the truth is pooled over all visits. A line's
key says what it is; what is there is not measured again, so a run may be stopped at any point. Profile and measurements belong
together only if the engine is the same: lines of another engine are passed over, but for those of held-out models on other
runtimes. The truth is the ordinary decoder with real
packed weights, not the synthetic one that probes use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from charts import chart
from prediction_measuring import PROFILE, held_out_probes, measure, pooled, read_lines

from deepthin.engine.errors import DeepthinError, FormatError
from deepthin.profiles.importing import import_profile
from deepthin.profiles.latency.curve import BandwidthCurve
from deepthin.profiles.latency.evaluation import REGIMES, Comparison, compare, noise_floor, regime, summary
from deepthin.profiles.latency.model import is_disturbed
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.runtimes import ENGINE, LLAMA_CPP, ONNXRUNTIME
from deepthin.profiles.latency.workload import DECODE, PREFILL
from deepthin.profiles.llama_bench_rows import parse_rows
from deepthin.profiles.machine import last_level_cache_bytes, machine_name, machine_record
from deepthin.profiles.measuring import DEFAULT_BUDGET_S, fit_models
from deepthin.profiles.probe_plans import KIT_PLAN
from deepthin.profiles.profile import Profile

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT, FIGURES = ROOT / "docs" / "prediction.md", ROOT / "docs"
SAMPLE = ROOT / "tests" / "profiles" / "latency" / "sample.json"
TARGETS = {ENGINE: (0.023, 0.99), LLAMA_CPP: (0.10, 0.97), ONNXRUNTIME: (0.10, 0.97)}  # median error, Spearman
TARGET_TTFT = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    options = _parser().parse_args(argv)
    machine = machine_record()
    path = options.data or RESULTS / machine_name(machine) / "prediction.jsonl"
    try:
        if not options.report and not options.sample:
            measure(path, machine, options.budget_s, options.profile_s)
        lines = read_lines(path)
        print(report(lines))
        if options.report or options.sample:
            write_documents(
                [lines] if options.data else [read_lines(one) for one in sorted(RESULTS.glob("*/prediction.jsonl"))]
            )
        if options.sample:
            SAMPLE.write_text(json.dumps(sample(lines)) + "\n", encoding="utf-8")
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=600.0, help="stop measuring after so many seconds (%(default)s)")
    parser.add_argument(
        "--profile-s", type=float, default=DEFAULT_BUDGET_S, help="seconds for the profile itself (%(default)s)"
    )
    parser.add_argument("--data", type=Path, help="JSON lines to add to (default: results/<machine>/prediction.jsonl)")
    parser.add_argument("--report", action="store_true", help="measure nothing; write docs/prediction.md")
    parser.add_argument("--sample", action="store_true", help="measure nothing; write the committed sample too")
    return parser


def profile_of(lines: Sequence[Mapping[str, Any]]) -> Profile:
    """The stored profile, its models fitted anew by this version of the code.

    Raises:
        FormatError: there is none yet.
    """
    for line in lines:
        if line["key"] == PROFILE:
            document = line["profile"]
            curve = BandwidthCurve.from_json(document["bandwidth"])
            probes = [Probe.from_json(probe) for probe in document["probes"]]
            return refitted(document, curve, probes)
    raise FormatError("prediction: no profile was measured yet; run without --report first")


def refitted(document: Mapping[str, Any], curve: BandwidthCurve, probes: Sequence[Probe]) -> Profile:
    """A profile with models fitted to ``probes`` now."""
    return Profile(
        name=document["name"],
        title=document["title"],
        basis="measured",
        created_utc=document["created_utc"],
        machine=document["machine"],
        curve=curve,
        models=fit_models(probes, curve),
        probes=tuple(probes),
        flags=tuple(document["flags"]),
        noise=document["noise"],
        wall_s=document["wall_s"],
    )


def truths(lines: Sequence[Mapping[str, Any]]) -> list[Probe]:
    """The times to judge by: each pooled over both turns, without those of which no visit was undisturbed."""
    taken = [probe for turn in (1, 2) for probe in held_out_probes(lines, turn)]
    return [probe for probe in pooled(taken) if not is_disturbed(probe)]


def comparisons(profile: Profile, held: Sequence[Probe]) -> list[Comparison]:
    """Every held-out measurement that the profile has a model for."""
    return [one for model in profile.models for one in compare(model, held)]


def foreign_profile(lines: Sequence[Mapping[str, Any]], runtime: str) -> Profile | None:
    """The kit's rows of ``runtime`` as the profile of a device that is not here."""
    rows = [row for line in lines if line["key"].startswith(f"kit {runtime} ") for row in line["rows"]]
    return import_profile(parse_rows(json.dumps(rows), "kit"), "foreign") if rows else None


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """The tables of what is stored, as Markdown; what was taken while others used the machine is counted and left out."""
    profile = profile_of(lines)
    turns = [held_out_probes(lines, turn) for turn in (1, 2)]
    taken = [probe for turn in turns for probe in turn]
    calm, again = ([probe for probe in pooled(turn) if not is_disturbed(probe)] for turn in turns)
    truth = truths(lines)
    found = comparisons(profile, truth)
    cache = last_level_cache_bytes(profile.machine) or 32 << 20
    flags = f"; flagged {', '.join(profile.flags)}" if profile.flags else ""
    shapes = len({probe.work.shape.text for probe in taken})
    text = [
        f"Machine: {profile.title} ({machine_name(profile.machine)}). "
        f"Profile: {len(profile.probes)} probes in {profile.wall_s:.0f} s{flags}. "
        f"Held out: {shapes} shapes, {len(pooled(taken))} times of {len(taken)} visits; {sum(map(is_disturbed, taken))} visits "
        f"were made while others used the machine and are left out, which leaves {len(truth)} times."
        f"{_taken_before(lines, profile)}",
    ]
    text += _both(found, calm, again, "Within what the profile's probes cover (sizes, depths, contexts, formats):")
    by_regime = _rows_by_regime(found, cache)
    if by_regime:
        text += ["", "Decoding, by where the model lies against the last-level cache:", "", table(REGIME_HEADERS, by_regime)]
    foreign = [
        one for runtime in KIT_PLAN if (kit := foreign_profile(lines, runtime)) is not None for one in comparisons(kit, truth)
    ]
    if foreign:
        text += ["", "### From the probe kit alone, as for a device that is not here"]
        text += _both(foreign, calm, again, "Within what the kit's probes cover:")
    return "\n".join(text)


def _taken_before(lines: Sequence[Mapping[str, Any]], profile: Profile) -> str:
    """What there is to say of held-out models that were timed before the profile was measured anew, for another engine."""
    made = datetime.fromisoformat(profile.created_utc)
    when = [datetime.fromisoformat(line["created_utc"]) for line in lines if line["key"].startswith("held-out ")]
    hours = [(made - one).total_seconds() / 3600 for one in when if one < made]
    if not hours:
        return ""
    return f" {len(hours)} sessions of other runtimes are {min(hours):.1f} to {max(hours):.1f} hours older than the profile."


def _both(found: Sequence[Comparison], calm: Sequence[Probe], again: Sequence[Probe], title: str) -> list[str]:
    """A table of what was probed, and one of what predictions call extrapolated."""
    inside = [one for one in found if not one.is_extrapolated]
    outside = [one for one in found if one.is_extrapolated]
    text = ["", title, "", table(HEADERS, _rows_by_runtime(inside, calm, again))]
    if outside:
        text += [
            "",
            "Beyond it, where each prediction says `extrapolated`:",
            "",
            table(HEADERS, _rows_by_runtime(outside, calm, again)),
        ]
    return text


HEADERS = (
    "runtime",
    "test",
    "threads",
    "n",
    "median",
    "p90",
    "max",
    "within 15 %",
    "Spearman",
    "90 % intervals hold",
    "noise floor",
    "target",
)
REGIME_HEADERS = ("runtime", "regime", "n", "median", "p90", "max", "bias")


def _rows_by_runtime(found: Sequence[Comparison], first: Sequence[Probe], second: Sequence[Probe]) -> list[list[str]]:
    rows = []
    for runtime, test, threads in _groups(found):
        mine = [one for one in found if _group(one) == (runtime, test, threads)]
        floor = noise_floor(
            [p for p in first if (p.runtime, p.work.test, p.threads) == (runtime, test, threads)],
            [p for p in second if (p.runtime, p.work.test, p.threads) == (runtime, test, threads)],
        )
        rows.append(_row(runtime, test, threads, summary(mine), floor))
    return rows


def _row(runtime: str, test: str, threads: int, figures: Mapping[str, Any], floor: Mapping[str, float] | None) -> list[str]:
    wanted, rank = TARGETS[runtime]
    target = f"median {wanted:.1%}, rank {rank}" if test == DECODE else f"median {TARGET_TTFT:.0%}" if runtime == ENGINE else ""
    correlation = figures["spearman"]
    return [
        runtime,
        {DECODE: "token", PREFILL: "prompt"}[test],
        str(threads),
        str(figures["n"]),
        *(f"{figures[name]:.1%}" for name in ("median", "p90", "max", "within_15")),
        "" if correlation is None else f"{correlation:.3f}",
        f"{figures['coverage']:.0%}",
        "" if floor is None else f"{floor['median']:.1%} (p90 {floor['p90']:.1%})",
        target,
    ]


def _rows_by_regime(found: Sequence[Comparison], cache: int) -> list[list[str]]:
    rows = []
    for runtime in dict.fromkeys(one.probe.runtime for one in found):
        for name in REGIMES:
            mine = [
                one
                for one in found
                if one.probe.runtime == runtime and one.probe.work.test == DECODE and regime(one.probe.work, cache) == name
            ]
            if mine:
                figures = summary(mine)
                rows.append(
                    [
                        runtime,
                        name,
                        str(figures["n"]),
                        *(f"{figures[k]:.1%}" for k in ("median", "p90", "max")),
                        f"{figures['bias']:+.1%}",
                    ]
                )
    return rows


def _group(one: Comparison) -> tuple[str, str, int]:
    return one.probe.runtime, one.probe.work.test, one.probe.threads


def _groups(found: Sequence[Comparison]) -> list[tuple[str, str, int]]:
    return list(dict.fromkeys(_group(one) for one in found))


def write_documents(machines: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Write docs/prediction.md from the lines of each machine, and a figure for each."""
    DOCUMENT.parent.mkdir(exist_ok=True)
    for lines in machines:
        (FIGURES / _figure_name(lines)).write_text(figure(lines), encoding="utf-8")
    DOCUMENT.write_text(document(machines), encoding="utf-8")


def _figure_name(lines: Sequence[Mapping[str, Any]]) -> str:
    return f"prediction-{machine_name(profile_of(lines).machine)}.svg"


def document(machines: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The page."""
    text = [
        "# How well latency is predicted",
        "",
        "Written by `python benchmarks/prediction.py --report`; do not edit. Errors are |predicted / measured - 1| over",
        "shapes that no fit has seen: random widths, depths, vocabularies, formats and contexts. A time is the median of",
        "some visits spread over the run. The noise floor is how far the same measurement moves when it is taken again",
        "later in the run, as far as others left the machine alone; no prediction can be judged much more finely.",
        "Terms, and what is likely of each runtime before probing, were chosen with other shapes on the AMD EPYC; with those",
        "of the Xeon only faults were found and mended. These, a quieter run on the EPYC, and what each term is worth are in",
        "[LOG.md](../LOG.md); the EPYC's figures are of the engine before.",
    ]
    for lines in machines:
        name = machine_name(profile_of(lines).machine)
        text += ["", f"## {name}", "", report(lines), "", f"![predicted against measured]({_figure_name(lines)})"]
    return "\n".join([*text, ""])


def figure(lines: Sequence[Mapping[str, Any]]) -> str:
    """Predicted against measured milliseconds per token, as SVG."""
    found = [one for one in comparisons(profile_of(lines), truths(lines)) if one.probe.work.test == DECODE]
    series = {
        f"{runtime}, {threads} threads": [
            (1e3 * one.probe.seconds.median, 1e3 * one.predicted.value)
            for one in found
            if _group(one) == (runtime, test, threads)
        ]
        for runtime, test, threads in _groups(found)
    }
    return chart(
        "Time per token of held-out shapes", "measured, ms", "predicted, ms", series, log_x=True, log_y=True, diagonal=True
    )


def sample(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The committed sample: bandwidth, probes and held-out times, thinned, with the errors they give now."""
    profile = profile_of(lines)
    held = truths(lines)
    found = {}
    for runtime, test, threads in _groups(comparisons(profile, held)):
        mine = [one for one in comparisons(profile, held) if _group(one) == (runtime, test, threads)]
        found[f"{runtime} {test} {threads}"] = summary(mine)["median"]
    return {
        "schema": "deepthin/prediction-sample/1",
        "machine": dict(profile.machine),
        "created_utc": profile.created_utc,
        "bandwidth": profile.curve.to_json(),
        "probes": [_thin(probe) for probe in profile.probes],
        "held_out": [_thin(probe) for probe in held],
        "median_errors": found,
    }


def _thin(probe: Probe) -> dict[str, Any]:
    """A probe with its interval but at most three samples."""
    document = probe.to_json()
    seconds = document["seconds"]
    kept = [seconds["ci_low"], seconds["median"], seconds["ci_high"]]
    return {**document, "seconds": {**seconds, "n": 3, "samples": kept}}


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [headers, ["---"] * 2 + ["--:"] * (len(headers) - 2), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
