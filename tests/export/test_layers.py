"""Where inside a decoder two runtimes part, and what each runtime shows of its inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepthin.engine.model import Model
from deepthin.export.contents import ModelFile, read_contents
from deepthin.export.engine_streams import EngineStreams
from deepthin.export.layers import describe, first_parting_point, unit_rows
from deepthin.export.noise import sample
from deepthin.export.runs import RUNTIMES, make_runtime
from deepthin.export.schedule import PHASES
from deepthin.export.tolerances import Budget
from tests.support.bundles import GGUF, HF, ONNX
from tests.support.tiny_models import PROMPT, lively_model, tiny_shape

BUDGET = Budget("test", nmse=1e-10, position_nmse=1e-8, kl=1e-9, position_kl=1e-7, near_tie=1e-3, reason="only for this test")
IDS = list(PROMPT)
POINTS = ("token_embd", "blk.0.attn", "blk.0.ffn", "blk.1.attn", "blk.1.ffn")


def streams() -> dict[str, Any]:
    return {point: np.random.default_rng(at).standard_normal((8, 16)) for at, point in enumerate(POINTS)}


@pytest.mark.parametrize("at", range(len(POINTS)))
def test_the_first_point_is_found(at: int) -> None:
    found = streams()
    for point in POINTS[at:]:
        found[point] = found[point] * 1.001 + 0.01
    point, why = first_parting_point(streams(), found, [], BUDGET)
    assert point == POINTS[at] and "from position 0 on" in why
    assert ("nothing is before it" if at == 0 else f"{POINTS[at - 1]} agrees to 0.0e+00") in why


def test_one_row_is_enough_beside_a_huge_one() -> None:
    right, found = streams(), streams()
    right["blk.0.ffn"][0] *= 1e6
    found["blk.0.ffn"][0] *= 1e6
    found["blk.0.ffn"][5] += 0.1
    assert first_parting_point(right, found, [], BUDGET)[0] == "blk.0.ffn"
    assert "from position 5 on" in first_parting_point(right, found, [], BUDGET)[1]


def test_noise_is_no_parting_and_more_is() -> None:
    noise, found, far = streams(), streams(), streams()
    for point in POINTS[1:]:
        noise[point] = noise[point] + 0.01
        found[point] = found[point] - 0.015
    far["blk.1.attn"] = far["blk.1.attn"] + 0.2
    assert first_parting_point(streams(), found, [noise], BUDGET)[0] == "output"
    assert first_parting_point(streams(), found, [], BUDGET)[0] == "blk.0.attn"
    assert first_parting_point(streams(), far, [noise], BUDGET)[0] == "blk.1.attn"


def test_points_that_are_not_given() -> None:
    found = {"blk.1.attn": streams()["blk.1.attn"] + 1}
    point, why = first_parting_point(streams(), found, [], BUDGET)
    assert point == "blk.1.attn" and "nothing is before it" in why
    assert first_parting_point(streams(), {}, [], BUDGET) == ("", "it gives no hidden states")
    lost = {**streams(), "blk.0.attn": np.full((8, 16), np.nan)}
    assert first_parting_point(streams(), lost, [], BUDGET)[0] == "blk.0.attn"


def test_words() -> None:
    assert [describe(point) for point in ("token_embd", "blk.12.attn", "blk.3.ffn", "output")] == [
        "the embedding",
        "the attention of block 12",
        "the MLP of block 3",
        "the final norm or the head",
    ]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "path"), [("engine", HF), ("engine", GGUF), ("onnxruntime", ONNX), ("llama.cpp", GGUF)])
def test_what_runtimes_show_is_the_references(
    name: str, path: str, phase: str, good_bundle: Path, quiet: Model, keep_runtime: Any
) -> None:
    runtime = keep_runtime(name, deadline_s=60.0)
    contents = read_contents(good_bundle, ModelFile(path, Path(path).suffix[1:] or "hf", "f32"), quiet.shape)
    right = sample(quiet.shape, quiet.dequantized(), IDS).streams
    for mode in runtime.modes(contents)[:1]:
        found = runtime.streams(good_bundle, contents, IDS, mode, phase)
        assert set(found) >= set(right) - {"token_embd"}
        for point in found:
            np.testing.assert_allclose(unit_rows(found[point]), unit_rows(right[point]), atol=1e-5, err_msg=point)


@pytest.mark.parametrize("name", ["shared", "smollm3", "qwen2_odd", "arcee"])
def test_the_engine_inside_other_architectures(name: str) -> None:
    model = lively_model(tiny_shape(name))
    right = sample(model.shape, model.dequantized(), IDS).streams
    found = EngineStreams(model, IDS, [len(IDS)])
    assert len(found) == 2 * model.shape.num_executed_layers and "token_embd" not in found
    assert first_parting_point(right, found, [], BUDGET)[0] == "output"
    with pytest.raises(KeyError):
        found["blk.99.attn"]


def test_runtimes_that_show_nothing(good_bundle: Path, quiet: Model) -> None:
    contents = read_contents(good_bundle, ModelFile(ONNX, "onnx", "f32"), quiet.shape)
    for name in RUNTIMES[3:]:
        runtime = make_runtime(name, deadline_s=60.0)
        assert runtime.streams(good_bundle, contents, IDS, runtime.modes(contents)[0], "prefill") == {}
