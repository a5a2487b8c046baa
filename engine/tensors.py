"""Which tensors a shape has: canonical name, dimensions, role, and how GGUF and Hugging Face spell the name.

Canonical order of query and key rows is Hugging Face's (rotate-half): within a head, row i turns with row i + E/2.
Most GGUF architectures (``Architecture.interleaved``) store them interleaved; :func:`gguf_row_order` and its inverse convert.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from deepthin.engine.arrays import I64
from deepthin.engine.formats import F16, F32, BlockFormat, Scheme, scheme_of
from deepthin.engine.shape import Shape


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model.

    Attributes:
        name: canonical name, equal to the GGUF one without ``.weight`` (``blk.3.attn_q``, ``blk.3.attn_q.bias``).
        dims: (out, in) for matrices, (width,) for norms and biases.
        role: ``embedding``, ``attention``, ``mlp``, ``norm``, ``bias`` or ``head``.
        hf_name: name in a Hugging Face folder.
        rope_heads: heads whose rows (of a bias: values) GGUF interleaves (queries, keys), else 0.
    """

    name: str
    dims: tuple[int, ...]
    role: str
    hf_name: str
    rope_heads: int = 0

    @property
    def gguf_name(self) -> str:
        """Name in a GGUF file."""
        return self.name if self.role == "bias" else self.name + ".weight"

    @property
    def num_elements(self) -> int:
        """Number of values."""
        count = 1
        for dim in self.dims:
            count *= dim
        return count


def tensor_specs(shape: Shape) -> list[TensorSpec]:
    """All tensors of ``shape`` in file order: embedding, blocks, final norm, and the head when it is untied."""
    return list(_specs(shape))


@functools.lru_cache(16)
def _specs(shape: Shape) -> tuple[TensorSpec, ...]:
    width = shape.hidden_size
    specs = [TensorSpec("token_embd", (shape.vocab_size, width), "embedding", "model.embed_tokens.weight")]
    for layer in range(shape.num_layers):
        specs += _block_specs(shape, layer)
    specs.append(TensorSpec("output_norm", (width,), "norm", "model.norm.weight"))
    if not shape.tie_word_embeddings:
        specs.append(TensorSpec("output", (shape.vocab_size, width), "head", "lm_head.weight"))
    return tuple(specs)


def _block_specs(shape: Shape, layer: int) -> list[TensorSpec]:
    width, inner = shape.hidden_size, shape.intermediate_size
    parts: list[tuple[str, tuple[int, ...], str, str, int]] = [
        ("attn_norm", (width,), "norm", "input_layernorm", 0),
        ("attn_q", (shape.q_size, width), "attention", "self_attn.q_proj", shape.num_heads),
        ("attn_k", (shape.kv_size, width), "attention", "self_attn.k_proj", shape.num_kv_heads),
        ("attn_v", (shape.kv_size, width), "attention", "self_attn.v_proj", 0),
        ("attn_output", (width, shape.q_size), "attention", "self_attn.o_proj", 0),
        ("ffn_norm", (width,), "norm", "post_attention_layernorm", 0),
        ("ffn_up", (inner, width), "mlp", "mlp.up_proj", 0),
        ("ffn_down", (width, inner), "mlp", "mlp.down_proj", 0),
    ]
    if shape.qk_norm:
        parts[1:1] = [
            ("attn_q_norm", (shape.head_dim,), "norm", "self_attn.q_norm", 0),
            ("attn_k_norm", (shape.head_dim,), "norm", "self_attn.k_norm", 0),
        ]
    if shape.mlp == "swiglu":
        parts.insert(-2, ("ffn_gate", (inner, width), "mlp", "mlp.gate_proj", 0))
    if shape.qkv_bias:
        biased = [part for part in parts if part[0] in ("attn_q", "attn_k", "attn_v")]
        at = parts.index(biased[-1]) + 1
        parts[at:at] = [(name + ".bias", dims[:1], "bias", hf, heads) for name, dims, _, hf, heads in biased]
    return [
        TensorSpec(
            f"blk.{layer}.{name}", dims, role, f"model.layers.{layer}.{hf}.{'bias' if role == 'bias' else 'weight'}", heads
        )
        for name, dims, role, hf, heads in parts
    ]


def stored_format(spec: TensorSpec, quant: BlockFormat | Scheme) -> BlockFormat:
    """Format of ``spec`` in a file quantised to ``quant``: norms and biases f32, a body alone has its ``head_format``.

    A matrix whose rows the block does not divide falls back to f16, as llama.cpp's quantiser does.
    """
    if spec.role in ("norm", "bias"):
        return F32
    scheme = scheme_of(quant)
    fmt = scheme.head if spec.role in ("embedding", "head") else scheme.body
    return fmt if spec.dims[-1] % fmt.block_elements == 0 else F16


def gguf_row_order(num_rows: int, heads: int) -> I64:
    """Canonical row index of each GGUF row: per head, file rows 2i and 2i+1 are canonical rows i and i + E/2.

    Source: ``LlamaModel.permute`` in llama.cpp ``conversion/llama.py``.
    """
    head_dim = num_rows // heads
    within = np.arange(head_dim).reshape(2, head_dim // 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * head_dim + within[None, :]).reshape(-1)


def canonical_row_order(num_rows: int, heads: int) -> I64:
    """GGUF row index of each canonical row; the inverse of :func:`gguf_row_order`."""
    return np.argsort(gguf_row_order(num_rows, heads), kind="stable")
