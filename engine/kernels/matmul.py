"""Matrix products for several tokens at once, the inner loop of prefill, over the same packed weights as ``matvec``.

    W lanes = rows of a tile    C columns    B = C // 32 blocks per row    M tokens    t tile index

A tile's weights are loaded and unpacked once for four tokens. Every sum runs in the same order as in ``matvec``, so a token's
result does not depend on whether it was prefilled or decoded, nor on the tokens beside it.

Activations are rows of strided buffers: f32 ``x`` [M, x_stride], i8 ``xq`` [M, q_stride], f32 ``xs`` and i32 ``xn``
[M, s_stride], each from an offset of its own. Token m's result goes to out[m * out_stride + row].
"""

from __future__ import annotations

from deepthin.engine.cpu import simd_target
from deepthin.engine.jit import kernel
from deepthin.engine.kernels.blocks import (
    apart,
    four,
    four_lows_1,
    four_q4_0,
    four_q4_1,
    four_q8_0,
    further,
    plus,
    store,
    zeros,
)
from deepthin.engine.kernels.matmul_5bit import tiles_q5_0, tiles_q5_1
from deepthin.engine.kernels.matmul_k import tiles_q4_k, tiles_q5_k, tiles_q6_k
from deepthin.engine.kernels.matvec import BF16, F16, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, matvec
from deepthin.engine.simd import W, allow_dots, broadcast_f32, fma, load_bf16, load_f16, load_f32, never_inline


@kernel
def tiles_q8_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q8_0``. Four tokens share each load."""
    allow_dots()
    blocks = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = apart(q_at + m * q_stride, q_stride), apart(s_at + m * s_stride, s_stride)
            acc = zeros()
            for k in range(blocks):
                n, x, e = four(t * blocks + k), further(x0, k * 32), further(e0, k)
                acc = four_q8_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e)
            store(out, apart(out_at + m * out_stride + t * W, out_stride), acc)


@kernel
def tiles_q4_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q8_0` for ``matvec_q4_0``."""
    allow_dots()
    blocks = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = apart(q_at + m * q_stride, q_stride), apart(s_at + m * s_stride, s_stride)
            acc = zeros()
            for k in range(blocks):
                n, x, e = four(t * blocks + k), further(x0, k * 32), further(e0, k)
                acc = four_q4_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e)
            store(out, apart(out_at + m * out_stride + t * W, out_stride), acc)


