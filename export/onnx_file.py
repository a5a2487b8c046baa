"""Writes an ONNX file initializer by initializer, so that memory holds one at a time and the bytes depend on nothing else.

A protobuf message may come in pieces: the graph without initializers is serialised by ``onnx``, then each initializer follows
as one more field of it. Above ``EXTERNAL_BYTES`` the data goes to one file beside the model, named ``<model>.onnx_data`` (the
name that transformers.js looks for; onnxruntime and genai take any).

Source: field numbers in onnx ``onnx/onnx.proto`` (ModelProto.graph 7, GraphProto.initializer 5, TensorProto.raw_data 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import onnx

from deepthin.export.onnx_weights import Initializer

EXTERNAL_BYTES = 1_900_000_000  # protobuf readers stop at 2 GiB
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_RAW_DATA = 7, 5, 9
_LENGTH_DELIMITED = 2
_SMALL_BYTES = 1024  # shapes and axes stay inside the model, where shape inference sees them


def write_onnx_file(
    proto: Any, initializers: Sequence[Initializer], path: Path, *, external_bytes: int = EXTERNAL_BYTES
) -> list[Path]:
    """Write the model ``proto`` (onnx.ModelProto) with ``initializers`` to ``path``; returns the files made, the model first.

    Args:
        proto: complete except for initializers.
        initializers: in file order, names unique.
        path: a name not in use yet, ending in .onnx.
        external_bytes: data larger than this in all is stored beside the model.
    """
    layout = _Layout(proto, initializers, path.name, external_bytes)
    with path.open("xb") as file:
        file.write(layout.start)
        for body in layout.bodies:
            body.write(file)
    if not layout.outside:
        return [path]
    data_path = path.with_name(layout.data_name)
    with data_path.open("xb") as file:
        for item in layout.outside:
            file.write(item.values().data)
    return [path, data_path]


def onnx_file_sizes(
    proto: Any, initializers: Sequence[Initializer], name: str, *, external_bytes: int = EXTERNAL_BYTES
) -> list[int]:
    """Bytes of each file that :func:`write_onnx_file` makes at a path that ends in ``name``; no data is made."""
    layout = _Layout(proto, initializers, name, external_bytes)
    model = len(layout.start) + sum(body.size for body in layout.bodies)
    return [model, sum(item.num_bytes for item in layout.outside)] if layout.outside else [model]


class _Layout:
    """Where everything goes: ``start`` is what comes before the initializers, ``outside`` what the second file holds."""

    def __init__(self, proto: Any, initializers: Sequence[Initializer], name: str, external_bytes: int) -> None:
        split = sum(item.num_bytes for item in initializers) > external_bytes
        self.data_name = name + "_data"
        self.outside = [item for item in initializers if split and item.num_bytes > _SMALL_BYTES]
        self.bodies, offset = [], 0
        for item in initializers:
            kind = onnx.TensorProto.INT4 if item.packed else onnx.helper.np_dtype_to_tensor_dtype(item.dtype)
            head = onnx.TensorProto(name=item.name, dims=item.dims, data_type=kind)
            if split and item.num_bytes > _SMALL_BYTES:
                head.data_location = onnx.TensorProto.EXTERNAL
                for key, value in (("location", self.data_name), ("offset", offset), ("length", item.num_bytes)):
                    head.external_data.add(key=key, value=str(value))
                offset += item.num_bytes
            self.bodies.append(_Body(head, item))
        graph = proto.graph.SerializeToString(deterministic=True)
        rest = type(proto)()
        rest.CopyFrom(proto)
        rest.ClearField("graph")
        frame = _tag(_MODEL_GRAPH) + _varint(len(graph) + sum(body.size for body in self.bodies))
        self.start = rest.SerializeToString(deterministic=True) + frame + graph


class _Body:
    """One ``GraphProto.initializer`` field: its frame is known before its data is made."""

    def __init__(self, head: Any, item: Initializer) -> None:
        self.item = None if head.external_data else item
        message = head.SerializeToString(deterministic=True)
        if self.item is not None:
            message += _tag(_TENSOR_RAW_DATA) + _varint(item.num_bytes)
        length = len(message) + (0 if self.item is None else item.num_bytes)
        self.frame = _tag(_GRAPH_INITIALIZER) + _varint(length) + message
        self.size = len(self.frame) + length - len(message)

    def write(self, file: BinaryIO) -> None:
        file.write(self.frame)
        if self.item is not None:
            file.write(self.item.values().data)


def _tag(field: int) -> bytes:
    return _varint(field << 3 | _LENGTH_DELIMITED)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
