"""Models fitted to a device made of arithmetic predict held-out shapes of it, and say where they do not know."""

import math

import numpy as np
import pytest

from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.shape import Shape
from deepthin.profiles.latency.model import LatencyModel, fit_model
from deepthin.profiles.latency.terms import PARTS
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload
from tests.support.probed import CURVE, SMALL, TRUTH, Device, conditions, decode_works


def test_a_few_noisy_probes_predict_held_out_shapes() -> None:
    where = conditions()
    device = Device(where, noise=0.02)
    model = fit_model(device.probes(decode_works(24)), where, DECODE)
    errors, inside = [], 0
    held_out = decode_works(60, seed=9)
    for work in held_out:
        predicted, truth = model.predict(work).seconds, device.seconds(work)
        errors.append(abs(predicted.value / truth - 1))
        inside += predicted.low <= truth <= predicted.high
    assert np.median(errors) < 0.03
    assert inside >= 0.85 * len(held_out)


def test_the_cost_of_a_layer_is_found() -> None:
    where = conditions()
    model = fit_model(Device(where, noise=0.01).probes(decode_works(30)), where, DECODE)
    value, low, high = model.fitted.value("layer")
    assert value == pytest.approx(TRUTH["layer"], rel=0.3)
    assert low < TRUTH["layer"] < high


def test_a_prediction_is_the_sum_of_its_named_terms() -> None:
    where = conditions()
    prediction = fit_model(Device(where).probes(decode_works(8)), where, DECODE).predict(Workload(SMALL, "q4_0", context=100))
    assert set(prediction.terms) == set(PARTS)
    assert sum(prediction.terms.values()) == pytest.approx(prediction.seconds.value)


@pytest.mark.parametrize("test", [DECODE, PREFILL])
@pytest.mark.parametrize("runtime", ["deepthin", "llama.cpp", "onnxruntime"])
def test_more_of_anything_never_costs_less(runtime: str, test: str) -> None:
    where = conditions(runtime)
    model = fit_model([], where, test)
    tokens = 64 if test == PREFILL else 1
    base = model.predict(Workload(SMALL, "q8_0", test, tokens, 64)).seconds.value
    for change in ({"num_layers": 13}, {"intermediate_size": 800}, {"vocab_size": 9000}):
        assert model.predict(Workload(SMALL.replace(**change), "q8_0", test, tokens, 64)).seconds.value > base
    assert model.predict(Workload(SMALL, "q8_0", test, tokens, 128)).seconds.value > base
    if test == PREFILL:
        assert model.predict(Workload(SMALL, "q8_0", test, 65, 64)).seconds.value > base


def test_outside_the_probes_the_prediction_says_so_and_is_wider() -> None:
    where = conditions()
    works = [work for work in decode_works(40) if work.shape.num_layers <= 16]
    model = fit_model(Device(where, noise=0.01).probes(works), where, DECODE)
    inside = model.predict(works[0])
    assert inside.extrapolated == ()
    deep = model.predict(Workload(works[0].shape.replace(num_layers=400), works[0].quant))
    assert any(reason.startswith("layers 400, above") for reason in deep.extrapolated)
    other = model.predict(Workload(works[0].shape, "q5_1"))
    assert "q5_1 was not probed" in other.extrapolated
    width = [p.seconds.high / p.seconds.low for p in (inside, deep, other)]
    assert width[0] < min(width[1:])


def test_rows_that_the_block_does_not_divide_are_said_to_be_extrapolated() -> None:
    where = conditions()
    model = fit_model(Device(where).probes(decode_works(12)), where, DECODE)
    shape = Shape.parse("L=12,d=250,heads=5,ff=752,vocab=8192,tied")
    assert any("stay f16" in reason for reason in model.predict(Workload(shape, "q8_0")).extrapolated)


def test_without_probes_everything_is_extrapolated() -> None:
    assert fit_model([], conditions(), DECODE).predict(Workload(SMALL, "q4_0")).extrapolated == ("nothing was probed",)


def test_a_disturbed_probe_counts_less() -> None:
    where = conditions()
    works = decode_works(12)
    device = Device(where)
    wrong = Device(where, {**TRUTH, "layer": 2.4e-5})

    def off(flags: tuple[str, ...]) -> float:
        probes = [device.probe(work) for work in works[:-4]] + [wrong.probe(work, flags) for work in works[-4:]]
        return abs(math.log(fit_model(probes, where, DECODE).fitted.value("layer")[0] / TRUTH["layer"]))

    assert off(("other-processes",)) < off(())


def test_probes_of_another_runtime_or_thread_count_are_refused() -> None:
    probes = Device(conditions("onnxruntime")).probes(decode_works(2, quants=("q8_0",)))
    with pytest.raises(UsageError, match=r"fitting llama\.cpp at 1 threads: one probe is of onnxruntime"):
        fit_model(probes, conditions(), DECODE)
    with pytest.raises(UsageError, match="predicts decode, not prefill"):
        fit_model([], conditions(), DECODE).predict(Workload(SMALL, "q4_0", PREFILL, 8))


def test_json_round_trip_predicts_the_same() -> None:
    where = conditions(threads=2)
    model = fit_model(Device(where, noise=0.01).probes(decode_works(9)), where, DECODE)
    again = LatencyModel.from_json(model.to_json(), CURVE)
    work = Workload(SMALL, "q8_0", context=77)
    assert again.predict(work).to_json() == model.predict(work).to_json()


def test_a_model_with_other_unknowns_is_refused() -> None:
    document = fit_model([], conditions(), DECODE).to_json()
    with pytest.raises(FormatError, match="unknowns are not those of this version"):
        LatencyModel.from_json(document | {"test": "training"}, CURVE)
    with pytest.raises(FormatError, match="runtime 'x' is unknown"):
        LatencyModel.from_json(document | {"runtime": "x"}, CURVE)


@pytest.mark.parametrize(
    "bad", [{"tokens": 2}, {"tokens": 0, "test": PREFILL}, {"context": -1}, {"test": "train"}, {"quant": "q9"}]
)
def test_impossible_workloads_are_refused(bad: dict[str, int | str]) -> None:
    arguments = {"shape": SMALL, "quant": "q4_0", **bad}
    with pytest.raises(UsageError):
        Workload(**arguments)  # type: ignore[arg-type]
