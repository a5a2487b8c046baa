"""A start from what an earlier run found, here or on another device: its best shapes come first in this one.

Only shapes are taken over. Times of another device would mislead; those of this one are found again by ``--store``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from deepthin.engine.errors import FormatError, ShapeError, UsageError
from deepthin.engine.formats import BODY_QUANTS, scheme_named
from deepthin.engine.shape import Shape
from deepthin.search.folder import FRONT
from deepthin.search.space import Candidate, Space

MOST = 8  # shapes taken over; about half of what a design of its own measures


def best_of_run(folder: Path) -> tuple[str, ...]:
    """The best candidates of the run in ``folder``, "SHAPE QUANT" each: its front, then what is behind it, best loss first.

    Raises:
        UsageError: there is no finished run.
        FormatError: its ``front.json`` is damaged.
    """
    path = folder / FRONT
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["evaluated"]
        found = [(float(row["loss"]), float(row["ms_per_kchar"]), f"{row['shape']} {row['quant']}") for row in rows]
        _ = [parse_candidate(text) for _, _, text in found]
    except OSError as error:
        raise UsageError(
            f"--warm-start {folder}: holds no finished run ({FRONT}: {error.strerror or error}); "
            f"name the --out of an earlier search"
        ) from error
    except (ValueError, KeyError, TypeError, UsageError) as error:
        raise FormatError(f"{path}: is damaged ({type(error).__name__}: {error}); name another run") from error
    best: list[str] = []
    left = sorted(found)
    while left and len(best) < MOST:
        front: list[tuple[float, float, str]] = []
        for one in left:
            if not front or one[1] < front[-1][1]:
                front.append(one)
        best += [text for _, _, text in front]
        left = [one for one in left if one not in front]
    return tuple(best[:MOST])


def parse_candidate(text: str) -> Candidate:
    """The candidate of "SHAPE QUANT".

    Raises:
        UsageError: it is none.
    """
    shape, _, quant = text.rpartition(" ")
    if quant not in BODY_QUANTS:
        raise UsageError(f"{text!r} is no shape with a format of {', '.join(BODY_QUANTS)} behind it")
    try:
        return Candidate(Shape.parse(shape), quant)
    except ShapeError as error:
        raise UsageError(str(error)) from error


def started(space: Space, candidates: Sequence[str], design: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """``design`` behind the points of ``candidates``, each shape once."""
    if not candidates:
        return list(design)
    points = nearest_points(space, candidates)
    known = {space.decode(point).key for point in points}
    return points + [point for point in design if space.decode(point).key not in known]


def nearest_points(space: Space, candidates: Sequence[str]) -> list[dict[str, int]]:
    """For each of ``candidates``, the point of ``space`` whose shape is most like it; equal shapes once.

    The budget, the vocabularies and the formats may differ from the earlier run's, so the width is solved anew.
    """
    points: dict[str, dict[str, int]] = {}
    for text in candidates:
        wanted = parse_candidate(text)
        tries = [_point(space, wanted, ratio) for ratio in range(len(space.mlp_ratios))]
        point = min(tries, key=lambda point: _distance(space.decode(point), wanted))
        points.setdefault(space.decode(point).key, point)
    return list(points.values())


def _point(space: Space, wanted: Candidate, mlp_ratio: int) -> dict[str, int]:
    shape = wanted.shape
    scheme = scheme_named(wanted.quant)
    low, high = space.layers

    def nearest(values: Sequence[float], value: float) -> int:
        return min(range(len(values)), key=lambda index: abs(math.log(values[index] / value)))

    return {
        "layers": min(max(shape.num_layers, low), high),
        "vocab": nearest(space.vocabs, shape.vocab_size),
        "head_dim": nearest(space.head_dims, shape.head_dim),
        "kv_group": nearest(space.kv_groups, shape.num_heads / shape.num_kv_heads),
        "mlp_ratio": mlp_ratio,
        "tying": _index(space.tyings, shape.tie_word_embeddings),
        "sharing": nearest(space.sharings, shape.layer_sharing),
        "qk_norm": _index(space.qk_norms, shape.qk_norm),
        "quant": _index(space.quants, scheme.body.name),
        "query_ratio": nearest(space.query_ratios, shape.q_size / shape.hidden_size),
        "head_quant": _index(space.head_quants, scheme.head.name),
    }


def _index(values: Sequence[object], value: object) -> int:
    return list(values).index(value) if value in values else 0


def _distance(one: Candidate, other: Candidate) -> float:
    """Sum of squared log ratios of depth, width and MLP width."""
    names = ("num_layers", "hidden_size", "intermediate_size")
    return sum(math.log(getattr(one.shape, name) / getattr(other.shape, name)) ** 2 for name in names)
