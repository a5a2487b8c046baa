"""Quantise and dequantise whole arrays, block by block, in plain NumPy; bit-equal to the ``gguf`` package.

R rows    C columns    G block elements    B = R * C // G blocks
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepthin.engine.arrays import F32, U8, U16
from deepthin.engine.errors import FormatError, UnsupportedError
from deepthin.engine.formats import BODY_QUANTS, BlockFormat
from deepthin.engine.mapped import let_go
from deepthin.engine.quants_k import dequantize_q6_k, dequantize_q45_k

_CHUNK_VALUES = 1 << 20  # bounds temporaries to some 25 MB however large the tensor


def quantize(values: F32, fmt: BlockFormat) -> U8:
    """Store ``values`` f32 [R, C] (or [C]) as ``fmt``; returns u8 [R, row_bytes].

    Raises:
        FormatError: the block does not divide C, or a value is not finite.
        UnsupportedError: the format is only read.
    """
    if not fmt.can_quantize:
        raise UnsupportedError(
            f"weights cannot be stored as {fmt.name} here, only read; let llama.cpp's llama-quantize make such a file, "
            f"or use one of {', '.join(BODY_QUANTS)}"
        )
    matrix = np.atleast_2d(values)
    rows, cols = matrix.shape
    row_bytes = fmt.row_bytes(cols)
    out = np.empty((rows, row_bytes), np.uint8)
    step = max(1, _CHUNK_VALUES // max(1, cols))
    for start in range(0, rows, step):
        part = np.ascontiguousarray(matrix[start : start + step], np.float32)
        if not np.isfinite(part).all():
            raise FormatError(f"cannot store a value that is not finite as {fmt.name}; the weights hold NaN or infinity")
        blocks = _QUANTIZERS[fmt.name](part.reshape(-1, fmt.block_elements), fmt)
        out[start : start + step] = blocks.view(np.uint8).reshape(len(part), row_bytes)
    return out


def dequantize(data: U8, fmt: BlockFormat) -> F32:
    """Values of ``data`` u8 [R, row_bytes] as f32 [R, C]."""
    rows, row_bytes = data.shape
    cols = row_bytes // fmt.block_bytes * fmt.block_elements
    out = np.empty((rows, cols), np.float32)
    step = max(1, _CHUNK_VALUES // max(1, cols))
    for start in range(0, rows, step):
        part = np.ascontiguousarray(data[start : start + step])
        blocks = part.reshape(-1, fmt.block_bytes).view(fmt.dtype)[:, 0]
        out[start : start + step] = _DEQUANTIZERS[fmt.name](blocks).reshape(len(part), cols)
    return out


def convert(data: U8, source: BlockFormat, fmt: BlockFormat) -> U8:
    """Blocks ``data`` u8 [R, row_bytes] of ``source`` stored as ``fmt``, without all their values in memory at once.

    Raises:
        FormatError: the block does not divide a row, or a value does not fit.
        UnsupportedError: the format is only read.
    """
    rows, stored_bytes = data.shape
    cols = stored_bytes // source.block_bytes * source.block_elements
    out = np.empty((rows, fmt.row_bytes(cols)), np.uint8)
    step = max(1, _CHUNK_VALUES // max(1, cols))
    for start in range(0, rows, step):
        part = data[start : start + step]
        out[start : start + step] = quantize(dequantize(part, source), fmt)
        let_go(part)
    return out


def f32_to_bf16(values: F32) -> U16:
    """Upper halves of ``values``, rounded to nearest even; same shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def bf16_to_f32(bits: U16) -> F32:
    """The f32 values whose upper halves are ``bits``; same shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: F32) -> F32:
    """Round half away from zero, as C's ``roundf`` does (NumPy rounds half to even)."""
    magnitude = np.abs(values)
    floored = np.floor(magnitude)
    rounded: F32 = np.sign(values) * (floored + np.floor(2 * (magnitude - floored)))
    return rounded


