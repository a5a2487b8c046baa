"""Writes one ``.safetensors`` file, tensor by tensor, always with the same bytes for the same content.

File: header length (u64), header (JSON, padded with spaces to 8 bytes), then the tensors without gaps, in header order.
Source: huggingface/safetensors ``safetensors/src/tensor.rs`` at 24b0b28.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepthin.engine.arrays import U8
from deepthin.engine.errors import FormatError
from deepthin.engine.formats import BlockFormat

DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to write: its bytes are made when its turn comes, so only one is in memory at a time.

    Attributes:
        name: key in the header.
        format: f32, f16 or bf16.
        dims: dimensions, outermost first.
        make: returns the bytes, u8 of any shape and of ``num_bytes`` in all.
    """

    name: str
    format: BlockFormat
    dims: tuple[int, ...]
    make: Callable[[], U8]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        count = self.format.block_bytes
        for dim in self.dims:
            count *= dim
        return count


def write_safetensors(path: Path, tensors: Sequence[StoredTensor], metadata: Mapping[str, str]) -> int:
    """Write ``tensors`` in order to ``path``, a name not in use yet; returns the bytes of all tensor data.

    Raises:
        FormatError: a name occurs twice, or a format has no safetensors type.
    """
    head, data_bytes = _header(path.name, tensors, metadata)
    with path.open("xb") as file:
        file.write(head)
        for tensor in tensors:
            data = tensor.make()
            if data.nbytes != tensor.num_bytes:
                raise AssertionError(f"Bug: '{tensor.name}' made {data.nbytes} bytes instead of {tensor.num_bytes}")
            file.write(np.ascontiguousarray(data).data)
    return data_bytes


def safetensors_bytes(tensors: Sequence[StoredTensor], metadata: Mapping[str, str]) -> int:
    """Bytes of the file that :func:`write_safetensors` makes; no tensor's data is made.

    Raises:
        FormatError: as there.
    """
    head, data_bytes = _header("model.safetensors", tensors, metadata)
    return len(head) + data_bytes


def _header(source: str, tensors: Sequence[StoredTensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """All that stands before the data, and the bytes of the data."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for tensor in tensors:
        if tensor.name in header:
            raise FormatError(f"{source}: two tensors are called '{tensor.name}'; a safetensors file needs unique names")
        if tensor.format.name not in DTYPES:
            raise FormatError(f"{source}: safetensors has no type for {tensor.format.name}; use one of {', '.join(DTYPES)}")
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": DTYPES[tensor.format.name], "shape": list(tensor.dims), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offset
