"""Between ``config.json`` of ``LlamaForCausalLM`` and :class:`Shape`, both ways.

Whatever would change the arithmetic and is not done by the engine is refused by name.
Source of keys and defaults: ``LlamaConfig`` and ``modeling_rope_utils`` of transformers 5 (reference/export.md section 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepthin.engine.errors import FormatError, ShapeError, UnsupportedError
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.shape import Shape

_ARCHITECTURE = "LlamaForCausalLM"
_DTYPE_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_OFF: tuple[tuple[str, tuple[Any, ...], str], ...] = (  # key, values that mean "off", meaning
    ("attention_bias", (None, False), "biases in attention"),
    ("mlp_bias", (None, False), "biases in the MLP"),
    ("rope_scaling", (None,), "rotary scaling"),
    ("partial_rotary_factor", (None, 1, 1.0), "partial rotary embeddings"),
    ("quantization_config", (None,), "weights quantised by another tool"),
    ("num_local_experts", (None, 0, 1), "a mixture of experts"),
    ("num_experts", (None, 0, 1), "a mixture of experts"),
    ("sliding_window", (None,), "sliding-window attention"),
    ("is_encoder_decoder", (None, False), "an encoder"),
)


def shape_from_config(config: Mapping[str, Any], where: str) -> Shape:
    """The shape that ``config`` describes; ``where`` begins every message.

    Raises:
        FormatError: a key is missing, has the wrong type or contradicts another.
        UnsupportedError: another architecture, or something the engine does not do.
    """
    _refuse_other_architectures(config, where)
    for key, off, meaning in _OFF:
        value = config.get(key)
        scaling_off = key == "rope_scaling" and isinstance(value, dict) and _rope_type(value) == "default"
        if not scaling_off and not any(value is good or (value == good and type(value) is type(good)) for good in off):
            raise UnsupportedError(f"{where}: '{key}' asks for {meaning} ({_shown(value)}), which this version does not run")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedError(
            f"{where}: 'hidden_act' is {_shown(activation)}, which this version does not run; 'silu' is needed"
        )
    width, heads = _whole(config, "hidden_size", where), _whole(config, "num_attention_heads", where)
    if config.get("head_dim") is None and width % heads:
        raise FormatError(f"{where}: {heads} heads do not divide a hidden_size of {width}, and 'head_dim' is missing")
    try:
        return Shape(
            num_layers=_whole(config, "num_hidden_layers", where),
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=_whole(config, "num_key_value_heads", where, heads),
            head_dim=_whole(config, "head_dim", where, width // heads),
            intermediate_size=_whole(config, "intermediate_size", where),
            vocab_size=_whole(config, "vocab_size", where),
            tie_word_embeddings=_flag(config, "tie_word_embeddings", where, False),
            max_seq_len=_whole(config, "max_position_embeddings", where, 2048),
            rms_norm_eps=_number(config, "rms_norm_eps", where, 1e-6, 0.0, 0.1),
            rope_theta=_rope_theta(config, where),
        )
    except ShapeError as error:
        raise FormatError(f"{where}: {error}") from None


def config_from_shape(shape: Shape, *, dtype: str = "f32", tokenizer: TokenizerSpec | None = None) -> dict[str, Any]:
    """``config.json`` of a folder whose weights are stored as ``dtype``; both RoPE forms are written.

    Raises:
        UnsupportedError: ``LlamaForCausalLM`` cannot express the shape.
    """
    refused = {
        f"mlp={shape.mlp}": shape.mlp != "swiglu",
        "qk_norm": shape.qk_norm,
        f"share={shape.layer_sharing}": shape.layer_sharing > 1,
        f"d={shape.hidden_size} with heads={shape.num_heads}, which do not divide it,": shape.hidden_size % shape.num_heads > 0,
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise UnsupportedError(f"hf config: {_ARCHITECTURE} cannot express {what} of shape {shape.text}")
    ids = (
        {"bos": None, "eos": None, "pad": None}
        if tokenizer is None
        else {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    )
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": _DTYPE_NAMES[dtype],
        **{f"{name}_token_id": value for name, value in ids.items()},
    }


def _refuse_other_architectures(config: Mapping[str, Any], where: str) -> None:
    names = config.get("architectures")
    found = names[0] if isinstance(names, list) and len(names) == 1 else names
    if found is None and config.get("model_type") == "llama":
        return
    if found != _ARCHITECTURE:
        raise UnsupportedError(
            f"{where}: the architecture is {_shown(found or config.get('model_type'))}, which this version does not read; "
            f"{_ARCHITECTURE} is needed"
        )


def _rope_type(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    parameters = config.get("rope_parameters")
    if parameters is None:
        return _number(config, "rope_theta", where, 10000.0, 1.0, 1e11)
    if not isinstance(parameters, dict):
        raise FormatError(f"{where}: 'rope_parameters' is {_shown(parameters)}; an object is needed")
    kind = _rope_type(parameters)
    if kind != "default":
        raise UnsupportedError(
            f"{where}: 'rope_parameters' asks for rotary scaling {_shown(kind)}, which this version does not run"
        )
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedError(
            f"{where}: 'rope_parameters' asks for partial rotary embeddings, which this version does not run"
        )
    outer = _number(config, "rope_theta", where, 10000.0, 1.0, 1e11)
    inner = _number(parameters, "rope_theta", where, outer, 1.0, 1e11)
    if "rope_theta" in config and inner != outer:
        raise FormatError(f"{where}: 'rope_theta' is {outer:g}, but {inner:g} in 'rope_parameters'; they must be equal")
    return inner


def _whole(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 1 <= value <= 1 << 24:
        raise FormatError(f"{where}: '{key}' is {_shown(value)}, but a whole number from 1 to {1 << 24} is needed")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, default: float, low: float, high: float) -> float:
    value = config.get(key, default)
    if type(value) not in (int, float) or not low <= value <= high:
        raise FormatError(f"{where}: '{key}' is {_shown(value)}, but a number from {low:g} to {high:g} is needed")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, where: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise FormatError(f"{where}: '{key}' is {_shown(value)}, but true or false is needed")
    return value


def _shown(value: Any) -> str:
    return ascii(value)[:60]
