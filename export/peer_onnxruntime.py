"""onnxruntime as a peer, on the CPU provider; runs inside a child process only.

``Child("deepthin.export.peer_onnxruntime", peer="onnxruntime")`` serves METHODS. One model is loaded at a time.

Graph inputs: ``input_ids`` and ``attention_mask`` (int64 [1, S] and [1, past + S]), ``past_key_values.{i}.key/.value``
([1, kv_heads, past, head_dim]). Outputs: ``logits`` [1, S, V] and ``present.{i}.key/.value``, which become the next past.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.export.schedule import best_token, pieces

_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_PAST, _PRESENT = "past_key_values.", "present."


@dataclass(slots=True)
class _Loaded:
    session: Any
    empty: dict[str, Any]  # the past of an empty cache, by input name
    presents: list[str]
    vocab_size: int
    watched: list[str] = field(default_factory=list)
    past: dict[str, Any] = field(default_factory=dict)
    position: int = 0


_loaded: _Loaded | None = None


def version() -> dict[str, Any]:
    """Version of the package and the providers it has; only the CPU one is used."""
    import onnxruntime

    return {"version": onnxruntime.__version__, "providers": list(onnxruntime.get_available_providers())}


def load(
    path: str,
    *,
    threads: int = 1,
    settings: dict[str, str] | None = None,
    level: int | None = None,
    watch: list[str] | None = None,
) -> dict[str, Any]:
    """Load an ONNX file, replacing the one loaded before.

    Args:
        path: the file.
        threads: threads inside one operator; operators run one after another.
        settings: session config entries.
        level: accuracy level of all quantised products, in place of the file's: 0 computes in f32, 4 rounds activations.
        watch: values inside the graph that :func:`streams` gives; those that it does not have are passed over.

    Raises:
        ValueError: the graph lacks the inputs of a decoder with a cache.
    """
    import onnxruntime

    global _loaded
    _loaded = None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # errors
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")  # as exact as MatMulNBits at level 0
    if level is not None:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(level))
    for key, value in (settings or {}).items():
        options.add_session_config_entry(key, value)
    model: str | bytes = str(path)
    watched: list[str] = []
    if level is not None or watch:
        model, watched = _altered(Path(path), level, watch or [])
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(Path(path).parent))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    inputs = {item.name: item for item in session.get_inputs()}
    outputs = {item.name: item for item in session.get_outputs()}
    known = {"input_ids", "attention_mask", *(name for name in inputs if name.startswith(_PAST))}
    wrong = sorted(set(inputs) ^ known) or sorted({"logits"} - set(outputs))
    if wrong:
        raise ValueError(f"{path}: input or output {wrong[0]!r} is missing or unexpected in a decoder with a cache")
    empty = {}
    for name, item in inputs.items():
        if name.startswith(_PAST):
            heads, width = item.shape[1], item.shape[3]
            if not isinstance(heads, int) or not isinstance(width, int):
                raise ValueError(f"{path}: input {name!r} has shape {item.shape}, but heads and head_dim must be numbers")
            empty[name] = np.zeros((1, heads, 0, width), _DTYPES[item.type])
    presents = [_PRESENT + name.removeprefix(_PAST) for name in empty]
    if not empty or set(presents) - set(outputs):
        raise ValueError(f"{path}: every input {_PAST}N.key/.value needs an output {_PRESENT}N.key/.value")
    _loaded = _Loaded(session, empty, presents, outputs["logits"].shape[2], watched)
    return {"vocab_size": _loaded.vocab_size, "num_layers": len(empty) // 2, "threads": threads}


def unload() -> dict[str, Any]:
    """Free the loaded model, if there is one."""
    global _loaded
    _loaded = None
    return {}


def logits(ids: list[int], *, schedule: list[int] | None = None) -> dict[str, Any]:
    """Logits f32 [S, V] at every position of ``ids``, from an empty cache.

    Args:
        ids: S token ids.
        schedule: how many tokens go in together, in order; ``[S]`` (a whole prefill) when absent.
    """
    here = _current()
    _clear(here)
    return {"logits": np.concatenate([_run(here, piece) for piece in pieces(ids, schedule)])}


def streams(ids: list[int], *, schedule: list[int] | None = None) -> dict[str, Any]:
    """Each watched value f32 [S, width] by its name, from an empty cache; arguments as those of :func:`logits`."""
    here = _current()
    _clear(here)
    parts: dict[str, list[F32]] = {name: [] for name in here.watched}
    for piece in pieces(ids, schedule):
        for name, value in zip(here.watched, _step(here, piece, here.watched), strict=True):
            parts[name].append(value[0].astype(np.float32, copy=False))
    return {name: np.concatenate(held) for name, held in parts.items()}


def greedy(ids: list[int], count: int) -> dict[str, Any]:
    """``count`` greedy tokens after ``ids``, and the margin of each over the runner-up."""
    here = _current()
    _clear(here)
    row = _run(here, ids)[-1]
    chosen, margins = [], []
    for _ in range(count):
        best, margin = best_token(row)
        chosen.append(best)
        margins.append(margin)
        row = _run(here, [best])[-1]
    return {"ids": chosen, "margins": margins}


def measure(*, prompt: int = 0, gen: int = 0, depth: int = 0, seed: int = 0) -> dict[str, Any]:
    """Seconds for a prompt of ``prompt`` tokens and for each of ``gen`` single tokens after ``depth`` untimed ones.

    Tokens are random and nothing is sampled; the graph computes logits at every position of the prompt.
    """
    here = _current()
    ids = np.random.default_rng(seed).integers(0, here.vocab_size, depth + prompt + gen).tolist()
    _clear(here)
    if depth:
        _run(here, ids[:depth])
    start = time.perf_counter()
    if prompt:
        _run(here, ids[depth : depth + prompt])
    prompt_s = time.perf_counter() - start
    token_s = []
    for token in ids[depth + prompt :]:
        start = time.perf_counter()
        _run(here, [token])
        token_s.append(time.perf_counter() - start)
    return {"prompt_s": prompt_s, "token_s": token_s}


def _run(here: _Loaded, ids: Sequence[int]) -> F32:
    """Append ``ids`` to the cache; logits [len(ids), V]."""
    rows: F32 = _step(here, ids, ["logits"])[0][0].astype(np.float32, copy=False)
    return rows


def _step(here: _Loaded, ids: Sequence[int], wanted: Sequence[str]) -> list[Any]:
    """Append ``ids`` to the cache; the outputs ``wanted`` [1, len(ids), ...]."""
    here.position += len(ids)
    feeds = {
        "input_ids": np.asarray([ids], np.int64),
        "attention_mask": np.ones((1, here.position), np.int64),
        **here.past,
    }
    values = here.session.run([*wanted, *here.presents], feeds)
    here.past = dict(zip(here.empty, values[len(wanted) :], strict=True))
    return list(values[: len(wanted)])


def _altered(path: Path, level: int | None, watch: Sequence[str]) -> tuple[bytes, list[str]]:
    """The graph at ``path`` with another accuracy level and more outputs, and which of ``watch`` it has; nothing is written."""
    import onnx

    proto = onnx.load(path, load_external_data=False)
    made = {name for node in proto.graph.node for name in node.output}
    watched = [name for name in watch if name in made]
    for name in watched:
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    for node in proto.graph.node:
        if level is not None and node.op_type == "MatMulNBits":
            kept = [item for item in node.attribute if item.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("accuracy_level", level)])
    return proto.SerializeToString(), watched


def _clear(here: _Loaded) -> None:
    here.past, here.position = dict(here.empty), 0


def _current() -> _Loaded:
    if _loaded is None:
        raise RuntimeError("no model is loaded yet; call load first")
    return _loaded


METHODS = {f.__name__: f for f in (version, load, unload, logits, streams, greedy, measure)}
