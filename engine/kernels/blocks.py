"""Products of one block of 32 columns of W rows with one token's activations: what decode and prefill have in common.

Every function adds its block to the sums ``acc`` of W rows. Several calls in a row share loads, unpacked codes and broadcasts,
since all of them become one stretch of code: decode calls with one token and several tiles, prefill with one tile and
several tokens. So a token's sums are the same bits in both.

    n      number of the block in the packed tensor, tile by tile      x   index of the block's first activation in ``xq``
    e      index of the block's scale and sum in ``xs`` and ``xn``     layouts: see ``matvec.py``
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    Q6_BIAS,
    Q8_BIAS,
    W,
    add_i32,
    always_inline,
    as_f32,
    broadcast4,
    broadcast_f32,
    broadcast_i32,
    dot4_nibbles,
    dot4_q8,
    dot_narrow,
    dot_narrow_6bit,
    end_narrow,
    fma,
    high_nibbles,
    load_bytes,
    load_f16,
    load_s8,
    load_u8,
    low_nibbles,
    mul,
    mul_i32,
    raised,
    splat_byte,
    splat_i32,
    start_narrow,
    store_f32,
    sub_i32,
    with_high_bits,
)


@kernel
def four_tiles(t0, t1, i):
    """Tiles of step ``i`` of ceil((t1 - t0) / 4): one from each quarter of the range, the last tile where a quarter is short.

    Four streams through memory instead of one: the CPU looks ahead on each. On one Zen 2 core plain reading rises from
    15.9 to 23.1 GB/s that way.
    """
    always_inline()
    quarter, last = (t1 - t0 + 3) // 4, t1 - 1
    t = t0 + i
    return t, min(t + quarter, last), min(t + 2 * quarter, last), min(t + 3 * quarter, last)


@kernel
def store_four(out, to0, to1, to2, to3, a, b, c, d):
    """Store four vectors of f32."""
    always_inline()
    store_f32(out, to0, a)
    store_f32(out, to1, b)
    store_f32(out, to2, c)
    store_f32(out, to3, d)


@kernel
def store_tokens(out, to, out_stride, a, b, c, d):
    """Store the same rows of four tokens."""
    always_inline()
    store_four(out, to, to + out_stride, to + 2 * out_stride, to + 3 * out_stride, a, b, c, d)


@kernel
def _offset(by, xn, e):
    """i32 start of a block's sums whose weights are stored with ``by`` added."""
    always_inline()
    return mul_i32(splat_i32(np.int32(-by)), broadcast_i32(xn, e))


@kernel
def _nibbles(arena, p, xq, x, total):
    """Total + sum over 32 columns of codes 0..15 at ``p`` times activations, i32."""
    always_inline()
    s = start_narrow(total)
    for g in range(4):
        codes = load_bytes(arena, p + g * 4 * W)
        s = dot_narrow(s, low_nibbles(codes), broadcast4(xq, x + g * 4))
        s = dot_narrow(s, high_nibbles(codes), broadcast4(xq, x + 16 + g * 4))
    return end_narrow(s, total)


@kernel
def _fives(arena, p, xq, x, total):
    """As :func:`_nibbles` for codes 0..31 with their plane of fifth bits."""
    always_inline()
    zero = splat_i32(np.int32(0))
    lower = load_bytes(arena, p + 16 * W)
    upper = raised(lower)
    s, r = start_narrow(total), start_narrow(zero)
    for g in range(4):
        codes = load_bytes(arena, p + g * 4 * W)
        s = dot_narrow(s, with_high_bits(low_nibbles(codes), lower, g, 16), broadcast4(xq, x + g * 4))
        r = dot_narrow(r, with_high_bits(high_nibbles(codes), upper, g, 16), broadcast4(xq, x + 16 + g * 4))
    return add_i32(end_narrow(s, total), end_narrow(r, zero))


@kernel
def block_q8_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """Acc + d_w * d_x * (sum of q_w * q_x); the sum is exact in i32, here and in all that follow."""
    always_inline()
    p = data_at + n * 32 * W
    s, r = _offset(Q8_BIAS, xn, e), splat_i32(np.int32(0))
    for g in range(0, 8, 2):
        s = dot4_q8(s, load_bytes(arena, p + g * 4 * W), broadcast4(xq, x + g * 4))
        r = dot4_q8(r, load_bytes(arena, p + (g + 1) * 4 * W), broadcast4(xq, x + g * 4 + 4))
    return fma(as_f32(add_i32(s, r)), mul(load_f16(arena, scale_at + n * 2 * W), broadcast_f32(xs, e)), acc)


@kernel
def block_q4_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """As :func:`block_q8_0` for nibbles with offset 8."""
    always_inline()
    sums = _nibbles(arena, data_at + n * 16 * W, xq, x, _offset(8, xn, e))
    return fma(as_f32(sums), mul(load_f16(arena, scale_at + n * 2 * W), broadcast_f32(xs, e)), acc)


@kernel
def block_q5_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """As :func:`block_q8_0` for 5 bits with offset 16."""
    always_inline()
    sums = _fives(arena, data_at + n * 20 * W, xq, x, _offset(16, xn, e))
    return fma(as_f32(sums), mul(load_f16(arena, scale_at + n * 2 * W), broadcast_f32(xs, e)), acc)


