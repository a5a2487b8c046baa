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
    block_q4_k,
    block_q5_k,
    block_q6_k,
    four_tiles,
    low_k,
    store_four,
    super_k,
    super_low_k,
    super_q6_k,
)
from deepthin.engine.simd import W, splat, sub


@kernel
def matvec_q4_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over super-blocks of d * (sum over blocks of scale * d_x * (sum of q_w * q_x)).

    From it goes the sum over super-blocks of dmin * (sum over blocks of min * d_x * (sum of q_x)). A block's sums are exact.
    """
    n = cols // 256
    zero = splat(np.float32(0))
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a, b, c, d, al, bl, cl, dl = zero, zero, zero, zero, zero, zero, zero, zero
        for j in range(n):
            ta, tb, tc, td = t * n + j, u * n + j, v * n + j, w * n + j
            f, g, h, o, fl, gl, hl, ol = zero, zero, zero, zero, zero, zero, zero, zero
            for k in range(8):
                x, e = q_at + (j * 8 + k) * 32, s_at + j * 8 + k
                f = block_q4_k(f, arena, data_at, scale_at, ta * 8 + k, xq, x, xs, xn, e)
                g = block_q4_k(g, arena, data_at, scale_at, tb * 8 + k, xq, x, xs, xn, e)
                h = block_q4_k(h, arena, data_at, scale_at, tc * 8 + k, xq, x, xs, xn, e)
                o = block_q4_k(o, arena, data_at, scale_at, td * 8 + k, xq, x, xs, xn, e)
                fl, gl = low_k(fl, arena, scale_at, ta * 8 + k, xs, xn, e), low_k(gl, arena, scale_at, tb * 8 + k, xs, xn, e)
                hl, ol = low_k(hl, arena, scale_at, tc * 8 + k, xs, xn, e), low_k(ol, arena, scale_at, td * 8 + k, xs, xn, e)
            a, al = super_k(a, f, arena, scale_at, ta), super_low_k(al, fl, arena, scale_at, ta)
            b, bl = super_k(b, g, arena, scale_at, tb), super_low_k(bl, gl, arena, scale_at, tb)
            c, cl = super_k(c, h, arena, scale_at, tc), super_low_k(cl, hl, arena, scale_at, tc)
            d, dl = super_k(d, o, arena, scale_at, td), super_low_k(dl, ol, arena, scale_at, td)
        store_four(
            out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, sub(a, al), sub(b, bl), sub(c, cl), sub(d, dl)
        )


@kernel
def matvec_q5_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """As :func:`matvec_q4_k`, with fifth bits as in ``matvec_q5_0``."""
    n = cols // 256
    zero = splat(np.float32(0))
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a, b, c, d, al, bl, cl, dl = zero, zero, zero, zero, zero, zero, zero, zero
        for j in range(n):
            ta, tb, tc, td = t * n + j, u * n + j, v * n + j, w * n + j
            f, g, h, o, fl, gl, hl, ol = zero, zero, zero, zero, zero, zero, zero, zero
            for k in range(8):
                x, e = q_at + (j * 8 + k) * 32, s_at + j * 8 + k
                f = block_q5_k(f, arena, data_at, scale_at, ta * 8 + k, xq, x, xs, xn, e)
                g = block_q5_k(g, arena, data_at, scale_at, tb * 8 + k, xq, x, xs, xn, e)
                h = block_q5_k(h, arena, data_at, scale_at, tc * 8 + k, xq, x, xs, xn, e)
                o = block_q5_k(o, arena, data_at, scale_at, td * 8 + k, xq, x, xs, xn, e)
                fl, gl = low_k(fl, arena, scale_at, ta * 8 + k, xs, xn, e), low_k(gl, arena, scale_at, tb * 8 + k, xs, xn, e)
                hl, ol = low_k(hl, arena, scale_at, tc * 8 + k, xs, xn, e), low_k(ol, arena, scale_at, td * 8 + k, xs, xn, e)
            a, al = super_k(a, f, arena, scale_at, ta), super_low_k(al, fl, arena, scale_at, ta)
            b, bl = super_k(b, g, arena, scale_at, tb), super_low_k(bl, gl, arena, scale_at, tb)
            c, cl = super_k(c, h, arena, scale_at, tc), super_low_k(cl, hl, arena, scale_at, tc)
            d, dl = super_k(d, o, arena, scale_at, td), super_low_k(dl, ol, arena, scale_at, td)
        store_four(
            out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, sub(a, al), sub(b, bl), sub(c, cl), sub(d, dl)
        )


@kernel
def matvec_q6_k(out, out_at, arena, data_at, scale_at, cols, xq, q_at, xs, xn, s_at, t0, t1):
    """out[out_at + r] = sum over super-blocks of d * (sum over blocks of d_x * (sum over halves of scale * s)).

    s = sum of (q_w - 32) * q_x over 16 columns, exact in i32.
    """
    n = cols // 256
    zero = splat(np.float32(0))
    for i in range((t1 - t0 + 3) // 4):
        t, u, v, w = four_tiles(t0, t1, i)
        a, b, c, d = zero, zero, zero, zero
        for j in range(n):
            ta, tb, tc, td = t * n + j, u * n + j, v * n + j, w * n + j
            f, g, h, o = zero, zero, zero, zero
            for k in range(8):
                x, e = q_at + (j * 8 + k) * 32, s_at + j * 8 + k
                f = block_q6_k(f, arena, data_at, scale_at, ta * 8 + k, xq, x, xs, xn, e)
                g = block_q6_k(g, arena, data_at, scale_at, tb * 8 + k, xq, x, xs, xn, e)
                h = block_q6_k(h, arena, data_at, scale_at, tc * 8 + k, xq, x, xs, xn, e)
                o = block_q6_k(o, arena, data_at, scale_at, td * 8 + k, xq, x, xs, xn, e)
            a, b = super_q6_k(a, f, arena, scale_at, ta), super_q6_k(b, g, arena, scale_at, tb)
            c, d = super_q6_k(c, h, arena, scale_at, tc), super_q6_k(d, o, arena, scale_at, td)
        store_four(out, out_at + t * W, out_at + u * W, out_at + v * W, out_at + w * W, a, b, c, d)
