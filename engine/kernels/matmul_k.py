"""Matrix products for several tokens over Q4_K, Q5_K and Q6_K; layouts in ``matvec_k.py``, notation in ``matmul.py``."""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    W,
    add_i32,
    as_f32,
    broadcast4,
    dot4_nibbles,
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
    splat_byte,
    splat_i32,
    store_f32,
    sub,
    sub_i32,
    with_high_bits,
)


@kernel
def tiles_q4_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q4_k``. Four tokens share each load."""
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
                    i0 = splat_i32(np.int32(0))
                    i1, i2, i3 = i0, i0, i0
                    for g in range(4):
                        codes = load_bytes(arena, p + g * 4 * W)
                        c = u * 256 + k * 32 + g * 4
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
                    at = q + (4 + 2 * k) * W
                    scale, low = load_u8(arena, at), load_u8(arena, at + W)
                    b0 = fma(as_f32(i0), mul(scale, splat(xs[e0])), b0)
                    b1 = fma(as_f32(i1), mul(scale, splat(xs[e1])), b1)
                    b2 = fma(as_f32(i2), mul(scale, splat(xs[e2])), b2)
                    b3 = fma(as_f32(i3), mul(scale, splat(xs[e3])), b3)
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
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q5_k``. Four tokens share each load."""
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
                    i0 = splat_i32(np.int32(0))
                    i1, i2, i3 = i0, i0, i0
                    for g in range(4):
                        codes = load_bytes(arena, p + g * 4 * W)
                        c = u * 256 + k * 32 + g * 4
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
                    at = q + (4 + 2 * k) * W
                    scale, low = load_u8(arena, at), load_u8(arena, at + W)
                    b0 = fma(as_f32(i0), mul(scale, splat(xs[e0])), b0)
                    b1 = fma(as_f32(i1), mul(scale, splat(xs[e1])), b1)
                    b2 = fma(as_f32(i2), mul(scale, splat(xs[e2])), b2)
                    b3 = fma(as_f32(i3), mul(scale, splat(xs[e3])), b3)
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
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q6_k``. Four tokens share each load."""
    supers = cols // 256
    zero = splat(np.float32(0))
    offset = splat_byte(32)
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
                    i0 = splat_i32(np.int32(0))
                    i1, i2, i3, j0, j1, j2, j3, n0, n1, n2, n3 = i0, i0, i0, i0, i0, i0, i0, i0, i0, i0, i0
                    for h in range(2):
                        for g in range(2):
                            c = u * 256 + k * 32 + h * 8 + g * 4
                            codes = load_bytes(arena, p + (2 * h + g) * 4 * W)
                            half = with_high_bits(low_nibbles(codes), plane0, 2 * g, 48)
                            x = broadcast4(xq, x0 + c)
                            n0 = dot4_nibbles(n0, offset, x)
                            i0 = dot4_nibbles(i0, half, x)
                            x = broadcast4(xq, x1 + c)
                            n1 = dot4_nibbles(n1, offset, x)
                            i1 = dot4_nibbles(i1, half, x)
                            x = broadcast4(xq, x2 + c)
                            n2 = dot4_nibbles(n2, offset, x)
                            i2 = dot4_nibbles(i2, half, x)
                            x = broadcast4(xq, x3 + c)
                            n3 = dot4_nibbles(n3, offset, x)
                            i3 = dot4_nibbles(i3, half, x)
                            half = with_high_bits(high_nibbles(codes), plane1, 2 * g, 48)
                            j0 = dot4_nibbles(j0, half, broadcast4(xq, x0 + c + 16))
                            j1 = dot4_nibbles(j1, half, broadcast4(xq, x1 + c + 16))
                            j2 = dot4_nibbles(j2, half, broadcast4(xq, x2 + c + 16))
                            j3 = dot4_nibbles(j3, half, broadcast4(xq, x3 + c + 16))
                        plane0, plane1 = raised(plane0), raised(plane1)
                    at = q + (2 + 2 * k) * W
                    d0, d1 = load_s8(arena, at), load_s8(arena, at + W)
                    i0 = sub_i32(i0, n0)
                    j0 = add_i32(sub_i32(j0, splat_i32(np.int32(32 * xn[e0]))), n0)
                    b0 = fma(fma(as_f32(j0), d1, mul(as_f32(i0), d0)), splat(xs[e0]), b0)
                    i1 = sub_i32(i1, n1)
                    j1 = add_i32(sub_i32(j1, splat_i32(np.int32(32 * xn[e1]))), n1)
                    b1 = fma(fma(as_f32(j1), d1, mul(as_f32(i1), d0)), splat(xs[e1]), b1)
                    i2 = sub_i32(i2, n2)
                    j2 = add_i32(sub_i32(j2, splat_i32(np.int32(32 * xn[e2]))), n2)
                    b2 = fma(fma(as_f32(j2), d1, mul(as_f32(i2), d0)), splat(xs[e2]), b2)
                    i3 = sub_i32(i3, n3)
                    j3 = add_i32(sub_i32(j3, splat_i32(np.int32(32 * xn[e3]))), n3)
                    b3 = fma(fma(as_f32(j3), d1, mul(as_f32(i3), d0)), splat(xs[e3]), b3)
                d = load_f16(arena, q)
                a0 = fma(d, b0, a0)
                a1 = fma(d, b1, a1)
                a2 = fma(d, b2, a2)
                a3 = fma(d, b3, a3)
            store_f32(out, to, a0)
            store_f32(out, to + out_stride, a1)
            store_f32(out, to + 2 * out_stride, a2)
            store_f32(out, to + 3 * out_stride, a3)
