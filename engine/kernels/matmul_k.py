"""Matrix products for several tokens over Q4_K, Q5_K and Q6_K; layouts in ``matvec_k.py``, notation in ``matmul.py``."""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.blocks import (
    apart,
    four,
    four_lows_k,
    four_q4_k,
    four_q5_k,
    four_q6_k,
    four_supers,
    further,
    minus,
    store,
    zeros,
)
from deepthin.engine.simd import W, allow_dots


@kernel
def tiles_q4_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q4_k``. Four tokens share each load."""
    allow_dots()
    supers = cols // 256
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = apart(q_at + m * q_stride, q_stride), apart(s_at + m * s_stride, s_stride)
            acc = zeros()
            lows = zeros()
            for j in range(supers):
                u = t * supers + j
                part = zeros()
                low = zeros()
                for k in range(8):
                    n, x, e = four(u * 8 + k), further(x0, (j * 8 + k) * 32), further(e0, j * 8 + k)
                    part = four_q4_k(part, arena, data_at, scale_at, n, xq, x, xs, xn, e)
                    low = four_lows_k(low, arena, scale_at, n, xs, xn, e)
                acc = four_supers(acc, part, arena, scale_at, 20 * W, four(u))
                lows = four_supers(lows, low, arena, scale_at + 2 * W, 20 * W, four(u))
            store(out, apart(out_at + m * out_stride + t * W, out_stride), minus(acc, lows))


@kernel
def tiles_q5_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q4_k` for ``matvec_q5_k``."""
    allow_dots()
    supers = cols // 256
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = apart(q_at + m * q_stride, q_stride), apart(s_at + m * s_stride, s_stride)
            acc = zeros()
            lows = zeros()
            for j in range(supers):
                u = t * supers + j
                part = zeros()
                low = zeros()
                for k in range(8):
                    n, x, e = four(u * 8 + k), further(x0, (j * 8 + k) * 32), further(e0, j * 8 + k)
                    part = four_q5_k(part, arena, data_at, scale_at, n, xq, x, xs, xn, e, np.int64(1))
                    low = four_lows_k(low, arena, scale_at, n, xs, xn, e)
                acc = four_supers(acc, part, arena, scale_at, 20 * W, four(u))
                lows = four_supers(lows, low, arena, scale_at + 2 * W, 20 * W, four(u))
            store(out, apart(out_at + m * out_stride + t * W, out_stride), minus(acc, lows))


@kernel
def tiles_q6_k(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q4_k` for ``matvec_q6_k``."""
    allow_dots()
    supers = cols // 256
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = apart(q_at + m * q_stride, q_stride), apart(s_at + m * s_stride, s_stride)
            acc = zeros()
            for j in range(supers):
                u = t * supers + j
                part = zeros()
                for k in range(8):
                    n, x, e = four(u * 8 + k), further(x0, (j * 8 + k) * 32), further(e0, j * 8 + k)
                    part = four_q6_k(part, arena, data_at, scale_at, n, xq, x, xs, xn, e, np.int64(1))
                acc = four_supers(acc, part, arena, scale_at, 18 * W, four(u))
            store(out, apart(out_at + m * out_stride + t * W, out_stride), acc)
