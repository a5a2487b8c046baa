from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import DeepthinError, FormatError, UsageError
from deepthin.engine.shape import Shape
from deepthin.search.config import DEFAULT_PARAMS, SearchConfig
from deepthin.search.cost import Cost
from deepthin.search.folder import RunFolder
from tests.support.fake_costs import fake_cost

CONFIG = SearchConfig(trials=3)
SHAPE = Shape.parse("L=3,d=64,heads=2,ff=96,vocab=100,tied")


def test_measurements_come_back_exactly(tmp_path: Path) -> None:
    cost = Cost.of(fake_cost(SHAPE, "q8_0"))
    with RunFolder(tmp_path / "run", CONFIG) as folder:
        assert folder.store_measured("a", cost) == cost
        folder.store_failed("b", "not on this machine")
    with RunFolder(tmp_path / "run", CONFIG) as folder:
        assert folder.measured("a") == cost
        assert folder.failed("b") == "not on this machine"
        assert folder.measured("b") is None
        assert folder.failed("a") is None


@pytest.mark.parametrize("torn", ['{"key": "b", "cost"', "{", '{"key": "b", "failed": "x"}'])
def test_torn_last_line_is_dropped_and_the_next_one_is_whole(tmp_path: Path, torn: str) -> None:
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.store_measured("a", Cost.of(fake_cost(SHAPE, "f16")))
    with (tmp_path / "measurements.jsonl").open("a") as file:
        file.write(torn)
    with RunFolder(tmp_path, CONFIG) as folder:
        assert folder.measured("a") is not None
        assert folder.failed("b") is None
        folder.store_failed("c", "later")
    with RunFolder(tmp_path, CONFIG) as folder:
        assert folder.failed("c") == "later"


def test_damaged_line_inside_is_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.store_failed("a", "x")
    with (tmp_path / "measurements.jsonl").open("a") as file:
        file.write('{"key": "b", "cost": {}}\n')
    with pytest.raises(FormatError, match=r"measurements\.jsonl: line 2 is damaged .*remove that line"):
        RunFolder(tmp_path, CONFIG)
    (tmp_path / "measurements.jsonl").write_text("[]\n")
    with pytest.raises(FormatError, match="line 1 is damaged"):
        RunFolder(tmp_path, CONFIG)  # and the first failure left no lock behind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7}, r"seed 0, not 7\. Choose another --out"),
        ({"trials": 9}, "trials 3, not 9"),
        ({"bytes": 5_000_000}, f"params {DEFAULT_PARAMS}, not unset; bytes unset, not 5000000"),
        ({"quants": ("q4_0",)}, r'quants \["q4_0", "q8_0", "f16"\], not \["q4_0"\]'),
        ({"machine": "another processor"}, 'machine "", not "another processor"'),
    ],
)
def test_another_search_in_the_folder_is_refused_with_the_difference(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    RunFolder(tmp_path, CONFIG).__exit__()
    fields: dict[str, Any] = {"trials": 3} | changes
    with pytest.raises(UsageError, match=message):
        RunFolder(tmp_path, SearchConfig(**fields))
    RunFolder(tmp_path, CONFIG).__exit__()


def test_equal_settings_are_equal_after_json(tmp_path: Path) -> None:
    config = SearchConfig(trials=3, vocabs=(5000, 4000), tokens=2e11, max_ms_per_token=3, threads=2)
    for _ in range(2):
        RunFolder(tmp_path, config).__exit__()


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_damaged_settings_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(FormatError, match=r"config\.json.*(no JSON|no JSON object).*choose another --out"):
        RunFolder(tmp_path, CONFIG)


def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match=r"holds 'thesis\.tex' but no config\.json"):
        RunFolder(tmp_path, CONFIG)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_half_written_settings_of_a_killed_first_start_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "config.json.tmp").write_text('{"sch')
    RunFolder(tmp_path, CONFIG).__exit__()
    assert json.loads((tmp_path / "config.json").read_text())["trials"] == 3


def test_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(DeepthinError, match=r"run: the run folder cannot be used \(.*\); choose another --out"):
        RunFolder(tmp_path / "run", CONFIG)


def test_folder_in_use_is_refused_and_freed_however_the_user_ends(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from deepthin.search.folder import RunFolder; "
        "from deepthin.search.config import SearchConfig; "
        "f = RunFolder(Path(sys.argv[1]), SearchConfig(trials=3)); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(DeepthinError, match="another search is running in this folder"):
            RunFolder(tmp_path, CONFIG)
        other.kill()
    RunFolder(tmp_path, CONFIG).__exit__()


def test_front_is_written_whole(tmp_path: Path) -> None:
    with RunFolder(tmp_path, CONFIG) as folder:
        path = folder.write_front({"schema": "x"})
        folder.write_front({"schema": "y"})
        with pytest.raises(ValueError, match="JSON"):
            folder.write_front({"schema": float("nan")})
    assert json.loads(path.read_text()) == {"schema": "y"}
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "--trials is 0"),
        ({"trials": True}, "--trials is True"),
        ({"seed": -1}, "--seed is -1"),
        ({"plateau": -1}, "--plateau is -1"),
        ({"sampler": "gp"}, "sampler 'gp' is unknown; use one of exhaustive, guided"),
        ({"context": -1}, "--context is -1"),
        ({"params": 0}, "--params is 0"),
        ({"vocabs": ()}, "vocabs is empty"),
        ({"quants": ("q3",)}, "'q3' is unknown"),
        ({"tokens": 5.0}, "1e9 to 1e14"),
        ({"int4_multiplier": -0.5}, "4-bit multiplier"),
        ({"max_ms_per_token": 0.0}, "--max-ms-per-token"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SearchConfig(**changes)


def test_default_budget_applies_only_when_none_is_given() -> None:
    assert SearchConfig().budget.params == DEFAULT_PARAMS
    assert SearchConfig(bytes=10**7).budget.params is None


def test_context_beyond_the_usual_limit_is_in_every_shape() -> None:
    space = SearchConfig(context=4096).space
    assert space.smallest.shape.max_seq_len == 4096
    assert "ctx" not in SearchConfig().space.smallest.shape.text
