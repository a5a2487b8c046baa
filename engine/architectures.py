"""Published decoder architectures that a shape can be: how GGUF files and Hugging Face folders call each, and which fits.

All share RMSNorm, grouped-query attention and residual blocks; they differ in the MLP, norms and biases of queries and keys,
and where positions enter. Sources: llama.cpp ``src/models/{llama,qwen2,qwen3,arcee,smollm3}.cpp`` at
ggml-org/llama.cpp@8a5c4e0, transformers 5 ``src/transformers/models`` of the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepthin.engine.errors import UnsupportedError
from deepthin.engine.shape import Shape


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Attributes:
        name: in GGUF, where it is also the prefix of keys, and ``model_type`` in Hugging Face configurations.
        hf_class: what Hugging Face configurations name.
        interleaved: GGUF files store query and key rows interleaved (rope type NORM) instead of in rotate-half order (NEOX).
        rope_factors: llama.cpp reads a ``rope_freqs`` tensor, which llama3 scaling needs.
        whole_heads: transformers' configuration refuses a hidden size that is no multiple of the heads.
    """

    name: str
    hf_class: str
    interleaved: bool = True
    rope_factors: bool = False
    whole_heads: bool = False


LLAMA = Architecture("llama", "LlamaForCausalLM", rope_factors=True, whole_heads=True)
QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM", interleaved=False)
QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM", interleaved=False)
ARCEE = Architecture("arcee", "ArceeForCausalLM", rope_factors=True, whole_heads=True)
SMOLLM3 = Architecture("smollm3", "SmolLM3ForCausalLM")
ARCHITECTURES = {item.name: item for item in (LLAMA, QWEN2, QWEN3, ARCEE, SMOLLM3)}
SMOLLM3_NOPE = 4  # llama.cpp takes every fourth block of smollm3 to be without positions, whatever the file says

_BY_FEATURES = {
    (): LLAMA,
    ("qkv_bias",): QWEN2,
    ("qk_norm",): QWEN3,
    ("mlp=relu2",): ARCEE,
    (f"nope={SMOLLM3_NOPE}",): SMOLLM3,
}


def features(shape: Shape) -> tuple[str, ...]:
    """What makes ``shape`` more than a plain Llama decoder, as its text form says it; rotary scaling apart."""
    found = {
        f"mlp={shape.mlp}": shape.mlp != "swiglu",
        "qk_norm": shape.qk_norm,
        "qkv_bias": shape.qkv_bias,
        f"nope={shape.nope_every}": shape.nope_every > 0,
        f"share={shape.layer_sharing}": shape.layer_sharing > 1,
    }
    return tuple(name for name, present in found.items() if present)


def missing_architecture(shape: Shape) -> str:
    """Why no architecture fits ``shape``, or an empty string."""
    found = features(shape)
    if found in _BY_FEATURES:
        return ""
    if len(found) == 1:
        reasons = {"share": "every published architecture runs each layer once", "mlp": "it needs a SwiGLU gate or relu2"}
        kind = found[0].partition("=")[0]
        return f"{found[0]} ({reasons.get(kind, f'smollm3 leaves out every {SMOLLM3_NOPE}th')})"
    return f"{' with '.join(found)} (no published architecture has them together)"


def architecture_of(shape: Shape) -> Architecture:
    """The architecture whose Hugging Face folders can hold ``shape``; see :func:`gguf_architecture` for GGUF files.

    Raises:
        UnsupportedError: there is none.
    """
    reason = missing_architecture(shape)
    if reason:
        raise UnsupportedError(f"shape {shape.text}: no architecture fits: {reason}")
    return _BY_FEATURES[features(shape)]


def gguf_architecture(shape: Shape) -> Architecture:
    """The architecture of a GGUF file of ``shape``: as published, but biases go into a llama file where llama.cpp needs that.

    Its qwen2 wants queries as wide as the model and reads no rotary factors; its llama takes biases where it finds them.

    Raises:
        UnsupportedError: there is none.
    """
    published = architecture_of(shape)
    factors = shape.rope_scaling is not None and shape.rope_scaling.kind == "llama3"
    return LLAMA if published is QWEN2 and (factors or shape.q_size != shape.hidden_size) else published


def scaling_unread(shape: Shape) -> str:
    """Why llama.cpp cannot do the rotary scaling of ``shape``, whose architecture it runs, or an empty string."""
    scaling = shape.rope_scaling
    if scaling is None:
        return ""
    if scaling.kind == "llama3" and not gguf_architecture(shape).rope_factors:
        return f"rope={scaling.text} (llama.cpp reads llama3 factors in llama and arcee files only)"
    default = type(scaling)("yarn", scaling.factor, 1)
    if scaling.kind == "yarn" and (scaling.low, scaling.high) != (default.low, default.high):
        return f"rope={scaling.text} (llama.cpp takes yarn's bounds to be {default.low:g} and {default.high:g})"
    return ""
