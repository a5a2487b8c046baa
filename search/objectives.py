"""What a measured candidate is worth: predicted loss against time per text, and how far it is from optional limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepthin.engine.accounting import kv_bytes_per_token
from deepthin.engine.errors import UsageError
from deepthin.profiles.schema import Measured, TokenCost
from deepthin.search.quality.characters import tokens_per_char
from deepthin.search.quality.model import Quality
from deepthin.search.space import Candidate

_MS, _KCHAR = 1e3, 1e3


@dataclass(frozen=True, slots=True)
class Scored:
    """One candidate with its prediction and its measurement.

    Attributes:
        step: position in the run, from 0; the same in an interrupted and an uninterrupted run.
    """

    step: int
    candidate: Candidate
    quality: Quality
    cost: TokenCost

    @property
    def loss(self) -> float:
        """Predicted nats per token; the first objective."""
        return self.quality.loss

    @property
    def ms_per_token(self) -> Measured:
        """Measured milliseconds per decoded token."""
        return _scaled(self.cost.seconds_per_token, _MS)

    @property
    def ms_per_kchar(self) -> Measured:
        """Milliseconds per 1,000 characters; its median is the second objective.

        A larger vocabulary takes fewer tokens for the same text, so times per token do not compare between vocabularies.
        """
        return _scaled(self.cost.seconds_per_token, _MS * _KCHAR * tokens_per_char(self.candidate.shape.vocab_size))

    @property
    def time(self) -> float:
        """Median of :attr:`ms_per_kchar`."""
        return self.cost.seconds_per_token.median * (_MS * _KCHAR * tokens_per_char(self.candidate.shape.vocab_size))


@dataclass(frozen=True, slots=True)
class Limits:
    """Optional upper limits on measured or derived figures; unlike the budget they steer the search and filter its front.

    Attributes:
        ms_per_token: milliseconds per decoded token.
        kv_bytes: bytes of the F16 cache at ``context`` tokens.
        context: cached tokens.

    Raises:
        UsageError: a limit is not positive.
    """

    ms_per_token: float | None = None
    kv_bytes: int | None = None
    context: int = 0

    def __post_init__(self) -> None:
        """Check signs."""
        for name, limit in (("--max-ms-per-token", self.ms_per_token), ("--max-kv-mb", self.kv_bytes)):
            if limit is not None and not limit > 0:
                raise UsageError(f"{name}: {limit!r} is no limit anything can meet; a number above 0 is needed")

    @property
    def names(self) -> list[str]:
        """The limits that are set."""
        return [name for name, limit in self.to_json().items() if limit is not None]

    def violations(self, scored: Scored) -> dict[str, float]:
        """Relative excess by limit: 0.5 is half as much again as allowed, 0 or less is met."""
        found = {}
        if self.ms_per_token is not None:
            found["ms_per_token"] = scored.cost.seconds_per_token.median * _MS / self.ms_per_token - 1
        if self.kv_bytes is not None:
            found["kv_bytes"] = self.context * kv_bytes_per_token(scored.candidate.shape) / self.kv_bytes - 1
        return found

    def met(self, scored: Scored) -> bool:
        """Whether every limit is met."""
        return all(violation <= 0 for violation in self.violations(scored).values())

    def to_json(self) -> dict[str, Any]:
        """The limits by name; null where there is none."""
        return {"ms_per_token": self.ms_per_token, "kv_bytes": self.kv_bytes}


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


def _scaled(measured: Measured, factor: float) -> Measured:
    return Measured(
        median=measured.median * factor,
        ci_low=measured.ci_low * factor,
        ci_high=measured.ci_high * factor,
        n=measured.n,
        unit="ms",
        samples=tuple(sample * factor for sample in measured.samples),
    )
