"""Two made-up devices that want different shapes: one pays for layers, the other for bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.accounting import bytes_read_per_token
from deepthin.engine.errors import FormatError, InfeasibleError, UnsupportedError, UsageError
from deepthin.engine.known_shapes import known_shape
from deepthin.engine.shape import Shape
from deepthin.search.config import SearchConfig
from deepthin.search.cost import Cost, DeviceTime, Timing
from deepthin.search.devices import ACROSS, Device, compromise, joint_cost
from deepthin.search.objectives import Limits, Scored, unmet
from deepthin.search.quality.model import QualityModel
from deepthin.search.run import run_search
from deepthin.search.space import Candidate

REFERENCE = Candidate(known_shape("smollm2-135m").shape, "q4_0")
CONFIG = SearchConfig(params=30_000_000, trials=14, profile="two devices")


def timed(layer_s: float, bandwidth: float, prompt: bool = True) -> Callable[[Shape, str], Cost]:
    def cost(shape: Shape, quant: str) -> Cost:
        seconds = shape.num_executed_layers * layer_s + bytes_read_per_token(shape, quant) / bandwidth
        time = Timing(seconds, 0.9 * seconds, 1.2 * seconds, basis="predicted")
        return Cost(time, 2, 512, 1000, time.scaled(50, "s") if prompt else None, 512, ("predicted",))

    return cost


def device(name: str, layer_s: float, bandwidth: float, **more: Any) -> Device:
    cost = timed(layer_s, bandwidth, **more)
    return Device(name, cost, cost(REFERENCE.shape, REFERENCE.quant).decode.value, {"runtime": "made up"})


LAYERED, NARROW = device("layered", 4e-4, 60e9), device("narrow", 5e-6, 3e9)
DEEP, WIDE = (Shape.parse(f"L={deep},d={wide},heads=4,ff=1024,vocab=8192,tied") for deep, wide in ((40, 256), (4, 768)))


@pytest.mark.parametrize("shape", [DEEP, WIDE])
def test_the_joint_time_is_the_largest_or_the_mean_of_relative_times(shape: Shape) -> None:
    devices = [LAYERED, NARROW]
    ratios = [one.cost(shape, "q8_0").decode.value / one.reference_s for one in devices]
    scale = math.sqrt(LAYERED.reference_s * NARROW.reference_s)
    worst, mean = joint_cost(devices, "worst")(shape, "q8_0"), joint_cost(devices, "mean")(shape, "q8_0")
    assert isinstance(worst, Cost) and isinstance(mean, Cost)
    assert worst.decode.value == pytest.approx(scale * max(ratios))
    assert mean.decode.value == pytest.approx(scale * math.sqrt(ratios[0] * ratios[1]))
    assert (worst.decode.low, worst.decode.high) == pytest.approx((0.9 * worst.decode.value, 1.2 * worst.decode.value))
    assert [one.name for one in worst.devices] == ["layered", "narrow"]
    assert worst.devices[0].decode == LAYERED.cost(shape, "q8_0").decode
    assert worst.first_token is not None
    assert worst.first_token.value == max(50 * one.decode.value for one in worst.devices)
    assert Cost.from_json(worst.to_json()) == worst


def test_the_rules_differ_where_one_device_pays_for_the_other() -> None:
    """The deep shape is slow on one device and fast on the other, which the mean forgives and the worst does not."""
    ratio = {
        across: [joint_cost([LAYERED, NARROW], across)(shape, "q8_0") for shape in (DEEP, WIDE)] for across in ("worst", "mean")
    }
    seconds = {across: [Cost.of(cost).decode.value for cost in costs] for across, costs in ratio.items()}
    assert seconds["worst"][0] / seconds["worst"][1] > seconds["mean"][0] / seconds["mean"][1]


def test_without_prompts_on_one_device_there_is_no_joint_prompt() -> None:
    cost = joint_cost([LAYERED, device("mute", 1e-5, 5e9, prompt=False)], "worst")(DEEP, "q4_0")
    assert isinstance(cost, Cost)
    assert cost.first_token is None


@pytest.mark.parametrize(
    ("devices", "across", "says"),
    [
        ([LAYERED], "worst", "at least two are needed"),
        ([LAYERED, replace(NARROW, name="layered")], "mean", "devices: layered is named twice"),
        ([LAYERED, NARROW], "median", "rule 'median' .* use one of worst, mean, each"),
    ],
)
def test_devices_and_rules_that_make_no_sense(devices: list[Device], across: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        joint_cost(devices, across)


def test_limits_hold_on_every_device_and_the_refusal_names_the_one_that_binds() -> None:
    cost = joint_cost([LAYERED, NARROW], "worst")(DEEP, "q8_0")
    one = Scored(0, Candidate(DEEP, "q8_0"), QualityModel().predict(DEEP, "q8_0"), Cost.of(cost))
    slow = 1e3 * LAYERED.cost(DEEP, "q8_0").decode.value
    assert Limits(ms_per_token=slow).met(one)
    assert not Limits(ms_per_token=0.99 * slow).met(one)
    message = str(unmet(Limits(ms_per_token=slow / 2), [one]))
    assert "ms per token on layered, 100.0% over the limit" in message
    assert "ms to the first token on layered, " in str(unmet(Limits(ttft_ms=1.0), [one]))
    bare = replace(one, cost=replace(one.cost, devices=(DeviceTime("mute", one.cost.decode), *one.cost.devices)))
    with pytest.raises(UsageError, match="prompts are timed neither while searching on this machine nor in every profile"):
        Limits(ttft_ms=1.0).met(bare)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Joint front and compromise of the two devices."""
    folder = tmp_path_factory.mktemp("devices")
    devices = [LAYERED, NARROW]
    joint = run_search(CONFIG, measure=joint_cost(devices, "worst"), out=folder / "all")
    alone = [run_search(replace(CONFIG, profile=one.name), measure=one.cost, out=folder / one.name) for one in devices]
    tried = [Candidate(Shape.parse(e["shape"]), e["quant"]) for document in (joint, *alone) for e in document["evaluated"]]
    return joint, compromise(devices, "worst", joint, tried, CONFIG.quality, CONFIG.limits, ("smollm2-135m", REFERENCE))


