import dataclasses
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest

from deepthin.engine.errors import UnsupportedError
from deepthin.engine.formats import BODY_QUANTS
from deepthin.engine.load import load_model
from deepthin.engine.model import Model, TokenizerSpec
from deepthin.engine.tensors import canonical_row_order, tensor_specs
from tests.support.gguf_bytes import (
    BOOL,
    STRING,
    UINT32,
    GgufBytes,
    key,
    key_array,
    key_f32,
    key_text,
    key_u32,
    llama_file,
    string,
    tensor,
    u32,
)
from tests.support.gguf_files import write_gguf
from tests.support.refusal import assert_refused
from tests.support.tiny_models import TINY_SHAPES, lively_model, tiny_shape

Keys = Mapping[str, bytes | None]
Dims = Mapping[str, tuple[int, ...] | None]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Model:
    return load_model(smollm2_path)


def test_smollm2_has_the_published_shape_and_formats(smollm2: Model) -> None:
    assert smollm2.shape.text == "L=30,d=576,heads=9,kv=3,ff=1536,vocab=49152,tied,ctx=8192,theta=100000.0"
    counts: dict[str, int] = {}
    for held in smollm2.tensors.values():
        counts[held.format.name] = counts.get(held.format.name, 0) + 1
    assert counts == {"q4_1": 210, "f32": 61, "q8_0": 1}
    assert smollm2.head is smollm2.tensors["token_embd"] and smollm2.head.format.name == "q8_0"
    assert smollm2.num_bytes == 96576768
    assert smollm2.metadata["general.license"] == "apache-2.0"
    assert not any(name.startswith("tokenizer.") for name in smollm2.metadata)


def test_smollm2_tensors_equal_the_gguf_package_value_by_value(smollm2: Model, smollm2_path: Path) -> None:
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_path).tensors}
    specs = tensor_specs(smollm2.shape)
    assert len(specs) == len(theirs) == 272
    for spec in specs:
        values = gguf.dequantize(theirs[spec.gguf_name].data, theirs[spec.gguf_name].tensor_type).reshape(spec.dims)
        if spec.rope_heads:
            values = values[canonical_row_order(spec.dims[0], spec.rope_heads)]
        assert np.array_equal(smollm2.tensors[spec.name].dequantize(), values), spec.name


def test_smollm2_tensors_stay_mapped_and_queries_and_keys_are_read_in_order(smollm2: Model) -> None:
    for name, held in smollm2.tensors.items():
        assert not held.stored.flags.writeable and not held.stored.flags.owndata, name
        assert (held.order is not None) == name.endswith(("attn_q", "attn_k")), name


def test_smollm2_tokenizer_is_read_whole(smollm2: Model) -> None:
    spec = smollm2.tokenizer
    assert spec is not None
    assert (spec.pre, len(spec.tokens), len(spec.merges), spec.add_bos) == ("smollm", 49152, 48900, False)
    assert (spec.bos_id, spec.eos_id, spec.unk_id, spec.pad_id) == (1, 2, 0, 2)
    assert spec.tokens[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>") and spec.token_types.count(3) == 17


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_files_of_the_gguf_package_load_with_the_same_blocks(name: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name))
    loaded = load_model(write_gguf(tmp_path / "model.gguf", model))
    assert loaded.shape == model.shape
    for part, values in model.tensors.items():
        assert np.array_equal(loaded.tensors[part].data, values.data), part


@pytest.mark.parametrize("quant", BODY_QUANTS)
def test_every_format_loads_with_the_same_blocks(quant: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape("plain"), quant=quant)
    loaded = load_model(write_gguf(tmp_path / "model.gguf", model))
    for part, values in model.tensors.items():
        assert loaded.tensors[part].format is values.format
        assert np.array_equal(loaded.tensors[part].data, values.data), part


