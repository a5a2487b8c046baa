"""What a measured candidate is worth: predicted loss against time per text, and how far it is from optional limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepthin.engine.accounting import kv_bytes_per_token
from deepthin.engine.errors import InfeasibleError, UsageError
from deepthin.search.cost import Cost, DeviceTime, Timing
from deepthin.search.quality.characters import tokens_per_char
from deepthin.search.quality.model import Quality
from deepthin.search.space import Candidate

_MS, _KCHAR = 1e3, 1e3


@dataclass(frozen=True, slots=True)
class Scored:
    """One candidate with its prediction and its cost.

    Attributes:
        step: position in the run, from 0; the same in an interrupted and an uninterrupted run.
        point: of the space, where it was proposed; None for a shape from elsewhere.
    """

    step: int
    candidate: Candidate
    quality: Quality
    cost: Cost
    point: Mapping[str, int] | None = None

    @property
    def loss(self) -> float:
        """Predicted nats per token; the first objective."""
        return self.quality.loss

    @property
    def ms_per_token(self) -> Timing:
        """Milliseconds per decoded token."""
        return self.cost.decode.scaled(_MS, "ms")

    @property
    def ms_per_kchar(self) -> Timing:
        """Milliseconds per 1,000 characters; its value is the second objective.

        A larger vocabulary takes fewer tokens for the same text, so times per token do not compare between vocabularies.
        """
        return self.cost.decode.scaled(self._kchar, "ms")

    @property
    def time(self) -> float:
        """Value of :attr:`ms_per_kchar`."""
        return self.cost.decode.value * self._kchar

    @property
    def _kchar(self) -> float:
        return _MS * _KCHAR * tokens_per_char(self.candidate.shape.vocab_size)


NO_PROMPTS = (
    "--max-ttft-ms: prompts are timed neither while searching on this machine nor in every profile; search with a profile "
    "that predicts them, or leave the limit out"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Optional upper limits on times and on the cache; unlike the budget they steer the search and filter its front.

    Attributes:
        ms_per_token: milliseconds per decoded token.
        ttft_ms: milliseconds until the first token of the prompt that the costs were taken with.
        kv_bytes: bytes of the F16 cache at ``context`` tokens.
        context: cached tokens.

    Raises:
        UsageError: a limit is not positive.
    """

    ms_per_token: float | None = None
    ttft_ms: float | None = None
    kv_bytes: int | None = None
    context: int = 0

    def __post_init__(self) -> None:
        """Check signs."""
        for name, limit in self.to_json().items():
            if limit is not None and not limit > 0:
                raise UsageError(f"{FLAGS[name]}: {limit!r} is no limit anything can meet; a number above 0 is needed")

    @property
    def cache_per_token(self) -> int | None:
        """Most bytes of the cache for each token of ``context``; None without a limit, or where nothing is cached."""
        return self.kv_bytes // self.context if self.kv_bytes is not None and self.context else None

    @property
    def names(self) -> list[str]:
        """The limits that are set."""
        return [name for name, limit in self.to_json().items() if limit is not None]

    def values(self, scored: Scored) -> dict[str, float]:
        """What ``scored`` takes of each limited quantity, in the limit's unit; of several devices, on the slowest.

        Raises:
            UsageError: a time to the first token is limited, but the costs have none.
        """
        found = {}
        times: Sequence[Cost | DeviceTime] = scored.cost.devices or (scored.cost,)
        if self.ms_per_token is not None:
            found["ms_per_token"] = max(time.decode.value for time in times) * _MS
        if self.ttft_ms is not None:
            prompts = [time.first_token.value for time in times if time.first_token is not None]
            if len(prompts) < len(times):
                raise UsageError(NO_PROMPTS)
            found["ttft_ms"] = max(prompts) * _MS
        if self.kv_bytes is not None:
            found["kv_bytes"] = float(self.context * kv_bytes_per_token(scored.candidate.shape))
        return found

    def violations(self, scored: Scored) -> dict[str, float]:
        """Relative excess by limit: 0.5 is half as much again as allowed, 0 or less is met."""
        limits = self.to_json()
        return {name: value / limits[name] - 1 for name, value in self.values(scored).items()}

    def met(self, scored: Scored) -> bool:
        """Whether every limit is met."""
        return all(violation <= 0 for violation in self.violations(scored).values())

    def to_json(self) -> dict[str, Any]:
        """The limits by name; null where there is none."""
        return {"ms_per_token": self.ms_per_token, "ttft_ms": self.ttft_ms, "kv_bytes": self.kv_bytes}


FLAGS = {"ms_per_token": "--max-ms-per-token", "ttft_ms": "--max-ttft-ms", "kv_bytes": "--max-kv-mb"}
UNITS = {"ms_per_token": "ms per token", "ttft_ms": "ms to the first token", "kv_bytes": "bytes of KV cache"}


def unmet(limits: Limits, scored: Sequence[Scored]) -> InfeasibleError:
    """The error for limits that none of ``scored`` meets: what binds, by how much, the nearest shape, the way out.

    The way out relaxes as little as possible: for the nearest shape, every limit it exceeds, rounded up so that it is met.
    """
    nearest = min(scored, key=lambda one: (max(limits.violations(one).values()), one.candidate.key))
    violations, values, bounds = limits.violations(nearest), limits.values(nearest), limits.to_json()
    name = max(violations, key=lambda name: violations[name])
    where = _slowest(nearest, name)
    ways = " and ".join(relaxed(name, values[name]) for name, excess in violations.items() if excess > 0)
    alone = {other: sum(limits.violations(one)[other] <= 0 for one in scored) for other in limits.names}
    counts = ", ".join(f"{FLAGS[other]} alone {met}" for other, met in alone.items()) if len(alone) > 1 else ""
    return InfeasibleError(
        f"none of {len(scored)} shapes meets {FLAGS[name]}: the nearest ({nearest.candidate.key}) takes {values[name]:,.4g} "
        f"{UNITS[name]}{where}, {violations[name]:.1%} over the limit of {bounds[name]:,.4g}"
        f"{f' (of all shapes, {counts} met it)' if counts else ''}. "
        f"Smallest relaxation: {ways}, which that shape meets; or a smaller --params or --bytes"
    )


def _slowest(one: Scored, name: str) -> str:
    """Which of several devices takes the limited time."""
    if name == "kv_bytes" or not one.cost.devices:
        return ""

    def seconds(device: DeviceTime) -> float:
        time = device.decode if name == "ms_per_token" else device.first_token
        return 0.0 if time is None else time.value

    return f" on {max(one.cost.devices, key=seconds).name}"


def relaxed(name: str, value: float) -> str:
    """The flag of a limit with the least round number not below ``value``."""
    if name == "kv_bytes":
        return f"{FLAGS[name]} {math.ceil(value) / 1e6:.6f}".rstrip("0").rstrip(".")
    digits = 4 - math.ceil(math.log10(value)) if value > 0 else 0
    return f"{FLAGS[name]} {math.ceil(value * 10**digits) / 10**digits:.{max(digits, 0)}f}"


def predicted_loss(scored: Scored) -> float:
    """The first objective as a function, for callers that may judge quality otherwise."""
    return scored.loss


def pareto_front(scored: Sequence[Scored], loss: Callable[[Scored], float] = predicted_loss) -> list[Scored]:
    """The candidates no other one beats in both ``loss`` and time, best loss first."""
    front: list[Scored] = []
    for one in sorted(scored, key=lambda one: (loss(one), one.time, one.candidate.key)):
        if not front or one.time < front[-1].time:
            front.append(one)
    return front
