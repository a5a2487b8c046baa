"""A device's profile: who it is, what was measured on it, and latency models fitted to that; one JSON file a device.

``deepthin/profile/1``. Older files are upgraded step by step when read (:data:`UPGRADES`), newer ones refused. A profile names
its machine; asked for as this host's, one of another machine is refused rather than used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles.latency.curve import BandwidthCurve
from deepthin.profiles.latency.model import LatencyModel, Prediction
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.workload import Workload
from deepthin.profiles.schema import as_float, as_str, exact_keys

KIND, VERSION = "deepthin/profile", 1
SCHEMA = f"{KIND}/{VERSION}"
MEASURED, IMPORTED, PUBLISHED = "measured", "imported", "published"
BASES = (MEASURED, IMPORTED, PUBLISHED)
MAX_PROFILE_BYTES = 64 << 20

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
UPGRADES: dict[int, Upgrade] = {}  # n -> what turns a document of version n into one of n + 1

_KEYS = (
    *("name", "title", "basis", "created_utc", "machine", "fingerprint", "engine_digest", "versions", "bandwidth"),
    *("bandwidth_samples", "probes", "models", "noise", "sustained", "findings", "flags", "notes", "wall_s"),
)


@dataclass(frozen=True)
class Profile:
    """What is known of a device's speed.

    Attributes:
        name: under which it is found.
        title: for people.
        basis: ``measured`` here, ``imported`` from llama-bench, ``published`` from data sheets.
        created_utc: when, in ISO 8601.
        machine: its record, as ``profiles.machine`` makes it, or what an import could tell.
        curve: read bandwidth by working set and threads.
        models: latency models, one per runtime, thread count and test.
        fingerprint: of the machine's hardware; empty where it is not known.
        engine_digest: of the engine that was timed; empty without one.
        versions: of each runtime timed.
        probes: everything the models were fitted to.
        bandwidth_samples: raw bandwidth samples by thread count and size.
        noise: noise floor: ``aa`` (a measured ratio of a thing to itself) and ``repeat`` (relative change when measured again).
        sustained: speed over time, or None.
        findings: cliffs and slow kernels, for people, worst first.
        flags: what speaks against all of it.
        notes: what was left out and why.
        wall_s: seconds that measuring took.
    """

    name: str
    title: str
    basis: str
    created_utc: str
    machine: Mapping[str, Any]
    curve: BandwidthCurve
    models: tuple[LatencyModel, ...]
    fingerprint: str = ""
    engine_digest: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    probes: tuple[Probe, ...] = ()
    bandwidth_samples: tuple[Mapping[str, Any], ...] = ()
    noise: Mapping[str, Any] = field(default_factory=dict)
    sustained: Mapping[str, Any] | None = None
    findings: tuple[Mapping[str, Any], ...] = ()
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    wall_s: float = 0.0

    @property
    def runtimes(self) -> tuple[str, ...]:
        """Runtimes with a model, in the order they were measured."""
        return tuple(dict.fromkeys(model.conditions.runtime.name for model in self.models))

    def threads_of(self, runtime: str) -> tuple[int, ...]:
        """Thread counts that ``runtime`` was measured at."""
        return tuple(sorted({m.conditions.threads for m in self.models if m.conditions.runtime.name == runtime}))

    def model(self, runtime: str, threads: int | None, test: str) -> LatencyModel:
        """The model asked for; ``threads`` None is the most that were measured.

        Raises:
            UsageError: there is none; the message says what there is.
        """
        if runtime not in self.runtimes:
            raise UsageError(
                f"profile {self.name}: {runtime} was not measured; it holds {', '.join(self.runtimes) or 'nothing'}"
            )
        known = self.threads_of(runtime)
        wanted = max(known) if threads is None else threads
        for model in self.models:
            if (model.conditions.runtime.name, model.conditions.threads, model.test) == (runtime, wanted, test):
                return model
        if wanted not in known:
            raise UsageError(
                f"profile {self.name}: {runtime} was not measured at {wanted} threads and is not guessed; "
                f"measured are {', '.join(map(str, known))}"
            )
        raise UsageError(f"profile {self.name}: no {test} of {runtime} at {wanted} threads was measured")

    def predict(self, runtime: str, threads: int | None, work: Workload) -> Prediction:
        """Time of ``work``; see :meth:`model`.

        Raises:
            UsageError: runtime or thread count was not measured.
        """
        return self.model(runtime, threads, work.test).predict(work)

    def to_json(self) -> dict[str, Any]:
        """The document, with its schema."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "title": self.title,
            "basis": self.basis,
            "created_utc": self.created_utc,
            "machine": dict(self.machine),
            "fingerprint": self.fingerprint,
            "engine_digest": self.engine_digest,
            "versions": dict(self.versions),
            "bandwidth": self.curve.to_json(),
            "bandwidth_samples": [dict(row) for row in self.bandwidth_samples],
            "probes": [probe.to_json() for probe in self.probes],
            "models": [model.to_json() for model in self.models],
            "noise": dict(self.noise),
            "sustained": None if self.sustained is None else dict(self.sustained),
            "findings": [dict(row) for row in self.findings],
            "flags": list(self.flags),
            "notes": list(self.notes),
            "wall_s": self.wall_s,
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`; documents of older versions are upgraded.

        Raises:
            FormatError: it is no profile, of a newer version, or damaged.
        """
        fields = exact_keys(upgraded(document), "profile", ("schema", *_KEYS))
        basis = as_str(fields["basis"], "basis")
        if basis not in BASES:
            raise FormatError(f"profile: basis is {basis!r}, but one of {', '.join(BASES)} is needed")
        for key in ("bandwidth_samples", "probes", "models", "findings", "flags", "notes"):
            if not isinstance(fields[key], list):
                raise FormatError(f"profile: {key} is {type(fields[key]).__name__}, but a list is needed")
        for key in ("machine", "versions", "noise"):
            if not isinstance(fields[key], Mapping):
                raise FormatError(f"profile: {key} is {type(fields[key]).__name__}, but an object is needed")
        curve = BandwidthCurve.from_json(fields["bandwidth"])
        return cls(
            name=as_str(fields["name"], "name"),
            title=as_str(fields["title"], "title"),
            basis=basis,
            created_utc=as_str(fields["created_utc"], "created_utc"),
            machine=fields["machine"],
            curve=curve,
            models=tuple(LatencyModel.from_json(model, curve) for model in fields["models"]),
            fingerprint=as_str(fields["fingerprint"], "fingerprint"),
            engine_digest=as_str(fields["engine_digest"], "engine_digest"),
            versions={str(k): as_str(v, "versions") for k, v in fields["versions"].items()},
            probes=tuple(Probe.from_json(probe) for probe in fields["probes"]),
            bandwidth_samples=tuple(fields["bandwidth_samples"]),
            noise=fields["noise"],
            sustained=fields["sustained"],
            findings=tuple(fields["findings"]),
            flags=tuple(as_str(flag, "flags[]") for flag in fields["flags"]),
            notes=tuple(as_str(note, "notes[]") for note in fields["notes"]),
            wall_s=as_float(fields["wall_s"], "wall_s"),
        )

    def save(self, path: Path) -> None:
        """Write the document whole: under a temporary name first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def upgraded(document: Any) -> dict[str, Any]:
    """``document`` as one of this version.

    Raises:
        FormatError: it is no profile, or of a version that this program does not know.
    """
    if not isinstance(document, Mapping) or not str(document.get("schema", "")).startswith(f"{KIND}/"):
        found = document.get("schema", "no schema") if isinstance(document, Mapping) else type(document).__name__
        raise FormatError(f"profile: found {found!r}, but a JSON object with schema {SCHEMA!r} is needed")
    current = dict(document)
    text = str(current["schema"]).removeprefix(f"{KIND}/")
    number = int(text) if text.isdigit() else -1
    if number > VERSION:
        raise FormatError(
            f"profile: schema version {number} is newer than {VERSION}, which this deepthin knows; update deepthin"
        )
    while number != VERSION:
        if number not in UPGRADES:
            raise FormatError(
                f"profile: schema {current['schema']!r} cannot be upgraded to {SCHEMA!r}; measure the device again"
            )
        current = UPGRADES[number](current)
        number += 1
        current["schema"] = f"{KIND}/{number}"
    return current


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        FormatError: the file cannot be read or holds no profile.
    """
    try:
        if path.stat().st_size > MAX_PROFILE_BYTES:
            raise FormatError(f"{path}: over {MAX_PROFILE_BYTES} bytes, which no profile needs; is this the right file?")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(
            f"{path}: cannot be read ({error.strerror}); name a profile that deepthin profile list shows"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is no JSON ({error})") from error
    try:
        return Profile.from_json(document)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def require_host(profile: Profile, fingerprint: str, where: str) -> None:
    """Refuse a profile that was not measured on the machine with ``fingerprint``.

    Raises:
        FormatError: it belongs to another machine.
    """
    if profile.basis != MEASURED or profile.fingerprint != fingerprint:
        raise FormatError(
            f"{where}: is a profile of {profile.title} (hardware {profile.fingerprint or 'unknown'}), not of this host "
            f"({fingerprint}); name it as a device's profile, or run deepthin profile measure here"
        )
