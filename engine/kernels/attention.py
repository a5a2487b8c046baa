"""Attention of one query head over the cached keys and values of its group.

    E head dim    P cached positions    W lanes

Keys are cached in tiles of W positions, [tile][E][W], so a vector holds one component of W keys and scores come out as
vectors; values are [P][E padded to W]. Sums over positions run in order, whatever the number of threads.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    W,
    add,
    exp,
    fma,
    load_f32,
    maximum,
    mul,
    never_inline,
    reduce_add,
    reduce_max,
    splat,
    store_f32,
    sub,
)


@kernel
def attend(out, out_at, q, keys, keys_at, values, values_at, num_positions, head_dim, scores, row_at):
    """Out = softmax(q · keys) values.

    Shapes:
        out     f32, head_dim values written at ``out_at``
        q       f32 [E]            rotated, already divided by sqrt(E); [E padded] of scratch from ``row_at`` on
        scores  f32 [P padded]     scratch
    """
    never_inline()
    tiles = (num_positions + W - 1) // W
    for t in range(tiles):
        at = keys_at + t * head_dim * W
        a0 = splat(np.float32(0))
        a1 = a0
        for e in range(0, head_dim, 2):
            a0 = fma(load_f32(keys, at + e * W), splat(q[e]), a0)
            a1 = fma(load_f32(keys, at + (e + 1) * W), splat(q[e + 1]), a1)
        store_f32(scores, t * W, add(a0, a1))
    for i in range(num_positions, tiles * W):
        scores[i] = np.float32(-np.inf)

    top = load_f32(scores, 0)
    for t in range(1, tiles):
        top = maximum(top, load_f32(scores, t * W))
    peak = splat(reduce_max(top))
    total = splat(np.float32(0))
    for t in range(tiles):
        weight = exp(sub(load_f32(scores, t * W), peak))
        total = add(total, weight)
        store_f32(scores, t * W, weight)
    for i in range(num_positions, tiles * W):  # exp clamps at e^-87 instead of 0
        scores[i] = np.float32(0)
    inverse = splat(np.float32(1) / reduce_add(total))

    padded = (head_dim + W - 1) // W * W
    c = 0
    while c + 4 * W <= padded:
        a0 = splat(np.float32(0))
        a1, a2, a3 = a0, a0, a0
        for p in range(num_positions):
            weight = splat(scores[p])
            at = values_at + p * padded + c
            a0 = fma(weight, load_f32(values, at), a0)
            a1 = fma(weight, load_f32(values, at + W), a1)
            a2 = fma(weight, load_f32(values, at + 2 * W), a2)
            a3 = fma(weight, load_f32(values, at + 3 * W), a3)
        store_f32(q, row_at + c, mul(a0, inverse))
        store_f32(q, row_at + c + W, mul(a1, inverse))
        store_f32(q, row_at + c + 2 * W, mul(a2, inverse))
        store_f32(q, row_at + c + 3 * W, mul(a3, inverse))
        c += 4 * W
    while c < padded:
        a0 = splat(np.float32(0))
        for p in range(num_positions):
            a0 = fma(splat(scores[p]), load_f32(values, values_at + p * padded + c), a0)
        store_f32(q, row_at + c, mul(a0, inverse))
        c += W
    for e in range(head_dim):
        out[out_at + e] = q[row_at + e]
