"""A foreign device: kit results become a profile that predicts shapes the kit did not hold, with intervals that hold them."""

import json
from typing import Any

import numpy as np
import pytest

from deepthin.engine.accounting import count_bytes, count_params
from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.known_shapes import known_shape
from deepthin.engine.shape import Shape
from deepthin.profiles.importing import import_profile
from deepthin.profiles.kit import probe_name
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload
from deepthin.profiles.llama_bench_rows import BenchRow, parse_rows
from deepthin.profiles.probe_plans import KIT_PLAN
from tests.profiles.test_llama_bench_rows import row
from tests.support.probed import Device, conditions, decode_works

SMOL = known_shape("smollm2-135m").shape


def kit_rows(noise: float = 0.02) -> list[BenchRow]:
    """What run.sh would print on the device of ``tests.support.probed``."""
    objects = []
    for threads in (1, 2):
        device = Device(conditions(threads=threads), noise=noise, seed=threads)
        for model in KIT_PLAN["llama.cpp"]:
            name = probe_name(model.shape, model.quant, ".gguf")
            for gen, prompt, depth in ((32, 0, 0), (32, 0, 512), (0, 128, 0)):
                if gen:
                    probe = device.probe(Workload(model.shape, model.quant, DECODE, 1, depth + gen // 2))
                else:
                    probe = device.probe(Workload(model.shape, model.quant, PREFILL, prompt, depth))
                samples = [round(s * 1e9 * (gen or 1)) for s in probe.seconds.samples]
                objects.append(
                    row(model_filename=name, n_threads=threads, n_gen=gen, n_prompt=prompt, n_depth=depth, samples_ns=samples)
                )
    return parse_rows(json.dumps(objects), "results.json")


def test_kit_results_predict_shapes_that_were_not_in_the_kit() -> None:
    profile = import_profile(kit_rows(), "my-phone")
    assert profile.basis == "imported"
    assert profile.fingerprint == ""
    for threads in (1, 2):
        device = Device(conditions(threads=threads))
        errors, inside = [], []
        for work in decode_works(40, seed=5):
            predicted, truth = profile.predict("llama.cpp", threads, work).seconds, device.seconds(work)
            errors.append(abs(predicted.value / truth - 1))
            inside.append(predicted.low <= truth <= predicted.high)
        assert np.median(errors) < 0.12
        assert np.mean(inside) > 0.8


def test_prompts_are_predicted_too() -> None:
    profile = import_profile(kit_rows(), "my-phone")
    work = Workload(KIT_PLAN["llama.cpp"][0].shape.replace(num_layers=16), "q4_0", PREFILL, 200)
    assert profile.predict("llama.cpp", 1, work).seconds.value == pytest.approx(Device(conditions()).seconds(work), rel=0.25)


def smol_row(**changes: Any) -> dict[str, Any]:
    size, params = count_bytes(SMOL, "q4_0").total, count_params(SMOL).total
    fields = {"model_filename": "x.gguf", "model_type": "llama 135M Q4_0", "model_size": size, "model_n_params": params}
    return row(**(fields | changes))


def test_a_public_model_is_known_by_its_exact_parameters() -> None:
    profile = import_profile(parse_rows(json.dumps([smol_row()]), "r"), "box")
    (probe,) = profile.probes
    assert (probe.work.shape, probe.work.quant, probe.work.context) == (SMOL, "q4_0", 16)


@pytest.mark.parametrize(
    ("model_type", "name", "quant"),
    [
        ("llama 135M Q8_0", "x.gguf", "q8_0"),
        ("llama 135M all F32", "x.gguf", "f32"),
        ("llama 135M F16", "x.gguf", "f16"),
        ("llama 135M BF16", "x.gguf", "bf16"),
        ("llama 135M mostly", "smol-Q5_1.gguf", "q5_1"),
    ],
)
def test_formats_are_read_from_the_type_or_the_name(model_type: str, name: str, quant: str) -> None:
    size = count_bytes(SMOL, quant).total
    rows = parse_rows(json.dumps([smol_row(model_type=model_type, model_filename=name, model_size=size)]), "r")
    assert import_profile(rows, "box").probes[0].work.quant == quant


def test_a_shape_may_be_said_for_a_file_name() -> None:
    shape = Shape.parse("L=10,d=320,heads=5,kv=5,ff=960,vocab=16384,tied")
    item = smol_row(
        model_filename="dir\\mine.gguf", model_n_params=count_params(shape).total, model_size=count_bytes(shape, "q4_0").total
    )
    profile = import_profile(parse_rows(json.dumps([item]), "r"), "box", shapes={"mine*": shape})
    assert profile.probes[0].work.shape == shape


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_n_params": 99_999_999}, "99,999,999 parameters are those of no public shape"),
        ({"model_type": "llama 135M IQ2_XXS"}, r"its format \(llama 135M IQ2_XXS\) is none of ours"),
        ({"model_size": 300_000_000}, "holds 300,000,000 bytes, but"),
    ],
)
def test_rows_of_unknown_shapes_are_left_out_with_a_note(changes: dict[str, Any], says: str) -> None:
    rows = parse_rows(json.dumps([smol_row(), smol_row(**changes)]), "r")
    profile = import_profile(rows, "box")
    assert len(profile.probes) == 1
    assert any(says.replace("\\", "") in note for note in profile.notes)
    with pytest.raises(FormatError, match=f"not one has a known shape .*{says}.*--model"):
        import_profile(rows[1:], "box")


def test_a_shape_said_for_the_wrong_file_is_noticed() -> None:
    rows = parse_rows(json.dumps([smol_row(model_n_params=99_999_999)]), "r")
    with pytest.raises(FormatError, match=r"holds 99,999,999 parameters, but"):
        import_profile(rows, "box", shapes={"*": SMOL})


@pytest.mark.parametrize("name", ["", "../x", "a b", ".x"])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="letters, digits, dots and dashes"):
        import_profile(kit_rows(), name)


def test_few_rows_give_wider_intervals_than_many() -> None:
    rows = kit_rows()
    work = Workload(SMOL, "q4_0", context=64)
    width = []
    for taken in (rows[:2], rows):
        seconds = import_profile(taken, "box").predict("llama.cpp", 1, work).seconds
        width.append(seconds.high / seconds.low)
    assert width[0] > 1.5 * width[1]
