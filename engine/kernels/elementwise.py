"""Everything of a block that is neither a matrix product nor attention: norm, activation quantisation, SwiGLU, rotation.

Rows are f32 and padded with zeros to whole vectors, so no loop needs a remainder. Each thread that needs a result
computes all of it: at these widths that is cheaper than a barrier, and the bits are the same on every thread.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    W,
    absolute,
    add,
    add_i32,
    div,
    exp,
    fma,
    larger,
    load_f32,
    maximum,
    mul,
    never_inline,
    reduce_add,
    reduce_add_i32,
    reduce_larger,
    round_i32,
    splat,
    splat_i32,
    store_f32,
    store_i8,
    sub,
)

_INFINITE = np.float32(np.inf)
_SMALLEST = np.float32(2.0**-119)  # blocks with smaller numbers only count as zeros: 127 / peak would be infinite


@kernel
def rms_norm(out, out_at, x, x_at, weight, weight_at, width, eps):
    """Out = x / sqrt(mean(x²) + eps) * weight.

    Shapes: f32 [width padded to W] each, from ``out_at``, ``x_at`` and ``weight_at`` on. All of out is NaN when a value of x is
    not finite, or so large that f32 cannot hold the sum of squares.
    """
    never_inline()
    total = splat(np.float32(0))
    for i in range(0, width, W):
        v = load_f32(x, x_at + i)
        total = fma(v, v, total)
    mean = reduce_add(total) / np.float32(width)
    scale = splat(np.float32(1) / np.sqrt(mean + eps) if mean < _INFINITE else np.float32(np.nan))
    for i in range(0, width, W):
        store_f32(out, out_at + i, mul(mul(load_f32(x, x_at + i), scale), load_f32(weight, weight_at + i)))


@kernel
def head_norm(out, out_at, x, x_at, weight, weight_at, head_dim, eps):
    """:func:`rms_norm` of one head of x, which need not be a whole number of vectors; out and weight are padded to W."""
    never_inline()
    for e in range(head_dim):
        out[out_at + e] = x[x_at + e]
    for e in range(head_dim, (head_dim + W - 1) // W * W):
        out[out_at + e] = np.float32(0)
    rms_norm(out, out_at, out, out_at, weight, weight_at, head_dim, eps)


@kernel
def quantize(x, x_at, width, xq, q_at, xs, xn, s_at):
    """Store x in blocks of 32 as i8 codes, f32 scales and i32 sums of codes: x ≈ xq * xs, scale = max|x| / 127.

    Shapes: x f32 [width], xq i8 [width], xs f32 [width // 32], xn i32 [width // 32], from the given offsets on; width is a
    multiple of 32. A block with a value that is not finite gets codes of 0 and a scale that is not: 0 times that is NaN, so
    every product with the block is.
    """
    never_inline()
    for b in range(width // 32):
        top = absolute(load_f32(x, x_at + b * 32))
        for i in range(W, 32, W):
            top = larger(top, absolute(load_f32(x, x_at + b * 32 + i)))
        peak = reduce_larger(top)
        total = splat_i32(np.int32(0))
        if peak >= _SMALLEST and peak < _INFINITE:
            inverse = splat(np.float32(127) / peak)
            for i in range(0, 32, W):
                codes = round_i32(mul(load_f32(x, x_at + b * 32 + i), inverse))
                store_i8(xq, q_at + b * 32 + i, codes)
                total = add_i32(total, codes)
        else:
            for i in range(0, 32, W):
                store_i8(xq, q_at + b * 32 + i, total)
        xs[s_at + b] = peak / np.float32(127)
        xn[s_at + b] = reduce_add_i32(total)


@kernel
def swiglu(gate, up, start, stop):
    """Gate = gate * sigmoid(gate) * up for i in start..stop-1, in place; both bounds are multiples of W."""
    never_inline()
    one, zero = splat(np.float32(1)), splat(np.float32(0))
    for i in range(start, stop, W):
        g = load_f32(gate, i)
        store_f32(gate, i, mul(div(g, add(one, exp(sub(zero, g)))), load_f32(up, i)))


@kernel
def relu2(x, start, stop):
    """Replace x by max(x, 0)² for i in start..stop-1, in place; both bounds are multiples of W."""
    never_inline()
    zero = splat(np.float32(0))
    for i in range(start, stop, W):
        v = maximum(zero, load_f32(x, i))  # in this order NaN stays
        store_f32(x, i, mul(v, v))


@kernel
def gelu(x, start, stop):
    """Replace x by x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x³)), GELU's tanh form, as :func:`relu2` does."""
    never_inline()
    one, zero = splat(np.float32(1)), splat(np.float32(0))
    linear, cubic = splat(np.float32(1.5957691216057308)), splat(np.float32(0.07135481627159526))
    for i in range(start, stop, W):
        v = load_f32(x, i)
        inside = mul(v, fma(mul(v, v), cubic, linear))
        store_f32(x, i, div(v, add(one, exp(sub(zero, inside)))))


@kernel
def add_rows(x, x_at, y, y_at, count):
    """Add y to x in place: ``count`` values, a multiple of W, from ``x_at`` and ``y_at`` on."""
    for i in range(0, count, W):
        store_f32(x, x_at + i, add(load_f32(x, x_at + i), load_f32(y, y_at + i)))


@kernel
def rotate(out, out_at, x, x_at, cosine, sine, table_at, half, scale):
    """Rotary embedding of one head, rotate-half order, times ``scale``.

    out[i] = x[i] cos - x[i + half] sin and out[i + half] = x[i + half] cos + x[i] sin, i < half; in place is fine.
    """
    never_inline()
    by = splat(scale)
    whole = half // W * W
    for i in range(0, whole, W):
        c, s = load_f32(cosine, table_at + i), load_f32(sine, table_at + i)
        a, b = load_f32(x, x_at + i), load_f32(x, x_at + half + i)
        store_f32(out, out_at + i, mul(sub(mul(a, c), mul(b, s)), by))
        store_f32(out, out_at + half + i, mul(fma(a, s, mul(b, c)), by))
    for i in range(whole, half):
        cos, sin = cosine[table_at + i], sine[table_at + i]
        u, v = x[x_at + i], x[x_at + half + i]
        out[out_at + i] = (u * cos - v * sin) * scale
        out[out_at + half + i] = (v * cos + u * sin) * scale
