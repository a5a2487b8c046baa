"""The A/A benchmark: what counts as a difference, and what the report says."""

from __future__ import annotations

from typing import Any

import pytest

from deepthin.engine.errors import FormatError
from deepthin.profiles.statistics import measured, paired_ratio
from tests.support.benchmark_scripts import load_script

aa = load_script("aa")


def line(model: str, a: list[float], b: list[float], flags: list[str]) -> dict[str, Any]:
    return {
        "model": model,
        "threads": 1,
        "ratio": paired_ratio(b, a).to_json(),
        "seconds": {"a": measured(a, "s").to_json(), "b": measured(b, "s").to_json()},
        "flags": flags,
    }


STEADY = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0]


def test_only_intervals_without_one_are_differences_and_all_rows_add_up() -> None:
    equal = line("x", STEADY, STEADY[::-1], [])
    other = line("x", STEADY, [2 * s for s in STEADY], ["slow-core"])
    assert [aa.differs(one) for one in (equal, other)] == [False, True]
    rows = aa.report([equal, other, line("y", STEADY, STEADY, [])]).splitlines()
    assert rows[2].startswith("| x | 1 | 2 | 1 (50%) |")
    assert rows[2].endswith("| 50% |")
    assert rows[4].startswith("| all | | 3 | 1 (33%) |")


def test_nothing_stored_is_said(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(aa, "RESULTS", tmp_path)
    with pytest.raises(FormatError, match="run without --no-measure first"):
        aa.newest()
