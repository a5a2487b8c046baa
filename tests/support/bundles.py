"""Bundles to be tampered with: one file is changed, and its line of the manifest is made to agree again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from deepthin.engine.arrays import F32
from deepthin.engine.formats import GGUF_TYPES, format_named
from deepthin.engine.gguf_file import read_gguf
from deepthin.engine.model import Model, Tensor
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import tensor_specs
from deepthin.export.gguf_writer import write_gguf
from deepthin.export.hf_folder import write_hf_folder
from deepthin.export.onnx_model import write_onnx
from tests.support.tiny_models import lively_model

# the models of the bundle that tests/export/conftest.py makes, what they hold, and who runs them
HF, GGUF, ONNX = "hf", "gguf/model-f32.gguf", "transformersjs/onnx/model.onnx"
GGUF_Q4, ONNX_Q4 = "gguf/model-q4_0.gguf", "transformersjs/onnx/model_q4.onnx"
QUANT = {HF: "f32", GGUF: "f32", ONNX: "f32", GGUF_Q4: "q4_0", ONNX_Q4: "q4_0"}
READERS = {GGUF: "engine llama.cpp", GGUF_Q4: "engine llama.cpp", ONNX: "onnxruntime", ONNX_Q4: "onnxruntime"}


def quiet_model(shape: Shape, *, seed: int = 0) -> Model:
    """A lively model whose embeddings are so small that the norm's epsilon shows in the logits."""
    return with_values(lively_model(shape, seed=seed), token_embd=lambda values: values * np.float32(0.05))


def with_values(model: Model, **changes: Callable[[F32], F32]) -> Model:
    """``model`` in f32 with some tensors' values changed; ``blk_0_ffn_up`` stands for ``blk.0.ffn_up``."""
    tensors = {name: Tensor.from_values(values, format_named("f32")) for name, values in model.dequantized().items()}
    names = {name.replace(".", "_"): name for name in tensors}
    for key, change in changes.items():
        values = np.ascontiguousarray(change(tensors[names[key]].dequantize()), np.float32)
        tensors[names[key]] = Tensor.from_values(values, format_named("f32"))
    return Model(model.shape, tensors, model.tokenizer, model.name, model.source)


def exchanged(model: Model, first: str, second: str) -> Model:
    """``model`` with the weights of two tensors exchanged."""
    tensors = dict(model.tensors)
    tensors[first], tensors[second] = tensors[second], tensors[first]
    return Model(model.shape, tensors, model.tokenizer, model.name, model.source)


def reshaped(model: Model, **changes: Any) -> Model:
    """The same tensors under a shape that says something else."""
    return Model(model.shape.replace(**changes), model.tensors, model.tokenizer, model.name, model.source)


def rows_taken(model: Model, order: Callable[[int, int], Any]) -> Model:
    """``model`` with query and key rows taken in ``order(rows, heads)``."""
    tensors = dict(model.tensors)
    for spec in tensor_specs(model.shape):
        if spec.rope_heads:
            held = tensors[spec.name]
            tensors[spec.name] = Tensor(held.format, held.dims, held.data[order(spec.dims[0], spec.rope_heads)])
    return Model(model.shape, tensors, model.tokenizer, model.name, model.source)


def put(bundle: Path, name: str, model: Model, quant: str = "f32") -> None:
    """Write ``model`` over the model ``name`` of the bundle, with this package's own writers."""
    path = bundle / name
    if path.is_dir():
        shutil.rmtree(path)
        path.mkdir()
        write_hf_folder(model, path)
        bless(bundle, *(f"{name}/{file.name}" for file in path.iterdir()))
        return
    path.unlink()
    if name.endswith(".gguf"):
        write_gguf(model.quantized(quant), path, file_format=format_named(quant))
    else:
        write_onnx(model.quantized(quant), path)
    bless(bundle, name)


def edit_onnx(bundle: Path, name: str, change: Callable[[Any], None]) -> None:
    """Let ``change`` alter the ModelProto of an ONNX file."""
    proto = onnx.load(str(bundle / name))
    change(proto)
    onnx.save(proto, str(bundle / name))
    bless(bundle, name)


def edit_gguf(bundle: Path, name: str, tensor: str, change: Callable[[Any], Any]) -> None:
    """Let ``change`` alter the stored blocks of ``tensor``, a structured array [out, blocks]."""
    held = read_gguf(bundle / name)
    info = held.tensors[tensor]
    blocks = held.data(tensor).copy().view(GGUF_TYPES[info.type_id].dtype)
    data = bytearray((bundle / name).read_bytes())
    data[info.start : info.start + info.num_bytes] = np.ascontiguousarray(change(blocks)).tobytes()
    (bundle / name).write_bytes(data)
    bless(bundle, name)


def flip_bits(bundle: Path, name: str, offset: int, mask: int, *, blessed: bool) -> None:
    """Flip bits of the byte at ``offset``."""
    data = bytearray((bundle / name).read_bytes())
    data[offset] ^= mask
    (bundle / name).write_bytes(data)
    if blessed:
        bless(bundle, name)


def bless(bundle: Path, *names: str) -> None:
    """Make the manifest agree with the files ``names`` as they are now."""
    path = bundle / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    for line in document["files"]:
        if line["path"] in names:
            data = (bundle / line["path"]).read_bytes()
            line["bytes"], line["sha256"] = len(data), hashlib.sha256(data).hexdigest()
            line["tensor_bytes"] = min(line["tensor_bytes"], len(data))
    path.write_text(json.dumps(document), encoding="utf-8")
