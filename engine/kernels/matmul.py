"""Matrix products for several tokens at once, the inner loop of prefill, over the same packed weights as ``matvec``.

    W lanes = rows of a tile    C columns    B = C // 32 blocks per row    M tokens    t tile index

A tile's weights are loaded and unpacked once for four tokens. Every sum runs in the same order as in ``matvec``, so a token's
result does not depend on whether it was prefilled or decoded, nor on the tokens beside it.

Activations are rows of strided buffers: f32 ``x`` [M, x_stride], i8 ``xq`` [M, q_stride], f32 ``xs`` and i32 ``xn``
[M, s_stride], each from an offset of its own. Token m's result goes to out[m * out_stride + row].
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.cpu import simd_target
from deepthin.engine.jit import kernel
from deepthin.engine.kernels.blocks import block_q4_0, block_q4_1, block_q8_0, low_1, store_tokens
from deepthin.engine.kernels.matmul_5bit import tiles_q5_0, tiles_q5_1
from deepthin.engine.kernels.matmul_k import tiles_q4_k, tiles_q5_k, tiles_q6_k
from deepthin.engine.kernels.matvec import BF16, F16, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, matvec
from deepthin.engine.simd import (
    W,
    add,
    broadcast_f32,
    fma,
    load_bf16,
    load_f16,
    load_f32,
    never_inline,
    splat,
)


@kernel
def tiles_q8_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q8_0``. Four tokens share each load."""
    n = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = q_at + m * q_stride, s_at + m * s_stride
            a = splat(np.float32(0))
            b, c, d = a, a, a
            for k in range(n):
                x, e = x0 + k * 32, e0 + k
                a = block_q8_0(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                b = block_q8_0(b, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                c = block_q8_0(c, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                d = block_q8_0(d, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
            store_tokens(out, out_at + m * out_stride + t * W, out_stride, a, b, c, d)


@kernel
def tiles_q4_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q8_0` for ``matvec_q4_0``."""
    n = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = q_at + m * q_stride, s_at + m * s_stride
            a = splat(np.float32(0))
            b, c, d = a, a, a
            for k in range(n):
                x, e = x0 + k * 32, e0 + k
                a = block_q4_0(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                b = block_q4_0(b, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                c = block_q4_0(c, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                d = block_q4_0(d, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
            store_tokens(out, out_at + m * out_stride + t * W, out_stride, a, b, c, d)


@kernel
def tiles_q4_1(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q8_0` for ``matvec_q4_1``."""
    n = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = q_at + m * q_stride, s_at + m * s_stride
            a = splat(np.float32(0))
            b, c, d, al, bl, cl, dl = a, a, a, a, a, a, a
            for k in range(n):
                x, e = x0 + k * 32, e0 + k
                a = block_q4_1(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                al = low_1(al, arena, scale_at, t * n + k, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                b = block_q4_1(b, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                bl = low_1(bl, arena, scale_at, t * n + k, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                c = block_q4_1(c, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                cl = low_1(cl, arena, scale_at, t * n + k, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                d = block_q4_1(d, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                dl = low_1(dl, arena, scale_at, t * n + k, xs, xn, e)
            store_tokens(out, out_at + m * out_stride + t * W, out_stride, add(a, al), add(b, bl), add(c, cl), add(d, dl))


@kernel
def tiles_f32(
    out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_f32``. Three tiles meet four tokens at a time."""
    row = cols * 4 * W
    zero = splat(np.float32(0))
    for t in range(t0, t1, 3):
        u, v = min(t + 1, t1 - 1), min(t + 2, t1 - 1)
        for m in range(0, whole, 4):
            y0 = x_at + m * x_stride
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            c0, c1, c2, c3 = zero, zero, zero, zero
            for k in range(cols):
                p, y = data_at + k * 4 * W, y0 + k
                f, g, h = load_f32(arena, p + t * row), load_f32(arena, p + u * row), load_f32(arena, p + v * row)
                s = broadcast_f32(x, y)
                a0, b0, c0 = fma(f, s, a0), fma(g, s, b0), fma(h, s, c0)
                s = broadcast_f32(x, y + x_stride)
                a1, b1, c1 = fma(f, s, a1), fma(g, s, b1), fma(h, s, c1)
                s = broadcast_f32(x, y + 2 * x_stride)
                a2, b2, c2 = fma(f, s, a2), fma(g, s, b2), fma(h, s, c2)
                s = broadcast_f32(x, y + 3 * x_stride)
                a3, b3, c3 = fma(f, s, a3), fma(g, s, b3), fma(h, s, c3)
            to = out_at + m * out_stride
            store_tokens(out, to + t * W, out_stride, a0, a1, a2, a3)
            store_tokens(out, to + u * W, out_stride, b0, b1, b2, b3)
            store_tokens(out, to + v * W, out_stride, c0, c1, c2, c3)


@kernel
def tiles_f16(
    out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_f32` for f16 weights."""
    row = cols * 2 * W
    zero = splat(np.float32(0))
    for t in range(t0, t1, 3):
        u, v = min(t + 1, t1 - 1), min(t + 2, t1 - 1)
        for m in range(0, whole, 4):
            y0 = x_at + m * x_stride
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            c0, c1, c2, c3 = zero, zero, zero, zero
            for k in range(cols):
                p, y = data_at + k * 2 * W, y0 + k
                f, g, h = load_f16(arena, p + t * row), load_f16(arena, p + u * row), load_f16(arena, p + v * row)
                s = broadcast_f32(x, y)
                a0, b0, c0 = fma(f, s, a0), fma(g, s, b0), fma(h, s, c0)
                s = broadcast_f32(x, y + x_stride)
                a1, b1, c1 = fma(f, s, a1), fma(g, s, b1), fma(h, s, c1)
                s = broadcast_f32(x, y + 2 * x_stride)
                a2, b2, c2 = fma(f, s, a2), fma(g, s, b2), fma(h, s, c2)
                s = broadcast_f32(x, y + 3 * x_stride)
                a3, b3, c3 = fma(f, s, a3), fma(g, s, b3), fma(h, s, c3)
            to = out_at + m * out_stride
            store_tokens(out, to + t * W, out_stride, a0, a1, a2, a3)
            store_tokens(out, to + u * W, out_stride, b0, b1, b2, b3)
            store_tokens(out, to + v * W, out_stride, c0, c1, c2, c3)


@kernel
def tiles_bf16(
    out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_f32` for bf16 weights."""
    row = cols * 2 * W
    zero = splat(np.float32(0))
    for t in range(t0, t1, 3):
        u, v = min(t + 1, t1 - 1), min(t + 2, t1 - 1)
        for m in range(0, whole, 4):
            y0 = x_at + m * x_stride
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            c0, c1, c2, c3 = zero, zero, zero, zero
            for k in range(cols):
                p, y = data_at + k * 2 * W, y0 + k
                f, g, h = load_bf16(arena, p + t * row), load_bf16(arena, p + u * row), load_bf16(arena, p + v * row)
                s = broadcast_f32(x, y)
                a0, b0, c0 = fma(f, s, a0), fma(g, s, b0), fma(h, s, c0)
                s = broadcast_f32(x, y + x_stride)
                a1, b1, c1 = fma(f, s, a1), fma(g, s, b1), fma(h, s, c1)
                s = broadcast_f32(x, y + 2 * x_stride)
                a2, b2, c2 = fma(f, s, a2), fma(g, s, b2), fma(h, s, c2)
                s = broadcast_f32(x, y + 3 * x_stride)
                a3, b3, c3 = fma(f, s, a3), fma(g, s, b3), fma(h, s, c3)
            to = out_at + m * out_stride
            store_tokens(out, to + t * W, out_stride, a0, a1, a2, a3)
            store_tokens(out, to + u * W, out_stride, b0, b1, b2, b3)
            store_tokens(out, to + v * W, out_stride, c0, c1, c2, c3)


if simd_target() == "neon_i8mm":
    from deepthin.engine.kernels.matmul_i8mm import tiles_q4_0, tiles_q4_1, tiles_q5_0, tiles_q5_1, tiles_q8_0
    from deepthin.engine.kernels.matmul_k_i8mm import tiles_q4_k, tiles_q5_k, tiles_q6_k


@kernel
def matmul(
    out, out_at, out_stride, arena, ops, i, x, x_at, x_stride, xq, q_at, q_stride, xs, xn, s_at, s_stride, tokens, t0, t1
):  # fmt: skip
    """Rows of tiles t0..t1-1 of product ``ops[i]`` for ``tokens`` tokens; those beyond whole groups go through ``matvec``.

    Tiles are the outer loop, so that a tile's weights stay in the first cache while all tokens pass over it.
    """
    never_inline()
    fmt, data_at, scale_at, cols = ops[i, 0], ops[i, 1], ops[i, 2], ops[i, 4]
    whole = tokens - tokens % 4
    if whole > 0:
        if fmt == Q4_0:
            tiles_q4_0(
                out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride,
                xs, xn, s_at, s_stride, whole, t0, t1,
            )  # fmt: skip
        elif fmt == Q8_0:
            tiles_q8_0(
                out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride,
                xs, xn, s_at, s_stride, whole, t0, t1,
            )  # fmt: skip
        elif fmt == Q4_1:
            tiles_q4_1(
                out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride,
                xs, xn, s_at, s_stride, whole, t0, t1,
            )  # fmt: skip
        elif fmt == Q5_0:
            tiles_q5_0(
                out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride,
                xs, xn, s_at, s_stride, whole, t0, t1,
            )  # fmt: skip
        elif fmt == Q5_1:
            tiles_q5_1(
                out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride,
                xs, xn, s_at, s_stride, whole, t0, t1,
            )  # fmt: skip
        elif fmt == Q4_K:
            tiles_q4_k(
                out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride,
                xs, xn, s_at, s_stride, whole, t0, t1,
            )  # fmt: skip
        elif fmt == Q5_K:
            tiles_q5_k(
                out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride,
                xs, xn, s_at, s_stride, whole, t0, t1,
            )  # fmt: skip
        elif fmt == Q6_K:
            tiles_q6_k(
                out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride,
                xs, xn, s_at, s_stride, whole, t0, t1,
            )  # fmt: skip
        elif fmt == F16:
            tiles_f16(out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1)
        elif fmt == BF16:
            tiles_bf16(out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1)
        else:
            tiles_f32(out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1)
    for m in range(whole, tokens):
        at, q, e = x_at + m * x_stride, q_at + m * q_stride, s_at + m * s_stride
        matvec(out, out_at + m * out_stride, arena, ops, i, x, at, xq, q, xs, xn, e, t0, t1)
