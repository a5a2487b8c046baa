from pathlib import Path

import numpy as np
import pytest

from deepthin.engine.errors import UsageError
from deepthin.engine.load import load_model
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from tests.support.float64_decoder import float64_logits
from tests.support.gguf_files import write_gguf
from tests.support.llama_cpp_logits import llama_cpp_logits
from tests.support.tiny_models import PROMPT, TINY_SHAPES, lively_model, tiny_shape


def nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_logits_equal_llama_cpp_in_strict_mode(name: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name))
    path = write_gguf(tmp_path / "model.gguf", model)
    mine = Reference(model.shape, load_model(path).dequantized()).logits(PROMPT)
    assert nmse(llama_cpp_logits(path, [PROMPT]), mine) < 1e-10


def test_a_wrong_row_order_is_seen_by_that_comparison(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("plain"))
    path = write_gguf(tmp_path / "model.gguf", model)
    weights = load_model(path).dequantized()
    weights["blk.0.attn_q"] = weights["blk.0.attn_q"][::-1].copy()
    assert nmse(llama_cpp_logits(path, [PROMPT]), Reference(model.shape, weights).logits(PROMPT)) > 1e-4


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_logits_equal_a_decoder_written_apart(name: str) -> None:
    model = lively_model(tiny_shape(name))
    weights = model.dequantized()
    assert np.abs(Reference(model.shape, weights).logits(PROMPT) - float64_logits(model.shape, weights, PROMPT)).max() < 1e-11


@pytest.mark.parametrize("cuts", [[1] * 12, [5, 7], [11, 1], [1, 10, 1]])
def test_cached_steps_equal_one_pass(cuts: list[int]) -> None:
    model = lively_model(tiny_shape("smollm_like"))
    reference = Reference(model.shape, model.dequantized())
    whole = reference.logits(PROMPT)
    assert reference.position == len(PROMPT)
    reference.reset()
    parts, start = [], 0
    for cut in cuts:
        parts.append(reference.logits(PROMPT[start : start + cut]))
        start += cut
    assert np.abs(np.concatenate(parts) - whole).max() < 1e-11


def test_a_later_token_changes_nothing_before_it() -> None:
    model = lively_model(tiny_shape("plain"))
    weights = model.dequantized()
    first = Reference(model.shape, weights).logits(PROMPT)
    other = Reference(model.shape, weights).logits([*PROMPT[:-1], 7])
    assert np.array_equal(first[:-1], other[:-1]) and not np.array_equal(first[-1], other[-1])


def test_float32_is_computed_in_float32() -> None:
    model = lively_model(tiny_shape("wide_heads"))
    weights = model.dequantized()
    single = Reference(model.shape, weights, np.float32).logits(PROMPT)
    double = Reference(model.shape, weights).logits(PROMPT)
    assert single.dtype == np.float32 and double.dtype == np.float64
    assert 0 < nmse(single, double) < 1e-9


def test_shared_layers_equal_the_same_blocks_written_out() -> None:
    shape = tiny_shape("plain").replace(layer_sharing=2)
    model = lively_model(shape)
    weights = model.dequantized()
    written_out = {name: values for name, values in weights.items() if not name.startswith("blk.")}
    for name, values in weights.items():
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            written_out |= {f"blk.{2 * int(layer) + run}.{part}": values for run in range(2)}
    plain = shape.replace(num_layers=4, layer_sharing=1)
    assert np.array_equal(Reference(shape, weights).logits(PROMPT), Reference(plain, written_out).logits(PROMPT))


def test_smollm2_knows_the_capital_of_france(smollm2_path: Path) -> None:
    model = load_model(smollm2_path)
    assert model.tokenizer is not None
    ids = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    assert [model.tokenizer.tokens[token] for token in ids] == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    logits = Reference(model.shape, model.dequantized(), np.float32).logits(ids)
    assert model.tokenizer.tokens[int(logits[-1].argmax())] == "ĠParis"


def test_misuse_is_refused() -> None:
    model = lively_model(Shape.parse("L=1,d=32,heads=2,kv=1,ff=32,vocab=8,tied,ctx=4"))
    weights = model.dequantized()
    reference = Reference(model.shape, weights)
    for ids in ([], [-1], [8], [[1]]):
        with pytest.raises(UsageError, match="token ids must be"):
            reference.logits(ids)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="5 tokens exceed the context of 4"):
        reference.logits([1] * 5)
    reference.logits([1] * 3)
    with pytest.raises(UsageError, match="5 tokens exceed"):
        reference.logits([1] * 2)
    with pytest.raises(UsageError, match="'output_norm' is None"):
        Reference(model.shape, {name: values for name, values in weights.items() if name != "output_norm"})
    with pytest.raises(UsageError, match=r"'output_norm' is \(31,\)"):
        Reference(model.shape, {**weights, "output_norm": weights["output_norm"][1:]})
