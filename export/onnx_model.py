"""Builds the ONNX graph of a decoder with a key/value cache, for onnxruntime, its genai and transformers.js alike.

By default opset 21, IR 10, com.microsoft 1: what onnxruntime 1.20 (8-bit weights: 1.23) and later run; see
:mod:`deepthin.export.onnx_profiles`. Inputs and outputs:

    input_ids                       i64 [batch_size, sequence_length]
    attention_mask                  i64 [batch_size, total_sequence_length]           padding on the right only
    past_key_values.N.key, .value   f32 [batch_size, K, past_sequence_length, E]
    logits                          f32 [batch_size, sequence_length, V]
    present.N.key, .value           f32 [batch_size, K, total_sequence_length, E]

Several new tokens against a filled cache need batch_size 1. K and E are numbers, not symbols: transformers.js takes every
symbol but batch_size for 0. N counts executed blocks; those that share weights read the same initializers.

Residual norms are SkipSimplifiedLayerNormalization; the first norm is spelled out, since its contrib form sits in the standard
domain and fails ``onnx.checker``. Attention is described in :mod:`deepthin.export.onnx_attention`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

from deepthin._version import VERSION
from deepthin.engine.formats import F16, F32, scheme_named
from deepthin.engine.model import Model
from deepthin.engine.shape import Shape
from deepthin.engine.targets import attention_rung
from deepthin.engine.tensors import stored_format, tensor_specs
from deepthin.export.feasibility import ONNX_TARGETS, require_targets
from deepthin.export.onnx_attention import Attention, attention_for
from deepthin.export.onnx_file import EXTERNAL_BYTES, onnx_file_sizes, write_onnx_file
from deepthin.export.onnx_graph import CONTRIB, OnnxGraph
from deepthin.export.onnx_profiles import profile_named
from deepthin.export.onnx_standard import StandardGraph
from deepthin.export.onnx_weights import can_be_gathered, has_lows, weight_bytes


def write_onnx(
    model: Model,
    path: Path,
    *,
    profile: str = "contrib",
    accuracy_level: int = 0,
    external_bytes: int = EXTERNAL_BYTES,
) -> tuple[list[Path], int]:
    """Write ``model`` as it is stored: block formats as MatMulNBits, f16 matrices as f16, everything else as f32.

    Args:
        model: in any stored formats.
        path: a name not in use yet, ending in .onnx.
        profile: a name out of :data:`deepthin.export.onnx_profiles.PROFILES`.
        accuracy_level: of MatMulNBits; 0 computes in f32, 4 lets the runtime round activations to int8, for speed.
        external_bytes: above this the weights go to a second file beside ``path``.

    Returns:
        The files made, the model first, and the bytes of the weights, constants and position tables apart.

    Raises:
        UnsupportedError: there are no operators for the shape.
        UsageError: no such profile.
    """
    proto, graph = _built(model, profile, accuracy_level)
    files = write_onnx_file(proto, graph.initializers, path, external_bytes=external_bytes)
    return files, graph.weight_bytes


def onnx_file_bytes(
    model: Model,
    name: str = "model.onnx",
    *,
    profile: str = "contrib",
    accuracy_level: int = 0,
    external_bytes: int = EXTERNAL_BYTES,
) -> list[int]:
    """Bytes of each file that :func:`write_onnx` makes of ``model`` at a path that ends in ``name``; no data is looked at.

    Raises:
        UnsupportedError: as there.
        UsageError: as there.
    """
    proto, graph = _built(model, profile, accuracy_level)
    return onnx_file_sizes(proto, graph.initializers, name, external_bytes=external_bytes)


def _built(model: Model, profile: str, accuracy_level: int) -> tuple[Any, OnnxGraph]:
    """The whole model but for its initializers, which the graph holds."""
    require_targets(ONNX_TARGETS, model.shape)
    used = profile_named(profile).of(model.shape)
    graph = (OnnxGraph if used.contrib else StandardGraph)(model, accuracy_level=accuracy_level)
    decoder = _Decoder(graph, model.shape, attention_for(graph, model.shape, contrib=used.contrib))
    decoder.build()
    proto = helper.make_model(
        helper.make_graph(graph.nodes, "decoder", *_inputs_and_outputs(model.shape)),
        opset_imports=[helper.make_opsetid("", used.opset), *([helper.make_opsetid(CONTRIB, 1)] if used.contrib else [])],
        ir_version=used.ir_version,
        producer_name="deepthin",
        producer_version=VERSION,
    )
    helper.set_model_props(proto, {"deepthin.shape": model.shape.text})
    return proto, graph


def onnx_bytes(shape: Shape, quant: str) -> int:
    """Bytes of the weights in the ONNX file of ``shape`` quantised to ``quant``; a tied table counts once.

    Raises:
        UsageError: no such format.
    """
    scheme, total = scheme_named(quant), 0
    for spec in tensor_specs(shape):
        fmt = stored_format(spec, scheme)
        total += weight_bytes(spec.num_elements, F32 if spec.role == "embedding" and has_lows(fmt) else fmt)
    return total


def shares_buffer(shape: Shape) -> bool:
    """Whether new keys and values may go into the buffer of the past ones, in profile contrib."""
    return attention_rung(shape.head_dim) < 2


def stored_onnx_bytes(model: Model) -> int:
    """Bytes of the weights in an ONNX file (profile contrib) of ``model`` as it is stored; a tied table counts once."""
    total = 0
    for spec in tensor_specs(model.shape):
        tensor = model.tensors[spec.name]
        keeps = (
            spec.role in ("attention", "mlp", "head")
            or can_be_gathered(tensor)
            or (spec.role, tensor.format) == ("embedding", F16)
        )
        total += weight_bytes(spec.num_elements, tensor.format if keeps else F32)
    return total


class _Decoder:
    """The order of operators; ``stream`` names the residual stream, ``added`` what the last part puts on top of it."""

    def __init__(self, graph: OnnxGraph, shape: Shape, attention: Attention) -> None:
        self.graph, self.shape, self.attention = graph, shape, attention

    def build(self) -> None:
        graph = self.graph
        stream, added = graph.embedding("input_ids", "token_embd.out"), ""
        for layer in range(self.shape.num_executed_layers):
            prefix = f"blk.{layer}"
            if layer == 0:
                normed = graph.plain_norm(stream, f"{prefix}.attn_norm")
            else:
                normed, stream = graph.residual_norm(added, stream, f"{prefix}.attn_norm")
            attended = self._attention(layer, normed)
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

    def _attention(self, layer: int, normed: str) -> str:
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
        return self.attention.add(layer, query, key, value, turns=self.shape.has_rope(layer // self.shape.layer_sharing))


def _inputs_and_outputs(shape: Shape) -> tuple[list[Any], list[Any]]:
    def info(name: str, kind: int, dims: list[str | int]) -> Any:
        return helper.make_tensor_value_info(name, kind, dims)

    def cache(prefix: str, tokens: str) -> list[Any]:
        return [
            info(f"{prefix}.{layer}.{part}", TensorProto.FLOAT, ["batch_size", shape.num_kv_heads, tokens, shape.head_dim])
            for layer in range(shape.num_executed_layers)
            for part in ("key", "value")
        ]

    inputs = [
        info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
    ]
    logits = info("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", shape.vocab_size])
    return inputs + cache("past_key_values", "past_sequence_length"), [logits, *cache("present", "total_sequence_length")]
