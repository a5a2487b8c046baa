"""Which export target can express a shape, and why not: asked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

from deepthin.engine.architectures import SMOLLM3_NOPE
from deepthin.engine.errors import ShapeError, UnsupportedError, UsageError
from deepthin.engine.shape import Shape
from deepthin.engine.targets import LLAMA_CPP_MAX_LAYERS, target_verdicts
from deepthin.export.target_profiles import TARGET_PROFILES

TARGETS = tuple(TARGET_PROFILES)
ONNX_TARGETS = tuple(name for name, target in TARGET_PROFILES.items() if target.onnx)
ALIASES = {"onnx": ONNX_TARGETS}


def expand_targets(targets: Iterable[str]) -> tuple[str, ...]:
    """``targets`` without repetitions, short names spelled out; unknown names stay."""
    return tuple(dict.fromkeys(name for target in targets for name in ALIASES.get(target, (target,))))


def refusals(targets: Iterable[str], shape: Shape) -> dict[str, str]:
    """The targets among ``targets`` that cannot express ``shape``, each with the rule that decides.

    Raises:
        UsageError: a target is unknown.
    """
    verdicts = target_verdicts(shape)
    found = {}
    for target in targets:
        if target not in TARGET_PROFILES:
            raise UsageError(f"export target {target!r} is unknown; use one of {', '.join(TARGETS)}")
        verdict = verdicts[TARGET_PROFILES[target].rule]
        if not verdict.ok:
            found[target] = verdict.why
    return found


def nearest_shape(targets: Iterable[str], shape: Shape) -> Shape | None:
    """A shape that every target can express, by as few changes of ``shape`` as do; None if none does."""
    targets = tuple(targets)
    edits = _edits(shape)
    for count in (1, 2, 3):
        for chosen in combinations(edits, count):
            changes = {name: value for edit in chosen for name, value in edit.items()}
            try:
                found = shape.replace(**changes)
            except ShapeError:
                continue
            if found != shape and not refusals(targets, found):
                return found
    return None


def _edits(shape: Shape) -> list[dict[str, Any]]:
    """Single changes that get a shape past some rule of engine/targets.py."""
    heads, width = shape.num_heads, shape.hidden_size
    below = width // heads * heads
    widths = sorted((value for value in (below, below + heads) if value), key=lambda value: abs(value - width))
    return [
        *({"hidden_size": value} for value in widths),
        {"rope_scaling": None},
        {"nope_every": SMOLLM3_NOPE},
        {"nope_every": 0},
        {"qkv_bias": False},
        {"qk_norm": False},
        {"mlp": "relu2"},
        {"mlp": "swiglu"},
        {"layer_sharing": 1},
        {"num_layers": LLAMA_CPP_MAX_LAYERS // shape.layer_sharing},
    ]


def require_targets(targets: Iterable[str], shape: Shape) -> None:
    """Pass when every target can express ``shape``.

    Raises:
        UnsupportedError: one cannot; the message names each, says why, and names the nearest shape that all can.
    """
    targets = tuple(targets)
    refused = refusals(targets, shape)
    if refused:
        reasons = "; ".join(f"{target}: {why}" for target, why in refused.items())
        nearest = nearest_shape(targets, shape)
        advice = "change the shape" if nearest is None else f"the nearest shape for all of them is {nearest.text}"
        raise UnsupportedError(f"cannot export {shape.text} ({reasons}); {advice}, or leave the target out")
