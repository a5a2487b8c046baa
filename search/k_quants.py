"""What llama.cpp's Q4_K_M makes of a shape: K-quants need rows of whole 256s and fall back to coarser types elsewhere.

Source: llama.cpp ``src/llama-quant.cpp`` at ggml-org/llama.cpp@c392e50; tests compare with its own quantiser.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepthin.engine.formats import F16, F32, Q4_K, Q5_0, Q6_K, Q8_0, BlockFormat
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, tensor_specs

_FALLBACK = {Q4_K.name: Q5_0, Q6_K.name: Q8_0}
_FINER = ("attn_v", "ffn_down")  # Q6_K in some blocks


@dataclass(frozen=True, slots=True)
class KQuantSize:
    """Bytes of all tensors of a Q4_K_M file, and how many of them fallbacks cost beyond the types that were meant."""

    bytes: int
    fallback: int


def k_quant_size(shape: Shape) -> KQuantSize:
    """Size of ``shape`` as Q4_K_M, file headers and padding apart."""
    stored, meant = 0, 0.0
    for spec in tensor_specs(shape):
        wanted = _wanted(spec, shape)
        fmt = _stored(wanted, spec.dims[-1])
        stored += spec.num_elements // fmt.block_elements * fmt.block_bytes
        meant += spec.num_elements * wanted.bits_per_weight / 8
    return KQuantSize(stored, round(stored - meant))


def _wanted(spec: TensorSpec, shape: Shape) -> BlockFormat:
    if spec.role in ("norm", "bias"):
        return F32
    if spec.role == "head" or (spec.role == "embedding" and shape.tie_word_embeddings):
        return Q6_K
    if spec.role == "embedding":
        return Q4_K
    _, block, name = spec.name.split(".")
    return Q6_K if name in _FINER and _more_bits(int(block), shape.num_layers) else Q4_K


def _more_bits(block: int, blocks: int) -> bool:
    eighth = blocks // 8
    return block < eighth or block >= 7 * blocks // 8 or (block - eighth) % 3 == 2


def _stored(wanted: BlockFormat, row: int) -> BlockFormat:
    if row % wanted.block_elements == 0:
        return wanted
    fallback = _FALLBACK[wanted.name]
    return fallback if row % fallback.block_elements == 0 else F16
