"""onnxruntime as a contestant, timed like llama-bench; runs inside a child process only.

``Child("deepthin.profiles.peer_ort_bench", peer="onnxruntime")`` serves METHODS. It is given its fastest way: keys and values
stay in one bound buffer of full length that is both past and present, as onnxruntime-genai does, so no step copies the
cache. Tokens come from outside and nothing is sampled; the graph computes logits at every position of a prompt, which
llama.cpp and the engine do not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32

_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_PAST, _PRESENT = "past_key_values.", "present."


@dataclass(slots=True)
class _Loaded:
    session: Any
    binding: Any
    buffers: list[Any]  # hold the bound cache alive
    names: frozenset[str]
    vocab_size: int
    context: int
    position: int = 0
    before: tuple[int, ...] = ()  # what the cache began with at the last call


_loaded: _Loaded | None = None


def version() -> dict[str, Any]:
    """Version of the package and its build."""
    import onnxruntime

    return {"version": onnxruntime.__version__, "build": onnxruntime.get_build_info()}


def load(path: str, threads: int, context: int) -> dict[str, Any]:
    """Load an ONNX decoder with room for ``context`` cached tokens, replacing the one loaded before.

    Raises:
        ValueError: the graph is no decoder with a cache.
    """
    import onnxruntime

    global _loaded
    _loaded = None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = {item.name: item for item in session.get_inputs()}
    outputs = {item.name: item for item in session.get_outputs()}
    past = [name for name in inputs if name.startswith(_PAST)]
    missing = {"input_ids", "attention_mask"} - set(inputs) | {"logits"} - set(outputs)
    if missing or not past:
        raise ValueError(
            f"{path}: {min(missing) if missing else _PAST + 'N.key'!r} is missing, so this is no decoder with a cache"
        )
    binding = session.io_binding()
    buffers = []
    for name in past:
        item = inputs[name]
        room = np.zeros((1, item.shape[1], context, item.shape[3]), _DTYPES[item.type])
        value = onnxruntime.OrtValue.ortvalue_from_numpy(room)
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(_PRESENT + name.removeprefix(_PAST), value)
        buffers.append(value)
    _loaded = _Loaded(session, binding, buffers, frozenset(inputs), outputs["logits"].shape[2], context)
    return {"vocab_size": _loaded.vocab_size}


def unload() -> dict[str, Any]:
    """Free the loaded model, if there is one."""
    global _loaded
    _loaded = None
    return {}


def prompt(ids: list[int], before: list[int]) -> dict[str, Any]:
    """Seconds to take in ``ids`` as one prompt, after ``before`` (untimed) into an empty cache."""
    here = _start(before)
    start = time.perf_counter()
    _run(here, ids)
    return {"seconds": time.perf_counter() - start}


def decode(ids: list[int], before: list[int]) -> dict[str, Any]:
    """Seconds to take in ``ids`` one by one, after ``before`` (untimed) into an empty cache."""
    here = _start(before)
    start = time.perf_counter()
    for token in ids:
        _run(here, [token])
    return {"seconds": time.perf_counter() - start}


def answer(prompt: list[int], ids: list[int], before: list[int]) -> dict[str, Any]:
    """Seconds to take in ``prompt`` as one, then ``ids`` one by one, after ``before`` (untimed) into an empty cache."""
    here = _start(before)
    start = time.perf_counter()
    _run(here, prompt)
    for token in ids:
        _run(here, [token])
    return {"seconds": time.perf_counter() - start}


def logits(ids: list[int], before: list[int]) -> dict[str, Any]:
    """Logits f32 [S, V] after each of ``ids``, taken in one by one after ``before``, as :func:`decode` does."""
    here = _start(before)
    rows: list[F32] = [_run(here, [token]).numpy()[0, -1].astype(np.float32) for token in ids]
    return {"logits": np.stack(rows)}


def _start(before: Sequence[int]) -> _Loaded:
    """Leave exactly ``before`` in the cache; what came after it stays in the buffers, but the mask hides it."""
    if _loaded is None:
        raise RuntimeError("no model is loaded yet; call load first")
    wanted = tuple(before)
    if wanted and wanted == _loaded.before:
        _loaded.position = len(wanted)
        return _loaded
    _loaded.position = 0
    if wanted:
        _run(_loaded, wanted)
    _loaded.before = wanted
    return _loaded


def _run(here: _Loaded, ids: Sequence[int]) -> Any:
    """Append ``ids`` to the cache; logits [1, len(ids), V] as the runtime made them."""
    end = here.position + len(ids)
    if end > here.context:
        raise RuntimeError(f"{end} tokens do not fit the cache of {here.context}")
    binding = here.binding
    binding.bind_cpu_input("input_ids", np.asarray([ids], np.int64))
    binding.bind_cpu_input("attention_mask", np.ones((1, end), np.int64))
    if "position_ids" in here.names:
        binding.bind_cpu_input("position_ids", np.arange(here.position, end, dtype=np.int64)[None, :])
    binding.bind_output("logits")
    here.session.run_with_iobinding(binding)
    here.position = end
    return binding.get_outputs()[-1]  # in the order of binding, and the cache came first


METHODS = {f.__name__: f for f in (version, load, unload, prompt, decode, answer, logits)}
