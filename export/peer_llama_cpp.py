"""llama.cpp as a peer, through the low-level interface of llama-cpp-python; runs inside a child process only.

``Child("deepthin.export.peer_llama_cpp", peer="llama.cpp")`` serves METHODS. One model is loaded at a time.

Strict mode is the arithmetic nearest to plain f32: key/value cache in F32, flash attention off. Without it both
are as llama.cpp has them by default (F16 cache, flash attention as it sees fit). Nothing ever goes to a GPU.
Source: field names and meanings in llama.cpp ``include/llama.h`` at ggml-org/llama.cpp@0c1e570.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.engine.llama_cpp_build import warn_of_amx
from deepthin.export.schedule import best_token, pieces

_GGML_TYPE_F32 = 0
_FLASH_ATTENTION_OFF = 0
_LOG_WARN, _LOG_ERROR = 3, 4
_MAX_BATCH = 512

_log: list[str] = []  # warnings and errors of the current call, for messages


@dataclass(slots=True)
class _Loaded:
    model: Any
    context: Any
    batch: Any
    vocab: Any
    num_tokens: int
    max_batch: int
    position: int = 0
    watched: dict[str, list[F32]] | None = None
    callback: Any = None  # the C side holds the pointer, so this side must hold the object


_loaded: _Loaded | None = None


def version() -> dict[str, Any]:
    """Version of the binding and the instruction sets its library was built for."""
    lib = _library()
    return {"version": lib.__version__, "system_info": _api().llama_print_system_info().decode().strip()}


def load(
    path: str,
    *,
    threads: int = 1,
    context: int = 512,
    strict: bool = True,
    vocab_only: bool = False,
    batch: int = _MAX_BATCH,
    repack: bool = True,
    watch: list[str] | None = None,
) -> dict[str, Any]:
    """Load a GGUF file, replacing the one loaded before.

    Args:
        path: the file.
        threads: threads for both decode and prefill.
        context: cached tokens to make room for.
        strict: F32 cache and no flash attention.
        vocab_only: load what :func:`tokenize` needs and no weights.
        batch: most tokens handed over at once.
        repack: let blocks be regrouped for the CPU's vectors, as by default; without it they are multiplied as they are stored.
        watch: names of F32 values inside its graph that :func:`streams` gives; those that it does not have are passed over.

    Raises:
        RuntimeError: llama.cpp refuses the file; the message holds what it said.
    """
    global _loaded
    unload()
    api = _api()
    warn_of_amx(api.llama_print_system_info().decode())
    model_params = api.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.vocab_only = vocab_only
    model_params.use_extra_bufts = repack
    model = api.llama_model_load_from_file(str(path).encode(), model_params)
    if not model:
        raise RuntimeError(f"it cannot load {path}: {_said()}")
    handle, room = None, None
    max_batch = max(1, min(batch, context))
    watched: dict[str, list[F32]] | None = {name: [] for name in watch} if watch else None
    callback = None
    if not vocab_only:
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, max_batch, max_batch
        params.n_threads = params.n_threads_batch = threads
        if strict:
            params.type_k = params.type_v = _GGML_TYPE_F32
            params.flash_attn_type = _FLASH_ATTENTION_OFF
        if watched is not None:
            params.cb_eval = callback = api.ggml_backend_sched_eval_callback(_keeper(watched))
        handle = api.llama_init_from_model(model, params)
        if not handle:
            raise RuntimeError(f"it cannot make a context of {context} tokens for {path}: {_said()}")
        room = api.llama_batch_init(max_batch, 0, 1)
    vocab = api.llama_model_get_vocab(model)
    _loaded = _Loaded(model, handle, room, vocab, api.llama_vocab_n_tokens(vocab), max_batch, 0, watched, callback)
    return {
        "vocab_size": _loaded.num_tokens,
        "num_layers": api.llama_model_n_layer(model),
        "num_parameters": api.llama_model_n_params(model),
        "threads": threads,
        "strict": strict,
    }


def unload() -> dict[str, Any]:
    """Free the loaded model, if there is one."""
    global _loaded
    if _loaded is not None:
        api = _api()
        if _loaded.context:
            api.llama_batch_free(_loaded.batch)
            api.llama_free(_loaded.context)
        api.llama_model_free(_loaded.model)
        _loaded = None
    return {}


def tokenize(texts: list[str], *, add_special: bool = False, parse_special: bool = True) -> dict[str, Any]:
    """Token ids of each text."""
    here, api, answers = _current(), _api(), []
    for text in texts:
        data = text.encode()
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        count = api.llama_tokenize(here.vocab, data, len(data), ids, room, add_special, parse_special)
        if count < 0:
            raise RuntimeError(f"llama_tokenize wants room for {-count} tokens of {len(data)} bytes")
        answers.append(list(ids[:count]))
    return {"ids": answers}


def logits(ids: list[int], *, schedule: list[int] | None = None) -> dict[str, Any]:
    """Logits f32 [S, V] at every position of ``ids``, from an empty cache.

    Args:
        ids: S token ids.
        schedule: how many tokens go in together, in order; ``[S]`` (a whole prefill) when absent.
    """
    here = _current()
    _clear(here)
    parts = [_run(here, piece, every=True) for piece in pieces(ids, schedule)]
    return {"logits": np.concatenate(parts)}


def streams(ids: list[int], *, schedule: list[int] | None = None) -> dict[str, Any]:
    """Each watched value f32 [S, width] by its name, from an empty cache; arguments as those of :func:`logits`."""
    here = _current()
    if here.watched is None:
        raise RuntimeError("nothing is watched; load the model with watch")
    for parts in here.watched.values():
        parts.clear()
    logits(ids, schedule=schedule)
    width = _api().llama_model_n_embd(here.model)
    return {name: np.concatenate(parts).reshape(-1, width) for name, parts in here.watched.items() if parts}


def greedy(ids: list[int], count: int) -> dict[str, Any]:
    """``count`` greedy tokens after ``ids``, and the margin of each over the runner-up."""
    here = _current()
    _clear(here)
    row = _run(here, ids, every=False)[0]
    chosen, margins = [], []
    for _ in range(count):
        best, margin = best_token(row)
        chosen.append(best)
        margins.append(margin)
        row = _run(here, [best], every=False)[0]
    return {"ids": chosen, "margins": margins}


def measure(*, prompt: int = 0, gen: int = 0, depth: int = 0, seed: int = 0) -> dict[str, Any]:
    """Seconds for a prompt of ``prompt`` tokens and for each of ``gen`` single tokens after ``depth`` untimed ones.

    Tokens are random and nothing is sampled, as in llama-bench; logits of the last token of each call are computed.
    """
    here = _current()
    ids = np.random.default_rng(seed).integers(0, here.num_tokens, depth + prompt + gen).tolist()
    _clear(here)
    if depth:
        _run(here, ids[:depth], every=False, fetch=False)
    start = time.perf_counter()
    if prompt:
        _run(here, ids[depth : depth + prompt], every=False, fetch=False)
    prompt_s = time.perf_counter() - start
    token_s = []
    for token in ids[depth + prompt :]:
        start = time.perf_counter()
        _run(here, [token], every=False, fetch=False)
        token_s.append(time.perf_counter() - start)
    return {"prompt_s": prompt_s, "token_s": token_s}


def _run(here: _Loaded, ids: Sequence[int], *, every: bool, fetch: bool = True) -> F32:
    """Append ``ids`` to the cache; logits [len(ids) or 1, V], or an empty array without ``fetch``."""
    api, parts = _api(), []
    for start in range(0, len(ids), here.max_batch):
        piece = ids[start : start + here.max_batch]
        ends = start + len(piece) == len(ids)
        for at, token in enumerate(piece):
            here.batch.token[at] = token
            here.batch.pos[at] = here.position + at
            here.batch.n_seq_id[at] = 1
            here.batch.seq_id[at][0] = 0
            here.batch.logits[at] = every or (ends and at == len(piece) - 1)
        here.batch.n_tokens = len(piece)
        code = api.llama_decode(here.context, here.batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {len(piece)} tokens at position {here.position}: {_said()}")
        here.position += len(piece)
        if every or ends:
            address = api.llama_get_logits(here.context)  # waits for the computation
            if fetch:
                rows = len(piece) if every else 1
                parts.append(np.ctypeslib.as_array(address, (rows, here.num_tokens)).astype(np.float32))
    return np.concatenate(parts) if parts else np.empty((0, here.num_tokens), np.float32)


def _keeper(watched: dict[str, list[F32]]) -> Any:
    """A callback that copies the F32 values called as the keys of ``watched``, at the moment when each is computed."""
    paths = sorted(str(path) for path in _library_folder().iterdir() if "ggml-base" in path.name)
    if not paths:
        raise RuntimeError(f"its library ggml-base is not in {_library_folder()}, so values inside its graph cannot be read")
    ggml = ctypes.CDLL(paths[0])
    ggml.ggml_get_name.argtypes, ggml.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    ggml.ggml_nelements.argtypes, ggml.ggml_nelements.restype = [ctypes.c_void_p], ctypes.c_int64
    ggml.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    def keep(tensor: int, asked: bool, _: object) -> bool:
        name = ggml.ggml_get_name(tensor).decode("utf-8", "replace")
        if asked or name not in watched:
            return name in watched
        values = np.empty(ggml.ggml_nelements(tensor), np.float32)
        ggml.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
        watched[name].append(values)
        return True

    return keep


def _clear(here: _Loaded) -> None:
    api = _api()
    if not here.context:
        raise RuntimeError("only the vocabulary is loaded; load the model without vocab_only")
    api.llama_memory_clear(api.llama_get_memory(here.context), True)
    here.position = 0
    _log.clear()


def _current() -> _Loaded:
    if _loaded is None:
        raise RuntimeError("no model is loaded yet; call load first")
    return _loaded


def _said() -> str:
    text = " ".join(_log[-3:]) or "it gave no reason"
    _log.clear()
    return text


@functools.cache
def _library() -> Any:
    import llama_cpp

    global _keep_callback
    _keep_callback = llama_cpp.llama_log_callback(_on_log)
    llama_cpp.llama_log_set(_keep_callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def _library_folder() -> Path:
    return Path(_library().__file__).parent / "lib"


def _api() -> Any:
    return _library().llama_cpp


_keep_callback: Any = None  # the C side holds the pointer, so this side must hold the object


def _on_log(level: int, text: bytes | None, _: object) -> None:
    if level in (_LOG_WARN, _LOG_ERROR) and text:
        line = text.decode("utf-8", "replace").strip()
        _log.append(line)
        print(line, flush=True)


METHODS = {f.__name__: f for f in (version, load, unload, tokenize, logits, streams, greedy, measure)}
