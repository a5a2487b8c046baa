from dataclasses import replace

import pytest

from deepthin.engine.errors import UnsupportedError, UsageError
from deepthin.profiles.device_facts import device_facts
from deepthin.profiles.latency.hull import Hull
from deepthin.profiles.latency.workload import DECODE, Workload
from deepthin.profiles.predicted_costs import PredictedCosts
from deepthin.profiles.schema import Predicted, TokenCost
from tests.profiles.test_profile import made
from tests.support.probed import SMALL


def test_a_cost_is_the_prediction_of_the_profile_split_into_parts() -> None:
    profile = made()
    costs = PredictedCosts(profile, 64, threads=2)
    cost = costs.measure(SMALL, "q4_0")
    assert cost.seconds_per_token == profile.predict("llama.cpp", 2, Workload(SMALL, "q4_0", context=64)).seconds
    parts = SMALL.num_layers * cost.block_s.median + cost.head_s.median + cost.embed_s.median + cost.overhead_s.median
    assert parts == pytest.approx(cost.seconds_per_token.median)
    assert (cost.threads, cost.context, cost.measured_now, cost.basis) == (2, 64, False, "predicted")
    assert cost.flags == ("predicted",)


def test_what_lies_beyond_the_probes_is_flagged() -> None:
    cost = PredictedCosts(made(), 64).measure(SMALL.replace(num_layers=900), "q4_0")
    assert cost.flags == ("predicted", "extrapolated")


def test_a_predicted_cost_survives_json() -> None:
    cost = PredictedCosts(device_facts("pixel-9").profile(), 64).measure(SMALL, "q8_0")
    again = TokenCost.from_json(cost.to_json())
    assert again == cost
    assert isinstance(again.seconds_per_token, Predicted)
    assert again.basis == "published"


def test_the_identity_changes_with_device_runtime_and_model() -> None:
    names = {
        PredictedCosts(made(), 0).identity,
        PredictedCosts(made(), 0, threads=1).identity,
        PredictedCosts(device_facts("pixel-9").profile(), 0).identity,
        PredictedCosts(device_facts("pixel-8").profile(), 0).identity,
    }
    assert len(names) == 4
    assert PredictedCosts(made(), 0).identity == PredictedCosts(made(), 99).identity


def test_unknown_runtimes_threads_and_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="onnxruntime was not measured"):
        PredictedCosts(made(), 0, runtime="onnxruntime")
    with pytest.raises(UsageError, match="not measured at 7 threads"):
        PredictedCosts(made(), 0, threads=7)
    with pytest.raises(UnsupportedError, match=r"llama\.cpp does not run q4_k"):
        PredictedCosts(made(), 0).measure(SMALL, "q4_k")


def test_the_first_token_takes_as_long_as_the_prompt_is_predicted_to_take() -> None:
    phone = PredictedCosts(device_facts("pixel-9").profile(), 64)
    short, long = (phone.first_token(SMALL, "q8_0", prompt) for prompt in (32, 256))
    assert short is not None
    assert long is not None
    assert short.low <= short.value <= short.high < 8 * long.high
    assert short.value < long.value


def test_without_measured_prompts_there_is_no_time_to_the_first_token() -> None:
    profile = made()
    only_decode = replace(profile, models=tuple(model for model in profile.models if model.test == DECODE))
    assert PredictedCosts(only_decode, 64).first_token(SMALL, "q4_0", 10) is None


def test_a_head_of_its_own_is_read_as_it_is_stored_and_said_where_it_was_not_probed() -> None:
    phone = PredictedCosts(device_facts("pixel-9").profile(), 64)
    coarse, plain, fine = (phone.measure(SMALL, f"q4_0{head}").head_s.median for head in ("-head_q4_0", "", "-head_f32"))
    assert coarse < plain < fine
    hull = Hull.of([Workload(SMALL, "q4_0"), Workload(SMALL, "q8_0")])
    assert hull.quants == ("q4_0", "q8_0")
    assert not any("not probed" in why for why in hull.outside(Workload(SMALL, "q4_0-head_q4_0")))
    assert "q5_1 of the head was not probed" in hull.outside(Workload(SMALL, "q4_0-head_q5_1"))
    with pytest.raises(UnsupportedError, match="does not run q4_0-head_q4_k as it is stored"):
        phone.measure(SMALL, "q4_0-head_q4_k")
