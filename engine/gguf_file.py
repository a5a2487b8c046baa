"""Reads GGUF files: typed access to the checked metadata, and tensors as read-only views of the mapped file.

Knows nothing of architectures; the byte layout stands in :mod:`deepthin.engine.gguf_header`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.arrays import U8
from deepthin.engine.errors import FormatError
from deepthin.engine.gguf_header import HeaderParser, MetaValue, TensorInfo
from deepthin.engine.mapped import let_go


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked, mapped GGUF file. Views from :meth:`data` keep the map alive; it is read-only."""

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, MetaValue]
    tensors: Mapping[str, TensorInfo]
    buffer: U8 = field(repr=False)

    def data(self, name: str) -> U8:
        """Stored bytes of tensor ``name`` as a read-only view u8 [rows, row_bytes]; all dims but the first are rows."""
        info = self.tensors[name]
        rows = math.prod(info.dims[1:])
        return self.buffer[info.start : info.start + info.num_bytes].reshape(rows, info.num_bytes // rows)

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int) -> int:
        """Value of an integer key within [low, high].

        Raises:
            FormatError: the key is missing without a default, of another type, or out of range.
        """
        value = self._get(key, "a whole number", ("int", "uint"), default)
        if not low <= value <= high:
            raise FormatError(f"{self.path}: key '{key}' is {value}, but a value from {low} to {high} is needed")
        return int(value)

    def number(self, key: str, default: float | None = None, *, low: float, high: float) -> float:
        """Value of a float key within [low, high], as the shortest decimal that rounds to the stored value.

        Raises:
            FormatError: the key is missing without a default, of another type, not finite, or out of range.
        """
        value = self._get(key, "a number", ("float",), default)
        if not (math.isfinite(value) and low <= value <= high):
            raise FormatError(f"{self.path}: key '{key}' is {value}, but a finite number from {low:g} to {high:g} is needed")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Value of a string key.

        Raises:
            FormatError: the key is missing without a default, or of another type.
        """
        return str(self._get(key, "a string", ("string",), default))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Value of a boolean key.

        Raises:
            FormatError: the key is missing without a default, or of another type.
        """
        return bool(self._get(key, "true or false", ("bool",), default))

    def texts(self, key: str) -> list[str]:
        """Value of an array of strings.

        Raises:
            FormatError: the key is missing or of another type.
        """
        return list(self._get(key, "an array of strings", ("[string]",), None))

    def integers(self, key: str) -> list[int]:
        """Value of an array of integers.

        Raises:
            FormatError: the key is missing or of another type.
        """
        held: list[int] = self._get(key, "an array of whole numbers", ("[int", "[uint"), None).tolist()
        return held

    def _get(self, key: str, wanted: str, kinds: tuple[str, ...], default: Any) -> Any:
        held = self.metadata.get(key)
        if held is None:
            if default is None:
                raise FormatError(f"{self.path}: key '{key}' is missing; {wanted} is needed")
            return default
        if not held.kind.startswith(kinds):
            raise FormatError(f"{self.path}: key '{key}' holds {held.kind}, but {wanted} is needed")
        return held.value


def read_gguf(path: Path) -> GgufFile:
    """Map ``path`` and read everything before the tensor data.

    Raises:
        FormatError: the file is no GGUF 3 file, or any part of it contradicts another or the file's length.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as handle:
        size = handle.seek(0, 2)
        if size == 0:
            raise FormatError(f"{path}: the file is empty; a GGUF file is needed, so fetch or export it again")
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    header = HeaderParser(path, mapped).parse()
    buffer = np.frombuffer(mapped, np.uint8)
    let_go(buffer)  # the header has been copied
    return GgufFile(path, header.version, header.alignment, header.metadata, header.tensors, buffer)
