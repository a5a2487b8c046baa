"""Matrix-vector products over Q5_0 and Q5_1: nibbles as in ``matvec``, and one plane of fifth bits beside them.

Layout, otherwise as ``engine/kernels/matvec.py`` says:
    data     [t][block][group: 4, then plane][row][4]
    plane    byte j holds the fifth bits of column 4g+j at bit 4+g and of column 16+4g+j at bit g, so that the nibbles of
             group g get theirs by a shift of g to the right from the plane, or from the plane raised by four bits
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    W,
    add,
    add_i32,
    as_f32,
    broadcast4,
    dot4_nibbles,
    fma,
    high_nibbles,
    load_bytes,
    load_f16,
    low_nibbles,
    mul,
    prefetch,
    raised,
    splat,
    splat_i32,
    store_f32,
    with_high_bits,
)

# bytes from the weights in use to those asked for: the work on a block fills the window in which the CPU itself looks ahead.
# On one Zen 4 core and 160 MB of weights q5_0 goes from 22.3 to 25.7 GB/s, q5_k from 19.8 to 24.6, q6_k from 22.7 to 25.0.
AHEAD = 2048


@kernel
def matvec_q5_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of (q_w - 16) * q_x), exact in i32 within a block."""
    blocks = cols // 32
    for t in range(t0, t1):
        acc = splat(np.float32(0))
        for b in range(blocks):
            p = data_at + (t * blocks + b) * 20 * W
            for line in range(0, 20 * W, 64):
                prefetch(arena, p + AHEAD + line)
            lower = load_bytes(arena, p + 16 * W)
            upper = raised(lower)
            s0 = splat_i32(np.int32(-16 * xn[s_at + b]))
            s1 = splat_i32(np.int32(0))
            for g in range(4):
                codes = load_bytes(arena, p + g * 4 * W)
                c = q_at + b * 32 + g * 4
                s0 = dot4_nibbles(s0, with_high_bits(low_nibbles(codes), lower, g, 16), broadcast4(xq, c))
                s1 = dot4_nibbles(s1, with_high_bits(high_nibbles(codes), upper, g, 16), broadcast4(xq, c + 16))
            d = mul(load_f16(arena, scale_at + (t * blocks + b) * 2 * W), splat(xs[s_at + b]))
            acc = fma(as_f32(add_i32(s0, s1)), d, acc)
        store_f32(out, out_at + t * W, acc)


@kernel
def matvec_q5_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of q_w * q_x) + m_w * d_x * (sum of q_x)."""
    blocks = cols // 32
    for t in range(t0, t1):
        acc = splat(np.float32(0))
        low = splat(np.float32(0))
        for b in range(blocks):
            p = data_at + (t * blocks + b) * 20 * W
            for line in range(0, 20 * W, 64):
                prefetch(arena, p + AHEAD + line)
            lower = load_bytes(arena, p + 16 * W)
            upper = raised(lower)
            s0 = splat_i32(np.int32(0))
            s1 = s0
            for g in range(4):
                codes = load_bytes(arena, p + g * 4 * W)
                c = q_at + b * 32 + g * 4
                s0 = dot4_nibbles(s0, with_high_bits(low_nibbles(codes), lower, g, 16), broadcast4(xq, c))
                s1 = dot4_nibbles(s1, with_high_bits(high_nibbles(codes), upper, g, 16), broadcast4(xq, c + 16))
            q = scale_at + (t * blocks + b) * 4 * W
            acc = fma(as_f32(add_i32(s0, s1)), mul(load_f16(arena, q), splat(xs[s_at + b])), acc)
            low = fma(load_f16(arena, q + 2 * W), splat(np.float32(xs[s_at + b] * np.float32(xn[s_at + b]))), low)
        store_f32(out, out_at + t * W, add(acc, low))
