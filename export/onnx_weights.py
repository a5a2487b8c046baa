"""Stored tensors as ONNX initializers: the same integers and scales, regrouped as the operators want them.

MatMulNBits computes w = (q - zero point) * scale over blocks of 32 values of a row:

| stored | bits | q                                  | scale  | zero point                     |
|--------|------|------------------------------------|--------|--------------------------------|
| q4_0   | 4    | nibbles, regrouped to 2j, 2j + 1   | d      | 8, the operator's default      |
| q4_1   | 4    | nibbles, regrouped to 2j, 2j + 1   | d      | -m / d, float                  |
| q8_0   | 8    | int8 + 128                         | d      | 128, the operator's default    |

q4_0 and q8_0 give bit-equal values; q4_1 keeps the integers and rounds in float (7e-8 relative).

    N rows    K columns    B blocks per row
Source: onnxruntime ``docs/ContribOperators.md``, com.microsoft.MatMulNBits and GatherBlockQuantized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepthin.engine.arrays import F32, U8
from deepthin.engine.formats import Q4_0, Q4_1, Q8_0, BlockFormat
from deepthin.engine.model import Tensor

BLOCK = 32
BITS = {Q4_0.name: 4, Q4_1.name: 4, Q8_0.name: 8}
_TINY = np.float32(2.0**-30)


@dataclass(frozen=True, slots=True)
class Initializer:
    """A constant of the graph whose values are made only when they are written.

    Attributes:
        name: unique in the graph.
        dims: dimensions; () for a scalar.
        dtype: element type.
        make: returns the values, in any shape.
    """

    name: str
    dims: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], npt.NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the raw data."""
        count = self.dtype.itemsize
        for dim in self.dims:
            count *= dim
        return count

    def values(self) -> npt.NDArray[Any]:
        """The values with shape ``dims``, contiguous."""
        array = np.ascontiguousarray(self.make(), self.dtype)
        if array.nbytes != self.num_bytes:
            raise AssertionError(f"Bug: initializer {self.name} made {array.nbytes} bytes instead of {self.num_bytes}")
        return array.reshape(self.dims)


def constant(name: str, values: npt.NDArray[Any]) -> Initializer:
    """An initializer holding ``values``."""
    return Initializer(name, values.shape, values.dtype, lambda: values)


def float_matrix(name: str, tensor: Tensor, *, transposed: bool) -> Initializer:
    """The tensor's values as f32, [out, in] or ``transposed`` to the [in, out] of MatMul."""
    if not transposed:
        return Initializer(name, tensor.dims, np.dtype(np.float32), tensor.dequantize)
    dims = tuple(reversed(tensor.dims))
    return Initializer(name, dims, np.dtype(np.float32), lambda: tensor.dequantize().T)


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Initializers of one MatMulNBits.

    Attributes:
        codes: u8 [N, B, 32 * bits / 8].
        scales: f32 [N, B].
        zero_points: f32 [N, B], or None where the operator's default holds.
    """

    bits: int
    codes: Initializer
    scales: Initializer
    zero_points: Initializer | None

    @property
    def parts(self) -> list[Initializer]:
        """The initializers there are."""
        return [part for part in (self.codes, self.scales, self.zero_points) if part is not None]


def weight_bytes(num_elements: int, fmt: BlockFormat) -> int:
    """Bytes that a tensor stored as ``fmt`` takes as initializers: codes, f32 scales and zero points, or f32 values."""
    if fmt.name not in BITS:
        return 4 * num_elements
    floats_per_block = 2 if fmt is Q4_1 else 1
    return num_elements * BITS[fmt.name] // 8 + num_elements // BLOCK * 4 * floats_per_block


def is_block_matrix(tensor: Tensor) -> bool:
    """Whether ``tensor`` keeps its integers in ONNX; otherwise it is written as f32."""
    return tensor.format.name in BITS


def block_matrix(name: str, tensor: Tensor) -> BlockMatrix:
    """``tensor``, stored as q4_0, q4_1 or q8_0, as the initializers ``name``_quant, _scales and _zero_points."""
    rows, cols = tensor.dims
    blocks, bits = cols // BLOCK, BITS[tensor.format.name]
    codes = Initializer(
        name + "_quant", (rows, blocks, BLOCK * bits // 8), np.dtype(np.uint8), lambda: _codes(_stored(tensor)["qs"], bits)
    )
    scaling = np.dtype(np.float32)
    scales = Initializer(name + "_scales", (rows, blocks), scaling, lambda: _scales(_stored(tensor)))
    zero_points = Initializer(name + "_zero_points", (rows, blocks), scaling, lambda: _zero_points(_stored(tensor)))
    return BlockMatrix(bits, codes, scales, zero_points if tensor.format is Q4_1 else None)


def _stored(tensor: Tensor) -> npt.NDArray[Any]:
    data = np.ascontiguousarray(tensor.data).reshape(-1, tensor.format.block_bytes)
    return data.view(tensor.format.dtype)[:, 0]


def _codes(qs: npt.NDArray[Any], bits: int) -> U8:
    if bits == 8:
        unsigned: U8 = qs.view(np.uint8) ^ np.uint8(0x80)  # int8 q to q + 128
        return unsigned
    low, high = qs & 0x0F, qs >> 4  # values 0..15 and 16..31 of the block
    out = np.empty_like(qs)
    out[:, :8] = low[:, 0::2] | (low[:, 1::2] << 4)
    out[:, 8:] = high[:, 0::2] | (high[:, 1::2] << 4)
    return out


def _scales(blocks: npt.NDArray[Any]) -> F32:
    scales: F32 = blocks["d"].astype(np.float32)
    if "m" in (blocks.dtype.names or ()):
        flat = scales == 0
        scales[flat] = np.abs(blocks["m"][flat].astype(np.float32)) * _TINY
    return scales


def _zero_points(blocks: npt.NDArray[Any]) -> F32:
    """-m / d; where d is 0 every value is m, which (q + sign(m) * 2^30) * |m| / 2^30 gives for any q."""
    scales, low = blocks["d"].astype(np.float32), blocks["m"].astype(np.float32)
    flat = scales == 0
    points: F32 = (-low / np.where(flat, np.float32(1), scales)).astype(np.float32)
    points[flat] = -np.sign(low[flat]) / _TINY
    return points
