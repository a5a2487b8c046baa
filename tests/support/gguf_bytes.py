"""GGUF files as raw bytes, so that a test can write what no honest writer would."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes, *, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw) if length is None else length) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(name) + u32(kind) + payload


def key_u32(name: str, value: int) -> bytes:
    return key(name, UINT32, u32(value))


def key_f32(name: str, value: float) -> bytes:
    return key(name, FLOAT32, struct.pack("<f", value))


def key_text(name: str, text: str | bytes) -> bytes:
    return key(name, STRING, string(text))


def key_array(name: str, kind: int, items: Sequence[bytes], *, count: int | None = None) -> bytes:
    return key(name, ARRAY, u32(kind) + u64(len(items) if count is None else count) + b"".join(items))


def tensor(name: str | bytes, dims: Sequence[int], type_id: int, offset: int, *, num_dims: int | None = None) -> bytes:
    head = string(name) + u32(len(dims) if num_dims is None else num_dims)
    return head + b"".join(map(u64, dims)) + u32(type_id) + u64(offset)


@dataclass
class GgufBytes:
    """Parts of a file; every count can lie."""

    keys: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data_bytes: int = 0
    magic: bytes = b"GGUF"
    version: int = 3
    num_keys: int | None = None
    num_tensors: int | None = None
    alignment: int = 32

    def build(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        head = self.magic + u32(self.version) + u64(num_tensors) + u64(num_keys) + b"".join(self.keys + self.tensors)
        return head + bytes(-len(head) % self.alignment) + bytes(self.data_bytes)


# A llama of the smallest size: L=1 d=2 heads=1 ff=2 vocab=3, all F32, tied.
LLAMA_KEYS: dict[str, bytes] = {
    "general.architecture": key_text("general.architecture", "llama"),
    "llama.block_count": key_u32("llama.block_count", 1),
    "llama.context_length": key_u32("llama.context_length", 8),
    "llama.embedding_length": key_u32("llama.embedding_length", 2),
    "llama.feed_forward_length": key_u32("llama.feed_forward_length", 2),
    "llama.attention.head_count": key_u32("llama.attention.head_count", 1),
    "llama.attention.layer_norm_rms_epsilon": key_f32("llama.attention.layer_norm_rms_epsilon", 1e-5),
}
LLAMA_DIMS: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (2, 3),
    "blk.0.attn_norm.weight": (2,),
    "blk.0.attn_q.weight": (2, 2),
    "blk.0.attn_k.weight": (2, 2),
    "blk.0.attn_v.weight": (2, 2),
    "blk.0.attn_output.weight": (2, 2),
    "blk.0.ffn_norm.weight": (2,),
    "blk.0.ffn_gate.weight": (2, 2),
    "blk.0.ffn_up.weight": (2, 2),
    "blk.0.ffn_down.weight": (2, 2),
    "output_norm.weight": (2,),
}


def llama_file(
    *, keys: dict[str, bytes | None] | None = None, dims: dict[str, tuple[int, ...] | None] | None = None, type_id: int = 0
) -> GgufBytes:
    """The smallest llama with keys and tensors replaced, added, or (None) left out; tensors are packed in order."""
    held = {name: raw for name, raw in {**LLAMA_KEYS, **(keys or {})}.items() if raw is not None}
    infos, offset = [], 0
    for name, dim in {**LLAMA_DIMS, **(dims or {})}.items():
        if dim is None:
            continue
        infos.append(tensor(name, dim, type_id, offset))
        offset += (4 * math.prod(dim) + 31) // 32 * 32
    return GgufBytes(list(held.values()), infos, offset)
