"""The truth that runtimes are held to: weights as each stored format can hold them, and the float64 reference's logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from deepthin.engine.arrays import F32, F64
from deepthin.engine.formats import F32 as F32_FORMAT
from deepthin.engine.formats import Q8_0, STORED, BlockFormat, scheme_named, scheme_of
from deepthin.engine.model import Tensor
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, stored_format, tensor_specs
from deepthin.export.contents import Contents, ModelFile
from deepthin.export.noise import Sample, noise_samples, sample


class Truth:
    """Weights and logits for one base set of weights; keeps those of one stored format at a time.

    Args:
        shape: of the weights.
        base: f32 by canonical name, from the most exact file of the bundle.
        base_quant: what that file stores.
        ids: token ids that logits are wanted for.
    """

    def __init__(self, shape: Shape, base: Mapping[str, F32], base_quant: str, ids: Sequence[int]) -> None:
        self.shape, self._base, self._ids = shape, base, list(ids)
        self._base_format = F32_FORMAT if base_quant == STORED else scheme_named(base_quant).coarsest
        self._key: tuple[str, str] | None = None
        self._weights: dict[str, F32] = {}
        self._sample: Sample | None = None
        self._noise: dict[str, list[Sample]] = {}

    def weights(self, file: ModelFile, found: Mapping[str, F32]) -> Mapping[str, F32]:
        """What ``file`` should hold: the base quantised to its format and dequantised again.

        Two exceptions, both for whole tensors of ``found``. One that equals the base is right: where the base already
        consists of values of that format, an exporter may keep its blocks instead of rounding a second time. And when the base
        is rounded itself, the weights behind it are unknown, so whatever lies as near to it as both roundings allow is
        right. The first file of a format decides; the others must hold the same bits.
        """
        key = (file.quant, "hf" if file.kind == "hf" and file.quant != "f32" else "")
        if key != self._key:
            self._key, self._sample, self._weights, self._noise = key, None, {}, {}
            for spec in tensor_specs(self.shape):
                self._weights[spec.name] = self._wanted(spec, file, found.get(spec.name))
        return self._weights

    def _wanted(self, spec: TensorSpec, file: ModelFile, found: F32 | None) -> F32:
        base = self._base[spec.name]
        if file.quant == STORED and self._base_format is F32_FORMAT:
            return base
        scheme = scheme_of(F32_FORMAT if file.quant == STORED else file.quant)
        fmt = (
            scheme.body if file.kind == "hf" else stored_format(spec, scheme)
        )  # a Hugging Face folder stores norms as everything else
        if found is not None and found.shape == base.shape:
            if np.array_equal(found, base):
                return base
            if self._base_format is not F32_FORMAT and _is_near(base, found, fmt, self._base_format):
                return found.copy()
        return base if fmt is F32_FORMAT else Tensor.from_values(base, fmt).dequantize()

    def logits(self) -> F64:
        """Reference logits f64 [S, V] on the weights asked for last."""
        return self._run().logits

    def streams(self) -> Mapping[str, F64]:
        """The reference's residual stream [S, D] by point (see ``Reference.watch``), on the same weights."""
        return self._run().streams

    def noise(self, contents: Contents, rounding: str) -> list[Sample]:
        """What right runtimes with ``rounding`` may compute on the same weights, stored as ``contents`` stores them."""
        if rounding not in self._noise:
            formats = self._formats(contents)
            self._noise[rounding] = noise_samples(self.shape, self._weights, self._ids, rounding, formats)
        return self._noise[rounding]

    def _run(self) -> Sample:
        if self._sample is None:
            self._sample = sample(self.shape, self._weights, self._ids)
        return self._sample

    def _formats(self, contents: Contents) -> dict[str, BlockFormat]:
        if contents.file.quant == STORED:  # an ONNX file holds them all as 8 or 4 bits in blocks of 32
            held = {} if contents.model is None else contents.model.tensors
            return {spec.name: held[spec.name].format if held else Q8_0 for spec in tensor_specs(self.shape)}
        scheme = scheme_named(contents.file.quant)
        return {spec.name: stored_format(spec, scheme) for spec in tensor_specs(self.shape)}


def _is_near(base: F32, found: F32, fmt: BlockFormat, base_format: BlockFormat) -> bool:
    """Whether both can be roundings of the same weights: no further apart, block by block, than the formats allow."""
    group = math.lcm(fmt.block_elements, base_format.block_elements)
    if base.shape[-1] % group:
        return False
    blocks, others = base.reshape(-1, group), found.reshape(-1, group)
    largest = np.maximum(np.abs(blocks).max(axis=1), np.abs(others).max(axis=1))
    limit = (fmt.max_error + base_format.max_error) * (1 + base_format.max_error) * largest
    return bool((np.abs(blocks - others).max(axis=1) <= limit).all())