def _inverse(scale: F32) -> F32:
    with np.errstate(divide="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def pack_nibbles(q: U8) -> U8:
    """Low nibbles of u8 [B, 32] as u8 [B, 16]: value j in the low nibble of byte j, value j + 16 in its high nibble."""
    return q[:, :16] & np.uint8(15) | q[:, 16:] << np.uint8(4)


def block_codes(blocks: np.ndarray) -> U8:
    """Unsigned integers u8 [B, 32] of blocks with nibbles ``qs``, and fifth bits ``qh`` where the format has them."""
    codes = np.concatenate([blocks["qs"] & 15, blocks["qs"] >> 4], axis=1)
    if "qh" in (blocks.dtype.names or ()):
        codes |= np.unpackbits(blocks["qh"], axis=1, bitorder="little") << np.uint8(4)
    return codes


def _quantize_plain(blocks: F32, fmt: BlockFormat) -> np.ndarray:
    out = np.empty(len(blocks), fmt.dtype)
    if fmt.name == "bf16":
        out["d"] = f32_to_bf16(blocks[:, 0])
        if ((out["d"] & 0x7F80) == 0x7F80).any():  # rounded up to infinity
            raise FormatError("a weight is larger than bf16 can hold (3.39e38); use f32")
        return out
    _store(out, "d", blocks[:, 0], fmt)
    return out


def _store(out: np.ndarray, field: str, values: F32, fmt: BlockFormat) -> None:
    """Put ``values`` into ``field`` of the blocks ``out``, unless that is too narrow for them."""
    with np.errstate(over="raise"):
        try:
            out[field] = values
        except FloatingPointError:
            what = "weight" if fmt.block_elements == 1 else f"block's scale or minimum, which {fmt.name} stores as f16,"
            raise FormatError(f"a {what} is larger than f16 can hold (65504); use f32 or bf16") from None


def _quantize_q8_0(blocks: F32, fmt: BlockFormat) -> np.ndarray:
    scale = np.abs(blocks).max(axis=1) / np.float32(127)
    out = np.empty(len(blocks), fmt.dtype)
    _store(out, "d", scale, fmt)
    out["qs"] = _round(blocks * _inverse(scale)[:, None])
    return out


def _quantize_q45_0(blocks: F32, fmt: BlockFormat) -> np.ndarray:
    half = 8 if fmt.name == "q4_0" else 16
    at = np.abs(blocks).argmax(axis=1)
    scale = blocks[np.arange(len(blocks)), at] / np.float32(-half)
    scaled = blocks * _inverse(scale)[:, None]
    return _with_codes(np.trunc(scaled + np.float32(half + 0.5)), 2 * half - 1, fmt, d=scale)


def _quantize_q45_1(blocks: F32, fmt: BlockFormat) -> np.ndarray:
    top = 15 if fmt.name == "q4_1" else 31
    low = blocks.min(axis=1)
    scale = (blocks.max(axis=1) - low) / np.float32(top)
    scaled = (blocks - low[:, None]) * _inverse(scale)[:, None]
    return _with_codes(np.trunc(scaled + np.float32(0.5)), top, fmt, d=scale, m=low)


def _with_codes(codes: F32, top: int, fmt: BlockFormat, **scales: F32) -> np.ndarray:
    """Blocks of ``fmt`` holding ``codes`` clipped to 0..top."""
    whole = np.clip(codes, 0, top).astype(np.uint8)
    out = np.empty(len(codes), fmt.dtype)
    for name, values in scales.items():
        _store(out, name, values, fmt)
    out["qs"] = pack_nibbles(whole)
    if top > 15:
        out["qh"] = np.packbits(whole >> 4, axis=1, bitorder="little")
    return out


def _dequantize_plain(blocks: np.ndarray) -> F32:
    stored = blocks["d"]
    return bf16_to_f32(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)


def _dequantize_q8_0(blocks: np.ndarray) -> F32:
    return blocks["d"].astype(np.float32)[:, None] * blocks["qs"].astype(np.float32)


def _dequantize_q45_0(blocks: np.ndarray) -> F32:
    half = np.float32(16 if "qh" in (blocks.dtype.names or ()) else 8)
    return blocks["d"].astype(np.float32)[:, None] * (block_codes(blocks).astype(np.float32) - half)


def _dequantize_q45_1(blocks: np.ndarray) -> F32:
    scaled = blocks["d"].astype(np.float32)[:, None] * block_codes(blocks).astype(np.float32)
    return scaled + blocks["m"].astype(np.float32)[:, None]


_QUANTIZERS: dict[str, Callable[[F32, BlockFormat], np.ndarray]] = {
    "f32": _quantize_plain,
    "f16": _quantize_plain,
    "bf16": _quantize_plain,
    "q8_0": _quantize_q8_0,
    "q4_0": _quantize_q45_0,
    "q4_1": _quantize_q45_1,
    "q5_0": _quantize_q45_0,
    "q5_1": _quantize_q45_1,
}
_DEQUANTIZERS: dict[str, Callable[[np.ndarray], F32]] = {
    "f32": _dequantize_plain,
    "f16": _dequantize_plain,
    "bf16": _dequantize_plain,
    "q8_0": _dequantize_q8_0,
    "q4_0": _dequantize_q45_0,
    "q4_1": _dequantize_q45_1,
    "q5_0": _dequantize_q45_0,
    "q5_1": _dequantize_q45_1,
    "q4_k": dequantize_q45_k,
    "q5_k": dequantize_q45_k,
    "q6_k": dequantize_q6_k,
}
