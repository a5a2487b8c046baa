from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import UnsupportedError, UsageError
from deepthin.engine.model import Model
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from deepthin.engine.targets import target_verdicts
from deepthin.engine.tensors import canonical_row_order, tensor_specs
from deepthin.export.bundle import export_bundle
from deepthin.export.onnx_model import onnx_bytes, write_onnx
from deepthin.export.verify import verify_bundle
from tests.support.float64_decoder import float64_logits
from tests.support.ort_logits import ort_logits, ort_session
from tests.support.tiny_models import PROMPT, TINY_SHAPES, VARIANT_SHAPES, lively_model, long_prompt, tiny_shape

NMSE_BUDGET = 1e-10  # level 0 computes in f32 whatever the weights are stored as; 6e-13 is usual
NMSE_BUDGET_LEVEL_4 = 1e-3  # activations rounded to int8
SCHEDULES = ([PROMPT], [[token] for token in PROMPT], [PROMPT[:5], PROMPT[5:]])


def nmse(got: Any, want: Any) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


def exported(model: Model, folder: Path, **options: Any) -> Path:
    files, _ = write_onnx(model, folder / "model.onnx", **options)
    return files[0]


@pytest.mark.parametrize("quant", ["f32", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("name", list(TINY_SHAPES))
def test_onnxruntime_agrees_in_three_cache_schedules(name: str, quant: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name)).quantized(quant)
    path = exported(model, tmp_path)
    want = float64_logits(model.shape, model.dequantized(), PROMPT)
    for chunks in SCHEDULES:
        assert nmse(ort_logits(path, chunks), want) < NMSE_BUDGET


@pytest.mark.parametrize("quant", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", [name for name in VARIANT_SHAPES if target_verdicts(tiny_shape(name))["onnx"].ok])
def test_onnxruntime_agrees_on_every_architecture(name: str, quant: str, tmp_path: Path) -> None:
    """60 tokens, past the original context of every scaling; each file passes the checker and fits its predicted size."""
    model = lively_model(tiny_shape(name)).quantized(quant)
    files, written = write_onnx(model, tmp_path / "model.onnx")
    onnx.checker.check_model(str(files[0]), full_check=True)
    assert written == onnx_bytes(model.shape, quant)
    ids = long_prompt(model.shape)
    want = Reference(model.shape, model.dequantized()).logits(ids)
    for chunks in ([ids], [ids[:41], *([token] for token in ids[41:])]):
        assert nmse(ort_logits(files[0], chunks), want) < NMSE_BUDGET


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 3),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    eights=st.integers(1, 9),
    width=st.integers(1, 150),
    inner=st.integers(1, 150),
    tied=st.booleans(),
    quant=st.sampled_from(["f32", "q8_0", "q4_0", "q4_1"]),
)
def test_any_feasible_shape_runs(
    layers: int, groups: int, kv_heads: int, eights: int, width: int, inner: int, tied: bool, quant: str, tmp_path_factory: Any
) -> None:
    shape = Shape(
        num_layers=layers,
        hidden_size=width,
        num_heads=groups * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=8 * eights,
        intermediate_size=inner,
        vocab_size=70,
        tie_word_embeddings=tied,
        max_seq_len=16,
    )
    model = lively_model(shape).quantized(quant)
    path = exported(model, tmp_path_factory.mktemp("onnx"))
    want = float64_logits(shape, model.dequantized(), PROMPT)
    assert nmse(ort_logits(path, [PROMPT[:7], PROMPT[7:8], PROMPT[8:]]), want) < NMSE_BUDGET


