"""How far two runtimes' logits lie apart, and whether that is within a budget. Pure NumPy; knows nothing of files or runtimes.

S positions    V vocabulary    r reference logits f64 [S, V]    x the other's logits [S, V]

max_abs    max |x - r|
nmse       sum (x - r)^2 / sum r^2, over all positions (as ggml's test-backend-ops defines it) or within one
kl         KL(softmax r || softmax x) per position, in nats; its mean and its largest value
top1       share of positions where both have the same largest logit, or one in a near-tie with it
top10      how many of r's ten largest logits are among x's ten largest, as a share, the mean over positions
near-tie   r falls short of its maximum, at the token x prefers, by at most ``near_tie`` standard deviations of r's row
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deepthin.engine.arrays import F64
from deepthin.export.tolerances import Budget

_FAIR_PART = 0.1  # of the mean over all positions
_TOP = 10


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position where two runtimes part.

    Attributes:
        position: index into the token list.
        why: one clause naming the measure that broke its limit.
    """

    position: int
    why: str


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Distances between one pair of logit arrays, and the verdict under a budget.

    Attributes:
        nmse: over all positions.
        max_position_nmse: of the worst single position.
        top1_ties: positions where the largest logits differ, but only within a near-tie.
        top10: common part of the ten largest.
        max_shortfall: of all positions where the largest logits differ, how far down r's row the other's one is, at most.
        first_divergence: the first position that breaks a limit, if any does.
        why: what broke the budget, one clause; empty when ``ok``.
    """

    num_positions: int
    max_abs: float
    nmse: float
    max_position_nmse: float
    kl_mean: float
    kl_max: float
    top1: float
    top1_ties: int
    top10: float
    max_shortfall: float
    first_divergence: Divergence | None
    ok: bool
    why: str
    budget: Budget

    def to_json(self) -> dict[str, Any]:
        """The report as the ``pairs`` entries of a verification show it; a value that is not finite becomes null."""
        parted = self.first_divergence
        return {
            "max_abs": _finite(self.max_abs),
            "nmse": _finite(self.nmse),
            "max_position_nmse": _finite(self.max_position_nmse),
            "kl": _finite(self.kl_mean),
            "kl_max": _finite(self.kl_max),
            "top1": self.top1,
            "top1_ties": self.top1_ties,
            "top10": self.top10,
            "first_divergence": None if parted is None else {"position": parted.position, "why": parted.why},
            "budget": self.budget.to_json(),
            "ok": self.ok,
            "why": self.why,
        }


def compare_logits(reference: F64, other: npt.NDArray[Any], budget: Budget) -> ParityReport:
    """Measure ``other`` [S, V] against ``reference`` f64 [S, V] and judge it.

    Raises:
        ValueError: the arrays differ in shape or are empty.
    """
    if reference.ndim != 2 or reference.shape != other.shape or reference.size == 0:
        raise ValueError(f"logits of shape {other.shape} cannot be compared with reference logits of shape {reference.shape}")
    r, x = reference.astype(np.float64, copy=False), other.astype(np.float64)
    bad_rows = np.flatnonzero(~np.isfinite(x).all(axis=1))
    x = np.where(np.isfinite(x), x, 0.0) if bad_rows.size else x
    squares, norms = np.square(x - r).sum(axis=1), np.square(r).sum(axis=1)
    by_position = _ratio(squares, norms)
    kl = _kl_divergence(r, x)
    shortfall = _shortfall(r, x)
    nmse = float(_ratio(squares.sum(), norms.sum()))
    if bad_rows.size:
        nmse = float("inf")
    parted = _first_divergence(by_position, kl, shortfall, bad_rows, budget)
    why = _broken_limit(nmse, float(kl.mean()), parted, budget)
    if why:  # the whole is beyond its limit: the first position that takes a fair part in it is where it began
        closer = replace(
            budget,
            position_nmse=min(budget.position_nmse, max(budget.nmse, _FAIR_PART * nmse)),
            position_kl=min(budget.position_kl, max(budget.kl, _FAIR_PART * float(kl.mean()))),
        )
        parted = _first_divergence(by_position, kl, shortfall, bad_rows, closer)
    return ParityReport(
        num_positions=len(r),
        max_abs=float("inf") if bad_rows.size else float(np.abs(x - r).max()),
        nmse=nmse,
        max_position_nmse=float("inf") if bad_rows.size else float(by_position.max()),
        kl_mean=float("inf") if bad_rows.size else float(kl.mean()),
        kl_max=float("inf") if bad_rows.size else float(kl.max()),
        top1=float((shortfall <= budget.near_tie).mean()),
        top1_ties=int(((shortfall > 0) & (shortfall <= budget.near_tie)).sum()),
        top10=_common_top(r, x),
        max_shortfall=float(shortfall.max()),
        first_divergence=parted,
        ok=not why,
        why=why,
        budget=budget,
    )


def _ratio(error: Any, norm: Any) -> Any:
    """``error / norm``; zero over zero is 0, anything else over zero is infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, np.divide(error, norm))


def _log_softmax(rows: F64) -> F64:
    shifted = rows - rows.max(axis=1, keepdims=True)
    result: F64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _kl_divergence(r: F64, x: F64) -> F64:
    log_r = _log_softmax(r)
    divergence: F64 = (np.exp(log_r) * (log_r - _log_softmax(x))).sum(axis=1)
    return np.maximum(divergence, 0.0)  # rounding takes equal rows a hair below zero


def _shortfall(r: F64, x: F64) -> F64:
    """How far r at the token x prefers lies below r's maximum, per position, in standard deviations of r's row."""
    below: F64 = _ratio(r.max(axis=1) - r[np.arange(len(r)), x.argmax(axis=1)], r.std(axis=1))
    return below


def _common_top(r: F64, x: F64) -> float:
    count = min(_TOP, r.shape[1])
    tops = (np.argpartition(-side, count - 1, axis=1)[:, :count] for side in (r, x))
    common = [np.intersect1d(a, b, assume_unique=True).size for a, b in zip(*tops, strict=True)]
    return float(np.mean(common) / count)


def _first_divergence(
    by_position: F64, kl: F64, shortfall: F64, bad_rows: npt.NDArray[np.intp], budget: Budget
) -> Divergence | None:
    found = [Divergence(int(at), "a logit is not finite") for at in bad_rows[:1]]
    found += [
        Divergence(int(at), f"NMSE {by_position[at]:.2g} there")
        for at in np.flatnonzero(by_position > budget.position_nmse)[:1]
    ]
    found += [Divergence(int(at), f"KL {kl[at]:.2g} nats there") for at in np.flatnonzero(kl > budget.position_kl)[:1]]
    found += [
        Divergence(int(at), f"another top token, {shortfall[at]:.2g} deviations down, near-tie is {budget.near_tie:.2g}")
        for at in np.flatnonzero(shortfall > budget.near_tie)[:1]
    ]
    return min(found, key=lambda item: item.position, default=None)


def _broken_limit(nmse: float, kl: float, parted: Divergence | None, budget: Budget) -> str:
    if nmse > budget.nmse:
        return f"NMSE {nmse:.2g} over all positions, limit {budget.nmse:.2g}"
    if kl > budget.kl:
        return f"mean KL {kl:.2g} nats, limit {budget.kl:.2g}"
    return f"position {parted.position} is beyond the limit for one position: {parted.why}" if parted else ""


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
