"""Matrix products for several tokens over Q4_K, Q5_K and Q6_K; layouts in ``matvec_k.py``, notation in ``matmul.py``."""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.blocks import (
    block_q4_k,
    block_q5_k,
    block_q6_k,
    low_k,
    store_tokens,
    super_k,
    super_low_k,
    super_q6_k,
)
from deepthin.engine.simd import W, splat, sub


@kernel
def tiles_q4_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q4_k``. Four tokens share each load."""
    n = cols // 256
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = q_at + m * q_stride, s_at + m * s_stride
            a, b, c, d, al, bl, cl, dl = zero, zero, zero, zero, zero, zero, zero, zero
            for j in range(n):
                f, g, h, o, fl, gl, hl, ol = zero, zero, zero, zero, zero, zero, zero, zero
                for k in range(8):
                    i, x, e = (t * n + j) * 8 + k, x0 + (j * 8 + k) * 32, e0 + j * 8 + k
                    f = block_q4_k(f, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    fl = low_k(fl, arena, scale_at, i, xs, xn, e)
                    x, e = x + q_stride, e + s_stride
                    g = block_q4_k(g, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    gl = low_k(gl, arena, scale_at, i, xs, xn, e)
                    x, e = x + q_stride, e + s_stride
                    h = block_q4_k(h, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    hl = low_k(hl, arena, scale_at, i, xs, xn, e)
                    x, e = x + q_stride, e + s_stride
                    o = block_q4_k(o, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    ol = low_k(ol, arena, scale_at, i, xs, xn, e)
                i = t * n + j
                a, al = super_k(a, f, arena, scale_at, i), super_low_k(al, fl, arena, scale_at, i)
                b, bl = super_k(b, g, arena, scale_at, i), super_low_k(bl, gl, arena, scale_at, i)
                c, cl = super_k(c, h, arena, scale_at, i), super_low_k(cl, hl, arena, scale_at, i)
                d, dl = super_k(d, o, arena, scale_at, i), super_low_k(dl, ol, arena, scale_at, i)
            store_tokens(out, out_at + m * out_stride + t * W, out_stride, sub(a, al), sub(b, bl), sub(c, cl), sub(d, dl))


@kernel
def tiles_q5_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q4_k` for ``matvec_q5_k``."""
    n = cols // 256
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = q_at + m * q_stride, s_at + m * s_stride
            a, b, c, d, al, bl, cl, dl = zero, zero, zero, zero, zero, zero, zero, zero
            for j in range(n):
                f, g, h, o, fl, gl, hl, ol = zero, zero, zero, zero, zero, zero, zero, zero
                for k in range(8):
                    i, x, e = (t * n + j) * 8 + k, x0 + (j * 8 + k) * 32, e0 + j * 8 + k
                    f = block_q5_k(f, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    fl = low_k(fl, arena, scale_at, i, xs, xn, e)
                    x, e = x + q_stride, e + s_stride
                    g = block_q5_k(g, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    gl = low_k(gl, arena, scale_at, i, xs, xn, e)
                    x, e = x + q_stride, e + s_stride
                    h = block_q5_k(h, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    hl = low_k(hl, arena, scale_at, i, xs, xn, e)
                    x, e = x + q_stride, e + s_stride
                    o = block_q5_k(o, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    ol = low_k(ol, arena, scale_at, i, xs, xn, e)
                i = t * n + j
                a, al = super_k(a, f, arena, scale_at, i), super_low_k(al, fl, arena, scale_at, i)
                b, bl = super_k(b, g, arena, scale_at, i), super_low_k(bl, gl, arena, scale_at, i)
                c, cl = super_k(c, h, arena, scale_at, i), super_low_k(cl, hl, arena, scale_at, i)
                d, dl = super_k(d, o, arena, scale_at, i), super_low_k(dl, ol, arena, scale_at, i)
            store_tokens(out, out_at + m * out_stride + t * W, out_stride, sub(a, al), sub(b, bl), sub(c, cl), sub(d, dl))


@kernel
def tiles_q6_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q4_k` for ``matvec_q6_k``."""
    n = cols // 256
    zero = splat(np.float32(0))
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = q_at + m * q_stride, s_at + m * s_stride
            a, b, c, d = zero, zero, zero, zero
            for j in range(n):
                f, g, h, o = zero, zero, zero, zero
                for k in range(8):
                    i, x, e = (t * n + j) * 8 + k, x0 + (j * 8 + k) * 32, e0 + j * 8 + k
                    f = block_q6_k(f, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    x, e = x + q_stride, e + s_stride
                    g = block_q6_k(g, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    x, e = x + q_stride, e + s_stride
                    h = block_q6_k(h, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                    x, e = x + q_stride, e + s_stride
                    o = block_q6_k(o, arena, data_at, scale_at, i, xq, x, xs, xn, e)
                i = t * n + j
                a, b = super_q6_k(a, f, arena, scale_at, i), super_q6_k(b, g, arena, scale_at, i)
                c, d = super_q6_k(c, h, arena, scale_at, i), super_q6_k(d, o, arena, scale_at, i)
            store_tokens(out, out_at + m * out_stride + t * W, out_stride, a, b, c, d)
