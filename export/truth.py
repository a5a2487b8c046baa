"""The truth that runtimes are held to: weights as each stored format can hold them, and the float64 reference's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deepthin.engine.arrays import F32, F64
from deepthin.engine.formats import format_named
from deepthin.engine.model import Tensor
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, stored_format, tensor_specs
from deepthin.export.contents import ModelFile


class Truth:
    """Weights and logits for one base set of weights; keeps those of one stored format at a time.

    Args:
        shape: of the weights.
        base: f32 by canonical name, from the most exact file of the bundle.
        ids: token ids that logits are wanted for.
    """

    def __init__(self, shape: Shape, base: Mapping[str, F32], ids: Sequence[int]) -> None:
        self.shape, self._base, self._ids = shape, base, list(ids)
        self._key: tuple[str, str] | None = None
        self._weights: dict[str, F32] = {}
        self._logits: F64 | None = None

    def weights(self, file: ModelFile, found: Mapping[str, F32]) -> Mapping[str, F32]:
        """What ``file`` should hold: the base quantised to its format and dequantised again.

        Where the base already consists of values of that format, an exporter may keep its blocks instead of rounding a
        second time: a tensor of ``found`` that equals the base exactly is right too. The first file of a format decides;
        the others must hold the same.
        """
        key = (file.quant, "hf" if file.kind == "hf" and file.quant != "f32" else "")
        if key != self._key:
            self._key, self._logits, self._weights = key, None, {}
            for spec in tensor_specs(self.shape):
                base = self._base[spec.name]
                kept = found.get(spec.name)
                same = kept is not None and np.array_equal(kept, base)
                self._weights[spec.name] = base if same else _rounded(spec, base, file)
        return self._weights

    def logits(self) -> F64:
        """Reference logits f64 [S, V] on the weights asked for last."""
        if self._logits is None:
            self._logits = np.asarray(Reference(self.shape, self._weights, np.float64).logits(self._ids), np.float64)
        return self._logits


def _rounded(spec: TensorSpec, base: F32, file: ModelFile) -> F32:
    body = format_named(file.quant)
    fmt = body if file.kind == "hf" else stored_format(spec, body)  # a Hugging Face folder stores norms as everything else
    return base if fmt.name == "f32" else Tensor.from_values(base, fmt).dequantize()