@kernel
def tiles_q4_1(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q8_0` for ``matvec_q4_1``."""
    allow_dots()
    blocks = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = apart(q_at + m * q_stride, q_stride), apart(s_at + m * s_stride, s_stride)
            acc = zeros()
            lows = zeros()
            for k in range(blocks):
                n, x, e = four(t * blocks + k), further(x0, k * 32), further(e0, k)
                acc = four_q4_1(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e)
                lows = four_lows_1(lows, arena, scale_at, n, xs, xn, e)
            store(out, apart(out_at + m * out_stride + t * W, out_stride), plus(acc, lows))


@kernel
def tiles_f32(
    out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_f32``. Three tiles meet four tokens at a time."""
    row = cols * 4 * W
    for t in range(t0, t1, 3):
        u, v = min(t + 1, t1 - 1), min(t + 2, t1 - 1)
        for m in range(0, whole, 4):
            y0, to = apart(x_at + m * x_stride, x_stride), out_at + m * out_stride
            a0, a1, a2, a3 = zeros()
            b0, b1, b2, b3 = zeros()
            c0, c1, c2, c3 = zeros()
            for k in range(cols):
                p, y = data_at + k * 4 * W, further(y0, k)
                f, g, h = load_f32(arena, p + t * row), load_f32(arena, p + u * row), load_f32(arena, p + v * row)
                s = broadcast_f32(x, y[0])
                a0, b0, c0 = fma(f, s, a0), fma(g, s, b0), fma(h, s, c0)
                s = broadcast_f32(x, y[1])
                a1, b1, c1 = fma(f, s, a1), fma(g, s, b1), fma(h, s, c1)
                s = broadcast_f32(x, y[2])
                a2, b2, c2 = fma(f, s, a2), fma(g, s, b2), fma(h, s, c2)
                s = broadcast_f32(x, y[3])
                a3, b3, c3 = fma(f, s, a3), fma(g, s, b3), fma(h, s, c3)
            store(out, apart(to + t * W, out_stride), (a0, a1, a2, a3))
            store(out, apart(to + u * W, out_stride), (b0, b1, b2, b3))
            store(out, apart(to + v * W, out_stride), (c0, c1, c2, c3))


@kernel
def tiles_f16(
    out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_f32` for f16 weights."""
    row = cols * 2 * W
    for t in range(t0, t1, 3):
        u, v = min(t + 1, t1 - 1), min(t + 2, t1 - 1)
        for m in range(0, whole, 4):
            y0, to = apart(x_at + m * x_stride, x_stride), out_at + m * out_stride
            a0, a1, a2, a3 = zeros()
            b0, b1, b2, b3 = zeros()
            c0, c1, c2, c3 = zeros()
            for k in range(cols):
                p, y = data_at + k * 2 * W, further(y0, k)
                f, g, h = load_f16(arena, p + t * row), load_f16(arena, p + u * row), load_f16(arena, p + v * row)
                s = broadcast_f32(x, y[0])
                a0, b0, c0 = fma(f, s, a0), fma(g, s, b0), fma(h, s, c0)
                s = broadcast_f32(x, y[1])
                a1, b1, c1 = fma(f, s, a1), fma(g, s, b1), fma(h, s, c1)
                s = broadcast_f32(x, y[2])
                a2, b2, c2 = fma(f, s, a2), fma(g, s, b2), fma(h, s, c2)
                s = broadcast_f32(x, y[3])
                a3, b3, c3 = fma(f, s, a3), fma(g, s, b3), fma(h, s, c3)
            store(out, apart(to + t * W, out_stride), (a0, a1, a2, a3))
            store(out, apart(to + u * W, out_stride), (b0, b1, b2, b3))
            store(out, apart(to + v * W, out_stride), (c0, c1, c2, c3))


@kernel
def tiles_bf16(
    out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_f32` for bf16 weights."""
    row = cols * 2 * W
    for t in range(t0, t1, 3):
        u, v = min(t + 1, t1 - 1), min(t + 2, t1 - 1)
        for m in range(0, whole, 4):
            y0, to = apart(x_at + m * x_stride, x_stride), out_at + m * out_stride
            a0, a1, a2, a3 = zeros()
            b0, b1, b2, b3 = zeros()
            c0, c1, c2, c3 = zeros()
            for k in range(cols):
                p, y = data_at + k * 2 * W, further(y0, k)
                f, g, h = load_bf16(arena, p + t * row), load_bf16(arena, p + u * row), load_bf16(arena, p + v * row)
                s = broadcast_f32(x, y[0])
                a0, b0, c0 = fma(f, s, a0), fma(g, s, b0), fma(h, s, c0)
                s = broadcast_f32(x, y[1])
                a1, b1, c1 = fma(f, s, a1), fma(g, s, b1), fma(h, s, c1)
                s = broadcast_f32(x, y[2])
                a2, b2, c2 = fma(f, s, a2), fma(g, s, b2), fma(h, s, c2)
                s = broadcast_f32(x, y[3])
                a3, b3, c3 = fma(f, s, a3), fma(g, s, b3), fma(h, s, c3)
            store(out, apart(to + t * W, out_stride), (a0, a1, a2, a3))
            store(out, apart(to + u * W, out_stride), (b0, b1, b2, b3))
            store(out, apart(to + v * W, out_stride), (c0, c1, c2, c3))


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
