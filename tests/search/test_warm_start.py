from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import FormatError, UsageError
from deepthin.search.config import SearchConfig
from deepthin.search.run import run_search
from deepthin.search.warm_start import MOST, best_of_run, nearest_points, parse_candidate
from tests.support.fake_costs import FakeMeasure

CONFIG: dict[str, Any] = {"params": 3_000_000, "vocabs": (4096, 8192), "trials": 17, "sampler": "tpe"}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("earlier") / "run"
    run_search(SearchConfig(**CONFIG), measure=FakeMeasure(), out=out)
    return out


def test_the_earlier_front_comes_first_best_loss_first(earlier: Path) -> None:
    document = json.loads((earlier / "front.json").read_text())
    start = best_of_run(earlier)
    assert len(start) == MOST
    front = [
        f"{one['shape']} {one['quant']}"
        for one in sorted(document["evaluated"], key=lambda one: one["loss"])
        if one["on_front"]
    ]
    assert list(start[: len(front)]) == front[:MOST]


def test_in_the_same_space_the_same_shapes_are_tried_first(earlier: Path, tmp_path: Path) -> None:
    start = best_of_run(earlier)
    measure = FakeMeasure()
    run_search(SearchConfig(**{**CONFIG, "seed": 7}, start=start), measure=measure, out=tmp_path / "run")
    assert measure.calls[:MOST] == [tuple(text.rsplit(" ", 1)) for text in start]
    assert max(measure.calls.count(call) for call in measure.calls) == 1


def test_another_budget_gets_shapes_of_the_same_proportions_within_it(earlier: Path) -> None:
    space = SearchConfig(params=9_000_000, vocabs=(16384,), quants=("q8_0",)).space
    start = best_of_run(earlier)
    points = nearest_points(space, start)
    assert 1 < len(points) <= MOST
    for point in points:
        candidate = space.decode(point)
        assert space.budget.fits(candidate.shape, candidate.quant)
        assert candidate.shape.num_layers in range(3, 81)
    first = parse_candidate(start[0]).shape
    found = space.decode(points[0]).shape
    assert found.head_dim == first.head_dim
    assert found.tie_word_embeddings == first.tie_word_embeddings
    assert 0.5 < found.num_layers / first.num_layers < 2


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no finished run .*No such file.*; name the --out of an earlier search"):
        best_of_run(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"evaluated": [{"loss": 1, "ms_per_kchar": 1, "shape": "L=1", "quant": "q4_0"}]}', '{"evaluated": 3}']
)
def test_a_damaged_front_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "front.json").write_text(text)
    with pytest.raises(FormatError, match=r"front\.json: is damaged"):
        best_of_run(tmp_path)
