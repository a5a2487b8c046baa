from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles.library import HOST, entries, find_profile, host_path, profile_folder
from deepthin.profiles.machine import fingerprint
from tests.profiles.test_profile import made

MACHINE: dict[str, Any] = {"cpu_model": "Example CPU", "usable_cpus": 2, "simd": "avx2"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPTHIN_PROFILE_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def test_a_host_without_profile_is_told_how_to_get_one() -> None:
    with pytest.raises(UsageError, match=r"no profile yet .* deepthin profile measure"):
        find_profile(HOST, MACHINE)


def test_the_hosts_own_profile_is_found_and_anothers_refused() -> None:
    made(fingerprint=fingerprint(MACHINE)).save(host_path(MACHINE))
    assert find_profile(HOST, MACHINE).name == "here"
    made(fingerprint="other").save(host_path(MACHINE))
    with pytest.raises(FormatError, match="not of this host"):
        find_profile(HOST, MACHINE)


def test_saved_names_files_and_devices_are_found(folder: Path, tmp_path: Path) -> None:
    made(name="box").save(folder / "box.json")
    made(name="file").save(tmp_path / "file.json")
    assert find_profile("box", MACHINE).name == "box"
    assert find_profile(str(tmp_path / "file.json"), MACHINE).name == "file"
    assert find_profile("pixel-9", MACHINE).basis == "published"


def test_unknown_names_come_with_near_ones() -> None:
    with pytest.raises(UsageError, match=r"'pixel9' is unknown \(did you mean pixel-9"):
        find_profile("pixel9", MACHINE)
    with pytest.raises(UsageError, match="is unknown; deepthin profile list"):
        find_profile("../secret", MACHINE)


def test_the_list_marks_the_host_and_damaged_files(folder: Path) -> None:
    made(fingerprint=fingerprint(MACHINE)).save(folder / "mine.json")
    made(fingerprint="other").save(folder / "other.json")
    (folder / "torn.json").write_text("{")
    found = {entry.name: entry for entry in entries(MACHINE)}
    assert found["mine"].is_host
    assert not found["other"].is_host
    assert "is no JSON" in found["torn"].problem
    assert found["pixel-9"].basis == "published"


def test_the_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DEEPTHIN_PROFILE_DIR")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert profile_folder() == tmp_path / "deepthin" / "profiles"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert profile_folder() == tmp_path / "local" / "deepthin" / "profiles"
    monkeypatch.setattr("sys.platform", "darwin")
    assert profile_folder().parts[-4:] == ("Library", "Application Support", "deepthin", "profiles")
