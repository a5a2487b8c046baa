"""onnxruntime-genai as a peer, on the CPU; runs inside a child process only.

``Child("deepthin.export.peer_genai", peer="genai")`` serves METHODS. One model is loaded at a time. It is given the folder that
holds ``genai_config.json``, or a file beside that; the configuration is used as it stands, but for the number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.export.schedule import best_token, pieces


@dataclass(slots=True)
class _Loaded:
    model: Any
    tokenizer: Any = None


_loaded: _Loaded | None = None


def version() -> dict[str, Any]:
    """Version of the package."""
    import onnxruntime_genai

    return {"version": package_version("onnxruntime-genai"), "cuda": bool(onnxruntime_genai.is_cuda_available())}


def load(path: str, *, threads: int = 1) -> dict[str, Any]:
    """Load the folder ``path`` (or the folder of the file ``path``), replacing the one loaded before."""
    import onnxruntime_genai

    global _loaded
    _loaded = None
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    config = onnxruntime_genai.Config(str(folder))
    session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    _loaded = _Loaded(onnxruntime_genai.Model(config))
    return {"threads": threads}


def unload() -> dict[str, Any]:
    """Free the loaded model, if there is one."""
    global _loaded
    _loaded = None
    return {}


def tokenize(texts: list[str]) -> dict[str, Any]:
    """Token ids of each text, without a beginning-of-sequence token of its own making."""
    import onnxruntime_genai

    here = _current()
    here.tokenizer = here.tokenizer or onnxruntime_genai.Tokenizer(here.model)
    return {"ids": [[int(token) for token in here.tokenizer.encode(text)] for text in texts]}


def logits(ids: list[int], *, schedule: list[int] | None = None) -> dict[str, Any]:
    """Logits f32 [S, V] at every position of ``ids``, from an empty cache.

    Args:
        ids: S token ids.
        schedule: how many tokens go in together, in order; ``[S]`` (a whole prefill) when absent.
    """
    generator = _generator(len(ids) + 1)
    return {"logits": np.concatenate([_append(generator, piece) for piece in pieces(ids, schedule)])}


def greedy(ids: list[int], count: int) -> dict[str, Any]:
    """``count`` greedy tokens after ``ids``, and the margin of each over the runner-up."""
    generator = _generator(len(ids) + count)
    row = _append(generator, ids)[-1]
    chosen, margins = [], []
    for _ in range(count):
        best, margin = best_token(row)
        chosen.append(best)
        margins.append(margin)
        if len(chosen) < count:
            row = _append(generator, [best])[-1]
    return {"ids": chosen, "margins": margins}


def _generator(length: int) -> Any:
    import onnxruntime_genai

    model = _current().model
    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(max_length=length, do_sample=False)
    return onnxruntime_genai.Generator(model, params)


def _append(generator: Any, ids: Sequence[int]) -> F32:
    """Take in ``ids``; logits [len(ids), V]."""
    generator.append_tokens(np.asarray([ids], np.int32))
    rows: F32 = np.array(generator.get_output("logits"), np.float32)[0]
    return rows[-len(ids) :]


def _current() -> _Loaded:
    if _loaded is None:
        raise RuntimeError("no model is loaded yet; call load first")
    return _loaded


METHODS = {f.__name__: f for f in (version, load, unload, tokenize, logits, greedy)}
