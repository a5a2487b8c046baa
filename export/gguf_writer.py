"""Writes GGUF v3 files of the architecture that fits: the same model gives the same bytes every time.

File: magic, version, tensor count, key count, keys, tensor infos, padding, then the tensor data, each part padded to 32 bytes.
Matrices are copied block for block from the model; query and key rows are interleaved where the architecture wants them so.

Source: ggml ``docs/gguf.md`` at ggml-org/ggml@d99724f; llama.cpp ``conversion/llama.py`` at ggml-org/llama.cpp@c392e50.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from deepthin.engine.architectures import gguf_architecture
from deepthin.engine.arrays import U8
from deepthin.engine.errors import FormatError
from deepthin.engine.formats import F32, FORMATS, BlockFormat
from deepthin.engine.model import Model, Tensor, TokenizerSpec
from deepthin.engine.rope import rope_factors
from deepthin.engine.rope_scaling import RopeScaling
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, gguf_row_order, tensor_specs
from deepthin.export.feasibility import require_targets

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
_QUANTIZATION_VERSION = 2
_TOKEN_UNUSED = 5
_ATTRIBUTION = ("author", "organization", "license", "license.name", "license.link", "url")  # kept from the source file

Key = tuple[str, str, object]  # name, kind (a key of _SCALARS, "str", or "[kind]" for an array), value
_SCALARS = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?")}
_STRING, _ARRAY = 8, 9


def write_gguf(model: Model, path: Path, *, file_format: BlockFormat | None = None) -> int:
    """Write ``model`` as it is stored; returns the bytes of all weights, padding and rotary factors apart.

    Args:
        model: tensors in any of the formats of ``engine/formats.py``.
        path: a name that is not in use yet; the caller renames the finished file.
        file_format: what ``general.file_type`` says; by default the format most matrices of the blocks have.

    Raises:
        UnsupportedError: the architecture cannot express the shape.
        FormatError: the tokenizer holds more tokens than the vocabulary.
    """
    require_targets(("gguf",), model.shape)
    header, held = _header(model, file_format)
    with path.open("xb") as file:
        file.write(header)
        _pad(file, len(header))
        written = 0
        for data in _stored_rows(model, tensor_specs(model.shape)):
            file.write(np.ascontiguousarray(data).data)
            _pad(file, data.nbytes)
            written += data.nbytes
        for _, tensor in held[len(model.tensors) :]:
            file.write(tensor.data.data)
            _pad(file, tensor.num_bytes)
    return written


def gguf_file_bytes(model: Model, *, file_format: BlockFormat | None = None) -> int:
    """Bytes of the file that :func:`write_gguf` makes of ``model``, whose data is not looked at.

    Raises:
        UnsupportedError: as there.
        FormatError: as there.
    """
    require_targets(("gguf",), model.shape)
    header, held = _header(model, file_format)
    return _padded(len(header)) + sum(_padded(tensor.num_bytes) for _, tensor in held)


def _header(model: Model, file_format: BlockFormat | None) -> tuple[bytes, list[tuple[str, Tensor]]]:
    """All that stands before the data, and whose data follows: the model's tensors, then those that hold no weights."""
    keys = gguf_keys(model, file_format or body_format(model))
    held = [(spec.gguf_name, model.tensors[spec.name]) for spec in tensor_specs(model.shape)]
    held += _rope_tables(model.shape).items()
    infos, offset = bytearray(), 0
    for name, tensor in held:
        infos += _tensor_info(name, tensor, offset)
        offset += _padded(tensor.num_bytes)
    header = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(held), len(keys)))
    for name, kind, value in keys:
        header += _string(name) + _value(kind, value)
    return bytes(header + infos), held


def _rope_tables(shape: Shape) -> dict[str, Tensor]:
    """Tensors that hold no weights: the rotary factors, which is how llama.cpp wants llama3 scaling."""
    if shape.rope_scaling is None or shape.rope_scaling.kind != "llama3":
        return {}
    return {"rope_freqs.weight": Tensor.from_values(rope_factors(shape.head_dim, shape.rope_theta, shape.rope_scaling), F32)}


def body_format(model: Model) -> BlockFormat:
    """The format that holds most bytes of the blocks' matrices; the first in ``FORMATS`` order on a tie."""
    totals = dict.fromkeys(FORMATS, 0)
    for spec in tensor_specs(model.shape):
        if spec.role in ("attention", "mlp"):
            totals[model.tensors[spec.name].format.name] += spec.num_elements
    return FORMATS[max(totals, key=lambda name: totals[name])]


