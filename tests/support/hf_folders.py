"""Hugging Face folders written by the ``safetensors`` package and plain JSON: nothing of our writers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from deepthin.engine.arrays import F32
from deepthin.engine.model import Model
from deepthin.engine.tensors import tensor_specs


def write_hf_folder(folder: Path, model: Model, *, config: Mapping[str, Any] | None = None) -> Path:
    """``model`` as f32; ``config`` replaces or (``...``) removes keys of config.json."""
    folder.mkdir(exist_ok=True)
    save_file(hf_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    changed = {**hf_config(model), **(config or {})}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in changed.items() if value is not ...}))
    return folder


def hf_weights(model: Model) -> dict[str, F32]:
    """Values by Hugging Face name."""
    return {spec.hf_name: np.ascontiguousarray(model.tensors[spec.name].dequantize()) for spec in tensor_specs(model.shape)}


def hf_config(model: Model) -> dict[str, Any]:
    """The keys that have no default, and those that differ from it."""
    shape = model.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_word_embeddings,
    }
