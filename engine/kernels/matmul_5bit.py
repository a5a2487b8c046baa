"""Matrix products for several tokens over Q5_0 and Q5_1; layouts in ``matvec_5bit.py``, notation in ``matmul.py``."""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    W,
    add,
    as_f32,
    broadcast4,
    dot4_nibbles,
    fma,
    high_nibbles,
    load_bytes,
    load_f16,
    low_nibbles,
    mul,
    raised,
    splat,
    splat_i32,
    store_f32,
    with_high_bits,
)


@kernel
def tiles_q5_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q5_0``. Four tokens share each load."""
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
                i0 = splat_i32(np.int32(-16 * xn[e0]))
                i1 = splat_i32(np.int32(-16 * xn[e1]))
                i2 = splat_i32(np.int32(-16 * xn[e2]))
                i3 = splat_i32(np.int32(-16 * xn[e3]))
                for g in range(4):
                    codes = load_bytes(arena, p + g * 4 * W)
                    c = b * 32 + g * 4
                    half = with_high_bits(low_nibbles(codes), lower, g, 16)
                    i0 = dot4_nibbles(i0, half, broadcast4(xq, x0 + c))
                    i1 = dot4_nibbles(i1, half, broadcast4(xq, x1 + c))
                    i2 = dot4_nibbles(i2, half, broadcast4(xq, x2 + c))
                    i3 = dot4_nibbles(i3, half, broadcast4(xq, x3 + c))
                    half = with_high_bits(high_nibbles(codes), upper, g, 16)
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
def tiles_q5_1(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q5_1``. Four tokens share each load."""
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
                i0 = splat_i32(np.int32(0))
                i1, i2, i3 = i0, i0, i0
                for g in range(4):
                    codes = load_bytes(arena, p + g * 4 * W)
                    c = b * 32 + g * 4
                    half = with_high_bits(low_nibbles(codes), lower, g, 16)
                    i0 = dot4_nibbles(i0, half, broadcast4(xq, x0 + c))
                    i1 = dot4_nibbles(i1, half, broadcast4(xq, x1 + c))
                    i2 = dot4_nibbles(i2, half, broadcast4(xq, x2 + c))
                    i3 = dot4_nibbles(i3, half, broadcast4(xq, x3 + c))
                    half = with_high_bits(high_nibbles(codes), upper, g, 16)
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
