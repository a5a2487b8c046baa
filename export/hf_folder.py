"""Writes a Hugging Face folder of the class that fits: config, ``model.safetensors``, generation config, tokenizer files.

Weights are the model's values, dequantised when it stores blocks, in Hugging Face's row order (which is our canonical one).
No chat template is written: templates are code, and this exporter passes none on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.arrays import U8
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import BlockFormat, format_named
from deepthin.engine.hf_config import config_from_shape
from deepthin.engine.model import Model, Tensor, TokenizerSpec
from deepthin.engine.quants import quantize
from deepthin.engine.tensors import tensor_specs
from deepthin.export.feasibility import require_targets
from deepthin.export.safetensors_writer import DTYPES, StoredTensor, write_safetensors


def write_hf_folder(model: Model, folder: Path, *, dtype: str = "f32") -> int:
    """Write ``model`` into the empty ``folder``; returns the bytes of all tensor data.

    Args:
        model: in any stored formats.
        folder: exists and holds none of the files yet.
        dtype: f32, f16 or bf16; what values are rounded to.

    Raises:
        UnsupportedError: no class of transformers can express the shape.
        UsageError: ``dtype`` is none of the three.
        FormatError: a value does not fit ``dtype``.
    """
    require_targets(("hf",), model.shape)
    if dtype not in DTYPES:
        raise UsageError(f"hf export: dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    fmt = format_named(dtype)
    _write_json(folder / "config.json", config_from_shape(model.shape, dtype=dtype, tokenizer=model.tokenizer))
    _write_json(folder / "generation_config.json", _generation_config(model.tokenizer))
    if model.tokenizer is not None:
        from deepthin.engine.tokenizer import Tokenizer  # loads `tokenizers`

        text = Tokenizer(model.tokenizer).to_tokenizer_json()
        (folder / "tokenizer.json").write_text(text, encoding="utf-8", newline="\n")
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.tokenizer, model.shape.max_seq_len))
    tensors = [
        StoredTensor(spec.hf_name, fmt, spec.dims, _maker(model.tensors[spec.name], fmt)) for spec in tensor_specs(model.shape)
    ]
    return write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


def _maker(tensor: Tensor, fmt: BlockFormat) -> Callable[[], U8]:
    return lambda: np.ascontiguousarray(tensor.data if tensor.format is fmt else quantize(tensor.dequantize(), fmt))


def _generation_config(tokenizer: TokenizerSpec | None) -> dict[str, Any]:
    ids = (None, None, None) if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    return dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids, strict=True))


def _tokenizer_config(spec: TokenizerSpec, max_length: int) -> dict[str, Any]:
    named = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id, "pad_token": spec.pad_id}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": spec.add_bos,
        **{name: spec.tokens[token] for name, token in named.items() if token is not None},
    }


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
