"""The packed layouts written down a second time, as transposes of whole tensors; shares no code with the kernels."""

from __future__ import annotations

import numpy as np

from deepthin.engine.arrays import U8
from deepthin.engine.model import Tensor
from deepthin.engine.pack import Packed
from deepthin.engine.quants import block_codes, pack_nibbles
from deepthin.engine.quants_k import k_codes, k_scales_and_mins


def pack_in_numpy(arena: U8, packed: Packed, tensor: Tensor, lanes: int, q8_bias: int) -> None:
    """Write ``tensor`` to its place in ``arena``."""
    fmt, tiles, cols = packed.format, packed.tiles, packed.cols
    data = arena[packed.data_at : packed.data_at + packed.data_bytes]
    scales = arena[packed.scale_at : packed.scale_at + packed.scale_bytes].reshape(tiles, packed.scale_bytes // tiles)
    stored = np.zeros((tiles * lanes, tensor.data.shape[1]), np.uint8)
    stored[: packed.rows] = tensor.data
    if not fmt.is_quantized:
        item = fmt.block_bytes
        data.reshape(tiles, cols, lanes, item)[...] = stored.reshape(tiles, lanes, cols, item).transpose(0, 2, 1, 3)
        return
    blocks = stored.reshape(-1).view(fmt.dtype)
    codes = _packed_codes(blocks, packed, q8_bias)
    groups = codes.shape[-1] // 4
    codes = codes.reshape(tiles, lanes, cols // 32, groups, 4).transpose(0, 2, 3, 1, 4)
    data.reshape(tiles, cols // 32, groups, lanes, 4)[...] = codes
    _write_scales(scales, blocks, tiles, lanes)


def _packed_codes(blocks: np.ndarray, packed: Packed, q8_bias: int) -> U8:
    """The bytes [blocks of 32, bytes] that one row keeps of each block of 32 columns, in the kernels' order of groups."""
    fmt = packed.format
    if fmt.name == "q8_0":
        return blocks["qs"].view(np.uint8) + np.uint8(q8_bias)
    if fmt.name in ("q4_0", "q4_1"):
        return np.ascontiguousarray(blocks["qs"])
    codes = (k_codes(blocks) if fmt.block_elements == 256 else block_codes(blocks)).reshape(-1, 32)
    parts = [pack_nibbles(codes)]
    high: U8 = codes >> np.uint8(4)
    if fmt.name in ("q5_0", "q5_1", "q5_k"):
        parts.append(_fifth_bits(high))
    elif fmt.name == "q6_k":
        parts += [_bit_pairs(high[:, :16]), _bit_pairs(high[:, 16:])]
    return np.concatenate(parts, axis=1)


def _fifth_bits(high: U8) -> U8:
    """Bits u8 [B, 32] as the plane [B, 4] of ``kernels/matvec_5bit.py``: bits 0..3 of byte j are columns 16 + 4g + j."""
    by_byte = high.reshape(-1, 2, 4, 4)[:, ::-1].transpose(0, 3, 1, 2)
    return np.packbits(by_byte.reshape(-1, 4, 8), axis=2, bitorder="little")[:, :, 0]


def _bit_pairs(high: U8) -> U8:
    """Pairs of bits u8 [B, 16] as a plane [B, 4] of ``kernels/matvec_k.py``: groups 2, 3 below groups 0, 1."""
    group = high.reshape(-1, 4, 4)
    pairs: U8 = group[:, 2] | group[:, 3] << np.uint8(2) | group[:, 0] << np.uint8(4) | group[:, 1] << np.uint8(6)
    return pairs


def _write_scales(out: U8, blocks: np.ndarray, tiles: int, lanes: int) -> None:
    """Scales of ``blocks`` [tiles * lanes * B] into ``out`` u8 [tiles, bytes], one field of all rows after the other."""
    names = [name for name in ("d", "m", "dmin") if name in (blocks.dtype.names or ())]
    fields = [np.ascontiguousarray(blocks[name]).view(np.uint8).reshape(-1, 1, 2) for name in names]
    small = []
    if "scales" in (blocks.dtype.names or ()):
        pairs = blocks["scales"].view(np.uint8) if "dmin" not in names else np.stack(k_scales_and_mins(blocks), axis=2)
        small = list(pairs.reshape(len(blocks), 16, 1).transpose(1, 0, 2)[:, :, None])
    row = 0
    per_block = out.reshape(tiles, len(blocks) // (tiles * lanes), -1)
    for field in fields + small:
        size = lanes * field.shape[-1]
        source = field.reshape(tiles, lanes, -1, field.shape[-1]).transpose(0, 2, 1, 3)
        per_block[:, :, row : row + size] = source.reshape(tiles, -1, size)
        row += size
