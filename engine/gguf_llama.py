"""What a GGUF file of a known architecture means: its shape, its tensors in canonical row order, its tokenizer.

Everything that would change the arithmetic and that the engine does not do is refused by name.
Source of keys, defaults and meanings: llama.cpp ``src/llama-model.cpp``, ``src/llama-vocab.cpp`` at ggml-org/llama.cpp@c392e50.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepthin.engine.architectures import ARCEE, ARCHITECTURES, LLAMA, QWEN2, QWEN3, SMOLLM3, SMOLLM3_NOPE, Architecture
from deepthin.engine.arrays import I64
from deepthin.engine.errors import FormatError, ShapeError, UnsupportedError
from deepthin.engine.formats import F32, FORMATS, GGUF_TYPES
from deepthin.engine.gguf_file import GgufFile
from deepthin.engine.model import Model, Tensor, TokenizerSpec
from deepthin.engine.pretokenizers import pre_tokenizer_named
from deepthin.engine.rope import scaling_of_factors
from deepthin.engine.rope_scaling import RopeScaling
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import canonical_row_order, tensor_specs

_MAX_LAYERS = 4096
_MAX_HEADS = 1 << 16
_MAX_WIDTH = 1 << 22
_MAX_VOCAB = 1 << 24
_MAX_CONTEXT = 1 << 24
_TOKEN_TYPES = range(7)

# Keys of features that the engine does not run, with the value that means "off".
_FEATURE_OFF: dict[str, tuple[float | bool, str]] = {
    "expert_count": (0, "a mixture of experts"),
    "attention.sliding_window": (0, "sliding-window attention"),
    "attention.clamp_kqv": (0.0, "clamped attention inputs"),
    "attention.scale": (0.0, "an attention scale of its own"),
    "attention.causal": (True, "non-causal attention"),
    "attention.max_alibi_bias": (0.0, "ALiBi position biases"),
    "logit_scale": (0.0, "scaled logits"),
    "residual_scale": (0.0, "scaled residuals"),
    "embedding_scale": (0.0, "scaled embeddings"),
    "final_logit_softcapping": (0.0, "soft-capped logits"),
    "attn_logit_softcapping": (0.0, "soft-capped attention"),
    "use_parallel_residual": (False, "parallel residuals"),
}
_ROPE_FREQS = "rope_freqs.weight"
_UNSUPPORTED_TENSORS = (  # part of a tensor name, what it means
    ("rope_factors", "scaled rotary frequencies for long contexts"),
    ("_exps", "a mixture of experts"),
    ("ffn_gate_inp", "a mixture of experts"),
)
_QK_NORMS = (("_q_norm", "normalised queries"), ("_k_norm", "normalised keys"))
_QKV_BIASES = (".attn_q.bias", ".attn_k.bias", ".attn_v.bias")


def model_from_gguf(file: GgufFile) -> Model:
    """The model in ``file``; its matrices stay mapped.

    Without a tokenizer that this version can use, ``tokenizer`` is None and ``metadata["tokenizer_note"]`` says why.

    Raises:
        FormatError: metadata and tensors contradict each other.
        UnsupportedError: the file is valid but asks for something this engine does not do.
    """
    architecture = _architecture(file)
    _refuse_features(file, architecture)
    shape = _shape(file, architecture)
    tensors: dict[str, Tensor] = {}
    orders: dict[int, I64] = {}  # by number of heads
    for spec in tensor_specs(shape):
        if spec.gguf_name not in file.tensors:
            continue  # Model names it
        info = file.tensors[spec.gguf_name]
        if info.type_id not in GGUF_TYPES:
            raise UnsupportedError(
                f"{file.path}: tensor '{info.name}' is stored as {info.type_name}, which this version does not read; "
                f"convert the file to one of {', '.join(FORMATS)}"
            )
        if len(info.dims) != len(spec.dims):
            raise FormatError(f"{file.path}: tensor '{info.name}' has {len(info.dims)} dimensions; {len(spec.dims)} are needed")
        data = file.data(info.name)
        tensor = Tensor(GGUF_TYPES[info.type_id], info.dims[::-1], data)
        if spec.rope_heads and architecture.interleaved and tensor.dims == spec.dims:
            if spec.rope_heads not in orders:
                orders[spec.rope_heads] = canonical_row_order(spec.dims[0], spec.rope_heads)
            order = orders[spec.rope_heads]
            if spec.role == "bias":
                tensor = Tensor.from_values(tensor.dequantize()[order], F32)
                tensor.stored.flags.writeable = False
            else:
                tensor = Tensor(tensor.format, tensor.dims, data, order)
        tensors[spec.name] = tensor
    known = {_ROPE_FREQS, *(spec.gguf_name for spec in tensor_specs(shape))}
    left_over = [name for name in file.tensors if name not in known]
    if left_over:
        raise FormatError(
            f"{file.path}: tensor '{left_over[0]}' belongs to no part of a {architecture.name} model of shape {shape.text}"
        )
    name = file.text("general.name", file.path.stem)
    metadata = {key: _plain(held.value) for key, held in file.metadata.items() if not key.startswith("tokenizer.")}
    tokenizer, note = _tokenizer(file, shape)
    if note:
        metadata["tokenizer_note"] = note
    return Model(shape, tensors, tokenizer, name, str(file.path), metadata)


def _architecture(file: GgufFile) -> Architecture:
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: the architecture is {name[:40]!r}, which this version does not read; "
            f"it reads {', '.join(ARCHITECTURES)} (SmolLM2 and TinyLlama are 'llama', Qwen2.5 is 'qwen2')"
        )
    parts = file.integer("split.count", 1, high=1 << 16)
    if parts > 1:
        raise UnsupportedError(
            f"{file.path}: this is one of {parts} parts of a model; merge them with llama-gguf-split --merge first"
        )
    return ARCHITECTURES[name]


def _refuse_features(file: GgufFile, architecture: Architecture) -> None:
    for name, (off, meaning) in _FEATURE_OFF.items():
        held = file.metadata.get(f"{architecture.name}.{name}")
        if held is not None and (held.kind.startswith("[") or held.value != off):
            raise UnsupportedError(
                f"{file.path}: key '{architecture.name}.{name}' asks for {meaning}, which this version does not run"
            )
    without = f", which the {architecture.name} architecture does not have"
    norms = () if architecture is QWEN3 else tuple((part, meaning + without) for part, meaning in _QK_NORMS)
    for tensor in file.tensors:
        for part, meaning in _UNSUPPORTED_TENSORS + norms:
            if part in tensor:
                raise UnsupportedError(f"{file.path}: tensor '{tensor}' is {meaning}, which this version does not run")
        has_biases = architecture in (LLAMA, QWEN2)
        if tensor.endswith(".bias") and not (has_biases and tensor.endswith(_QKV_BIASES)):
            raise UnsupportedError(f"{file.path}: tensor '{tensor}' is a bias, which this version does not run")


def _rope_scaling(file: GgufFile, prefix: str, head_dim: int, theta: float) -> RopeScaling | None:
    """What keys and the factors tensor say together.

    Source: llama.cpp ``llama_model_base::load_hparams`` and ``llama_context::llama_context``: the scaling type is linear where
    none is named, and yarn's attention factor is a multiple of 0.1 ln(factor) + 1.
    """
    key = f"{prefix}.rope.scaling"
    factor = file.number(f"{key}.factor", 0.0, low=0.0, high=1e6) or file.number(
        f"{prefix}.rope.scale_linear", 0.0, low=0.0, high=1e6
    )
    kind = file.text(f"{key}.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(f"{file.path}: rotary scaling {kind[:40]!r} is asked for, which this version does not run")
    if _ROPE_FREQS in file.tensors:
        if kind == "yarn" or (kind == "linear" and factor not in (0.0, 1.0)):
            raise UnsupportedError(f"{file.path}: rotary scaling {kind!r} besides tensor '{_ROPE_FREQS}' is not run")
        return _factor_scaling(file, prefix, head_dim, theta)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    for name, off in (("yarn_log_multiplier", (0.0,)), ("yarn_ext_factor", (1.0, -1.0))):
        if f"{key}.{name}" in file.metadata and file.number(f"{key}.{name}", low=-10.0, high=1e6) not in off:
            raise UnsupportedError(f"{file.path}: key '{key}.{name}' asks for rotary scaling that this version does not run")
    attention = file.number(f"{key}.attn_factor", 1.0, low=1e-3, high=1e3)
    try:
        if kind == "linear":
            if attention != 1.0:
                raise UnsupportedError(f"{file.path}: key '{key}.attn_factor' with linear scaling is not run")
            return RopeScaling("linear", factor)
        trained = file.integer(f"{prefix}.context_length", low=1, high=_MAX_CONTEXT)
        original = file.integer(f"{key}.original_context_length", trained, low=1, high=_MAX_CONTEXT)
        default = RopeScaling("yarn", factor or 1.0, original)
        for name, value in (("yarn_beta_slow", default.low), ("yarn_beta_fast", default.high)):
            if file.number(f"{key}.{name}", value, low=1e-3, high=1e6) != value:
                raise UnsupportedError(
                    f"{file.path}: key '{key}.{name}' is not {value:g}, which llama.cpp does not read in {prefix} files"
                )
        exact = attention == 1.0  # otherwise as many digits as an f32 has
        factor_of_attention = default.attention_factor if exact else float(f"{attention * default.attention_factor:.7g}")
        return RopeScaling("yarn", factor or 1.0, original, attention_factor=factor_of_attention)
    except ShapeError as error:
        raise FormatError(f"{file.path}: {error}") from None


def _factor_scaling(file: GgufFile, prefix: str, head_dim: int, theta: float) -> RopeScaling | None:
    info = file.tensors[_ROPE_FREQS]
    if prefix not in (LLAMA.name, ARCEE.name):
        raise UnsupportedError(
            f"{file.path}: tensor '{_ROPE_FREQS}' has no meaning in the {prefix} architecture; llama.cpp does not read it there"
        )
    if info.dims != (head_dim // 2,) or info.type_id != F32.gguf_type:
        raise FormatError(f"{file.path}: tensor '{_ROPE_FREQS}' must hold {head_dim // 2} F32 values, one for each pair")
    try:
        return scaling_of_factors(file.data(_ROPE_FREQS).reshape(-1).view(np.float32), theta)
    except ShapeError as error:
        raise UnsupportedError(f"{file.path}: tensor '{_ROPE_FREQS}' holds {error}, which this version does not run") from None


def _shape(file: GgufFile, architecture: Architecture) -> Shape:
    prefix = architecture.name
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        held = file.metadata.get(f"{prefix}.{key}")
        if held is not None and held.kind.startswith("["):
            raise UnsupportedError(
                f"{file.path}: key '{prefix}.{key}' gives each layer its own value, which this version does not run"
            )
    width = file.integer(f"{prefix}.embedding_length", low=1, high=_MAX_WIDTH)
    heads = file.integer(f"{prefix}.attention.head_count", low=1, high=_MAX_HEADS)
    kv_heads = file.integer(f"{prefix}.attention.head_count_kv", heads, low=1, high=_MAX_HEADS)
    if width % heads and f"{prefix}.attention.key_length" not in file.metadata:
        raise FormatError(
            f"{file.path}: {heads} heads do not divide a width of {width}, and key '{prefix}.attention.key_length' is missing"
        )
    head_dim = file.integer(f"{prefix}.attention.key_length", width // heads, low=1, high=_MAX_HEADS)
    for key, what in (("attention.value_length", "values"), ("rope.dimension_count", "rotary embeddings")):
        default = head_dim if key != "attention.value_length" else width // heads
        found = file.integer(f"{prefix}.{key}", default, high=_MAX_HEADS)
        if found != head_dim:
            raise UnsupportedError(
                f"{file.path}: key '{prefix}.{key}' makes {what} {found} wide, but keys are {head_dim} wide; "
                f"this version needs them equal"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.dims) != 2:
        raise FormatError(
            f"{file.path}: tensor 'token_embd.weight' with two dimensions is needed; is this a vocabulary-only file?"
        )
    vocab_size = embedding.dims[1]
    held_size = file.integer(f"{prefix}.vocab_size", vocab_size, low=1, high=_MAX_VOCAB)
    if held_size != vocab_size:
        raise FormatError(
            f"{file.path}: key '{prefix}.vocab_size' is {held_size}, "
            f"but tensor 'token_embd.weight' has {vocab_size} rows; they must be equal"
        )
    layers = file.integer(f"{prefix}.block_count", low=1, high=_MAX_LAYERS)
    if layers > len(file.tensors):  # before thousands of tensor names are made up only to be missed
        raise FormatError(
            f"{file.path}: key '{prefix}.block_count' is {layers}, but the file has only {len(file.tensors)} tensors"
        )
    theta = file.number(f"{prefix}.rope.freq_base", 10000.0, low=1.0, high=1e11)
    try:
        return Shape(
            num_layers=layers,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=file.integer(f"{prefix}.feed_forward_length", low=1, high=_MAX_WIDTH),
            vocab_size=vocab_size,
            tie_word_embeddings="output.weight" not in file.tensors,
            max_seq_len=file.integer(f"{prefix}.context_length", low=1, high=_MAX_CONTEXT),
            rms_norm_eps=file.number(f"{prefix}.attention.layer_norm_rms_epsilon", low=0.0, high=0.1),
            rope_theta=theta,
            mlp="relu2" if architecture is ARCEE else "swiglu",
            qk_norm=architecture is QWEN3,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            nope_every=SMOLLM3_NOPE if architecture is SMOLLM3 else 0,
            rope_scaling=_rope_scaling(file, prefix, head_dim, theta),
        )
    except ShapeError as error:
        raise FormatError(f"{file.path}: {error}") from None


def _tokenizer(file: GgufFile, shape: Shape) -> tuple[TokenizerSpec | None, str]:
    """The tokenizer, or None and a sentence saying why there is none."""
    kind = file.text("tokenizer.ggml.model", "none")
    if kind != "gpt2":
        none = kind in ("none", "no_vocab")
        return None, "the file holds no tokenizer" if none else f"its tokenizer is {kind[:40]!r}, not byte-level BPE ('gpt2')"
    tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(file.texts("tokenizer.ggml.tokens"))]  # as in llama.cpp
    if not 0 < len(tokens) <= shape.vocab_size:
        raise FormatError(
            f"{file.path}: key 'tokenizer.ggml.tokens' has {len(tokens)} items, but the embedding has {shape.vocab_size} rows; "
            f"1 to that many are needed"
        )
    types = file.integers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in file.metadata else [1] * len(tokens)
    if len(types) != len(tokens) or not set(types) <= set(_TOKEN_TYPES):
        raise FormatError(f"{file.path}: key 'tokenizer.ggml.token_type' must hold {len(tokens)} values from 0 to 6")
    ids = {}
    for field, key in (("bos_id", "bos"), ("eos_id", "eos"), ("unk_id", "unknown"), ("pad_id", "padding")):
        full = f"tokenizer.ggml.{key}_token_id"
        ids[field] = file.integer(full, high=len(tokens) - 1) if full in file.metadata else None
    merges = file.texts("tokenizer.ggml.merges")
    try:
        pre = pre_tokenizer_named(file.text("tokenizer.ggml.pre", "default"), "its tokenizer")
    except UnsupportedError as error:
        return None, str(error)
    if file.flag("tokenizer.ggml.add_eos_token", False):
        return None, "its tokenizer puts an end token behind every text, which is not done"
    add_bos = file.flag("tokenizer.ggml.add_bos_token", pre.add_bos)
    if add_bos and ids["bos_id"] is None:
        raise FormatError(
            f"{file.path}: key 'tokenizer.ggml.bos_token_id' is missing, but every text is to begin with that token"
        )
    return TokenizerSpec(pre.name, tuple(tokens), tuple(types), tuple(merges), add_bos=add_bos, **ids), ""


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
