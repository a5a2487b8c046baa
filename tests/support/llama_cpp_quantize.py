"""GGUF files quantised by llama.cpp itself, as ``llama-quantize`` does it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp

FILE_TYPES = {"Q5_0": 8, "Q5_1": 9, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}  # enum llama_ftype in llama.cpp include/llama.h


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, user: ctypes.c_void_p) -> None:
    """Swallow the log."""


def llama_cpp_quantize(source: Path, out: Path, file_type: str) -> Path:
    """Convert the f32 or f16 file ``source`` to the mix that llama.cpp calls ``file_type``."""
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 2, FILE_TYPES[file_type]
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params))
    if status:
        raise ValueError(f"llama.cpp does not quantise {source} to {file_type}: status {status}")
    return out
