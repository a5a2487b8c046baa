"""Rows read back out of packed weights: the embedding of a token.

    W lanes = rows of a tile    C columns    t tile index    r row within its tile

Layouts are drawn in ``matvec.py``, ``matvec_5bit.py`` and ``matvec_k.py``.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.matvec import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0
from deepthin.engine.simd import Q8_BIAS, W, load_scalar_bf16, load_scalar_f16, load_scalar_f32, never_inline


@kernel
def _code(arena, p, r, c, fmt):
    """The integer of column c of 0..31 of row r, in a block packed from ``p`` on."""
    byte = np.int32(arena[p + ((c % 16 // 4) * W + r) * 4 + c % 4])
    code = byte & 15 if c < 16 else byte >> 4
    g = c % 16 // 4
    if fmt in (Q5_0, Q5_1, Q5_K):
        plane = np.int32(arena[p + (4 * W + r) * 4 + c % 4])
        code |= (plane >> (g + 4 if c < 16 else g) & 1) << 4
    elif fmt == Q6_K:
        plane = np.int32(arena[p + ((4 + c // 16) * W + r) * 4 + c % 4])
        code |= (plane >> (2 * g + 4 if g < 2 else 2 * g - 4) & 3) << 4
    return code


@kernel
def read_row(out, out_at, arena, ops, i, row):
    """out[out_at + c] = W[row, c] for all columns: one embedding row out of packed tiles."""
    never_inline()
    fmt, data_at, scale_at, cols = ops[i, 0], ops[i, 1], ops[i, 2], ops[i, 4]
    t, r = row // W, row % W
    blocks = cols // 32
    if fmt == F32:
        for c in range(cols):
            out[out_at + c] = load_scalar_f32(arena, data_at + ((t * cols + c) * W + r) * 4)
    elif fmt == F16:
        for c in range(cols):
            out[out_at + c] = load_scalar_f16(arena, data_at + ((t * cols + c) * W + r) * 2)
    elif fmt == BF16:
        for c in range(cols):
            out[out_at + c] = load_scalar_bf16(arena, data_at + ((t * cols + c) * W + r) * 2)
    elif fmt == Q8_0:
        for b in range(blocks):
            d = load_scalar_f16(arena, scale_at + ((t * blocks + b) * W + r) * 2)
            for c in range(32):
                at = data_at + (((t * blocks + b) * 8 + c // 4) * W + r) * 4 + c % 4
                q = np.int32(arena[at])
                if Q8_BIAS == 0 and q >= 128:
                    q -= np.int32(256)
                out[out_at + b * 32 + c] = d * np.float32(q - Q8_BIAS)
    elif fmt in (Q4_K, Q5_K):
        size = 16 if fmt == Q4_K else 20
        for b in range(blocks):
            at = scale_at + (t * blocks + b) // 8 * 20 * W
            sub = at + (4 + b % 8 * 2) * W + r
            d = load_scalar_f16(arena, at + 2 * r) * np.float32(arena[sub])
            low = load_scalar_f16(arena, at + 2 * W + 2 * r) * np.float32(arena[sub + W])
            for c in range(32):
                q = _code(arena, data_at + (t * blocks + b) * size * W, r, c, fmt)
                out[out_at + b * 32 + c] = d * np.float32(q) - low
    elif fmt == Q6_K:
        for b in range(blocks):
            at = scale_at + (t * blocks + b) // 8 * 18 * W
            for c in range(32):
                scale = np.int32(arena[at + (2 + b % 8 * 2 + c // 16) * W + r])
                d = load_scalar_f16(arena, at + 2 * r) * np.float32(scale - 256 if scale >= 128 else scale)
                q = _code(arena, data_at + (t * blocks + b) * 24 * W, r, c, fmt)
                out[out_at + b * 32 + c] = d * np.float32(q - 32)
    else:
        size = 16 if fmt in (Q4_0, Q4_1) else 20
        has_low = fmt in (Q4_1, Q5_1)
        offset = np.float32(0 if has_low else (8 if fmt == Q4_0 else 16))
        for b in range(blocks):
            at = scale_at + ((t * blocks + b) * (2 if has_low else 1) * W + r) * 2
            d = load_scalar_f16(arena, at)
            low = load_scalar_f16(arena, at + 2 * W) if has_low else np.float32(0)
            for c in range(32):
                q = _code(arena, data_at + (t * blocks + b) * size * W, r, c, fmt)
                out[out_at + b * 32 + c] = d * (np.float32(q) - offset) + low
