"""Turn a model (or only its shape) into what the kernels run: integer tables and one arena of packed weights.

A plan holds no pointers and fixes no sizes at compile time, so a new shape, depth or mix of formats compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepthin.engine.arrays import F32, I64, U8
from deepthin.engine.errors import UnsupportedError
from deepthin.engine.formats import BlockFormat
from deepthin.engine.model import Model
from deepthin.engine.pack import ALIGNMENT, Packed, align, pack_into, place
from deepthin.engine.shape import Shape

BLOCK_OPS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class Plan:
    """Packed weights and the tables that say where they are.

    Attributes:
        num_blocks: blocks to run, in order.
        ops: i64 [num_blocks * 7 + 2, 5], see ``engine/kernels/decode.py``.
        norms: f32 [num_blocks * 2 + 1, D padded].
        packed: each product by canonical name (``blk.0.attn_q`` ... ``token_embd``, ``output``).
    """

    shape: Shape
    num_blocks: int
    arena: U8
    ops: I64
    norms: F32
    packed: dict[str, Packed]

    @property
    def block_bytes(self) -> int:
        """Weight bytes one block reads."""
        return sum(self.packed[f"blk.0.{name}"].num_bytes for name in BLOCK_OPS)

    @property
    def head_bytes(self) -> int:
        """Weight bytes the output head reads."""
        return self.packed["output"].num_bytes

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes read per decoded token: every block, the head, and one row of the embedding."""
        embedding = self.packed["token_embd"]
        body = sum(p.num_bytes for name, p in self.packed.items() if name.startswith("blk."))
        return body + self.head_bytes + embedding.format.row_bytes(embedding.cols)


def check_runnable(shape: Shape) -> None:
    """Refuse, by name, whatever the kernels do not do.

    Raises:
        UnsupportedError: the first such feature.
    """
    if shape.mlp != "swiglu":
        raise UnsupportedError(f"shape {shape.text}: the engine runs mlp=swiglu only, not mlp={shape.mlp}")
    if shape.qk_norm:
        raise UnsupportedError(f"shape {shape.text}: the engine does not normalise queries and keys (qk_norm)")
    if shape.layer_sharing != 1:
        raise UnsupportedError(f"shape {shape.text}: the engine does not share layers (share={shape.layer_sharing})")


def plan_model(model: Model, *, lanes: int, q8_bias: int) -> Plan:
    """Pack every matrix of ``model``; afterwards the model's own data (a mapped file, say) is not needed.

    Raises:
        UnsupportedError: the shape or a format cannot be run.
    """
    shape = model.shape
    check_runnable(shape)
    tensors = {f"blk.{i}.{name}": model.tensors[f"blk.{i}.{name}"] for i in range(shape.num_layers) for name in BLOCK_OPS}
    tensors["token_embd"] = model.tensors["token_embd"]
    if not shape.tie_word_embeddings:
        tensors["output"] = model.tensors["output"]
    packed: dict[str, Packed] = {}
    end = 0
    for name, tensor in tensors.items():
        packed[name] = place(tensor.format, tensor.dims[0], tensor.dims[1], lanes, align(end))
        end = packed[name].scale_at + packed[name].scale_bytes
    arena = aligned_bytes(align(end))
    for name, tensor in tensors.items():
        pack_into(arena, packed[name], tensor, lanes, q8_bias)
    packed.setdefault("output", packed["token_embd"])
    norms = np.zeros((shape.num_layers * 2 + 1, _padded(shape.hidden_size, lanes)), np.float32)
    names = [f"blk.{i}.{norm}" for i in range(shape.num_layers) for norm in ("attn_norm", "ffn_norm")] + ["output_norm"]
    for row, name in enumerate(names):
        norms[row, : shape.hidden_size] = model.tensors[name].dequantize()
    return Plan(shape, shape.num_layers, arena, _ops(packed, shape.num_layers), norms, packed)


def plan_synthetic(
    shape: Shape, body: BlockFormat, head: BlockFormat, num_blocks: int, arena: U8, scales_at: int, *, lanes: int
) -> Plan:
    """Lay ``num_blocks`` distinct blocks and the head over an arena of made-up weights.

    Data is taken from the front of ``arena`` and scales from ``scales_at`` on, so that whatever the shape, data bytes are
    read as data and scale bytes as scales. The embedding shares the head's place when tied.

    Raises:
        UnsupportedError: the shape cannot be run, or does not fit the arena.
    """
    check_runnable(shape)
    width, inner = shape.hidden_size, shape.intermediate_size
    sizes = [(shape.q_size, width), (shape.kv_size, width), (shape.kv_size, width), (width, shape.q_size)]
    sizes += [(inner, width), (inner, width), (width, inner)]
    packed: dict[str, Packed] = {}
    data_at, scale_at = 0, scales_at
    entries = [(f"blk.{i}.{name}", body, size) for i in range(num_blocks) for name, size in zip(BLOCK_OPS, sizes, strict=True)]
    tables = ["token_embd"] if shape.tie_word_embeddings else ["token_embd", "output"]
    entries += [(name, head, (shape.vocab_size, width)) for name in tables]
    for name, fmt, (rows, cols) in entries:
        packed[name] = place(fmt, rows, cols, lanes, data_at, scale_at)
        data_at = align(data_at + packed[name].data_bytes)
        scale_at = align(scale_at + packed[name].scale_bytes)
    if data_at > scales_at or scale_at > len(arena):
        raise UnsupportedError(
            f"shape {shape.text}: {num_blocks} blocks need more than the {len(arena)} bytes set aside for timing"
        )
    packed.setdefault("output", packed["token_embd"])
    norms = np.zeros((num_blocks * 2 + 1, _padded(width, lanes)), np.float32)
    norms[:, :width] = 1
    return Plan(shape, num_blocks, arena, _ops(packed, num_blocks), norms, packed)


def aligned_bytes(count: int) -> U8:
    """Zeroed u8 [count] whose first byte lies on a 64-byte boundary."""
    raw = np.zeros(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count]


def _ops(packed: dict[str, Packed], num_blocks: int) -> I64:
    names = [f"blk.{i}.{name}" for i in range(num_blocks) for name in BLOCK_OPS] + ["token_embd", "output"]
    return np.array([packed[name].op for name in names], np.int64)


def _padded(width: int, lanes: int) -> int:
    return -(-width // lanes) * lanes
