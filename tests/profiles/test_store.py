from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import FormatError
from deepthin.profiles.store import MeasurementStore

KEY = {"part": "block", "d": 576, "quant": "q4_0"}


def test_a_value_is_found_by_an_equal_key_in_any_order(tmp_path: Path) -> None:
    MeasurementStore(tmp_path / "new" / "m.jsonl").put(KEY, {"median": 0.1})
    store = MeasurementStore(tmp_path / "new" / "m.jsonl")
    assert store.get(dict(reversed(KEY.items()))) == {"median": 0.1}
    assert store.get(KEY | {"d": 577}) is None


def test_lines_are_only_ever_added_and_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    store = MeasurementStore(path)
    store.put(KEY, {"median": 0.1})
    before = path.read_bytes()
    store.put(KEY, {"median": 0.2})
    assert path.read_bytes().startswith(before)
    assert MeasurementStore(path).get(KEY) == store.get(KEY) == {"median": 0.2}
    assert len(store) == 1


def test_two_readers_see_each_others_lines(tmp_path: Path) -> None:
    ours, theirs = MeasurementStore(tmp_path / "m.jsonl"), MeasurementStore(tmp_path / "m.jsonl")
    theirs.put(KEY, {"median": 0.3})
    assert ours.get(KEY) == {"median": 0.3}


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 200))
def test_a_torn_last_line_costs_only_itself(tmp_path: Path, cut: int) -> None:
    path = tmp_path / f"{cut}.jsonl"
    path.unlink(missing_ok=True)
    MeasurementStore(path).put(KEY, {"median": 0.1})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: min(cut, len(whole) - 2)])
    store = MeasurementStore(path)
    assert store.get(KEY) == {"median": 0.1}
    store.put(KEY | {"d": 1}, {"median": 0.5})
    again = MeasurementStore(path)
    assert (again.get(KEY), again.get(KEY | {"d": 1})) == ({"median": 0.1}, {"median": 0.5})


def test_a_line_of_another_version_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"schema": "deepthin/measurement/99", "key": KEY, "value": {"median": 9.0}}) + "\n")
    store = MeasurementStore(path)
    assert (store.get(KEY), store.damaged_lines) == (None, 0)


@pytest.mark.parametrize(
    "text", ["this is a shopping list\n", "[1, 2]\n", '{"schema": "deepthin/measurement/1", "key": 1, "value": 2}\n']
)
def test_another_kind_of_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(FormatError, match="not one line is a deepthin measurement"):
        MeasurementStore(path)
    assert path.read_text() == text


def test_nan_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with pytest.raises(FormatError, match="NaN"):
        MeasurementStore(path).put(KEY, {"median": float("nan")})
    assert not path.exists()


def test_processes_appending_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    code = (
        "import sys; from pathlib import Path; from deepthin.profiles.store import MeasurementStore\n"
        "store = MeasurementStore(Path(sys.argv[1]))\n"
        "for i in range(40): store.put({'who': sys.argv[2], 'i': i}, {'pad': 'x' * 500})\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), who], env=dict(os.environ)) for who in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    store = MeasurementStore(path)
    assert (len(store), store.damaged_lines) == (80, 0)
