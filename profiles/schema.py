"""Records of measured times, as passed to the search and stored in JSON. Frozen data and checks, no measuring.

A measured value always carries its raw samples and an interval; a cost of one token says which parts it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from deepthin.engine.errors import FormatError


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured quantity.

    Attributes:
        median: median of ``samples`` (of the composed value where parts are added up).
        ci_low: lower end of the bootstrap interval of the median.
        ci_high: upper end; ``ci_low <= median <= ci_high``.
        n: number of samples.
        unit: unit of every figure here: ``s``, ``tok/s``, ``bytes/s`` or ``ratio``.
        samples: raw samples in the order taken.

    Raises:
        FormatError: a figure is not finite, the interval does not hold the median, or ``n`` is not the sample count.
    """

    median: float
    ci_low: float
    ci_high: float
    n: int
    unit: str
    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that the figures agree with one another."""
        if not all(math.isfinite(x) for x in (self.median, self.ci_low, self.ci_high, *self.samples)):
            raise FormatError(
                f"measured value in {self.unit}: a figure is not finite; the measurement is damaged, so take it again"
            )
        if not self.ci_low <= self.median <= self.ci_high:
            raise FormatError(
                f"measured value in {self.unit}: interval [{self.ci_low}, {self.ci_high}] does not hold the median "
                f"{self.median}; the record is damaged, so measure again"
            )
        if self.n != len(self.samples) or self.n < 1:
            raise FormatError(
                f"measured value in {self.unit}: n is {self.n} but {len(self.samples)} samples are there (at least one is "
                f"needed); the record is damaged, so measure again"
            )

    @property
    def relative_width(self) -> float:
        """Width of the interval over the median; 0.03 reads "3 % wide". Infinite for a median of zero with a width."""
        width = self.ci_high - self.ci_low
        if self.median == 0:
            return math.inf if width else 0.0
        return width / abs(self.median)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the command-line contract."""
        return {
            "median": self.median,
            "ci_low": self.ci_low,
            "ci_high": self.ci_high,
            "n": self.n,
            "unit": self.unit,
            "samples": list(self.samples),
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value has the wrong type.
        """
        fields = exact_keys(document, "measured value", ("median", "ci_low", "ci_high", "n", "unit", "samples"))
        samples = fields["samples"]
        if not isinstance(samples, list):
            raise FormatError(f"measured value: samples is {type(samples).__name__}, but a list of numbers is needed")
        return cls(
            median=as_float(fields["median"], "median"),
            ci_low=as_float(fields["ci_low"], "ci_low"),
            ci_high=as_float(fields["ci_high"], "ci_high"),
            n=as_int(fields["n"], "n"),
            unit=as_str(fields["unit"], "unit"),
            samples=tuple(as_float(x, "samples[]") for x in samples),
        )


@dataclass(frozen=True, slots=True)
class Predicted:
    """One predicted quantity, as the command-line contract words it.

    Attributes:
        value: the most probable one.
        low: lower end of its 90 % interval.
        high: upper end; ``low <= value <= high``.
        unit: unit of all three.
        basis: how it is known: ``predicted`` from probes, ``published`` from data sheets alone.

    Raises:
        FormatError: a figure is not finite, or the interval does not hold the value.
    """

    value: float
    low: float
    high: float
    unit: str
    basis: str

    def __post_init__(self) -> None:
        """Check that the figures agree with one another."""
        if not all(math.isfinite(x) for x in (self.value, self.low, self.high)) or not self.low <= self.value <= self.high:
            raise FormatError(
                f"predicted value in {self.unit}: [{self.low}, {self.high}] does not hold {self.value}; the record is damaged"
            )

    @property
    def median(self) -> float:
        """The value, under the name that a measured one has."""
        return self.value

    def scaled(self, factor: float, unit: str) -> Self:
        """The same in another unit."""
        return type(self)(self.value * factor, self.low * factor, self.high * factor, unit, self.basis)

    def rate(self, amount: float, unit: str) -> Self:
        """``amount`` over this time; the ends of the interval change places."""
        return type(self)(amount / self.value, amount / self.high, amount / self.low, unit, self.basis)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the command-line contract."""
        return {"value": self.value, "low": self.low, "high": self.high, "unit": self.unit, "basis": self.basis}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value has the wrong type.
        """
        fields = exact_keys(document, "predicted value", ("value", "low", "high", "unit", "basis"))
        value, low, high = (as_float(fields[name], name) for name in ("value", "low", "high"))
        return cls(value, low, high, as_str(fields["unit"], "unit"), as_str(fields["basis"], "basis"))


_TIMES = ("seconds_per_token", "block_s", "head_s", "embed_s", "overhead_s")
_COUNTS = ("bytes_per_token", "threads", "context")


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Time of one decoded token of one shape and format, and the parts it was composed of: all measured, or all predicted.

    Attributes:
        seconds_per_token: executed layers x ``block_s`` + ``head_s`` + ``embed_s`` + ``overhead_s``; where measured, its
            samples are sums of resampled part medians.
        block_s: one block, weights streamed as in a whole model.
        head_s: final norm and output head.
        embed_s: embedding row.
        overhead_s: wake-up, barriers and whatever else a step spends outside the other parts.
        bytes_per_token: weight bytes one token reads.
        threads: threads used.
        context: cached tokens attended to.
        quant: body format name.
        measured_now: False when every part came from the store.
        flags: reasons to trust a part less (``wide-interval``, ``drift``, ``other-processes``, ``extrapolated``, ...), empty
            when clean.

    Raises:
        FormatError: a time is not in seconds or a count is negative.
    """

    seconds_per_token: Measured | Predicted
    block_s: Measured | Predicted
    head_s: Measured | Predicted
    embed_s: Measured | Predicted
    overhead_s: Measured | Predicted
    bytes_per_token: int
    threads: int
    context: int
    quant: str
    measured_now: bool
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check units and signs."""
        for name in _TIMES:
            unit = getattr(self, name).unit
            if unit != "s":
                raise FormatError(f"token cost: {name} is in {unit!r}, but seconds ('s') are needed")
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise FormatError(f"token cost: {name} is {getattr(self, name)}, but it cannot be negative")

    @property
    def basis(self) -> str:
        """``measured``, or what the prediction rests on."""
        time = self.seconds_per_token
        return time.basis if isinstance(time, Predicted) else "measured"

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        document: dict[str, Any] = {name: getattr(self, name).to_json() for name in _TIMES}
        document |= {name: getattr(self, name) for name in _COUNTS}
        return document | {"quant": self.quant, "measured_now": self.measured_now, "flags": list(self.flags)}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value has the wrong type.
        """
        fields = exact_keys(document, "token cost", (*_TIMES, *_COUNTS, "quant", "measured_now", "flags"))
        measured_now, flags = fields["measured_now"], fields["flags"]
        if not isinstance(measured_now, bool):
            raise FormatError(f"token cost: measured_now is {measured_now!r}, but true or false is needed")
        if not isinstance(flags, list):
            raise FormatError(f"token cost: flags is {type(flags).__name__}, but a list of texts is needed")
        times = {name: _time_from_json(fields[name]) for name in _TIMES}
        return cls(
            **times,
            bytes_per_token=as_int(fields["bytes_per_token"], "bytes_per_token"),
            threads=as_int(fields["threads"], "threads"),
            context=as_int(fields["context"], "context"),
            quant=as_str(fields["quant"], "quant"),
            measured_now=measured_now,
            flags=tuple(as_str(flag, "flags[]") for flag in flags),
        )


def _time_from_json(document: Any) -> Measured | Predicted:
    is_predicted = isinstance(document, Mapping) and "basis" in document
    return Predicted.from_json(document) if is_predicted else Measured.from_json(document)


def exact_keys(document: Any, what: str, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """``document`` if it is an object with exactly ``keys``, and perhaps some of ``optional``.

    Raises:
        FormatError: it is no object, lacks a key, or has one more.
    """
    if not isinstance(document, Mapping):
        raise FormatError(f"{what}: found {type(document).__name__}, but a JSON object with {', '.join(keys)} is needed")
    missing = [key for key in keys if key not in document]
    extra = sorted(str(key) for key in set(document) - {*keys, *optional})
    if missing or extra:
        problem = f"key {missing[0]!r} is missing" if missing else f"key {extra[0]!r} is unknown"
        raise FormatError(f"{what}: {problem}; the keys are {', '.join(keys)}")
    return document


def as_float(value: Any, name: str) -> float:
    """``value`` as float; booleans and texts are refused.

    Raises:
        FormatError: it is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormatError(f"{name} is {value!r}, but a number is needed")
    return float(value)


def as_int(value: Any, name: str) -> int:
    """``value`` as int; booleans and fractions are refused.

    Raises:
        FormatError: it is no integer.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormatError(f"{name} is {value!r}, but an integer is needed")
    return value


def as_str(value: Any, name: str) -> str:
    """``value`` if it is a text.

    Raises:
        FormatError: it is no text.
    """
    if not isinstance(value, str):
        raise FormatError(f"{name} is {value!r}, but a text is needed")
    return value
