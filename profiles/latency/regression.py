"""Fits a time that is a sum of physical costs to measured times, and says how sure it is. Knows nothing of models or devices.

    T(x) = sum over terms of ( sum over factors of exp(a + B·theta)^p )^(1/p)

Each factor is a positive cost whose logarithm is linear in the unknowns theta; several factors of one term are alternatives
that overlap (reading against computing), joined by a p-norm, a maximum with a rounded corner. Errors are relative, so the
logarithm of T is compared. Every unknown has a prior (mean and spread of its logarithm), hence any number of probes will
do: what they do not determine stays as uncertain as it was, and the intervals say so.

    N observations    P unknowns    theta f64 [P]

Robust least squares (Cauchy weights) by Gauss-Newton with step control, covariance by the Laplace approximation. Intervals are
scaled so that nine of ten left-out observations fall inside (leverages give the left-out residuals without refitting).
Sources: Holland & Welsch 1977 for the weights; Cook & Weisberg 1982, section 2.2.1, for left-out residuals from leverages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from deepthin.engine.arrays import F64
from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles.schema import as_float, as_str, exact_keys

CORNER = 1.5  # p: reading and computing at equal cost take 1.59 times either
SHARP_CORNER = 3.0  # of models that were stored before the corner was
COVERAGE = 0.9
NORMAL_90 = 1.6449  # half width of the central 90 % of a normal distribution, in standard deviations
_REACH = 3.0  # standard deviations from which on a residual pulls less and less
_MAX_ITERATIONS = 60
_TOLERANCE = 1e-7
_SIGMA_PRIOR = 0.03  # misfit expected of the terms themselves
_SIGMA_PRIOR_COUNT = 3.0
_MAX_LEVERAGE = 0.95


@dataclass(frozen=True, slots=True)
class Factor:
    """One positive cost: exp(log_scale + sum of exponent x unknown).

    Attributes:
        log_scale: logarithm of what is known of it, in seconds with the unknowns at 0.
        powers: unknown -> exponent.
    """

    log_scale: float
    powers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Term:
    """One additive cost under the name it is reported by; its factors overlap."""

    name: str
    factors: tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation of an unknown before any probe."""

    mean: float
    sd: float


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time: its terms, seconds, and the relative standard deviation of the measurement."""

    terms: tuple[Term, ...]
    seconds: float
    noise: float


@dataclass(frozen=True)
class Fitted:
    """Unknowns after fitting.

    Attributes:
        names: of the unknowns.
        theta: f64 [P] most probable values.
        covariance: f64 [P, P] of their posterior.
        sigma: relative misfit of the terms, beyond measuring noise.
        noise: relative standard deviation of a typical observation; part of the interval, which is for what would be measured.
        half_width: of 90 % intervals, in predictive standard deviations.
        residuals: ln(measured / fitted) of each observation.
        left_out: the same with that observation left out of the fit.
        corner: the p-norm's p.
    """

    names: tuple[str, ...]
    theta: F64
    covariance: F64
    sigma: float
    noise: float
    half_width: float
    residuals: tuple[float, ...]
    left_out: tuple[float, ...]
    corner: float = CORNER

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each unknown."""
        return {name: i for i, name in enumerate(self.names)}

    def predict(self, terms: Sequence[Term]) -> tuple[float, float, float, dict[str, float]]:
        """Seconds, the ends of their 90 % interval, and the seconds of each term by name."""
        system = _System([terms], self.index, self.corner)
        seconds, parts, jacobian = system.evaluate(self.theta)
        total, gradient = float(seconds[0]), jacobian[0]
        sd = math.sqrt(float(gradient @ self.covariance @ gradient) + self.sigma**2 + self.noise**2)
        factor = math.exp(self.half_width * sd)
        named: dict[str, float] = {}
        for term, value in zip(terms, parts, strict=True):
            named[term.name] = named.get(term.name, 0.0) + float(value)
        return total, total / factor, total * factor, named

    def value(self, name: str) -> tuple[float, float, float]:
        """The exponential of an unknown, with the ends of its 90 % interval."""
        at = self.index[name]
        half = NORMAL_90 * math.sqrt(float(self.covariance[at, at]))
        centre = float(self.theta[at])
        return math.exp(centre), math.exp(centre - half), math.exp(centre + half)

    def to_json(self) -> dict[str, Any]:
        """All fields; the covariance row by row."""
        return {
            "names": list(self.names),
            "theta": [float(x) for x in self.theta],
            "covariance": [[float(x) for x in row] for row in self.covariance],
            "sigma": self.sigma,
            "noise": self.noise,
            "half_width": self.half_width,
            "residuals": list(self.residuals),
            "left_out": list(self.left_out),
            "corner": self.corner,
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or sizes or types do not fit.
        """
        keys = ("names", "theta", "covariance", "sigma", "noise", "half_width", "residuals", "left_out")
        fields = exact_keys(document, "fitted model", keys, ("corner",))
        for key in ("names", "theta", "covariance", "residuals", "left_out"):
            if not isinstance(fields[key], list):
                raise FormatError(f"fitted model: {key} is {type(fields[key]).__name__}, but a list is needed")
        names = tuple(as_str(name, "names[]") for name in fields["names"])
        theta = np.array([as_float(x, "theta[]") for x in fields["theta"]], np.float64)
        rows = [[as_float(x, "covariance[][]") for x in row] for row in fields["covariance"] if isinstance(row, list)]
        if len(theta) != len(names) or len(rows) != len(names) or any(len(row) != len(names) for row in rows):
            raise FormatError(f"fitted model: {len(names)} names, but theta or covariance have another size; measure again")
        corner = as_float(fields.get("corner", SHARP_CORNER), "corner")
        if not corner >= 1:
            raise FormatError(
                f"fitted model: corner is {corner}, but at least 1 is needed; the profile is damaged, so measure again"
            )
        return cls(
            names,
            theta,
            np.array(rows, np.float64).reshape(len(names), len(names)),
            as_float(fields["sigma"], "sigma"),
            as_float(fields["noise"], "noise"),
            as_float(fields["half_width"], "half_width"),
            tuple(as_float(x, "residuals[]") for x in fields["residuals"]),
            tuple(as_float(x, "left_out[]") for x in fields["left_out"]),
            corner,
        )


def fit(observations: Sequence[Observation], priors: Mapping[str, Prior]) -> Fitted:
    """The most probable unknowns given ``observations``; with none, the priors themselves.

    Args:
        observations: measured times; their terms may only name unknowns that have a prior.
        priors: mean and spread of every unknown.

    Raises:
        UsageError: a time is not positive.
    """
    names = tuple(priors)
    mean = np.array([priors[name].mean for name in names], np.float64)
    precision = np.diag([priors[name].sd ** -2 for name in names]).astype(np.float64)
    if any(not one.seconds > 0 for one in observations):
        raise UsageError("fitting: a measured time is not positive; the probe is damaged, so measure it again")
    if not observations:
        return Fitted(names, mean, np.diag(1 / np.diag(precision)), _SIGMA_PRIOR, 0.0, NORMAL_90, (), ())
    system = _System([one.terms for one in observations], {name: i for i, name in enumerate(names)})
    target = np.log([one.seconds for one in observations])
    noise = np.array([one.noise for one in observations], np.float64)
    theta, sigma = mean.copy(), 0.1
    for _ in range(4):  # unknowns and misfit in turn
        variance = noise**2 + sigma**2
        theta = _solve(system, target, variance, theta, mean, precision)
        seconds, _, jacobian = system.evaluate(theta)
        residuals = target - np.log(seconds)
        weights = _weights(residuals / np.sqrt(variance)) / variance
        covariance = np.asarray(np.linalg.inv(jacobian.T @ (weights[:, None] * jacobian) + precision), np.float64)
        leverage = np.minimum(np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian) * weights, _MAX_LEVERAGE)
        sigma = _misfit(residuals, noise, leverage)
    variance = noise**2 + sigma**2
    left_out = residuals / (1 - leverage)
    scaled = np.sort(np.abs(left_out) / np.sqrt(variance / (1 - leverage)))
    return Fitted(
        names,
        theta,
        covariance,
        sigma,
        float(np.median(noise)),
        _half_width(scaled),
        tuple(float(x) for x in residuals),
        tuple(float(x) for x in left_out),
    )


class _System:
    """All observations' factors as one matrix, so that evaluating is a few array operations."""

    def __init__(self, observations: Sequence[Sequence[Term]], index: Mapping[str, int], corner: float = CORNER) -> None:
        self.corner = corner
        factors = [factor for terms in observations for term in terms for factor in term.factors]
        self.scale = np.array([factor.log_scale for factor in factors], np.float64)
        self.powers = np.zeros((len(factors), len(index)), np.float64)
        for row, factor in enumerate(factors):
            for name, power in factor.powers.items():
                self.powers[row, index[name]] += power
        sizes = [len(term.factors) for terms in observations for term in terms]
        self.term_starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self.term_of = np.repeat(np.arange(len(sizes)), sizes)
        counts = [len(terms) for terms in observations]
        self.observation_starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        self.observation_of = np.repeat(np.arange(len(counts)), counts)

    def evaluate(self, theta: F64) -> tuple[F64, F64, F64]:
        """Seconds f64 [N], seconds of each term, and the Jacobian f64 [N, P] of ln(seconds)."""
        logs = self.scale + self.powers @ theta
        top = np.maximum.reduceat(logs, self.term_starts)
        raised = np.exp(self.corner * (logs - top[self.term_of]))
        sums = np.add.reduceat(raised, self.term_starts)
        parts = np.exp(top) * sums ** (1 / self.corner)
        share = raised / sums[self.term_of]
        gradients = np.add.reduceat(share[:, None] * self.powers, self.term_starts, axis=0)
        seconds = np.add.reduceat(parts, self.observation_starts)
        weights = parts / seconds[self.observation_of]
        return seconds, parts, np.add.reduceat(weights[:, None] * gradients, self.observation_starts, axis=0)


def _solve(system: _System, target: F64, variance: F64, theta: F64, mean: F64, precision: F64) -> F64:
    """Minimise robust squared residuals plus squared distance from the prior; steps that do not help are shortened."""

    def loss(at: F64) -> float:
        scaled = (target - np.log(system.evaluate(at)[0])) / np.sqrt(variance)
        gap = at - mean
        return float((_REACH**2 * np.log1p((scaled / _REACH) ** 2)).sum() + gap @ precision @ gap)

    best = loss(theta)
    damping = 1e-3
    for _ in range(_MAX_ITERATIONS):
        seconds, _, jacobian = system.evaluate(theta)
        residuals = target - np.log(seconds)
        weights = _weights(residuals / np.sqrt(variance)) / variance
        hessian = jacobian.T @ (weights[:, None] * jacobian) + precision
        gradient = jacobian.T @ (weights * residuals) - precision @ (theta - mean)
        while damping < 1e8:
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            now = loss(theta + step)
            if now <= best:
                break
            damping *= 4
        else:
            return theta
        theta, damping = theta + step, max(damping / 4, 1e-9)
        if best - now <= _TOLERANCE * (1 + best):
            return theta
        best = now
    return theta


def _weights(scaled: F64) -> F64:
    """Weights of scaled residuals: near 1 inside, falling with the square outside, so that a wild one hardly pulls."""
    return 1.0 / (1.0 + (scaled / _REACH) ** 2)


def _misfit(residuals: F64, noise: F64, leverage: F64) -> float:
    """Relative misfit beyond noise: clipped residuals over the degrees of freedom, drawn towards its prior."""
    spread = 1.4826 * float(np.median(np.abs(residuals))) or _SIGMA_PRIOR
    clipped = np.clip(residuals, -3 * spread, 3 * spread)
    known = np.minimum(noise, spread)
    freedom = max(float((1 - leverage).sum()), 0.5)
    excess = max(float((clipped**2).sum()) - float((known**2 * (1 - leverage)).sum()), 0.0)
    return math.sqrt((excess + _SIGMA_PRIOR_COUNT * _SIGMA_PRIOR**2) / (freedom + _SIGMA_PRIOR_COUNT))


def _half_width(scaled: F64) -> float:
    """How many predictive standard deviations hold 90 % of left-out observations; a small sample counts as one more miss."""
    rank = math.ceil(COVERAGE * (len(scaled) + 1))
    if rank > len(scaled):
        return max(NORMAL_90, float(scaled[-1]))
    return float(np.clip(scaled[rank - 1], 1.0, 2 * NORMAL_90))
