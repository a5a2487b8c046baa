"""Every architecture as a tiny model: reference against llama.cpp on the file we write, engine against reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepthin.engine.architectures import architecture_of, gguf_architecture
from deepthin.engine.decoder import Decoder
from deepthin.engine.errors import UnsupportedError
from deepthin.engine.formats import FORMATS
from deepthin.engine.load import load_model
from deepthin.engine.model import Model, random_model
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from deepthin.engine.synthetic import SyntheticDecoder
from deepthin.engine.targets import target_verdicts
from deepthin.export.gguf_writer import write_gguf
from deepthin.export.tolerances import gate
from tests.support import gguf_files
from tests.support.llama_cpp_logits import llama_cpp_logits
from tests.support.tiny_models import VARIANT_SHAPES, lively_model, long_prompt, tiny_shape

IN_GGUF = [  # shared blocks are written out before anything is written
    name for name in VARIANT_SHAPES if target_verdicts(tiny_shape(name))["gguf-f16"].ok and name != "shared"
]
EXACT_NMSE = gate("architectures")["nmse"]


def nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


def reference_logits(model: Model) -> np.ndarray:
    return Reference(model.shape, model.dequantized()).logits(long_prompt(model.shape))


def test_all_but_the_unpublished_go_through_llama_cpp() -> None:
    assert set(VARIANT_SHAPES) - set(IN_GGUF) == {"yarn_tuned", "gelu", "shared", "everything"}
    assert {gguf_architecture(tiny_shape(name)).name for name in IN_GGUF} == {"llama", "qwen2", "qwen3", "arcee", "smollm3"}


@pytest.mark.parametrize("name", IN_GGUF)
def test_llama_cpp_reads_our_file_as_the_reference_does(name: str, tmp_path: Path) -> None:
    """60 tokens, past the original context (32) of every scaling; whole, and one by one against the cache."""
    model = lively_model(tiny_shape(name))
    write_gguf(model, tmp_path / "model.gguf")
    wanted, ids = reference_logits(model), long_prompt(model.shape)
    assert nmse(llama_cpp_logits(tmp_path / "model.gguf", [ids]), wanted) < EXACT_NMSE
    assert nmse(llama_cpp_logits(tmp_path / "model.gguf", [[token] for token in ids]), wanted) < EXACT_NMSE


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_file_of_the_gguf_package_is_read_as_llama_cpp_does(name: str, tmp_path: Path) -> None:
    """Neither our writer nor its idea of row order is involved."""
    model = lively_model(tiny_shape(name))
    path = gguf_files.write_gguf(tmp_path / "model.gguf", model)
    read = load_model(path)
    assert nmse(llama_cpp_logits(path, [long_prompt(model.shape)]), reference_logits(read)) < EXACT_NMSE
    assert read.shape.replace(rope_scaling=None) == model.shape.replace(rope_scaling=None)


@pytest.mark.parametrize("name", IN_GGUF)
def test_our_file_reads_back_whole(name: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name))
    write_gguf(model, tmp_path / "model.gguf")
    read = load_model(tmp_path / "model.gguf")
    assert read.shape == model.shape
    for part, values in model.dequantized().items():
        np.testing.assert_array_equal(read.tensors[part].dequantize(), values, err_msg=part)


def _without_biases(model: Model) -> Model:
    zero = {name: np.zeros_like(v) if name.endswith(".bias") else v for name, v in model.dequantized().items()}
    return Model(model.shape, {name: type(t).from_values(zero[name], t.format) for name, t in model.tensors.items()})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("smollm3", {"nope_every": 3}),
        ("linear", {"rope_scaling": None}),
        ("llama3", {"rope_scaling": None}),
        ("yarn", {"rope_scaling": None}),
        ("arcee", {"mlp": "gelu"}),
    ],
)
def test_the_comparison_sees_each_feature(name: str, change: dict[str, object]) -> None:
    """Left out or done otherwise, every one of them moves the logits by far more than the tolerance."""
    model = lively_model(tiny_shape(name))
    other = Reference(model.shape.replace(**change), model.dequantized()).logits(long_prompt(model.shape))
    assert nmse(other, reference_logits(model)) > 1e-4


def test_the_comparison_sees_biases_and_head_norms() -> None:
    model = lively_model(tiny_shape("qwen2"))
    assert nmse(reference_logits(_without_biases(model)), reference_logits(model)) > 1e-3
    model = lively_model(tiny_shape("qwen3"))
    plain = {name: v for name, v in model.dequantized().items() if not name.endswith(("_q_norm", "_k_norm"))}
    other = Reference(model.shape.replace(qk_norm=False), plain).logits(long_prompt(model.shape))
    assert nmse(other, reference_logits(model)) > 1e-3


@pytest.mark.parametrize("name", VARIANT_SHAPES)
def test_the_engine_equals_the_reference(name: str) -> None:
    model = lively_model(tiny_shape(name))
    with Decoder(model, threads=2, context=64) as decoder:
        assert nmse(decoder.logits(long_prompt(model.shape)), reference_logits(model)) < EXACT_NMSE


@pytest.mark.parametrize("quant", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "arcee", "smollm3", "gelu", "shared"])
def test_the_engine_equals_the_reference_on_blocks(name: str, quant: str) -> None:
    model = lively_model(tiny_shape(name), quant=quant)
    with Decoder(model, threads=2, context=64) as decoder:
        found = nmse(decoder.logits(long_prompt(model.shape)), reference_logits(model))
    times = max(1, model.shape.num_executed_layers / 3)  # rounding of activations adds up over layers
    assert found < gate("architectures")["int8_nmse"] * times


@pytest.mark.parametrize("name", ["qwen3_odd", "qwen2_odd", "arcee", "everything"])
def test_bits_depend_neither_on_threads_nor_on_cuts(name: str) -> None:
    model = lively_model(tiny_shape(name))
    ids = long_prompt(model.shape)
    with Decoder(model, threads=1, context=64) as one, Decoder(model, threads=3, context=64) as many:
        whole = one.logits(ids)
        np.testing.assert_array_equal(many.logits(ids), whole)
        many.reset()
        np.testing.assert_array_equal(many.prefill(ids[:37]), whole[36])
        for at in range(37, len(ids)):
            np.testing.assert_array_equal(many.step(ids[at]), whole[at])


def written_out(model: Model) -> Model:
    """Shared blocks as copies."""
    share, tensors = model.shape.layer_sharing, {}
    for name, tensor in model.tensors.items():
        if not name.startswith("blk."):
            tensors[name] = tensor
            continue
        _, block, part = name.split(".", 2)
        tensors |= {f"blk.{share * int(block) + run}.{part}": tensor for run in range(share)}
    return Model(model.shape.replace(num_layers=model.shape.num_executed_layers, layer_sharing=1), tensors)


def test_a_shared_block_is_the_same_as_copies_of_it_bit_for_bit() -> None:
    model = lively_model(tiny_shape("shared"), quant="q8_0")
    ids = long_prompt(model.shape)
    with Decoder(model, threads=2, context=64) as shared, Decoder(written_out(model), threads=2, context=64) as copies:
        np.testing.assert_array_equal(shared.logits(ids), copies.logits(ids))
        assert len(shared.last_times().blocks_s) == 6
        assert shared.bytes_per_token == copies.bytes_per_token
        assert len(shared._runner.plan.arena) < 0.7 * len(copies._runner.plan.arena)


def test_llama_cpp_agrees_on_the_copies_of_shared_blocks(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("shared"))
    write_gguf(written_out(model), tmp_path / "model.gguf")
    assert nmse(llama_cpp_logits(tmp_path / "model.gguf", [long_prompt(model.shape)]), reference_logits(model)) < EXACT_NMSE


@pytest.mark.parametrize("name", VARIANT_SHAPES)
def test_every_variant_can_be_timed(name: str) -> None:
    with SyntheticDecoder(
        tiny_shape(name).replace(hidden_size=96, vocab_size=64), "f16", threads=2, context=64, num_blocks=3
    ) as it:
        times = it.run(2, position=40)
        assert (times.total_s > 0).all() and np.isfinite(it.last_logits()).all()


def test_padded_vocabulary_rows_are_computed_like_others(tmp_path: Path) -> None:
    shape = Shape.parse("L=1,d=64,heads=4,kv=2,ff=96,vocab=131,tied,ctx=64,qkv_bias")
    model = lively_model(shape)
    write_gguf(model, tmp_path / "model.gguf")
    ids = [i % 131 for i in range(0, 600, 10)]
    wanted = Reference(shape, model.dequantized()).logits(ids)
    with Decoder(load_model(tmp_path / "model.gguf"), threads=2, context=64) as decoder:
        assert nmse(decoder.logits(ids), wanted) < EXACT_NMSE
    assert nmse(llama_cpp_logits(tmp_path / "model.gguf", [ids]), wanted) < EXACT_NMSE


@pytest.mark.parametrize("quant", FORMATS)
def test_biases_and_norms_stay_f32_in_every_format(quant: str) -> None:
    model = random_model(Shape.parse("L=1,d=64,heads=2,ff=64,vocab=32,qkv_bias,qk_norm"), quant=quant)
    small = {name: tensor for name, tensor in model.tensors.items() if len(tensor.dims) == 1}
    assert len(small) == 8 and {tensor.format.name for tensor in small.values()} == {"f32"}
    assert not model.tensors["blk.0.attn_q.bias"].dequantize().any()


def test_what_no_architecture_has_is_refused_by_name() -> None:
    for text, words in (
        ("mlp=gelu", "mlp=gelu (it needs a SwiGLU gate or relu2)"),
        ("share=2", "share=2 (every published architecture runs each layer once)"),
        ("qk_norm,qkv_bias", "qk_norm with qkv_bias (no published architecture has them together)"),
        ("nope=3", "nope=3 (smollm3 leaves out every 4th)"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            architecture_of(Shape.parse(f"L=1,d=64,heads=2,ff=64,vocab=32,{text}"))
        assert words in str(caught.value)