@pytest.mark.parametrize("name", ["plain", "rotary_apart"])
def test_checker_interface_and_versions(name: str, tmp_path: Path) -> None:
    shape = tiny_shape(name)
    path = exported(lively_model(shape).quantized("q4_0"), tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    proto = onnx.load(str(path))
    assert proto.ir_version == 10
    assert {(o.domain, o.version) for o in proto.opset_import} == {("", 21), ("com.microsoft", 1)}

    def dims(value: Any) -> list[str | int]:
        return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]

    past = ["batch_size", shape.num_kv_heads, "past_sequence_length", shape.head_dim]
    present = ["batch_size", shape.num_kv_heads, "total_sequence_length", shape.head_dim]
    keys = [f"{layer}.{part}" for layer in range(shape.num_layers) for part in ("key", "value")]
    assert {v.name: dims(v) for v in proto.graph.input} == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        **{f"past_key_values.{key}": past for key in keys},
    }
    assert {v.name: dims(v) for v in proto.graph.output} == {
        "logits": ["batch_size", "sequence_length", shape.vocab_size],
        **{f"present.{key}": present for key in keys},
    }
    attention = next(node for node in proto.graph.node if node.op_type == "GroupQueryAttention")
    do_rotary = next(a.i for a in attention.attribute if a.name == "do_rotary")
    assert do_rotary == int(name == "plain")


def initializers(path: Path) -> dict[str, Any]:
    return {item.name: onnx.numpy_helper.to_array(item) for item in onnx.load(str(path)).graph.initializer}


def nbits_values(found: dict[str, Any], name: str, bits: int) -> Any:
    """(q - zero point) * scale as MatMulNBits defines it, value by value, and what is added to each block."""
    codes, scales = found[name + "_quant"], found[name + "_scales"]
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)
    values = (codes.astype(np.float32) - np.float32(2 ** (bits - 1))) * scales[..., None]
    if name + "_addends" in found:
        values = values + found[name + "_addends"].T[..., None]
    return values.reshape(len(codes), -1)


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("name", ["plain", "odd_width"])
def test_block_weights_are_the_models_own(name: str, quant: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name)).quantized(quant)
    found = initializers(exported(model, tmp_path))
    for spec in tensor_specs(model.shape):
        stored, want = model.tensors[spec.name].format.name, model.tensors[spec.name].dequantize()
        if stored in ("f32", "f16"):
            values = found[spec.hf_name]
            assert values.dtype == (np.float16 if stored == "f16" else np.float32)
            np.testing.assert_array_equal(values.T if spec.role in ("attention", "mlp") else values, want)
        elif stored == "q4_1":
            np.testing.assert_allclose(nbits_values(found, spec.hf_name, 4), want, rtol=0, atol=1e-6 * np.abs(want).max())
        else:
            np.testing.assert_array_equal(nbits_values(found, spec.hf_name, 8 if stored == "q8_0" else 4), want)


def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    for quant, size in (("f32", 4.0), ("f16", 2.0), ("q4_0", 1 + 4 / 32)):  # the head of a q4_0 body is q8_0
        (tmp_path / quant).mkdir()
        shape = tiny_shape("smollm_like")
        path = exported(lively_model(shape).quantized(quant), tmp_path / quant)
        table = {name: a.nbytes for name, a in initializers(path).items() if "embed" in name or "lm_head" in name}
        assert sum(table.values()) == size * shape.vocab_size * shape.hidden_size
        assert sum(a.nbytes for n, a in initializers(path).items() if n.startswith("model.")) == onnx_bytes(shape, quant)


@pytest.mark.parametrize("low", [0.0, 0.37, -0.37])
def test_flat_q4_1_blocks_keep_their_value(low: float, tmp_path: Path) -> None:
    """A block of equal values has scale 0; dividing by it would put NaN into the logits."""
    model = lively_model(tiny_shape("plain")).quantized("q4_1")
    for name in ("blk.0.attn_v", "blk.1.ffn_up"):
        blocks = model.tensors[name].data.reshape(-1, 20).view(model.tensors[name].format.dtype)[:, 0]
        blocks["d"][::2] = 0
        blocks["m"][::2] = low  # the nibbles keep whatever they held
    found = initializers(exported(model, tmp_path))
    name, want = "model.layers.0.self_attn.v_proj.weight", model.tensors["blk.0.attn_v"].dequantize()
    assert (want == np.float32(np.float16(low))).sum() >= want.size // 2
    np.testing.assert_allclose(nbits_values(found, name, 4), want, rtol=0, atol=1e-6)
    want_logits = float64_logits(model.shape, model.dequantized(), PROMPT)
    assert nmse(ort_logits(tmp_path / "model.onnx", [PROMPT]), want_logits) < NMSE_BUDGET


