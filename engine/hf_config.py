"""Between ``config.json`` of the known Hugging Face classes and :class:`Shape`, both ways.

Whatever would change the arithmetic and is not done by the engine is refused by name.
Source of keys and defaults: ``{Llama,Qwen2,Qwen3,Arcee,SmolLM3}Config`` and ``modeling_rope_utils`` of transformers 5
(huggingface/transformers@008e574); ``MobileLLMForCausalLM`` is the remote code beside Meta's weights, a Llama whose
``layer_sharing`` runs each layer twice and whose ``share_embedding`` ties the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepthin.engine.architectures import (
    ARCEE,
    ARCHITECTURES,
    LLAMA,
    QWEN2,
    QWEN3,
    SMOLLM3,
    SMOLLM3_NOPE,
    Architecture,
    architecture_of,
    missing_architecture,
)
from deepthin.engine.errors import FormatError, ShapeError, UnsupportedError
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.rope_scaling import RopeScaling
from deepthin.engine.shape import Shape

_MOBILELLM = "MobileLLMForCausalLM"
_MOBILELLM_RUNS = 2
_CLASSES = {item.hf_class: item for item in ARCHITECTURES.values()} | {_MOBILELLM: LLAMA}
_DTYPE_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_OFF: tuple[tuple[str, tuple[Any, ...], str], ...] = (  # key, values that mean "off", meaning
    ("attention_bias", (None, False), "biases in attention"),
    ("mlp_bias", (None, False), "biases in the MLP"),
    ("partial_rotary_factor", (None, 1, 1.0), "partial rotary embeddings"),
    ("quantization_config", (None,), "weights quantised by another tool"),
    ("num_local_experts", (None, 0, 1), "a mixture of experts"),
    ("num_experts", (None, 0, 1), "a mixture of experts"),
    ("sliding_window", (None,), "sliding-window attention"),
    ("is_encoder_decoder", (None, False), "an encoder"),
)
_WINDOW_SWITCH = "use_sliding_window"  # where a class has it, a window without it means nothing
_ROPE_KEYS = {  # of rotary parameters, by kind; others would mean something that is not done
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_YARN_BOUNDS = {"beta_slow": 1.0, "beta_fast": 32.0}


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What a class takes where a key is missing; 0 for what follows from other keys."""

    kv_heads: int = 0
    head_dim: int = 0
    context: int = 2048
    eps: float = 1e-6
    theta: float = 10000.0
    tied: bool = False
    activation: str = "silu"
    has_window_switch: bool = False


_DEFAULTS = {
    LLAMA.name: _Defaults(),
    QWEN2.name: _Defaults(kv_heads=32, context=32768, has_window_switch=True),
    QWEN3.name: _Defaults(kv_heads=32, head_dim=128, context=32768, has_window_switch=True),
    ARCEE.name: _Defaults(context=4096, eps=1e-5, activation="relu2"),
    SMOLLM3.name: _Defaults(kv_heads=4, context=32768, theta=2e6, tied=True, has_window_switch=True),
}


