"""Safetensors files as raw bytes, so that a test can write what no honest writer would."""

from __future__ import annotations

import json
import struct
from typing import Any


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_bytes(header: dict[str, Any] | str | bytes, data_bytes: int = 0, *, header_bytes: int | None = None) -> bytes:
    raw = json.dumps(header) if isinstance(header, dict) else header
    raw = raw.encode() if isinstance(raw, str) else raw
    return struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + bytes(data_bytes)
