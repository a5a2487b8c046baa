"""Writes a Hugging Face folder of the class that fits: config, ``model.safetensors``, generation config, tokenizer files.

Weights are the model's values, dequantised when it stores blocks, in Hugging Face's row order (which is our canonical one).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.arrays import U8
from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.formats import BlockFormat, format_named
from deepthin.engine.hf_config import config_from_shape
from deepthin.engine.model import Model
from deepthin.engine.quants import quantize
from deepthin.engine.tensors import tensor_specs
from deepthin.export.feasibility import require_targets
from deepthin.export.safetensors_writer import DTYPES, StoredTensor, safetensors_bytes, write_safetensors
from deepthin.export.text_files import generation_config, json_data, write_json, write_tokenizer_files

_METADATA = {"format": "pt"}


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
    for name, document in _settings(model, dtype).items():
        write_json(folder / name, document)
    write_tokenizer_files(model, folder)
    return write_safetensors(folder / "model.safetensors", _tensors(model, dtype), _METADATA)


def hf_folder_bytes(model: Model, *, dtype: str = "f32") -> dict[str, int]:
    """Bytes of each file that :func:`write_hf_folder` writes, by name, tokenizer files apart; no data is looked at.

    Raises:
        UnsupportedError: as there.
        UsageError: as there.
    """
    require_targets(("hf",), model.shape)
    settings = {name: len(json_data(document)) for name, document in _settings(model, dtype).items()}
    return {**settings, "model.safetensors": safetensors_bytes(_tensors(model, dtype), _METADATA)}


def _settings(model: Model, dtype: str) -> dict[str, dict[str, Any]]:
    return {
        "config.json": config_from_shape(model.shape, dtype=dtype, tokenizer=model.tokenizer),
        "generation_config.json": generation_config(model.tokenizer),
    }


def _tensors(model: Model, dtype: str) -> list[StoredTensor]:
    fmt = format_named(dtype)
    return [StoredTensor(spec.hf_name, fmt, spec.dims, _maker(model, spec.name, fmt)) for spec in tensor_specs(model.shape)]


def _maker(model: Model, name: str, fmt: BlockFormat) -> Callable[[], U8]:
    tensor = model.tensors[name]

    def make() -> U8:
        if tensor.format is fmt:
            return np.ascontiguousarray(tensor.data)
        try:
            return quantize(tensor.dequantize(), fmt)
        except FormatError as error:
            raise FormatError(f"{model.source}: tensor '{name}' cannot become {fmt.name}: {error}") from None

    return make
