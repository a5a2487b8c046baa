"""Matrix-vector products over Q5_0 and Q5_1: nibbles as in ``matvec``, and one plane of fifth bits beside them.

Layout, otherwise as ``engine/kernels/matvec.py`` says:
    data     [t][block][group: 4, then plane][row][4]
    plane    byte j holds the fifth bits of column 4g+j at bit 4+g and of column 16+4g+j at bit g, so that the nibbles of
             group g get theirs by a shift of g to the right from the plane, or from the plane raised by four bits
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.blocks import block_q5_0, block_q5_1, four_tiles, low_1, store_four
from deepthin.engine.simd import W, add, splat


@kernel
def matvec_q5_0(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of (q_w - 16) * q_x), exact in i32 within a block."""
    n = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for k in range(n):
            x, e = q_at + k * 32, s_at + k
            a = block_q5_0(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
            b = block_q5_0(b, arena, data_at, scale_at, u * n + k, xq, x, xs, xn, e)
            c = block_q5_0(c, arena, data_at, scale_at, v * n + k, xq, x, xs, xn, e)
            d = block_q5_0(d, arena, data_at, scale_at, w * n + k, xq, x, xs, xn, e)
        store_four(out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, a, b, c, d)


@kernel
def matvec_q5_1(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over blocks of d_w * d_x * (sum of q_w * q_x) + m_w * d_x * (sum of q_x)."""
    n = cols // 32
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a = splat(np.float32(0))
        b, c, d, al, bl, cl, dl = a, a, a, a, a, a, a
        for k in range(n):
            x, e = q_at + k * 32, s_at + k
            a = block_q5_1(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
            b = block_q5_1(b, arena, data_at, scale_at, u * n + k, xq, x, xs, xn, e)
            c = block_q5_1(c, arena, data_at, scale_at, v * n + k, xq, x, xs, xn, e)
            d = block_q5_1(d, arena, data_at, scale_at, w * n + k, xq, x, xs, xn, e)
            al, bl = low_1(al, arena, scale_at, t * n + k, xs, xn, e), low_1(bl, arena, scale_at, u * n + k, xs, xn, e)
            cl, dl = low_1(cl, arena, scale_at, v * n + k, xs, xn, e), low_1(dl, arena, scale_at, w * n + k, xs, xn, e)
        store_four(
            out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, add(a, al), add(b, bl), add(c, cl), add(d, dl)
        )
