"""GGUF files written by the ``gguf`` package: an oracle that shares no code with our reader or writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from deepthin.engine.model import Model, TokenizerSpec
from deepthin.engine.tensors import gguf_row_order, tensor_specs


def write_gguf(path: Path, model: Model) -> Path:
    """``model`` as the ``gguf`` package writes it, with a vocabulary where it has one."""
    shape = model.shape
    kinds = gguf.GGUFValueType
    writer = gguf.GGUFWriter(None, "llama")
    metadata: dict[str, Any] = {
        "general.name": (kinds.STRING, model.name),
        "llama.block_count": (kinds.UINT32, shape.num_layers),
        "llama.context_length": (kinds.UINT32, shape.max_seq_len),
        "llama.embedding_length": (kinds.UINT32, shape.hidden_size),
        "llama.feed_forward_length": (kinds.UINT32, shape.intermediate_size),
        "llama.attention.head_count": (kinds.UINT32, shape.num_heads),
        "llama.attention.head_count_kv": (kinds.UINT32, shape.num_kv_heads),
        "llama.attention.key_length": (kinds.UINT32, shape.head_dim),
        "llama.attention.value_length": (kinds.UINT32, shape.head_dim),
        "llama.attention.layer_norm_rms_epsilon": (kinds.FLOAT32, shape.rms_norm_eps),
        "llama.rope.freq_base": (kinds.FLOAT32, shape.rope_theta),
        "llama.rope.dimension_count": (kinds.UINT32, shape.head_dim),
        "llama.vocab_size": (kinds.UINT32, shape.vocab_size),
        "tokenizer.ggml.model": (kinds.STRING, "none"),
    }
    if model.tokenizer is not None:
        metadata |= tokenizer_metadata(model.tokenizer)
    _add(writer, metadata)
    for spec in tensor_specs(shape):
        tensor = model.tensors[spec.name]
        data = tensor.data[gguf_row_order(spec.dims[0], spec.rope_heads)] if spec.rope_heads else tensor.data
        kind = gguf.GGMLQuantizationType(tensor.format.gguf_type)
        if tensor.format.name in ("f32", "f16"):
            typed = np.ascontiguousarray(data).view(np.float32 if tensor.format.name == "f32" else np.float16)
            writer.add_tensor(spec.gguf_name, typed.reshape(tensor.dims))
        else:
            rows = np.ascontiguousarray(data)
            writer.add_tensor(spec.gguf_name, rows, raw_dtype=kind)
    _finish(writer, path, tensors=True)
    return path


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
