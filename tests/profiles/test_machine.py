from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepthin.profiles.machine import (
    fingerprint,
    frequencies_hz,
    last_level_cache_bytes,
    linux_facts,
    machine_name,
    machine_record,
    macos_facts,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    return root


def two_clusters(root: Path) -> Path:
    """Four CPUs on two cores each of two clusters with an L3 apiece, and an instruction cache that must not count."""
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Example CPU(R) 9000 @ 3.00GHz\nflags: fpu",
        "proc/meminfo": "MemFree: 1 kB\nMemTotal:       16384 kB",
    }
    for cpu in range(4):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        pair = "0-1" if cpu < 2 else "2-3"
        files |= {
            f"{base}/topology/physical_package_id": "0",
            f"{base}/topology/core_id": str(cpu // 2),
            f"{base}/cpufreq/scaling_governor": "powersave",
            f"{base}/cpufreq/scaling_cur_freq": "2400000",
            f"{base}/cache/index0/level": "1",
            f"{base}/cache/index0/type": "Instruction",
            f"{base}/cache/index0/size": "64K",
            f"{base}/cache/index0/shared_cpu_list": str(cpu),
            f"{base}/cache/index3/level": "3",
            f"{base}/cache/index3/type": "Unified",
            f"{base}/cache/index3/size": "16M",
            f"{base}/cache/index3/shared_cpu_list": pair,
        }
    files["sys/devices/system/cpu/cpufreq/policy0"] = "a folder that is no CPU"
    return write(root, files)


def test_linux_facts_from_a_tree(tmp_path: Path) -> None:
    facts = linux_facts(two_clusters(tmp_path))
    assert facts["cpu_model"] == "Example CPU(R) 9000 @ 3.00GHz"
    assert facts["physical_cores"] == 2
    assert facts["ram_bytes"] == 16384 * 1024
    assert facts["governor"] == "powersave"
    assert facts["caches"] == [
        {"level": 1, "type": "instruction", "bytes": 65536, "instances": 4},
        {"level": 3, "type": "unified", "bytes": 16 << 20, "instances": 2},
    ]
    assert last_level_cache_bytes(facts) == 32 << 20
    assert frequencies_hz(tmp_path) == [2_400_000_000] * 4


def test_nothing_readable_means_absent_not_guessed(tmp_path: Path) -> None:
    facts = linux_facts(tmp_path)
    assert facts == {"cpu_model": None, "physical_cores": None, "caches": [], "ram_bytes": None, "governor": ""}
    assert last_level_cache_bytes(facts) is None
    assert last_level_cache_bytes({}) is None
    assert frequencies_hz(tmp_path) == []


def test_arm_boards_are_named_by_board_and_part(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": "CPU part\t: 0xd0b\nCPU part\t: 0xd05", "proc/device-tree/model": "Example Board 5\0"})
    assert linux_facts(tmp_path)["cpu_model"] == "Example Board 5 part-0xd05 part-0xd0b"


def test_damaged_cache_entries_are_left_out(tmp_path: Path) -> None:
    base = "sys/devices/system/cpu/cpu0/cache"
    write(tmp_path, {f"{base}/index0/level": "2", f"{base}/index0/type": "Data", f"{base}/index0/size": "huge"})
    write(tmp_path, {f"{base}/index1/type": "Data", f"{base}/index1/size": "32K"})
    assert linux_facts(tmp_path)["caches"] == []


def test_macos_facts() -> None:
    facts = macos_facts(
        {"machdep.cpu.brand_string": "Apple M9", "hw.physicalcpu": "8", "hw.perflevel0.l2cachesize": "16777216"}
    )
    assert facts["cpu_model"] == "Apple M9"
    assert facts["caches"] == [{"level": 2, "type": "unified", "bytes": 16 << 20, "instances": 1}]
    assert facts["ram_bytes"] is None
    assert macos_facts({})["caches"] == []


def test_record_of_this_machine_is_json_and_names_nobody() -> None:
    record = machine_record()
    assert json.loads(json.dumps(record)) == record
    assert {"arch", "os", "usable_cpus", "simd", "python", "versions"} <= set(record)
    assert record["versions"]["numpy"]
    assert not {"hostname", "node", "user"} & set(record)
    assert None not in record.values()


@pytest.mark.parametrize("key", ["cpu_model", "usable_cpus", "caches", "simd"])
def test_fingerprint_follows_hardware(key: str) -> None:
    record = {"cpu_model": "A", "usable_cpus": 2, "caches": [], "simd": "avx2", "python": "3.11.7"}
    assert fingerprint(record) != fingerprint(record | {key: "other"})
    assert fingerprint(record) == fingerprint(record | {"python": "3.12.0"})


def test_machine_name_is_a_plain_folder_name() -> None:
    record = {"cpu_model": "Example CPU(R) 9000 Processor @ 3.00GHz", "usable_cpus": 4, "simd": "avx2"}
    assert machine_name(record) == "example-9000-4cpu-avx2"
    assert machine_name({}) == "unknown-0cpu-unknown"
