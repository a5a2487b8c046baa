"""The sampler benchmark: what a listing holds, that slices add up, what is reported; and how skilled the rule is."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import UsageError
from deepthin.engine.shape import Shape
from deepthin.profiles.library import find_profile
from deepthin.profiles.profile import Profile, read_profile
from deepthin.search.config import SearchConfig
from deepthin.search.run import run_search
from tests.support.benchmark_scripts import load_script
from tests.support.fake_costs import FakeMeasure, fake_cost

spaces, kept, benchmark = load_script("listed_spaces"), load_script("kept_profile"), load_script("search")
CONFIG: dict[str, Any] = {
    "params": 5_000_000,
    "vocabs": (4096, 8192),
    "quants": ("q4_0",),
    "head_dims": (64,),
    "kv_groups": (1,),
}
SETTINGS = spaces.SpaceSettings("two vocabularies", CONFIG)
SHARE = 0.08  # of a space this small; a twentieth of it is the first shapes alone


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A few hundred shapes with made-up times, decoded once and read back from the file."""
    folder = tmp_path_factory.mktemp("listings")
    fresh = spaces.Listing("tiny", SETTINGS, fake_cost, folder)
    found = spaces.Listing("tiny", SETTINGS, fake_cost, folder)
    assert found.decoded == fresh.decoded
    assert found.digest == fresh.digest
    return found


@pytest.fixture
def profile() -> Profile:
    """A device known from data sheets."""
    return find_profile("pixel-9", {})


