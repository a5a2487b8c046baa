"""Integers and values inside K-quant super-blocks, in plain NumPy; values are bit-equal to the ``gguf`` package.

    N super-blocks of 256 values, each of S sub-blocks: 8 of 32 values (Q4_K, Q5_K) or 16 of 16 values (Q6_K)

Value = d * scale[s] * q - dmin * min[s] in Q4_K and Q5_K, d * scale[s] * (q - 32) in Q6_K. They are only read: choosing the
scales well is the art of llama.cpp's quantiser, and nothing here repeats it.
Source: ggml ``src/ggml-common.h`` at ggml-org/ggml@d99724f.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.arrays import F32, U8


def k_codes(blocks: np.ndarray) -> U8:
    """The unsigned integers q, u8 [N, 256], of Q4_K (0..15), Q5_K (0..31) or Q6_K (0..63) ``blocks`` [N]."""
    count = len(blocks)
    if "ql" in (blocks.dtype.names or ()):
        # two halves of 128 values: 64 bytes of low nibbles, whose high nibbles are the values 64 on, and 32 bytes of high bits
        low, high = blocks["ql"].reshape(count, 2, 1, 64), blocks["qh"].reshape(count, 2, 1, 32)
        low = np.concatenate([low & 15, low >> 4], axis=2).reshape(count, 2, 4, 32)
        high = high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
        codes: U8 = (low | high << np.uint8(4)).reshape(count, 256)
        return codes
    pairs = blocks["qs"].reshape(count, 4, 1, 32)  # low nibbles are sub-block 2g, high nibbles 2g + 1
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(count, 8, 32)
    if "qh" in (blocks.dtype.names or ()):  # bit s of byte j is the fifth bit of value j of sub-block s
        fifth = blocks["qh"].reshape(count, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1
        codes |= fifth << np.uint8(4)
    return codes.reshape(count, 256)


def k_scales_and_mins(blocks: np.ndarray) -> tuple[U8, U8]:
    """The 6-bit scales and mins, u8 [N, 8] each, of Q4_K or Q5_K ``blocks``.

    Twelve bytes in three groups of four: the low six bits of the first group are scales 0..3, of the second mins 0..3; the
    third holds the low nibbles of scales 4..7 and, above them, of mins 4..7, whose top two bits lie atop the first two groups.
    """
    first, second, third = (blocks["scales"].reshape(-1, 3, 4)[:, part] for part in range(3))
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    mins = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return scales, mins


def dequantize_q45_k(blocks: np.ndarray) -> F32:
    """Values f32 [N, 256] of Q4_K or Q5_K ``blocks``."""
    scales, mins = k_scales_and_mins(blocks)
    step = blocks["d"].astype(np.float32)[:, None] * scales.astype(np.float32)
    low = blocks["dmin"].astype(np.float32)[:, None] * mins.astype(np.float32)
    codes = k_codes(blocks).reshape(-1, 8, 32).astype(np.float32)
    values: F32 = (step[:, :, None] * codes - low[:, :, None]).reshape(-1, 256)
    return values


def dequantize_q6_k(blocks: np.ndarray) -> F32:
    """Values f32 [N, 256] of Q6_K ``blocks``."""
    step = blocks["d"].astype(np.float32)[:, None] * blocks["scales"].astype(np.float32)
    codes = k_codes(blocks).view(np.int8) - np.int8(32)
    values: F32 = (step[:, :, None] * codes.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)
    return values
