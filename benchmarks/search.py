"""How much of the true front each way of proposing finds with a twentieth of the evaluations, on spaces listed in full.

    python benchmarks/search.py --budget-s 270        run what is missing for so long, append, print; repeat to continue
    python benchmarks/search.py --report              write the table and the figure of what is stored into docs/
    python benchmarks/search.py --profile FILE        keep FILE (a measured profile) as the one that gives the times

Every distinct shape of a space is scored once, by the quality law and by the times that a measured profile predicts; that gives
the true front. Then each sampler runs as ``deepthin search`` runs it, with 5 % as many evaluations as there are shapes, once
per seed. Reported: the share of the true hypervolume (loss against log time; corner a tenth of the front's extent beyond its
ends), and how much better the product's rule is on the same seeds. Nothing is timed, so any machine gives the same figures.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices; more threads only wait for one another

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from charts import chart
from kept_profile import CONTEXT, keep, kept_profile
from listed_spaces import CostOf, Listing, SpaceSettings
from runs import ROOT

import deepthin.search.run as run_module
from deepthin.engine.errors import UsageError
from deepthin.profiles.predicted_costs import PredictedCosts
from deepthin.profiles.profile import Profile, read_profile
from deepthin.search.config import DEFAULT_PLATEAU
from deepthin.search.plateau import on_plateau
from deepthin.search.sampler import GUIDED, NSGA2, RANDOM, TPE
from deepthin.search.study import SearchStudy

SCHEMA = "deepthin/search-benchmark/2"
SHARE = 0.05
SEEDS = 20
SAMPLERS = (GUIDED, TPE, NSGA2, RANDOM)
BASELINES = (RANDOM, NSGA2)
CHECKPOINTS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05)  # of the space
TARGET = 0.99
LISTINGS = Path(tempfile.gettempdir()) / "deepthin-listings"  # decoded spaces; may be removed at any time
DOCUMENT, FIGURE = ROOT / "docs" / "search.md", ROOT / "docs" / "search.svg"
BEGIN, END = "<!-- results -->", "<!-- /results -->"

SPACES: dict[str, SpaceSettings] = {
    "30M": SpaceSettings(
        "vocabulary, two formats, attention with or without shared keys",
        {
            "params": 30_000_000,
            "vocabs": (4096, 8192, 16384, 32768, 49152),
            "quants": ("q4_0", "q8_0"),
            "head_dims": (64,),
            "kv_groups": (1, 3),
        },
    ),
    "125M": SpaceSettings(
        "key/value heads, head dim, two vocabularies",
        {
            "params": 125_000_000,
            "vocabs": (32768, 49152),
            "quants": ("q4_0",),
            "head_dims": (64, 128),
            "kv_groups": (1, 2, 4, 8),
        },
    ),
    "350MB": SpaceSettings(
        "four formats under a budget in bytes, two vocabularies",
        {
            "bytes": 350_000_000,
            "vocabs": (32768, 65536),
            "quants": ("q4_0", "q5_0", "q8_0", "f16"),
            "head_dims": (64,),
            "kv_groups": (4,),
        },
    ),
}
ROUGHNESS = 0.02  # about what predictions of measured profiles miss by
SPACES["30M rough"] = replace(SPACES["30M"], about="as 30M, each time 2 % off by an error of its own", roughness=ROUGHNESS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start no search after so many seconds")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="searches per space and sampler (default: %(default)s)")
    parser.add_argument("--spaces", default=",".join(SPACES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--samplers", default=",".join(SAMPLERS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--profile", type=Path, help="measured profile to keep and use (default: the one that is kept)")
    parser.add_argument("--data", type=Path, help="file of results (default: search.jsonl beside the profile)")
    parser.add_argument("--report", action="store_true", help="rewrite docs/search.md and docs/search.svg; run nothing")
    options = parser.parse_args(argv)
    path = kept_profile() if options.profile is None else keep(read_profile(options.profile))
    data = options.data or path.with_name("search.jsonl")
    profile = read_profile(path)
    if not options.report:
        run_missing(
            data, profile, options.spaces.split(","), options.samplers.split(","), range(options.seeds), options.budget_s
        )
    lines = read_lines(data)
    text = report(lines, profile)
    print(text)
    if options.report:
        write_report(text, lines)
    return 0


def costs_of(profile: Profile) -> CostOf:
    """Times as ``deepthin search --profile`` predicts them; predicted once a shape."""
    return PredictedCosts(profile, CONTEXT).measure


def run_missing(
    data: Path, profile: Profile, spaces: Sequence[str], samplers: Sequence[str], seeds: Sequence[int], budget_s: float
) -> None:
    """Run every search that ``data`` does not hold and append one line each; a kill loses the one that runs."""
    start, longest = time.monotonic(), 0.0
    for name in spaces:
        listing = Listing(name, SPACES[name], costs_of(profile), LISTINGS)
        print(f"{name}: {len(listing.pairs)} shapes, {len(listing.front)} on the front", file=sys.stderr, flush=True)
        done = {(line["space"], line["digest"], line["sampler"], line["seed"]) for line in read_lines(data)}
        for seed in seeds:
            for sampler in samplers:
                if (name, listing.digest, sampler, seed) in done:
                    continue
                before = time.monotonic()
                if before - start + longest > budget_s:
                    return
                append(data, one_search(listing, sampler, seed) | {"profile": PredictedCosts(profile, CONTEXT).identity})
                longest = max(longest, time.monotonic() - before)


def one_search(listing: Listing, sampler: str, seed: int) -> dict[str, Any]:
    """The stored line of one search."""
    trials = max(1, int(SHARE * len(listing.pairs)))
    config = listing.config(trials=trials, seed=seed, sampler=sampler, context=CONTEXT, plateau=0)
    start = time.process_time()
    in_memory = mock.patch.object(run_module, "SearchStudy", lambda _, *rest, **more: SearchStudy(None, *rest, **more))
    with in_memory, tempfile.TemporaryDirectory(prefix="deepthin-search-") as folder:  # the same proposals, no journal
        document = run_module.run_search(config, measure=listing.cost, out=Path(folder) / "run")
    found = [(one["loss"], math.log(one["ms_per_kchar"])) for one in document["evaluated"]]
    steps = list(enumerate(found))
    stop = next((step for step in range(1, trials) if on_plateau(steps[:step], step, DEFAULT_PLATEAU)), None)
    return {
        "schema": SCHEMA,
        "space": listing.name,
        "digest": listing.digest,
        "shapes": len(listing.pairs),
        "front": len(listing.front),
        "sampler": sampler,
        "seed": seed,
        "evaluations": len(found),
        "distinct": len({(one["shape"], one["quant"]) for one in document["evaluated"]}),
        "share": listing.share(found),
        "course": [listing.share(found[: max(1, int(part * len(listing.pairs)))]) for part in CHECKPOINTS],
        "stop": None if stop is None else {"after": stop, "share": listing.share(found[:stop])},
        "cpu_s": round(time.process_time() - start, 2),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The stored lines; a torn last one is passed over."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return [line for line in lines if line.get("schema") == SCHEMA]


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def latest(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[int, Mapping[str, Any]]]]:
    """Lines by space, sampler and seed; of each space only those of the listing that was stored last."""
    digests = {line["space"]: line["digest"] for line in lines}
    found: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for line in lines:
        if digests[line["space"]] == line["digest"]:
            found.setdefault(line["space"], {}).setdefault(line["sampler"], {})[line["seed"]] = line
    return {name: found[name] for name in (*SPACES, *sorted(found.keys() - SPACES.keys())) if name in found}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % bootstrap interval of it."""
    array = np.asarray(values)
    draws = np.random.Generator(np.random.PCG64(0)).integers(0, len(array), (4000, len(array)))
    low, high = np.quantile(array[draws].mean(axis=1), [0.025, 0.975])
    return float(array.mean()), float(low), float(high)


