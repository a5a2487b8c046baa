"""Repack stored blocks into the row-interleaved layout the kernels read (``engine/kernels/matvec.py`` draws it).

Tensors are cut into parts of about a megabyte; one thread per CPU takes the next part, packs it and lets its pages of the
mapped file go, so that file and packed weights are never both in memory.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from deepthin.engine.arrays import U8
from deepthin.engine.errors import UnsupportedError
from deepthin.engine.formats import BlockFormat
from deepthin.engine.kernels.packing import pack_tiles
from deepthin.engine.mapped import let_go
from deepthin.engine.model import Tensor

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
_PART_BYTES = 1 << 20  # of stored blocks: what one thread takes at a time
_MOST_THREADS = 8  # moving bytes takes no more before memory is the limit


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


def pack_tensors(arena: U8, tensors: Iterable[tuple[Packed, Tensor]], lanes: int, q8_bias: int) -> None:
    """Write every tensor to its place in ``arena``, on one thread for each CPU this process may use.

    Args:
        arena: u8, zero where nothing was packed yet.
        tensors: each with its place.
        lanes: rows of a tile; even.
        q8_bias: 0 or 128, added to 8-bit codes.
    """
    in_file_order = sorted(tensors, key=lambda item: item[1].stored.ctypes.data)  # as ``let_go`` wants it
    parts = deque(part for packed, tensor in in_file_order for part in _parts(packed, tensor, lanes))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while parts:
                try:
                    packed, tensor, t0, t1 = parts.popleft()
                except IndexError:  # another thread was faster
                    return
                _pack_part(arena, packed, tensor, t0, t1, lanes, q8_bias)
        except BaseException as error:
            parts.clear()
            failures.append(error)

    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(cpus, _MOST_THREADS, len(parts)) - 1)]
    for worker in workers:
        worker.start()
    work()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def _parts(packed: Packed, tensor: Tensor, lanes: int) -> list[tuple[Packed, Tensor, int, int]]:
    """Ranges of tiles; a last tile that the rows do not fill is a part of its own."""
    whole = packed.rows // lanes
    step = max(1, _PART_BYTES // (lanes * tensor.stored.shape[1]))
    cuts = [*range(0, whole, step), whole] + ([packed.tiles] if packed.tiles > whole else [])
    return [(packed, tensor, t0, t1) for t0, t1 in pairwise(cuts)]


def _pack_part(arena: U8, packed: Packed, tensor: Tensor, t0: int, t1: int, lanes: int, q8_bias: int) -> None:
    rows = np.arange(t0 * lanes, min(t1 * lanes, packed.rows), dtype=np.int64)
    if tensor.order is not None:
        rows = tensor.order[rows]
    low = int(rows.min())
    stored = tensor.stored[low : int(rows.max()) + 1]
    row_bytes = stored.shape[1]
    starts = (rows - low) * row_bytes
    source = np.ascontiguousarray(stored).reshape(-1)
    missing = (t1 - t0) * lanes - len(rows)
    if missing:
        starts = np.append(starts, np.full(missing, len(source)))
        source = np.append(source, np.zeros(row_bytes, np.uint8))
    source = source.view()
    source.flags.writeable = False  # always, since Numba would compile once more for an array that is
    tiles = packed.tiles
    pack_tiles(
        arena,
        packed.data_at,
        packed.scale_at,
        packed.data_bytes // tiles,
        packed.scale_bytes // tiles,
        source,
        starts,
        packed.cols,
        KERNEL_FORMATS.index(packed.format.name),
        lanes,
        0x80808080 if q8_bias and packed.format.name == "q8_0" else 0,
        t0,
        t1,
    )
    let_go(stored)
