"""The machine a measurement was taken on: a record for results, a fingerprint for keys, a name for folders.

Reads ``/proc`` and ``/sys`` on Linux, ``sysctl`` on macOS and the environment on Windows. What cannot be read is absent,
never guessed. No host name, user or serial number is recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from deepthin.engine.cpu import simd_target

PACKAGES = ("deepthin", "numpy", "numba", "llvmlite", "onnxruntime", "onnxruntime-genai", "llama-cpp-python")
_ROOT = Path("/")
_CPUS = "sys/devices/system/cpu"
_FINGERPRINT_KEYS = ("cpu_model", "arch", "logical_cpus", "usable_cpus", "physical_cores", "caches", "simd")
_SYSCTL_KEYS = (
    "machdep.cpu.brand_string",
    "hw.physicalcpu",
    "hw.memsize",
    "hw.perflevel0.l2cachesize",
    "hw.l2cachesize",
    "hw.l3cachesize",
)


def machine_record(root: Path = _ROOT) -> dict[str, Any]:
    """What is fixed about this machine and its software; goes into every JSON document as ``machine``.

    Keys: ``cpu_model``, ``arch``, ``os``, ``logical_cpus``, ``usable_cpus`` (this process may run on), ``physical_cores``,
    ``caches`` ([{level, type, bytes, instances}]), ``ram_bytes``, ``governor``, ``simd``, ``python``, ``versions``.
    Unknown ones are absent.

    Args:
        root: folder that stands for ``/`` (tests give their own).
    """
    facts: dict[str, Any] = {
        "arch": platform.machine().lower(),
        "os": " ".join([platform.system(), *re.findall(r"^[\d.]+", platform.release())]),
        "logical_cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "simd": simd_target(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }
    if sys.platform == "darwin":
        facts |= macos_facts(_sysctl())
    elif sys.platform == "win32":
        facts["cpu_model"] = os.environ.get("PROCESSOR_IDENTIFIER")
    else:
        facts |= linux_facts(root)
    return {key: value for key, value in facts.items() if value not in (None, [], "")}


def fingerprint(record: Mapping[str, Any]) -> str:
    """Short hex digest of the hardware part of ``record``: CPU, cores, caches and SIMD target, no software versions."""
    text = json.dumps({key: record.get(key) for key in _FINGERPRINT_KEYS}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def machine_name(record: Mapping[str, Any]) -> str:
    """Folder name of ``record``, such as ``amd-epyc-2cpu-avx512_vnni``."""
    model = re.sub(r"\(r\)|\(tm\)|cpu|processor|@.*", " ", str(record.get("cpu_model", record.get("arch", "unknown"))).lower())
    words = re.sub(r"[^a-z0-9]+", "-", model).strip("-")
    return f"{words}-{record.get('usable_cpus', 0)}cpu-{record.get('simd', 'unknown')}"


def last_level_cache_bytes(record: Mapping[str, Any]) -> int | None:
    """Bytes of the highest level of data cache, all instances together; None when unknown."""
    caches = [cache for cache in record.get("caches", ()) if cache["type"] != "instruction"]
    if not caches:
        return None
    level = max(cache["level"] for cache in caches)
    return sum(int(cache["bytes"]) * int(cache["instances"]) for cache in caches if cache["level"] == level)


def linux_facts(root: Path) -> dict[str, Any]:
    """CPU model, physical cores, caches, memory and governor below ``root``; unreadable ones are None or empty."""
    cpuinfo = _read(root / "proc/cpuinfo") or ""
    cpus = _cpu_folders(root)
    cores = {(_read(cpu / "topology/physical_package_id"), _read(cpu / "topology/core_id")) for cpu in cpus}
    memory = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE)
    governors = sorted({text for cpu in cpus if (text := _read(cpu / "cpufreq/scaling_governor"))})
    return {
        "cpu_model": _linux_cpu_model(cpuinfo, root),
        "physical_cores": None if not cores or (None, None) in cores else len(cores),
        "caches": _linux_caches(cpus),
        "ram_bytes": int(memory[1]) * 1024 if memory else None,
        "governor": ",".join(governors),
    }


def macos_facts(values: Mapping[str, str]) -> dict[str, Any]:
    """The same from the lines of ``sysctl``, by key."""
    numbers = {key: int(value) for key, value in values.items() if value.isdigit()}
    l2 = numbers.get("hw.perflevel0.l2cachesize") or numbers.get("hw.l2cachesize")
    sizes = ((2, l2), (3, numbers.get("hw.l3cachesize")))
    return {
        "cpu_model": values.get("machdep.cpu.brand_string"),
        "physical_cores": numbers.get("hw.physicalcpu"),
        "ram_bytes": numbers.get("hw.memsize"),
        "caches": [{"level": level, "type": "unified", "bytes": size, "instances": 1} for level, size in sizes if size],
    }


def frequencies_hz(root: Path = _ROOT) -> list[int]:
    """Current frequency of each CPU in Hz, empty where it cannot be read (most virtual machines)."""
    texts = [_read(cpu / "cpufreq/scaling_cur_freq") for cpu in _cpu_folders(root)]
    return [int(text) * 1000 for text in texts if text and text.isdigit()]


def _cpu_folders(root: Path) -> list[Path]:
    folder = root / _CPUS
    names = [path for path in folder.glob("cpu[0-9]*") if path.name[3:].isdigit()] if folder.is_dir() else []
    return sorted(names, key=lambda path: int(path.name[3:]))


def _linux_cpu_model(cpuinfo: str, root: Path) -> str | None:
    if match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
        return match[1].strip()
    board = _read(root / "proc/device-tree/model")
    parts = sorted(set(re.findall(r"^CPU part\s*:\s*(\S+)$", cpuinfo, re.MULTILINE)))
    return " ".join(filter(None, [board and board.strip("\0 "), *(f"part-{part}" for part in parts)])) or None


def _linux_caches(cpus: list[Path]) -> list[dict[str, Any]]:
    """One entry per level and type; instances are told apart by the CPUs that share them."""
    seen: dict[tuple[int, str, int], set[str]] = {}
    for cpu in cpus:
        for index in sorted((cpu / "cache").glob("index[0-9]*")):
            level, kind, size = (_read(index / name) for name in ("level", "type", "size"))
            number = re.fullmatch(r"(\d+)([KM]?)", size or "")
            if level is None or kind is None or number is None:
                continue
            num_bytes = int(number[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[number[2]]
            shared = _read(index / "shared_cpu_list") or cpu.name
            seen.setdefault((int(level), kind.lower(), num_bytes), set()).add(shared)
    return [{"level": lv, "type": kind, "bytes": size, "instances": len(who)} for (lv, kind, size), who in sorted(seen.items())]


def _sysctl() -> dict[str, str]:
    try:
        done = subprocess.run(["/usr/sbin/sysctl", *_SYSCTL_KEYS], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(": ") for line in done.stdout.splitlines())  # keys this Mac lacks go to stderr
    return {key: value.strip() for key, _, value in pairs}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
