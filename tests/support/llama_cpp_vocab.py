"""Token ids from llama.cpp, for a GGUF file of which only the vocabulary is read."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, user: ctypes.c_void_p) -> None:
    """Swallow the log."""


class LlamaCppVocab:
    """llama.cpp's tokenizer of one file."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {path}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        raw = text.encode()
        room = len(raw) + 2
        ids = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, parse_special)
        if count < 0:
            raise ValueError(f"llama_tokenize needs room for {-count} ids")
        return list(ids[:count])

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)
