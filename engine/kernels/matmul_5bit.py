"""Matrix products for several tokens over Q5_0 and Q5_1; layouts in ``matvec_5bit.py``, notation in ``matmul.py``."""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.blocks import block_q5_0, block_q5_1, low_1, store_tokens
from deepthin.engine.simd import W, add, splat


@kernel
def tiles_q5_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q5_0``. Four tokens share each load."""
    n = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = q_at + m * q_stride, s_at + m * s_stride
            a = splat(np.float32(0))
            b, c, d = a, a, a
            for k in range(n):
                x, e = x0 + k * 32, e0 + k
                a = block_q5_0(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                b = block_q5_0(b, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                c = block_q5_0(c, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                d = block_q5_0(d, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
            store_tokens(out, out_at + m * out_stride + t * W, out_stride, a, b, c, d)


@kernel
def tiles_q5_1(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q5_0` for ``matvec_q5_1``."""
    n = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = q_at + m * q_stride, s_at + m * s_stride
            a = splat(np.float32(0))
            b, c, d, al, bl, cl, dl = a, a, a, a, a, a, a
            for k in range(n):
                x, e = x0 + k * 32, e0 + k
                a = block_q5_1(a, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                al = low_1(al, arena, scale_at, t * n + k, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                b = block_q5_1(b, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                bl = low_1(bl, arena, scale_at, t * n + k, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                c = block_q5_1(c, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                cl = low_1(cl, arena, scale_at, t * n + k, xs, xn, e)
                x, e = x + q_stride, e + s_stride
                d = block_q5_1(d, arena, data_at, scale_at, t * n + k, xq, x, xs, xn, e)
                dl = low_1(dl, arena, scale_at, t * n + k, xs, xn, e)
            store_tokens(out, out_at + m * out_stride + t * W, out_stride, add(a, al), add(b, bl), add(c, cl), add(d, dl))
