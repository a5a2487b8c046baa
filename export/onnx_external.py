"""Reads an ONNX file whose weights may lie outside it, in files that nobody vouches for.

External data must be a plain file in the model's own folder, with no second name, and each tensor must lie inside it and be as
long as its dimensions say. All of that is checked before a byte of it is read. Names must be unique.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepthin.engine.errors import FormatError
from deepthin.engine.model_folder import member

_MAX_OFFSET = 1 << 62
_MAX_DEPTH = 8  # of graphs inside nodes; ours have none


def load_onnx(path: Path) -> Any:
    """The ModelProto at ``path``, with its external data in it.

    Raises:
        FormatError: it is no ONNX model, a name occurs twice, or external data is not where and what it should be.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        proto = onnx.load(str(path), load_external_data=False)
        if not proto.graph.node:
            raise FormatError(f"{path}: it is not a readable ONNX model (it has no graph)")
        outside = [tensor for tensor in _tensors(path, proto.graph) if tensor.data_location == onnx.TensorProto.EXTERNAL]
        for tensor in outside:
            _check_external(path, tensor)
        _check_names(path, proto.graph)
        for tensor in outside:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(path.parent))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    except (DecodeError, onnx.checker.ValidationError, OSError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: it is not a readable ONNX model ({' '.join(str(error).split())[:200]})") from None
    return proto


def _tensors(path: Path, graph: Any, depth: int = 0) -> Iterator[Any]:
    """Every constant of ``graph``, those inside of nodes included."""
    if depth > _MAX_DEPTH:
        raise FormatError(f"{path}: its graphs are nested too deeply to be a decoder's")
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                yield from _tensors(path, inner, depth + 1)


def _check_names(path: Path, graph: Any) -> None:
    """Every value has one name, is made once, and before it is used; so whoever follows values back comes to an end."""
    constants = [item.name for item in graph.initializer]
    texts = constants + [item.name for item in graph.input]
    for node in graph.node:
        texts += [*node.input, *node.output, node.op_type, node.domain, node.name, *(item.name for item in node.attribute)]
    if not all(isinstance(text, str) for text in texts):  # bytes that are no UTF-8 are given as they are
        raise FormatError(f"{path}: a name in its graph is not UTF-8; is it damaged?")
    made: set[str] = set()

    def add(name: str) -> None:
        if name in made:
            raise FormatError(f"{path}: the name {name[:60]!a} is given twice; names of constants and values must be unique")
        made.add(name)

    for name in constants:
        add(name)
    inputs = {item.name for item in graph.input}
    for node in graph.node:
        for name in filter(None, node.input):
            if name not in made and name not in inputs:
                raise FormatError(f"{path}: node {node.name[:60]!a} uses {name[:60]!a}, which nothing before it makes")
        for name in filter(None, node.output):
            add(name)


def _check_external(path: Path, tensor: Any) -> None:
    """Check where ``tensor`` says that its data is, and its length against its dimensions."""
    where = f"{path}: tensor {tensor.name[:60]!a}"
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key in entries:
            raise FormatError(f"{where} gives {entry.key[:20]!a} of its external data twice; the file is damaged")
        entries[entry.key] = entry.value
    name = entries.get("location")
    if name is None:
        raise FormatError(f"{where} is stored outside, but no file is named; the file is damaged")
    try:
        data = member(path.parent, name)
    except FormatError as error:
        raise FormatError(f"{where} is stored outside: {error}") from None
    if data is None:
        raise FormatError(f"{where} is stored in {name[:80]!a}, which is not in the folder; copy that file too")
    if data.is_symlink() or data.stat().st_nlink > 1:
        kind = "a link" if data.is_symlink() else "a file with a second name (a hard link)"
        raise FormatError(f"{where} is stored in {name!r}, which is {kind}; put a copy in its place")
    size = data.stat().st_size
    offset = _number(where, entries, "offset", 0)
    need = _num_bytes(where, tensor)
    length = _number(where, entries, "length", need)
    if length != need:
        raise FormatError(
            f"{where} has dimensions {list(tensor.dims)}, which need {need} bytes, but {length} are set aside for it"
        )
    if offset + length > size:
        raise FormatError(
            f"{where} lies at bytes {offset} to {offset + length} of {name!r}, which has {size}; was it cut short? "
            f"Copy or export it again"
        )


def _number(where: str, entries: dict[str, str], key: str, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _MAX_OFFSET):
        raise FormatError(f"{where} has {key} {text[:40]!a} in its external data; a whole number of bytes is needed")
    return int(text)


def _num_bytes(where: str, tensor: Any) -> int:
    """Bytes of ``tensor`` by its dimensions."""
    import onnx

    kind = onnx.TensorProto.DataType
    widths: dict[int, int] = {
        **dict.fromkeys((kind.FLOAT, kind.INT32, kind.UINT32), 32),
        **dict.fromkeys((kind.FLOAT16, kind.BFLOAT16, kind.INT16, kind.UINT16), 16),
        **dict.fromkeys((kind.INT8, kind.UINT8, kind.BOOL), 8),
        **dict.fromkeys((kind.INT4, kind.UINT4), 4),
        **dict.fromkeys((kind.DOUBLE, kind.INT64, kind.UINT64), 64),
    }
    bits = widths.get(tensor.data_type)
    if bits is None:
        raise FormatError(f"{where} has data type {tensor.data_type}, which no decoder of ours holds")
    if any(dim < 0 for dim in tensor.dims):
        raise FormatError(f"{where} has dimensions {list(tensor.dims)[:8]}; none may be negative")
    return -(-math.prod(int(dim) for dim in tensor.dims) * bits // 8)
