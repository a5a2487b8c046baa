"""What a Hugging Face folder of a known class means: config, weights and tokenizer as one Model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.errors import FormatError, UnsupportedError
from deepthin.engine.hf_config import shape_from_config
from deepthin.engine.hf_tokenizer import spec_from_document
from deepthin.engine.json_text import read_json_object
from deepthin.engine.model import Model, Tensor, TokenizerSpec
from deepthin.engine.model_folder import member
from deepthin.engine.safetensors_file import read_safetensors_folder
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import tensor_specs

_MAX_CONFIG_BYTES = 1 << 20
_MAX_SETTINGS_BYTES = 1 << 22  # may list thousands of added tokens
_MAX_TOKENIZER_BYTES = 1 << 25
_NO_WEIGHT = ".rotary_emb.inv_freq"  # a buffer that old checkpoints carry; it follows from the config


def model_from_hf_folder(folder: Path) -> Model:
    """The model in ``folder``; weights stay mapped.

    Without a tokenizer that this version can use, ``tokenizer`` is None and ``metadata["tokenizer_note"]`` says why.

    Raises:
        FormatError: a file is missing or damaged, or config and weights disagree.
        UnsupportedError: the folder is valid but asks for something this engine does not do.
    """
    path = member(folder, "config.json")
    if path is None:
        raise FormatError(f"{folder}: there is no config.json")
    config = read_json_object(path, _MAX_CONFIG_BYTES)
    shape = shape_from_config(config, str(path))
    tensors = _canonical(folder, shape, read_safetensors_folder(folder))
    tokenizer, note = _tokenizer(folder, config, shape)
    metadata = {**config, **({"tokenizer_note": note} if note else {})}
    return Model(shape, tensors, tokenizer, folder.resolve().name, str(folder), metadata)


def _canonical(folder: Path, shape: Shape, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by canonical name; their rows are in canonical order already."""
    if shape.num_layers > len(stored):  # before thousands of tensor names are made up only to be missed
        raise FormatError(
            f"{folder}: config.json announces {shape.num_layers} layers, but there are only {len(stored)} tensors"
        )
    specs = {spec.hf_name: spec for spec in tensor_specs(shape)}
    for name in stored:
        if name.endswith(".bias") and name not in specs:
            raise UnsupportedError(f"{folder}: tensor '{name}' is a bias, which this version does not run")
        if name == "lm_head.weight" and name not in specs:
            _require_equal_head(folder, stored)
        elif name not in specs and not name.endswith(_NO_WEIGHT):
            raise FormatError(f"{folder}: tensor '{name}' belongs to no part of the model that config.json describes")
    for name, spec in specs.items():
        if name not in stored:
            advice = "; should 'tie_word_embeddings' be true?" if spec.role == "head" else ""
            raise FormatError(f"{folder}: tensor '{name}' is missing, but config.json describes a model that has it{advice}")
        if stored[name].dims != spec.dims:
            raise FormatError(
                f"{folder}: tensor '{name}' has dimensions {list(stored[name].dims)}, but config.json needs {list(spec.dims)}; "
                f"do they belong together?"
            )
    return {spec.name: stored[name] for name, spec in specs.items()}


def _require_equal_head(folder: Path, stored: Mapping[str, Tensor]) -> None:
    """Accept a head beside a tied embedding only as a copy of it."""
    head, embedding = stored["lm_head.weight"], stored.get("model.embed_tokens.weight")
    if embedding is None or head.format is not embedding.format or not np.array_equal(head.data, embedding.data):
        raise FormatError(
            f"{folder}: config.json ties embedding and head, but 'lm_head.weight' differs from 'model.embed_tokens.weight'; "
            f"should 'tie_word_embeddings' be false?"
        )


def _tokenizer(folder: Path, config: Mapping[str, Any], shape: Shape) -> tuple[TokenizerSpec | None, str]:
    path = member(folder, "tokenizer.json")
    if path is None:
        return None, "there is no tokenizer.json"
    settings_path = member(folder, "tokenizer_config.json")
    settings = {} if settings_path is None else read_json_object(settings_path, _MAX_SETTINGS_BYTES)
    document = read_json_object(path, _MAX_TOKENIZER_BYTES)
    found = spec_from_document(document, settings, config, shape.vocab_size, str(path))
    return (None, f"tokenizer.json is not used: {found}") if isinstance(found, str) else (found, "")
