from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.accounting import count_bytes, count_params
from deepthin.engine.errors import DeepthinError, InfeasibleError, UnsupportedError, UsageError
from deepthin.engine.shape import Shape
from deepthin.profiles.schema import TokenCost
from deepthin.search.cost import Cost, Timing
from deepthin.search.file_sizes import gguf_bytes
from deepthin.search.least_cache import least_cache
from deepthin.search.objectives import Scored
from deepthin.search.run import SearchConfig, run_search
from tests.support.fake_costs import FakeMeasure, fake_cost

ROOT = Path(__file__).resolve().parents[2]
TRIALS = 24  # up to sixteen by design, the rest by the sampler
CONFIG = SearchConfig(trials=TRIALS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FakeMeasure]:
    """An uninterrupted run of ``CONFIG``."""
    out, measure = tmp_path_factory.mktemp("finished") / "run", FakeMeasure()
    run_search(CONFIG, measure=measure, out=out)
    return out, measure


def front(out: Path) -> bytes:
    return (out / "front.json").read_bytes()


def test_no_shape_is_measured_twice(finished: tuple[Path, FakeMeasure]) -> None:
    out, measure = finished
    document = json.loads(front(out))
    assert max(Counter(measure.calls).values()) == 1
    evaluated = {(one["shape"], one["quant"]) for one in document["evaluated"]}
    assert len(document["evaluated"]) == len(evaluated) == document["trials"] == document["measurements"] == TRIALS
    comparisons = {(pick["compared_with"]["shape"]["text"], pick["quant"]) for pick in document["picks"].values()}
    assert set(measure.calls) == evaluated | comparisons


def test_run_again_measures_nothing_and_writes_the_same_bytes(finished: tuple[Path, FakeMeasure]) -> None:
    out, _ = finished
    before = front(out)
    again = FakeMeasure()
    document = run_search(CONFIG, measure=again, out=out)
    assert again.calls == []
    assert front(out) == before
    assert json.loads(before) == json.loads(json.dumps(document))


def test_same_seed_elsewhere_gives_the_same_bytes(finished: tuple[Path, FakeMeasure], tmp_path: Path) -> None:
    run_search(CONFIG, measure=FakeMeasure(), out=tmp_path / "other")
    assert front(tmp_path / "other") == front(finished[0])


def test_another_seed_proposes_other_shapes(finished: tuple[Path, FakeMeasure], tmp_path: Path) -> None:
    measure = FakeMeasure()
    run_search(SearchConfig(trials=TRIALS, seed=1), measure=measure, out=tmp_path / "other")
    assert len(set(measure.calls) & set(finished[1].calls)) < TRIALS / 2


