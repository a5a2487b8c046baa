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
from deepthin.engine.kernels.blocks import (
    four,
    four_lows_k,
    four_q4_k,
    four_q5_k,
    four_q6_k,
    four_supers,
    four_tiles,
    further,
    minus,
    store,
    times,
    zeros,
)
from deepthin.engine.simd import W, allow_dots


@kernel
def matvec_q4_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over super-blocks of d * (sum over blocks of scale * d_x * (sum of q_w * q_x)).

    From it goes the sum over super-blocks of dmin * (sum over blocks of min * d_x * (sum of q_x)). A block's sums are exact.
    """
    allow_dots()
    supers = cols // 256
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        acc = zeros()
        lows = zeros()
        for j in range(supers):
            u = further(times(tiles, supers), j)
            part = zeros()
            low = zeros()
            for k in range(8):
                n, x, e = further(times(u, 8), k), four(q_at + (j * 8 + k) * 32), four(s_at + j * 8 + k)
                part = four_q4_k(part, arena, data_at, scale_at, n, xq, x, xs, xn, e)
                low = four_lows_k(low, arena, scale_at, n, xs, xn, e)
            acc = four_supers(acc, part, arena, scale_at, 20 * W, u)
            lows = four_supers(lows, low, arena, scale_at + 2 * W, 20 * W, u)
        store(out, further(times(tiles, W), out_at), minus(acc, lows))


@kernel
def matvec_q5_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """As :func:`matvec_q4_k`, with fifth bits as in ``matvec_q5_0``."""
    allow_dots()
    supers = cols // 256
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        acc = zeros()
        lows = zeros()
        for j in range(supers):
            u = further(times(tiles, supers), j)
            part = zeros()
            low = zeros()
            for k in range(8):
                n, x, e = further(times(u, 8), k), four(q_at + (j * 8 + k) * 32), four(s_at + j * 8 + k)
                part = four_q5_k(part, arena, data_at, scale_at, n, xq, x, xs, xn, e, np.int64(0))
                low = four_lows_k(low, arena, scale_at, n, xs, xn, e)
            acc = four_supers(acc, part, arena, scale_at, 20 * W, u)
            lows = four_supers(lows, low, arena, scale_at + 2 * W, 20 * W, u)
        store(out, further(times(tiles, W), out_at), minus(acc, lows))


@kernel
def matvec_q6_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over super-blocks of d * (sum over blocks of d_x * (sum over halves of scale * s)).

    s = sum of (q_w - 32) * q_x over 16 columns, exact in i32.
    """
    allow_dots()
    supers = cols // 256
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        acc = zeros()
        for j in range(supers):
            u = further(times(tiles, supers), j)
            part = zeros()
            for k in range(8):
                n, x, e = further(times(u, 8), k), four(q_at + (j * 8 + k) * 32), four(s_at + j * 8 + k)
                part = four_q6_k(part, arena, data_at, scale_at, n, xq, x, xs, xn, e, np.int64(0))
            acc = four_supers(acc, part, arena, scale_at, 18 * W, u)
        store(out, further(times(tiles, W), out_at), acc)
