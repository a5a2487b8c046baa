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
from deepthin.engine.kernels.matmul_5bit import tiles_q5_0, tiles_q5_1
from deepthin.engine.kernels.matmul_k import tiles_q4_k, tiles_q5_k, tiles_q6_k
from deepthin.engine.kernels.matvec import BF16, F16, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, matvec
from deepthin.engine.simd import (
    Q8_BIAS,
    W,
    add,
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
    never_inline,
    splat,
    splat_i32,
    store_f32,
)


@kernel
def tiles_q8_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q8_0``. Four tokens share each load."""
    blocks = cols // 32
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            to = out_at + m * out_stride + t * W
            x0 = q_at + m * q_stride
            x1, x2, x3 = x0 + q_stride, x0 + 2 * q_stride, x0 + 3 * q_stride
            a0, a1, a2, a3 = zero, zero, zero, zero
            for b in range(blocks):
                e0 = s_at + m * s_stride + b
                e1, e2, e3 = e0 + s_stride, e0 + 2 * s_stride, e0 + 3 * s_stride
                p = data_at + (t * blocks + b) * 32 * W
                i0 = splat_i32(np.int32(-Q8_BIAS * xn[e0]))
                i1 = splat_i32(np.int32(-Q8_BIAS * xn[e1]))
                i2 = splat_i32(np.int32(-Q8_BIAS * xn[e2]))
                i3 = splat_i32(np.int32(-Q8_BIAS * xn[e3]))
                for g in range(8):
                    codes = load_bytes(arena, p + g * 4 * W)
                    c = b * 32 + g * 4
                    i0 = dot4_q8(i0, codes, broadcast4(xq, x0 + c))
                    i1 = dot4_q8(i1, codes, broadcast4(xq, x1 + c))
                    i2 = dot4_q8(i2, codes, broadcast4(xq, x2 + c))
                    i3 = dot4_q8(i3, codes, broadcast4(xq, x3 + c))
                d = load_f16(arena, scale_at + (t * blocks + b) * 2 * W)
                a0 = fma(as_f32(i0), mul(d, splat(xs[e0])), a0)
                a1 = fma(as_f32(i1), mul(d, splat(xs[e1])), a1)
                a2 = fma(as_f32(i2), mul(d, splat(xs[e2])), a2)
                a3 = fma(as_f32(i3), mul(d, splat(xs[e3])), a3)
            store_f32(out, to, a0)
            store_f32(out, to + out_stride, a1)
            store_f32(out, to + 2 * out_stride, a2)
            store_f32(out, to + 3 * out_stride, a3)


@kernel
def tiles_q4_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q4_0``. Four tokens share each load."""
    blocks = cols // 32
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            to = out_at + m * out_stride + t * W
            x0 = q_at + m * q_stride
            x1, x2, x3 = x0 + q_stride, x0 + 2 * q_stride, x0 + 3 * q_stride
            a0, a1, a2, a3 = zero, zero, zero, zero
            for b in range(blocks):
                e0 = s_at + m * s_stride + b
                e1, e2, e3 = e0 + s_stride, e0 + 2 * s_stride, e0 + 3 * s_stride
                p = data_at + (t * blocks + b) * 16 * W
                i0 = splat_i32(np.int32(-8 * xn[e0]))
                i1 = splat_i32(np.int32(-8 * xn[e1]))
                i2 = splat_i32(np.int32(-8 * xn[e2]))
                i3 = splat_i32(np.int32(-8 * xn[e3]))
                for g in range(4):
                    codes = load_bytes(arena, p + g * 4 * W)
                    c = b * 32 + g * 4
                    half = low_nibbles(codes)
                    i0 = dot4_nibbles(i0, half, broadcast4(xq, x0 + c))
                    i1 = dot4_nibbles(i1, half, broadcast4(xq, x1 + c))
                    i2 = dot4_nibbles(i2, half, broadcast4(xq, x2 + c))
                    i3 = dot4_nibbles(i3, half, broadcast4(xq, x3 + c))
                    half = high_nibbles(codes)
                    i0 = dot4_nibbles(i0, half, broadcast4(xq, x0 + c + 16))
                    i1 = dot4_nibbles(i1, half, broadcast4(xq, x1 + c + 16))
                    i2 = dot4_nibbles(i2, half, broadcast4(xq, x2 + c + 16))
                    i3 = dot4_nibbles(i3, half, broadcast4(xq, x3 + c + 16))
                d = load_f16(arena, scale_at + (t * blocks + b) * 2 * W)
                a0 = fma(as_f32(i0), mul(d, splat(xs[e0])), a0)
                a1 = fma(as_f32(i1), mul(d, splat(xs[e1])), a1)
                a2 = fma(as_f32(i2), mul(d, splat(xs[e2])), a2)
                a3 = fma(as_f32(i3), mul(d, splat(xs[e3])), a3)
            store_f32(out, to, a0)
            store_f32(out, to + out_stride, a1)
            store_f32(out, to + 2 * out_stride, a2)
            store_f32(out, to + 3 * out_stride, a3)


