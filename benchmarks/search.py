"""How much of the true front each way of proposing finds with a twentieth of the evaluations, on spaces listed in full.

    python benchmarks/search.py                        three spaces, 20 seeds: some CPU minutes
    python benchmarks/search.py --seeds 3 --spaces 30M    a quick look

Every distinct shape of a space is scored once, quality law and time alike, which gives the true front; then each sampler gets
5 % as many evaluations. Reported: share of the true hypervolume (loss against log time; corner a tenth of the front's extent
beyond its ends), its mean with a 95 % bootstrap interval over seeds, and the paired difference of the product's rule to random
search and NSGA-II. The last line is one JSON object. Nothing is measured here; any machine gives the same figures.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices; more threads only wait for one another

import argparse
import json
import math
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.accounting import count_bytes, kv_bytes_per_token
from deepthin.engine.shape import Shape
from deepthin.search.config import SearchConfig
from deepthin.search.cost import Cost, Timing
from deepthin.search.hypervolume import hypervolume, staircase
from deepthin.search.quality.characters import tokens_per_char
from deepthin.search.quality.model import QualityModel
from deepthin.search.run import run_search
from deepthin.search.sampler import GUIDED, NSGA2, RANDOM, TPE

SHARE = 0.05
CONTEXT = 512
SAMPLERS = (GUIDED, TPE, NSGA2, RANDOM)

# A two-core laptop-like device: seconds and bytes per second, made up but of the right size. Bandwidth
# falls once weights leave the caches, 4-bit products cost more than their bytes, and 2 % of the time is noise by shape.
_CACHED, _STREAMED, _CACHE_BYTES = 85e9, 25e9, 12e6
_LAYER_S, _TOKEN_S, _ELEMENT_S, _LOGIT_S = 11e-6, 20e-6, 4e-10, 6e-10
_PRODUCT_SHARE = {"q4_0": 0.9, "q8_0": 1.0, "f16": 1.0}
_NOISE = 0.02


@dataclass(frozen=True)
class ListedSpace:
    """A space small enough to list.

    Attributes:
        name: for the table.
        config: of the searches.
        front: true front, (loss, log time).
        corner: of the hypervolume.
        shapes: distinct candidates.
    """

    name: str
    config: Mapping[str, Any]
    front: list[tuple[float, float]]
    corner: tuple[float, float]
    shapes: int


SPACES: dict[str, dict[str, Any]] = {
    "30M": {"params": 30_000_000, "vocabs": (4096, 8192, 16384, 32768, 49152), "quants": ("q4_0", "q8_0")},
    "90MB": {"bytes": 90_000_000, "vocabs": (16384, 32768, 49152, 65536), "quants": ("q4_0", "q8_0", "f16")},
    "350M": {"params": 350_000_000, "vocabs": (16384, 32768, 49152), "quants": ("q4_0", "q8_0", "f16")},
}
HEAD_DIMS, KV_GROUPS = (64,), (1, 3)


def table_cost(shape: Shape, quant: str) -> Cost:
    """Seconds per token from the constants above."""
    parts = count_bytes(shape, quant)
    head = parts.embedding if shape.tie_word_embeddings else parts.head
    body, cache = parts.attention + parts.mlp, CONTEXT * kv_bytes_per_token(shape)
    held = body + head + cache
    rate = _STREAMED + (_CACHED - _STREAMED) / (1 + (held / _CACHE_BYTES) ** 2)
    vectors = shape.num_layers * (shape.hidden_size + shape.intermediate_size)
    seconds = (body / _PRODUCT_SHARE[quant] + head + 1.3 * cache) / rate
    seconds += shape.num_layers * _LAYER_S + _TOKEN_S + vectors * _ELEMENT_S + shape.vocab_size * _LOGIT_S
    seconds *= 1 + _NOISE * (zlib.crc32(f"{shape.text} {quant}".encode()) / 2**31 - 1)
    return Cost(Timing(seconds, seconds, seconds, basis="predicted"), 2, CONTEXT, held)


def search_config(name: str, **changes: Any) -> SearchConfig:
    """Settings of a search in the space called ``name``."""
    return SearchConfig(**SPACES[name], head_dims=HEAD_DIMS, kv_groups=KV_GROUPS, context=CONTEXT, plateau=0, **changes)


def listed(name: str, cost: Callable[[Shape, str], Cost]) -> ListedSpace:
    """The space called ``name`` with every distinct candidate scored."""
    config = search_config(name)
    space, quality, pairs = config.space, QualityModel(), {}
    for point in space.points():
        candidate = space.decode(point)
        if candidate.key not in pairs:
            shape, quant = candidate.shape, candidate.quant
            time = math.log(cost(shape, quant).decode.value * 1e6 * tokens_per_char(shape.vocab_size))
            pairs[candidate.key] = quality.predict(shape, quant).loss, time
    front = staircase(list(pairs.values()))
    (x_low, y_high), (x_high, y_low) = front[0], front[-1]
    corner = x_high + 0.1 * (x_high - x_low), y_high + 0.1 * (y_high - y_low)
    return ListedSpace(name, SPACES[name], front, corner, len(pairs))


def found_share(space: ListedSpace, sampler: str, seed: int, cost: Callable[[Shape, str], Cost]) -> float:
    """Share of the true hypervolume that one search finds with 5 % of the evaluations."""
    config = search_config(space.name, trials=max(1, int(SHARE * space.shapes)), seed=seed, sampler=sampler)
    with tempfile.TemporaryDirectory(prefix="deepthin-search-") as folder:
        document = run_search(config, measure=cost, out=Path(folder) / "run")
    pairs = [(one["loss"], math.log(one["ms_per_kchar"])) for one in document["evaluated"]]
    return hypervolume(pairs, space.corner) / hypervolume(space.front, space.corner)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % bootstrap interval of it."""
    array = np.asarray(values)
    draws = np.random.Generator(np.random.PCG64(0)).integers(0, len(array), (4000, len(array)))
    low, high = np.quantile(array[draws].mean(axis=1), [0.025, 0.975])
    return float(array.mean()), float(low), float(high)


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="searches per space and sampler (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="to split a run (default: %(default)s)")
    parser.add_argument("--spaces", default=",".join(SPACES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--samplers", default=",".join(SAMPLERS), help="comma-separated (default: %(default)s)")
    options = parser.parse_args(argv)
    samplers, results = options.samplers.split(","), {}
    print(
        "| space | shapes | evaluations | sampler | share of true hypervolume (95 %) | least | seeds at 99 % | guided ahead |"
    )
    print("|---|--:|--:|---|--:|--:|--:|--:|")
    for name in options.spaces.split(","):
        space = listed(name, table_cost)
        shares: dict[str, list[float]] = {}
        for sampler in samplers:
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            shares[sampler] = [found_share(space, sampler, seed, table_cost) for seed in seeds]
            mean, low, high = interval(shares[sampler])
            ahead = ""
            if sampler != GUIDED and GUIDED in shares:
                gap = interval([a - b for a, b in zip(shares[GUIDED], shares[sampler], strict=True)])
                ahead = "{:.4f} ({:.4f}..{:.4f})".format(*gap)
            reached = sum(share >= 0.99 for share in shares[sampler])
            print(
                f"| {name} | {space.shapes} | {int(SHARE * space.shapes)} | {sampler} | {mean:.4f} ({low:.4f}..{high:.4f}) | "
                f"{min(shares[sampler]):.4f} | {reached} of {options.seeds} | {ahead} |",
                flush=True,
            )
        results[name] = {"shapes": space.shapes, "front": len(space.front), "shares": shares}
    print(json.dumps({"schema": "deepthin/search-benchmark/1", "spaces": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
