"""Stored tensors as ONNX initializers: the same integers and scales, regrouped as the operators want them.

MatMulNBits computes w = (q - zero point) * scale over blocks of a row, with the zero point 8 or 128 where none is given:

| stored     | bits | block | q                                | scale | added to each value of a block |
|------------|------|-------|----------------------------------|-------|--------------------------------|
| q4_0       | 4    | 32    | nibbles, regrouped to 2j, 2j + 1 | d     |                                |
| q4_1, q4_k | 4    | 32    | the same                         | s     | low + 8 s                      |
| q5_0       | 8    | 32    | q + 112                          | d     |                                |
| q5_1, q5_k | 8    | 32    | q + 112                          | s     | low + 16 s                     |
| q6_k       | 8    | 16    | q + 96                           | d sc  |                                |
| q8_0       | 8    | 32    | int8 + 128                       | d     |                                |

s and low are d and m, in K-quants d sc and -dmin mn. What is added goes through a product of its own, of the sums of the
activation's blocks: the operator's float zero points would do the same, but onnxruntime has no int8 arithmetic for them, and
refuses them for 8 bits.
Formats without an addend give bit-equal values, the others the same integers, rounded in float (7e-8 relative). f16 matrices
stay f16 in the file; everything else is f32.

    N rows    K columns    B blocks per row
Source: onnxruntime ``docs/ContribOperators.md``, com.microsoft.MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepthin.engine.arrays import F32, U8
from deepthin.engine.formats import F16, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, BlockFormat
from deepthin.engine.model import Tensor
from deepthin.engine.quants import block_codes
from deepthin.engine.quants_k import k_codes, k_scales_and_mins

BLOCK = 32
_FOUR_BITS = (Q4_0, Q4_1, Q4_K)
BITS = {fmt.name: 4 if fmt in _FOUR_BITS else 8 for fmt in (*_FOUR_BITS, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0)}
_BLOCKS = {Q6_K.name: 16}  # others BLOCK
_WITH_LOWS = (Q4_1, Q4_K, Q5_1, Q5_K)
_UP_TO_128 = {Q5_0.name: 112, Q5_1.name: 112, Q5_K.name: 112, Q6_K.name: 96}  # what takes the middle to the operator's


@dataclass(frozen=True, slots=True)
class Initializer:
    """A constant of the graph whose values are made only when they are written.

    Attributes:
        name: unique in the graph.
        dims: dimensions; () for a scalar.
        dtype: element type.
        make: returns the values, in any shape.
        packed: elements are signed 4-bit integers; ``make`` returns bytes that hold two, the first in the low nibble.
    """

    name: str
    dims: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], npt.NDArray[Any]]
    packed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the raw data."""
        count = self.dtype.itemsize
        for dim in self.dims:
            count *= dim
        return -(-count // 2) if self.packed else count

    def values(self) -> npt.NDArray[Any]:
        """The values with shape ``dims``, or packed bytes; contiguous."""
        array = np.ascontiguousarray(self.make(), self.dtype)
        if array.nbytes != self.num_bytes:
            raise AssertionError(f"Bug: initializer {self.name} made {array.nbytes} bytes instead of {self.num_bytes}")
        return array.reshape(-1 if self.packed else self.dims)


def constant(name: str, values: npt.NDArray[Any]) -> Initializer:
    """An initializer holding ``values``."""
    return Initializer(name, values.shape, values.dtype, lambda: values)


def float_matrix(name: str, tensor: Tensor, *, transposed: bool) -> Initializer:
    """The tensor's values, [out, in] or ``transposed`` to the [in, out] of MatMul: f16 where it stores f16, else f32."""
    dtype = np.dtype(np.float16 if tensor.format is F16 else np.float32)
    if not transposed:
        return Initializer(name, tensor.dims, dtype, tensor.dequantize)
    return Initializer(name, tuple(reversed(tensor.dims)), dtype, lambda: tensor.dequantize().T)


def vector(name: str, tensor: Tensor) -> Initializer:
    """A norm's or bias's values as f32."""
    return Initializer(name, tensor.dims, np.dtype(np.float32), tensor.dequantize)


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Initializers of one MatMulNBits.

    Attributes:
        block: values per scale.
        codes: u8 [N, B, block * bits / 8].
        scales: f32 [N, B].
        addends: f32 [B, N], what is added to each value of a block; None where nothing is.
    """

    bits: int
    block: int
    codes: Initializer
    scales: Initializer
    addends: Initializer | None

    @property
    def parts(self) -> list[Initializer]:
        """The initializers there are."""
        return [part for part in (self.codes, self.scales, self.addends) if part is not None]


@dataclass(frozen=True, slots=True)
class SignedMatrix:
    """Initializers of one blocked DequantizeLinear: integers around 0 and a scale for each block, no zero points.

    Attributes:
        codes: i8, or i4 two to a byte; [N, K], or [K, N] transposed.
        scales: f32 [N, B] or [B, N].
    """

    codes: Initializer
    scales: Initializer


def is_signed_matrix(tensor: Tensor) -> bool:
    """Whether ``tensor`` keeps its integers in the ONNX standard's own operators; otherwise it is written as f32."""
    return tensor.format in (Q4_0, Q8_0)


def signed_matrix(name: str, tensor: Tensor, *, transposed: bool) -> SignedMatrix:
    """``tensor``, stored as q4_0 or q8_0, as the initializers ``name``_quant and ``name``_scales."""
    rows, cols = tensor.dims
    blocks = cols // BLOCK
    dims, scale_dims = ((cols, rows), (blocks, rows)) if transposed else ((rows, cols), (rows, blocks))

    def scales() -> F32:
        values = _stored(tensor)["d"].astype(np.float32).reshape(rows, blocks)
        return values.T if transposed else values

    def codes() -> npt.NDArray[Any]:
        qs = _stored(tensor)["qs"]
        if tensor.format is Q8_0:
            whole = qs.reshape(rows, cols)
            return whole.T if transposed else whole
        whole = (np.concatenate([qs & 15, qs >> 4], axis=1) ^ 8).reshape(rows, cols)  # q - 8 in two's complement
        flat = (whole.T if transposed else whole).reshape(-1, 2)
        return flat[:, 0] | flat[:, 1] << 4

    packed = tensor.format is not Q8_0
    return SignedMatrix(
        Initializer(name + "_quant", dims, np.dtype(np.uint8 if packed else np.int8), codes, packed),
        Initializer(name + "_scales", scale_dims, np.dtype(np.float32), scales),
    )


def weight_bytes(num_elements: int, fmt: BlockFormat) -> int:
    """Bytes that a matrix stored as ``fmt`` takes as initializers: codes, f32 scales and addends, or f16 or f32 values."""
    if fmt.name not in BITS:
        return (2 if fmt is F16 else 4) * num_elements
    floats_per_block = 2 if fmt in _WITH_LOWS else 1
    return num_elements * BITS[fmt.name] // 8 + num_elements // _BLOCKS.get(fmt.name, BLOCK) * 4 * floats_per_block


def has_lows(fmt: BlockFormat) -> bool:
    """Whether something is added to each value of a block, which rows that are looked up cannot have."""
    return fmt in _WITH_LOWS


def can_be_gathered(tensor: Tensor) -> bool:
    """Whether rows of ``tensor`` are looked up as blocks; a table with something to add to each block is written as f32."""
    return is_block_matrix(tensor) and not has_lows(tensor.format)


def is_block_matrix(tensor: Tensor) -> bool:
    """Whether ``tensor`` keeps its integers in ONNX; otherwise it is written as floats."""
    return tensor.format.name in BITS


def block_matrix(name: str, tensor: Tensor) -> BlockMatrix:
    """``tensor``, stored as one of ``BITS``, as the initializers ``name``_quant, _scales and _addends."""
    rows, cols = tensor.dims
    bits, block = BITS[tensor.format.name], _BLOCKS.get(tensor.format.name, BLOCK)
    dims = (rows, cols // block)
    scaling = np.dtype(np.float32)
    codes = Initializer(name + "_quant", (*dims, block * bits // 8), np.dtype(np.uint8), lambda: _codes(tensor))
    scales = Initializer(name + "_scales", dims, scaling, lambda: _steps_and_lows(tensor)[0])
    addends = Initializer(name + "_addends", dims[::-1], scaling, lambda: _addends(tensor).reshape(dims).T)
    return BlockMatrix(bits, block, codes, scales, addends if tensor.format in _WITH_LOWS else None)


def _stored(tensor: Tensor) -> npt.NDArray[Any]:
    data = np.ascontiguousarray(tensor.data).reshape(-1, tensor.format.block_bytes)
    return data.view(tensor.format.dtype)[:, 0]


def _codes(tensor: Tensor) -> U8:
    blocks = _stored(tensor)
    if tensor.format is Q8_0:
        unsigned: U8 = blocks["qs"].view(np.uint8) ^ np.uint8(0x80)  # int8 q to q + 128
        return unsigned
    whole = k_codes(blocks) if tensor.format in (Q4_K, Q5_K, Q6_K) else block_codes(blocks)
    if BITS[tensor.format.name] == 8:
        return whole + np.uint8(_UP_TO_128[tensor.format.name])
    return whole[:, 0::2] | whole[:, 1::2] << np.uint8(4)


def _steps_and_lows(tensor: Tensor) -> tuple[F32, F32]:
    """Of each block, w = step q + low for formats that have a low, which is 0 in others; f32, flat."""
    blocks = _stored(tensor)
    d = blocks["d"].astype(np.float32)
    if tensor.format is Q6_K:
        steps = d[:, None] * blocks["scales"].astype(np.float32)
        return steps.reshape(-1), np.zeros(steps.size, np.float32)
    if tensor.format in (Q4_K, Q5_K):
        scales, mins = k_scales_and_mins(blocks)
        lows = blocks["dmin"].astype(np.float32)[:, None] * mins.astype(np.float32)
        return (d[:, None] * scales.astype(np.float32)).reshape(-1), -lows.reshape(-1)
    return d, blocks["m"].astype(np.float32) if tensor.format in (Q4_1, Q5_1) else np.zeros_like(d)


def _addends(tensor: Tensor) -> F32:
    steps, lows = _steps_and_lows(tensor)
    return lows + steps * np.float32(8 if tensor.format in _FOUR_BITS else 16)
