"""The page about shapes: what it needs is stored once, and every figure of it comes from what is stored."""

from __future__ import annotations

import copy
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from deepthin.engine.accounting import count_params
from deepthin.engine.shape import Shape
from deepthin.profiles.library import find_profile
from deepthin.profiles.predicted_costs import PredictedCosts
from deepthin.profiles.profile import Profile
from deepthin.search.quality.model import TIE_BAND, QualityModel
from tests.support.benchmark_scripts import load_script

shapes, pages, charts = load_script("shapes"), load_script("shapes_page"), load_script("front_chart")


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A device known from data sheets."""
    return find_profile("pixel-9", {})


@pytest.fixture(scope="module")
def lines(profile: Profile) -> list[dict[str, Any]]:
    """A small run of everything that is predicted, and a measured search made up from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "SIZES", {"60M": 20_000_000})
        patch.setattr(shapes, "TRIALS", 20)
        patch.setattr(shapes, "DEPTHS", (4, 12, 24))
        patch.setattr(shapes, "PUBLISHED", shapes.PUBLISHED[-2:-1])
        found = list(shapes.missing([], profile, float("inf")))
        again = list(shapes.missing(found, profile, float("inf")))
    assert again == []
    (search,) = [line for line in found if line["kind"] == "search" and line["name"] == "60M"]
    measured = copy.deepcopy(search) | {
        "kind": "measured",
        "command": "deepthin search --params 60000000",
        "search_s": 283.4,
        "repeats": 7,
        "machine": {"machine": "a laptop", "threads": 2, "context": 512},
        "predicted_and_measured": [[101.0, 100.0], [204.0, 200.0], [309.0, 300.0]],
    }
    return [*found, measured]


def test_published_shapes_count_what_their_names_say() -> None:
    by_name = {one.name: count_params(one.shape).total for one in shapes.PUBLISHED}
    for name, published in (
        ("MobileLLM-125M", 124.6e6),
        ("MobileLLM-350M", 345.3e6),
        ("SmolLM2-135M", 134.5e6),
        ("SmolLM2-360M", 361.8e6),
        ("Qwen2.5-0.5B", 494e6),
    ):
        assert by_name[name] == pytest.approx(published, rel=0.002)
    # the stand-in lacks the convolutions' projections: 4 d^2 + 3 d a block instead of attention's 3 d^2
    assert by_name["LFM2-350M"] + 10 * (1024**2 + 3 * 1024) == pytest.approx(354.5e6, rel=0.002)
    assert all(one.source for one in shapes.PUBLISHED)
    assert {one.name for one in shapes.PUBLISHED if one.stand_in} == {
        "LFM2-350M",
        "MobileLLM-Flash-350M",
        "MobileLLM-Flash-350M, larger vocabulary",
    }


def test_depth_sweep_gives_the_law_and_the_times_of_each_depth(lines: list[dict[str, Any]], profile: Profile) -> None:
    (sweep,) = [line for line in lines if line["kind"] == "depths"]
    assert {4, 12, 24} <= {row["layers"] for row in sweep["rows"]}
    best = min(row["loss"] for row in sweep["rows"])
    for row in sweep["rows"]:
        assert (row["fastest_tied_ms"] is None) == (row["loss"] > best + TIE_BAND)
    (published,) = [line for line in lines if line["kind"] == "published"]
    shape = Shape.parse(published["shape"])
    assert published["quants"]["q8_0"]["loss"] == pytest.approx(QualityModel().predict(shape, "q8_0").loss)
    seconds = PredictedCosts(profile, shapes.CONTEXT).measure(shape, "q4_0").seconds_per_token
    assert published["quants"]["q4_0"]["ms_per_token"]["value"] == pytest.approx(seconds.to_json()["value"] * 1e3)


def test_the_page_says_what_is_stored_and_no_more(lines: list[dict[str, Any]]) -> None:
    text = pages.page(lines)
    (search,) = [line for line in lines if line["kind"] == "search" and line["name"] == "60M"]
    depths = [Shape.parse(member["shape"]).num_layers for member in search["front"]]
    assert f"| 60M | 20 | {len(depths)} | {min(depths)} to {max(depths)} |" in text
    for pick in search["picks"].values():
        assert pick["reason"] in text or pick is search["picks"].get("no_slower_than_baseline")
    assert "283 s altogether" in text
    assert "2.0% off in the median" in text
    (published,) = [line for line in lines if line["kind"] == "published"]
    assert published["stand_in"] in text
    without = pages.page([line for line in lines if line["kind"] == "search"])
    assert "stopwatch" not in without
    assert "## Published" not in without
    assert pages.page([]) == "Nothing is stored yet."


def test_lines_of_an_earlier_profile_do_not_count(lines: list[dict[str, Any]]) -> None:
    old = [line | {"profile": "earlier", "device": "another machine"} for line in lines if line["kind"] == "search"]
    assert pages.page([*old, *lines]) == pages.page(lines)


def test_the_figure_is_well_formed_and_names_everything(lines: list[dict[str, Any]]) -> None:
    drawing = pages.figure(lines)
    assert pages.figure(lines) == drawing
    texts = [node.text for node in ElementTree.fromstring(drawing).iter() if node.text]
    assert any("MobileLLM-Flash-350M (12)" in text for text in texts)
    assert "60M" in texts
    with pytest.raises(ValueError, match="nothing to draw"):
        charts.front_chart("empty", "x", "y", {}, [])
