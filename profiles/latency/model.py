"""The latency model of one runtime at one thread count: fitted to probes, asked for any shape, format and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles.contention import CONTENTION_FLAGS, MOVED_CORES
from deepthin.profiles.latency.curve import BandwidthCurve
from deepthin.profiles.latency.hull import Hull
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.regression import Fitted, Observation, fit
from deepthin.profiles.latency.runtimes import Runtime, runtime_named
from deepthin.profiles.latency.terms import Conditions, priors, terms
from deepthin.profiles.latency.upgrade import upgraded
from deepthin.profiles.latency.workload import TESTS, Workload
from deepthin.profiles.schema import Predicted, as_float, as_int, as_str, exact_keys

PREDICTED, PUBLISHED = "predicted", "published"
MIN_NOISE = 0.005  # relative; a median is never better known than this
MOVED_NOISE = 0.3  # relative; what a placement of the cores that is not the profile's changes
DISTURBED_NOISE = 3.0  # how many times noisier a probe counts that was taken while others used the machine
_INTERVAL_SDS = 2 * 1.96  # a 95 % interval in standard deviations


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted time.

    Attributes:
        seconds: per token when decoding, of the whole prompt otherwise; with its 90 % interval and basis.
        terms: seconds of weights, layers, attention, head and overhead; they add up.
        extrapolated: why it lies outside what was probed; empty inside.
    """

    seconds: Predicted
    terms: dict[str, float]
    extrapolated: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {"seconds": self.seconds.to_json(), "terms": self.terms, "extrapolated": list(self.extrapolated)}


@dataclass(frozen=True)
class LatencyModel:
    """Times of one test on one runtime at one thread count of one device.

    Attributes:
        conditions: runtime, threads, bandwidth curve, and how likely its share is.
        test: ``decode`` or ``prefill``.
        fitted: the unknowns.
        hull: what the probes covered.
        basis: ``predicted`` from probes, ``published`` from data sheets alone.
    """

    conditions: Conditions
    test: str
    fitted: Fitted
    hull: Hull
    basis: str = PREDICTED

    def predict(self, work: Workload) -> Prediction:
        """The time of ``work``.

        Raises:
            UsageError: it is another test than this model's.
        """
        if work.test != self.test:
            raise UsageError(f"this model predicts {self.test}, not {work.test}")
        seconds, low, high, named = self.fitted.predict(terms(work, self.conditions))
        return Prediction(Predicted(seconds, low, high, "s", self.basis), named, self.hull.outside(work))

    def residual_summary(self) -> dict[str, float | int]:
        """How well the terms explain the probes: relative errors, in the fit and of probes left out of it."""
        found: dict[str, float | int] = {"probes": len(self.fitted.residuals), "sigma": self.fitted.sigma}
        for name, values in (("fit", self.fitted.residuals), ("left_out", self.fitted.left_out)):
            if values:
                errors = np.abs(np.expm1(values))
                found[f"{name}_median"] = float(np.median(errors))
                found[f"{name}_p90"] = float(np.quantile(errors, 0.9))
                found[f"{name}_max"] = float(errors.max())
        return found

    def to_json(self) -> dict[str, Any]:
        """All but the bandwidth curve, which the profile holds once."""
        conditions = self.conditions
        return {
            "runtime": conditions.runtime.name,
            "threads": conditions.threads,
            "test": self.test,
            "basis": self.basis,
            "share": conditions.share,
            "share_sd": conditions.share_sd,
            "pace": conditions.pace,
            "cache_sd": conditions.cache_sd,
            "fitted": self.fitted.to_json(),
            "residuals": self.residual_summary(),
            "hull": self.hull.to_json(),
        }

    @classmethod
    def from_json(cls, document: Any, curve: BandwidthCurve) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value does not fit.
        """
        numbers = ("share", "share_sd", "pace", "cache_sd")
        keys = ("runtime", "threads", "test", "basis", *numbers, "fitted", "residuals", "hull")
        fields = exact_keys(document, "latency model", keys)
        try:
            runtime = runtime_named(as_str(fields["runtime"], "runtime"))
        except UsageError as error:
            raise FormatError(f"latency model: {error}") from error
        conditions = Conditions(
            runtime,
            as_int(fields["threads"], "threads"),
            curve,
            *(as_float(fields[name], name) for name in numbers),
        )
        test = as_str(fields["test"], "test")
        fitted = upgraded(Fitted.from_json(fields["fitted"]))
        if test not in TESTS or set(fitted.names) != set(priors(conditions, test)):
            raise FormatError(
                f"latency model: test {test!r} or its unknowns are not those of this version; measure the profile again"
            )
        return cls(conditions, test, fitted, Hull.from_json(fields["hull"]), as_str(fields["basis"], "basis"))


def fit_model(probes: Sequence[Probe], conditions: Conditions, test: str, *, basis: str = PREDICTED) -> LatencyModel:
    """Fit the terms of ``test`` to those of ``probes`` that are of it; with none, the model is what is believed beforehand.

    Raises:
        UsageError: a probe is of another runtime or thread count.
    """
    mine = [probe for probe in probes if probe.work.test == test]
    _check(mine, conditions.runtime, conditions.threads)
    observations = [Observation(terms(probe.work, conditions), probe.seconds.median, _noise(probe)) for probe in mine]
    fitted = fit(observations, priors(conditions, test))
    return LatencyModel(conditions, test, fitted, Hull.of([probe.work for probe in mine]), basis)


def is_disturbed(probe: Probe) -> bool:
    """Whether others used the machine while it was taken."""
    return not CONTENTION_FLAGS.isdisjoint(probe.flags)


def _noise(probe: Probe) -> float:
    """Relative standard deviation to fit a probe with."""
    if MOVED_CORES in probe.flags:
        return MOVED_NOISE
    noise = max(probe.seconds.relative_width / _INTERVAL_SDS, MIN_NOISE)
    return noise * DISTURBED_NOISE if is_disturbed(probe) else noise


def _check(probes: Sequence[Probe], runtime: Runtime, threads: int) -> None:
    for probe in probes:
        if (probe.runtime, probe.threads) != (runtime.name, threads):
            raise UsageError(
                f"fitting {runtime.name} at {threads} threads: one probe is of {probe.runtime} at {probe.threads} threads"
            )
