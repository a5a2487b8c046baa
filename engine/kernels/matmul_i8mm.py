"""The block formats' products for several tokens on CPUs with ``smmla``; ``matmul`` takes these in place of its own there.

Same arguments, same packed weights and, since sums within a block are exact integers, the same bits as ``matvec``. Each load of
weights serves four tokens, two by two.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    W,
    add,
    as_f32,
    fma,
    high_nibbles,
    load_bytes,
    load_f16,
    low_nibbles,
    mul,
    raised,
    splat,
    store_f32,
    with_high_bits,
)
from deepthin.engine.simd.neon_i8mm import dot8_pair, load_pair, of_first, of_second, splat_pair


@kernel
def tiles_q8_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q8_0``."""
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
                i01 = splat_pair(np.int32(0), np.int32(0))
                i23 = i01
                for g in range(0, 8, 2):
                    c = b * 32 + g * 4
                    left, right = load_bytes(arena, p + g * 4 * W), load_bytes(arena, p + (g + 1) * 4 * W)
                    i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c, x1 + c))
                    i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c, x3 + c))
                d = load_f16(arena, scale_at + (t * blocks + b) * 2 * W)
                a0 = fma(as_f32(of_first(i01)), mul(d, splat(xs[e0])), a0)
                a1 = fma(as_f32(of_second(i01)), mul(d, splat(xs[e1])), a1)
                a2 = fma(as_f32(of_first(i23)), mul(d, splat(xs[e2])), a2)
                a3 = fma(as_f32(of_second(i23)), mul(d, splat(xs[e3])), a3)
            store_f32(out, to, a0)
            store_f32(out, to + out_stride, a1)
            store_f32(out, to + 2 * out_stride, a2)
            store_f32(out, to + 3 * out_stride, a3)


@kernel
def tiles_q4_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q4_0``."""
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
                i01 = splat_pair(np.int32(-8 * xn[e0]), np.int32(-8 * xn[e1]))
                i23 = splat_pair(np.int32(-8 * xn[e2]), np.int32(-8 * xn[e3]))
                for g in range(0, 4, 2):
                    c = b * 32 + g * 4
                    n0, n1 = load_bytes(arena, p + g * 4 * W), load_bytes(arena, p + (g + 1) * 4 * W)
                    left, right = low_nibbles(n0), low_nibbles(n1)
                    i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c, x1 + c))
                    i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c, x3 + c))
                    left, right = high_nibbles(n0), high_nibbles(n1)
                    i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c + 16, x1 + c + 16))
                    i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c + 16, x3 + c + 16))
                d = load_f16(arena, scale_at + (t * blocks + b) * 2 * W)
                a0 = fma(as_f32(of_first(i01)), mul(d, splat(xs[e0])), a0)
                a1 = fma(as_f32(of_second(i01)), mul(d, splat(xs[e1])), a1)
                a2 = fma(as_f32(of_first(i23)), mul(d, splat(xs[e2])), a2)
                a3 = fma(as_f32(of_second(i23)), mul(d, splat(xs[e3])), a3)
            store_f32(out, to, a0)
            store_f32(out, to + out_stride, a1)
            store_f32(out, to + 2 * out_stride, a2)
            store_f32(out, to + 3 * out_stride, a3)


@kernel
def tiles_q4_1(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q4_1``."""
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
                i01 = splat_pair(np.int32(0), np.int32(0))
                i23 = i01
                for g in range(0, 4, 2):
                    c = b * 32 + g * 4
                    n0, n1 = load_bytes(arena, p + g * 4 * W), load_bytes(arena, p + (g + 1) * 4 * W)
                    left, right = low_nibbles(n0), low_nibbles(n1)
                    i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c, x1 + c))
                    i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c, x3 + c))
                    left, right = high_nibbles(n0), high_nibbles(n1)
                    i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c + 16, x1 + c + 16))
                    i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c + 16, x3 + c + 16))
                q = scale_at + (t * blocks + b) * 4 * W
                d, low = load_f16(arena, q), load_f16(arena, q + 2 * W)
                a0 = fma(as_f32(of_first(i01)), mul(d, splat(xs[e0])), a0)
                a1 = fma(as_f32(of_second(i01)), mul(d, splat(xs[e1])), a1)
                a2 = fma(as_f32(of_first(i23)), mul(d, splat(xs[e2])), a2)
                a3 = fma(as_f32(of_second(i23)), mul(d, splat(xs[e3])), a3)
                r0 = fma(low, splat(np.float32(xs[e0] * np.float32(xn[e0]))), r0)
                r1 = fma(low, splat(np.float32(xs[e1] * np.float32(xn[e1]))), r1)
                r2 = fma(low, splat(np.float32(xs[e2] * np.float32(xn[e2]))), r2)
                r3 = fma(low, splat(np.float32(xs[e3] * np.float32(xn[e3]))), r3)
            store_f32(out, to, add(a0, r0))
            store_f32(out, to + out_stride, add(a1, r1))
            store_f32(out, to + 2 * out_stride, add(a2, r2))
            store_f32(out, to + 3 * out_stride, add(a3, r3))