def test_front_members_hold_the_time_on_each_device(found: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for member in found[0]["front"]:
        assert set(member["devices"]) == {"layered", "narrow"}
        shape = Shape.from_json(member["shape"])
        milliseconds = 1e3 * NARROW.cost(shape, member["quant"]).decode.value
        assert member["devices"]["narrow"]["ms_per_token"]["value"] == pytest.approx(milliseconds)
        assert member["devices"]["narrow"]["ms_per_token"]["basis"] == "predicted"


def test_each_device_has_an_own_best_and_the_compromise_is_held_against_it(
    found: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    joint, document = found
    assert document["schema"] == "deepthin/devices/1"
    assert document["rule"] == ACROSS["worst"]
    assert [one["name"] for one in document["devices"]] == ["layered", "narrow"]
    shared = joint["picks"][joint["recommended"]]
    model = QualityModel()
    for one in (LAYERED, NARROW):
        own = document["own"][one.name]["fastest_tied"]
        lost = document["cost_of_one_for_all"][one.name]
        mine, theirs = (Shape.parse(pick["shape"]) for pick in (own, shared))
        assert lost["nats"] == pytest.approx(
            model.predict(theirs, shared["quant"]).loss - model.predict(mine, own["quant"]).loss
        )
        assert lost["tied"] == (abs(lost["nats"]) <= 0.02)
        assert lost["time"] == pytest.approx(lost["shared_ms_per_kchar"] / lost["own_ms_per_kchar"] - 1)
        assert own["reason"]
        text = lost["text"]
        assert ("own best" in text) == ((own["shape"], own["quant"]) == (shared["shape"], shared["quant"]))
        relative = document["one_for_all"]["fastest_tied"]["on"][one.name]["relative_time"]
        assert relative == pytest.approx(one.cost(theirs, shared["quant"]).decode.value / one.reference_s)
        best = document["own"][one.name]["best_quality"]["loss"]
        assert own["loss"] <= best + 0.02
        if model.predict(theirs, shared["quant"]).loss <= best + 0.02:  # it was among those the device chose from
            assert lost["time"] >= 0
    depths = {name: Shape.parse(picks["fastest_tied"]["shape"]).num_layers for name, picks in document["own"].items()}
    assert depths["layered"] <= depths["narrow"]  # what a layer costs there decides


def test_shapes_that_only_one_device_runs_are_no_other_ones_choice(found: tuple[dict[str, Any], dict[str, Any]]) -> None:
    def not_all(shape: Shape, quant: str) -> Cost:
        if shape == large:
            raise UnsupportedError("this runtime has no such thing")
        return NARROW.cost(shape, quant)

    joint = found[0]
    large = Shape.parse("L=24,d=1024,heads=16,ff=4096,vocab=32768,tied")  # better than all others where it runs
    extra = Candidate(large, "f16")
    devices = [LAYERED, replace(NARROW, cost=not_all)]
    document = compromise(devices, "worst", joint, [extra], CONFIG.quality, CONFIG.limits, ("smollm2-135m", REFERENCE))
    assert document["own"]["layered"]["best_quality"]["shape"] == large.text
    assert document["own"]["narrow"]["best_quality"]["shape"] != large.text


def test_a_device_on_which_nothing_meets_the_limits_is_named(found: tuple[dict[str, Any], dict[str, Any]]) -> None:
    joint = found[0]
    limits = Limits(ms_per_token=0.001)
    with pytest.raises(InfeasibleError, match=r"^layered: none of \d+ shapes meets --max-ms-per-token: the nearest"):
        compromise([LAYERED, NARROW], "worst", joint, [], CONFIG.quality, limits, ("smollm2-135m", REFERENCE))


def test_a_joint_run_goes_on_as_it_was(tmp_path: Path) -> None:
    measure = joint_cost([LAYERED, NARROW], "mean")
    config = replace(CONFIG, trials=6)
    first = run_search(config, measure=measure, out=tmp_path / "run")

    def never(shape: Shape, quant: str) -> Cost:
        raise AssertionError("everything was costed")

    assert run_search(config, measure=never, out=tmp_path / "run") == first


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"devices": {}}, "devices is dict, but a list is needed"),
        ({"devices": [{"name": "x"}]}, "device time: key 'decode' is missing"),
        ({"flags": "x"}, "flags is str, but a list is needed"),
    ],
)
def test_damaged_costs_of_several_devices(change: dict[str, Any], says: str) -> None:
    cost = Cost.of(joint_cost([LAYERED, NARROW], "worst")(DEEP, "q8_0")).to_json()
    with pytest.raises(FormatError, match=says):
        Cost.from_json({**cost, **change})