def gguf_keys(model: Model, file_format: BlockFormat) -> list[Key]:
    """Metadata in file order: general, architecture, tokenizer."""
    shape, prefix = model.shape, gguf_architecture(model.shape).name
    keys: list[Key] = [
        ("general.architecture", "str", prefix),
        ("general.type", "str", "model"),
        ("general.name", "str", model.name),
        ("general.size_label", "str", _size_label(sum(spec.num_elements for spec in tensor_specs(shape)))),
        *((f"general.{name}", "str", text) for name, text in _attribution(model).items()),
        ("general.alignment", "u32", ALIGNMENT),
        ("general.file_type", "u32", file_format.gguf_file_type),
    ]
    if any(tensor.format.is_quantized for tensor in model.tensors.values()):
        keys.append(("general.quantization_version", "u32", _QUANTIZATION_VERSION))
    keys += [
        (f"{prefix}.context_length", "u32", shape.max_seq_len),
        (f"{prefix}.embedding_length", "u32", shape.hidden_size),
        (f"{prefix}.block_count", "u32", shape.num_layers),
        (f"{prefix}.feed_forward_length", "u32", shape.intermediate_size),
        (f"{prefix}.attention.head_count", "u32", shape.num_heads),
        (f"{prefix}.attention.head_count_kv", "u32", shape.num_kv_heads),
        (f"{prefix}.attention.key_length", "u32", shape.head_dim),
        (f"{prefix}.attention.value_length", "u32", shape.head_dim),
        (f"{prefix}.attention.layer_norm_rms_epsilon", "f32", shape.rms_norm_eps),
        (f"{prefix}.rope.dimension_count", "u32", shape.head_dim),
        (f"{prefix}.rope.freq_base", "f32", shape.rope_theta),
        (f"{prefix}.vocab_size", "u32", shape.vocab_size),
        *_scaling_keys(prefix, shape.rope_scaling),
    ]
    if model.tokenizer is None:
        return [*keys, ("tokenizer.ggml.model", "str", "none")]
    return keys + _tokenizer_keys(model.tokenizer, shape.vocab_size)


def _scaling_keys(prefix: str, scaling: RopeScaling | None) -> list[Key]:
    if scaling is None or scaling.kind == "llama3":
        return []
    name = f"{prefix}.rope.scaling"
    keys: list[Key] = [(f"{name}.type", "str", scaling.kind), (f"{name}.factor", "f32", scaling.factor)]
    if scaling.kind == "yarn":
        default = RopeScaling("yarn", scaling.factor, scaling.original_context)
        keys.append((f"{name}.original_context_length", "u32", scaling.original_context))
        if scaling.attention_factor != default.attention_factor:  # llama.cpp multiplies the default by it
            keys.append((f"{name}.attn_factor", "f32", scaling.attention_factor / default.attention_factor))
    return keys


def _attribution(model: Model) -> dict[str, str]:
    held = {name: model.metadata.get(f"general.{name}") for name in _ATTRIBUTION}
    return {name: text for name, text in held.items() if isinstance(text, str)}


def _tokenizer_keys(spec: TokenizerSpec, vocab_size: int) -> list[Key]:
    missing = vocab_size - len(spec.tokens)
    if missing < 0:
        raise FormatError(
            f"the tokenizer has {len(spec.tokens)} tokens, but the embedding has {vocab_size} rows; "
            f"export with the model's own tokenizer, or with none"
        )
    padding = tuple(f"[PAD{vocab_size - missing + i}]" for i in range(missing))
    keys: list[Key] = [
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", spec.pre),
        ("tokenizer.ggml.tokens", "[str]", spec.tokens + padding),
        ("tokenizer.ggml.token_type", "[i32]", spec.token_types + (_TOKEN_UNUSED,) * missing),
        ("tokenizer.ggml.merges", "[str]", spec.merges),
        ("tokenizer.ggml.add_bos_token", "bool", spec.add_bos),
        ("tokenizer.ggml.add_space_prefix", "bool", False),
    ]
    special = (("bos", spec.bos_id), ("eos", spec.eos_id), ("unknown", spec.unk_id), ("padding", spec.pad_id))
    keys += [(f"tokenizer.ggml.{name}_token_id", "u32", token) for name, token in special if token is not None]
    return keys


def _stored_rows(model: Model, specs: list[TensorSpec]) -> Iterator[U8]:
    interleaved = gguf_architecture(model.shape).interleaved
    for spec in specs:
        tensor = model.tensors[spec.name]
        if not (spec.rope_heads and interleaved):
            yield tensor.data
            continue
        order = gguf_row_order(spec.dims[0], spec.rope_heads)
        is_matrix = len(spec.dims) == 2
        yield tensor.data[order] if is_matrix else Tensor.from_values(tensor.dequantize()[order], tensor.format).data


def _tensor_info(name: str, tensor: Tensor, offset: int) -> bytes:
    dims = tuple(reversed(tensor.dims))  # ne[0] is the row length
    fields = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.format.gguf_type, offset)
    return _string(name) + fields


def _value(kind: str, value: object) -> bytes:
    """One value with its type number in front."""
    if kind == "str":
        return struct.pack("<I", _STRING) + _string(str(value))
    if kind in _SCALARS:
        number, layout = _SCALARS[kind]
        return struct.pack("<I", number) + struct.pack(layout, value)
    assert isinstance(value, tuple), f"Bug: key kind {kind} with {type(value).__name__}"
    if kind == "[str]":
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(item) for item in value)
    number, layout = _SCALARS[kind[1:-1]]
    return struct.pack("<IIQ", _ARRAY, number, len(value)) + struct.pack(f"<{len(value)}{layout[1]}", *value)


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO, size: int) -> None:
    file.write(bytes(_padded(size) - size))


def _size_label(parameters: int) -> str:
    """For example 135M; two digits at least, as llama.cpp's names have."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            value = parameters / unit
            return f"{value:.1f}{letter}" if value < 10 else f"{value:.0f}{letter}"
    return str(parameters)