def test_lost_journal_costs_no_measurement(finished: tuple[Path, FakeMeasure], tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    for name in ("config.json", "measurements.jsonl"):
        (out / name).write_bytes((finished[0] / name).read_bytes())
    measure = FakeMeasure()
    run_search(CONFIG, measure=measure, out=out)
    assert measure.calls == []
    assert front(out) == front(finished[0])


def run_until_killed(out: Path, log: Path, where: str, count: int) -> None:
    command = [sys.executable, "-m", "tests.support.doomed_search", str(out), str(log), str(TRIALS), where, str(count)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.parametrize(("where", "count"), [("measure", 20), ("stored", 9), ("torn", 20), ("told", 18)])
def test_killed_and_started_again_it_finishes_as_if_nothing_had_happened(
    finished: tuple[Path, FakeMeasure], tmp_path: Path, where: str, count: int
) -> None:
    out, log = tmp_path / "run", tmp_path / "calls"
    run_until_killed(out, log, where, count)
    assert not (out / "front.json").exists()
    before = log.read_text().splitlines()
    resumed = FakeMeasure(log)
    run_search(CONFIG, measure=resumed, out=out)
    assert front(out) == front(finished[0])
    calls = Counter(log.read_text().splitlines())
    repeated = {call: times for call, times in calls.items() if times > 1}
    lost = {before[-1]: 2} if where in ("measure", "torn") else {}
    assert repeated == lost  # the trial in flight, and nothing else
    assert set(calls) == {f"{shape} {quant}" for shape, quant in finished[1].calls}


def test_killed_from_outside_at_any_moment(finished: tuple[Path, FakeMeasure], tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "calls"
    command = [sys.executable, "-m", "tests.support.doomed_search", str(out), str(log), str(TRIALS), "never", "0"]
    process = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + 60
    while (not log.exists() or log.read_text().count("\n") < 8) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run_search(CONFIG, measure=FakeMeasure(log), out=out)
    assert front(out) == front(finished[0])
    assert sum(times - 1 for times in Counter(log.read_text().splitlines()).values()) <= 1


def test_every_evaluated_shape_meets_both_budgets(tmp_path: Path) -> None:
    config = SearchConfig(params=20_000_000, bytes=14_000_000, trials=18)
    document = run_search(config, measure=FakeMeasure(), out=tmp_path / "run")
    assert document["budget"] == {"params": 20_000_000, "bytes": 14_000_000, "ram": None}
    for one in document["evaluated"]:
        shape = Shape.parse(one["shape"])
        assert count_params(shape).total <= 20_000_000
        assert count_bytes(shape, one["quant"]).total <= 14_000_000
        assert gguf_bytes(shape, one["quant"], f"random-{shape.text}-seed0") <= 14_000_000


def test_fixed_vocabulary_and_format_are_kept(tmp_path: Path) -> None:
    config = SearchConfig(vocabs=(32_000,), quants=("q4_1",), trials=12)
    document = run_search(config, measure=FakeMeasure(), out=tmp_path / "run")
    assert {(Shape.parse(one["shape"]).vocab_size, one["quant"]) for one in document["evaluated"]} == {(32_000, "q4_1")}


def test_infeasible_budget_ends_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match="924,000 more than the budget"):
        run_search(SearchConfig(params=100_000, vocabs=(32_000,)), measure=FakeMeasure(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_shapes_that_cannot_be_measured_are_listed_and_not_tried_again(tmp_path: Path) -> None:
    config = SearchConfig(trials=20)
    layers = Shape.parse(run_search(config, measure=FakeMeasure(), out=tmp_path / "all")["evaluated"][2]["shape"]).num_layers
    measure = FakeMeasure(refuse=layers)
    document = run_search(config, measure=measure, out=tmp_path / "run")
    assert document["failures"]
    assert all(
        f"L={layers}," in failure["shape"] and "refused by this test" in failure["why"] for failure in document["failures"]
    )
    assert document["trials"] == 20 == len(document["evaluated"]) + len(document["failures"])
    again = FakeMeasure(refuse=layers)
    before = front(tmp_path / "run")
    run_search(config, measure=again, out=tmp_path / "run")
    assert again.calls == []
    assert front(tmp_path / "run") == before


def test_nothing_measurable_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    def refuse(shape: Shape, quant: str) -> TokenCost:
        raise UnsupportedError("no kernel for this machine")

    with pytest.raises(DeepthinError, match=r"not one of 3 shapes could be measured.*no kernel for this machine"):
        run_search(SearchConfig(trials=3), measure=refuse, out=tmp_path / "run")


def test_public_shape_that_cannot_be_measured_leaves_a_reason(tmp_path: Path) -> None:
    document = run_search(SearchConfig(trials=4), measure=FakeMeasure(refuse=64), out=tmp_path / "run")
    assert {pick["compared_with"]["name"] for pick in document["picks"].values()} == {"monad"}
    assert all("refused by this test" in pick["compared_with"]["why_not"] for pick in document["picks"].values())


def test_bug_in_measuring_is_not_swallowed(tmp_path: Path) -> None:
    def broken(shape: Shape, quant: str) -> TokenCost:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_search(SearchConfig(trials=3), measure=broken, out=tmp_path / "run")
    run_search(SearchConfig(trials=3), measure=FakeMeasure(), out=tmp_path / "run")  # and the folder is usable


def test_space_smaller_than_the_trials_ends_early_and_repeats(tmp_path: Path) -> None:
    # Barely above the smallest budget of its vocabulary, which leaves a handful of shapes.
    config = SearchConfig(params=1_060_000, vocabs=(32_000,), quants=("q8_0",), trials=20)
    measure = FakeMeasure()
    document = run_search(config, measure=measure, out=tmp_path / "run")
    assert 2 <= document["trials"] < 20
    assert max(Counter(measure.calls).values()) == 1
    before, again = front(tmp_path / "run"), FakeMeasure()
    run_search(config, measure=again, out=tmp_path / "run")
    assert again.calls == []
    assert front(tmp_path / "run") == before


def test_limits_steer_and_filter_the_front(finished: tuple[Path, FakeMeasure], tmp_path: Path) -> None:
    times = sorted(member["ms_per_token"]["median"] for member in json.loads(front(finished[0]))["front"])
    limit = times[len(times) // 2]
    document = run_search(SearchConfig(trials=TRIALS, max_ms_per_token=limit), measure=FakeMeasure(), out=tmp_path / "run")
    assert document["front"]
    assert all(member["ms_per_token"]["median"] <= limit for member in document["front"])
    assert len(document["evaluated"]) == TRIALS


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"max_ms_per_token": 0.01},
            r"none of 6 shapes meets --max-ms-per-token: the nearest \(L=.* ms per token, .*% over",
        ),
        (
            {"max_kv_bytes": 10},
            r"--max-kv-mb: no shape of this search has so small a cache: the nearest .* bytes at --context 512",
        ),
    ],
)
def test_limits_nothing_meets_are_named_with_the_shortfall(tmp_path: Path, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(InfeasibleError, match=message):
        run_search(SearchConfig(trials=6, **limits), measure=FakeMeasure(), out=tmp_path / "run")


def test_the_relaxation_that_is_named_admits_a_shape(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"max_ms_per_token": 0.01},
        {"max_kv_bytes": 10},
        {"max_ttft_ms": 0.5, "max_ms_per_token": 0.01},
    ]
    for index, limits in enumerate(cases):
        config: dict[str, Any] = {"trials": 6, **limits}
        with pytest.raises(InfeasibleError) as caught:
            run_search(SearchConfig(**config), measure=PromptedMeasure(), out=tmp_path / f"{index}")
        message = str(caught.value)
        way_out = message.partition("Smallest relaxation: ")[2]
        found = {flag: float(number) for flag, number in re.findall(r"--(max-[a-z-]+) ([\d.]+)", way_out)}
        assert set(found) <= {"max-ms-per-token", "max-ttft-ms", "max-kv-mb"}
        relaxed = {"max-ms-per-token": "max_ms_per_token", "max-ttft-ms": "max_ttft_ms"}
        config |= {relaxed[flag]: number for flag, number in found.items() if flag in relaxed}
        if "max-kv-mb" in found:
            config["max_kv_bytes"] = round(found["max-kv-mb"] * 1e6)
        document = run_search(SearchConfig(**config), measure=PromptedMeasure(), out=tmp_path / f"{index} relaxed")
        assert document["front"]
        if len(limits) > 1:
            assert "(of all shapes, --max-ms-per-token alone 0, --max-ttft-ms alone 0 met it)" in message


def test_a_cache_limit_that_chance_does_not_meet_names_the_nearest_of_those_tried(tmp_path: Path) -> None:
    config = SearchConfig(trials=3, sampler="random", vocabs=(8192,), head_dims=(64,))
    limit = 512 * least_cache(config.space).bytes_per_token
    with pytest.raises(InfeasibleError) as caught:
        run_search(replace(config, max_kv_bytes=limit), measure=FakeMeasure(), out=tmp_path / "run")
    message = str(caught.value)
    assert message.startswith("none of 3 shapes meets --max-kv-mb: the nearest (L=")
    assert f"over the limit of {float(limit):,.4g}" in message
    way_out = re.search(r"Smallest relaxation: --max-kv-mb ([\d.]+), which that shape meets", message)
    assert way_out is not None
    relaxed = replace(config, max_kv_bytes=round(float(way_out[1]) * 1e6))
    assert run_search(relaxed, measure=FakeMeasure(), out=tmp_path / "relaxed")["front"]


class PromptedMeasure(FakeMeasure):
    """Costs with a time to the first token, as a profile predicts them."""

    def __call__(self, shape: Shape, quant: str) -> Cost:
        cost = Cost.of(super().__call__(shape, quant))
        first = Timing(100 * cost.decode.value, 90 * cost.decode.value, 130 * cost.decode.value, basis="predicted")
        decode = Timing(cost.decode.value, cost.decode.low, cost.decode.high, basis="predicted")
        return replace(cost, decode=decode, first_token=first, prompt=256)


def test_predicted_costs_stay_predicted_to_the_front(tmp_path: Path) -> None:
    config = SearchConfig(trials=5, max_ttft_ms=1e6)
    document = run_search(config, measure=PromptedMeasure(), out=tmp_path / "run")
    for member in document["front"]:
        assert member["ms_per_token"]["basis"] == member["ms_to_first_token"]["basis"] == "predicted"
        assert set(member["ms_per_kchar"]) == {"value", "low", "high", "unit", "basis"}
    again = run_search(config, measure=PromptedMeasure(), out=tmp_path / "run")
    assert again == document


def test_prompts_that_nothing_times_cannot_be_limited(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-ttft-ms: prompts are timed neither"):
        run_search(SearchConfig(trials=3, max_ttft_ms=5.0), measure=FakeMeasure(), out=tmp_path / "run")


def test_progress_counts_steps_and_names_the_comparison(tmp_path: Path) -> None:
    said: list[tuple[str, int | None, int | None]] = []
    run_search(SearchConfig(trials=5), measure=FakeMeasure(), out=tmp_path / "run", progress=lambda *event: said.append(event))
    assert [(done, total) for _, done, total in said[:6]] == [(0, 5), *((step, 5) for step in range(1, 6))]
    assert "loss" in said[1][0]
    assert said[-1][0].startswith("comparing with")


def test_sixty_trials_cost_seconds_of_search(tmp_path: Path) -> None:
    start = time.process_time()
    run_search(SearchConfig(trials=60), measure=FakeMeasure(), out=tmp_path / "run")
    assert time.process_time() - start < 30


def test_better_than_chance_at_the_same_number_of_measurements(finished: tuple[Path, FakeMeasure], tmp_path: Path) -> None:
    document = json.loads(front(finished[0]))
    found = document["picks"]
    assert found["fastest_tied"]["ms_per_kchar"]["median"] <= found["best_quality"]["ms_per_kchar"]["median"]
    best_random = min(random_losses(TRIALS))
    assert found["best_quality"]["predicted_loss"]["value"] < best_random


def random_losses(count: int) -> Iterator[float]:
    from deepthin.search.design import random_generator

    generator = random_generator(123)
    for _ in range(count):
        candidate = CONFIG.space.decode(CONFIG.space.sample(generator))
        yield CONFIG.quality.predict(candidate.shape, candidate.quant).loss


def test_a_space_that_fits_the_trials_is_taken_whole(tmp_path: Path) -> None:
    lists: dict[str, Any] = {"vocabs": (8192,), "head_dims": (128,), "kv_groups": (4,), "quants": ("q8_0",)}
    config = SearchConfig(params=3_000_000, **lists, trials=10_000, sampler="exhaustive", plateau=2)
    measure = FakeMeasure()
    document = run_search(config, measure=measure, out=tmp_path / "run")
    keys = {config.space.decode(point).key for point in config.space.points()}
    assert {f"{one['shape']} {one['quant']}" for one in document["evaluated"]} == keys
    assert document["stopped"] == "space"  # and not at a plateau on the way
    assert max(Counter(measure.calls).values()) == 1
    assert document["sampler"] == {"name": "exhaustive", "why": "as asked"}


def test_search_stops_when_its_front_no_longer_moves(tmp_path: Path) -> None:
    config = SearchConfig(trials=200, plateau=12)
    document = run_search(config, measure=FakeMeasure(), out=tmp_path / "run")
    assert document["stopped"] == "plateau"
    assert 28 <= document["trials"] < 200
    again = FakeMeasure()
    assert run_search(config, measure=again, out=tmp_path / "run") == document
    assert again.calls == []


@pytest.mark.parametrize("sampler", ["guided", "tpe", "nsga2", "random"])
def test_no_sampler_has_a_candidate_measured_twice(sampler: str, tmp_path: Path) -> None:
    """The space has a handful of shapes, so every sampler proposes known ones before long."""
    measure = FakeMeasure()
    config = SearchConfig(params=1_060_000, vocabs=(32_000,), quants=("q8_0",), trials=30, sampler=sampler, plateau=0)
    document = run_search(config, measure=measure, out=tmp_path / "run")
    assert document["stopped"] == "space"
    assert 2 <= document["trials"] < 30
    assert max(Counter(measure.calls).values()) == 1


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_optuna_samplers_can_be_asked_for(sampler: str, tmp_path: Path) -> None:
    document = run_search(SearchConfig(trials=18, sampler=sampler), measure=FakeMeasure(), out=tmp_path / "run")
    assert (document["sampler"]["name"], document["trials"]) == (sampler, 18)


class NoisyMeasure(FakeMeasure):
    """Wide intervals at first; repeats are exact and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.repeats: list[tuple[str, str, int]] = []

    def __call__(self, shape: Shape, quant: str) -> Cost:
        cost = Cost.of(super().__call__(shape, quant))
        value = cost.decode.value
        return replace(cost, decode=Timing(value, value * 0.9, value * 1.1, samples=(value,)), flags=("steal",))

    def again(self, shape: Shape, quant: str, number: int) -> Cost:
        self.repeats.append((shape.text, quant, number))
        cost = Cost.of(FakeMeasure.__call__(FakeMeasure(), shape, quant))
        value = cost.decode.value
        return replace(cost, decode=Timing(value, value * 0.998, value * 1.002, samples=(value,)))


def test_leaders_in_doubt_are_measured_again_until_their_order_is_clear(tmp_path: Path) -> None:
    plain = run_search(CONFIG, measure=NoisyMeasure(), out=tmp_path / "plain")
    measure = NoisyMeasure()
    document = run_search(CONFIG, measure=measure, out=tmp_path / "run", remeasure=measure.again)
    assert measure.repeats
    assert max(Counter(measure.repeats).values()) == 1
    assert {number for _, _, number in measure.repeats} <= {1, 2, 3}

    def open_places(found: dict[str, Any]) -> int:
        chances = [one["front_probability"] for one in [*found["front"], *found["contenders"]]]
        return sum(0.05 < chance < 0.95 for chance in chances)

    assert open_places(document) < open_places(plain)
    repeated = {(shape, quant) for shape, quant, _ in measure.repeats}
    members = [one for one in document["front"] if (one["shape"]["text"], one["quant"]) in repeated]
    assert members
    assert all(one["ms_per_token"]["n"] > 1 and one["measurement_flags"] == [] for one in members)
    again = NoisyMeasure()
    assert run_search(CONFIG, measure=again, out=tmp_path / "run", remeasure=again.again) == document
    assert not again.repeats
    assert not again.calls


class HopelessMeasure(NoisyMeasure):
    """Repeats are as uncertain as the first measurement, so that hardly any place is ever sure."""

    def again(self, shape: Shape, quant: str, number: int) -> Cost:
        self.repeats.append((shape.text, quant, number))
        return self(shape, quant)


def test_measuring_again_ends_although_places_stay_open(tmp_path: Path) -> None:
    measure = HopelessMeasure()
    document = run_search(SearchConfig(trials=40), measure=measure, out=tmp_path / "run", remeasure=measure.again)
    assert any(0.05 < one["front_probability"] < 0.95 for one in document["front"])
    assert len(measure.repeats) == 10  # a quarter of the trials
    assert max(number for _, _, number in measure.repeats) <= 3
    order = [number for _, _, number in measure.repeats]
    assert order == sorted(order) or order[0] == 1


def test_limits_are_part_of_what_is_proposed(finished: tuple[Path, FakeMeasure], tmp_path: Path) -> None:
    """With a limit that few shapes meet, most guided proposals meet it."""
    times = sorted(one.cost.decode.value for one in costed(60))
    limit = 1e3 * times[6]  # a tenth of random shapes
    document = run_search(
        SearchConfig(trials=48, max_ms_per_token=limit, plateau=0), measure=FakeMeasure(), out=tmp_path / "run"
    )
    seconds = [
        fake_cost(Shape.parse(one["shape"]), one["quant"]).seconds_per_token.to_json()["median"]
        for one in document["evaluated"]
    ]
    met = [1e3 * value <= limit for value in seconds[20:]]
    assert sum(met) > 0.5 * len(met)


def costed(count: int) -> list[Scored]:
    """Random candidates of the default search with made-up times."""
    from deepthin.search.design import random_generator

    generator, found = random_generator(5), []
    for step in range(count):
        candidate = CONFIG.space.decode(CONFIG.space.sample(generator))
        quality = CONFIG.quality.predict(candidate.shape, candidate.quant)
        found.append(Scored(step, candidate, quality, Cost.of(fake_cost(candidate.shape, candidate.quant))))
    return found
