"""Where profiles are found by name: those saved on this machine, and the devices that ship as facts."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles.device_facts import device_facts, device_names
from deepthin.profiles.machine import fingerprint, machine_name
from deepthin.profiles.profile import PUBLISHED, Profile, read_profile, require_host

HOST = "host"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``deepthin profile list``.

    Attributes:
        name: to ask for it by.
        title: of the device.
        basis: measured, imported or published.
        created_utc: when.
        is_host: whether it was measured on this machine's hardware.
        problem: why it cannot be used, or empty.
    """

    name: str
    title: str
    basis: str
    created_utc: str
    is_host: bool
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {name: getattr(self, name) for name in ("name", "title", "basis", "created_utc", "is_host", "problem")}


def profile_folder() -> Path:
    """Where measured and imported profiles are kept: ``DEEPTHIN_PROFILE_DIR``, else the platform's folder for user data."""
    if forced := os.environ.get("DEEPTHIN_PROFILE_DIR"):
        return Path(forced)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "deepthin" / "profiles"


def find_profile(name: str, machine: Mapping[str, Any]) -> Profile:
    """The profile called ``name``: a file, ``host``, a saved name, or a shipped device.

    Args:
        name: a path, or a name from :func:`entries`; ``host`` is the one measured on this machine.
        machine: this machine's record.

    Raises:
        UsageError: there is none; the message says what there is.
        FormatError: it is damaged, or asked for as this host's and of another machine.
    """
    if name == HOST:
        path = host_path(machine)
        if not path.is_file():
            raise UsageError(f"this machine has no profile yet ({path}); deepthin profile measure makes one in under 3 minutes")
        profile = read_profile(path)
        require_host(profile, fingerprint(machine), str(path))
        return profile
    path = Path(name)
    if path.suffix == ".json" or path.is_file():
        return read_profile(path)
    saved = profile_folder() / f"{name}.json"
    if _is_plain(name) and saved.is_file():
        return read_profile(saved)
    if name in device_names():
        return device_facts(name).profile()
    near = difflib.get_close_matches(name, [HOST, *(entry.name for entry in entries(machine))])
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise UsageError(f"profile {name!r} is unknown{hint}; deepthin profile list shows all, and a JSON file can be named too")


def host_path(machine: Mapping[str, Any]) -> Path:
    """Where this machine's own profile is kept."""
    return profile_folder() / f"{machine_name(machine)}.json"


def entries(machine: Mapping[str, Any]) -> list[Entry]:
    """Every profile that can be asked for by name: saved ones first, then the shipped devices."""
    here = fingerprint(machine)
    found = []
    folder = profile_folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            profile = read_profile(path)
        except FormatError as error:
            found.append(Entry(path.stem, "", "", "", False, str(error)))
        else:
            is_host = bool(profile.fingerprint) and profile.fingerprint == here
            found.append(Entry(path.stem, profile.title, profile.basis, profile.created_utc, is_host))
    taken = {entry.name for entry in found}
    for name in device_names():
        if name not in taken:
            facts = device_facts(name)
            found.append(Entry(name, facts.title, PUBLISHED, facts.profile().created_utc, False))
    return found


def _is_plain(name: str) -> bool:
    return bool(name) and Path(name).name == name and name not in (".", "..")
