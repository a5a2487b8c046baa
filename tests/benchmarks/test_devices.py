"""The page of predictions for devices that are not here is what its script writes, and says how far off they are."""

from pathlib import Path

import pytest

from deepthin.profiles.device_facts import device_names
from tests.support.benchmark_scripts import load_script

devices = load_script("devices")


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert devices.main(["--check"]) == 0, "run python benchmarks/devices.py"
    assert "up to date" in capsys.readouterr().out


def test_a_changed_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(devices, "DOCUMENT", tmp_path / "docs" / "devices.md")
    assert devices.main(["--check"]) == 1
    assert "differs" in capsys.readouterr().out
    assert devices.main([]) == 0
    capsys.readouterr()
    assert devices.main(["--check"]) == 0


def test_every_device_and_every_published_speed_has_a_row() -> None:
    text = devices.document()
    for name in device_names():
        assert f"| {name} |" in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == len(devices.HEADERS) + 1]
    assert len(rows) == len(devices.comparisons()) + 2
    assert len(devices.comparisons()) >= 30
