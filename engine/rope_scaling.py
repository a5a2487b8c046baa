"""The record of how rotary embeddings are stretched over more positions, and its text form. What it does is in ``rope.py``.

Loads no NumPy, as the shape that holds it does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from deepthin.engine.errors import ShapeError

KINDS = ("linear", "llama3", "yarn")
_FORMS = "linear_FACTOR, llama3_FACTOR_CONTEXT[_LOW_HIGH], yarn_FACTOR_CONTEXT[_ATTENTION[_SLOW_FAST]]"
_COUNTS = {"linear": (1,), "llama3": (2, 4), "yarn": (2, 3, 5)}  # numbers in the text form
DEFAULT_BOUNDS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}  # defaults of low and high


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model trained on ``original_context`` positions is stretched over more.

    Attributes:
        kind: one of ``KINDS``.
        factor: by how much slow pairs are slowed down, at least 1.
        original_context: positions before stretching; 0 for ``linear``, which does not need them.
        low: turns in the original context up to which a pair counts as slow (llama3 low_freq_factor, yarn beta_slow).
        high: turns from which it counts as fast and stays as it was (llama3 high_freq_factor, yarn beta_fast).
        attention_factor: what cosines and sines are multiplied by; only yarn changes it, by default to 0.1 ln(factor) + 1.

    Raises:
        ShapeError: an unknown kind, or a number out of range.
    """

    kind: str
    factor: float
    original_context: int = 0
    low: float = 0.0
    high: float = 0.0
    attention_factor: float = 0.0

    def __post_init__(self) -> None:
        """Fill the defaults of the kind, then check."""
        if self.kind not in KINDS:
            raise ShapeError(f"shape: rotary scaling {str(self.kind)[:40]!r} is unknown; use one of {', '.join(KINDS)}")
        low, high = DEFAULT_BOUNDS.get(self.kind, (0.0, 0.0))
        default = 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" and _is_number(self.factor, 1, 1e6) else 1.0
        for name, value in (("low", low), ("high", high), ("attention_factor", default)):
            if getattr(self, name) == 0.0:
                object.__setattr__(self, name, value)
        for name in ("factor", "low", "high", "attention_factor"):
            if not _is_number(getattr(self, name), 1.0 if name == "factor" else 0.0, 1e6):
                raise ShapeError(f"shape: rotary scaling {self.kind} has {name}={getattr(self, name)!r}, outside its range")
            object.__setattr__(self, name, float(getattr(self, name)))
        needs_context = self.kind != "linear"
        if type(self.original_context) is not int or not needs_context <= self.original_context <= (1 << 24) * needs_context:
            raise ShapeError(
                f"shape: rotary scaling {self.kind} has original_context={self.original_context!r}, "
                f"but {'a positive whole number' if needs_context else '0'} is needed"
            )
        if needs_context and self.low >= self.high:
            raise ShapeError(f"shape: rotary scaling {self.kind} has low={self.low:g} not below high={self.high:g}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, for example ``llama3_8_8192``.

        Raises:
            ShapeError: it has another form; the message lists the known ones.
        """
        kind, *numbers = text.split("_")
        try:
            values = [float(number) for number in numbers]
            context = int(numbers[1]) if kind in DEFAULT_BOUNDS else 0
        except (ValueError, IndexError):
            values = []
        if len(values) not in _COUNTS.get(kind, ()):
            raise ShapeError(f"shape: rope={text[:60]!r} is not understood; the forms are {_FORMS}")
        attention = values[2] if kind == "yarn" and len(values) > 2 else 0.0
        low, high = values[-2:] if len(values) > 3 else (0.0, 0.0)
        return cls(kind, values[0], context, low, high, attention)

    @property
    def text(self) -> str:
        """The canonical text form: what differs from its default, and what stands before that."""
        parts = [self.kind, _short(self.factor)]
        if self.kind != "linear":
            parts.append(str(self.original_context))
        bounds = (
            [] if (self.low, self.high) == DEFAULT_BOUNDS.get(self.kind, (0.0, 0.0)) else [_short(self.low), _short(self.high)]
        )
        if self.kind == "yarn" and (bounds or self.attention_factor != type(self)("yarn", self.factor, 1).attention_factor):
            parts.append(_short(self.attention_factor))
        return "_".join(parts + bounds)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The inverse of ``dataclasses.asdict``.

        Raises:
            ShapeError: a key is unknown, missing or of the wrong type.
        """
        try:
            return cls(**document)
        except TypeError as error:
            raise ShapeError(f"shape JSON: rope_scaling: {error}") from None


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _short(value: float) -> str:
    return repr(value).removesuffix(".0")
