"""What the GGUF file of a shape will weigh, to the byte, before anything is written: headers, padding and fallbacks included.

For shapes of a search: no tokenizer, no rotary scaling. It is asked for every proposal, so it is arithmetic of its own; tests
compare it with what the exporter writes. Sizes of other files are handed in by whoever knows the exporter (:data:`FileSizes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from deepthin.engine.accounting import count_params
from deepthin.engine.architectures import gguf_architecture, missing_architecture
from deepthin.engine.formats import F16, scheme_named
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, stored_format, tensor_specs

FileSizes = Callable[[Shape, str], Mapping[str, int]]  # bytes by kind of file, of a shape stored as a format

_ALIGNMENT = 32
_FILE_HEAD = 4 + 4 + 8 + 8  # magic, version, tensor count, key count
_U32_KEYS = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon"),
    *("rope.dimension_count", "rope.freq_base", "vocab_size"),
)
_PLAIN_PREFIX = "llama"  # for shapes no GGUF architecture fits, whose file could not be written anyway


def random_weights_name(shape: Shape, seed: int) -> str:
    """The name that made-up weights of ``shape`` have; it stands in the GGUF file."""
    return f"random-{shape.text}-seed{seed}"


def gguf_bytes(shape: Shape, quant: str, name: str = "model") -> int:
    """Bytes of the GGUF file of a model called ``name`` stored as ``quant``.

    Raises:
        UsageError: no such format.
    """
    one = shape.replace(num_layers=1)
    block, rest, quantized = _gguf_parts(one, scheme_named(quant).name)
    prefix = _PLAIN_PREFIX if missing_architecture(shape) else gguf_architecture(shape).name
    keys = [
        *(_text_key("general.architecture", prefix), _text_key("general.type", "model"), _text_key("general.name", name)),
        _text_key("general.size_label", _size_label(count_params(shape).total)),
        *(_u32_key("general.alignment"), _u32_key("general.file_type")),
        *([_u32_key("general.quantization_version")] if quantized else []),
        *(_u32_key(f"{prefix}.{key}") for key in _U32_KEYS),
        _text_key("tokenizer.ggml.model", "none"),
    ]
    per_block = sum(spec.name.startswith("blk.") for spec in _specs(one))
    more_digits = per_block * (_digits_up_to(shape.num_layers) - shape.num_layers)  # "blk.0" has one digit in its name
    infos = shape.num_layers * block.info + rest.info + more_digits
    return _padded(_FILE_HEAD + sum(keys) + infos) + shape.num_layers * block.data + rest.data


def with_file_sizes(document: dict[str, Any], sizes: FileSizes) -> dict[str, Any]:
    """``document`` with what ``sizes`` says beside every ``file_bytes`` in it, which are those of a shape and a format."""
    return {key: _with_sizes(value, sizes) for key, value in document.items()}


def _with_sizes(value: Any, sizes: FileSizes) -> Any:
    if isinstance(value, list):
        return [_with_sizes(item, sizes) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_sizes(item, sizes) for key, item in value.items()}
    if "file_bytes" in found:
        found["file_bytes"] = {**sizes(Shape.from_json(found["shape"]), found["quant"]), **found["file_bytes"]}
    return found


def without_fallback_bytes(shape: Shape, quant: str) -> int:
    """Bytes that matrices kept in f16, because no block divides their rows, take beyond what ``quant`` would.

    Raises:
        UsageError: no such format.
    """
    body = scheme_named(quant).body
    extra = 0.0
    for spec in _specs(shape.replace(num_layers=1)):
        if spec.role in ("attention", "mlp") and stored_format(spec, body) is not body:
            extra += shape.num_layers * spec.num_elements * (F16.bits_per_weight - body.bits_per_weight) / 8
    return round(extra)


class _Part:
    """Bytes of tensor infos and of padded data."""

    def __init__(self) -> None:
        self.info = self.data = 0

    def add(self, spec: TensorSpec, data: int) -> None:
        self.info += 8 + len(spec.gguf_name) + 4 + 8 * len(spec.dims) + 4 + 8
        self.data += _padded(data)


@lru_cache(maxsize=1 << 14)
def _gguf_parts(one_block: Shape, quant: str) -> tuple[_Part, _Part, bool]:
    """Of one block, of the rest, and whether anything is quantised."""
    scheme, block, rest, quantized = scheme_named(quant), _Part(), _Part(), False
    for spec in _specs(one_block):
        fmt = stored_format(spec, scheme)
        rows = spec.dims[0] if len(spec.dims) == 2 else 1
        (block if spec.name.startswith("blk.") else rest).add(spec, rows * fmt.row_bytes(spec.dims[-1]))
        quantized |= fmt.is_quantized
    return block, rest, quantized


@lru_cache(maxsize=1 << 14)
def _specs(one_block: Shape) -> list[TensorSpec]:
    return tensor_specs(one_block)


def _text_key(name: str, value: str) -> int:
    return 8 + len(name) + 4 + 8 + len(value.encode())


def _u32_key(name: str) -> int:
    return 8 + len(name) + 4 + 4


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _digits_up_to(count: int) -> int:
    """Digits of 0 ... count - 1 written one after another."""
    digits, start = 0, 0
    width = 1
    while start < count:
        end = min(count, 10**width)
        digits += (end - start) * width
        start, width = end, width + 1
    return digits


def _size_label(parameters: int) -> str:
    """The label of GGUF names, for example 135M."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            value = parameters / unit
            return f"{value:.1f}{letter}" if value < 10 else f"{value:.0f}{letter}"
    return str(parameters)
