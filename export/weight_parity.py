"""Whether a file's weights are those it should hold, tensor by tensor, and what a difference looks like. Arrays in, words out.

Both sides are f32 in canonical row order, and equal means bit-equal: every format we write dequantises to the same f32 values
wherever its integers are kept, except formats with a minimum for each block in ONNX, which round (``rounding`` allows for it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, canonical_row_order, gguf_row_order, tensor_specs

_BLOCK, _PART = 32, 16
_SAME = 1e-3  # relative; f32 products of an exact amount or factor
_PAIRS = np.arange(_BLOCK).reshape(-1, 2)[:, ::-1].reshape(-1)
_GGUF_NIBBLES = np.arange(_BLOCK).reshape(2, -1).T.reshape(-1)  # byte j holds values j and j + 16


@dataclass(frozen=True, slots=True)
class WeightDifference:
    """The first tensor of a file that is not what it should be.

    Attributes:
        tensor: canonical name.
        why: one clause: what the difference looks like.
        num_different: values of this tensor that differ.
    """

    tensor: str
    why: str
    num_different: int

    def to_json(self) -> dict[str, Any]:
        """As ``first_difference`` of a ``weights`` entry."""
        return {"tensor": self.tensor, "why": self.why, "num_different": self.num_different}


def first_weight_difference(
    shape: Shape, wanted: Mapping[str, F32], found: Mapping[str, F32], *, rounding: float = 0.0
) -> WeightDifference | None:
    """The first tensor, in file order, where ``found`` is not ``wanted``; None when all are equal.

    Args:
        shape: of ``wanted``.
        wanted: f32 by canonical name, complete.
        found: likewise; a missing tensor is a difference.
        rounding: allowed difference relative to the largest value of the tensor.
    """
    specs = tensor_specs(shape)
    if shape.tie_word_embeddings and "output" in found:  # a head of its own must still be the embedding
        specs.append(replace(specs[0], name="output", role="head"))
        wanted = {**wanted, "output": wanted[specs[0].name]}
    for spec in specs:
        values = found.get(spec.name)
        if values is None:
            return WeightDifference(spec.name, "it is missing", spec.num_elements)
        want = wanted[spec.name]
        if values.shape != want.shape:
            dims = f"dimensions {list(values.shape)} instead of {list(want.shape)}"
            return WeightDifference(spec.name, f"it has {dims}", spec.num_elements)
        if np.array_equal(values, want):
            continue
        limit = np.float32(rounding * float(np.abs(want).max()))
        different = ~(np.abs(values - want) <= limit)
        if different.any():
            return WeightDifference(spec.name, _describe(spec, wanted, values, different), int(different.sum()))
    return None


def _describe(spec: TensorSpec, wanted: Mapping[str, F32], values: F32, different: Any) -> str:
    """Try the known mistakes on ``values``; otherwise say how many values differ and where the first one stands."""
    if not np.isfinite(values).all():
        return f"{int((~np.isfinite(values)).sum())} of its {values.size} values are not finite"
    if not values.any():
        return "it is all zeros"
    for meaning, made in _mistakes(spec, wanted):
        if made.shape == values.shape and np.array_equal(made(), values):
            return meaning
    off = _block_offset(wanted[spec.name], values, different)
    first = np.unravel_index(int(different.argmax()), different.shape)
    place = ", ".join(str(int(index)) for index in first)
    row = "" if len(first) < 2 else f", {len(np.unique(np.nonzero(different)[0]))} of {len(values)} rows"
    found, want = float(values[first]), float(wanted[spec.name][first])
    count = f"{int(different.sum())} of {values.size} values differ{row}"
    return f"{count}, the first at [{place}]: {found:.9g} instead of {want:.9g}{off}"


def _block_offset(want: F32, values: F32, different: Any) -> str:
    """What the first block that differs has in common, or an empty string; sixteen values are inside a block of any format."""
    flat = int(different.argmax()) // _PART * _PART
    a, b = (side.reshape(-1)[flat : flat + _PART].astype(np.float64) for side in (want, values))
    if len(a) < _PART or (different.reshape(-1)[flat : flat + _PART].sum() < _PART // 2):
        return ""
    shift = b - a
    if np.ptp(shift) <= _SAME * np.abs(shift).max():
        return "; all of its block are off by the same amount, as by a wrong zero point"
    factor = float(a @ b / (a @ a)) if a.any() else 0.0
    if np.abs(b - factor * a).max() <= _SAME * np.abs(b).max():
        return "; all of its block are off by the same factor, as by the scale of another block"
    return ""


@dataclass(frozen=True, slots=True)
class _Made:
    """An array that is made only when its shape fits."""

    shape: tuple[int, ...]
    make: Callable[[], F32]

    def __call__(self) -> F32:
        return self.make()


def _mistakes(spec: TensorSpec, wanted: Mapping[str, F32]) -> list[tuple[str, _Made]]:
    right = wanted[spec.name]
    found = []
    if spec.rope_heads:
        for order, meaning in (
            (gguf_row_order, "its rows are in the interleaved rotary order, as if the q/k permutation was made once too often"),
            (canonical_row_order, "its rows are in the rotate-half rotary order, as if the q/k permutation was dropped"),
        ):
            rows = order(spec.dims[0], spec.rope_heads)
            found.append((meaning, _Made(spec.dims, lambda rows=rows: right[rows])))  # type: ignore[misc]
    if len(spec.dims) == 2 and spec.dims[-1] % _BLOCK == 0:
        for meaning, values in (
            ("its values are swapped in pairs, as if each byte's nibbles were taken the wrong way round", _PAIRS),
            ("its values are in GGUF's nibble order, as if blocks were copied without regrouping", _GGUF_NIBBLES),
        ):
            found.append((meaning, _Made(spec.dims, lambda values=values: _reordered(right, values))))  # type: ignore[misc]
    if len(spec.dims) == 2:
        square = spec.dims[::-1]
        found.append(("it is stored transposed", _Made(square, lambda: np.ascontiguousarray(right.T))))
    for name, other in wanted.items():
        if name != spec.name and other.shape == spec.dims:
            found.append((_mix_up(spec.name, name), _Made(spec.dims, lambda other=other: other)))  # type: ignore[misc]
    return found


def _reordered(values: F32, order: Any) -> F32:
    """``values`` with each block's 32 taken in ``order``."""
    return values.reshape(-1, _BLOCK)[:, order].reshape(values.shape)


def _mix_up(name: str, other: str) -> str:
    text = f"it equals what {other} should be"
    pair = {name.rpartition(".")[2], other.rpartition(".")[2]}
    if name.rpartition(".")[0] == other.rpartition(".")[0]:
        for first, second in (("gate", "up"), ("q", "k"), ("k", "v"), ("q", "output")):
            if pair in ({f"ffn_{first}", f"ffn_{second}"}, {f"attn_{first}", f"attn_{second}"}):
                return f"{text}: {first} and {second} look swapped"
    return text
