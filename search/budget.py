"""The hard limits on a shape, embedding included: parameters, bytes on disk, bytes in memory, or several of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepthin.engine.accounting import count_bytes, count_params
from deepthin.engine.errors import UsageError
from deepthin.engine.shape import Shape
from deepthin.search.file_sizes import gguf_bytes, random_weights_name
from deepthin.search.memory import memory
from deepthin.search.targets import Targets

_UNITS = {"params": "parameters", "bytes": "bytes", "ram": "bytes of memory"}


@dataclass(frozen=True, slots=True)
class Excess:
    """How far one limit is exceeded.

    Attributes:
        name: ``params``, ``bytes`` or ``ram``.
        limit: the budget.
        need: what the shape takes.
    """

    name: str
    limit: int
    need: int

    @property
    def unit(self) -> str:
        """What is counted, in words."""
        return _UNITS[self.name]


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits, embedding included.

    Attributes:
        params: parameters, or None for no limit.
        bytes: bytes of the GGUF file (norms f32, 4-bit bodies keep an 8-bit embedding), of a priced target's if that is more.
        ram: bytes of weights, F16 cache at ``context`` tokens, and scratch.
        context: cached tokens that ``ram`` must hold.
        targets: whose prices ``bytes`` includes.
        seed: of the made-up weights; it stands in the file's name for the model.

    Raises:
        UsageError: no limit is given, or one is below 1.
    """

    params: int | None = None
    bytes: int | None = None
    ram: int | None = None
    context: int = 0
    targets: Targets = field(default_factory=Targets)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that there is something to meet."""
        if not self.limits:
            raise UsageError(
                "budget: neither parameters nor bytes nor memory are limited; give --params, for example 30M, --bytes or --ram"
            )
        for name, limit in self.limits.items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise UsageError(f"budget: --{name} is {limit!r}, but a whole number from 1 is needed")

    @property
    def limits(self) -> dict[str, int]:
        """The limits that are set, by name."""
        every = {"params": self.params, "bytes": self.bytes, "ram": self.ram}
        return {name: limit for name, limit in every.items() if limit is not None}

    def needs(self, shape: Shape, quant: str) -> dict[str, int]:
        """What ``shape`` stored as ``quant`` takes of each limited quantity."""
        return {name: _MEASURES[name](self, shape, quant) for name in self.limits}

    def fits(self, shape: Shape, quant: str) -> bool:
        """Whether every limit is met."""
        return all(_MEASURES[name](self, shape, quant) <= limit for name, limit in self.limits.items())

    def excesses(self, shape: Shape, quant: str) -> list[Excess]:
        """Every limit ``shape`` exceeds, the relatively worst first."""
        limits = self.limits
        over = [Excess(name, limits[name], need) for name, need in self.needs(shape, quant).items() if need > limits[name]]
        return sorted(over, key=lambda excess: -excess.need / excess.limit)

    def table(self, shape: Shape, quant: str) -> dict[str, int]:
        """What embedding and untied head of ``shape`` take of each limited quantity."""
        params, stored = count_params(shape), count_bytes(shape, quant)
        tables = {"params": params.embedding + params.head, "bytes": stored.embedding + stored.head}
        return {name: tables["params" if name == "params" else "bytes"] for name in self.limits}

    def to_json(self) -> dict[str, Any]:
        """The limits by name; null where there is none."""
        return {"params": self.params, "bytes": self.bytes, "ram": self.ram}


def _params(budget: Budget, shape: Shape, quant: str) -> int:
    return count_params(shape).total


def _bytes(budget: Budget, shape: Shape, quant: str) -> int:
    name = random_weights_name(shape, budget.seed)
    return max(gguf_bytes(shape, quant, name), budget.targets.priced_bytes(shape, quant, name))


def _ram(budget: Budget, shape: Shape, quant: str) -> int:
    return memory(shape, quant, budget.context).total


_MEASURES: dict[str, Callable[[Budget, Shape, str], int]] = {"params": _params, "bytes": _bytes, "ram": _ram}
