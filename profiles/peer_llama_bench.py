"""llama.cpp as a contestant, timed as llama-bench times it; runs inside a child process only.

``Child("deepthin.profiles.peer_llama_bench", peer="llama.cpp")`` serves METHODS. Everything but the number of threads is left
at llama.cpp's own defaults, which are its fastest: F16 cache, flash attention as it sees fit, repacked weights, prompts in
batches of 2048 and 512. Tokens come from outside, logits of the last token of each call are computed, nothing is sampled.
Source: ``tools/llama-bench/llama-bench.cpp`` (test_prompt, test_gen) at ggml-org/llama.cpp@c392e50.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.engine.llama_cpp_build import warn_of_amx


@dataclass(slots=True)
class _Loaded:
    model: Any
    context: Any
    vocab_size: int
    max_batch: int
    before: tuple[int, ...] = ()  # what the cache began with at the last call


_loaded: _Loaded | None = None
_keep_callback: Any = None  # the C side holds the pointer, so this side must hold the object


def version() -> dict[str, Any]:
    """Version of the binding and the instruction sets its library was built for."""
    import llama_cpp

    return {"version": llama_cpp.__version__, "build": _api().llama_print_system_info().decode().strip()}


def load(path: str, threads: int, context: int) -> dict[str, Any]:
    """Load a GGUF file with room for ``context`` cached tokens, replacing the one loaded before.

    Raises:
        RuntimeError: llama.cpp refuses the file; what it said is in the captured output.
    """
    global _loaded
    unload()
    api = _api()
    warn_of_amx(api.llama_print_system_info().decode())
    model_params = api.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(str(path).encode(), model_params)
    if not model:
        raise RuntimeError(f"it cannot load {path}")
    params = api.llama_context_default_params()
    params.n_ctx = context
    params.n_threads = params.n_threads_batch = threads
    handle = api.llama_init_from_model(model, params)
    if not handle:
        api.llama_model_free(model)
        raise RuntimeError(f"it cannot make a context of {context} tokens for {path}")
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    _loaded = _Loaded(model, handle, vocab_size, api.llama_n_batch(handle))
    return {"vocab_size": vocab_size}


def unload() -> dict[str, Any]:
    """Free the loaded model, if there is one."""
    global _loaded
    if _loaded is not None:
        _api().llama_free(_loaded.context)
        _api().llama_model_free(_loaded.model)
        _loaded = None
    return {}


def prompt(ids: list[int], before: list[int]) -> dict[str, Any]:
    """Seconds to take in ``ids`` as one prompt, after ``before`` (untimed) into an empty cache."""
    here = _start(before)
    data = _tokens(ids)
    start = time.perf_counter()
    _decode(here, data, len(ids))
    return {"seconds": time.perf_counter() - start}


def decode(ids: list[int], before: list[int]) -> dict[str, Any]:
    """Seconds to take in ``ids`` one by one, after ``before`` (untimed) into an empty cache; all together and ``each``."""
    here = _start(before)
    singles = [_tokens([token]) for token in ids]
    ends = [time.perf_counter()]
    for single in singles:
        _decode(here, single, 1)
        ends.append(time.perf_counter())
    return {"seconds": ends[-1] - ends[0], "each": [end - start for start, end in pairwise(ends)]}


def answer(prompt: list[int], ids: list[int], before: list[int]) -> dict[str, Any]:
    """Seconds to take in ``prompt`` as one, then ``ids`` one by one, after ``before`` (untimed) into an empty cache."""
    here = _start(before)
    data, singles = _tokens(prompt), [_tokens([token]) for token in ids]
    start = time.perf_counter()
    _decode(here, data, len(prompt))
    for single in singles:
        _decode(here, single, 1)
    return {"seconds": time.perf_counter() - start}


def logits(ids: list[int], before: list[int]) -> dict[str, Any]:
    """Logits f32 [S, V] after each of ``ids``, taken in one by one after ``before``, as :func:`decode` does."""
    here = _start(before)
    rows: list[F32] = []
    for token in ids:
        _decode(here, _tokens([token]), 1)
        address = _api().llama_get_logits_ith(here.context, -1)
        rows.append(np.ctypeslib.as_array(address, (here.vocab_size,)).astype(np.float32))
    return {"logits": np.stack(rows)}


def _start(before: Sequence[int]) -> _Loaded:
    """Leave exactly ``before`` in the cache: what came after it is dropped if it is there already, else it is taken in anew."""
    if _loaded is None:
        raise RuntimeError("no model is loaded yet; call load first")
    api = _api()
    memory = api.llama_get_memory(_loaded.context)
    wanted = tuple(before)
    kept = bool(wanted) and wanted == _loaded.before and api.llama_memory_seq_rm(memory, 0, len(wanted), -1)
    if not kept:
        api.llama_memory_clear(memory, True)
        if wanted:
            _decode(_loaded, _tokens(wanted), len(wanted))
        _loaded.before = wanted
    return _loaded


def _decode(here: _Loaded, data: Any, count: int) -> None:
    api = _api()
    for start in range(0, count, here.max_batch):
        piece = min(count - start, here.max_batch)
        first = ctypes.cast(ctypes.byref(data, start * ctypes.sizeof(ctypes.c_int32)), ctypes.POINTER(ctypes.c_int32))
        code = api.llama_decode(here.context, api.llama_batch_get_one(first, piece))
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {piece} tokens")
    api.llama_synchronize(here.context)


def _tokens(ids: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(ids))(*ids)


@functools.cache
def _api() -> Any:
    import llama_cpp

    global _keep_callback
    _keep_callback = llama_cpp.llama_log_callback(_on_log)
    llama_cpp.llama_log_set(_keep_callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp.llama_cpp


def _on_log(level: int, text: bytes | None, _: object) -> None:
    if level >= 3 and text:  # warnings and errors
        print(text.decode("utf-8", "replace").strip(), flush=True)


METHODS = {f.__name__: f for f in (version, load, unload, prompt, decode, answer, logits)}
