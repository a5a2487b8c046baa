"""What the exported files of a shape will weigh, before anything is written: headers, padding and fallbacks included.

GGUF to the byte; ONNX and Hugging Face folders within 0.5 %. For shapes of a search: no tokenizer, no rotary scaling. The
exporter is not asked; tests compare with what it writes.

    L layers   D width   V vocabulary
"""

from __future__ import annotations

import json
from functools import lru_cache

from deepthin.engine.accounting import count_params
from deepthin.engine.architectures import gguf_architecture, missing_architecture
from deepthin.engine.formats import F16, Q4_1, Q5_1, format_named, scheme_named
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, stored_format, tensor_specs

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


def onnx_bytes(shape: Shape, quant: str) -> int | None:
    """Bytes of the ONNX file, within 0.5 %; None for formats it has no operators for.

    Raises:
        UsageError: no such format.
    """
    scheme = scheme_named(quant)
    if scheme.body.name not in _ONNX_BODIES:
        return None
    one = shape.replace(num_layers=1)
    positions = shape.max_seq_len * shape.head_dim * 4  # cosines and sines, half a head each
    runs = shape.num_executed_layers
    graph = _GRAPH_BYTES + runs * _GRAPH_BLOCK_BYTES + _GRAPH_DIGIT_BYTES * _digits_beyond_first(runs)
    total = positions + graph
    if shape.head_dim % 16:
        total += runs * _GRAPH_ROTARY_BYTES
    for spec in _specs(one):
        times = shape.num_layers if spec.name.startswith("blk.") else 1
        fmt = stored_format(spec, scheme)
        bits = None if spec.role == "embedding" and fmt in (Q4_1, Q5_1) else _BLOCK_BITS.get(fmt.name)
        if bits is None:
            size = 4 * spec.num_elements + (_GRAPH_EXTRA_BYTES.get(spec.role, 0) if _is_extra(spec) else 0)
        else:
            floats = 2 if fmt in (Q4_1, Q5_1) else 1
            size = spec.num_elements * bits // 8 + spec.num_elements // fmt.block_elements * 4 * floats
            size += _GRAPH_MATRIX_BYTES[floats]
        total += times * size
    return total


def hf_bytes(shape: Shape, dtype: str = "f32") -> int:
    """Bytes of the Hugging Face folder with weights in ``dtype``: the weights file to the byte, the rest within 300.

    Raises:
        UsageError: no such format.
    """
    fmt = format_named(dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in tensor_specs(shape):
        end = offset + spec.num_elements * fmt.block_bytes
        header[spec.hf_name] = {"dtype": dtype.upper(), "shape": list(spec.dims), "data_offsets": [offset, end]}
        offset = end
    text = len(json.dumps(header, separators=(",", ":")))
    return 8 + text + -text % 8 + offset + _HF_CONFIG_BYTES


def file_sizes(shape: Shape, quant: str, *, name: str = "model") -> dict[str, int]:
    """Bytes by kind of file: ``gguf``, ``onnx`` where there is one, and ``hf`` in f32.

    Raises:
        UsageError: no such format.
    """
    onnx = onnx_bytes(shape, quant)
    return {"gguf": gguf_bytes(shape, quant, name), **({} if onnx is None else {"onnx": onnx}), "hf": hf_bytes(shape)}


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


_ONNX_BODIES = ("f32", "q4_0", "q4_1", "q8_0")
_BLOCK_BITS = {"q4_0": 4, "q4_1": 4, "q5_0": 8, "q5_1": 8, "q8_0": 8}
# Measured on exported graphs of 1 to 12 layers: nodes and frames of initializers, names included.
_GRAPH_BYTES = 1_750
_GRAPH_BLOCK_BYTES = 2_730
_GRAPH_DIGIT_BYTES = 55
_GRAPH_ROTARY_BYTES = 235
_GRAPH_MATRIX_BYTES = {1: 217, 2: 701}  # one block matrix more than a plain one, by float fields a block
_GRAPH_EXTRA_BYTES = {"norm": 916, "bias": 200}  # query and key norms, biases
_HF_CONFIG_BYTES = 900


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


def _is_extra(spec: TensorSpec) -> bool:
    return spec.role == "bias" or spec.name.endswith(("_q_norm", "_k_norm"))


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


def _digits_beyond_first(count: int) -> int:
    return _digits_up_to(count) - count


def _size_label(parameters: int) -> str:
    """The label of GGUF names, for example 135M."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            value = parameters / unit
            return f"{value:.1f}{letter}" if value < 10 else f"{value:.0f}{letter}"
    return str(parameters)
