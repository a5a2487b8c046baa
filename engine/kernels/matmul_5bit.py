"""Matrix products for several tokens over Q5_0 and Q5_1; layouts in ``matvec_5bit.py``, notation in ``matmul.py``."""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.blocks import apart, four, four_lows_1, four_q5_0, four_q5_1, further, plus, store, zeros
from deepthin.engine.simd import W, allow_dots


@kernel
def tiles_q5_0(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """Products of tiles t0..t1-1 for the first ``whole`` tokens, as ``matvec_q5_0``. Four tokens share each load."""
    allow_dots()
    blocks = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = apart(q_at + m * q_stride, q_stride), apart(s_at + m * s_stride, s_stride)
            acc = zeros()
            for k in range(blocks):
                n, x, e = four(t * blocks + k), further(x0, k * 32), further(e0, k)
                acc = four_q5_0(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e, np.int64(1))
            store(out, apart(out_at + m * out_stride + t * W, out_stride), acc)


@kernel
def tiles_q5_1(
    out, out_at, out_stride, arena, data_at, scale_at, cols, xq, q_at, q_stride, xs, xn, s_at, s_stride, whole, t0, t1
):  # fmt: skip
    """As :func:`tiles_q5_0` for ``matvec_q5_1``."""
    allow_dots()
    blocks = cols // 32
    for t in range(t0, t1):
        for m in range(0, whole, 4):
            x0, e0 = apart(q_at + m * q_stride, q_stride), apart(s_at + m * s_stride, s_stride)
            acc = zeros()
            lows = zeros()
            for k in range(blocks):
                n, x, e = four(t * blocks + k), further(x0, k * 32), further(e0, k)
                acc = four_q5_1(acc, arena, data_at, scale_at, n, xq, x, xs, xn, e, np.int64(1))
                lows = four_lows_1(lows, arena, scale_at, n, xs, xn, e)
            store(out, apart(out_at + m * out_stride + t * W, out_stride), plus(acc, lows))
