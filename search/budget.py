"""The hard limit on a shape's size, counted with its embedding: parameters, stored bytes, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepthin.engine.accounting import count_bytes, count_params
from deepthin.engine.errors import UsageError
from deepthin.engine.shape import Shape


@dataclass(frozen=True, slots=True)
class Excess:
    """How far one limit is exceeded.

    Attributes:
        name: ``params`` or ``bytes``.
        limit: the budget.
        need: what the shape takes.
    """

    name: str
    limit: int
    need: int

    @property
    def unit(self) -> str:
        """What is counted, as a word."""
        return "parameters" if self.name == "params" else "bytes"


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits, embedding included.

    Attributes:
        params: parameters, or None for no limit.
        bytes: bytes of all stored blocks (norms f32, 4-bit bodies keep an 8-bit embedding), or None.

    Raises:
        UsageError: neither limit is given, or one is below 1.
    """

    params: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        """Check that there is something to meet."""
        if self.params is None and self.bytes is None:
            raise UsageError("budget: neither parameters nor bytes are limited; give --params, for example 30M, or --bytes")
        for name, limit in self.limits.items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise UsageError(f"budget: --{name} is {limit!r}, but a whole number from 1 is needed")

    @property
    def limits(self) -> dict[str, int]:
        """The limits that are set, by name."""
        both = {"params": self.params, "bytes": self.bytes}
        return {name: limit for name, limit in both.items() if limit is not None}

    def needs(self, shape: Shape, quant: str) -> dict[str, int]:
        """What ``shape`` stored as ``quant`` takes of each limited quantity."""
        return {name: _MEASURES[name](shape, quant) for name in self.limits}

    def fits(self, shape: Shape, quant: str) -> bool:
        """Whether every limit is met."""
        limits = self.limits
        return all(need <= limits[name] for name, need in self.needs(shape, quant).items())

    def excesses(self, shape: Shape, quant: str) -> list[Excess]:
        """Every limit ``shape`` exceeds, the relatively worst first."""
        limits = self.limits
        over = [Excess(name, limits[name], need) for name, need in self.needs(shape, quant).items() if need > limits[name]]
        return sorted(over, key=lambda excess: -excess.need / excess.limit)

    def table(self, shape: Shape, quant: str) -> dict[str, int]:
        """What embedding and untied head of ``shape`` take of each limited quantity."""
        parts = {"params": count_params(shape), "bytes": count_bytes(shape, quant)}
        return {name: parts[name].embedding + parts[name].head for name in self.limits}

    def to_json(self) -> dict[str, Any]:
        """Both limits by name; null where there is none."""
        return {"params": self.params, "bytes": self.bytes}


def _params(shape: Shape, quant: str) -> int:
    return count_params(shape).total


def _bytes(shape: Shape, quant: str) -> int:
    return count_bytes(shape, quant).total


_MEASURES = {"params": _params, "bytes": _bytes}
