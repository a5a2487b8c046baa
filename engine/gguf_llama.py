"""What a GGUF file of the ``llama`` architecture means: its shape, its tensors in canonical row order, its tokenizer.

Everything that would change the arithmetic and that the engine does not do is refused by name.
Source of keys, defaults and meanings: llama.cpp ``src/llama-model.cpp``, ``src/llama-vocab.cpp`` at ggml-org/llama.cpp@c392e50.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepthin.engine.errors import FormatError, ShapeError, UnsupportedError
from deepthin.engine.formats import FORMATS, GGUF_TYPES
from deepthin.engine.gguf_file import GgufFile
from deepthin.engine.model import Model, Tensor, TokenizerSpec
from deepthin.engine.pretokenizers import pre_tokenizer_named
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
_UNSUPPORTED_TENSORS = (  # part of a tensor name, what it means
    ("rope_freqs", "scaled rotary frequencies (as Llama 3.1 and later)"),
    ("rope_factors", "scaled rotary frequencies"),
    ("_exps", "a mixture of experts"),
    ("ffn_gate_inp", "a mixture of experts"),
    (".bias", "a bias"),
    ("_q_norm", "normalised queries, which the llama architecture does not have"),
    ("_k_norm", "normalised keys, which the llama architecture does not have"),
)


def model_from_gguf(file: GgufFile) -> Model:
    """The model in ``file``; only query and key rows are copied, the rest stays mapped.

    Without a tokenizer that this version can use, ``tokenizer`` is None and ``metadata["tokenizer_note"]`` says why.

    Raises:
        FormatError: metadata and tensors contradict each other.
        UnsupportedError: the file is valid but asks for something this engine does not do.
    """
    _refuse_other_architectures(file)
    _refuse_features(file)
    shape = _shape(file)
    tensors = {}
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
        if spec.rope_heads and info.dims[::-1] == spec.dims:
            data = data[canonical_row_order(spec.dims[0], spec.rope_heads)]
            data.flags.writeable = False
        tensors[spec.name] = Tensor(GGUF_TYPES[info.type_id], info.dims[::-1], data)
    known = {spec.gguf_name for spec in tensor_specs(shape)}
    left_over = [name for name in file.tensors if name not in known]
    if left_over:
        raise FormatError(f"{file.path}: tensor '{left_over[0]}' belongs to no part of a llama model of shape {shape.text}")
    name = file.text("general.name", file.path.stem)
    metadata = {key: _plain(held.value) for key, held in file.metadata.items() if not key.startswith("tokenizer.")}
    tokenizer, note = _tokenizer(file, shape)
    if note:
        metadata["tokenizer_note"] = note
    return Model(shape, tensors, tokenizer, name, str(file.path), metadata)


def _refuse_other_architectures(file: GgufFile) -> None:
    architecture = file.text("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(
            f"{file.path}: the architecture is {architecture[:40]!r}, which this version does not read; "
            f"'llama' is needed (SmolLM2, Llama, TinyLlama and models of the same form)"
        )
    parts = file.integer("split.count", 1, high=1 << 16)
    if parts > 1:
        raise UnsupportedError(
            f"{file.path}: this is one of {parts} parts of a model; merge them with llama-gguf-split --merge first"
        )


def _refuse_features(file: GgufFile) -> None:
    for name, (off, meaning) in _FEATURE_OFF.items():
        held = file.metadata.get(f"llama.{name}")
        if held is not None and (held.kind.startswith("[") or held.value != off):
            raise UnsupportedError(f"{file.path}: key 'llama.{name}' asks for {meaning}, which this version does not run")
    scaling = file.text("llama.rope.scaling.type", "none")
    factors = [file.number(f"llama.rope.{key}", 1.0, low=0.0, high=1e6) for key in ("scaling.factor", "scale_linear")]
    if scaling != "none" or any(factor not in (0.0, 1.0) for factor in factors):
        name = scaling[:40] if scaling != "none" else "linear"
        raise UnsupportedError(
            f"{file.path}: rotary scaling {name!r} is asked for, which this version does not run; none is needed"
        )
    for tensor in file.tensors:
        for part, meaning in _UNSUPPORTED_TENSORS:
            if part in tensor:
                raise UnsupportedError(f"{file.path}: tensor '{tensor}' is {meaning}, which this version does not run")


def _shape(file: GgufFile) -> Shape:
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        held = file.metadata.get(f"llama.{key}")
        if held is not None and held.kind.startswith("["):
            raise UnsupportedError(
                f"{file.path}: key 'llama.{key}' gives each layer its own value, which this version does not run"
            )
    width = file.integer("llama.embedding_length", low=1, high=_MAX_WIDTH)
    heads = file.integer("llama.attention.head_count", low=1, high=_MAX_HEADS)
    kv_heads = file.integer("llama.attention.head_count_kv", heads, low=1, high=_MAX_HEADS)
    if width % heads and "llama.attention.key_length" not in file.metadata:
        raise FormatError(
            f"{file.path}: {heads} heads do not divide a width of {width}, and key 'llama.attention.key_length' is missing"
        )
    head_dim = file.integer("llama.attention.key_length", width // heads, low=1, high=_MAX_HEADS)
    for key, what in (("attention.value_length", "values"), ("rope.dimension_count", "rotary embeddings")):
        found = file.integer(f"llama.{key}", head_dim if key != "attention.value_length" else width // heads, high=_MAX_HEADS)
        if found != head_dim:
            raise UnsupportedError(
                f"{file.path}: key 'llama.{key}' makes {what} {found} wide, but keys are {head_dim} wide; "
                f"this version needs them equal"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.dims) != 2:
        raise FormatError(
            f"{file.path}: tensor 'token_embd.weight' with two dimensions is needed; is this a vocabulary-only file?"
        )
    vocab_size = embedding.dims[1]
    if file.integer("llama.vocab_size", vocab_size, low=1, high=_MAX_VOCAB) != vocab_size:
        raise FormatError(
            f"{file.path}: key 'llama.vocab_size' is {file.integer('llama.vocab_size', high=_MAX_VOCAB)}, "
            f"but tensor 'token_embd.weight' has {vocab_size} rows; they must be equal"
        )
    layers = file.integer("llama.block_count", low=1, high=_MAX_LAYERS)
    if layers > len(file.tensors):  # before thousands of tensor names are made up only to be missed
        raise FormatError(
            f"{file.path}: key 'llama.block_count' is {layers}, but the file has only {len(file.tensors)} tensors"
        )
    try:
        return Shape(
            num_layers=layers,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=file.integer("llama.feed_forward_length", low=1, high=_MAX_WIDTH),
            vocab_size=vocab_size,
            tie_word_embeddings="output.weight" not in file.tensors,
            max_seq_len=file.integer("llama.context_length", low=1, high=_MAX_CONTEXT),
            rms_norm_eps=file.number("llama.attention.layer_norm_rms_epsilon", low=0.0, high=0.1),
            rope_theta=file.number("llama.rope.freq_base", 10000.0, low=1.0, high=1e11),
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
