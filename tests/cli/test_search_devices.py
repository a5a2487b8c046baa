"""Several profiles in one search, through the front door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepthin.cli.main import main

BASE = ["search", "--params", "400k", "--vocab", "512,1024", "--trials", "10", "--sampler", "random", "--quiet"]
TWO = ["--profile", "pixel-9", "--profile", "raspberry-pi-5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run for two devices together."""
    out = tmp_path_factory.mktemp("devices") / "run"
    assert main([*BASE, *TWO, "--out", str(out), "--no-export"]) == 0
    return out


def again(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*BASE, *TWO, "--out", str(folder), "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_one_shape_for_all_with_what_it_costs_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "front.json").read_bytes()
    found = again(folder, capsys, "--no-export")
    assert (folder / "front.json").read_bytes() == before
    devices = found["devices"]
    assert devices == json.loads((folder / "devices.json").read_text())
    assert devices["across"] == "worst"
    names = [one["name"] for one in devices["devices"]]
    assert names == ["pixel-9", "raspberry-pi-5"]
    for name in names:
        assert (folder / "devices" / name / "front.json").is_file()
        assert devices["cost_of_one_for_all"][name]["text"]
        assert devices["own"][name]["fastest_tied"]["reason"]
    assert "worst, relative to" in found["config"]["profile"]
    assert set(found["front"][0]["devices"]) == set(names)


def test_the_terminal_and_the_summary_say_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([*BASE, *TWO, "--out", str(folder), "--no-export"]) == 0
    text, written = capsys.readouterr().out, (folder / "summary.md").read_text()
    document = json.loads((folder / "front.json").read_text())
    devices = json.loads((folder / "devices.json").read_text())
    for pick in document["picks"].values():
        assert pick["reason"] in text
        assert pick["reason"] in written
    for lost in devices["cost_of_one_for_all"].values():
        assert lost["text"] in text
        assert lost["text"] in written
    for scenario in document["sensitivity"].values():
        assert f"if {scenario['text']}: " in text
        assert f"- if {scenario['text']}: " in written
        assert all(change["how"] in text and change["how"] in written for change in scenario["changes"].values())
    assert all(note in text and note in written for note in document["notes"])
    assert f"{folder / 'summary.md'}" in text
    assert written.startswith("# Shapes within a budget\n")


def test_a_shape_for_each_is_exported_and_verified_for_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = again(folder, capsys, "--across", "each")
    own = {(picks["fastest_tied"]["shape"], picks["fastest_tied"]["quant"]) for picks in found["devices"]["own"].values()}
    assert set(found["exports"].values()) == {"pass"}
    assert len(found["exports"]) == len(own)
    manifests = [json.loads((Path(path) / "manifest.json").read_text()) for path in found["exports"]]
    assert {manifest["shape"]["text"] for manifest in manifests} == {shape for shape, _ in own}
    assert all(str(folder / "devices") in path for path in found["exports"])


def test_profiles_come_from_a_configuration_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[search]\nprofile = ["pixel-9", "pixel-10"]\nacross = "mean"\ntrials = 4\nno-export = true\n')
    base = [*BASE[:5], "--sampler", "random", "--config", str(config), "--quiet", "--json", "--out"]
    assert main([*base, str(tmp_path / "a")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["devices"]["devices"]] == ["pixel-9", "pixel-10"]
    assert found["devices"]["across"] == "mean"
    config.write_text(config.read_text().replace('across = "mean"\n', ""))
    assert main([*base, str(tmp_path / "b"), "--profile", "pixel-8"]) == 0  # flags win, all of them together
    assert json.loads(capsys.readouterr().out)["devices"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--across", "mean"], 2, "--across says how several devices share a search; give --profile once for each of them"),
        (["--profile", "pixel-9", "--across", "each"], 2, "give --profile once for each of them"),
        (["--profile", "pixel-9", "--profile", "pixel-9"], 2, "devices: pixel-9 is named twice"),
        (["--profile", "pixel-9", "--profile", "nothing"], 2, "profile 'nothing' is unknown"),
        ([*TWO, "--store", "x"], 2, "--store keeps timings, but with --profile nothing is timed"),
        ([*TWO, "--threads", "3"], 2, "not measured at 3 threads"),
        ([*TWO, "--across", "median"], 2, "invalid choice: 'median'"),
        ([*TWO, "--max-ms-per-token", "0.001"], 3, "ms per token on "),
        ([*TWO, "--params", "100k", "--vocab", "32000"], 3, "its embedding alone takes"),
        (
            [*TWO, "--params", "900M", "--baseline", "monad", "--across", "each", "--pick", "no_slower_than_baseline"],
            3,
            " on pixel-9: every shape",
        ),
    ],
)
def test_refusals_name_device_and_way_out(
    arguments: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, *arguments, "--out", str(tmp_path / "run"), "--no-export"]) == code
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_the_device_that_keeps_a_limit_from_being_met_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fronts = {name: json.loads((folder / "devices" / name / "front.json").read_text())["front"] for name in TWO[1::2]}
    quickest = {name: min(one["ms_per_token"]["value"] for one in front) for name, front in fronts.items()}
    quick, slow = sorted(quickest, key=lambda name: quickest[name])
    limit = 0.99 * quickest[slow]  # the same seed tries the same shapes
    assert quickest[quick] < limit
    assert main([*BASE, *TWO, "--max-ms-per-token", str(limit), "--out", str(tmp_path / "run"), "--no-export"]) == 3
    assert f" on {slow}, " in capsys.readouterr().err
