"""How far right arithmetic may land from the float64 reference: the same again, with activations rounded as runtimes do.

Once activations are rounded, any difference in the order of sums turns into whole steps of the rounding after a few blocks, so
two correct runtimes are as far from each other as from the reference. What that costs depends on the model and its tokens, and
is therefore measured on them. Two samples are taken, whose roundings and sums differ as those of two runtimes do.

    float   sums in f32                                                  one sample
    f16     activations rounded to f16 in front of each product          one sample with f64 sums, one with f32 sums
    bf16    the same with bf16
    int8    rounded to int8 per block in front of each product with      one sample with exact scales and f64 sums, one with
            block-quantised weights, 32 values or (K-quants) 256         f16 scales and f32 sums
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepthin.engine.arrays import F32, F64
from deepthin.engine.formats import BlockFormat
from deepthin.engine.quants import bf16_to_f32, f32_to_bf16
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape

FLOAT, F16, BF16, INT8 = "float", "f16", "bf16", "int8"
ROUNDINGS = (FLOAT, F16, BF16, INT8)
_BLOCK, _SUPER_BLOCK = 32, 256
_TOP_CODE = 127


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: logits [S, V], and the residual stream [S, D] by point (see ``Reference.watch``)."""

    logits: F64
    streams: Mapping[str, F64]


def sample(
    shape: Shape,
    weights: Mapping[str, F32],
    ids: Sequence[int],
    *,
    rounding: str = FLOAT,
    formats: Mapping[str, BlockFormat] | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> Sample:
    """Logits and streams of ``ids`` with activations rounded.

    Args:
        shape: of the weights.
        weights: f32 by canonical name.
        ids: token ids.
        rounding: one of :data:`ROUNDINGS`.
        formats: how each matrix is stored; decides what int8 rounds, and over how many values.
        dtype: of sums; with f32, scales are rounded to f16 too.
    """
    reference = (
        Reference(shape, weights, dtype) if rounding == FLOAT else _Rounded(shape, weights, dtype, rounding, formats or {})
    )
    streams: dict[str, F64] = {}
    reference.watch = lambda point, stream: streams.update({point: stream.astype(np.float64)})
    return Sample(reference.logits(ids).astype(np.float64), streams)


def noise_samples(
    shape: Shape, weights: Mapping[str, F32], ids: Sequence[int], rounding: str, formats: Mapping[str, BlockFormat]
) -> list[Sample]:
    """What a right runtime with ``rounding`` may compute: the samples that the module's table lists."""
    kinds = (np.float32,) if rounding == FLOAT else (np.float64, np.float32)
    return [sample(shape, weights, ids, rounding=rounding, formats=formats, dtype=kind) for kind in kinds]


class _Rounded(Reference):
    """The reference with rounded activations."""

    def __init__(
        self,
        shape: Shape,
        weights: Mapping[str, F32],
        dtype: npt.DTypeLike,
        rounding: str,
        formats: Mapping[str, BlockFormat],
    ) -> None:
        super().__init__(shape, weights, dtype)
        self._rounding, self._formats = rounding, formats

    def _product(self, n: F64, name: str) -> F64:
        return super()._product(self._rounded(n, name).astype(n.dtype), name)

    def _rounded(self, n: F64, name: str) -> F64:
        if self._rounding == F16:
            return n.astype(np.float16).astype(np.float64)
        if self._rounding == BF16:
            return bf16_to_f32(f32_to_bf16(n.astype(np.float32))).astype(np.float64)
        fmt = self._formats.get(name)
        if fmt is None or not fmt.is_quantized:
            return n
        block = _SUPER_BLOCK if fmt.block_elements == _SUPER_BLOCK else _BLOCK
        blocks = n.reshape(len(n), -1, block)
        scales = np.abs(blocks).max(axis=-1, keepdims=True) / _TOP_CODE
        codes = np.rint(np.divide(blocks, scales, where=scales > 0, out=np.zeros_like(blocks)))
        kept = scales.astype(np.float16) if n.dtype == np.float32 else scales
        rounded: F64 = (codes * kept).reshape(n.shape)
        return rounded
