"""Matrix-vector products over Q4_K, Q5_K and Q6_K: super-blocks of 8 blocks of 32 columns.

Layout, otherwise as ``engine/kernels/matvec.py`` says; C is a multiple of 256 and u counts super-blocks of a row:
    data     q4_k   [t][block][group: 4][row][4]                 nibbles as in q4_0
             q5_k   [t][block][group: 4, then plane][row][4]     as in q5_0
             q6_k   [t][block][group: 4, then 2 planes][row][4]  nibbles as in q4_0, high bits in pairs:
                    plane 0 byte j: columns 4j.. of groups 0, 1 at bits 4, 6 and of groups 2, 3 at bits 0, 2; plane 1 the
                    same for columns 16 on, whose nibbles are the high ones
    scales   q4_k, q5_k   [t][u] of d f16 [row], dmin f16 [row], then per block: scale u8 [row], min u8 [row]
             q6_k         [t][u] of d f16 [row], then per block: scale i8 [row] of columns 0..15, of columns 16..31
The file packs scales and mins of q4_k and q5_k in 6 bits each; a byte each makes them 2 to 3 % larger than the file.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.matvec_5bit import AHEAD
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
    prefetch,
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
def matvec_q4_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over super-blocks of d * (sum over blocks of scale * d_x * (sum of q_w * q_x)).

    From it goes the sum over super-blocks of dmin * (sum over blocks of min * d_x * (sum of q_x)). A block's sums are exact.
    """
    supers = cols // 256
    for t in range(t0, t1):
        acc = splat(np.float32(0))
        low = acc
        for u in range(supers):
            first = t * supers + u
            q = scale_at + first * 20 * W
            scaled = splat(np.float32(0))
            shifted = scaled
            for k in range(8):
                p = data_at + (first * 8 + k) * 16 * W
                for line in range(0, 16 * W, 64):
                    prefetch(arena, p + AHEAD + line)
                e = s_at + u * 8 + k
                s0 = splat_i32(np.int32(0))
                s1 = s0
                for g in range(4):
                    codes = load_bytes(arena, p + g * 4 * W)
                    c = q_at + u * 256 + k * 32 + g * 4
                    s0 = dot4_nibbles(s0, low_nibbles(codes), broadcast4(xq, c))
                    s1 = dot4_nibbles(s1, high_nibbles(codes), broadcast4(xq, c + 16))
                at = q + (4 + 2 * k) * W
                scaled = fma(as_f32(add_i32(s0, s1)), mul(load_u8(arena, at), splat(xs[e])), scaled)
                shifted = fma(load_u8(arena, at + W), splat(np.float32(xs[e] * np.float32(xn[e]))), shifted)
            acc = fma(load_f16(arena, q), scaled, acc)
            low = fma(load_f16(arena, q + 2 * W), shifted, low)
        store_f32(out, out_at + t * W, sub(acc, low))


@kernel
def matvec_q5_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """As :func:`matvec_q4_k`, with fifth bits as in ``matvec_q5_0``."""
    supers = cols // 256
    for t in range(t0, t1):
        acc = splat(np.float32(0))
        low = acc
        for u in range(supers):
            first = t * supers + u
            q = scale_at + first * 20 * W
            scaled = splat(np.float32(0))
            shifted = scaled
            for k in range(8):
                p = data_at + (first * 8 + k) * 20 * W
                for line in range(0, 20 * W, 64):
                    prefetch(arena, p + AHEAD + line)
                e = s_at + u * 8 + k
                lower = load_bytes(arena, p + 16 * W)
                upper = raised(lower)
                s0 = splat_i32(np.int32(0))
                s1 = s0
                for g in range(4):
                    codes = load_bytes(arena, p + g * 4 * W)
                    c = q_at + u * 256 + k * 32 + g * 4
                    s0 = dot4_nibbles(s0, with_high_bits(low_nibbles(codes), lower, g, 16), broadcast4(xq, c))
                    s1 = dot4_nibbles(s1, with_high_bits(high_nibbles(codes), upper, g, 16), broadcast4(xq, c + 16))
                at = q + (4 + 2 * k) * W
                scaled = fma(as_f32(add_i32(s0, s1)), mul(load_u8(arena, at), splat(xs[e])), scaled)
                shifted = fma(load_u8(arena, at + W), splat(np.float32(xs[e] * np.float32(xn[e]))), shifted)
            acc = fma(load_f16(arena, q), scaled, acc)
            low = fma(load_f16(arena, q + 2 * W), shifted, low)
        store_f32(out, out_at + t * W, sub(acc, low))


@kernel
def matvec_q6_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over super-blocks of d * (sum over blocks of d_x * (sum over halves of scale * s)).

    s = sum of (q_w - 32) * q_x over 16 columns, exact in i32. The activation's sums come per 32 columns, so the kernel adds up
    the first 16 itself, by products with the offset.
    """
    supers = cols // 256
    offset = splat_byte(32)
    for t in range(t0, t1):
        acc = splat(np.float32(0))
        for u in range(supers):
            first = t * supers + u
            q = scale_at + first * 18 * W
            scaled = splat(np.float32(0))
            for k in range(8):
                p = data_at + (first * 8 + k) * 24 * W
                for line in range(0, 24 * W, 64):
                    prefetch(arena, p + AHEAD + line)
                e = s_at + u * 8 + k
                plane0, plane1 = load_bytes(arena, p + 16 * W), load_bytes(arena, p + 20 * W)
                raised0, raised1 = raised(plane0), raised(plane1)
                s0 = splat_i32(np.int32(0))
                s1, s2, s3, n0 = s0, s0, s0, s0
                for g in range(2):
                    c = q_at + u * 256 + k * 32 + g * 4
                    x = broadcast4(xq, c)
                    codes = load_bytes(arena, p + g * 4 * W)
                    n0 = dot4_nibbles(n0, offset, x)
                    s0 = dot4_nibbles(s0, with_high_bits(low_nibbles(codes), plane0, 2 * g, 48), x)
                    s1 = dot4_nibbles(s1, with_high_bits(high_nibbles(codes), plane1, 2 * g, 48), broadcast4(xq, c + 16))
                    x = broadcast4(xq, c + 8)
                    codes = load_bytes(arena, p + (g + 2) * 4 * W)
                    n0 = dot4_nibbles(n0, offset, x)
                    s2 = dot4_nibbles(s2, with_high_bits(low_nibbles(codes), raised0, 2 * g, 48), x)
                    s3 = dot4_nibbles(s3, with_high_bits(high_nibbles(codes), raised1, 2 * g, 48), broadcast4(xq, c + 24))
                at = q + (2 + 2 * k) * W
                h0 = as_f32(sub_i32(add_i32(s0, s2), n0))
                h1 = as_f32(add_i32(sub_i32(add_i32(s1, s3), splat_i32(np.int32(32 * xn[e]))), n0))
                both = fma(h1, load_s8(arena, at + W), mul(h0, load_s8(arena, at)))
                scaled = fma(both, splat(xs[e]), scaled)
            acc = fma(load_f16(arena, q), scaled, acc)
        store_f32(out, out_at + t * W, acc)
