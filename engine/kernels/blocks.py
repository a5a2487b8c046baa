"""Products of blocks of 32 columns of W rows with a token's activations, four at once: what decode and prefill have in common.

Decode takes four tiles and one token, prefill one tile and four tokens. Sums, block numbers and indices are tuples of four;
what the four have in common is loaded and unpacked once, since all of it becomes one stretch of code. So a token's sums are the
same bits in both. The four advance together: a CPU has some 40 vector operations in view, and those of one block wait for each
other.

    acc   f32 sums of W rows, added to                         n    number of a block in the packed tensor, tile by tile
    x     index of the block's first activation in ``xq``     e    index of the block's scale and sum in ``xs`` and ``xn``
    one_tile   1 in prefill, 0 in decode               layouts   see ``matvec.py``
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    Q6_BIAS,
    Q8_BIAS,
    W,
    add,
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
    splat,
    splat_byte,
    splat_i32,
    start_narrow,
    store_f32,
    sub,
    sub_i32,
    together,
    with_high_bits,
)


@kernel
def four(value):
    """The same value or index for all."""
    always_inline()
    return value, value, value, value


@kernel
def apart(first, step):
    """Four indices, ``step`` apart."""
    always_inline()
    return first, first + step, first + 2 * step, first + 3 * step


@kernel
def further(at, by):
    """Four indices, each moved on by ``by``."""
    always_inline()
    return at[0] + by, at[1] + by, at[2] + by, at[3] + by


@kernel
def times(at, by):
    """Four indices, each multiplied."""
    always_inline()
    return at[0] * by, at[1] * by, at[2] * by, at[3] * by


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
def zeros():
    """Sums to start from."""
    always_inline()
    return four(splat(np.float32(0)))


@kernel
def plus(a, b):
    """Sums added."""
    always_inline()
    return add(a[0], b[0]), add(a[1], b[1]), add(a[2], b[2]), add(a[3], b[3])


@kernel
def minus(a, b):
    """Sums subtracted."""
    always_inline()
    return sub(a[0], b[0]), sub(a[1], b[1]), sub(a[2], b[2]), sub(a[3], b[3])


@kernel
def store(out, to, acc):
    """Store sums at four places."""
    always_inline()
    store_f32(out, to[0], acc[0])
    store_f32(out, to[1], acc[1])
    store_f32(out, to[2], acc[2])
    store_f32(out, to[3], acc[3])


@kernel
def _bytes(arena, at, size, n):
    """A vector of packed bytes of each block; blocks are ``size`` bytes apart from ``at`` on."""
    always_inline()
    p = further(times(n, size), at)
    return load_bytes(arena, p[0]), load_bytes(arena, p[1]), load_bytes(arena, p[2]), load_bytes(arena, p[3])


@kernel
def _halves(arena, at, size, n):
    """An f16 [row] of each block as f32."""
    always_inline()
    p = further(times(n, size), at)
    return load_f16(arena, p[0]), load_f16(arena, p[1]), load_f16(arena, p[2]), load_f16(arena, p[3])


@kernel
def _small(arena, at):
    """A u8 [row] of each block as f32."""
    always_inline()
    return load_u8(arena, at[0]), load_u8(arena, at[1]), load_u8(arena, at[2]), load_u8(arena, at[3])


@kernel
def _small_signed(arena, at):
    """An i8 [row] of each block as f32."""
    always_inline()
    return load_s8(arena, at[0]), load_s8(arena, at[1]), load_s8(arena, at[2]), load_s8(arena, at[3])


@kernel
def _lows(c):
    always_inline()
    return low_nibbles(c[0]), low_nibbles(c[1]), low_nibbles(c[2]), low_nibbles(c[3])


@kernel
def _highs(c):
    always_inline()
    return high_nibbles(c[0]), high_nibbles(c[1]), high_nibbles(c[2]), high_nibbles(c[3])


@kernel
def _raised(c):
    always_inline()
    return raised(c[0]), raised(c[1]), raised(c[2]), raised(c[3])


@kernel
def _with_bits(c, plane, shift, mask):
    """Codes with the high bits that lie ``shift`` above their place in the plane."""
    always_inline()
    return (
        with_high_bits(c[0], plane[0], shift, mask),
        with_high_bits(c[1], plane[1], shift, mask),
        with_high_bits(c[2], plane[2], shift, mask),
        with_high_bits(c[3], plane[3], shift, mask),
    )


@kernel
def _activations(xq, x, by):
    """Four activation bytes each, in every row."""
    always_inline()
    x = further(x, by)
    return broadcast4(xq, x[0]), broadcast4(xq, x[1]), broadcast4(xq, x[2]), broadcast4(xq, x[3])


@kernel
def _start(t):
    always_inline()
    return start_narrow(t[0]), start_narrow(t[1]), start_narrow(t[2]), start_narrow(t[3])


@kernel
def _end(s, t):
    always_inline()
    return end_narrow(s[0], t[0]), end_narrow(s[1], t[1]), end_narrow(s[2], t[2]), end_narrow(s[3], t[3])


@kernel
def _dot(s, c, y):
    always_inline()
    return (
        dot_narrow(s[0], c[0], y[0]),
        dot_narrow(s[1], c[1], y[1]),
        dot_narrow(s[2], c[2], y[2]),
        dot_narrow(s[3], c[3], y[3]),
    )


@kernel
def _joined(s):
    always_inline()
    return together(s[0], s[1], s[2], s[3])


@kernel
def _dot_6bit(s, c, y):
    always_inline()
    return (
        dot_narrow_6bit(s[0], c[0], y[0]),
        dot_narrow_6bit(s[1], c[1], y[1]),
        dot_narrow_6bit(s[2], c[2], y[2]),
        dot_narrow_6bit(s[3], c[3], y[3]),
    )


@kernel
def _nothing():
    """i32 zeros to start sums from."""
    always_inline()
    return four(splat_i32(np.int32(0)))


@kernel
def _offsets(by, xn, e):
    """i32 starts of sums whose weights are stored with ``by`` added."""
    always_inline()
    f = splat_i32(np.int32(-by))
    return (
        mul_i32(f, broadcast_i32(xn, e[0])),
        mul_i32(f, broadcast_i32(xn, e[1])),
        mul_i32(f, broadcast_i32(xn, e[2])),
        mul_i32(f, broadcast_i32(xn, e[3])),
    )


@kernel
def _plus_i32(a, b):
    always_inline()
    return add_i32(a[0], b[0]), add_i32(a[1], b[1]), add_i32(a[2], b[2]), add_i32(a[3], b[3])


@kernel
def _nibbles(arena, at, n, xq, x, totals):
    """Totals + sums over 32 columns of codes 0..15 times activations, i32."""
    always_inline()
    s = _start(totals)
    for g in range(4):
        codes = _bytes(arena, at + g * 4 * W, 16 * W, n)
        s = _joined(_dot(s, _lows(codes), _activations(xq, x, g * 4)))
        s = _joined(_dot(s, _highs(codes), _activations(xq, x, 16 + g * 4)))
    return _end(s, totals)


@kernel
def _fives(arena, at, n, xq, x, totals, one_tile):
    """As :func:`_nibbles` for codes 0..31 with their plane of fifth bits."""
    always_inline()
    zero = _nothing()
    lower = _bytes(arena, at + 16 * W, 20 * W, n)
    upper = _raised(lower)
    s, r = _start(totals), _start(zero)
    s, r = _five_group(s, r, arena, at, n, xq, x, lower, upper, one_tile, np.int64(0))
    s, r = _five_group(s, r, arena, at, n, xq, x, lower, upper, one_tile, np.int64(1))
    s, r = _five_group(s, r, arena, at, n, xq, x, lower, upper, one_tile, np.int64(2))
    s, r = _five_group(s, r, arena, at, n, xq, x, lower, upper, one_tile, np.int64(3))
    return _plus_i32(_end(s, totals), _end(r, zero))


@kernel
def _five_group(s, r, arena, at, n, xq, x, lower, upper, one_tile, g):
    """Columns 4g.. added to s, columns 16 + 4g.. to r: a body too long for LLVM to unroll a loop over it.

    Four tiles are not held together here: their codes and planes are more than 16 registers.
    """
    always_inline()
    codes = _bytes(arena, at + g * 4 * W, 20 * W, n)
    s = _dot(s, _with_bits(_lows(codes), lower, g, 16), _activations(xq, x, g * 4))
    r = _dot(r, _with_bits(_highs(codes), upper, g, 16), _activations(xq, x, 16 + g * 4))
    return (_joined(s), _joined(r)) if one_tile != 0 else (s, r)


@kernel
def _scaled(acc, sums, f, xs, e):
    """Acc + sums * f * d_x."""
    always_inline()
    return (
        fma(as_f32(sums[0]), mul(f[0], broadcast_f32(xs, e[0])), acc[0]),
        fma(as_f32(sums[1]), mul(f[1], broadcast_f32(xs, e[1])), acc[1]),
        fma(as_f32(sums[2]), mul(f[2], broadcast_f32(xs, e[2])), acc[2]),
        fma(as_f32(sums[3]), mul(f[3], broadcast_f32(xs, e[3])), acc[3]),
    )


@kernel
def _scaled_sums(acc, f, xs, xn, e):
    """Acc + f * d_x * (sum of q_x)."""
    always_inline()
    return (
        fma(f[0], mul(broadcast_f32(xs, e[0]), as_f32(broadcast_i32(xn, e[0]))), acc[0]),
        fma(f[1], mul(broadcast_f32(xs, e[1]), as_f32(broadcast_i32(xn, e[1]))), acc[1]),
        fma(f[2], mul(broadcast_f32(xs, e[2]), as_f32(broadcast_i32(xn, e[2]))), acc[2]),
        fma(f[3], mul(broadcast_f32(xs, e[3]), as_f32(broadcast_i32(xn, e[3]))), acc[3]),
    )


@kernel
def four_q8_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """Acc + d_w * d_x * (sum of q_w * q_x); the sum is exact in i32, here and in all that follow."""
    always_inline()
    s = _offsets(Q8_BIAS, xn, e)
    for g in range(8):
        c, y = _bytes(arena, data_at + g * 4 * W, 32 * W, n), _activations(xq, x, g * 4)
        s = together(dot4_q8(s[0], c[0], y[0]), dot4_q8(s[1], c[1], y[1]), dot4_q8(s[2], c[2], y[2]), dot4_q8(s[3], c[3], y[3]))
    return _scaled(acc, s, _halves(arena, scale_at, 2 * W, n), xs, e)


@kernel
def four_q4_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """As :func:`four_q8_0` for nibbles with offset 8."""
    always_inline()
    s = _nibbles(arena, data_at, n, xq, x, _offsets(8, xn, e))
    return _scaled(acc, s, _halves(arena, scale_at, 2 * W, n), xs, e)


@kernel
def four_q5_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e, one_tile):
    """As :func:`four_q8_0` for 5 bits with offset 16."""
    always_inline()
    s = _fives(arena, data_at, n, xq, x, _offsets(16, xn, e), one_tile)
    return _scaled(acc, s, _halves(arena, scale_at, 2 * W, n), xs, e)


@kernel
def four_q4_1(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """As :func:`four_q8_0` for nibbles from a minimum, whose part :func:`four_lows_1` adds up."""
    always_inline()
    s = _nibbles(arena, data_at, n, xq, x, _nothing())
    return _scaled(acc, s, _halves(arena, scale_at, 4 * W, n), xs, e)


@kernel
def four_q5_1(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e, one_tile):
    """As :func:`four_q4_1` for 5 bits."""
    always_inline()
    s = _fives(arena, data_at, n, xq, x, _nothing(), one_tile)
    return _scaled(acc, s, _halves(arena, scale_at, 4 * W, n), xs, e)


@kernel
def four_lows_1(acc, arena, scale_at, n, xs, xn, e):
    """Acc + m_w * d_x * (sum of q_x) for q4_1 and q5_1."""
    always_inline()
    return _scaled_sums(acc, _halves(arena, scale_at + 2 * W, 4 * W, n), xs, xn, e)


@kernel
def _small_at(scale_at, n, size, head):
    """Where a block's small scales are, two of a row each, in its super-block of ``size`` bytes a row, behind ``head``."""
    always_inline()
    return (
        scale_at + (n[0] // 8 * size + head + 2 * (n[0] % 8)) * W,
        scale_at + (n[1] // 8 * size + head + 2 * (n[1] % 8)) * W,
        scale_at + (n[2] // 8 * size + head + 2 * (n[2] % 8)) * W,
        scale_at + (n[3] // 8 * size + head + 2 * (n[3] % 8)) * W,
    )


@kernel
def four_q4_k(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e):
    """Acc + scale * d_x * (sum of q_w * q_x); 8 blocks make a super-block, which :func:`four_supers` scales."""
    always_inline()
    s = _nibbles(arena, data_at, n, xq, x, _nothing())
    return _scaled(acc, s, _small(arena, _small_at(scale_at, n, np.int64(20), np.int64(4))), xs, e)


@kernel
def four_q5_k(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e, one_tile):
    """As :func:`four_q4_k` for 5 bits."""
    always_inline()
    s = _fives(arena, data_at, n, xq, x, _nothing(), one_tile)
    return _scaled(acc, s, _small(arena, _small_at(scale_at, n, np.int64(20), np.int64(4))), xs, e)


@kernel
def four_lows_k(acc, arena, scale_at, n, xs, xn, e):
    """Acc + min * d_x * (sum of q_x) for q4_k and q5_k."""
    always_inline()
    return _scaled_sums(acc, _small(arena, further(_small_at(scale_at, n, np.int64(20), np.int64(4)), W)), xs, xn, e)


@kernel
def four_supers(acc, part, arena, at, size, u):
    """Acc + part * d of super-block ``u``; the f16 d [row] are ``size`` bytes apart from ``at`` on."""
    always_inline()
    d = _halves(arena, at, size, u)
    return fma(d[0], part[0], acc[0]), fma(d[1], part[1], acc[1]), fma(d[2], part[2], acc[2]), fma(d[3], part[3], acc[3])


@kernel
def _six_group(s, r, arena, at, n, xq, x, lower, upper, one_tile, g, shift):
    """As :func:`_five_group` for two high bits, which lie ``shift`` above their place in the planes."""
    always_inline()
    codes = _bytes(arena, at + g * 4 * W, 24 * W, n)
    s = _dot_6bit(s, _with_bits(_lows(codes), lower, shift, 48), _activations(xq, x, g * 4))
    r = _dot_6bit(r, _with_bits(_highs(codes), upper, shift, 48), _activations(xq, x, 16 + g * 4))
    return (_joined(s), _joined(r)) if one_tile != 0 else (s, r)


@kernel
def four_q6_k(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e, one_tile):
    """Acc + d_x * (sum over halves of scale * (sum of (q_w - 32) * q_x over 16 columns)).

    Where 6-bit codes go in with their offset it must go again from each half. The activation's sums come per 32 columns, so
    those of the first 16 are added up here, by products with the offset.
    """
    always_inline()
    zero = _nothing()
    s, r = _start(zero), _start(zero)
    lower, upper = _bytes(arena, data_at + 16 * W, 24 * W, n), _bytes(arena, data_at + 20 * W, 24 * W, n)
    s, r = _six_group(s, r, arena, data_at, n, xq, x, lower, upper, one_tile, np.int64(0), np.int64(0))
    s, r = _six_group(s, r, arena, data_at, n, xq, x, lower, upper, one_tile, np.int64(1), np.int64(2))
    lower, upper = _raised(lower), _raised(upper)
    s, r = _six_group(s, r, arena, data_at, n, xq, x, lower, upper, one_tile, np.int64(2), np.int64(0))
    s, r = _six_group(s, r, arena, data_at, n, xq, x, lower, upper, one_tile, np.int64(3), np.int64(2))
    i, j = _end(s, zero), _end(r, zero)
    if Q6_BIAS != 0:
        o, bias = zero, splat_byte(Q6_BIAS)
        for g in range(4):
            y = _activations(xq, x, g * 4)
            o = (
                dot4_nibbles(o[0], bias, y[0]),
                dot4_nibbles(o[1], bias, y[1]),
                dot4_nibbles(o[2], bias, y[2]),
                dot4_nibbles(o[3], bias, y[3]),
            )
        i = sub_i32(i[0], o[0]), sub_i32(i[1], o[1]), sub_i32(i[2], o[2]), sub_i32(i[3], o[3])
        j = _plus_i32(_plus_i32(j, _offsets(Q6_BIAS, xn, e)), o)
    at = _small_at(scale_at, n, np.int64(18), np.int64(2))
    f, d = _small_signed(arena, at), _small_signed(arena, further(at, W))
    return (
        fma(fma(as_f32(j[0]), d[0], mul(as_f32(i[0]), f[0])), broadcast_f32(xs, e[0]), acc[0]),
        fma(fma(as_f32(j[1]), d[1], mul(as_f32(i[1]), f[1])), broadcast_f32(xs, e[1]), acc[1]),
        fma(fma(as_f32(j[2]), d[2], mul(as_f32(i[2]), f[2])), broadcast_f32(xs, e[2]), acc[2]),
        fma(fma(as_f32(j[3]), d[3], mul(as_f32(i[3]), f[3])), broadcast_f32(xs, e[3]), acc[3]),
    )