@kernel
def tiles_q4_1(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q4_1``. Four tokens share each load."""
    blocks = cols // 32
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            to = out_at + m * out_stride + t * W
            x0 = q_at + m * q_stride
            x1, x2, x3 = x0 + q_stride, x0 + 2 * q_stride, x0 + 3 * q_stride
            a0, a1, a2, a3 = zero, zero, zero, zero
            r0, r1, r2, r3 = zero, zero, zero, zero
            for b in range(blocks):
                e0 = s_at + m * s_stride + b
                e1, e2, e3 = e0 + s_stride, e0 + 2 * s_stride, e0 + 3 * s_stride
                p = data_at + (t * blocks + b) * 16 * W
                i0 = splat_i32(np.int32(0))
                i1 = splat_i32(np.int32(0))
                i2 = splat_i32(np.int32(0))
                i3 = splat_i32(np.int32(0))
                for g in range(4):
                    codes = load_bytes(arena, p + g * 4 * W)
                    c = b * 32 + g * 4
                    half = low_nibbles(codes)
                    i0 = dot4_nibbles(i0, half, broadcast4(xq, x0 + c))
                    i1 = dot4_nibbles(i1, half, broadcast4(xq, x1 + c))
                    i2 = dot4_nibbles(i2, half, broadcast4(xq, x2 + c))
                    i3 = dot4_nibbles(i3, half, broadcast4(xq, x3 + c))
                    half = high_nibbles(codes)
                    i0 = dot4_nibbles(i0, half, broadcast4(xq, x0 + c + 16))
                    i1 = dot4_nibbles(i1, half, broadcast4(xq, x1 + c + 16))
                    i2 = dot4_nibbles(i2, half, broadcast4(xq, x2 + c + 16))
                    i3 = dot4_nibbles(i3, half, broadcast4(xq, x3 + c + 16))
                q = scale_at + (t * blocks + b) * 4 * W
                d, low = load_f16(arena, q), load_f16(arena, q + 2 * W)
                a0 = fma(as_f32(i0), mul(d, splat(xs[e0])), a0)
                a1 = fma(as_f32(i1), mul(d, splat(xs[e1])), a1)
                a2 = fma(as_f32(i2), mul(d, splat(xs[e2])), a2)
                a3 = fma(as_f32(i3), mul(d, splat(xs[e3])), a3)
                r0 = fma(low, splat(np.float32(xs[e0] * np.float32(xn[e0]))), r0)
                r1 = fma(low, splat(np.float32(xs[e1] * np.float32(xn[e1]))), r1)
                r2 = fma(low, splat(np.float32(xs[e2] * np.float32(xn[e2]))), r2)
                r3 = fma(low, splat(np.float32(xs[e3] * np.float32(xn[e3]))), r3)
            store_f32(out, to, add(a0, r0))
            store_f32(out, to + out_stride, add(a1, r1))
            store_f32(out, to + 2 * out_stride, add(a2, r2))
            store_f32(out, to + 3 * out_stride, add(a3, r3))


@kernel
def tiles_f32(
    out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_f32``. Two tokens share each load."""
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 2):
            to = out_at + m * out_stride + t * W
            x0 = x_at + m * x_stride
            x1 = x0 + x_stride
            a0, a1, a2, a3 = zero, zero, zero, zero
            b0, b1, b2, b3 = zero, zero, zero, zero
            at = data_at + t * cols * W * 4
            for c in range(0, cols - 3, 4):
                p = at + c * W * 4
                u, v = x0 + c, x1 + c
                w = load_f32(arena, p)
                a0 = fma(w, splat(x[u]), a0)
                b0 = fma(w, splat(x[v]), b0)
                w = load_f32(arena, p + 4 * W)
                a1 = fma(w, splat(x[u + 1]), a1)
                b1 = fma(w, splat(x[v + 1]), b1)
                w = load_f32(arena, p + 8 * W)
                a2 = fma(w, splat(x[u + 2]), a2)
                b2 = fma(w, splat(x[v + 2]), b2)
                w = load_f32(arena, p + 12 * W)
                a3 = fma(w, splat(x[u + 3]), a3)
                b3 = fma(w, splat(x[v + 3]), b3)
            for c in range(cols - cols % 4, cols):
                w = load_f32(arena, at + c * W * 4)
                a0 = fma(w, splat(x[x0 + c]), a0)
                b0 = fma(w, splat(x[x1 + c]), b0)
            store_f32(out, to, add(add(a0, a1), add(a2, a3)))
            store_f32(out, to + out_stride, add(add(b0, b1), add(b2, b3)))


