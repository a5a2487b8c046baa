"""Devices known from data sheets: their facts, and a profile predicted from those alone, with basis ``published``.

Every value in a device file carries unit, source, date and status; the loader refuses one without. Nothing was measured on
these devices by deepthin, so the profile is the latency model's priors over the stated bandwidth, and its intervals are wide.

Share of the stated bandwidth that decoding reads at: about 58 % of the peak on a Raspberry Pi 5 (ggml-org/llama.cpp issue
#26484), 65 to 97 % of a measured ceiling on an i7-12700H (llama-roofline). What memcpy copies is read and written, so reading
runs at up to twice its figure; and on some boards one core cannot fill the memory, so all of this holds within a factor.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any

from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.formats import FORMATS
from deepthin.engine.shape import Shape
from deepthin.profiles.latency.curve import flat_curve
from deepthin.profiles.latency.hull import Hull
from deepthin.profiles.latency.model import PUBLISHED as PUBLISHED_BASIS
from deepthin.profiles.latency.model import LatencyModel
from deepthin.profiles.latency.regression import Fitted, fit
from deepthin.profiles.latency.runtimes import LLAMA_CPP, RUNTIMES
from deepthin.profiles.latency.terms import Conditions, priors
from deepthin.profiles.latency.workload import TESTS
from deepthin.profiles.profile import PUBLISHED, Profile

SCHEMA = "deepthin/device/1"
STATUSES = ("published", "measured", "derived", "leak", "anecdotal", "unverified", "estimated")
CLASSES = ("phone", "laptop", "desktop", "board")
# share of the stated bandwidth, and the spread of its logarithm
SHARES = {
    "peak": (0.6, math.log(1.35)),
    "decode": (1.0, math.log(1.15)),
    "memcpy": (1.9, math.log(1.4)),
    "guess": (0.6, math.log(1.7)),
}
PACES = {"phone": 0.8, "laptop": 0.5, "desktop": 0.5, "board": 1.8}  # estimated from core widths and clocks, within SPREAD
SMALLEST_BYTES, LARGEST_BYTES = 64e6, 16e9  # below, caches may hold much of a model, and nothing here knows them
_ONE_CORE_SHARE = 0.6  # of what all fast cores read; one core alone seldom fills the memory
_UNPROVEN = math.log(1.3)  # misfit of the terms on a device where they were never tried


@dataclass(frozen=True, slots=True)
class Fact:
    """One value with what it takes to judge it."""

    field: str
    value: float | str
    unit: str
    conditions: str
    status: str
    source: str
    date: str

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {name: getattr(self, name) for name in ("field", "value", "unit", "conditions", "status", "source", "date")}


@dataclass(frozen=True, slots=True)
class PublishedSpeed:
    """A decode speed that somebody published, with the shape it is of.

    Attributes:
        fact: tokens per second.
        runtime: as its source names it.
        model: its name.
        shape: of the model.
        quant: the nearest of our formats.
        threads: stated, or None.
    """

    fact: Fact
    runtime: str
    model: str
    shape: Shape
    quant: str
    threads: int | None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device file.

    Attributes:
        name: file name without suffix.
        title: for people.
        kind: phone, laptop, desktop or board.
        bandwidth: of memory.
        bandwidth_kind: a key of :data:`SHARES`.
        cores: threads that decoding would use.
        facts: everything else that is known.
        speeds: published ones, for comparison only; no prediction uses them.
    """

    name: str
    title: str
    kind: str
    bandwidth: Fact
    bandwidth_kind: str
    cores: Fact
    facts: tuple[Fact, ...]
    speeds: tuple[PublishedSpeed, ...]

    def profile(self, threads: int | None = None) -> Profile:
        """A profile predicted from these facts, for llama.cpp at ``threads`` (all fast cores when None)."""
        count = threads or int(self.cores.value)
        share, spread = SHARES[self.bandwidth_kind]
        used = min(1.0, _ONE_CORE_SHARE + (1 - _ONE_CORE_SHARE) * (count - 1) / max(int(self.cores.value) - 1, 1))
        conditions = Conditions(
            RUNTIMES[LLAMA_CPP], count, flat_curve(float(self.bandwidth.value)), share * used, spread, PACES[self.kind]
        )
        return Profile(
            name=self.name,
            title=self.title,
            basis=PUBLISHED,
            created_utc=max(fact.date for fact in (self.bandwidth, self.cores, *self.facts)),
            machine={"title": self.title, "class": self.kind, "facts": [fact.to_json() for fact in self.all_facts]},
            curve=conditions.curve,
            models=tuple(_prior_model(conditions, test) for test in TESTS),
            notes=(
                "nothing was measured on this device: predicted from published facts for llama.cpp on its fast cores; "
                "phones also slow down when they get warm",
            ),
        )

    @property
    def all_facts(self) -> tuple[Fact, ...]:
        """Bandwidth, cores, and the rest."""
        return (self.bandwidth, self.cores, *self.facts)


