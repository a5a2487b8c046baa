"""Which runtimes and file formats take a shape, and why not: shape rules as data, asked before anything is trained or written.

Sources of the rules: onnxruntime ``GroupQueryAttention`` on the CPU, 1.20 to 1.32 (head_dim a multiple of 16 for its built-in
rotary embedding, of 8 without it), transformers 5 ``LlamaConfig`` (hidden_size a multiple of the heads),
llama.cpp's block sizes (32 for Q8_0 and Q4, 256 for K-quants).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepthin.engine.accounting import fallback_matrices
from deepthin.engine.architectures import architecture_of, features, gguf_architecture, missing_architecture, scaling_unread
from deepthin.engine.errors import UnsupportedError
from deepthin.engine.shape import Shape

K_QUANT_BLOCK = 256
ONNX_RUNGS = (  # ways to write attention, fastest first
    "GroupQueryAttention with built-in rotary embedding",
    "head_dim={head_dim} is no multiple of 16, so rotary embedding is an operator of its own before GroupQueryAttention",
    "head_dim={head_dim} is no multiple of 8, so attention is the standard operator (opset 23, onnxruntime from 1.23 on)",
)
LLAMA_CPP_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS in llama.cpp src/llama-hparams.h


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a target takes a shape; ``why`` names the rule that decides, also when the answer is yes with a price."""

    ok: bool
    why: str

    def to_json(self) -> dict[str, object]:
        """Both fields by name."""
        return {"ok": self.ok, "why": self.why}


def target_verdicts(shape: Shape) -> dict[str, Verdict]:
    """A verdict for each target, in reading order."""
    return {name: rule(shape) for name, rule in _RULES.items()}


def _engine(shape: Shape) -> Verdict:
    try:
        architecture = f"as {architecture_of(shape).name}"
    except UnsupportedError:
        architecture = f"{', '.join(features(shape))}; no published architecture"
    return Verdict(True, f"decoder with an even head_dim, {architecture}")


def _hf(shape: Shape) -> Verdict:
    written = _written_out(shape)
    shape = shape.unrolled
    reason = missing_architecture(shape)
    if reason:
        return Verdict(False, reason)
    architecture = architecture_of(shape)
    if architecture.whole_heads and shape.hidden_size % shape.num_heads:
        config = architecture.hf_class.replace("ForCausalLM", "Config")
        return Verdict(
            False, f"transformers' {config} refuses d={shape.hidden_size} that is no multiple of heads={shape.num_heads}"
        )
    return Verdict(True, f"{architecture.hf_class}{written}")


def _written_out(shape: Shape) -> str:
    """What becomes of shared layers where a format knows none."""
    return "" if shape.layer_sharing == 1 else f", shared blocks written out as {shape.num_executed_layers}"


def _onnx(shape: Shape) -> Verdict:
    if shape.layer_sharing > 1 and shape.nope_every:
        return Verdict(False, f"share={shape.layer_sharing} with nope={shape.nope_every} (not written)")
    return Verdict(True, ONNX_RUNGS[attention_rung(shape.head_dim)].format(head_dim=shape.head_dim))


def attention_rung(head_dim: int) -> int:
    """Which of :data:`ONNX_RUNGS` a head of this width takes: the lower, the faster."""
    return 0 if head_dim % 16 == 0 else 1 if head_dim % 8 == 0 else 2


def _llama_cpp(shape: Shape) -> str:
    """What keeps llama.cpp from running ``shape`` in any format, or an empty string."""
    shape = shape.unrolled
    too_deep = shape.num_layers > LLAMA_CPP_MAX_LAYERS
    limit = f"llama.cpp runs at most {LLAMA_CPP_MAX_LAYERS} layers, not {shape.num_layers}" if too_deep else ""
    return missing_architecture(shape) or scaling_unread(shape) or limit


def _gguf(quant: str) -> Callable[[Shape], Verdict]:
    def rule(shape: Shape) -> Verdict:
        reason = _llama_cpp(shape)
        if reason:
            return Verdict(False, reason)
        kept = fallback_matrices(shape, quant)
        if kept:
            return Verdict(True, f"rows of {', '.join(kept)} are no multiple of 32 and stay f16")
        return Verdict(True, f"architecture {gguf_architecture(shape.unrolled).name}{_written_out(shape)}")

    return rule


def _k_quants(shape: Shape) -> Verdict:
    reason = _llama_cpp(shape)
    if reason:
        return Verdict(False, reason)
    widths = {"d": shape.hidden_size, "heads x head_dim": shape.q_size, "ff": shape.intermediate_size}
    odd = [f"{name}={width}" for name, width in widths.items() if width % K_QUANT_BLOCK]
    if odd:
        return Verdict(
            False, f"{', '.join(odd)} not a multiple of {K_QUANT_BLOCK}; llama.cpp falls back to coarser-grained types"
        )
    return Verdict(True, f"every row is a multiple of {K_QUANT_BLOCK}; made with llama.cpp's own quantiser")


_RULES: dict[str, Callable[[Shape], Verdict]] = {
    "engine": _engine,
    "hf": _hf,
    "onnx": _onnx,
    "gguf-f16": _gguf("f16"),
    "gguf-q8_0": _gguf("q8_0"),
    "gguf-q4_0": _gguf("q4_0"),
    "gguf-k-quants": _k_quants,
}
