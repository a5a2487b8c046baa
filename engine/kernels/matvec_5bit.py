"""Matrix-vector products over Q5_0 and Q5_1: nibbles as in ``matvec``, and one plane of fifth bits beside them.

Layout, otherwise as ``engine/kernels/matvec.py`` says:
    data     [t][block][group: 4, then plane][row][4]
    plane    byte j holds the fifth bits of column 4g+j at bit 4+g and of column 16+4g+j at bit g, so that the nibbles of
             group g get theirs by a shift of g to the right from the plane, or from the plane raised by four bits
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.blocks import (
    four,
    four_lows_1,
    four_q5_0,
    four_q5_1,
    four_tiles,
    further,
    plus,
    store,
    times,
    zeros,
)
from deepthin.engine.simd import W, allow_dots


@kernel
def matvec_q5_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of (q_w - 16) * q_x), exact in i32 within a block."""
    allow_dots()
    blocks = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        acc = zeros()
        for k in range(blocks):
            n, x, e = further(times(tiles, blocks), k), four(q_at + k * 32), four(s_at + k)
            acc = four_q5_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e, np.int64(0))
        store(out, further(times(tiles, W), out_at), acc)


@kernel
def matvec_q5_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of q_w * q_x) + m_w * d_x * (sum of q_x)."""
    allow_dots()
    blocks = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        tiles = four_tiles(t0, t1, i)
        acc = zeros()
        lows = zeros()
        for k in range(blocks):
            n, x, e = further(times(tiles, blocks), k), four(q_at + k * 32), four(s_at + k)
            acc = four_q5_1(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e, np.int64(0))
            lows = four_lows_1(lows, arena, scale_at, n, xs, xn, e)
        store(out, further(times(tiles, W), out_at), plus(acc, lows))
