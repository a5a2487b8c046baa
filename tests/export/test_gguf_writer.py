from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest

from deepthin.engine.accounting import count_bytes
from deepthin.engine.errors import FormatError, UnsupportedError
from deepthin.engine.formats import BODY_QUANTS, FORMATS
from deepthin.engine.model import Model, TokenizerSpec
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import tensor_specs
from deepthin.export import gguf_writer
from deepthin.export.gguf_writer import write_gguf
from tests.support.float64_decoder import float64_logits
from tests.support.llama_cpp_logits import llama_cpp_logits
from tests.support.tiny_models import PROMPT, TINY_SHAPES, lively_model, tiny_shape

TOKENIZER = TokenizerSpec("gpt-2", ("a", "b", "é", "ab"), (1, 1, 1, 3), ("a b",), bos_id=0, eos_id=3, add_bos=True)
# llama.cpp rounds activations: to f16, bf16, or int8 blocks
NMSE_BUDGET = {"f32": 1e-10, "f16": 1e-5, "bf16": 1e-4, "q8_0": 1e-3, "q4_0": 1e-3, "q4_1": 1e-3, "q5_0": 1e-3, "q5_1": 1e-3}


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows as llama.cpp wants them, by the reshape that its own converter uses."""
    rows, cols = values.shape
    turned: np.ndarray = values.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)
    return turned


def read_field(reader: gguf.GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


@pytest.mark.parametrize("quant", BODY_QUANTS)
def test_gguf_package_reads_back_every_tensor(quant: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape("wide_heads")).quantized(quant)
    path = tmp_path / "model.gguf"
    written = write_gguf(model, path)
    reader = gguf.GGUFReader(path)
    specs = tensor_specs(model.shape)
    assert [t.name for t in reader.tensors] == [spec.gguf_name for spec in specs]
    for spec, found in zip(specs, reader.tensors, strict=True):
        values = gguf.quants.dequantize(found.data, found.tensor_type)
        want = model.tensors[spec.name].dequantize()
        np.testing.assert_array_equal(
            values.reshape(spec.dims), interleaved(want, spec.rope_heads) if spec.rope_heads else want, err_msg=spec.name
        )
        assert found.data_offset % 32 == 0
    assert written == sum(t.n_bytes for t in reader.tensors) == count_bytes(model.shape, quant).total
    assert read_field(reader, "general.file_type") == FORMATS[quant].gguf_file_type
    assert (reader.get_field("general.quantization_version") is not None) == (FORMATS[quant].is_quantized)
    last = reader.tensors[-1]
    assert path.stat().st_size == -(-(last.data_offset + last.n_bytes) // 32) * 32


def test_keys_of_a_model_without_tokenizer(tmp_path: Path) -> None:
    shape = tiny_shape("wide_heads")
    write_gguf(lively_model(shape), tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    for key, want in {
        "general.architecture": "llama",
        "llama.block_count": shape.num_layers,
        "llama.embedding_length": shape.hidden_size,
        "llama.feed_forward_length": shape.intermediate_size,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": shape.rope_theta,
        "llama.context_length": shape.max_seq_len,
        "llama.vocab_size": shape.vocab_size,
        "tokenizer.ggml.model": "none",
    }.items():
        assert read_field(reader, key) == want, key
    assert read_field(reader, "llama.attention.layer_norm_rms_epsilon") == float(np.float32(shape.rms_norm_eps))


def test_tokenizer_keys_are_padded_to_the_vocabulary(tmp_path: Path) -> None:
    model = dataclasses.replace(lively_model(tiny_shape("plain")), tokenizer=TOKENIZER)
    write_gguf(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tokens = read_field(reader, "tokenizer.ggml.tokens")
    assert isinstance(tokens, list)
    assert tokens[:5] == ["a", "b", "é", "ab", "[PAD4]"] and len(tokens) == 96
    assert read_field(reader, "tokenizer.ggml.token_type") == [1, 1, 1, 3] + [5] * 92
    assert read_field(reader, "tokenizer.ggml.merges") == ["a b"]
    assert read_field(reader, "tokenizer.ggml.pre") == "gpt-2"
    assert read_field(reader, "tokenizer.ggml.add_bos_token") is True
    assert read_field(reader, "tokenizer.ggml.eos_token_id") == 3
    assert reader.get_field("tokenizer.ggml.padding_token_id") is None


def test_more_tokens_than_embedding_rows_are_refused(tmp_path: Path) -> None:
    tokens = tuple(f"t{i}" for i in range(97))
    spec = TokenizerSpec("gpt-2", tokens, (1,) * 97, ())
    model = dataclasses.replace(lively_model(tiny_shape("plain")), tokenizer=spec)
    with pytest.raises(FormatError, match="97 tokens, but the embedding has 96 rows"):
        write_gguf(model, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_shape_outside_the_architecture_is_refused(tmp_path: Path) -> None:
    model = lively_model(Shape.parse("L=1,d=32,heads=2,ff=64,vocab=40,mlp=gelu"))
    with pytest.raises(UnsupportedError, match=r"gguf: .*mlp=gelu"):
        write_gguf(model, tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_rows_that_no_block_divides_fall_back_to_f16(tmp_path: Path) -> None:
    model = lively_model(Shape.parse("L=1,d=64,heads=2,ff=100,vocab=50,tied,ctx=64")).quantized("q4_0")
    write_gguf(model, tmp_path / "model.gguf")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == "Q4_0"
    assert types["token_embd.weight"] == "Q8_0"
    got = llama_cpp_logits(tmp_path / "model.gguf", [PROMPT[:3]])
    assert nmse(got, float64_logits(model.shape, model.dequantized(), PROMPT[:3])) < NMSE_BUDGET["q4_0"]


def test_same_model_same_bytes(tmp_path: Path) -> None:
    digests = set()
    for name in ("a.gguf", "b.gguf"):
        write_gguf(lively_model(tiny_shape("plain"), quant="q4_0"), tmp_path / name)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_exact_start_of_a_file(tmp_path: Path) -> None:
    write_gguf(lively_model(tiny_shape("plain")), tmp_path / "model.gguf")
    start = (tmp_path / "model.gguf").read_bytes()[:69]
    counts = (3).to_bytes(4, "little") + (20).to_bytes(8, "little") + (19).to_bytes(8, "little")
    key = (20).to_bytes(8, "little") + b"general.architecture"
    assert start == b"GGUF" + counts + key + (8).to_bytes(4, "little") + (5).to_bytes(8, "little") + b"llama"


@pytest.mark.parametrize("name", list(TINY_SHAPES))
def test_llama_cpp_agrees_in_three_cache_schedules(name: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name))
    write_gguf(model, tmp_path / "model.gguf")
    want = float64_logits(model.shape, model.dequantized(), PROMPT)
    for chunks in ([PROMPT], [[token] for token in PROMPT], [PROMPT[:5], PROMPT[5:]]):
        assert nmse(llama_cpp_logits(tmp_path / "model.gguf", chunks), want) < NMSE_BUDGET["f32"]


@pytest.mark.parametrize("quant", BODY_QUANTS)
def test_llama_cpp_agrees_in_every_format(quant: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape("smollm_like")).quantized(quant)
    write_gguf(model, tmp_path / "model.gguf")
    want = float64_logits(model.shape, model.dequantized(), PROMPT)
    assert nmse(llama_cpp_logits(tmp_path / "model.gguf", [PROMPT]), want) < NMSE_BUDGET[quant]


def test_rows_left_uninterleaved_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Model = lively_model(tiny_shape("plain"))
    monkeypatch.setattr(gguf_writer, "gguf_row_order", lambda rows, heads: np.arange(rows))
    write_gguf(model, tmp_path / "model.gguf")
    want = float64_logits(model.shape, model.dequantized(), PROMPT)
    assert nmse(llama_cpp_logits(tmp_path / "model.gguf", [PROMPT]), want) > 1e-3
