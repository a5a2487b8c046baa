"""Builds the ONNX graph of a decoder with a key/value cache, for onnxruntime, its genai and transformers.js alike.

Opset 21, IR 10, com.microsoft 1: what onnxruntime 1.20 (8-bit weights: 1.23) and later run. Inputs and outputs:

    input_ids                       i64 [batch_size, sequence_length]
    attention_mask                  i64 [batch_size, total_sequence_length]           padding on the right only
    past_key_values.N.key, .value   f32 [batch_size, K, past_sequence_length, E]
    logits                          f32 [batch_size, sequence_length, V]
    present.N.key, .value           f32 [batch_size, K, total_sequence_length, E]

Several new tokens against a filled cache need batch_size 1. K and E are numbers, not symbols: transformers.js takes every
symbol but batch_size for 0.

Attention is GroupQueryAttention, which turns queries and keys itself when E is a multiple of 16; for other multiples of 8
RotaryEmbedding does it first. Residual norms are SkipSimplifiedLayerNormalization; the first norm is spelled out, since its
contrib form sits in the standard domain and fails ``onnx.checker``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from deepthin._version import VERSION
from deepthin.engine.formats import format_named
from deepthin.engine.model import Model
from deepthin.engine.rope import rope_tables
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import stored_format, tensor_specs
from deepthin.export.feasibility import ONNX_TARGETS, require_targets
from deepthin.export.onnx_file import EXTERNAL_BYTES, write_onnx_file
from deepthin.export.onnx_graph import CONTRIB, OnnxGraph
from deepthin.export.onnx_weights import weight_bytes

OPSET, IR_VERSION = 21, 10


def write_onnx(
    model: Model, path: Path, *, accuracy_level: int = 0, external_bytes: int = EXTERNAL_BYTES
) -> tuple[list[Path], int]:
    """Write ``model`` as it is stored: q4_0, q4_1 and q8_0 matrices as MatMulNBits, everything else as f32.

    Args:
        model: in any stored formats.
        path: a name not in use yet, ending in .onnx.
        accuracy_level: of MatMulNBits; 0 computes in f32, 4 lets the runtime round activations to int8, for speed.
        external_bytes: above this the weights go to a second file beside ``path``.

    Returns:
        The files made, the model first, and the bytes of the weights, constants and position tables apart.

    Raises:
        UnsupportedError: onnxruntime has no operator for the shape.
    """
    require_targets(ONNX_TARGETS, model.shape)
    graph = OnnxGraph(model, accuracy_level=accuracy_level)
    decoder = _Decoder(graph, model.shape)
    decoder.build()
    proto = helper.make_model(
        helper.make_graph(graph.nodes, "decoder", *_inputs_and_outputs(model.shape)),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)],
        ir_version=IR_VERSION,
        producer_name="deepthin",
        producer_version=VERSION,
    )
    helper.set_model_props(proto, {"deepthin.shape": model.shape.text})
    files = write_onnx_file(proto, graph.initializers, path, external_bytes=external_bytes)
    return files, graph.weight_bytes


def onnx_bytes(shape: Shape, quant: str) -> int:
    """Bytes of the weights in the ONNX file of ``shape`` quantised to ``quant``; a tied table counts once.

    Raises:
        UsageError: no such format.
    """
    body = format_named(quant)
    return sum(weight_bytes(spec.num_elements, stored_format(spec, body)) for spec in tensor_specs(shape))


def shares_buffer(shape: Shape) -> bool:
    """Whether new keys and values may be written into the buffer of the past ones, as GroupQueryAttention does."""
    return shape.head_dim % 8 == 0


class _Decoder:
    """The order of operators; ``stream`` names the residual stream, ``added`` what the last part puts on top of it."""

    def __init__(self, graph: OnnxGraph, shape: Shape) -> None:
        self.graph, self.shape = graph, shape
        self.turns_inside = shape.head_dim % 16 == 0
        tables = rope_tables(shape.head_dim, shape.rope_theta, shape.rope_scaling, shape.max_seq_len)
        self.caches = [
            graph.constant(name, values, np.float32) for name, values in zip(("cos_cache", "sin_cache"), tables, strict=True)
        ]

    def build(self) -> None:
        graph = self.graph
        lengths = self._lengths()
        positions = [] if self.turns_inside else [self._positions()]
        stream, added = graph.embedding("input_ids", "token_embd.out"), ""
        for layer in range(self.shape.num_layers):
            prefix = f"blk.{layer}"
            if layer == 0:
                normed = graph.plain_norm(stream, f"{prefix}.attn_norm")
            else:
                normed, stream = graph.residual_norm(added, stream, f"{prefix}.attn_norm")
            attended = self._attention(layer, normed, lengths, positions)
            normed, stream = graph.residual_norm(graph.matmul(attended, f"{prefix}.attn_output"), stream, f"{prefix}.ffn_norm")
            added = graph.matmul(self._inner(normed, prefix), f"{prefix}.ffn_down")
        normed, _ = graph.residual_norm(added, stream, "output_norm")
        if self.shape.tie_word_embeddings:
            graph.tied_head(normed, "logits")
        else:
            graph.matmul(normed, "output", "logits")

    def _inner(self, normed: str, prefix: str) -> str:
        """The MLP between its outer matrices."""
        graph = self.graph
        if self.shape.mlp != "swiglu":
            activate = graph.relu2 if self.shape.mlp == "relu2" else graph.gelu
            return activate(graph.matmul(normed, f"{prefix}.ffn_up"), f"{prefix}.ffn_up")
        gate, up = (graph.matmul(normed, f"{prefix}.ffn_{part}") for part in ("gate", "up"))
        return graph.add("Mul", [graph.silu(gate, f"{prefix}.ffn_gate"), up], f"{prefix}.ffn_gated")

    def _lengths(self) -> list[str]:
        """What attention asks of the mask: tokens less one per sequence, i32 [batch_size], and columns, an i32 scalar."""
        graph = self.graph
        one, axis = graph.constant("one", 1, np.int64), graph.constant("token_axis", [1], np.int64)
        tokens = graph.add("ReduceSum", ["attention_mask", axis], "tokens", keepdims=0)
        last = graph.add("Sub", [tokens, one], "last_position")
        columns = graph.add("Gather", [graph.add("Shape", ["attention_mask"], "mask_dims"), one], "mask_columns", axis=0)
        return [
            graph.add("Cast", [last], "seqlens_k", to=TensorProto.INT32),
            graph.add("Cast", [columns], "total_sequence_length", to=TensorProto.INT32),
        ]

    def _positions(self) -> str:
        """Positions of the new tokens, i64 [batch_size, sequence_length]: the running count of the mask, its last columns."""
        graph = self.graph
        one, axis = graph.constant("one", 1, np.int64), graph.constant("token_axis", [1], np.int64)
        counted = graph.add("CumSum", ["attention_mask", one], "mask_count")
        every = graph.add("Sub", [counted, one], "mask_positions")
        zero = graph.constant("zero", 0, np.int64)
        every = graph.add("Max", [every, zero], "mask_positions_from_0")  # masked columns in front would count as -1
        start = graph.add("Neg", [graph.add("Shape", ["input_ids"], "num_new", start=1, end=2)], "first_new")
        end = graph.constant("end", [np.iinfo(np.int64).max], np.int64)
        return graph.add("Slice", [every, start, end, axis], "position_ids")

    def _attention(self, layer: int, normed: str, lengths: list[str], positions: list[str]) -> str:
        """Attention of the new tokens over the cache, before the output projection."""
        graph, prefix = self.graph, f"blk.{layer}"
        query, key, value = (graph.matmul(normed, f"{prefix}.attn_{part}") for part in "qkv")
        if self.shape.qkv_bias:
            query, key, value = (
                graph.biased(whole, f"{prefix}.attn_{part}.bias")
                for whole, part in zip((query, key, value), "qkv", strict=True)
            )
        if self.shape.qk_norm:
            query = graph.head_norm(query, f"{prefix}.attn_q_norm", self.shape.num_heads)
            key = graph.head_norm(key, f"{prefix}.attn_k_norm", self.shape.num_kv_heads)
        turns = self.shape.has_rope(layer)
        turns_inside = turns and self.turns_inside
        if turns and not turns_inside:  # the operator takes the head width from the caches
            query, key = (
                graph.add("RotaryEmbedding", [part, *positions, *self.caches], f"{prefix}.rope_{name}", domain=CONTRIB)
                for part, name in ((query, "q"), (key, "k"))
            )
        past, present = ([f"{which}.{layer}.{part}" for part in ("key", "value")] for which in ("past_key_values", "present"))
        return graph.add(
            "GroupQueryAttention",
            [query, key, value, *past, *lengths, *(self.caches if turns_inside else [])],
            [f"{prefix}.attention", *present],
            domain=CONTRIB,
            num_heads=self.shape.num_heads,
            kv_num_heads=self.shape.num_kv_heads,
            do_rotary=int(turns_inside),
        )


def _inputs_and_outputs(shape: Shape) -> tuple[list[Any], list[Any]]:
    def info(name: str, kind: int, dims: list[str | int]) -> Any:
        return helper.make_tensor_value_info(name, kind, dims)

    def cache(prefix: str, tokens: str) -> list[Any]:
        return [
            info(f"{prefix}.{layer}.{part}", TensorProto.FLOAT, ["batch_size", shape.num_kv_heads, tokens, shape.head_dim])
            for layer in range(shape.num_layers)
            for part in ("key", "value")
        ]

    inputs = [
        info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
    ]
    logits = info("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", shape.vocab_size])
    return inputs + cache("past_key_values", "past_sequence_length"), [logits, *cache("present", "total_sequence_length")]
