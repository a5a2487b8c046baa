"""Matrix-vector products over packed weights, the inner loop of decode.

Knows nothing of layers or files: arrays in, one output range written.

    W lanes = rows of a tile    C columns    B = C // 32 blocks per row    t tile index

Layout of a packed tensor (made by ``engine/pack.py``), rows padded with zeros to whole tiles:
    f32, f16, bf16   data   [t][column][row]
    q8_0             data   [t][block][group of 4 columns: 8][row][column in group: 4]   byte = q + Q8_BIAS
    q4_0, q4_1       data   [t][block][group: 4][row][4]   low nibble: column 4g+j, high nibble: column 16+4g+j
    scales           f16    [t][block][row] (q8_0, q4_0, q5_0), [t][block][d then m][row] (q4_1, q5_1)
    q5_0, q5_1       ``matvec_5bit.py``          q4_k, q5_k, q6_k   ``matvec_k.py``
So one vector holds the same columns of W rows, four broadcast activation bytes meet it, and a lane's sum is its row's:
no horizontal sums, and the order of every sum is the same on one thread or many. Four tiles go together, one from each quarter
of the range (``blocks.py`` says why); which tiles those are changes no sum.

The activation comes as f32 ``x`` [C] from ``x_at`` on and, for block formats, as i8 ``xq`` [C] from ``q_at`` with f32 ``xs``
[B] scales and i32 ``xn`` [B] sums of ``xq`` over each block (the correction for weights stored with an offset) from ``s_at``.
"""

from __future__ import annotations

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.blocks import (
    four,
    four_lows_1,
    four_q4_0,
    four_q4_1,
    four_q8_0,
    four_tiles,
    further,
    plus,
    store,
    times,
    zeros,
)
from deepthin.engine.kernels.matvec_5bit import matvec_q5_0, matvec_q5_1
from deepthin.engine.kernels.matvec_k import matvec_q4_k, matvec_q5_k, matvec_q6_k
from deepthin.engine.simd import W, allow_dots, broadcast_f32, fma, load_bf16, load_f16, load_f32

F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K = range(11)


@kernel
def matvec_f32(out, out_at, arena, data_at, cols, x, x_at, t0, t1):
    """out[out_at + r] = sum over c of W[r, c] * x[c] for the rows of tiles t0..t1-1."""
    row = cols * 4 * W
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        at = further(times(tiles, row), data_at)
        a, b, c, d = zeros()
        for k in range(cols):
            p, y = further(at, k * 4 * W), broadcast_f32(x, x_at + k)
            a, b = fma(load_f32(arena, p[0]), y, a), fma(load_f32(arena, p[1]), y, b)
            c, d = fma(load_f32(arena, p[2]), y, c), fma(load_f32(arena, p[3]), y, d)
        store(out, further(times(tiles, W), out_at), (a, b, c, d))


@kernel
def matvec_f16(out, out_at, arena, data_at, cols, x, x_at, t0, t1):
    """As :func:`matvec_f32` for f16 weights."""
    row = cols * 2 * W
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        at = further(times(tiles, row), data_at)
        a, b, c, d = zeros()
        for k in range(cols):
            p, y = further(at, k * 2 * W), broadcast_f32(x, x_at + k)
            a, b = fma(load_f16(arena, p[0]), y, a), fma(load_f16(arena, p[1]), y, b)
            c, d = fma(load_f16(arena, p[2]), y, c), fma(load_f16(arena, p[3]), y, d)
        store(out, further(times(tiles, W), out_at), (a, b, c, d))


@kernel
def matvec_bf16(out, out_at, arena, data_at, cols, x, x_at, t0, t1):
    """As :func:`matvec_f32` for bf16 weights."""
    row = cols * 2 * W
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        at = further(times(tiles, row), data_at)
        a, b, c, d = zeros()
        for k in range(cols):
            p, y = further(at, k * 2 * W), broadcast_f32(x, x_at + k)
            a, b = fma(load_bf16(arena, p[0]), y, a), fma(load_bf16(arena, p[1]), y, b)
            c, d = fma(load_bf16(arena, p[2]), y, c), fma(load_bf16(arena, p[3]), y, d)
        store(out, further(times(tiles, W), out_at), (a, b, c, d))


@kernel
def matvec_q8_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of q_w * q_x), exact in i32 within a block."""
    allow_dots()
    blocks = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        acc = zeros()
        for k in range(blocks):
            n, x, e = further(times(tiles, blocks), k), four(q_at + k * 32), four(s_at + k)
            acc = four_q8_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e)
        store(out, further(times(tiles, W), out_at), acc)


@kernel
def matvec_q4_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """As :func:`matvec_q8_0` for nibbles with offset 8."""
    allow_dots()
    blocks = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        acc = zeros()
        for k in range(blocks):
            n, x, e = further(times(tiles, blocks), k), four(q_at + k * 32), four(s_at + k)
            acc = four_q4_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e)
        store(out, further(times(tiles, W), out_at), acc)


@kernel
def matvec_q4_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of q_w * q_x) + m_w * d_x * (sum of q_x)."""
    allow_dots()
    blocks = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        acc = zeros()
        lows = zeros()
        for k in range(blocks):
            n, x, e = further(times(tiles, blocks), k), four(q_at + k * 32), four(s_at + k)
            acc = four_q4_1(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e)
            lows = four_lows_1(lows, arena, scale_at, n, xs, xn, e)
        store(out, further(times(tiles, W), out_at), plus(acc, lows))


@kernel
def matvec(out, out_at, arena, ops, i, x, x_at, xq, q_at, xs, xn, s_at, t0, t1):
    """Dispatch on ``ops[i]`` = i64 (format, data offset, scale offset, tiles, columns) once per call, outside every loop."""
    fmt, data_at, scale_at, cols = ops[i, 0], ops[i, 1], ops[i, 2], ops[i, 4]
    if fmt == Q4_0:
        matvec_q4_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q8_0:
        matvec_q8_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q4_1:
        matvec_q4_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q5_0:
        matvec_q5_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q5_1:
        matvec_q5_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q4_K:
        matvec_q4_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q5_K:
        matvec_q5_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == Q6_K:
        matvec_q6_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1)
    elif fmt == F16:
        matvec_f16(out, out_at, arena, data_at, cols, x, x_at, t0, t1)
    elif fmt == BF16:
        matvec_bf16(out, out_at, arena, data_at, cols, x, x_at, t0, t1)
    else:
        matvec_f32(out, out_at, arena, data_at, cols, x, x_at, t0, t1)
