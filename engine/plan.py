"""Turn a model (or only its shape) into what the kernels run: integer tables and one arena of packed weights.

A plan holds no pointers and fixes no sizes at compile time, so a new shape, depth or mix of formats compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deepthin.engine.arrays import F32, I64, U8
from deepthin.engine.errors import UnsupportedError
from deepthin.engine.formats import BlockFormat
from deepthin.engine.mapped import let_go
from deepthin.engine.model import Model
from deepthin.engine.pack import ALIGNMENT, Packed, align, pack_tensors, place
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, tensor_specs

_NO_OP = (0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """Packed weights and the tables that say where they are.

    Attributes:
        num_blocks: blocks to run, in order; a shared block counts each time.
        ops: i64 [num_blocks * 7 + 2, 5], see ``engine/kernels/decode.py``.
        norms: f32, norms and small vectors, likewise.
        packed: each product by canonical name (``blk.0.attn_q`` ... ``token_embd``, ``output``).
        runs: how often each block's weights are read for one token.
    """

    shape: Shape
    num_blocks: int
    arena: U8
    ops: I64
    norms: F32
    packed: dict[str, Packed]
    runs: int = 1

    @property
    def block_bytes(self) -> int:
        """Weight bytes one block reads."""
        return sum(self.packed[f"blk.0.{name}"].num_bytes for name in block_products(self.shape) if name)

    @property
    def head_bytes(self) -> int:
        """Weight bytes the output head reads."""
        return self.packed["output"].num_bytes

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes read per decoded token: every block, the head, and one row of the embedding."""
        embedding = self.packed["token_embd"]
        body = sum(p.num_bytes for name, p in self.packed.items() if name.startswith("blk."))
        return body * self.runs + self.head_bytes + embedding.format.row_bytes(embedding.cols)


def block_products(shape: Shape) -> tuple[str, ...]:
    """Names of a block's products in the kernels' order: q k v o, what goes through the activation, what it gates, down."""
    gated = shape.mlp == "swiglu"
    return ("attn_q", "attn_k", "attn_v", "attn_output", *(("ffn_gate", "ffn_up") if gated else ("ffn_up", "")), "ffn_down")


def plan_model(model: Model, *, lanes: int, q8_bias: int) -> Plan:
    """Pack every matrix of ``model``; afterwards the model's own data (a mapped file, say) is not needed.

    Raises:
        UnsupportedError: a format cannot be run.
    """
    shape = model.shape
    names = [f"blk.{i}.{name}" for i in range(shape.num_layers) for name in block_products(shape) if name]
    tensors = {name: model.tensors[name] for name in names}
    tensors["token_embd"] = model.tensors["token_embd"]
    if not shape.tie_word_embeddings:
        tensors["output"] = model.tensors["output"]
    vectors = {}
    for spec in _vector_specs(shape):
        vectors[spec.name] = model.tensors[spec.name].dequantize()
        let_go(model.tensors[spec.name].stored)
    packed: dict[str, Packed] = {}
    end = 0
    for name, tensor in tensors.items():
        packed[name] = place(tensor.format, tensor.dims[0], tensor.dims[1], lanes, align(end))
        end = packed[name].scale_at + packed[name].scale_bytes
    arena = aligned_bytes(align(end))
    pack_tensors(arena, [(packed[name], tensor) for name, tensor in tensors.items()], lanes, q8_bias)
    for tensor in model.tensors.values():
        let_go(tensor.stored)
    packed.setdefault("output", packed["token_embd"])
    blocks = [run // shape.layer_sharing for run in range(shape.num_executed_layers)]
    norms = _norms(shape, blocks, vectors, lanes)
    return Plan(shape, len(blocks), arena, _ops(shape, packed, blocks), norms, packed, shape.layer_sharing)


def plan_synthetic(
    shape: Shape, body: BlockFormat, head: BlockFormat, num_blocks: int, arena: U8, scales_at: int, *, lanes: int
) -> Plan:
    """Lay ``num_blocks`` distinct blocks and the head over an arena of made-up weights.

    Data is taken from the front of ``arena`` and scales from ``scales_at`` on, so that whatever the shape, data bytes are
    read as data and scale bytes as scales. The embedding shares the head's place when tied.

    Raises:
        UnsupportedError: the shape does not fit the arena.
    """
    width, inner = shape.hidden_size, shape.intermediate_size
    sizes = [(shape.q_size, width), (shape.kv_size, width), (shape.kv_size, width), (width, shape.q_size)]
    sizes += [(inner, width), (inner, width), (width, inner)]
    packed: dict[str, Packed] = {}
    data_at, scale_at = 0, scales_at
    products = [item for item in zip(block_products(shape), sizes, strict=True) if item[0]]
    entries = [(f"blk.{i}.{name}", body, size) for i in range(num_blocks) for name, size in products]
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
    blocks = list(range(num_blocks))
    vectors = {
        spec.name: np.full(spec.dims, spec.role == "norm", np.float32)
        for spec in _vector_specs(shape.replace(num_layers=num_blocks))
    }
    return Plan(shape, num_blocks, arena, _ops(shape, packed, blocks), _norms(shape, blocks, vectors, lanes), packed)


def aligned_bytes(count: int) -> U8:
    """Zeroed u8 [count] whose first byte lies on a 64-byte boundary."""
    raw = np.zeros(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count]


def _ops(shape: Shape, packed: dict[str, Packed], blocks: list[int]) -> I64:
    rows = [packed[f"blk.{i}.{name}"].op if name else _NO_OP for i in blocks for name in block_products(shape)]
    return np.array([*rows, packed["token_embd"].op, packed["output"].op], np.int64)


def _vector_specs(shape: Shape) -> list[TensorSpec]:
    return [spec for spec in tensor_specs(shape) if len(spec.dims) == 1]


def _norms(shape: Shape, blocks: list[int], vectors: Mapping[str, F32], lanes: int) -> F32:
    """Norms of every run and the final one, then biases of q, k, v and norms of q and k of every run, each padded."""
    width = _padded(shape.hidden_size, lanes)
    extras = [("attn_q.bias", shape.q_size), ("attn_k.bias", shape.kv_size), ("attn_v.bias", shape.kv_size)]
    extras += [("attn_q_norm", shape.head_dim), ("attn_k_norm", shape.head_dim)]
    rows = [(f"blk.{i}.{name}", width) for i in blocks for name in ("attn_norm", "ffn_norm")] + [("output_norm", width)]
    rows += [(f"blk.{i}.{name}", _padded(size, lanes)) for i in blocks for name, size in extras]
    norms = np.zeros(sum(size for _, size in rows), np.float32)
    at = 0
    for name, size in rows:
        values = vectors.get(name)
        if values is not None:
            norms[at : at + len(values)] = values
        at += size
    return norms


def _padded(width: int, lanes: int) -> int:
    return -(-width // lanes) * lanes
