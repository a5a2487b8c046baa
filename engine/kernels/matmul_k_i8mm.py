"""The K formats' products for several tokens on CPUs with ``smmla``; what ``matmul_i8mm.py`` says of the block formats holds.

Layouts in ``matvec_k.py``, notation in ``matmul.py``.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    W,
    as_f32,
    fma,
    high_nibbles,
    load_bytes,
    load_f16,
    load_s8,
    load_u8,
    low_nibbles,
    mul,
    raised,
    splat,
    store_f32,
    sub,
    with_high_bits,
)
from deepthin.engine.simd.neon_i8mm import dot8_pair, less_32, load_pair, of_first, of_second, splat_pair


@kernel
def tiles_q4_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q4_k``."""
    supers = cols // 256
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            to = out_at + m * out_stride + t * W
            x0 = q_at + m * q_stride
            x1, x2, x3 = x0 + q_stride, x0 + 2 * q_stride, x0 + 3 * q_stride
            a0, a1, a2, a3 = zero, zero, zero, zero
            r0, r1, r2, r3 = zero, zero, zero, zero
            for u in range(supers):
                first = t * supers + u
                q = scale_at + first * 20 * W
                b0, b1, b2, b3 = zero, zero, zero, zero
                l0, l1, l2, l3 = zero, zero, zero, zero
                for k in range(8):
                    e0 = s_at + m * s_stride + u * 8 + k
                    e1, e2, e3 = e0 + s_stride, e0 + 2 * s_stride, e0 + 3 * s_stride
                    p = data_at + (first * 8 + k) * 16 * W
                    i01 = splat_pair(np.int32(0), np.int32(0))
                    i23 = i01
                    for g in range(0, 4, 2):
                        c = u * 256 + k * 32 + g * 4
                        n0, n1 = load_bytes(arena, p + g * 4 * W), load_bytes(arena, p + (g + 1) * 4 * W)
                        left, right = low_nibbles(n0), low_nibbles(n1)
                        i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c, x1 + c))
                        i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c, x3 + c))
                        left, right = high_nibbles(n0), high_nibbles(n1)
                        i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c + 16, x1 + c + 16))
                        i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c + 16, x3 + c + 16))
                    at = q + (4 + 2 * k) * W
                    scale, low = load_u8(arena, at), load_u8(arena, at + W)
                    b0 = fma(as_f32(of_first(i01)), mul(scale, splat(xs[e0])), b0)
                    b1 = fma(as_f32(of_second(i01)), mul(scale, splat(xs[e1])), b1)
                    b2 = fma(as_f32(of_first(i23)), mul(scale, splat(xs[e2])), b2)
                    b3 = fma(as_f32(of_second(i23)), mul(scale, splat(xs[e3])), b3)
                    l0 = fma(low, splat(np.float32(xs[e0] * np.float32(xn[e0]))), l0)
                    l1 = fma(low, splat(np.float32(xs[e1] * np.float32(xn[e1]))), l1)
                    l2 = fma(low, splat(np.float32(xs[e2] * np.float32(xn[e2]))), l2)
                    l3 = fma(low, splat(np.float32(xs[e3] * np.float32(xn[e3]))), l3)
                d, least = load_f16(arena, q), load_f16(arena, q + 2 * W)
                a0 = fma(d, b0, a0)
                a1 = fma(d, b1, a1)
                a2 = fma(d, b2, a2)
                a3 = fma(d, b3, a3)
                r0 = fma(least, l0, r0)
                r1 = fma(least, l1, r1)
                r2 = fma(least, l2, r2)
                r3 = fma(least, l3, r3)
            store_f32(out, to, sub(a0, r0))
            store_f32(out, to + out_stride, sub(a1, r1))
            store_f32(out, to + 2 * out_stride, sub(a2, r2))
            store_f32(out, to + 3 * out_stride, sub(a3, r3))


