"""What one candidate takes on one device, as the search sees it: measured here or predicted from a profile, never mixed up.

A cost comes from a callable that the caller hands in, ``cost(shape, quant)``. It may return a :class:`TokenCost` of
``profiles`` or a :class:`Cost`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from deepthin.engine.errors import DeepthinError, FormatError
from deepthin.engine.shape import Shape
from deepthin.profiles.schema import Measured, TokenCost, as_float, as_int, as_str, exact_keys

MEASURED, PREDICTED, PUBLISHED = "measured", "predicted", "published"
_LEAST_HALF_WIDTH = 0.001  # relative; no time is better known
BASES = (MEASURED, PREDICTED, PUBLISHED)


class MeasuringStoppedError(DeepthinError):
    """Nothing can be measured any more, whatever the shape: ends the run, which can be resumed, and fails no shape."""


class JsonTime(Protocol):
    """A time of ``profiles``: measured or predicted."""

    def to_json(self) -> dict[str, Any]:
        """The object of the command-line contract."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """One time with its interval.

    Attributes:
        value: median where measured, most probable value where predicted.
        low: lower end of its interval (95 % where measured, what the profile says elsewhere).
        high: upper end.
        unit: ``s`` or ``ms``.
        basis: ``measured``, ``predicted`` or ``published``.
        samples: raw samples; empty where nothing was measured.

    Raises:
        FormatError: a figure is not finite or the interval does not hold the value.
    """

    value: float
    low: float
    high: float
    unit: str = "s"
    basis: str = MEASURED
    samples: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check that the figures agree."""
        if self.basis not in BASES:
            raise FormatError(f"time: basis {self.basis!r} is unknown; it is one of {', '.join(BASES)}")
        if not all(map(math.isfinite, (self.value, self.low, self.high))) or not self.low <= self.value <= self.high:
            raise FormatError(f"time in {self.unit}: [{self.low}, {self.high}] does not hold {self.value}; it is damaged")

    @classmethod
    def of(cls, time: JsonTime) -> Self:
        """A measured time, or a predicted one that says so in its JSON form."""
        return cls.from_json(time.to_json())

    def scaled(self, factor: float, unit: str) -> Self:
        """The same in another unit."""
        samples = tuple(sample * factor for sample in self.samples)
        return type(self)(self.value * factor, self.low * factor, self.high * factor, unit, self.basis, samples)

    def to_json(self) -> dict[str, Any]:
        """The measured or the predicted object of the command-line contract."""
        if self.basis != MEASURED:
            return {"value": self.value, "low": self.low, "high": self.high, "unit": self.unit, "basis": self.basis}
        return {
            "median": self.value,
            "ci_low": self.low,
            "ci_high": self.high,
            "n": len(self.samples),
            "unit": self.unit,
            "samples": list(self.samples),
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value has the wrong type.
        """
        if isinstance(document, Mapping) and "basis" in document:
            fields = exact_keys(document, "predicted time", ("value", "low", "high", "unit", "basis"))
            value, low, high = (as_float(fields[name], name) for name in ("value", "low", "high"))
            return cls(value, low, high, as_str(fields["unit"], "unit"), as_str(fields["basis"], "basis"))
        measured = Measured.from_json(document)
        return cls(measured.median, measured.ci_low, measured.ci_high, measured.unit, MEASURED, measured.samples)


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What one candidate takes on one of several devices.

    Attributes:
        name: of the device's profile.
        decode: seconds per decoded token.
        first_token: seconds until the first token of the prompt, or None where that is not known.
        flags: as in :class:`Cost`.
    """

    name: str
    decode: Timing
    first_token: Timing | None = None
    flags: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        first = None if self.first_token is None else self.first_token.to_json()
        return {"name": self.name, "decode": self.decode.to_json(), "first_token": first, "flags": list(self.flags)}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value has the wrong type.
        """
        fields = exact_keys(document, "device time", ("name", "decode", "first_token", "flags"))
        first = fields["first_token"]
        return cls(
            as_str(fields["name"], "name"),
            Timing.from_json(fields["decode"]),
            None if first is None else Timing.from_json(first),
            _flags(fields["flags"]),
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Times of one candidate.

    Attributes:
        decode: seconds per decoded token at ``context`` cached ones; of several devices, the time that speaks for all
            (``search/devices.py``).
        threads: threads used.
        context: cached tokens.
        bytes_per_token: weight bytes one token reads.
        first_token: seconds until the first token of a prompt, or None where that is not known.
        prompt: tokens of that prompt; 0 without one.
        flags: reasons to trust it less (``wide-interval``, ``extrapolated``, ...).
        devices: the time on each, where the cost speaks for several devices.
    """

    decode: Timing
    threads: int
    context: int
    bytes_per_token: int
    first_token: Timing | None = None
    prompt: int = 0
    flags: tuple[str, ...] = ()
    devices: tuple[DeviceTime, ...] = ()

    @classmethod
    def of(cls, cost: TokenCost | Cost) -> Cost:
        """``cost`` as a :class:`Cost`."""
        if isinstance(cost, Cost):
            return cost
        return cls(Timing.of(cost.seconds_per_token), cost.threads, cost.context, cost.bytes_per_token, flags=tuple(cost.flags))

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {
            "decode": self.decode.to_json(),
            "threads": self.threads,
            "context": self.context,
            "bytes_per_token": self.bytes_per_token,
            "first_token": None if self.first_token is None else self.first_token.to_json(),
            "prompt": self.prompt,
            "flags": list(self.flags),
            **({"devices": [device.to_json() for device in self.devices]} if self.devices else {}),
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value has the wrong type.
        """
        devices: Any = []
        if isinstance(document, Mapping) and "devices" in document:
            document = {**document}
            devices = document.pop("devices")
        if not isinstance(devices, list):
            raise FormatError(f"cost: devices is {type(devices).__name__}, but a list is needed")
        names = ("decode", "threads", "context", "bytes_per_token", "first_token", "prompt", "flags")
        fields = exact_keys(document, "cost", names)
        first = fields["first_token"]
        return cls(
            decode=Timing.from_json(fields["decode"]),
            threads=as_int(fields["threads"], "threads"),
            context=as_int(fields["context"], "context"),
            bytes_per_token=as_int(fields["bytes_per_token"], "bytes_per_token"),
            first_token=None if first is None else Timing.from_json(first),
            prompt=as_int(fields["prompt"], "prompt"),
            flags=_flags(fields["flags"]),
            devices=tuple(DeviceTime.from_json(device) for device in devices),
        )


def _flags(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise FormatError(f"cost: flags is {type(value).__name__}, but a list is needed")
    return tuple(as_str(flag, "flags[]") for flag in value)


def pooled(timings: Sequence[Timing]) -> Timing:
    """Independent measurements of one time as one: weighted by their precision, wider where they contradict each other.

    Weights are inverse variances of the logarithms. Where the values scatter more than their intervals allow, the joint
    interval grows by that ratio (R. T. Birge, Physical Review 40, 207, 1932).
    """
    logs = [math.log(timing.value) for timing in timings]
    widths = [max(math.log(timing.high / timing.low) / 2, _LEAST_HALF_WIDTH) for timing in timings]
    weights = [1 / width**2 for width in widths]
    centre = math.fsum(w * x for w, x in zip(weights, logs, strict=True)) / math.fsum(weights)
    scatter = math.fsum(w * (x - centre) ** 2 for w, x in zip(weights, logs, strict=True))
    # widths are half intervals, 1.96 standard deviations
    ratio = math.sqrt(max(1.0, 1.96**2 * scatter / max(1, len(logs) - 1)))
    half = ratio / math.sqrt(math.fsum(weights))
    samples = tuple(sample for timing in timings for sample in timing.samples)
    first = timings[0]
    return Timing(math.exp(centre), math.exp(centre - half), math.exp(centre + half), first.unit, first.basis, samples)


CostOf = Callable[[Shape, str], TokenCost | Cost]
RepeatedCostOf = Callable[[Shape, str, int], TokenCost | Cost]  # the last argument counts repeats from 1; each measures anew
