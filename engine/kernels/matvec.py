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
from deepthin.engine.kernels.blocks import (
    block_q4_0,
    block_q4_1,
    block_q8_0,
    four_tiles,
    low_1,
    store_four,
)
from deepthin.engine.kernels.matvec_5bit import matvec_q5_0, matvec_q5_1
from deepthin.engine.kernels.matvec_k import matvec_q4_k, matvec_q5_k, matvec_q6_k
from deepthin.engine.simd import W, add, broadcast_f32, fma, load_bf16, load_f16, load_f32, splat

F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K = range(11)


@kernel
def matvec_f32(out, out_at, arena, data_at, cols, x, x_at, t0, t1):
    """out[out_at + r] = sum over c of W[r, c] * x[c] for the rows of tiles t0..t1-1."""
    row = cols * 4 * W
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for k in range(cols):
            p, y = data_at + k * 4 * W, broadcast_f32(x, x_at + k)
            a = fma(load_f32(arena, p + t * row), y, a)
            b = fma(load_f32(arena, p + u * row), y, b)
            c = fma(load_f32(arena, p + v * row), y, c)
            d = fma(load_f32(arena, p + w * row), y, d)
        store_four(out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, a, b, c, d)


@kernel
def matvec_f16(out, out_at, arena, data_at, cols, x, x_at, t0, t1):
    """As :func:`matvec_f32` for f16 weights."""
    row = cols * 2 * W
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for k in range(cols):
            p, y = data_at + k * 2 * W, broadcast_f32(x, x_at + k)
            a = fma(load_f16(arena, p + t * row), y, a)
            b = fma(load_f16(arena, p + u * row), y, b)
            c = fma(load_f16(arena, p + v * row), y, c)
            d = fma(load_f16(arena, p + w * row), y, d)
        store_four(out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, a, b, c, d)


@kernel
def matvec_bf16(out, out_at, arena, data_at, cols, x, x_at, t0, t1):
    """As :func:`matvec_f32` for bf16 weights."""
    row = cols * 2 * W
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for k in range(cols):
            p, y = data_at + k * 2 * W, broadcast_f32(x, x_at + k)
            a = fma(load_bf16(arena, p + t * row), y, a)
            b = fma(load_bf16(arena, p + u * row), y, b)
            c = fma(load_bf16(arena, p + v * row), y, c)
            d = fma(load_bf16(arena, p + w * row), y, d)
        store_four(out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, a, b, c, d)


@kernel
def matvec_q8_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of q_w * q_x), exact in i32 within a block."""
    n = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for k in range(n):
            x, e = q_at + k * 32, s_at + k
            a = block_q8_0(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
            b = block_q8_0(b, arena, data_at, scale_at, u * n + k, xq, x, xs, xn, e)
            c = block_q8_0(c, arena, data_at, scale_at, v * n + k, xq, x, xs, xn, e)
            d = block_q8_0(d, arena, data_at, scale_at, w * n + k, xq, x, xs, xn, e)
        store_four(out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, a, b, c, d)


@kernel
def matvec_q4_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """As :func:`matvec_q8_0` for nibbles with offset 8."""
    n = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for k in range(n):
            x, e = q_at + k * 32, s_at + k
            a = block_q4_0(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
            b = block_q4_0(b, arena, data_at, scale_at, u * n + k, xq, x, xs, xn, e)
            c = block_q4_0(c, arena, data_at, scale_at, v * n + k, xq, x, xs, xn, e)
            d = block_q4_0(d, arena, data_at, scale_at, w * n + k, xq, x, xs, xn, e)
        store_four(out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, a, b, c, d)


@kernel
def matvec_q4_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of q_w * q_x) + m_w * d_x * (sum of q_x)."""
    n = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a = splat(np.float32(0))
        b, c, d, al, bl, cl, dl = a, a, a, a, a, a, a
        for k in range(n):
            x, e = q_at + k * 32, s_at + k
            a = block_q4_1(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
            b = block_q4_1(b, arena, data_at, scale_at, u * n + k, xq, x, xs, xn, e)
            c = block_q4_1(c, arena, data_at, scale_at, v * n + k, xq, x, xs, xn, e)
            d = block_q4_1(d, arena, data_at, scale_at, w * n + k, xq, x, xs, xn, e)
            al, bl = low_1(al, arena, scale_at, t * n + k, xs, xn, e), low_1(bl, arena, scale_at, u * n + k, xs, xn, e)
            cl, dl = low_1(cl, arena, scale_at, v * n + k, xs, xn, e), low_1(dl, arena, scale_at, w * n + k, xs, xn, e)
        store_four(
            out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, add(a, al), add(b, bl), add(c, cl), add(d, dl)
        )


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
