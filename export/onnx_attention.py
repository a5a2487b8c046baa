"""Attention over a cache as ONNX operators: GroupQueryAttention of onnxruntime, or the standard operator from opset 23 on.

Both take queries [batch_size, S, H·E], keys and values [batch_size, S, K·E] as projected, turn queries and keys by their
positions, and read and write the graph's ``past_key_values.N.*`` and ``present.N.*``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from onnx import TensorProto

from deepthin.engine.rope import rope_tables
from deepthin.engine.shape import Shape
from deepthin.engine.targets import attention_rung
from deepthin.export.onnx_graph import CONTRIB, OnnxGraph


class Attention(Protocol):
    """One way to write attention into a graph."""

    def add(self, run: int, query: str, key: str, value: str, *, turns: bool) -> str:
        """Attention of executed block ``run``; returns [batch_size, S, H·E], before the output projection."""
        ...


def attention_for(graph: OnnxGraph, shape: Shape, *, contrib: bool) -> Attention:
    """The fastest way that ``shape`` has, within the ONNX standard unless ``contrib``."""
    rung = attention_rung(shape.head_dim)
    return GroupQuery(graph, shape, turns_inside=rung == 0) if contrib and rung < 2 else Standard(graph, shape)


class GroupQuery:
    """GroupQueryAttention; it turns queries and keys itself, or com.microsoft.RotaryEmbedding does it before."""

    def __init__(self, graph: OnnxGraph, shape: Shape, *, turns_inside: bool) -> None:
        self._graph, self._shape, self._turns_inside = graph, shape, turns_inside
        self._caches = _rope_caches(graph, shape)
        self._lengths = _lengths(graph)
        self._positions = "" if turns_inside else _positions(graph)

    def add(self, run: int, query: str, key: str, value: str, *, turns: bool) -> str:
        """See :class:`Attention`."""
        graph, prefix = self._graph, f"blk.{run}"
        turns_inside = turns and self._turns_inside
        if turns and not turns_inside:  # the operator takes the head width from the caches
            query, key = (
                graph.add("RotaryEmbedding", [part, self._positions, *self._caches], f"{prefix}.rope_{name}", domain=CONTRIB)
                for part, name in ((query, "q"), (key, "k"))
            )
        past, present = _cache_names(run)
        return graph.add(
            "GroupQueryAttention",
            [query, key, value, *past, *self._lengths, *(self._caches if turns_inside else [])],
            [f"{prefix}.attention", *present],
            domain=CONTRIB,
            num_heads=self._shape.num_heads,
            kv_num_heads=self._shape.num_kv_heads,
            do_rotary=int(turns_inside),
        )


class Standard:
    """RotaryEmbedding and Attention of opset 23, for heads of any width; each step copies the cache."""

    def __init__(self, graph: OnnxGraph, shape: Shape) -> None:
        self._graph, self._shape = graph, shape
        self._caches = _rope_caches(graph, shape)
        self._positions = _positions(graph)
        kept = graph.add("Cast", ["attention_mask"], "mask_kept", to=TensorProto.BOOL)
        axes = graph.constant("head_and_query_axes", [1, 2], np.int64)
        columns = graph.add("Unsqueeze", [kept, axes], "mask_columns_kept")
        new = graph.add("Shape", ["input_ids"], "num_new_rows", start=1, end=2)
        unit = graph.constant("unit", [1], np.int64)
        rows = graph.add("Concat", [unit, unit, new, unit], "mask_rows", axis=0)
        self._mask = graph.add("Expand", [columns, rows], "key_mask")  # onnxruntime does not stretch it over the queries

    def add(self, run: int, query: str, key: str, value: str, *, turns: bool) -> str:
        """See :class:`Attention`."""
        graph, shape, prefix = self._graph, self._shape, f"blk.{run}"
        if turns:
            query, key = (
                graph.add("RotaryEmbedding", [part, *self._caches, self._positions], f"{prefix}.rope_{name}", num_heads=heads)
                for part, name, heads in ((query, "q", shape.num_heads), (key, "k", shape.num_kv_heads))
            )
        past, present = _cache_names(run)
        return graph.add(
            "Attention",
            [query, key, value, self._mask, *past],
            [f"{prefix}.attention", *present],
            q_num_heads=shape.num_heads,
            kv_num_heads=shape.num_kv_heads,
            is_causal=1,
        )


def _cache_names(run: int) -> tuple[list[str], list[str]]:
    past, present = ([f"{which}.{run}.{part}" for part in ("key", "value")] for which in ("past_key_values", "present"))
    return past, present


def _rope_caches(graph: OnnxGraph, shape: Shape) -> list[str]:
    tables = rope_tables(shape.head_dim, shape.rope_theta, shape.rope_scaling, shape.max_seq_len)
    return [graph.constant(name, values, np.float32) for name, values in zip(("cos_cache", "sin_cache"), tables, strict=True)]


def _lengths(graph: OnnxGraph) -> list[str]:
    """What GroupQueryAttention asks of the mask: tokens less one per sequence, i32 [batch_size], and columns, an i32 scalar."""
    one, axis = graph.constant("one", 1, np.int64), graph.constant("token_axis", [1], np.int64)
    tokens = graph.add("ReduceSum", ["attention_mask", axis], "tokens", keepdims=0)
    last = graph.add("Sub", [tokens, one], "last_position")
    columns = graph.add("Gather", [graph.add("Shape", ["attention_mask"], "mask_dims"), one], "mask_columns", axis=0)
    return [
        graph.add("Cast", [last], "seqlens_k", to=TensorProto.INT32),
        graph.add("Cast", [columns], "total_sequence_length", to=TensorProto.INT32),
    ]


def _positions(graph: OnnxGraph) -> str:
    """Positions of the new tokens, i64 [batch_size, sequence_length]: the running count of the mask, its last columns."""
    one, axis = graph.constant("one", 1, np.int64), graph.constant("token_axis", [1], np.int64)
    counted = graph.add("CumSum", ["attention_mask", one], "mask_count")
    every = graph.add("Sub", [counted, one], "mask_positions")
    zero = graph.constant("zero", 0, np.int64)
    every = graph.add("Max", [every, zero], "mask_positions_from_0")  # masked columns in front would count as -1
    start = graph.add("Neg", [graph.add("Shape", ["input_ids"], "num_new", start=1, end=2)], "first_new")
    end = graph.constant("end", [np.iinfo(np.int64).max], np.int64)
    return graph.add("Slice", [every, start, end, axis], "position_ids")