def test_external_data_gives_the_same_logits(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("plain")).quantized("q4_0")
    inline = exported(model, tmp_path)
    (tmp_path / "split").mkdir()
    files, weights = write_onnx(model, tmp_path / "split" / "model.onnx", external_bytes=1000)
    assert [path.name for path in files] == ["model.onnx", "model.onnx_data"]
    onnx.checker.check_model(str(files[0]), full_check=True)
    outside = [item for item in onnx.load(str(files[0]), load_external_data=False).graph.initializer if item.external_data]
    assert {entry.value for item in outside for entry in item.external_data if entry.key == "location"} == {"model.onnx_data"}
    lengths = [int(entry.value) for item in outside for entry in item.external_data if entry.key == "length"]
    assert files[1].stat().st_size == sum(lengths) > weights / 2
    np.testing.assert_array_equal(ort_logits(files[0], [PROMPT]), ort_logits(inline, [PROMPT]))


def test_same_model_same_bytes(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = exported(lively_model(tiny_shape("rotary_apart"), quant="q4_0"), tmp_path / name)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_level_4_is_recorded_and_close(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("smollm_like")).quantized("q4_0")
    path = exported(model, tmp_path, accuracy_level=4)
    nodes = [node for node in onnx.load(str(path)).graph.node if node.op_type == "MatMulNBits"]
    assert {a.i for node in nodes for a in node.attribute if a.name == "accuracy_level"} == {4}
    error = nmse(ort_logits(path, [PROMPT]), float64_logits(model.shape, model.dequantized(), PROMPT))
    assert NMSE_BUDGET < error < NMSE_BUDGET_LEVEL_4


@pytest.mark.parametrize("name", ["plain", "rotary_apart"])
def test_right_padded_batch_and_shared_buffer(name: str, tmp_path: Path) -> None:
    """Two prompts of different length, then one step against a cache longer than its content, as genai keeps it."""
    shape = tiny_shape(name)
    model = lively_model(shape)
    session = ort_session(exported(model, tmp_path))
    long, short, step = list(PROMPT[:6]), list(PROMPT[6:10]), 7
    mask = np.array([[1] * 6, [1] * 4 + [0] * 2], np.int64)
    caches = [n.name for n in session.get_inputs() if n.name.startswith("past")]
    empty = np.zeros((2, shape.num_kv_heads, 0, shape.head_dim), np.float32)
    outputs = [o.name for o in session.get_outputs()]
    feeds = {"input_ids": np.array([long, [*short, 0, 0]]), "attention_mask": mask}
    logits, *present = session.run(outputs, {**feeds, **dict.fromkeys(caches, empty)})
    weights = model.dequantized()
    assert nmse(logits[0], float64_logits(shape, weights, long)) < NMSE_BUDGET
    assert nmse(logits[1, :4], float64_logits(shape, weights, short)) < NMSE_BUDGET
    buffers = [np.pad(cache, [(0, 0), (0, 0), (0, 20), (0, 0)]) for cache in present]
    feeds = {"input_ids": np.array([[step], [step]]), "attention_mask": np.concatenate([mask, [[1], [1]]], axis=1)}
    logits, *_ = session.run(outputs, {**feeds, **dict(zip(caches, buffers, strict=True))})
    assert nmse(logits[0], float64_logits(shape, weights, [*long, step])[-1:]) < NMSE_BUDGET
    assert nmse(logits[1], float64_logits(shape, weights, [*short, step])[-1:]) < NMSE_BUDGET


def test_query_rows_in_gguf_order_are_caught(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("plain"))
    want = float64_logits(model.shape, model.dequantized(), PROMPT)
    data = model.tensors["blk.0.attn_q"].data
    data[:] = data[canonical_row_order(len(data), model.shape.num_heads)]
    assert nmse(ort_logits(exported(model, tmp_path), [PROMPT]), want) > 1e-3


def test_a_shape_without_operators_is_refused(tmp_path: Path) -> None:
    shape = Shape.parse("L=4,d=64,heads=2,ff=64,vocab=40,share=2,nope=4")
    with pytest.raises(UnsupportedError, match="share=2 with nope=4"):
        write_onnx(lively_model(shape), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("quant", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize(
    "name", ["plain", "narrow_heads", "wide_heads", "qwen3_odd", "qwen2_odd", "smollm3", "yarn", "gelu", "shared"]
)
def test_standard_operators_only(name: str, quant: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name)).quantized(quant)
    files, written = write_onnx(model, tmp_path / "model.onnx", profile="standard")
    onnx.checker.check_model(str(files[0]), full_check=True)
    proto = onnx.load(str(files[0]))
    assert {(item.domain, item.version) for item in proto.opset_import} == {("", 23)} and proto.ir_version == 11
    assert {node.domain for node in proto.graph.node} == {""}
    assert written == onnx_bytes(model.shape, quant)
    ids = long_prompt(model.shape)
    want = Reference(model.shape, model.dequantized()).logits(ids)
    for chunks in ([ids], [ids[:41], *([token] for token in ids[41:])]):
        assert nmse(ort_logits(files[0], chunks), want) < NMSE_BUDGET


def test_formats_without_standard_operators_keep_their_values(tmp_path: Path) -> None:
    """A q4_1 matrix is written as f32 there; the bundle leaves such files out, but nothing wrong may come of it."""
    model = lively_model(tiny_shape("plain")).quantized("q4_1")
    path = exported(model, tmp_path, profile="standard")
    want = Reference(model.shape, model.dequantized()).logits(list(PROMPT))
    assert nmse(ort_logits(path, [PROMPT]), want) < NMSE_BUDGET


def test_heads_that_no_contrib_operator_takes_raise_the_opset(tmp_path: Path) -> None:
    proto = onnx.load(str(exported(lively_model(tiny_shape("narrow_heads")).quantized("q4_0"), tmp_path)))
    assert proto.ir_version == 11 and {item.version for item in proto.opset_import if not item.domain} == {23}
    operators = {node.op_type for node in proto.graph.node}
    assert "Attention" in operators and "MatMulNBits" in operators and "GroupQueryAttention" not in operators


def test_an_unknown_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ONNX profile 'web' is unknown; use one of contrib, standard"):
        write_onnx(lively_model(tiny_shape("plain")), tmp_path / "model.onnx", profile="web")


def test_shared_blocks_read_the_same_initializers(tmp_path: Path) -> None:
    shape = tiny_shape("shared")
    found = initializers(exported(lively_model(shape), tmp_path))
    assert sorted(name for name in found if name.endswith("q_proj.weight")) == [
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(shape.num_layers)
    ]
    inputs = [node for node in onnx.load(str(tmp_path / "model.onnx")).graph.node if node.op_type == "GroupQueryAttention"]
    assert len(inputs) == shape.num_executed_layers


@pytest.mark.parametrize("name", ["smollm_like", "wide_heads", "narrow_heads"])
def test_half_precision_is_stored_once_and_verified(name: str, tmp_path: Path) -> None:
    """Weights are f16 in the file, tied or not; caches and logits are f32, and the peers see the f16 values exactly."""
    model = lively_model(tiny_shape(name))
    export_bundle(model, tmp_path / "b", targets=("genai", "transformersjs", "gguf"), quants=("f16",))
    found = initializers(tmp_path / "b" / "transformersjs" / "onnx" / "model_fp16.onnx")
    halves = {name for name, values in found.items() if values.dtype == np.float16}
    assert halves == {spec.hf_name for spec in tensor_specs(model.shape) if len(spec.dims) == 2}
    session = ort_session(tmp_path / "b" / "genai" / "f16" / "model.onnx")
    assert {item.type for item in (*session.get_inputs()[2:], *session.get_outputs())} == {"tensor(float)"}
    result = verify_bundle(tmp_path / "b", runtimes=["engine", "onnxruntime"])
    assert result["verdict"] == "pass", result["summary"]
