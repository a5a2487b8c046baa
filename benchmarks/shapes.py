"""What searches at four sizes say about shapes, with published shapes placed among them: docs/shapes.md and its figure.

    python benchmarks/shapes.py                       run the predicted searches that are missing, append, print
    python benchmarks/shapes.py --measure 60M         also one search of 300 shapes that are timed here (five minutes, quiet)
    python benchmarks/shapes.py --report              write docs/shapes.md and docs/shapes.svg from what is stored

Times come from the measured profile that ``benchmarks/search.py --profile`` keeps. Each search, each sweep over depths and each
published shape is one line of ``results/<machine>/shapes.jsonl``; what is there is not done again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kept_profile import CONTEXT, kept_profile
from runs import commit
from shapes_page import figure, page

from deepthin.engine.accounting import count_params
from deepthin.engine.known_shapes import known_shape
from deepthin.engine.shape import Shape
from deepthin.profiles.predicted_costs import PredictedCosts
from deepthin.profiles.profile import Profile, read_profile
from deepthin.search.config import SearchConfig
from deepthin.search.cost import Cost
from deepthin.search.objectives import Scored
from deepthin.search.quality.model import TIE_BAND
from deepthin.search.run import run_search
from deepthin.search.space import Candidate

SCHEMA = "deepthin/shapes/1"
ROOT = Path(__file__).resolve().parents[1]
DOCUMENT, FIGURE = ROOT / "docs" / "shapes.md", ROOT / "docs" / "shapes.svg"
SIZES = {"60M": 60_000_000, "125M": 125_000_000, "350M": 350_000_000, "900M": 900_000_000}
TRIALS = 300
DEPTHS = (3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 21, 24, 27, 30, 34, 38, 43, 48, 54, 61, 70, 80)
SWEEP: dict[str, Any] = {"vocabs": (16384, 32768, 49152, 65536), "head_dims": (64,), "kv_groups": (1, 3), "quants": ("q4_0",)}
PUBLISHED_QUANTS = ("q4_0", "q8_0")


@dataclass(frozen=True)
class Published:
    """A shape from elsewhere.

    Attributes:
        name: of the model.
        shape: as this engine can run it.
        source: where the numbers stand.
        stand_in: what the shape leaves out or assumes; empty when it is the model's own.
    """

    name: str
    shape: Shape
    source: str
    stand_in: str = ""


def _known(name: str, title: str) -> Published:
    known = known_shape(name)
    return Published(title, known.shape, known.source)


_FLASH = "arXiv 2603.15954: 12 layers, width 1024, MLP 4096"
PUBLISHED = (
    _known("mobilellm-125m", "MobileLLM-125M"),
    _known("mobilellm-350m", "MobileLLM-350M"),
    _known("smollm2-135m", "SmolLM2-135M"),
    _known("smollm2-360m", "SmolLM2-360M"),
    _known("qwen2.5-0.5b", "Qwen2.5-0.5B"),
    Published(
        "LFM2-350M",
        Shape.parse("L=16,d=1024,heads=16,kv=8,ff=4608,vocab=65536,tied"),
        "arXiv 2511.23404, table 1, and the model's configuration",
        "10 of its 16 blocks are gated convolutions; here all 16 have attention",
    ),
    Published(
        "MobileLLM-Flash-350M",
        Shape.parse("L=12,d=1024,heads=16,kv=4,ff=4096,vocab=128256,tied"),
        _FLASH,
        "heads (16, of which 4 key/value) and vocabulary (128,256) assumed as in MobileLLM-R1-360M; attention in every block",
    ),
    Published(
        "MobileLLM-Flash-350M, larger vocabulary",
        Shape.parse("L=12,d=1024,heads=16,kv=4,ff=4096,vocab=202048,tied"),
        _FLASH,
        "as before with the vocabulary of MobileLLM-Pro (202,048)",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no search after so many seconds")
    parser.add_argument("--profile", type=Path, help="profile that gives the times (default: the kept one)")
    parser.add_argument("--data", type=Path, help="file of results (default: shapes.jsonl beside the profile)")
    parser.add_argument("--measure", choices=tuple(SIZES), help="also run one measured search of this size")
    parser.add_argument("--out", type=Path, help="run folder of the measured search (default: a temporary one)")
    parser.add_argument("--report", action="store_true", help="write docs/shapes.md and docs/shapes.svg; run nothing")
    options = parser.parse_args(argv)
    path = options.profile or kept_profile()
    data = options.data or path.with_name("shapes.jsonl")
    if not options.report:
        profile = read_profile(path)
        if options.measure:
            with tempfile.TemporaryDirectory(prefix="deepthin-shapes-") as folder:
                append(data, measured(options.measure, profile, options.out or Path(folder) / "run"))
        for line in missing(read_lines(data), profile, time.monotonic() + options.budget_s):
            print(f"{line['kind']} {line['name']}: {line['wall_s']:.0f} s", file=sys.stderr, flush=True)
            append(data, line)
    lines = read_lines(data)
    text = page(lines)
    print(text)
    if options.report:
        for target, content in ((DOCUMENT, text), (FIGURE, figure(lines))):
            unfinished = target.with_name(target.name + ".tmp")
            unfinished.write_text(content, encoding="utf-8")
            os.replace(unfinished, target)
    return 0


def missing(stored: Sequence[Mapping[str, Any]], profile: Profile, deadline: float) -> Iterator[dict[str, Any]]:
    """Predicted lines that are not stored yet for this profile, one at a time, until ``deadline`` of the monotonic clock."""
    costs = PredictedCosts(profile, CONTEXT)
    done = {(line["kind"], line["name"]) for line in stored if line["profile"] == costs.identity}
    jobs = [("published", one.name) for one in PUBLISHED]
    jobs += [(kind, name) for kind in ("depths", "search") for name in SIZES]
    jobs += [("search", one.name) for one in PUBLISHED]
    published = {one.name: one for one in PUBLISHED}
    for kind, name in jobs:
        if (kind, name) in done or time.monotonic() > deadline:
            continue
        start = time.monotonic()
        params = SIZES[name] if name in SIZES else count_params(published[name].shape).total
        if kind == "published":
            body = placed(published[name], costs)
        elif kind == "depths":
            body = {"rows": depth_sweep(params, costs)}
        else:
            body = searched(params, costs)
        yield {**_head(profile), "kind": kind, "name": name, "params": params, **body, "wall_s": time.monotonic() - start}


def measured(name: str, profile: Profile, out: Path) -> dict[str, Any]:
    """The line of a search of the size called ``name`` that is timed here, in the run folder ``out``."""
    body = measured_search(SIZES[name], PredictedCosts(profile, CONTEXT), out)
    return {**_head(profile), "kind": "measured", "name": name, "params": SIZES[name], **body, "wall_s": body["search_s"]}


def _head(profile: Profile) -> dict[str, Any]:
    """What every line says: which profile, which code, when."""
    return {
        "schema": SCHEMA,
        "profile": PredictedCosts(profile, CONTEXT).identity,
        "device": profile.title,
        "profiled": profile.created_utc[:10],
        "flags": list(profile.flags),
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit(),
    }


def placed(one: Published, costs: PredictedCosts) -> dict[str, Any]:
    """A published shape, predicted in each of :data:`PUBLISHED_QUANTS` as the shapes of a search are."""
    quality = SearchConfig(params=10**10).quality
    found = {}
    for quant in PUBLISHED_QUANTS:
        candidate = Candidate(one.shape, quant)
        scored = Scored(-1, candidate, quality.predict(one.shape, quant), Cost.of(costs.measure(one.shape, quant)))
        found[quant] = {
            "loss": scored.loss,
            "ms_per_kchar": scored.ms_per_kchar.to_json(),
            "ms_per_token": scored.ms_per_token.to_json(),
            "extrapolated": {name: list(reasons) for name, reasons in scored.quality.extrapolated.items()},
            "flags": list(scored.cost.flags),
        }
    return {
        "shape": one.shape.text,
        "layers": one.shape.num_layers,
        "source": one.source,
        "stand_in": one.stand_in,
        "quants": found,
    }


def depth_sweep(params: int, costs: PredictedCosts) -> list[dict[str, Any]]:
    """By depth, the best predicted shape of a fixed list of choices in Q4_0, and the fastest one tied with the best of all."""
    config = SearchConfig(params=params, **SWEEP)
    space, quality = config.space, config.quality
    free = {dimension.name: range(dimension.low, dimension.high + 1) for dimension in space.dimensions}
    candidates = {}
    for layers in DEPTHS:
        for vocab in free["vocab"]:
            for group in free["kv_group"]:
                for ratio in free["mlp_ratio"]:
                    point = {name: values[0] for name, values in free.items()}
                    own = {"layers": layers, "vocab": vocab, "kv_group": group, "mlp_ratio": ratio}
                    candidate = space.decode(point | own)
                    if candidate.shape.num_layers != layers:
                        continue  # layers were added to fill the budget: not the best of that depth but a leftover
                    candidates[candidate.key] = candidate
    scored = [
        Scored(0, one, quality.predict(one.shape, one.quant), Cost.of(costs.measure(one.shape, one.quant)))
        for one in candidates.values()
    ]
    best = min(one.loss for one in scored)
    rows = []
    for layers in sorted({one.candidate.shape.num_layers for one in scored}):
        mine = [one for one in scored if one.candidate.shape.num_layers == layers]
        first = min(mine, key=lambda one: (one.loss, one.time))
        tied = [one for one in mine if one.loss <= best + TIE_BAND]
        rows.append(
            {
                "layers": layers,
                "width": first.candidate.shape.hidden_size,
                "loss": first.loss,
                "ms_per_kchar": first.time,
                "fastest_tied_ms": min((one.time for one in tied), default=None),
                "extrapolated": first.quality.shape_extrapolated,
            }
        )
    return rows


def searched(params: int, costs: PredictedCosts) -> dict[str, Any]:
    """What a search with predicted times finds within so many parameters."""
    config = SearchConfig(params=params, trials=TRIALS, context=CONTEXT, profile=costs.identity)
    with tempfile.TemporaryDirectory(prefix="deepthin-shapes-") as folder:
        return shortened(run_search(config, measure=costs.measure, out=Path(folder) / "run"))


def measured_search(params: int, costs: PredictedCosts, out: Path) -> dict[str, Any]:
    """``deepthin search`` with 300 shapes timed on this machine, as a user runs it, and how well the profile foresaw it."""
    options = ["--params", str(params), "--trials", str(TRIALS), "--plateau", "0", "--no-export", "--quiet"]
    command = [sys.executable, "-m", "deepthin", "search", *options, "--out", str(out)]
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    document = json.loads((out / "front.json").read_text(encoding="utf-8"))
    stored = [json.loads(line) for line in (out / "measurements.jsonl").read_text(encoding="utf-8").splitlines()]
    times = [
        [predicted_time(Shape.parse(one["shape"]), one["quant"], costs), one["ms_per_kchar"]] for one in document["evaluated"]
    ]
    return {
        **shortened(document),
        "command": " ".join(["deepthin", "search", *options]),
        "search_s": seconds,
        "repeats": sum("repeat" in line for line in stored),
        "machine": document["measured_on"],
        "predicted_and_measured": times,
    }


def predicted_time(shape: Shape, quant: str, costs: PredictedCosts) -> float:
    """Milliseconds per 1,000 characters."""
    quality = SearchConfig().quality.predict(shape, quant)
    return Scored(0, Candidate(shape, quant), quality, Cost.of(costs.measure(shape, quant))).time


def shortened(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs of a ``front.json``."""
    keys = ("shape", "quant", "params", "bytes", "predicted_loss", "difference_to_best", "ms_per_token", "ms_per_kchar")
    more = ("kv_bytes_per_token", "tied_with_best", "front_probability", "picks", "shape_extrapolated", "measurement_flags")
    return {
        "trials": document["trials"],
        "stopped": document["stopped"],
        "sampler": document["sampler"],
        "front": [
            {**{key: member[key] for key in (*keys, *more)}, "shape": member["shape"]["text"]} for member in document["front"]
        ],
        "picks": {
            name: {key: pick[key] for key in ("shape", "quant", "reason", "tied_with")}
            for name, pick in document["picks"].items()
        },
        "evaluated": [[one["shape"], one["quant"], one["loss"], one["ms_per_kchar"]] for one in document["evaluated"]],
        "notes": document["notes"],
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The stored lines; a torn last one is passed over."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
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


if __name__ == "__main__":
    sys.exit(main())