@kernel
def block_q4_1(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """Acc + d_w * d_x * (sum of q_w * q_x); :func:`low_1` adds up the rest."""
    always_inline()
    sums = _nibbles(arena, data_at + n * 16 * W, xq, x, splat_i32(np.int32(0)))
    return fma(as_f32(sums), mul(load_f16(arena, scale_at + n * 4 * W), broadcast_f32(xs, e)), acc)


@kernel
def block_q5_1(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """As :func:`block_q4_1` for 5 bits."""
    always_inline()
    sums = _fives(arena, data_at + n * 20 * W, xq, x, splat_i32(np.int32(0)))
    return fma(as_f32(sums), mul(load_f16(arena, scale_at + n * 4 * W), broadcast_f32(xs, e)), acc)


@kernel
def low_1(low, arena, scale_at, n, xs, xn, e):
    """Low + m_w * d_x * (sum of q_x) for q4_1 and q5_1."""
    always_inline()
    return fma(load_f16(arena, scale_at + n * 4 * W + 2 * W), _scaled_sum(xs, xn, e), low)


@kernel
def _scaled_sum(xs, xn, e):
    """d_x * (sum of q_x) of a block."""
    always_inline()
    return mul(broadcast_f32(xs, e), as_f32(broadcast_i32(xn, e)))


@kernel
def block_q4_k(scaled, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """Scaled + scale * d_x * (sum of q_w * q_x) of block ``n``, one of the 8 of super-block n // 8."""
    always_inline()
    sums = _nibbles(arena, data_at + n * 16 * W, xq, x, splat_i32(np.int32(0)))
    return fma(as_f32(sums), mul(load_u8(arena, _small_at(scale_at, n)), broadcast_f32(xs, e)), scaled)


@kernel
def block_q5_k(scaled, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """As :func:`block_q4_k` for 5 bits."""
    always_inline()
    sums = _fives(arena, data_at + n * 20 * W, xq, x, splat_i32(np.int32(0)))
    return fma(as_f32(sums), mul(load_u8(arena, _small_at(scale_at, n)), broadcast_f32(xs, e)), scaled)


@kernel
def low_k(shifted, arena, scale_at, n, xs, xn, e):
    """Shifted + min * d_x * (sum of q_x) for q4_k and q5_k."""
    always_inline()
    return fma(load_u8(arena, _small_at(scale_at, n) + W), _scaled_sum(xs, xn, e), shifted)


@kernel
def _small_at(scale_at, n):
    """Where the scales of block ``n`` of q4_k or q5_k are, its mins behind them."""
    always_inline()
    return scale_at + (n // 8) * 20 * W + (4 + 2 * (n % 8)) * W


@kernel
def super_k(acc, scaled, arena, scale_at, u):
    """Acc + d * scaled for super-block ``u`` of q4_k or q5_k."""
    always_inline()
    return fma(load_f16(arena, scale_at + u * 20 * W), scaled, acc)


@kernel
def super_low_k(low, shifted, arena, scale_at, u):
    """Low + dmin * shifted for super-block ``u`` of q4_k or q5_k."""
    always_inline()
    return fma(load_f16(arena, scale_at + u * 20 * W + 2 * W), shifted, low)


@kernel
def block_q6_k(scaled, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """Scaled + d_x * (sum over halves of scale * (sum of (q_w - 32) * q_x over 16 columns)).

    Where 6-bit codes go in with their offset it must go again from each half. The activation's sums come per 32 columns, so
    those of the first 16 are added up here, by products with the offset.
    """
    always_inline()
    p = data_at + n * 24 * W
    plane0, plane1 = load_bytes(arena, p + 16 * W), load_bytes(arena, p + 20 * W)
    bias, zero = splat_byte(Q6_BIAS), splat_i32(np.int32(0))
    s, r, o = start_narrow(zero), start_narrow(zero), zero
    for h in range(2):
        for g in range(2):
            c, codes = x + h * 8 + g * 4, load_bytes(arena, p + (2 * h + g) * 4 * W)
            s = dot_narrow_6bit(s, with_high_bits(low_nibbles(codes), plane0, 2 * g, 48), broadcast4(xq, c))
            r = dot_narrow_6bit(r, with_high_bits(high_nibbles(codes), plane1, 2 * g, 48), broadcast4(xq, c + 16))
            if Q6_BIAS != 0:
                o = dot4_nibbles(o, bias, broadcast4(xq, c))
        plane0, plane1 = raised(plane0), raised(plane1)
    left, right = end_narrow(s, zero), end_narrow(r, zero)
    if Q6_BIAS != 0:
        left = sub_i32(left, o)
        right = add_i32(add_i32(right, _offset(Q6_BIAS, xn, e)), o)
    q = scale_at + (n // 8) * 18 * W + (2 + 2 * (n % 8)) * W
    both = fma(as_f32(right), load_s8(arena, q + W), mul(as_f32(left), load_s8(arena, q)))
    return fma(both, broadcast_f32(xs, e), scaled)


@kernel
def super_q6_k(acc, scaled, arena, scale_at, u):
    """Acc + d * scaled for super-block ``u`` of q6_k."""
    always_inline()
    return fma(load_f16(arena, scale_at + u * 18 * W), scaled, acc)