def report(lines: Sequence[Mapping[str, Any]], profile: Profile) -> str:
    """Everything the stored searches say, in Markdown."""
    spaces = latest(lines)
    if not spaces:
        return "Nothing is stored yet."
    rows = [row for name, samplers in spaces.items() for row in _rows(name, samplers)]
    head = (
        "| space | shapes | evaluations | sampler | median share | worst | mean (95 %) | seeds at 99 % | "
        "guided better (95 %) | guided ahead |\n|---|--:|--:|---|--:|--:|--:|--:|--:|--:|"
    )
    device = f"{profile.title}, {PredictedCosts(profile, CONTEXT).threads} threads, {CONTEXT} cached tokens"
    basis = f"{profile.basis} {profile.created_utc[:10]}"
    parts = [
        "\n".join([head, *rows]),
        "\n".join(f"- **{name}** leaves open: {SPACES[name].about}." for name in spaces if name in SPACES),
        f"Times: the profile of {device} ({basis}). Share: of the true hypervolume. *Guided better by* is the mean difference "
        f"on the same seeds, *guided ahead* counts the seeds where it is above 0.",
        *_stops(spaces),
    ]
    return "\n\n".join(parts)


def _rows(name: str, samplers: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Iterator[str]:
    """Table rows of one space."""
    for sampler in sorted(samplers, key=lambda one: (one not in SAMPLERS, SAMPLERS.index(one) if one in SAMPLERS else 0)):
        found = samplers[sampler]
        shares = [line["share"] for line in found.values()]
        mean, low, high = interval(shares)
        some = next(iter(found.values()))
        guided = samplers.get(GUIDED, {})
        pairs = [(guided[seed]["share"], found[seed]["share"]) for seed in found if seed in guided]
        better = ahead = ""
        if sampler != GUIDED and pairs:
            better = "{:.4f} ({:.4f} to {:.4f})".format(*interval([ours - theirs for ours, theirs in pairs]))
            ahead = f"{sum(ours > theirs for ours, theirs in pairs)} of {len(pairs)}"
        yield (
            f"| {name} | {some['shapes']:,} | {some['evaluations']} | {sampler} | {np.median(shares):.4f} | "
            f"{min(shares):.4f} | "
            f"{mean:.4f} ({low:.4f} to {high:.4f}) | {sum(share >= TARGET for share in shares)} of {len(shares)} | "
            f"{better} | {ahead} |"
        )


def _stops(spaces: Mapping[str, Mapping[str, Mapping[int, Mapping[str, Any]]]]) -> Iterator[str]:
    """What the stopping rule would have done to the guided searches, as one sentence."""
    lines = [line for samplers in spaces.values() for line in samplers.get(GUIDED, {}).values()]
    stops = [line["stop"] for line in lines if line["stop"]]
    if stops:
        after, shares = [stop["after"] for stop in stops], [stop["share"] for stop in stops]
        yield (
            f"Left to itself (`--plateau {DEFAULT_PLATEAU}`), {len(stops)} of {len(lines)} guided searches would have stopped "
            f"early, after {min(after)} to {max(after)} evaluations (median {np.median(after):.0f}), with "
            f"{np.median(shares):.4f} of the true hypervolume (worst {min(shares):.4f})."
        )


def figure(lines: Sequence[Mapping[str, Any]]) -> str:
    """Median missing share over all spaces and seeds, by evaluations, as an SVG document."""
    courses: dict[str, list[Sequence[float]]] = {}
    for samplers in latest(lines).values():
        for sampler, found in samplers.items():
            courses.setdefault(sampler, []).extend(line["course"] for line in found.values())
    series = {
        sampler: [
            (100 * part, max(1e-6, 1 - float(np.median([course[at] for course in courses[sampler]]))))
            for at, part in enumerate(CHECKPOINTS)
        ]
        for sampler in sorted(courses, key=lambda one: SAMPLERS.index(one) if one in SAMPLERS else len(SAMPLERS))
    }
    return chart(
        "True front that is still missing (median of all spaces and seeds)",
        "shapes evaluated, % of the space",
        "share of the true hypervolume missing",
        series,
        log_y=True,
        lines=True,
    )


def write_report(text: str, lines: Sequence[Mapping[str, Any]], document: Path = DOCUMENT, drawing: Path = FIGURE) -> None:
    """Put ``text`` between the markers of ``document`` and draw the figure beside it.

    Raises:
        UsageError: the document has no markers.
    """
    whole = document.read_text(encoding="utf-8")
    if BEGIN not in whole or END not in whole:
        raise UsageError(f"{document}: the lines {BEGIN} and {END} are missing, between which the results stand; add them")
    before, after = whole.partition(BEGIN)[0], whole.partition(END)[2]
    for path, content in ((document, f"{before}{BEGIN}\n{text}\n{END}{after}"), (drawing, figure(lines))):
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text(content, encoding="utf-8")
        os.replace(unfinished, path)


if __name__ == "__main__":
    sys.exit(main())