def shape_from_config(config: Mapping[str, Any], where: str) -> Shape:
    """The shape that ``config`` describes; ``where`` begins every message.

    Raises:
        FormatError: a key is missing, has the wrong type or contradicts another.
        UnsupportedError: another architecture, or something the engine does not do.
    """
    name, architecture = _class(config, where)
    defaults = _DEFAULTS[architecture.name]
    _refuse_features(config, where, architecture)
    width, heads = _whole(config, "hidden_size", where), _whole(config, "num_attention_heads", where)
    head_dim = defaults.head_dim if "head_dim" not in config else 0
    if not head_dim and config.get("head_dim") is None and width % heads:
        raise FormatError(f"{where}: {heads} heads do not divide a hidden_size of {width}, and 'head_dim' is missing")
    kv_heads = defaults.kv_heads if "num_key_value_heads" not in config else 0
    layers = _whole(config, "num_hidden_layers", where)
    context = _whole(config, "max_position_embeddings", where, defaults.context)
    theta, scaling = _rope(config, where, defaults.theta, context)
    mobile = name == _MOBILELLM
    tied = _flag(config, "tie_word_embeddings", where, defaults.tied)
    try:
        return Shape(
            num_layers=layers,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=_whole(config, "num_key_value_heads", where, kv_heads or heads),
            head_dim=_whole(config, "head_dim", where, head_dim or width // heads),
            intermediate_size=_whole(config, "intermediate_size", where),
            vocab_size=_whole(config, "vocab_size", where),
            tie_word_embeddings=tied or (mobile and _flag(config, "share_embedding", where, False)),
            max_seq_len=context,
            rms_norm_eps=_number(config, "rms_norm_eps", where, defaults.eps, 0.0, 0.1),
            rope_theta=theta,
            mlp="relu2" if architecture is ARCEE else "swiglu",
            qk_norm=architecture is QWEN3,
            qkv_bias=architecture is QWEN2,
            nope_every=_nope_every(config, where, layers) if architecture is SMOLLM3 else 0,
            layer_sharing=_MOBILELLM_RUNS if mobile and _flag(config, "layer_sharing", where, False) else 1,
            rope_scaling=scaling,
        )
    except ShapeError as error:
        raise FormatError(f"{where}: {error}") from None


def config_from_shape(shape: Shape, *, dtype: str = "f32", tokenizer: TokenizerSpec | None = None) -> dict[str, Any]:
    """``config.json`` of a folder whose weights are stored as ``dtype``; both RoPE forms are written.

    Raises:
        UnsupportedError: ``LlamaForCausalLM`` cannot express the shape.
    """
    reason = missing_architecture(shape)
    architecture = LLAMA if reason else architecture_of(shape)
    if not reason and architecture.whole_heads and shape.hidden_size % shape.num_heads:
        reason = f"d={shape.hidden_size} with heads={shape.num_heads}, which do not divide it"
    if reason:
        raise UnsupportedError(f"hf config: {architecture.hf_class} cannot express {reason}, of shape {shape.text}")
    defaults = _DEFAULTS[architecture.name]
    rope = _rope_parameters(shape)
    ids = (
        {"bos": None, "eos": None, "pad": None}
        if tokenizer is None
        else {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    )
    return {
        "architectures": [architecture.hf_class],
        "model_type": architecture.name,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": defaults.activation,
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope,
        **({"rope_scaling": rope} if shape.rope_scaling else {}),
        "tie_word_embeddings": shape.tie_word_embeddings,
        **({} if architecture is QWEN2 else {"attention_bias": False}),
        "attention_dropout": 0.0,
        **({} if architecture in (QWEN2, QWEN3) else {"mlp_bias": False}),
        **({_WINDOW_SWITCH: False} if defaults.has_window_switch else {}),
        **_nope_keys(shape),
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": _DTYPE_NAMES[dtype],
        "torch_dtype": _DTYPE_NAMES[dtype],  # as transformers before 4.56 calls it
        **{f"{name}_token_id": value for name, value in ids.items()},
    }


def _class(config: Mapping[str, Any], where: str) -> tuple[str, Architecture]:
    """Name of the class, and the architecture it is."""
    names, kind = config.get("architectures"), config.get("model_type")
    found = names[0] if isinstance(names, list) and len(names) == 1 else names
    if found is None and isinstance(kind, str) and kind in ARCHITECTURES:
        return ARCHITECTURES[kind].hf_class, ARCHITECTURES[kind]
    if not isinstance(found, str) or found not in _CLASSES:
        raise UnsupportedError(
            f"{where}: the architecture is {_shown(found or kind)}, which this version does not read; "
            f"it reads {', '.join(_CLASSES)}"
        )
    return found, _CLASSES[found]


def _refuse_features(config: Mapping[str, Any], where: str, architecture: Architecture) -> None:
    defaults = _DEFAULTS[architecture.name]
    no_window = defaults.has_window_switch and not _flag(config, _WINDOW_SWITCH, where, False)
    for key, off, meaning in _OFF:
        value = config.get(key)
        if (key == "sliding_window" and no_window) or any(value is v or (value == v and type(value) is type(v)) for v in off):
            continue
        raise UnsupportedError(f"{where}: '{key}' asks for {meaning} ({_shown(value)}), which this version does not run")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise UnsupportedError(f"{where}: 'layer_types' asks for {_shown(kinds)}, but only 'full_attention' is run")
    activation = config.get("hidden_act", defaults.activation)
    if activation != defaults.activation:
        raise UnsupportedError(
            f"{where}: 'hidden_act' is {_shown(activation)}, which this version does not run; {defaults.activation!r} is needed"
        )


def _nope_every(config: Mapping[str, Any], where: str, layers: int) -> int:
    """Every how many layers one has no positions, from the list of which have them or the interval behind it."""
    listed = config.get("no_rope_layers")
    if listed is None:
        return _whole(config, "no_rope_layer_interval", where, SMOLLM3_NOPE)
    if not isinstance(listed, list) or len(listed) < layers or any(item not in (0, 1) for item in listed):
        raise FormatError(f"{where}: 'no_rope_layers' must list 0 or 1 for each of {layers} layers")
    used = [bool(item) for item in listed[:layers]]
    every = used.index(False) + 1 if False in used else 0
    if every == 0 and _whole(config, "no_rope_layer_interval", where, SMOLLM3_NOPE) > layers:
        every = _whole(config, "no_rope_layer_interval", where, SMOLLM3_NOPE)
    if every and used != [(block + 1) % every != 0 for block in range(layers)]:
        raise UnsupportedError(f"{where}: 'no_rope_layers' is no regular pattern, which this version does not run")
    return every


def _nope_keys(shape: Shape) -> dict[str, Any]:
    if not shape.nope_every:
        return {}
    used = [int(shape.has_rope(block)) for block in range(shape.num_layers)]
    return {"no_rope_layers": used, "no_rope_layer_interval": shape.nope_every}


def _rope_parameters(shape: Shape) -> dict[str, Any]:
    scaling, theta = shape.rope_scaling, shape.rope_theta
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    found: dict[str, Any] = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        found |= {"attention_factor": scaling.attention_factor, "beta_slow": scaling.low, "beta_fast": scaling.high}
    if scaling.original_context:
        found["original_max_position_embeddings"] = scaling.original_context
    return found


def _rope(config: Mapping[str, Any], where: str, theta: float, context: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` or the older ``rope_scaling`` and ``rope_theta``, which must agree."""
    outer = _number(config, "rope_theta", where, theta, 1.0, 1e11)
    found = {}
    for key in ("rope_scaling", "rope_parameters"):
        parameters = config.get(key)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise FormatError(f"{where}: '{key}' is {_shown(parameters)}; an object is needed")
        parameters = {name: value for name, value in parameters.items() if value is not None}
        inner = _number(parameters, "rope_theta", where, outer, 1.0, 1e11)
        if "rope_theta" in config and inner != outer:
            raise FormatError(f"{where}: 'rope_theta' is {outer:g}, but {inner:g} in '{key}'; they must be equal")
        found[key] = (inner, _scaling(parameters, key, where, context))
    if len(set(found.values())) > 1 and found["rope_scaling"][1] is not None:
        raise FormatError(f"{where}: 'rope_scaling' and 'rope_parameters' differ; one of them is enough")
    return found.get("rope_parameters") or found.get("rope_scaling") or (outer, None)


def _scaling(parameters: Mapping[str, Any], key: str, where: str, context: int) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise UnsupportedError(f"{where}: '{key}' asks for rotary scaling {_shown(kind)}, which this version does not run")
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedError(f"{where}: '{key}' asks for partial rotary embeddings, which this version does not run")
    if kind == "default":
        return None
    strange = sorted(set(parameters) - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS[kind]})
    if strange:
        raise UnsupportedError(f"{where}: '{key}' of kind {kind!r} has {_shown(strange[0])}, which this version does not know")
    if not _flag(parameters, "truncate", where, True):
        raise UnsupportedError(f"{where}: '{key}' asks for YaRN bounds that are not rounded, which this version does not run")
    factor = _number(parameters, "factor", where, None, 1.0, 1e6)
    if kind == "linear":
        return RopeScaling(kind, factor)
    original = _whole(parameters, "original_max_position_embeddings", where, context if kind == "yarn" else None)
    if kind == "llama3":
        low = _number(parameters, "low_freq_factor", where, None, 1e-3, 1e6)
        bounds, attention = (low, _number(parameters, "high_freq_factor", where, None, 1e-3, 1e6)), 1.0
    else:
        slow, fast = (_number(parameters, name, where, value, 1e-3, 1e6) for name, value in _YARN_BOUNDS.items())
        bounds, attention = (slow, fast), _attention_factor(parameters, where, factor)
    try:
        return RopeScaling(kind, factor, original, *bounds, attention)
    except ShapeError as error:
        raise FormatError(f"{where}: {error}") from None


def _attention_factor(parameters: Mapping[str, Any], where: str, factor: float) -> float:
    """YaRN's own where it is given, else from ``mscale`` and ``mscale_all_dim`` where both are; 0 for the default."""
    if "attention_factor" in parameters:
        return _number(parameters, "attention_factor", where, None, 1e-3, 1e3)
    scales = [_number(parameters, key, where, 0.0, 0.0, 1e3) for key in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return 0.0
    up, down = (0.1 * scale * math.log(factor) + 1 for scale in scales)
    return up / down


def _whole(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 1 <= value <= 1 << 24:
        raise FormatError(f"{where}: '{key}' is {_shown(value)}, but a whole number from 1 to {1 << 24} is needed")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, default: float | None, low: float, high: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise FormatError(f"{where}: '{key}' is {_shown(value)}, but a number from {low:g} to {high:g} is needed")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, where: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise FormatError(f"{where}: '{key}' is {_shown(value)}, but true or false is needed")
    return value


def _shown(value: Any) -> str:
    return ascii(value)[:60]
