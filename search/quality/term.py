"""One term of the prediction, and the evidence behind it: status, source, range of support. No law is written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PUBLISHED, OWN_FIT, JUDGEMENT = "published", "own fit", "judgement"

USED, WEAK, STRONG = "used", "weak", "strong"  # readings of a term whose strength is uncertain


@dataclass(frozen=True, slots=True)
class Support:
    """The values of one quantity that some evidence covers, ends included."""

    quantity: str
    low: float
    high: float

    def outside(self, value: float) -> str | None:
        """A sentence when ``value`` is not covered, else None."""
        if self.low <= value <= self.high:
            return None
        side = "below" if value < self.low else "above"
        return f"{self.quantity} {value:,.4g} is {side} the fitted {self.low:,.4g}-{self.high:,.4g}"

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {"quantity": self.quantity, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a term rests on.

    Attributes:
        name: the term's name, for example ``dL_kv``.
        status: ``published``, ``own fit`` or ``judgement``; a term counts as its weakest part.
        source: where it comes from, in a few words.
        support: ranges of what it was seen on.
    """

    name: str
    status: str
    source: str
    support: tuple[Support, ...] = ()

    def term(self, readings: Mapping[str, float], values: Mapping[str, float], *, status: str | None = None) -> Term:
        """The term with ``readings``, the used one first, checked at ``values`` by supported quantity."""
        found = (support.outside(values[support.quantity]) for support in self.support)
        return Term(
            name=self.name,
            readings=dict(readings),
            status=status or self.status,
            source=self.source,
            extrapolated=tuple(sentence for sentence in found if sentence),
        )


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a prediction, in nats.

    Attributes:
        name: ``F4``, ``m_attn``, ``dL_vocab``, ``dL_kv``, ``dL_tie``, ``dL_share`` or ``dL_quant``.
        readings: nats by reading of the evidence; the first one is used, the others say how far it could be off. Readings of
            the same name belong together across candidates, because one unknown decides all of them.
        status: as in :class:`Evidence`.
        source: where it comes from, in a few words.
        extrapolated: one sentence per limit of its evidence that the candidate leaves; empty inside.
    """

    name: str
    readings: Mapping[str, float]
    status: str
    source: str
    extrapolated: tuple[str, ...] = ()

    @property
    def nats(self) -> float:
        """What it adds to the prediction."""
        return next(iter(self.readings.values()))

    @property
    def low(self) -> float:
        """The least that any reading adds."""
        return min(self.readings.values())

    @property
    def high(self) -> float:
        """The most that any reading adds."""
        return max(self.readings.values())

    def to_json(self) -> dict[str, Any]:
        """All fields by name, with ``nats``, ``low`` and ``high``."""
        return {
            "name": self.name,
            "nats": self.nats,
            "low": self.low,
            "high": self.high,
            "status": self.status,
            "source": self.source,
            "extrapolated": list(self.extrapolated),
        }


def strengths(used: float, weak: float, strong: float) -> dict[str, float]:
    """Readings of a term whose size is judged: as used, and as weak and as strong as the evidence allows."""
    return {USED: used, WEAK: weak, STRONG: strong}
