"""Repack stored blocks into the row-interleaved layout the kernels read (``engine/kernels/matvec.py`` draws it).

R rows    T = ceil(R / W) tiles of W rows    C columns    B = C // 32 blocks a row
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepthin.engine.arrays import U8
from deepthin.engine.errors import UnsupportedError
from deepthin.engine.formats import BlockFormat
from deepthin.engine.model import Tensor
from deepthin.engine.quants import block_codes, pack_nibbles
from deepthin.engine.quants_k import k_codes, k_scales_and_mins

# their order is the kernels' numbering; formats whose products want an 8-bit activation come last
KERNEL_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
ALIGNMENT = 64
# packed bytes of one block of a row: codes, and scales
_BLOCK_BYTES = {
    "q8_0": (32, 2),
    "q4_0": (16, 2),
    "q4_1": (16, 2 + 2),
    "q5_0": (16 + 4, 2),
    "q5_1": (16 + 4, 2 + 2),
    "q4_k": (8 * 16, 2 + 2 + 8 * 2),
    "q5_k": (8 * (16 + 4), 2 + 2 + 8 * 2),
    "q6_k": (8 * (16 + 8), 2 + 8 * 2),
}
_CHUNK_VALUES = 1 << 21  # bounds temporaries while packing


@dataclass(frozen=True, slots=True)
class Packed:
    """Where one packed tensor lies in an arena, and how it is read.

    Attributes:
        data_at, scale_at: byte offsets; both multiples of 64.
        data_bytes, scale_bytes: sizes without alignment.
    """

    format: BlockFormat
    rows: int
    cols: int
    tiles: int
    data_at: int
    data_bytes: int
    scale_at: int
    scale_bytes: int

    @property
    def op(self) -> tuple[int, int, int, int, int]:
        """The row of the plan: format number, data offset, scale offset, tiles, columns."""
        return KERNEL_FORMATS.index(self.format.name), self.data_at, self.scale_at, self.tiles, self.cols

    @property
    def num_bytes(self) -> int:
        """Bytes one product reads."""
        return self.data_bytes + self.scale_bytes


def packed_sizes(fmt: BlockFormat, rows: int, cols: int, lanes: int) -> tuple[int, int]:
    """Bytes of packed data and of packed scales for a matrix [rows, cols].

    Raises:
        UnsupportedError: the format has no kernel.
        FormatError: the block does not divide the columns.
    """
    if fmt.name not in KERNEL_FORMATS:
        raise UnsupportedError(f"no kernel reads {fmt.name}; use one of {', '.join(KERNEL_FORMATS)}")
    padded = -(-rows // lanes) * lanes
    row_bytes = fmt.row_bytes(cols)
    if not fmt.is_quantized:
        return padded * row_bytes, 0
    codes, scales = _BLOCK_BYTES[fmt.name]
    return padded * (cols // fmt.block_elements) * codes, padded * (cols // fmt.block_elements) * scales


def align(offset: int) -> int:
    """The next multiple of 64."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def place(fmt: BlockFormat, rows: int, cols: int, lanes: int, data_at: int, scale_at: int | None = None) -> Packed:
    """Lay a matrix out at ``data_at``; scales follow the data unless given a place of their own."""
    data_bytes, scale_bytes = packed_sizes(fmt, rows, cols, lanes)
    scale_at = align(data_at + data_bytes) if scale_at is None else scale_at
    return Packed(fmt, rows, cols, -(-rows // lanes), data_at, data_bytes, scale_at, scale_bytes)


def pack_into(arena: U8, packed: Packed, tensor: Tensor, lanes: int, q8_bias: int) -> None:
    """Write ``tensor`` to its place in ``arena``, a few tiles at a time."""
    fmt, tiles, cols = packed.format, packed.tiles, packed.cols
    data = arena[packed.data_at : packed.data_at + packed.data_bytes].reshape(tiles, -1)
    scales = arena[packed.scale_at : packed.scale_at + packed.scale_bytes].reshape(tiles, packed.scale_bytes // tiles)
    step = max(1, _CHUNK_VALUES // (lanes * cols))
    for first in range(0, tiles, step):
        count = min(step, tiles - first)
        stored = tensor.data[first * lanes : (first + count) * lanes]
        if len(stored) < count * lanes:
            stored = np.concatenate([stored, np.zeros((count * lanes - len(stored), stored.shape[1]), np.uint8)])
        place = data[first : first + count]
        if not fmt.is_quantized:
            item = fmt.block_bytes
            values = stored.reshape(count, lanes, cols, item).transpose(0, 2, 1, 3)
            place.reshape(count, cols, lanes, item)[...] = values
            continue
        blocks = np.ascontiguousarray(stored).reshape(-1).view(fmt.dtype)
        codes = _packed_codes(blocks, fmt, q8_bias)
        groups = codes.shape[-1] // 4
        codes = codes.reshape(count, lanes, cols // 32, groups, 4).transpose(0, 2, 3, 1, 4)
        place.reshape(count, cols // 32, groups, lanes, 4)[...] = codes
        _write_scales(scales[first : first + count], blocks, count, lanes)


def _packed_codes(blocks: np.ndarray, fmt: BlockFormat, q8_bias: int) -> U8:
    """The bytes [blocks of 32, bytes] that one row keeps of each block of 32 columns, in the kernels' order of groups."""
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