def test_a_listing_holds_every_shape_and_its_true_front(listing: Any) -> None:
    space = SearchConfig(**CONFIG).space
    points = list(space.points())
    assert len(listing.decoded) == len(points)
    for point in points[:: len(points) // 40]:
        assert listing.decoded[tuple(point.values())] == space.decode(point)
    for loss, time in listing.pairs.values():
        assert any(x <= loss and y <= time for x, y in listing.front)
    assert listing.share(listing.front) == pytest.approx(1.0)
    assert 0 < listing.share(listing.front[1:]) < 1


def test_a_listed_search_is_the_search(listing: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"trials": 24, "seed": 3, "sampler": "guided"}
    plain = run_search(SearchConfig(**CONFIG, **settings), measure=FakeMeasure(), out=tmp_path / "plain")
    listed = run_search(listing.config(**settings), measure=listing.cost, out=tmp_path / "listed")
    assert listed == plain


def test_roughness_is_an_error_of_each_shape_and_stays() -> None:
    rough = spaces.Listing("rough", spaces.SpaceSettings("", CONFIG | {"vocabs": (4096,)}, 0.02), fake_cost)
    smooth = {key: math.log(fake_cost(one.shape, one.quant).seconds_per_token.median) for key, one in keyed(rough).items()}
    errors = [math.log(rough.costs[key].decode.value) - smooth[key] for key in smooth]
    assert 0.015 < math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.025
    shape = Shape.parse("L=4,d=64,heads=1,ff=128,vocab=64")
    assert rough.cost(shape, "q4_0") == rough.cost(shape, "q4_0")


def keyed(listing: Any) -> dict[str, Any]:
    return {one.key: one for one in listing.decoded.values()}


def test_the_rule_finds_nearly_the_whole_front_and_beats_the_baselines(listing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampler skill as a regression test, small: what benchmarks/search.py measures on large spaces."""
    monkeypatch.setattr(benchmark, "SHARE", SHARE)
    seeds = range(3)
    found = {
        sampler: [benchmark.one_search(listing, sampler, seed)["share"] for seed in seeds]
        for sampler in ("guided", "nsga2", "random")
    }
    assert min(found["guided"]) >= 0.99
    for sampler in ("nsga2", "random"):
        assert all(ours > theirs for ours, theirs in zip(found["guided"], found[sampler], strict=True))


def test_slices_add_up_and_nothing_is_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: Profile) -> None:
    monkeypatch.setattr(benchmark, "SPACES", {"tiny": spaces.SpaceSettings("two vocabularies", CONFIG | {"vocabs": (4096,)})})
    monkeypatch.setattr(benchmark, "LISTINGS", tmp_path / "listings")
    data = tmp_path / "search.jsonl"
    benchmark.run_missing(data, profile, ["tiny"], ["random"], range(1), math.inf)
    data.write_text(data.read_text() + '{"torn": ')  # as a kill leaves it
    first = benchmark.read_lines(data)
    data.write_text("".join(json.dumps(line) + "\n" for line in first))
    benchmark.run_missing(data, profile, ["tiny"], ["random", "nsga2"], range(2), math.inf)
    lines = benchmark.read_lines(data)
    assert [(line["sampler"], line["seed"]) for line in lines] == [("random", 0), ("nsga2", 0), ("random", 1), ("nsga2", 1)]
    assert lines[0] == first[0]
    for line in lines:
        assert line["evaluations"] == line["distinct"] == int(benchmark.SHARE * line["shapes"])
        assert line["course"][-1] == pytest.approx(line["share"], abs=0.02)
    benchmark.run_missing(data, profile, ["tiny"], ["random"], range(5), -1.0)  # no time left
    assert benchmark.read_lines(data) == lines


def line_of(sampler: str, seed: int, share: float, digest: str = "new") -> dict[str, Any]:
    """A stored line."""
    return {
        "schema": benchmark.SCHEMA,
        "space": "tiny",
        "digest": digest,
        "shapes": 6000,
        "front": 40,
        "sampler": sampler,
        "seed": seed,
        "evaluations": 300,
        "distinct": 300,
        "share": share,
        "course": [share * (0.9 + 0.01 * index) for index in range(len(benchmark.CHECKPOINTS))],
        "stop": {"after": 120 + seed, "share": share - 0.001} if sampler == "guided" else None,
        "cpu_s": 1.0,
    }


def test_the_report_counts_seeds_and_gives_intervals(profile: Profile, tmp_path: Path) -> None:
    lines = [line_of("guided", seed, 0.5, "old") for seed in range(3)]
    lines += [line_of("guided", seed, 0.995 + 0.001 * seed) for seed in range(4)]
    lines += [line_of("random", seed, 0.9 if seed else 0.997) for seed in range(4)]
    text = benchmark.report(lines, profile)
    (random,) = [row for row in text.splitlines() if "| random |" in row]
    cells = [cell.strip() for cell in random.split("|")]
    assert cells[1:6] == ["tiny", "6,000", "300", "random", "0.9000"]
    assert cells[8] == "1 of 4"
    assert cells[10] == "3 of 4"
    assert cells[9].startswith("0.0722 (")
    assert "0.5" not in text  # lines of an earlier listing do not count
    assert "4 of 4 guided searches would have stopped early, after 120 to 123" in text
    document, drawing = tmp_path / "page.md", tmp_path / "page.svg"
    document.write_text(f"before\n{benchmark.BEGIN}\nold\n{benchmark.END}\nafter\n")
    benchmark.write_report(text, lines, document, drawing)
    assert document.read_text() == f"before\n{benchmark.BEGIN}\n{text}\n{benchmark.END}\nafter\n"
    assert {"guided", "random"} <= {node.text for node in ElementTree.fromstring(drawing.read_text()).iter()}
    document.write_text("no markers")
    with pytest.raises(UsageError, match=r"page\.md: the lines .* are missing"):
        benchmark.write_report(text, lines, document, drawing)
    assert document.read_text() == "no markers"


def test_the_kept_profile_predicts_the_same_without_its_samples(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "machine_name", lambda record: "some-machine")
    with pytest.raises(UsageError, match=r"0 files are called search-profile\.json, one is needed"):
        kept.kept_profile(tmp_path)
    path = kept.keep(profile, tmp_path)
    assert kept.kept_profile(tmp_path) == path == tmp_path / "some-machine" / "search-profile.json"
    shape = Shape.parse("L=30,d=576,heads=9,kv=3,ff=1536,vocab=49152,tied")
    assert benchmark.costs_of(read_profile(path))(shape, "q4_0") == benchmark.costs_of(profile)(shape, "q4_0")