def test_defaults_of_optional_keys_are_llama_cpp_s(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(llama_file().build())
    model = load_model(tmp_path / "model.gguf")
    assert (model.shape.num_kv_heads, model.shape.head_dim, model.shape.rope_theta) == (1, 2, 10000.0)
    assert model.shape.tie_word_embeddings and model.name == "model"
    assert model.tokenizer is None and model.metadata["tokenizer_note"] == "the file holds no tokenizer"


def test_an_own_head_makes_the_model_untied(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(llama_file(dims={"output.weight": (2, 3)}).build())
    assert not load_model(tmp_path / "model.gguf").shape.tie_word_embeddings


def test_benign_keys_are_let_through(tmp_path: Path) -> None:
    keys: dict[str, bytes | None] = {
        "llama.rope.scaling.type": key_text("llama.rope.scaling.type", "none"),
        "llama.rope.scaling.factor": key_f32("llama.rope.scaling.factor", 1.0),
        "llama.expert_count": key_u32("llama.expert_count", 0),
        "llama.attention.causal": key("llama.attention.causal", BOOL, b"\x01"),
        "split.count": key("split.count", UINT32, u32(1)),
        "llama.tensor_data_layout": key_text("llama.tensor_data_layout", "Meta AI original pth"),
    }
    (tmp_path / "model.gguf").write_bytes(llama_file(keys=keys).build())
    assert load_model(tmp_path / "model.gguf").shape.num_layers == 1


def _k(name: str, raw: bytes | None) -> Keys:
    return {name: raw}


UNSUPPORTED: dict[str, tuple[Keys, Dims, str]] = {
    "architecture": (_k("general.architecture", key_text("general.architecture", "mamba")), {}, "architecture is 'mamba'"),
    "split": (_k("split.count", key_u32("split.count", 3)), {}, "one of 3 parts"),
    "experts_key": (_k("e", key_u32("llama.expert_count", 8)), {}, "'llama.expert_count' asks for a mixture of experts"),
    "experts_tensor": ({}, {"blk.0.ffn_gate_exps.weight": (2, 2, 2)}, "'blk.0.ffn_gate_exps.weight' is a mixture of experts"),
    "router": ({}, {"blk.0.ffn_gate_inp.weight": (2, 2)}, "'blk.0.ffn_gate_inp.weight' is a mixture of experts"),
    "sliding": (_k("s", key_u32("llama.attention.sliding_window", 512)), {}, "sliding-window attention"),
    "feature_array": (_k("s", key_array("llama.attention.scale", UINT32, [u32(0)])), {}, "attention scale"),
    "bidirectional": (_k("c", key("llama.attention.causal", BOOL, b"\x00")), {}, "non-causal attention"),
    "rope_type": (_k("r", key_text("llama.rope.scaling.type", "longrope")), {}, "rotary scaling 'longrope'"),
    "rope_freqs": ({}, {"rope_freqs.weight": (1,)}, "'rope_freqs.weight' holds rotary factors that are not positive"),
    "rope_twice": (
        _k("r", key_f32("llama.rope.scaling.factor", 4.0)),
        {"rope_freqs.weight": (1,)},
        "'linear' besides tensor 'rope_freqs.weight'",
    ),
    "rope_factors": ({}, {"rope_factors_long.weight": (1,)}, "is scaled rotary frequencies for long contexts"),
    "yarn_bounds": (
        {
            "t": key_text("llama.rope.scaling.type", "yarn"),
            "f": key_f32("llama.rope.scaling.factor", 4.0),
            "b": key_f32("llama.rope.scaling.yarn_beta_fast", 16.0),
        },
        {},
        "'llama.rope.scaling.yarn_beta_fast' is not 32",
    ),
    "yarn_log": (
        {
            "t": key_text("llama.rope.scaling.type", "yarn"),
            "f": key_f32("llama.rope.scaling.factor", 4.0),
            "b": key_f32("llama.rope.scaling.yarn_log_multiplier", 0.1),
        },
        {},
        "'llama.rope.scaling.yarn_log_multiplier' asks for rotary scaling",
    ),
    "rope_partial": (_k("r", key_u32("llama.rope.dimension_count", 1)), {}, "makes rotary embeddings 1 wide, but keys are 2"),
    "value_length": (_k("r", key_u32("llama.attention.value_length", 4)), {}, "makes values 4 wide, but keys are 2 wide"),
    "key_length_alone": (_k("r", key_u32("llama.attention.key_length", 4)), {}, "makes values 2 wide, but keys are 4 wide"),
    "bias": ({}, {"blk.0.attn_output.bias": (2,)}, "'blk.0.attn_output.bias' is a bias"),
    "qk_norm": ({}, {"blk.0.attn_q_norm.weight": (2,)}, "'blk.0.attn_q_norm.weight' is normalised queries"),
    "heads_per_layer": (
        _k("llama.attention.head_count", key_array("llama.attention.head_count", UINT32, [u32(1)])),
        {},
        "'llama.attention.head_count' gives each layer its own value",
    ),
    "ff_per_layer": (
        _k("llama.feed_forward_length", key_array("llama.feed_forward_length", UINT32, [u32(2)])),
        {},
        "'llama.feed_forward_length' gives each layer its own value",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_engine_does_not_do_is_refused_by_name(name: str, tmp_path: Path) -> None:
    keys, dims, match = UNSUPPORTED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_file(keys=dict(keys), dims=dict(dims)).build())
    assert_refused(load_model, path, match, error=UnsupportedError)


@pytest.mark.parametrize(
    ("type_id", "type_name", "block", "block_bytes"), [(11, "Q3_K", 256, 110), (20, "IQ4_NL", 32, 18), (24, "I8", 1, 1)]
)
def test_unread_types_are_refused_by_name(type_id: int, type_name: str, block: int, block_bytes: int, tmp_path: Path) -> None:
    held = llama_file()
    held.tensors[0] = tensor("token_embd.weight", (256, 4), type_id, 0)
    size = (1024 // block * block_bytes + 31) // 32 * 32
    tail = llama_file(dims={"token_embd.weight": (size // 4,)})
    path = tmp_path / "model.gguf"
    path.write_bytes(GgufBytes(held.keys, [held.tensors[0], *tail.tensors[1:]], tail.data_bytes).build())
    line = assert_refused(load_model, path, f"stored as {type_name}, which this version does not read", error=UnsupportedError)
    assert "q4_1" in line


CONTRADICTIONS: dict[str, tuple[Keys, Dims, str]] = {
    "no_architecture": (_k("general.architecture", None), {}, "'general.architecture' is missing"),
    "architecture_number": (_k("general.architecture", key_u32("general.architecture", 1)), {}, "holds uint32, but a string"),
    "no_heads": (_k("llama.attention.head_count", None), {}, "'llama.attention.head_count' is missing"),
    "heads_0": (_k("llama.attention.head_count", key_u32("llama.attention.head_count", 0)), {}, "is 0, but a value from 1"),
    "kv_heads_0": (_k("k", key_u32("llama.attention.head_count_kv", 0)), {}, "'llama.attention.head_count_kv' is 0"),
    "kv_heads_2": (_k("k", key_u32("llama.attention.head_count_kv", 2)), {}, "kv=2 does not divide heads=1"),
    "heads_no_divisor": (
        _k("llama.attention.head_count", key_u32("llama.attention.head_count", 3)),
        {},
        "3 heads do not divide a width of 2",
    ),
    "blocks_2_32": (_k("llama.block_count", key_u32("llama.block_count", 0xFFFFFFFF)), {}, "'llama.block_count' is 4294967295"),
    "blocks_2": (_k("llama.block_count", key_u32("llama.block_count", 2)), {}, "'blk.1.attn_norm' is missing"),
    "blocks_4096": (
        _k("llama.block_count", key_u32("llama.block_count", 4096)),
        {},
        "is 4096, but the file has only 11 tensors",
    ),
    "blocks_0": (_k("llama.block_count", key_u32("llama.block_count", 0)), {}, "'llama.block_count' is 0"),
    "blocks_text": (_k("llama.block_count", key_text("llama.block_count", "1")), {}, "holds string, but a whole number"),
    "width_other": (_k("llama.embedding_length", key_u32("llama.embedding_length", 4)), {}, "dimensions|head_dim|needs"),
    "width_2_31": (_k("llama.embedding_length", key_u32("llama.embedding_length", 1 << 31)), {}, "is 2147483648, but"),
    "context_0": (_k("llama.context_length", key_u32("llama.context_length", 0)), {}, "'llama.context_length' is 0"),
    "eps_nan": (
        _k("llama.attention.layer_norm_rms_epsilon", key_f32("llama.attention.layer_norm_rms_epsilon", float("nan"))),
        {},
        "epsilon' is nan, but a finite number",
    ),
    "eps_huge": (
        _k("llama.attention.layer_norm_rms_epsilon", key_f32("llama.attention.layer_norm_rms_epsilon", 5.0)),
        {},
        "epsilon' is 5.0",
    ),
    "theta_inf": (_k("t", key_f32("llama.rope.freq_base", float("inf"))), {}, "'llama.rope.freq_base' is inf"),
    "theta_0": (_k("t", key_f32("llama.rope.freq_base", 0.0)), {}, "'llama.rope.freq_base' is 0.0"),
    "theta_integer": (_k("t", key_u32("llama.rope.freq_base", 10000)), {}, "holds uint32, but a number"),
    "vocab_other": (_k("v", key_u32("llama.vocab_size", 4)), {}, "'llama.vocab_size' is 4, but tensor .* has 3 rows"),
    "odd_head": (_k("llama.attention.head_count", key_u32("llama.attention.head_count", 2)), {}, "head_dim=1 is odd"),
    "no_embedding": ({}, {"token_embd.weight": None}, "'token_embd.weight' with two dimensions is needed"),
    "embedding_1d": ({}, {"token_embd.weight": (6,)}, "'token_embd.weight' with two dimensions is needed"),
    "no_norm": ({}, {"output_norm.weight": None}, "'output_norm' is missing"),
    "queries_3d": ({}, {"blk.0.attn_q.weight": (2, 2, 1)}, "'blk.0.attn_q.weight' has 3 dimensions; 2 are needed"),
    "queries_wide": ({}, {"blk.0.attn_q.weight": (2, 4)}, r"'blk.0.attn_q' has dimensions \[4, 2\]"),
    "norm_2d": ({}, {"blk.0.ffn_norm.weight": (2, 1)}, "'blk.0.ffn_norm.weight' has 2 dimensions; 1 are needed"),
    "left_over": ({}, {"blk.1.attn_q.weight": (2, 2)}, "'blk.1.attn_q.weight' belongs to no part"),
    "foreign": ({}, {"mm.0.weight": (2, 2)}, "'mm.0.weight' belongs to no part"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused(name: str, tmp_path: Path) -> None:
    keys, dims, match = CONTRADICTIONS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_file(keys=dict(keys), dims=dict(dims)).build())
    assert_refused(load_model, path, match)


def _vocabulary(**changes: bytes | None) -> dict[str, bytes | None]:
    texts = [string("a"), string("b"), string("ab")]
    keys: dict[str, bytes | None] = {
        "model": key_text("tokenizer.ggml.model", "gpt2"),
        "pre": key_text("tokenizer.ggml.pre", "gpt-2"),
        "tokens": key_array("tokenizer.ggml.tokens", STRING, texts),
        "merges": key_array("tokenizer.ggml.merges", STRING, [string("a b")]),
    }
    return {**keys, **changes}


def test_small_vocabulary_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_file(keys=_vocabulary()).build())
    assert load_model(path).tokenizer == TokenizerSpec("gpt-2", ("a", "b", "ab"), (1, 1, 1), ("a b",))


def test_tokens_may_be_fewer_than_rows_and_empty_ones_get_llama_cpp_s_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tokens = key_array("tokenizer.ggml.tokens", STRING, [string("a"), string("")])
    path.write_bytes(llama_file(keys=_vocabulary(tokens=tokens, merges=key_array("tokenizer.ggml.merges", STRING, []))).build())
    spec = load_model(path).tokenizer
    assert spec is not None and spec.tokens == ("a", "[EMPTY_1]")


VOCABULARY_ERRORS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "too_many": (
        _vocabulary(tokens=key_array("tokenizer.ggml.tokens", STRING, [string(c) for c in "abcd"])),
        "has 4 items, but the embedding has 3 rows",
    ),
    "none": (_vocabulary(tokens=key_array("tokenizer.ggml.tokens", STRING, [])), "has 0 items"),
    "numbers": (
        _vocabulary(tokens=key_array("tokenizer.ggml.tokens", UINT32, [u32(1)])),
        r"holds \[uint32\], but an array of strings",
    ),
    "no_merges": (_vocabulary(merges=None), "'tokenizer.ggml.merges' is missing"),
    "types_short": (
        _vocabulary(types=key_array("tokenizer.ggml.token_type", UINT32, [u32(1)])),
        "must hold 3 values from 0 to 6",
    ),
    "types_range": (_vocabulary(types=key_array("tokenizer.ggml.token_type", UINT32, [u32(7)] * 3)), "must hold 3 values"),
    "bos_range": (_vocabulary(bos=key_u32("tokenizer.ggml.bos_token_id", 3)), "'tokenizer.ggml.bos_token_id' is 3"),
    "bos_unnamed": (
        _vocabulary(add=key("tokenizer.ggml.add_bos_token", BOOL, b"\x01")),
        "'tokenizer.ggml.bos_token_id' is missing",
    ),
}


@pytest.mark.parametrize("name", VOCABULARY_ERRORS)
def test_contradictory_vocabularies_are_refused(name: str, tmp_path: Path) -> None:
    keys, match = VOCABULARY_ERRORS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_file(keys=keys).build())
    assert_refused(load_model, path, match)


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        (_vocabulary(model=key_text("tokenizer.ggml.model", "llama")), "its tokenizer is 'llama', not byte-level BPE"),
        (_vocabulary(pre=key_text("tokenizer.ggml.pre", "tekken")), "the pre-tokenizer is 'tekken', which is not known"),
        (_vocabulary(eos=key("tokenizer.ggml.add_eos_token", BOOL, b"\x01")), "puts an end token behind every text"),
    ],
)
def test_weights_load_without_a_tokenizer_that_is_not_done(keys: dict[str, bytes | None], note: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_file(keys=keys).build())
    model = load_model(path)
    assert model.tokenizer is None and note in model.metadata["tokenizer_note"]


def test_a_tokenizer_survives_the_gguf_package(smollm2: Model, tmp_path: Path) -> None:
    shape = tiny_shape("plain").replace(vocab_size=49152)
    model = dataclasses.replace(lively_model(shape, quant="q8_0"), tokenizer=smollm2.tokenizer)
    assert load_model(write_gguf(tmp_path / "model.gguf", model)).tokenizer == smollm2.tokenizer
