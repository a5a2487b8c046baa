"""A plain quantiser to K-quant blocks, so that tests have models in formats that the engine only reads.

It rounds every sub-block to its own range, which llama.cpp's does better; the blocks are as valid.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.arrays import F32, U8
from deepthin.engine.formats import F32 as F32_FORMAT
from deepthin.engine.formats import BlockFormat
from deepthin.engine.model import Model, Tensor
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import tensor_specs


def stored(values: F32, fmt: BlockFormat) -> Tensor:
    """``values`` f32 [out, in] as ``fmt``, whichever format that is."""
    if fmt.can_quantize:
        return Tensor.from_values(values, fmt)
    blocks = _q6_k(values, fmt) if fmt.name == "q6_k" else _q45_k(values, fmt)
    return Tensor(fmt, tuple(values.shape), blocks.view(np.uint8).reshape(len(values), -1))


def stored_model(shape: Shape, values: dict[str, F32], formats: list[BlockFormat]) -> Model:
    """A model of ``values``, its matrices in ``formats`` by turns."""
    tensors = {}
    for index, spec in enumerate(tensor_specs(shape)):
        matrix = len(spec.dims) == 2
        fmt = formats[index % len(formats)]
        tensors[spec.name] = stored(values[spec.name], fmt) if matrix else Tensor.from_values(values[spec.name], F32_FORMAT)
    return Model(shape, tensors)


def _q45_k(values: F32, fmt: BlockFormat) -> np.ndarray:
    top = 15 if fmt.name == "q4_k" else 31
    parts = values.reshape(-1, 8, 32)
    least = np.minimum(parts.min(axis=2), 0)
    step = (parts.max(axis=2) - least) / top
    out = np.zeros(len(parts), fmt.dtype)
    out["d"], out["dmin"] = step.max(axis=1) / 63, -least.min(axis=1) / 63
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = np.nan_to_num(np.rint(step / out["d"].astype(np.float32)[:, None])).clip(0, 63).astype(np.uint8)
        mins = np.nan_to_num(np.rint(-least / out["dmin"].astype(np.float32)[:, None])).clip(0, 63).astype(np.uint8)
        units = out["d"].astype(np.float32)[:, None] * scales
        shifted = parts + (out["dmin"].astype(np.float32)[:, None] * mins)[:, :, None]
        codes = np.nan_to_num(np.rint(shifted / units[:, :, None]), posinf=0, neginf=0).clip(0, top).astype(np.uint8)
    out["scales"][:, 0:4] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    out["scales"][:, 4:8] = mins[:, :4] | mins[:, 4:] >> 4 << 6
    out["scales"][:, 8:] = scales[:, 4:] & 15 | mins[:, 4:] << 4
    out["qs"] = (codes[:, 0::2] & 15 | codes[:, 1::2] << 4).reshape(-1, 128)
    if fmt.name == "q5_k":
        out["qh"] = np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0]
    return out


def _q6_k(values: F32, fmt: BlockFormat) -> np.ndarray:
    parts = values.reshape(-1, 16, 16)
    peak = np.take_along_axis(parts, np.abs(parts).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    out = np.zeros(len(parts), fmt.dtype)
    out["d"] = np.abs(peak).max(axis=1) / (32 * 127)
    with np.errstate(divide="ignore", invalid="ignore"):
        d = out["d"].astype(np.float32)[:, None]
        out["scales"] = np.nan_to_num(np.rint(peak / (-32 * d))).clip(-128, 127)
        units = (d * out["scales"])[:, :, None]
        rounded = np.nan_to_num(np.rint(parts / units), posinf=0, neginf=0) + 32
    codes: U8 = rounded.clip(0, 63).astype(np.uint8).reshape(-1, 2, 4, 32)
    out["ql"] = (codes[:, :, :2] & 15 | codes[:, :, 2:] << 4).reshape(-1, 128)
    high = codes >> 4
    out["qh"] = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(-1, 64)
    return out