@kernel
def tiles_q5_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q5_k``."""
    supers = cols // 256
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            to = out_at + m * out_stride + t * W
            x0 = q_at + m * q_stride
            x1, x2, x3 = x0 + q_stride, x0 + 2 * q_stride, x0 + 3 * q_stride
            a0, a1, a2, a3 = zero, zero, zero, zero
            r0, r1, r2, r3 = zero, zero, zero, zero
            for u in range(supers):
                first = t * supers + u
                q = scale_at + first * 20 * W
                b0, b1, b2, b3 = zero, zero, zero, zero
                l0, l1, l2, l3 = zero, zero, zero, zero
                for k in range(8):
                    e0 = s_at + m * s_stride + u * 8 + k
                    e1, e2, e3 = e0 + s_stride, e0 + 2 * s_stride, e0 + 3 * s_stride
                    p = data_at + (first * 8 + k) * 20 * W
                    lower = load_bytes(arena, p + 16 * W)
                    upper = raised(lower)
                    i01 = splat_pair(np.int32(0), np.int32(0))
                    i23 = i01
                    for g in range(0, 4, 2):
                        c = u * 256 + k * 32 + g * 4
                        n0, n1 = load_bytes(arena, p + g * 4 * W), load_bytes(arena, p + (g + 1) * 4 * W)
                        left = with_high_bits(low_nibbles(n0), lower, g, 16)
                        right = with_high_bits(low_nibbles(n1), lower, g + 1, 16)
                        i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c, x1 + c))
                        i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c, x3 + c))
                        left = with_high_bits(high_nibbles(n0), upper, g, 16)
                        right = with_high_bits(high_nibbles(n1), upper, g + 1, 16)
                        i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c + 16, x1 + c + 16))
                        i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c + 16, x3 + c + 16))
                    at = q + (4 + 2 * k) * W
                    scale, low = load_u8(arena, at), load_u8(arena, at + W)
                    b0 = fma(as_f32(of_first(i01)), mul(scale, splat(xs[e0])), b0)
                    b1 = fma(as_f32(of_second(i01)), mul(scale, splat(xs[e1])), b1)
                    b2 = fma(as_f32(of_first(i23)), mul(scale, splat(xs[e2])), b2)
                    b3 = fma(as_f32(of_second(i23)), mul(scale, splat(xs[e3])), b3)
                    l0 = fma(low, splat(np.float32(xs[e0] * np.float32(xn[e0]))), l0)
                    l1 = fma(low, splat(np.float32(xs[e1] * np.float32(xn[e1]))), l1)
                    l2 = fma(low, splat(np.float32(xs[e2] * np.float32(xn[e2]))), l2)
                    l3 = fma(low, splat(np.float32(xs[e3] * np.float32(xn[e3]))), l3)
                d, least = load_f16(arena, q), load_f16(arena, q + 2 * W)
                a0 = fma(d, b0, a0)
                a1 = fma(d, b1, a1)
                a2 = fma(d, b2, a2)
                a3 = fma(d, b3, a3)
                r0 = fma(least, l0, r0)
                r1 = fma(least, l1, r1)
                r2 = fma(least, l2, r2)
                r3 = fma(least, l3, r3)
            store_f32(out, to, sub(a0, r0))
            store_f32(out, to + out_stride, sub(a1, r1))
            store_f32(out, to + 2 * out_stride, sub(a2, r2))
            store_f32(out, to + 3 * out_stride, sub(a3, r3))


@kernel
def tiles_q6_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q6_k``; the offset goes before the products."""
    supers = cols // 256
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            to = out_at + m * out_stride + t * W
            x0 = q_at + m * q_stride
            x1, x2, x3 = x0 + q_stride, x0 + 2 * q_stride, x0 + 3 * q_stride
            a0, a1, a2, a3 = zero, zero, zero, zero
            for u in range(supers):
                first = t * supers + u
                q = scale_at + first * 18 * W
                b0, b1, b2, b3 = zero, zero, zero, zero
                for k in range(8):
                    e0 = s_at + m * s_stride + u * 8 + k
                    e1, e2, e3 = e0 + s_stride, e0 + 2 * s_stride, e0 + 3 * s_stride
                    p = data_at + (first * 8 + k) * 24 * W
                    plane0, plane1 = load_bytes(arena, p + 16 * W), load_bytes(arena, p + 20 * W)
                    i01 = splat_pair(np.int32(0), np.int32(0))
                    i23, j01, j23 = i01, i01, i01
                    for h in range(2):
                        c = u * 256 + k * 32 + h * 8
                        n0, n1 = load_bytes(arena, p + h * 8 * W), load_bytes(arena, p + h * 8 * W + 4 * W)
                        left = less_32(with_high_bits(low_nibbles(n0), plane0, 0, 48))
                        right = less_32(with_high_bits(low_nibbles(n1), plane0, 2, 48))
                        i01 = dot8_pair(i01, left, right, load_pair(xq, x0 + c, x1 + c))
                        i23 = dot8_pair(i23, left, right, load_pair(xq, x2 + c, x3 + c))
                        left = less_32(with_high_bits(high_nibbles(n0), plane1, 0, 48))
                        right = less_32(with_high_bits(high_nibbles(n1), plane1, 2, 48))
                        j01 = dot8_pair(j01, left, right, load_pair(xq, x0 + c + 16, x1 + c + 16))
                        j23 = dot8_pair(j23, left, right, load_pair(xq, x2 + c + 16, x3 + c + 16))
                        plane0, plane1 = raised(plane0), raised(plane1)
                    at = q + (2 + 2 * k) * W
                    d0, d1 = load_s8(arena, at), load_s8(arena, at + W)
                    both = fma(as_f32(of_first(j01)), d1, mul(as_f32(of_first(i01)), d0))
                    b0 = fma(both, splat(xs[e0]), b0)
                    both = fma(as_f32(of_second(j01)), d1, mul(as_f32(of_second(i01)), d0))
                    b1 = fma(both, splat(xs[e1]), b1)
                    both = fma(as_f32(of_first(j23)), d1, mul(as_f32(of_first(i23)), d0))
                    b2 = fma(both, splat(xs[e2]), b2)
                    both = fma(as_f32(of_second(j23)), d1, mul(as_f32(of_second(i23)), d0))
                    b3 = fma(both, splat(xs[e3]), b3)
                d = load_f16(arena, q)
                a0 = fma(d, b0, a0)
                a1 = fma(d, b1, a1)
                a2 = fma(d, b2, a2)
                a3 = fma(d, b3, a3)
            store_f32(out, to, a0)
            store_f32(out, to + out_stride, a1)
            store_f32(out, to + 2 * out_stride, a2)
            store_f32(out, to + 3 * out_stride, a3)
