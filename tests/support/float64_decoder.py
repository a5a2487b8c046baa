"""A Llama decoder in float64 NumPy over canonical tensors: written apart from the product, so its exports have a judge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from deepthin.engine.arrays import F32, F64
from deepthin.engine.shape import Shape


def float64_logits(shape: Shape, weights: Mapping[str, F32], ids: Sequence[int]) -> F64:
    """Logits f64 [S, V] of the whole sequence, no cache."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
    count = len(ids)
    angles = np.arange(count)[:, None] * shape.rope_theta ** (-np.arange(0, width, 2) / width)[None, :]
    turn = np.exp(1j * angles)[:, None, :]

    def norm(x: F64, gamma: F64) -> F64:
        out: F64 = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + shape.rms_norm_eps) * gamma
        return out

    def rope(x: F64) -> F64:
        pairs = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = w["token_embd"][np.asarray(ids)]
    hidden_from_future = np.triu(np.full((count, count), -np.inf), 1)
    for layer in range(shape.num_layers):
        p = f"blk.{layer}."
        h = norm(x, w[p + "attn_norm"])
        q = rope((h @ w[p + "attn_q"].T).reshape(count, heads, width))
        k = rope((h @ w[p + "attn_k"].T).reshape(count, kv_heads, width))
        v = (h @ w[p + "attn_v"].T).reshape(count, kv_heads, width)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("shd,thd->hst", q, k) / math.sqrt(width) + hidden_from_future
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hst,thd->shd", scores / scores.sum(axis=-1, keepdims=True), v)
        x = x + mixed.reshape(count, -1) @ w[p + "attn_output"].T
        h = norm(x, w[p + "ffn_norm"])
        gate = h @ w[p + "ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "ffn_up"].T)) @ w[p + "ffn_down"].T
    head = w["token_embd"] if shape.tie_word_embeddings else w["output"]
    logits: F64 = norm(x, w["output_norm"]) @ head.T
    return logits
