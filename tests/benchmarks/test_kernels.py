"""The kernels' benchmark on small matrices: every case is measured and comes out in the table."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.test_decode import load_script

kernels = load_script("kernels")
SMALL = ["--cache-mb", "0.05", "--memory-mb", "0.1", "--rounds", "2"]


def test_every_case_has_a_sample_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([*SMALL, "--formats", "f16,q4_0", "--threads", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cases = {f"{name} {case}" for name in ("f16", "q4_0") for case in ("cache", "memory", "prefill")}
    assert set(found) == {"read", *cases}
    assert all(len(samples) == 2 and min(samples) > 0 for samples in found.values())


def test_table_shows_medians_and_the_share_of_reading() -> None:
    found = {"read": [20e9], "q4_0 cache": [30e9, 10e9, 40e9], "q4_0 memory": [15e9], "q4_0 prefill": [7e9]}
    *_, row, ceiling = kernels.report(found).splitlines()
    assert row.split() == ["q4_0", "30.0", "15.0", "0.75", "7.0"]
    assert ceiling == "reading alone: 20.0 GB/s"


def test_a_name_that_is_no_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([*SMALL, "--formats", "q9_9"]) != 0
    assert "q9_9" in capsys.readouterr().err
