"""Matrix-vector products over packed weights, the inner loop of decode.

Knows nothing of layers or files: arrays in, one output range written.

    W lanes = rows of a tile    C columns    B = C // 32 blocks per row    t tile index

Layout of a packed tensor (made by ``engine/pack.py``), rows padded with zeros to whole tiles:
    f32, f16, bf16   data   [t][column][row]
    q8_0             data   [t][block][group of 4 columns: 8][row][column in group: 4]   byte = q + Q8_BIAS
    q4_0, q4_1       data   [t][block][group: 4][row][4]   low nibble: column 4g+j, high nibble: column 16+4g+j
    scales           f16    [t][block][row] (q8_0, q4_0, q5_0), [t][block][d then m][row] (q4_1, q5_1)
    q5_0, q5_1       ``matvec_5bit.py``          q4_k, q5_k, q6_k   ``matvec_k.py``
So one vector holds the same columns of W rows, four broadcast activation bytes meet it, and a lane's sum is its row's:
no horizontal sums, and the order of every sum is the same on one thread or many.

The activation comes as f32 ``x`` [C] from ``x_at`` on and, for block formats, as i8 ``xq`` [C] from ``q_at`` with f32 ``xs``
[B] scales and i32 ``xn`` [B] sums of ``xq`` over each block (the correction for weights stored with an offset) from ``s_at``.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.matvec_5bit import matvec_q5_0, matvec_q5_1
from deepthin.engine.kernels.matvec_k import matvec_q4_k, matvec_q5_k, matvec_q6_k
from deepthin.engine.simd import (
    Q8_BIAS,
    W,
    add,
    add_i32,
    as_f32,
    broadcast4,
    dot4_nibbles,
    dot4_q8,
    fma,
    high_nibbles,
    load_bf16,
    load_bytes,
    load_f16,
    load_f32,
    low_nibbles,
    mul,
    splat,
    splat_i32,
    store_f32,
)

F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K = range(11)


@kernel
def matvec_f32(out, out_at, arena, data_at, cols, x, x_at, t0, t1):
    """out[out_at + r] = sum over c of W[r, c] * x[c] for the rows of tiles t0..t1-1; four partial sums per row."""
    for t in range(t0, t1):
        at = data_at + t * cols * W * 4
        a0 = splat(np.float32(0))
        a1, a2, a3 = a0, a0, a0
        for c in range(0, cols - 3, 4):
            p = at + c * W * 4
            a0 = fma(load_f32(arena, p), splat(x[x_at + c]), a0)
            a1 = fma(load_f32(arena, p + 4 * W), splat(x[x_at + c + 1]), a1)
            a2 = fma(load_f32(arena, p + 8 * W), splat(x[x_at + c + 2]), a2)
            a3 = fma(load_f32(arena, p + 12 * W), splat(x[x_at + c + 3]), a3)
        for c in range(cols - cols % 4, cols):
            a0 = fma(load_f32(arena, at + c * W * 4), splat(x[x_at + c]), a0)
        store_f32(out, out_at + t * W, add(add(a0, a1), add(a2, a3)))


@kernel
def matvec_f16(out, out_at, arena, data_at, cols, x, x_at, t0, t1):
    """As :func:`matvec_f32` for f16 weights."""
    for t in range(t0, t1):
        at = data_at + t * cols * W * 2
        a0 = splat(np.float32(0))
        a1, a2, a3 = a0, a0, a0
        for c in range(0, cols - 3, 4):
            p = at + c * W * 2
            a0 = fma(load_f16(arena, p), splat(x[x_at + c]), a0)
            a1 = fma(load_f16(arena, p + 2 * W), splat(x[x_at + c + 1]), a1)
            a2 = fma(load_f16(arena, p + 4 * W), splat(x[x_at + c + 2]), a2)
            a3 = fma(load_f16(arena, p + 6 * W), splat(x[x_at + c + 3]), a3)
        for c in range(cols - cols % 4, cols):
            a0 = fma(load_f16(arena, at + c * W * 2), splat(x[x_at + c]), a0)
        store_f32(out, out_at + t * W, add(add(a0, a1), add(a2, a3)))


@kernel
def matvec_bf16(out, out_at, arena, data_at, cols, x, x_at, t0, t1):
    """As :func:`matvec_f32` for bf16 weights."""
    for t in range(t0, t1):
        at = data_at + t * cols * W * 2
        a0 = splat(np.float32(0))
        a1, a2, a3 = a0, a0, a0
        for c in range(0, cols - 3, 4):
            p = at + c * W * 2
            a0 = fma(load_bf16(arena, p), splat(x[x_at + c]), a0)
            a1 = fma(load_bf16(arena, p + 2 * W), splat(x[x_at + c + 1]), a1)
            a2 = fma(load_bf16(arena, p + 4 * W), splat(x[x_at + c + 2]), a2)
            a3 = fma(load_bf16(arena, p + 6 * W), splat(x[x_at + c + 3]), a3)
        for c in range(cols - cols % 4, cols):
            a0 = fma(load_bf16(arena, at + c * W * 2), splat(x[x_at + c]), a0)
        store_f32(out, out_at + t * W, add(add(a0, a1), add(a2, a3)))


@kernel
def matvec_q8_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of q_w * q_x), exact in i32 within a block."""
    blocks = cols // 32
    for t in range(t0, t1):
        acc = splat(np.float32(0))
        for b in range(blocks):
            p = data_at + (t * blocks + b) * 32 * W
            s0 = splat_i32(np.int32(-Q8_BIAS * xn[s_at + b]))
            s1 = splat_i32(np.int32(0))
            for g in range(0, 8, 2):
                s0 = dot4_q8(s0, load_bytes(arena, p + g * 4 * W), broadcast4(xq, q_at + b * 32 + g * 4))
                s1 = dot4_q8(s1, load_bytes(arena, p + (g + 1) * 4 * W), broadcast4(xq, q_at + b * 32 + g * 4 + 4))
            d = mul(load_f16(arena, scale_at + (t * blocks + b) * 2 * W), splat(xs[s_at + b]))
            acc = fma(as_f32(add_i32(s0, s1)), d, acc)
        store_f32(out, out_at + t * W, acc)


