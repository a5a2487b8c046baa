"""The range that probes covered: what lies outside is said to be extrapolated, dimension by dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from deepthin.engine.errors import FormatError
from deepthin.profiles.latency.workload import Workload
from deepthin.profiles.schema import as_float, as_str, exact_keys

MARGIN = 1.5  # factor beyond the outermost probes that still counts as covered
_CONTEXT_UNIT = 64  # contexts below it count as none


def measures(work: Workload) -> dict[str, float]:
    """The quantities a prediction depends on, by name."""
    return {
        "layers": work.layers,
        "width": work.shape.hidden_size,
        "MLP width": work.shape.intermediate_size,
        "bytes of weights": work.body_bytes + work.head_bytes,
        "bytes of the head": work.head_bytes,
        "cached tokens": max(work.context, _CONTEXT_UNIT),
        "prompt tokens": work.tokens,
    }


@dataclass(frozen=True, slots=True)
class Hull:
    """Smallest and largest of each quantity, and the formats, among the probes; a quantity not named has no limits."""

    low: Mapping[str, float]
    high: Mapping[str, float]
    quants: tuple[str, ...]

    @classmethod
    def of(cls, works: Sequence[Workload]) -> Self:
        """The hull of ``works``; of none, one that covers nothing."""
        found = [measures(work) for work in works]
        names = list(found[0]) if found else []
        return cls(
            {name: min(one[name] for one in found) for name in names},
            {name: max(one[name] for one in found) for name in names},
            tuple(sorted({work.body_quant for work in works})),
        )

    def outside(self, work: Workload) -> tuple[str, ...]:
        """Why ``work`` is outside, one reason a dimension; empty inside."""
        if not self.low:
            return ("nothing was probed",)
        reasons = []
        for name, value in measures(work).items():
            if name not in self.low:
                continue
            low, high = self.low[name] / MARGIN, self.high[name] * MARGIN
            if not low <= value <= high:
                side = f"below {self.low[name]:,.0f}" if value < low else f"above {self.high[name]:,.0f}"
                reasons.append(f"{name} {value:,.0f}, {side} of the probes")
        if work.body_quant not in self.quants:
            reasons.append(f"{work.body_quant} was not probed")
        elif work.quant != work.body_quant and work.head_quant not in self.quants:
            reasons.append(f"{work.head_quant} of the head was not probed")
        if work.has_fallback:
            reasons.append(f"some rows are no multiple of the block of {work.body_quant} and stay f16")
        return tuple(reasons)

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {"low": dict(self.low), "high": dict(self.high), "quants": list(self.quants)}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value has the wrong type.
        """
        fields = exact_keys(document, "hull", ("low", "high", "quants"))
        low, high = fields["low"], fields["high"]
        if not isinstance(low, Mapping) or not isinstance(high, Mapping) or set(low) != set(high):
            raise FormatError(
                "hull: low and high must be objects with the same names; the profile is damaged, so measure again"
            )
        if not isinstance(fields["quants"], list):
            raise FormatError(f"hull: quants is {type(fields['quants']).__name__}, but a list of names is needed")
        return cls(
            {str(name): as_float(value, name) for name, value in low.items()},
            {str(name): as_float(value, name) for name, value in high.items()},
            tuple(as_str(name, "quants[]") for name in fields["quants"]),
        )
