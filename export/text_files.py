"""Tokenizer and generation settings as the JSON files that Hugging Face folders, genai and transformers.js all read.

No chat template is written: templates are code, and this exporter passes none on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepthin.engine.model import Model, TokenizerSpec

_SPECIAL = ("bos", "eos", "unk", "pad")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` for people to read, the same bytes on every system."""
    path.write_bytes(json_data(document))


def json_data(document: Mapping[str, Any]) -> bytes:
    """What :func:`write_json` writes."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def write_tokenizer_files(model: Model, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``; nothing for a model of bare token ids."""
    if model.tokenizer is None:
        return
    from deepthin.engine.tokenizer import Tokenizer  # loads `tokenizers`

    text = Tokenizer(model.tokenizer).to_tokenizer_json()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8", newline="\n")
    write_json(folder / "tokenizer_config.json", _tokenizer_config(model.tokenizer, model.shape.max_seq_len))


def generation_config(tokenizer: TokenizerSpec | None) -> dict[str, Any]:
    """``generation_config.json``: the ids that generation starts, ends and pads with; null where there is none."""
    ids = (None, None, None) if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    return dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids, strict=True))


def _tokenizer_config(spec: TokenizerSpec, max_length: int) -> dict[str, Any]:
    ids = dict(zip(_SPECIAL, (spec.bos_id, spec.eos_id, spec.unk_id, spec.pad_id), strict=True))
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": spec.add_bos,
        **{f"{name}_token": spec.tokens[token] for name, token in ids.items() if token is not None},
    }