@kernel
def tiles_q5_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q5_0``."""
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
                p = data_at + (t * blocks + b) * 20 * W
                lower = load_bytes(arena, p + 16 * W)
                upper = raised(lower)
                i01 = splat_pair(np.int32(-16 * xn[e0]), np.int32(-16 * xn[e1]))
                i23 = splat_pair(np.int32(-16 * xn[e2]), np.int32(-16 * xn[e3]))
                for g in range(0, 4, 2):
                    c = b * 32 + g * 4
                    n0, n1 = load_bytes(arena, p + g * 4 * W), load_bytes(arena, p + (g + 1) * 4 * W)
                    left = with_high_bits(low_nibbles(n0), lower, g, 16)
                    right = with_high_bits(low_nibbles(n1), lower, g + 1, 16)
                    i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c, x1 + c))
                    i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c, x3 + c))
                    left = with_high_bits(high_nibbles(n0), upper, g, 16)
                    right = with_high_bits(high_nibbles(n1), upper, g + 1, 16)
                    i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c + 16, x1 + c + 16))
                    i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c + 16, x3 + c + 16))
                d = load_f16(arena, scale_at + (t * blocks + b) * 2 * W)
                a0 = fma(as_f32(of_first(i01)), mul(d, splat(xs[e0])), a0)
                a1 = fma(as_f32(of_second(i01)), mul(d, splat(xs[e1])), a1)
                a2 = fma(as_f32(of_first(i23)), mul(d, splat(xs[e2])), a2)
                a3 = fma(as_f32(of_second(i23)), mul(d, splat(xs[e3])), a3)
            store_f32(out, to, a0)
            store_f32(out, to + out_stride, a1)
            store_f32(out, to + 2 * out_stride, a2)
            store_f32(out, to + 3 * out_stride, a3)


@kernel
def tiles_q5_1(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q5_1``."""
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
                p = data_at + (t * blocks + b) * 20 * W
                lower = load_bytes(arena, p + 16 * W)
                upper = raised(lower)
                i01 = splat_pair(np.int32(0), np.int32(0))
                i23 = i01
                for g in range(0, 4, 2):
                    c = b * 32 + g * 4
                    n0, n1 = load_bytes(arena, p + g * 4 * W), load_bytes(arena, p + (g + 1) * 4 * W)
                    left = with_high_bits(low_nibbles(n0), lower, g, 16)
                    right = with_high_bits(low_nibbles(n1), lower, g + 1, 16)
                    i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c, x1 + c))
                    i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c, x3 + c))
                    left = with_high_bits(high_nibbles(n0), upper, g, 16)
                    right = with_high_bits(high_nibbles(n1), upper, g + 1, 16)
                    i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c + 16, x1 + c + 16))
                    i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c + 16, x3 + c + 16))
                q = scale_at + (t * blocks + b) * 4 * W
                d, low = load_f16(arena, q), load_f16(arena, q + 2 * W)
                a0 = fma(as_f32(of_first(i01)), mul(d, splat(xs[e0])), a0)
                a1 = fma(as_f32(of_second(i01)), mul(d, splat(xs[e1])), a1)
                a2 = fma(as_f32(of_first(i23)), mul(d, splat(xs[e2])), a2)
                a3 = fma(as_f32(of_second(i23)), mul(d, splat(xs[e3])), a3)
                r0 = fma(low, splat(np.float32(xs[e0] * np.float32(xn[e0]))), r0)
                r1 = fma(low, splat(np.float32(xs[e1] * np.float32(xn[e1]))), r1)
                r2 = fma(low, splat(np.float32(xs[e2] * np.float32(xn[e2]))), r2)
                r3 = fma(low, splat(np.float32(xs[e3] * np.float32(xn[e3]))), r3)
            store_f32(out, to, add(a0, r0))
            store_f32(out, to + out_stride, add(a1, r1))
            store_f32(out, to + 2 * out_stride, add(a2, r2))
            store_f32(out, to + 3 * out_stride, add(a3, r3))