@kernel
def tiles_f16(
    out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_f16``. Two tokens share each load."""
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 2):
            to = out_at + m * out_stride + t * W
            x0 = x_at + m * x_stride
            x1 = x0 + x_stride
            a0, a1, a2, a3 = zero, zero, zero, zero
            b0, b1, b2, b3 = zero, zero, zero, zero
            at = data_at + t * cols * W * 2
            for c in range(0, cols - 3, 4):
                p = at + c * W * 2
                u, v = x0 + c, x1 + c
                w = load_f16(arena, p)
                a0 = fma(w, splat(x[u]), a0)
                b0 = fma(w, splat(x[v]), b0)
                w = load_f16(arena, p + 2 * W)
                a1 = fma(w, splat(x[u + 1]), a1)
                b1 = fma(w, splat(x[v + 1]), b1)
                w = load_f16(arena, p + 4 * W)
                a2 = fma(w, splat(x[u + 2]), a2)
                b2 = fma(w, splat(x[v + 2]), b2)
                w = load_f16(arena, p + 6 * W)
                a3 = fma(w, splat(x[u + 3]), a3)
                b3 = fma(w, splat(x[v + 3]), b3)
            for c in range(cols - cols % 4, cols):
                w = load_f16(arena, at + c * W * 2)
                a0 = fma(w, splat(x[x0 + c]), a0)
                b0 = fma(w, splat(x[x1 + c]), b0)
            store_f32(out, to, add(add(a0, a1), add(a2, a3)))
            store_f32(out, to + out_stride, add(add(b0, b1), add(b2, b3)))


@kernel
def tiles_bf16(
    out, out_at, out_stride, arena, data_at, cols, x, x_at, x_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_bf16``. Two tokens share each load."""
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 2):
            to = out_at + m * out_stride + t * W
            x0 = x_at + m * x_stride
            x1 = x0 + x_stride
            a0, a1, a2, a3 = zero, zero, zero, zero
            b0, b1, b2, b3 = zero, zero, zero, zero
            at = data_at + t * cols * W * 2
            for c in range(0, cols - 3, 4):
                p = at + c * W * 2
                u, v = x0 + c, x1 + c
                w = load_bf16(arena, p)
                a0 = fma(w, splat(x[u]), a0)
                b0 = fma(w, splat(x[v]), b0)
                w = load_bf16(arena, p + 2 * W)
                a1 = fma(w, splat(x[u + 1]), a1)
                b1 = fma(w, splat(x[v + 1]), b1)
                w = load_bf16(arena, p + 4 * W)
                a2 = fma(w, splat(x[u + 2]), a2)
                b2 = fma(w, splat(x[v + 2]), b2)
                w = load_bf16(arena, p + 6 * W)
                a3 = fma(w, splat(x[u + 3]), a3)
                b3 = fma(w, splat(x[v + 3]), b3)
            for c in range(cols - cols % 4, cols):
                w = load_bf16(arena, at + c * W * 2)
                a0 = fma(w, splat(x[x0 + c]), a0)
                b0 = fma(w, splat(x[x1 + c]), b0)
            store_f32(out, to, add(add(a0, a1), add(a2, a3)))
            store_f32(out, to + out_stride, add(add(b0, b1), add(b2, b3)))


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
    whole = tokens - tokens % (4 if fmt >= Q8_0 else 2)
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
