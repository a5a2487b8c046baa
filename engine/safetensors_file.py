"""Reads ``.safetensors`` files, single or sharded, as mapped read-only tensors of f32, f16 or bf16.

    u64 header length, JSON header, data        header: name -> {dtype, shape, data_offsets [begin, end)}

Nothing in the file is trusted: the header is bounded before it is parsed, offsets must cover the data without gap or
overlap, and each span must equal dtype x shape. Source: huggingface/safetensors ``safetensors/src/tensor.rs`` at 24b0b28.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.errors import FormatError, UnsupportedError
from deepthin.engine.formats import FORMATS, BlockFormat
from deepthin.engine.json_text import parse_json_object, read_json_object
from deepthin.engine.model import Tensor
from deepthin.engine.model_folder import member

_MAX_HEADER_BYTES = 1 << 23  # the format allows 100 MB; 4096 layers of ours need less than 5 MB
_MAX_INDEX_BYTES = 1 << 23
_MAX_SHARDS = 1024
_MAX_DIMS = 8
_MAX_NAME = 256
_DTYPES: dict[str, BlockFormat] = {"F32": FORMATS["f32"], "F16": FORMATS["f16"], "BF16": FORMATS["bf16"]}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of the file by name, views of a read-only map.

    Raises:
        FormatError: the header contradicts itself or the file's length.
        UnsupportedError: a tensor has another dtype.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as handle:
        size = handle.seek(0, 2)
        if size < 8:
            raise FormatError(f"{path}: it has {size} bytes, too few for a safetensors file; fetch or export it again")
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    header_bytes = int.from_bytes(mapped[:8], "little")
    if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
        raise FormatError(
            f"{path}: the header claims {header_bytes} bytes, but the file has {size} and {_MAX_HEADER_BYTES} are the most; "
            f"is it a safetensors file, and whole?"
        )
    header = parse_json_object(mapped[8 : 8 + header_bytes], f"{path} (header)")
    header.pop("__metadata__", None)
    buffer = np.frombuffer(mapped, np.uint8)[8 + header_bytes :]
    spans = sorted((_entry(path, name, entry) for name, entry in header.items()), key=lambda span: span[3])
    tensors = {}
    expected = 0
    for name, fmt, dims, begin, end in spans:
        if begin != expected or end - begin != math.prod(dims) * fmt.block_bytes:
            raise FormatError(
                f"{path}: tensor '{name}' ({fmt.name}, dimensions {list(dims)}) spans bytes {begin} to {end}; "
                f"{expected} to {expected + math.prod(dims) * fmt.block_bytes} are needed, without gap or overlap"
            )
        if end > len(buffer):
            raise FormatError(
                f"{path}: tensor '{name}' ends at data byte {end}, but the file holds {len(buffer)}; "
                f"was it cut short? Fetch or export it again"
            )
        rows = math.prod(dims[:-1])
        tensors[name] = Tensor(fmt, dims, buffer[begin:end].reshape(rows, (end - begin) // rows))
        expected = end
    if expected != len(buffer):
        raise FormatError(f"{path}: {len(buffer) - expected} bytes follow the last tensor; the file is damaged")
    return tensors


def read_safetensors_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` lists.

    Raises:
        FormatError: neither is there, or index and shards disagree.
        UnsupportedError: a tensor has another dtype.
    """
    single = member(folder, "model.safetensors")
    if single is not None:
        return read_safetensors(single)
    index = member(folder, "model.safetensors.index.json")
    if index is None:
        pickled = sorted(folder.glob("pytorch_model*.bin"))
        advice = (
            f"; '{pickled[0].name}' is a pickle, which can run code and is never read, so save it as safetensors"
            if pickled
            else ""
        )
        raise FormatError(f"{folder}: there is neither model.safetensors nor model.safetensors.index.json{advice}")
    weight_map = read_json_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FormatError(f"{index}: key 'weight_map' must map tensor names to file names")
    return _sharded(folder, index, weight_map)


def _sharded(folder: Path, index: Path, weight_map: Mapping[str, str]) -> dict[str, Tensor]:
    names = sorted(set(weight_map.values()))
    if len(names) > _MAX_SHARDS:
        raise FormatError(f"{index}: it names {len(names)} files; at most {_MAX_SHARDS} are read")
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = member(folder, name)
        if path is None:
            raise FormatError(f"{index}: it names {name!r}, which is not in the folder; fetch the model again")
        shard = read_safetensors(path)
        stray = [tensor for tensor in shard if weight_map.get(tensor) != name]
        if stray:
            raise FormatError(f"{path}: it holds tensor '{stray[0]}', which the index places elsewhere or nowhere")
        tensors.update(shard)
    lost = [tensor for tensor in weight_map if tensor not in tensors]
    if lost:
        raise FormatError(f"{index}: it places tensor {lost[0][:60]!a} in {weight_map[lost[0]]!r}, which does not hold it")
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[str, BlockFormat, tuple[int, ...], int, int]:
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise FormatError(f"{path}: a tensor is called {name[:60]!a}; 1 to {_MAX_NAME} printable characters are needed")
    if not isinstance(entry, dict):
        raise FormatError(f"{path}: the header's entry for tensor '{name}' is no object; the file is damaged")
    dtype: Any = entry.get("dtype")
    dims: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise FormatError(f"{path}: tensor '{name}' has no dtype; the file is damaged")
    if dtype not in _DTYPES:
        raise UnsupportedError(
            f"{path}: tensor '{name}' is stored as {dtype[:20]!r}, which this version does not read; "
            f"it reads {', '.join(_DTYPES)}, so save the model in one of these"
        )
    if not (_whole_numbers(dims) and 1 <= len(dims) <= _MAX_DIMS and min(dims) >= 1):
        raise FormatError(
            f"{path}: tensor '{name}' needs 1 to {_MAX_DIMS} dimensions of at least 1; the header says {str(dims)[:80]}"
        )
    if not (_whole_numbers(offsets) and len(offsets) == 2):
        raise FormatError(f"{path}: tensor '{name}' needs two data offsets; the header says {str(offsets)[:80]}")
    return name, _DTYPES[dtype], tuple(dims), offsets[0], offsets[1]


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
