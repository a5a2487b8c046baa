"""GGUF files written by the ``gguf`` package: an oracle that shares no code with our reader or writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from deepthin.engine.arrays import F32
from deepthin.engine.model import Model, TokenizerSpec
from deepthin.engine.tensors import gguf_row_order, tensor_specs


def write_gguf(path: Path, model: Model) -> Path:
    """``model`` as the ``gguf`` package writes it, with a vocabulary where it has one."""
    shape = model.shape
    kinds = gguf.GGUFValueType
    arch = _architecture(model)
    writer = gguf.GGUFWriter(None, arch)
    metadata: dict[str, Any] = {
        "general.name": (kinds.STRING, model.name),
        f"{arch}.block_count": (kinds.UINT32, shape.num_layers),
        f"{arch}.context_length": (kinds.UINT32, shape.max_seq_len),
        f"{arch}.embedding_length": (kinds.UINT32, shape.hidden_size),
        f"{arch}.feed_forward_length": (kinds.UINT32, shape.intermediate_size),
        f"{arch}.attention.head_count": (kinds.UINT32, shape.num_heads),
        f"{arch}.attention.head_count_kv": (kinds.UINT32, shape.num_kv_heads),
        f"{arch}.attention.key_length": (kinds.UINT32, shape.head_dim),
        f"{arch}.attention.value_length": (kinds.UINT32, shape.head_dim),
        f"{arch}.attention.layer_norm_rms_epsilon": (kinds.FLOAT32, shape.rms_norm_eps),
        f"{arch}.rope.freq_base": (kinds.FLOAT32, shape.rope_theta),
        f"{arch}.rope.dimension_count": (kinds.UINT32, shape.head_dim),
        f"{arch}.vocab_size": (kinds.UINT32, shape.vocab_size),
        "tokenizer.ggml.model": (kinds.STRING, "none"),
    }
    scaling = shape.rope_scaling
    if scaling is not None and scaling.kind != "llama3":
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
        writer.add_rope_scaling_factor(scaling.factor)
    if scaling is not None and scaling.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
    if model.tokenizer is not None:
        metadata |= tokenizer_metadata(model.tokenizer)
    _add(writer, metadata)
    for spec in tensor_specs(shape):
        tensor = model.tensors[spec.name]
        data = tensor.data
        if spec.rope_heads and arch not in ("qwen2", "qwen3"):
            order = gguf_row_order(spec.dims[0], spec.rope_heads)
            data = data[order] if len(spec.dims) == 2 else data.view(np.float32)[:, order].view(np.uint8)
        kind = gguf.GGMLQuantizationType(tensor.format.gguf_type)
        if tensor.format.name in ("f32", "f16"):
            typed = np.ascontiguousarray(data).view(np.float32 if tensor.format.name == "f32" else np.float16)
            writer.add_tensor(spec.gguf_name, typed.reshape(tensor.dims))
        else:
            rows = np.ascontiguousarray(data)
            writer.add_tensor(spec.gguf_name, rows, raw_dtype=kind)
    if scaling is not None and scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(model))
    _finish(writer, path, tensors=True)
    return path


def _architecture(model: Model) -> str:
    """By what the tensors are called, as a converter would know it from the model's class."""
    if model.shape.nope_every:
        return "smollm3"
    if "blk.0.attn_q_norm" in model.tensors:
        return "qwen3"
    if "blk.0.ffn_gate" not in model.tensors:
        return "arcee"
    square = model.tensors["blk.0.attn_q"].dims[0] == model.shape.hidden_size  # llama.cpp's qwen2 wants it so
    return "qwen2" if "blk.0.attn_q.bias" in model.tensors and square else "llama"


def _llama3_factors(model: Model) -> F32:
    """As llama.cpp ``conversion/llama.py`` computes them, case by case."""
    scaling, dim = model.shape.rope_scaling, model.shape.head_dim
    assert scaling is not None
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * model.shape.rope_theta ** (i / dim)
        if wavelength < scaling.original_context / scaling.high:
            factors.append(1.0)
        elif wavelength > scaling.original_context / scaling.low:
            factors.append(scaling.factor)
        else:
            smooth = (scaling.original_context / wavelength - scaling.low) / (scaling.high - scaling.low)
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, np.float32)


def write_vocabulary(path: Path, spec: TokenizerSpec) -> Path:
    """A file of metadata only, which llama.cpp reads with ``vocab_only``."""
    writer = gguf.GGUFWriter(None, "llama")
    _add(writer, tokenizer_metadata(spec))
    _finish(writer, path, tensors=False)
    return path


def tokenizer_metadata(spec: TokenizerSpec) -> dict[str, Any]:
    """``tokenizer.ggml.*`` keys of ``spec``."""
    kinds = gguf.GGUFValueType
    ids = {"bos": spec.bos_id, "eos": spec.eos_id, "unknown": spec.unk_id, "padding": spec.pad_id}
    return {
        "tokenizer.ggml.model": (kinds.STRING, "gpt2"),
        "tokenizer.ggml.pre": (kinds.STRING, spec.pre),
        "tokenizer.ggml.tokens": (kinds.ARRAY, list(spec.tokens)),
        "tokenizer.ggml.token_type": (kinds.ARRAY, list(spec.token_types)),
        "tokenizer.ggml.merges": (kinds.ARRAY, list(spec.merges)),
        "tokenizer.ggml.add_bos_token": (kinds.BOOL, spec.add_bos),
        **{f"tokenizer.ggml.{name}_token_id": (kinds.UINT32, value) for name, value in ids.items() if value is not None},
    }


def _add(writer: Any, metadata: Mapping[str, Any]) -> None:
    for key, (kind, value) in metadata.items():
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, kind)


def _finish(writer: Any, path: Path, *, tensors: bool) -> None:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    if tensors:
        writer.write_tensors_to_file()
    writer.close()
