"""Full logits of a GGUF file from llama.cpp in strict mode: flash attention off, F32 cache, one thread."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from deepthin.engine.arrays import F32

_F32 = 0  # GGML_TYPE_F32


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, user: ctypes.c_void_p) -> None:
    """Swallow the log."""


def llama_cpp_logits(path: Path, chunks: Sequence[Sequence[int]], *, context: int = 64) -> F32:
    """Logits [S, V] of the tokens in ``chunks``, one decode call per chunk against the growing cache."""
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    if not model:
        raise ValueError(f"llama.cpp does not load {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = context, context, context
    params.n_threads, params.n_threads_batch = 1, 1
    params.type_k, params.type_v, params.flash_attn_type = _F32, _F32, 0
    ctx = llama_cpp.llama_init_from_model(model, params)
    try:
        vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        out, position = [], 0
        for chunk in chunks:
            batch = llama_cpp.llama_batch_init(len(chunk), 0, 1)
            batch.n_tokens = len(chunk)
            for i, token in enumerate(chunk):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position + i, 1, 1
                batch.seq_id[i][0] = 0
            status = llama_cpp.llama_decode(ctx, batch)
            if status:
                raise ValueError(f"llama_decode of {path} returned {status}")
            pointer = llama_cpp.llama_get_logits(ctx)
            out.append(np.ctypeslib.as_array(pointer, (len(chunk), vocab)).copy())
            llama_cpp.llama_batch_free(batch)
            position += len(chunk)
        return np.concatenate(out)
    finally:
        llama_cpp.llama_free(ctx)
        llama_cpp.llama_model_free(model)
