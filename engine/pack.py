"""Repack stored blocks into the row-interleaved layout the kernels read (``engine/kernels/matvec.py`` draws it).

R rows    T = ceil(R / W) tiles of W rows    C columns    B = C // 32 blocks a row
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepthin.engine.arrays import U8, U16
from deepthin.engine.errors import UnsupportedError
from deepthin.engine.formats import BlockFormat
from deepthin.engine.model import Tensor

KERNEL_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")  # their order is the kernels' numbering
ALIGNMENT = 64


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
    scale_bytes = 0 if not fmt.is_quantized else (4 if fmt.name == "q4_1" else 2) * (cols // fmt.block_elements)
    return padded * (fmt.row_bytes(cols) - scale_bytes), padded * scale_bytes


def align(offset: int) -> int:
    """The next multiple of 64."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def place(fmt: BlockFormat, rows: int, cols: int, lanes: int, data_at: int, scale_at: int | None = None) -> Packed:
    """Lay a matrix out at ``data_at``; scales follow the data unless given a place of their own."""
    data_bytes, scale_bytes = packed_sizes(fmt, rows, cols, lanes)
    scale_at = align(data_at + data_bytes) if scale_at is None else scale_at
    return Packed(fmt, rows, cols, -(-rows // lanes), data_at, data_bytes, scale_at, scale_bytes)


def pack_into(arena: U8, packed: Packed, tensor: Tensor, lanes: int, q8_bias: int) -> None:
    """Write ``tensor`` to its place in ``arena``."""
    fmt, tiles, cols = tensor.format, packed.tiles, packed.cols
    stored = np.zeros((tiles * lanes, fmt.row_bytes(cols)), np.uint8)
    stored[: packed.rows] = tensor.data
    data = arena[packed.data_at : packed.data_at + packed.data_bytes]
    scales = arena[packed.scale_at : packed.scale_at + packed.scale_bytes].view(np.uint16)
    if not fmt.is_quantized:
        item = fmt.block_bytes
        data.reshape(tiles, cols, lanes, item)[...] = stored.reshape(tiles, lanes, cols, item).transpose(0, 2, 1, 3)
        return
    blocks = stored.view(fmt.dtype).reshape(tiles, lanes, cols // 32)
    codes = np.ascontiguousarray(blocks["qs"]).view(np.uint8)
    if fmt.name == "q8_0":
        codes = codes + np.uint8(q8_bias)
    groups = codes.shape[-1] // 4
    shape = (tiles, cols // 32, groups, lanes, 4)
    data.reshape(shape)[...] = codes.reshape(tiles, lanes, cols // 32, groups, 4).transpose(0, 2, 3, 1, 4)
    fields = [_scale_bits(blocks[name]) for name in ("d", "m") if name in (fmt.dtype.names or ())]
    scales.reshape(tiles, cols // 32, len(fields), lanes)[...] = np.stack(fields, axis=2).transpose(0, 1, 2, 3)


def _scale_bits(field: np.ndarray) -> U16:
    """f16 [T, W, B] as bits, transposed to [T, B, W]."""
    return np.ascontiguousarray(field.transpose(0, 2, 1)).view(np.uint16)
