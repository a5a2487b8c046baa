"""Trained weights as transformers itself saves them: read here, written for every runtime, and still computing the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepthin.engine.load import load_model
from deepthin.engine.reference import Reference
from deepthin.export.bundle import export_bundle
from deepthin.export.tolerances import gate
from tests.support.runtimes import Runtimes, file_for, nmse
from tests.support.tiny_models import long_prompt

pytestmark = pytest.mark.interop
_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MODELS: dict[str, tuple[dict[str, Any], str, str]] = {  # configuration, stored type, size of a shard
    "llama": ({"model_type": "llama", "tie_word_embeddings": True}, "bfloat16", "30KB"),
    "llama_untied": ({"model_type": "llama", "tie_word_embeddings": False, "rms_norm_eps": 1e-5}, "float32", "1GB"),
    "llama3": ({"model_type": "llama", "head_dim": 32, "rope_parameters": _LLAMA3}, "float16", "1GB"),
    "qwen2": ({"model_type": "qwen2", "tie_word_embeddings": True}, "bfloat16", "20KB"),
    "qwen2_yarn": ({"model_type": "qwen2", "tie_word_embeddings": False, "rope_parameters": _YARN}, "bfloat16", "1GB"),
    "qwen3": ({"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}, "bfloat16", "30KB"),
    "arcee": ({"model_type": "arcee", "tie_word_embeddings": False}, "bfloat16", "30KB"),
    "smollm3": ({"model_type": "smollm3", "num_hidden_layers": 5, "tie_word_embeddings": True}, "bfloat16", "50KB"),
}
_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_transformers_runs_everywhere(name: str, tmp_path: Path, runtimes: Runtimes) -> None:
    config, dtype, shard_size = MODELS[name]
    transformers = runtimes["transformers"]
    made = transformers.call(
        "make", folder=str(tmp_path / "theirs"), config=_COMMON | config, dtype=dtype, shard_size=shard_size, seed=5
    )
    assert ("model.safetensors.index.json" in made["files"]) == (shard_size != "1GB"), made["files"]
    model = load_model(tmp_path / "theirs")
    ids = long_prompt(model.shape)
    want = transformers.call("logits", ids=ids)["logits"]
    limit = gate("transformers")["nmse"]
    assert model.tensors["blk.0.attn_q"].format.name == _TYPES[dtype]
    assert nmse(Reference(model.shape, model.dequantized()).logits(ids), want) < limit

    export_bundle(model, tmp_path / "ours", quants=("f32",), hf_dtype=_TYPES[dtype])
    loaded = transformers.call("load", path=str(tmp_path / "ours" / "hf"))
    assert (loaded["dtype"], loaded["missing"], loaded["unexpected"]) == (dtype, [], [])
    transformers.call("load", path=str(tmp_path / "ours" / "hf"), dtype="float32")
    np.testing.assert_array_equal(transformers.call("logits", ids=ids)["logits"], want)  # the same weights and configuration
    for other in ("onnxruntime", "llama.cpp", "genai", "transformers.js"):
        runtimes[other].call("load", path=str(file_for(other, tmp_path / "ours", "f32")))
        assert nmse(runtimes[other].call("logits", ids=ids)["logits"], want) < limit, other
