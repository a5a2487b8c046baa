"""Which export target can express a shape, and why not: asked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable

from deepthin.engine.errors import UnsupportedError, UsageError
from deepthin.engine.shape import Shape
from deepthin.engine.targets import target_verdicts

_RULES = {"hf": "hf", "genai": "onnx", "transformersjs": "onnx", "gguf": "gguf-f16"}  # target -> its key in engine/targets.py
TARGETS = tuple(_RULES)
ONNX_TARGETS = tuple(target for target, rule in _RULES.items() if rule == "onnx")
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
        if target not in _RULES:
            raise UsageError(f"export target {target!r} is unknown; use one of {', '.join(TARGETS)}")
        verdict = verdicts[_RULES[target]]
        if not verdict.ok:
            found[target] = verdict.why
    return found


def require_targets(targets: Iterable[str], shape: Shape) -> None:
    """Pass when every target can express ``shape``.

    Raises:
        UnsupportedError: one cannot; the message names each and says why.
    """
    refused = refusals(targets, shape)
    if refused:
        reasons = "; ".join(f"{target}: {why}" for target, why in refused.items())
        raise UnsupportedError(f"cannot export {shape.text} ({reasons}); change the shape or leave the target out")