def device_names() -> tuple[str, ...]:
    """Names of all shipped devices, sorted."""
    folder = files("deepthin.profiles.devices")
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


@cache
def device_facts(name: str) -> DeviceFacts:
    """The device called ``name``.

    Raises:
        UsageError: there is none; the message lists the known ones.
        FormatError: its file lacks something.
    """
    if name not in device_names():
        raise UsageError(f"device {name!r} is unknown; known are {', '.join(device_names())}")
    text = files("deepthin.profiles.devices").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return parse_device(text, f"{name}.toml")


def parse_device(text: str, where: str) -> DeviceFacts:
    """Facts from the text of a device file.

    Raises:
        FormatError: it is no TOML, lacks a key, or a value has no source, date, unit or known status.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{where}: is no TOML ({error})") from error
    if document.get("schema") != SCHEMA:
        raise FormatError(f"{where}: schema is {document.get('schema')!r}, but {SCHEMA!r} is needed")
    kind, how = _text(document, "class", where), _text(_table(document, "bandwidth", where), "kind", where)
    if kind not in CLASSES or how not in SHARES:
        raise FormatError(
            f"{where}: class {kind!r} or bandwidth kind {how!r} is unknown; known: {', '.join(CLASSES)}; {', '.join(SHARES)}"
        )
    return DeviceFacts(
        name=_text(document, "name", where),
        title=_text(document, "title", where),
        kind=kind,
        bandwidth=_number(_fact(_table(document, "bandwidth", where), "memory_bandwidth", where), where),
        bandwidth_kind=how,
        cores=_number(_fact(_table(document, "cores", where), "fast_cores", where), where),
        facts=tuple(_fact(row, _text(row, "field", where), where) for row in document.get("fact", [])),
        speeds=tuple(_speed(row, where) for row in document.get("speed", [])),
    )


def _speed(row: Mapping[str, Any], where: str) -> PublishedSpeed:
    return PublishedSpeed(
        fact=_number(_fact(row, "decode_speed", where), where),
        runtime=_text(row, "runtime", where),
        model=_text(row, "model", where),
        shape=Shape.parse(_text(row, "shape", where)),
        quant=_text(row, "quant", where),
        threads=row.get("threads"),
    )


def _fact(row: Mapping[str, Any], field: str, where: str) -> Fact:
    value = row.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float | str) or value == "":
        raise FormatError(
            f"{where}: {field} has value {value!r}, but a number or a text is needed; leave out what is not known"
        )
    status, day = _text(row, "status", where), _text(row, "date", where)
    if status not in STATUSES:
        raise FormatError(f"{where}: {field} has status {status!r}, but one of {', '.join(STATUSES)} is needed")
    try:
        date.fromisoformat(day)
    except ValueError:
        raise FormatError(f"{where}: {field} has date {day!r}, but a day such as 2026-11-29 is needed") from None
    return Fact(
        field, value, _text(row, "unit", where), str(row.get("conditions", "")), status, _text(row, "source", where), day
    )


def _number(fact: Fact, where: str) -> Fact:
    if isinstance(fact.value, str) or not fact.value > 0:
        raise FormatError(f"{where}: {fact.field} is {fact.value!r}, but a number above 0 is needed")
    return fact


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise FormatError(f"{where}: {key} is {value!r}, but a text is needed; every value has unit, source, date and status")
    return value


def _table(document: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, Mapping):
        raise FormatError(f"{where}: table [{key}] is missing")
    return value


def _prior_model(conditions: Conditions, test: str) -> LatencyModel:
    believed = fit([], priors(conditions, test))
    # the terms themselves are unproven on the device, so their misfit is taken as large as between devices
    fitted = Fitted(believed.names, believed.theta, believed.covariance, _UNPROVEN, 0.0, believed.half_width, (), ())
    hull = Hull({"bytes of weights": SMALLEST_BYTES}, {"bytes of weights": LARGEST_BYTES}, tuple(FORMATS))
    return LatencyModel(conditions, test, fitted, hull, PUBLISHED_BASIS)
