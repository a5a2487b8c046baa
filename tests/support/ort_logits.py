"""Full logits of an ONNX decoder from onnxruntime, one intra-op thread, cache carried from chunk to chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from deepthin.engine.arrays import F32


def ort_session(path: Path) -> Any:
    """A session on the CPU with one thread and no log."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")  # else it rounds activations by itself
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def ort_logits(path: Path, chunks: Sequence[Sequence[int]]) -> F32:
    """Logits [S, V] of the tokens in ``chunks``, one run per chunk."""
    session = ort_session(path)
    caches = [node for node in session.get_inputs() if node.name.startswith("past_key_values.")]
    feeds = {node.name: np.zeros((1, node.shape[1], 0, node.shape[3]), np.float32) for node in caches}
    names = ["logits", *(node.name.replace("past_key_values", "present") for node in caches)]
    out, total = [], 0
    for chunk in chunks:
        total += len(chunk)
        inputs = {"input_ids": np.array([chunk], np.int64), "attention_mask": np.ones((1, total), np.int64)}
        logits, *present = session.run(names, {**inputs, **feeds})
        feeds = {node.name: values for node, values in zip(caches, present, strict=True)}
        out.append(logits[0])
    return np.concatenate(out)
