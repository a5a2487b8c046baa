"""Parses what stands before the tensor data of a GGUF version 3 file: header, typed metadata, tensor infos.

Knows nothing of architectures. Nothing in the file is trusted: each count and length is bounded by the bytes that are
left before anything is looped over or allocated, sizes are Python ints, and every failure is one FormatError.

    header        magic "GGUF", u32 version, u64 tensors, u64 key/values
    key/value     string key, u32 type, value       string = u64 length, UTF-8 bytes      array = u32 type, u64 count, items
    tensor info   string name, u32 n, n * u64 dims (row length first), u32 type, u64 offset into the data
    data          starts at the next multiple of the alignment; tensors follow each other in order, each padded to it

Source: ggml ``docs/gguf.md`` at ggml-org/ggml@d99724f.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.errors import FormatError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 3 differs from 2 only in allowing big-endian files, which are refused
_MAX_HEADER_BYTES = 1 << 27  # the largest public vocabularies need some 16 MB
_MAX_STRING_BYTES = 1 << 24
_MAX_ITEMS = 1 << 22  # array items in the whole file
_USUAL_STRING_BYTES = 64  # of one array item with its length, on average; public vocabularies need some 15
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_KEY_BYTES = 255
_MAX_NAME_BYTES = 63
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20

_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 6, 7, 8, 9, 10
_SCALARS: dict[int, tuple[str, str]] = {  # value type: name, struct (and NumPy) letter
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    _UINT32: ("uint32", "I"),
    5: ("int32", "i"),
    _FLOAT32: ("float32", "f"),
    _BOOL: ("bool", "B"),
    _UINT64: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
# ggml_type number: name, values per block, bytes per block. Sizes of types that cannot be run are needed to check offsets.
# Types that ggml keeps in memory only (Q8_1, Q8_K) are left out.
# Source: ggml ``include/ggml.h`` and ``src/ggml-common.h`` at ggml-org/ggml@d99724f.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class MetaValue:
    """One metadata value; ``kind`` is ``uint32``, ``string``, ... or ``[uint32]``, ``[string]``, ... for arrays."""

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dims: as stored, row length first.
        type_name: upper-case ggml name, for example ``Q4_1``.
        start: absolute position in the file, bytes.
    """

    name: str
    dims: tuple[int, ...]
    type_id: int
    type_name: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the tensor data."""

    version: int
    alignment: int
    metadata: Mapping[str, MetaValue]
    tensors: Mapping[str, TensorInfo]


class HeaderParser:
    """One pass over the header, from front to back; each method moves on behind what it read.

    Raises:
        FormatError: any part contradicts another or the file's length.
    """

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path, self.mapped, self.size = path, mapped, len(mapped)
        self.limit = min(self.size, _MAX_HEADER_BYTES)
        self.at = 0
        self.items_left = _MAX_ITEMS

    def parse(self) -> GgufHeader:
        """The checked header."""
        if self.mapped[:4] != MAGIC:
            raise self._error("it does not begin with 'GGUF'; a GGUF model file is needed")
        self.at = 4
        version = self._scalar(_UINT32, "the version")
        if version not in _VERSIONS:
            what = "big-endian" if version in (2 << 24, 3 << 24) else f"GGUF version {version}"
            raise self._error(f"it is a {what} file; little-endian GGUF version 3 is needed, so convert it again")
        num_tensors = self._count(self._scalar(_UINT64, "the tensor count"), 8 + 1 + 4 + 8 + 4 + 8, _MAX_TENSORS, "tensors")
        num_keys = self._count(self._scalar(_UINT64, "the key count"), 8 + 1 + 4 + 1, _MAX_KEYS, "metadata keys")
        metadata: dict[str, MetaValue] = {}
        for index in range(num_keys):
            key = self._name(f"the name of metadata key {index}", _MAX_KEY_BYTES)
            if key in metadata:
                raise self._error(f"key '{key}' appears twice; keys must be unique")
            metadata[key] = self._value(key)
        alignment = self._alignment(metadata)
        infos = self._tensor_infos(num_tensors, alignment)
        return GgufHeader(version, alignment, metadata, infos)

    def _error(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: {what}")

    def _need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.limit - self.at:
            if self.limit < self.size:
                raise self._error(f"{what} at byte {self.at} makes the header longer than {_MAX_HEADER_BYTES >> 20} MiB")
            raise self._error(
                f"{what} at byte {self.at} needs {num_bytes} bytes, but {self.limit - self.at} are left; "
                f"was the file cut short? Fetch or export it again"
            )

    def _scalar(self, kind: int, what: str) -> Any:
        layout = "<" + _SCALARS[kind][1]
        self._need(struct.calcsize(layout), what)
        (value,) = struct.unpack_from(layout, self.mapped, self.at)
        self.at += struct.calcsize(layout)
        return value

    def _count(self, count: int, min_bytes: int, most: int, what: str) -> int:
        """``count`` once it is known that so many items of at least ``min_bytes`` can still follow."""
        if count > most or count * min_bytes > self.limit - self.at:
            raise self._error(
                f"the header announces {count} {what}, but the {self.limit - self.at} bytes that follow cannot hold more than "
                f"{min(most, (self.limit - self.at) // min_bytes)}; the file is damaged or was cut short"
            )
        return count

    def _string(self, what: str, errors: str = "strict") -> str:
        length = self._scalar(_UINT64, what)
        if length > _MAX_STRING_BYTES:
            raise self._error(f"{what} at byte {self.at - 8} claims {length} bytes; at most {_MAX_STRING_BYTES} are read")
        self._need(length, what)
        raw = self.mapped[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8", errors)
        except UnicodeDecodeError:
            raise self._error(f"{what} at byte {self.at - length} is not UTF-8; the file is damaged") from None

    def _name(self, what: str, most: int) -> str:
        """A string fit to be a name and to stand in a message."""
        name = self._string(what)
        if not 0 < len(name.encode()) <= most or not name.isprintable():
            raise self._error(f"{what} is {name[:60]!a}; 1 to {most} printable bytes are needed")
        return name

    def _value(self, key: str) -> MetaValue:
        kind = self._scalar(_UINT32, f"the type of key '{key}'")
        if kind == _STRING:
            return MetaValue("string", self._string(f"the value of key '{key}'", "replace"))
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"key '{key}' has type {kind}, which GGUF does not define; the file is damaged")
        value = self._scalar(kind, f"the value of key '{key}'")
        name = _SCALARS[kind][0]
        if kind == _BOOL:
            if value > 1:
                raise self._error(f"key '{key}' is a bool of value {value}; 0 or 1 is needed")
            value = bool(value)
        elif kind == _FLOAT32:
            value = float(str(np.float32(value)))
        return MetaValue(name, value)

    def _array(self, key: str) -> MetaValue:
        kind = self._scalar(_UINT32, f"the item type of key '{key}'")
        count = self._scalar(_UINT64, f"the item count of key '{key}'")
        if kind != _STRING and kind not in _SCALARS:
            raise self._error(f"key '{key}' is an array of type {kind}; arrays of numbers, bools or strings are needed")
        item_bytes = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind][1])
        self.items_left -= self._count(count, item_bytes, self.items_left, f"items of key '{key}'")
        if kind == _STRING:
            return MetaValue("[string]", self._strings(key, count))
        name, letter = _SCALARS[kind]
        values = np.frombuffer(self.mapped, "<" + letter, count, self.at).copy()
        self.at += count * item_bytes
        return MetaValue(f"[{name}]", values)

    def _strings(self, key: str, count: int) -> tuple[str, ...]:
        found = self._short_strings(count)
        return self._any_strings(key, count) if found is None else found

    def _short_strings(self, count: int) -> tuple[str, ...] | None:
        """``count`` strings, decoded together, because vocabularies hold hundreds of thousands.

        None, and nothing read, if one has more than 255 bytes or a NUL, or if anything about them is wrong.
        """
        window = self.mapped[self.at : min(self.limit, self.at + _USUAL_STRING_BYTES * count)]
        lengths_at, at = [], 0
        try:
            for _ in range(count):
                lengths_at.append(at)
                at += 8 + window[at]  # the lowest byte of the length; the others are looked at below
        except IndexError:
            return None
        if at > len(window):
            return None
        raw, starts = np.frombuffer(window, np.uint8, at), np.array(lengths_at, np.int64)[:, None]
        if raw[starts + np.arange(1, 8)].any():
            return None
        kept = np.ones(at, np.bool_)
        kept[starts + np.arange(7)] = False  # the last byte of each length stays, a NUL in front of the string
        try:
            texts = raw[kept].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return None
        if len(texts) != count:
            return None
        self.at += at
        return tuple(texts)

    def _any_strings(self, key: str, count: int) -> tuple[str, ...]:
        length_at = struct.Struct("<Q").unpack_from
        mapped, at, last = self.mapped, self.at, self.limit - 8
        out = []
        for index in range(count):
            start = at + 8
            at = start + length_at(mapped, at)[0] if at <= last else self.limit + 1
            if at > self.limit:
                raise self._error(f"item {index} of key '{key}' reaches past the end of the file; was it cut short?")
            out.append(mapped[start:at])
        self.at = at
        try:
            return tuple([raw.decode() for raw in out])
        except UnicodeDecodeError:
            raise self._error(f"key '{key}' holds a string that is not UTF-8; the file is damaged") from None

    def _alignment(self, metadata: Mapping[str, MetaValue]) -> int:
        held = metadata.get("general.alignment", MetaValue("uint32", 32))
        good = held.kind == "uint32" and 0 < held.value <= _MAX_ALIGNMENT and held.value & (held.value - 1) == 0
        if not good:
            raise self._error(
                f"key 'general.alignment' is {held.value} ({held.kind}); a uint32 power of two up to {_MAX_ALIGNMENT} is needed"
            )
        return int(held.value)

    def _tensor_infos(self, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        raw = [self._tensor_info(index) for index in range(num_tensors)]
        base = _padded(self.at, alignment)
        infos: dict[str, TensorInfo] = {}
        expected = 0
        for name, dims, type_id, offset in raw:
            type_name, block, block_bytes = GGML_TYPES[type_id]
            num_bytes = math.prod(dims) // block * block_bytes
            if name in infos:
                raise self._error(f"tensor '{name}' appears twice; names must be unique")
            if offset != expected:
                raise self._error(
                    f"tensor '{name}' starts at data offset {offset}, but {expected} is needed, "
                    f"right behind the tensor before it; the file is damaged"
                )
            if base + offset + num_bytes > self.size:
                raise self._error(
                    f"tensor '{name}' ({type_name}, dimensions {list(dims)}) needs {num_bytes} bytes at byte {base + offset}, "
                    f"but the file ends at byte {self.size}; was it cut short? Fetch or export it again"
                )
            infos[name] = TensorInfo(name, dims, type_id, type_name, base + offset, num_bytes)
            expected = _padded(offset + num_bytes, alignment)
        return infos

    def _tensor_info(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name(f"the name of tensor {index}", _MAX_NAME_BYTES)
        num_dims = self._scalar(_UINT32, f"the dimension count of tensor '{name}'")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"tensor '{name}' has {num_dims} dimensions; 1 to {_MAX_DIMS} are needed")
        dims = tuple(self._scalar(_UINT64, f"the dimensions of tensor '{name}'") for _ in range(num_dims))
        type_id = self._scalar(_UINT32, f"the type of tensor '{name}'")
        offset = self._scalar(_UINT64, f"the offset of tensor '{name}'")
        if 0 in dims:
            raise self._error(f"tensor '{name}' has dimensions {list(dims)}; each must be at least 1")
        if type_id not in GGML_TYPES:
            raise self._error(f"tensor '{name}' has type {type_id}, which is not known; is the file damaged or newer?")
        type_name, block, _ = GGML_TYPES[type_id]
        if dims[0] % block:
            raise self._error(f"tensor '{name}' has rows of {dims[0]} values, no multiple of a {type_name} block's {block}")
        return name, dims, type_id, offset


def _padded(position: int, alignment: int) -> int:
    return (position + alignment - 1) // alignment * alignment
