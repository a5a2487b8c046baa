"""What makes ONNX decoders a folder that transformers.js loads as it is: names under ``onnx/`` and ``config.json``.

A file's name says what it stores: ``dtype: "fp32"`` loads ``model.onnx``, ``"q4"`` ``model_q4.onnx``, ``"q8"`` (what it takes
in a browser) ``model_quantized.onnx``. Formats that it has no name for are loaded by ``model_file_name``.
Source: huggingface/transformers.js ``packages/transformers/src/utils/dtypes.js`` and ``models/modeling_utils.js``, version 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepthin.engine.hf_config import config_from_shape
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.shape import Shape
from deepthin.engine.targets import target_verdicts

FILE_NAMES = {"f32": "model.onnx", "f16": "model_fp16.onnx", "q4_0": "model_q4.onnx", "q8_0": "model_quantized.onnx"}
DTYPES = {"f32": "fp32", "f16": "fp16", "q4_0": "q4", "q8_0": "q8"}  # as ``from_pretrained`` calls what FILE_NAMES hold


def file_name(quant: str) -> str:
    """Name under ``onnx/`` of the decoder stored as ``quant``."""
    return FILE_NAMES.get(quant, f"model_{quant}.onnx")


def transformersjs_config(shape: Shape, tokenizer: TokenizerSpec | None, external: Iterable[str]) -> dict[str, Any]:
    """``config.json``: that of the Hugging Face folder, and which decoders keep their weights in a second file.

    Where no class of transformers fits the shape, the numbers stand under Llama's name: transformers.js takes from there
    that it is a decoder with a cache, and everything else from the graph.

    Args:
        shape: of the model.
        tokenizer: names the special tokens.
        external: file names under ``onnx/`` that have ``_data`` beside them.
    """
    plain = shape.replace(num_layers=shape.num_executed_layers, layer_sharing=1)
    if not target_verdicts(plain)["hf"].ok:
        heads = shape.num_heads
        plain = Shape(
            num_layers=shape.num_executed_layers,
            hidden_size=heads * shape.head_dim,
            num_heads=heads,
            num_kv_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            tie_word_embeddings=shape.tie_word_embeddings,
            max_seq_len=shape.max_seq_len,
        )
    config = config_from_shape(plain, tokenizer=tokenizer) | {"hidden_size": shape.hidden_size}
    outside = dict.fromkeys(external, 1)
    return {**config, **({"transformers.js_config": {"use_external_data_format": outside}} if outside else {})}
