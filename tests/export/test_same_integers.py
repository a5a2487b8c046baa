"""Every format that both files hold: GGUF read by the ``gguf`` package, ONNX by MatMulNBits' definition, integers compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest

from deepthin.engine.formats import FORMATS, format_named
from deepthin.engine.load import load_model
from deepthin.engine.model import Model, Tensor
from deepthin.engine.quants import block_codes
from deepthin.engine.quants_k import k_codes
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import tensor_specs
from deepthin.export.bundle import export_bundle
from deepthin.export.gguf_writer import write_gguf
from deepthin.export.onnx_model import stored_onnx_bytes, write_onnx
from deepthin.export.verify import verify_bundle
from tests.support.k_blocks import stored_model
from tests.support.llama_cpp_quantize import llama_cpp_quantize
from tests.support.ort_logits import ort_logits
from tests.support.tiny_models import PROMPT, lively_model

SHAPE = Shape.parse("L=2,d=256,heads=4,kv=2,ff=512,vocab=96,untied,ctx=64")
BIT_EQUAL = ("q4_0", "q5_0", "q6_k", "q8_0")
ROUNDED = {"q4_1", "q4_k", "q5_1", "q5_k"}  # what is added to a block is rounded


def codes_of(tensor: Tensor) -> Any:
    """The unsigned integers of each row, [out, in], from the stored blocks."""
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, tensor.format.block_bytes).view(tensor.format.dtype)[:, 0]
    if tensor.format.name.endswith("_k"):
        return k_codes(blocks).reshape(tensor.dims)
    if tensor.format.name == "q8_0":
        return (blocks["qs"].astype(np.int16) + 128).astype(np.uint8).reshape(tensor.dims)
    return block_codes(blocks).reshape(tensor.dims)


def onnx_codes(found: dict[str, Any], name: str, bits: int) -> Any:
    codes = found[name + "_quant"]
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    return codes.reshape(len(codes), -1)


@pytest.mark.parametrize("fmt", [*BIT_EQUAL, *sorted(ROUNDED)])
def test_integers_and_values(fmt: str, tmp_path: Path) -> None:
    model = stored_model(SHAPE, lively_model(SHAPE).dequantized(), [format_named(fmt)])
    write_gguf(model, tmp_path / "m.gguf")
    files, written = write_onnx(model, tmp_path / "m.onnx")
    onnx.checker.check_model(str(files[0]), full_check=True)
    assert written == stored_onnx_bytes(model)
    found = {item.name: onnx.numpy_helper.to_array(item) for item in onnx.load(str(files[0])).graph.initializer}
    theirs = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    bits = 4 if fmt.startswith("q4") else 8
    shift = {"q8_0": 0, "q6_k": 96}.get(fmt, 112) if bits == 8 else 0
    for spec in tensor_specs(SHAPE):
        if len(spec.dims) == 1 or spec.rope_heads or (spec.role == "embedding" and fmt in ROUNDED):
            continue
        q = onnx_codes(found, spec.hf_name, bits)
        np.testing.assert_array_equal(q.astype(np.int16) - shift, codes_of(model.tensors[spec.name]), err_msg=spec.name)
        scales = found[spec.hf_name + "_scales"].reshape(spec.dims[0], -1, 1)
        values = (q.reshape(spec.dims[0], scales.shape[1], -1) - np.float32(1 << (bits - 1))) * scales
        if fmt in ROUNDED:
            values = values + found[spec.hf_name + "_addends"].T[:, :, None]
        values = values.reshape(spec.dims).astype(np.float32)
        want = theirs[spec.gguf_name]
        if fmt in ROUNDED:
            np.testing.assert_allclose(values, want, rtol=0, atol=1e-6 * np.abs(want).max(), err_msg=spec.name)
        else:
            np.testing.assert_array_equal(values, want, err_msg=spec.name)
    want_logits = Reference(SHAPE, model.dequantized()).logits(list(PROMPT))
    error = np.square(ort_logits(files[0], [PROMPT]) - want_logits).sum() / np.square(want_logits).sum()
    assert error < 1e-10


def test_flat_q4_k_blocks_keep_their_value(tmp_path: Path) -> None:
    """Sub-blocks whose scale is 0 are all minus their minimum, whatever their integers are."""
    model = stored_model(SHAPE, lively_model(SHAPE).dequantized(), [format_named("q4_k")])
    blocks = model.tensors["blk.0.ffn_up"].data.reshape(-1, 144).view(FORMATS["q4_k"].dtype)[:, 0]
    blocks["d"][::2] = 0
    write_onnx(model, tmp_path / "m.onnx")
    want = Reference(SHAPE, model.dequantized()).logits(list(PROMPT))
    found = ort_logits(tmp_path / "m.onnx", [PROMPT])
    assert np.square(found - want).sum() / np.square(want).sum() < 1e-10


def test_a_mixture_passes_verify(tmp_path: Path) -> None:
    """Every block format there is in one model."""
    formats = [FORMATS[name] for name in ("q4_k", "q6_k", "q5_k", "q8_0", "q5_0", "q4_1", "q5_1", "q4_0")]
    model = stored_model(SHAPE, lively_model(SHAPE, seed=5).dequantized(), formats)
    export_bundle(model, tmp_path / "b", quants=("f32", "stored"))
    result = verify_bundle(tmp_path / "b", runtimes=["engine", "onnxruntime", "llama.cpp"])
    assert result["verdict"] == "pass", result["summary"]
    assert "genai/stored/model.onnx" in {pair["file"] for pair in result["pairs"]}
    only = tmp_path / "only"
    export_bundle(model, only, targets=("gguf", "genai"), quants=("stored",))
    result = verify_bundle(only, runtimes=["onnxruntime"])
    assert result["verdict"] == "pass" and result["base"] == "gguf/model-stored.gguf", result["summary"]
    again = load_model(only)
    assert all(np.array_equal(again.tensors[name].data, tensor.data) for name, tensor in model.tensors.items())


def test_a_q4_k_m_file_of_llama_cpp_keeps_its_integers(tmp_path: Path) -> None:
    shape = SHAPE.replace(tie_word_embeddings=True)
    write_gguf(lively_model(shape), tmp_path / "plain.gguf")
    model: Model = load_model(llama_cpp_quantize(tmp_path / "plain.gguf", tmp_path / "mix.gguf", "Q4_K_M"))
    kinds = {tensor.format.name for tensor in model.tensors.values()}
    assert kinds == {"q4_k", "q6_k", "f32"}
    export_bundle(model, tmp_path / "b", quants=("stored",))
    found = {
        item.name: onnx.numpy_helper.to_array(item)
        for item in onnx.load(str(tmp_path / "b" / "genai" / "stored" / "model.onnx")).graph.initializer
    }
    for spec in tensor_specs(shape):
        if len(spec.dims) == 2:
            tensor = model.tensors[spec.name]
            bits, shift = (4, 0) if tensor.format.name == "q4_k" else (8, 96)
            q = onnx_codes(found, spec.hf_name, bits).astype(np.int16) - shift
            np.testing.assert_array_equal(q, codes_of(tensor), err_msg=spec.name)
    result = verify_bundle(tmp_path / "b", runtimes=["engine", "onnxruntime", "llama.cpp"])
    assert result["verdict"] == "pass", result["summary"]
