"""What exported files will weigh, to the byte, before anything is written: the writers' layouts over weights not there yet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deepthin.engine.formats import STORED, scheme_named
from deepthin.engine.model import Model, Tensor
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import stored_format, tensor_specs
from deepthin.export.feasibility import ONNX_TARGETS, refusals
from deepthin.export.gguf_writer import gguf_file_bytes
from deepthin.export.hf_folder import hf_folder_bytes
from deepthin.export.onnx_profiles import PROFILES


def hollow_model(shape: Shape, quant: str, *, name: str = "model") -> Model:
    """A model of ``shape`` stored as ``quant`` whose blocks take no memory and are all zero: it has sizes and no sense.

    Raises:
        UsageError: no such format.
    """
    scheme, tensors = scheme_named(quant), {}
    for spec in tensor_specs(shape):
        fmt = stored_format(spec, scheme)
        rows = spec.dims[0] if len(spec.dims) == 2 else 1
        blocks = np.broadcast_to(np.zeros(1, np.uint8), (rows, fmt.row_bytes(spec.dims[-1])))
        tensors[spec.name] = Tensor(fmt, spec.dims, blocks)
    return Model(shape, tensors, name=name)


def stored_as(model: Model, quant: str) -> Model:
    """What ``model.quantized(quant)`` will be, without its weights; ``model`` itself for ``stored``.

    Raises:
        UsageError: no such format.
    """
    return model if quant == STORED else replace(model, tensors=hollow_model(model.shape, quant).tensors)


def file_sizes(shape: Shape, quant: str, *, name: str = "model", onnx_profile: str = "contrib") -> dict[str, int]:
    """Bytes by kind of file of a model of token ids called ``name``: ``gguf``, ``onnx`` and ``hf`` (the f32 folder).

    Shared blocks count as often as each kind writes them. What cannot hold the shape, or the format, is left out.

    Raises:
        UsageError: no such format or profile.
    """
    refused = refusals(("hf", "gguf", *ONNX_TARGETS), shape)
    found = {}
    if "gguf" not in refused:
        found["gguf"] = gguf_file_bytes(hollow_model(shape.unrolled, quant, name=name), file_format=scheme_named(quant).body)
    if not set(ONNX_TARGETS) & set(refused) and PROFILES[onnx_profile].writes(quant):
        from deepthin.export.onnx_model import onnx_file_bytes  # loads `onnx`

        found["onnx"] = sum(onnx_file_bytes(hollow_model(shape, quant), profile=onnx_profile, accuracy_level=4))
    if "hf" not in refused:
        found["hf"] = sum(hf_folder_bytes(hollow_model(shape.unrolled, "f32")).values())
    return found
