"""onnxruntime-genai as a contestant, timed like llama-bench; runs inside a child process only.

``Child("deepthin.profiles.peer_genai_bench", peer="genai")`` serves METHODS. It is given a folder that holds
``genai_config.json``, used as it stands but for the number of threads. Tokens come from outside and nothing is sampled: each
goes in through ``append_tokens``, which runs the graph and keeps the cache as the folder's configuration asks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32


@dataclass(slots=True)
class _Loaded:
    model: Any
    context: int
    generator: Any = None
    before: tuple[int, ...] = ()  # what the generator's cache began with at the last call


_loaded: _Loaded | None = None


def version() -> dict[str, Any]:
    """Version of the package."""
    import onnxruntime_genai  # noqa: F401  (missing is said here, before anything is loaded)

    return {"version": package_version("onnxruntime-genai")}


def load(path: str, threads: int, context: int) -> dict[str, Any]:
    """Load the folder ``path`` (or that of the file ``path``) with room for ``context`` tokens, replacing the one before."""
    import onnxruntime_genai

    global _loaded
    _loaded = None
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    config = onnxruntime_genai.Config(str(folder))
    session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    _loaded = _Loaded(onnxruntime_genai.Model(config), context)
    return {}


def unload() -> dict[str, Any]:
    """Free the loaded model, if there is one."""
    global _loaded
    _loaded = None
    return {}


def prompt(ids: list[int], before: list[int]) -> dict[str, Any]:
    """Seconds to take in ``ids`` as one prompt, after ``before`` (untimed) into an empty cache."""
    generator, tokens = _start(before), _rows(ids)
    start = time.perf_counter()
    generator.append_tokens(tokens)
    return {"seconds": time.perf_counter() - start}


def decode(ids: list[int], before: list[int]) -> dict[str, Any]:
    """Seconds to take in ``ids`` one by one, after ``before`` (untimed) into an empty cache."""
    generator, singles = _start(before), [_rows([token]) for token in ids]
    start = time.perf_counter()
    for single in singles:
        generator.append_tokens(single)
    return {"seconds": time.perf_counter() - start}


def answer(prompt: list[int], ids: list[int], before: list[int]) -> dict[str, Any]:
    """Seconds to take in ``prompt`` as one, then ``ids`` one by one, after ``before`` (untimed) into an empty cache."""
    generator, tokens, singles = _start(before), _rows(prompt), [_rows([token]) for token in ids]
    start = time.perf_counter()
    generator.append_tokens(tokens)
    for single in singles:
        generator.append_tokens(single)
    return {"seconds": time.perf_counter() - start}


def logits(ids: list[int], before: list[int]) -> dict[str, Any]:
    """Logits f32 [S, V] after each of ``ids``, taken in one by one after ``before``, as :func:`decode` does."""
    generator = _start(before)
    rows: list[F32] = []
    for token in ids:
        generator.append_tokens(_rows([token]))
        rows.append(np.array(generator.get_output("logits"), np.float32)[0, -1])
    return {"logits": np.stack(rows)}


def _start(before: Sequence[int]) -> Any:
    """A generator with exactly ``before`` in its cache: the last one, taken back to there, where it began with the same."""
    import onnxruntime_genai

    if _loaded is None:
        raise RuntimeError("no model is loaded yet; call load first")
    wanted = tuple(before)
    if wanted and _loaded.generator is not None and wanted == _loaded.before:
        _loaded.generator.rewind_to(len(wanted))
        return _loaded.generator
    params = onnxruntime_genai.GeneratorParams(_loaded.model)
    params.set_search_options(max_length=_loaded.context + 1, do_sample=False)  # it stops one short of its length
    _loaded.generator = generator = onnxruntime_genai.Generator(_loaded.model, params)
    if wanted:
        generator.append_tokens(_rows(wanted))
    _loaded.before = wanted
    return generator


def _rows(ids: Sequence[int]) -> Any:
    return np.asarray([ids], np.int32)


METHODS = {f.__name__: f for f in (version, load, unload, prompt, decode, answer, logits)}
