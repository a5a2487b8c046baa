"""Block formats of weights, as data: how many values a block holds, which fields it is made of, and its GGUF number.

Knows nothing of tensors or files. A block is a run of consecutive values of one row; rows never share a block.
Source of every layout: ggml ``src/ggml-common.h`` at ggml-org/ggml@d99724f.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from deepthin.engine.errors import FormatError, UsageError


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One storage format.

    Attributes:
        name: lower-case name used on the command line and in JSON.
        block_elements: values per block.
        dtype: NumPy structured (or plain) dtype of one block; its item size is the block's size in bytes.
        gguf_type: ``ggml_type`` number in GGUF tensor infos.
        gguf_file_type: ``general.file_type`` of a file whose matrices use this format.
        max_error: bound on |value - dequantise(quantise(value))| relative to the block's largest |value|; infinite for
            formats that are only read.
    """

    name: str
    block_elements: int
    dtype: np.dtype[np.void]
    gguf_type: int
    gguf_file_type: int
    max_error: float

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.dtype.itemsize

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per value, scales included."""
        return 8 * self.block_bytes / self.block_elements

    @property
    def is_quantized(self) -> bool:
        """Whether values share a scale, so that kernels quantise the activation too."""
        return self.block_elements > 1

    @property
    def can_quantize(self) -> bool:
        """Whether ``quants.quantize`` makes this format; K-quants come out of llama.cpp's quantiser only."""
        return math.isfinite(self.max_error)

    def row_bytes(self, cols: int) -> int:
        """Bytes of one row of ``cols`` values.

        Raises:
            FormatError: the block does not divide the row.
        """
        if cols % self.block_elements:
            raise FormatError(
                f"{self.name} stores blocks of {self.block_elements} values, which do not divide a row of {cols}; "
                f"use f16 or a width that is a multiple of {self.block_elements}"
            )
        return cols // self.block_elements * self.block_bytes


def _block(
    name: str, elements: int, fields: list[tuple[str, str, int]], gguf_type: int, file_type: int, error: float
) -> BlockFormat:
    dtype = np.dtype([(n, t, (count,)) if count > 1 else (n, t) for n, t, count in fields])
    return BlockFormat(name, elements, dtype, gguf_type, file_type, error)


F32 = _block("f32", 1, [("d", "<f4", 1)], 0, 0, 0.0)
F16 = _block("f16", 1, [("d", "<f2", 1)], 1, 1, 2**-11)
BF16 = _block("bf16", 1, [("d", "<u2", 1)], 30, 32, 2**-8)
Q8_0 = _block("q8_0", 32, [("d", "<f2", 1), ("qs", "i1", 32)], 8, 7, 0.5 / 127 + 2**-10)
Q4_0 = _block("q4_0", 32, [("d", "<f2", 1), ("qs", "u1", 16)], 2, 2, 1 / 8 + 2**-9)
Q4_1 = _block("q4_1", 32, [("d", "<f2", 1), ("m", "<f2", 1), ("qs", "u1", 16)], 3, 3, 1 / 15 + 2**-9)
Q5_0 = _block("q5_0", 32, [("d", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16)], 6, 8, 1 / 16 + 2**-9)
Q5_1 = _block("q5_1", 32, [("d", "<f2", 1), ("m", "<f2", 1), ("qh", "u1", 4), ("qs", "u1", 16)], 7, 9, 1 / 31 + 2**-9)
# super-blocks of 256: sub-blocks of 32 (Q4_K, Q5_K) or 16 (Q6_K) have integer scales of their own; read, never made here
Q4_K = _block("q4_k", 256, [("d", "<f2", 1), ("dmin", "<f2", 1), ("scales", "u1", 12), ("qs", "u1", 128)], 12, 14, math.inf)
Q5_K = _block(
    "q5_k",
    256,
    [("d", "<f2", 1), ("dmin", "<f2", 1), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)],
    13,
    16,
    math.inf,
)
Q6_K = _block("q6_k", 256, [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2", 1)], 14, 18, math.inf)

FORMATS: dict[str, BlockFormat] = {
    f.name: f for f in (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K)
}  # fmt: skip
GGUF_TYPES: dict[int, BlockFormat] = {f.gguf_type: f for f in FORMATS.values()}

# what ``--quant`` takes; head_format says what the embedding becomes unless it is chosen too
BODY_QUANTS = tuple(name for name, fmt in FORMATS.items() if fmt.can_quantize)


STORED = "stored"  # in place of a quant: every tensor as its source stores it, whatever the mixture


def format_named(name: str) -> BlockFormat:
    """The format called ``name``.

    Raises:
        UsageError: no such format; the message lists the known ones.
    """
    try:
        return FORMATS[name.lower()]
    except KeyError:
        raise UsageError(f"format {name!r} is unknown; use one of {', '.join(FORMATS)}") from None


def quant_named(name: str) -> BlockFormat:
    """The format called ``name``, which weights are to be converted to.

    Raises:
        UsageError: no such format, or one that is only read.
    """
    fmt = format_named(name)
    if not fmt.can_quantize:
        raise UsageError(
            f"format {fmt.name!r} is only read, weights cannot be converted to it; llama.cpp's llama-quantize makes such "
            f"files, or use one of {', '.join(BODY_QUANTS)}"
        )
    return fmt


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a model is stored: the format of the blocks' matrices, and that of the embedding and the output head.

    The name is the body's where the head follows it (:func:`head_format`), else both: ``q4_0-head_f16``.
    """

    body: BlockFormat
    head: BlockFormat

    @property
    def name(self) -> str:
        """Text form, as in JSON and in file names."""
        return self.body.name if self.head is head_format(self.body) else f"{self.body.name}{_HEAD}{self.head.name}"

    @property
    def coarsest(self) -> BlockFormat:
        """The one with fewer bits; the body where they have as many."""
        return min((self.body, self.head), key=lambda fmt: fmt.bits_per_weight)


_HEAD = "-head_"


def scheme_named(name: str, *, to_make: bool = False) -> Scheme:
    """The scheme called ``name``: a format, or a format with another one for embedding and head (``q4_0-head_f16``).

    Args:
        name: any case.
        to_make: whether weights are to be converted, which leaves out formats that are only read.

    Raises:
        UsageError: no such format, or one that is only read.
    """
    find = quant_named if to_make else format_named
    body_name, apart, head_name = name.lower().partition(_HEAD)
    body = find(body_name)
    return Scheme(body, find(head_name) if apart else head_format(body))


def scheme_of(quant: str | BlockFormat | Scheme) -> Scheme:
    """``quant`` as a scheme: by name, or a body whose head follows it.

    Raises:
        UsageError: no such format.
    """
    if isinstance(quant, Scheme):
        return quant
    return Scheme(quant, head_format(quant)) if isinstance(quant, BlockFormat) else scheme_named(quant)


def head_format(body: BlockFormat) -> BlockFormat:
    """Format of embedding and output head where none is chosen: Q8_0 beside a body of 4 to 6 bits, else the body's.

    llama.cpp keeps the tied table of a "Q4_0" file in Q6_K, or Q8_0 where rows are no multiple of 256; we always
    take Q8_0, the finer of the two.
    Source: llama.cpp ``src/llama-quant.cpp`` at ggml-org/llama.cpp@c392e50.
    """
    return Q8_0 if body.is_quantized else body
