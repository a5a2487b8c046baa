"""``genai_config.json``, which makes an ONNX decoder a folder that ``onnxruntime_genai.Model`` loads as it is.

Only keys that version 0.18 knows are written, since it refuses others; sessions keep their defaults, so a user's settings win.
Source: microsoft/onnxruntime-genai ``src/config.h`` and ``src/models/model_type.h``.
"""

from __future__ import annotations

from typing import Any

from deepthin.engine.architectures import architecture_of, missing_architecture
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.shape import Shape

_TYPES = ("llama", "qwen2", "qwen3", "smollm3")  # of the architectures here, those that genai knows by name
_ANY_TYPE = "decoder"  # its name for a decoder that needs nothing special


def genai_config(shape: Shape, tokenizer: TokenizerSpec | None, *, filename: str, shares_buffer: bool) -> dict[str, Any]:
    """The configuration of a folder whose decoder is ``filename``; without a tokenizer it takes token ids only.

    Args:
        shape: of the model.
        tokenizer: names the special tokens.
        filename: of the ONNX file in the same folder.
        shares_buffer: whether the graph may write new keys and values into the buffer that holds the past ones.
    """
    known = "" if missing_architecture(shape) else architecture_of(shape).name
    return {
        "model": {
            "type": known if known in _TYPES else _ANY_TYPE,
            **_special_ids(tokenizer),
            "context_length": shape.max_seq_len,
            "vocab_size": shape.vocab_size,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": filename,
                "head_size": shape.head_dim,
                "hidden_size": shape.hidden_size,
                "num_attention_heads": shape.num_heads,
                "num_key_value_heads": shape.num_kv_heads,
                "num_hidden_layers": shape.num_executed_layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": shape.max_seq_len,
            "do_sample": False,
            "past_present_share_buffer": shares_buffer,
            "top_k": 1,
            "temperature": 1.0,
            "num_beams": 1,
        },
    }


def _special_ids(tokenizer: TokenizerSpec | None) -> dict[str, int]:
    """Ids that there are; genai refuses null. It pads with the end of text where there is no padding token."""
    if tokenizer is None:
        return {}
    pad = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": pad}
    return {name: token for name, token in ids.items() if token is not None}