@kernel
def matvec_q4_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """As :func:`matvec_q8_0` for nibbles with offset 8."""
    blocks = cols // 32
    for t in range(t0, t1):
        acc = splat(np.float32(0))
        for b in range(blocks):
            p = data_at + (t * blocks + b) * 16 * W
            s0 = splat_i32(np.int32(-8 * xn[s_at + b]))
            s1 = splat_i32(np.int32(0))
            for g in range(4):
                nibbles = load_bytes(arena, p + g * 4 * W)
                s0 = dot4_nibbles(s0, low_nibbles(nibbles), broadcast4(xq, q_at + b * 32 + g * 4))
                s1 = dot4_nibbles(s1, high_nibbles(nibbles), broadcast4(xq, q_at + b * 32 + 16 + g * 4))
            d = mul(load_f16(arena, scale_at + (t * blocks + b) * 2 * W), splat(xs[s_at + b]))
            acc = fma(as_f32(add_i32(s0, s1)), d, acc)
        store_f32(out, out_at + t * W, acc)


@kernel
def matvec_q4_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of q_w * q_x) + m_w * d_x * (sum of q_x)."""
    blocks = cols // 32
    for t in range(t0, t1):
        acc = splat(np.float32(0))
        low = splat(np.float32(0))
        for b in range(blocks):
            p = data_at + (t * blocks + b) * 16 * W
            s0 = splat_i32(np.int32(0))
            s1 = s0
            for g in range(4):
                nibbles = load_bytes(arena, p + g * 4 * W)
                s0 = dot4_nibbles(s0, low_nibbles(nibbles), broadcast4(xq, q_at + b * 32 + g * 4))
                s1 = dot4_nibbles(s1, high_nibbles(nibbles), broadcast4(xq, q_at + b * 32 + 16 + g * 4))
            q = scale_at + (t * blocks + b) * 4 * W
            acc = fma(as_f32(add_i32(s0, s1)), mul(load_f16(arena, q), splat(xs[s_at + b])), acc)
            low = fma(load_f16(arena, q + 2 * W), splat(np.float32(xs[s_at + b] * np.float32(xn[s_at + b]))), low)
        store_f32(out, out_at + t * W, add(acc, low))


@kernel
def matvec(out, out_at, arena, ops, i, x, x_at, xq, q_at, xs, xn, s_at, t0, t1):
    """Dispatch on ``ops[i]`` = i64 (format, data offset, scale offset, tiles, columns) once per call, outside every loop."""
    fmt, data_at, scale_at, cols = ops[i, 0], ops[i, 1], ops[i, 2], ops[i, 4]
    if fmt == Q4_0:
        matvec_q4_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q8_0:
        matvec_q8_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q4_1:
        matvec_q4_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q5_0:
        matvec_q5_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q5_1:
        matvec_q5_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q4_K:
        matvec_q4_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q5_K:
        matvec_q5_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q6_K:
        matvec_q6_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == F16:
        matvec_f16(out, out_at, arena, data_at, cols, x, x_at, t0, t1)
    elif fmt == BF16:
        matvec_bf16(out, out_at, arena, data_at, cols, x, x_at, t0, t1)
    else:
        matvec_f32(out, out_at, arena, data_at, cols, x, x_at, t0, t1)
