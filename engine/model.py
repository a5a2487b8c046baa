"""A model in memory: its shape, its tensors as stored blocks, and what text needs. No files, no kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32, I64, U8
from deepthin.engine.errors import FormatError
from deepthin.engine.formats import BlockFormat, scheme_named
from deepthin.engine.mapped import let_go
from deepthin.engine.quants import convert, dequantize, quantize
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, stored_format, tensor_specs


@dataclass(frozen=True, slots=True)
class Tensor:
    """Stored blocks of one tensor.

    Attributes:
        format: how the blocks are to be read.
        dims: (out, in) or (width,).
        stored: u8 [rows, row_bytes]; may be a read-only view of a mapped file.
        order: which row of ``stored`` each canonical row is, where they are stored in another order.
    """

    format: BlockFormat
    dims: tuple[int, ...]
    stored: U8
    order: I64 | None = None

    @property
    def data(self) -> U8:
        """Stored blocks u8 [rows, row_bytes], rows in canonical order: ``stored`` itself, or a copy of it put in order."""
        return self.stored if self.order is None else self.stored[self.order]

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored blocks."""
        return self.stored.nbytes

    def dequantize(self) -> F32:
        """Values as f32 with shape ``dims``."""
        return dequantize(self.data, self.format).reshape(self.dims)

    @classmethod
    def from_values(cls, values: F32, fmt: BlockFormat) -> Tensor:
        """Store ``values`` f32 [out, in] or [width] as ``fmt``."""
        return cls(fmt, tuple(values.shape), quantize(values, fmt))

    def converted(self, fmt: BlockFormat) -> Tensor:
        """The same values stored as ``fmt``, made a part at a time; this tensor itself where it is stored so already.

        Raises:
            FormatError: the block does not divide a row, or a value does not fit.
            UnsupportedError: the format is only read.
        """
        if self.format is fmt:
            return self
        made = Tensor(fmt, self.dims, convert(self.data, self.format, fmt))
        let_go(self.stored)
        return made


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """Byte-level BPE as read from a file; ``engine/tokenizer.py`` turns it into a working tokenizer.

    Attributes:
        pre: GGUF pre-tokenizer name (``smollm``, ``gpt-2``, ``llama-bpe``, ``qwen2``, ...).
        tokens: text of each id, in GPT-2's byte-to-unicode spelling for normal tokens.
        token_types: GGUF types, 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
        merges: "left right" pairs, best first.
    """

    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """Shape, tensors by canonical name, and an optional tokenizer.

    ``__post_init__`` checks every tensor of the shape for presence and dimensions, so whatever runs a Model need not.

    Raises:
        FormatError: a tensor is missing, left over, or has the wrong dimensions.
    """

    shape: Shape
    tensors: Mapping[str, Tensor]
    tokenizer: TokenizerSpec | None = None
    name: str = "model"
    source: str = "memory"
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check tensors against the shape."""
        specs = {spec.name: spec for spec in tensor_specs(self.shape)}
        for spec in specs.values():
            tensor = self.tensors.get(spec.name)
            if tensor is None:
                raise FormatError(f"{self.source}: tensor '{spec.name}' is missing, but shape {self.shape.text} needs it")
            _check_tensor(self.source, spec, tensor)
        extra = sorted(set(self.tensors) - set(specs))
        if extra:
            raise FormatError(
                f"{self.source}: tensor '{extra[0]}' belongs to no part of shape {self.shape.text}; another architecture?"
            )

    @property
    def head(self) -> Tensor:
        """The output head: its own tensor, or the embedding when tied."""
        return self.tensors["token_embd" if self.shape.tie_word_embeddings else "output"]

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored blocks."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def dequantized(self) -> dict[str, F32]:
        """Every tensor as f32 by canonical name."""
        return {name: tensor.dequantize() for name, tensor in self.tensors.items()}

    def unrolled(self) -> Model:
        """The same decoder with shared blocks written out, for formats that know no sharing; memory holds one copy."""
        shape = self.shape.unrolled
        if shape == self.shape:
            return self
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            blk, _, rest = name.partition(".")
            number, _, part = rest.partition(".")
            runs = range(self.shape.layer_sharing) if blk == "blk" else ()
            tensors |= {f"blk.{int(number) * len(runs) + run}.{part}": tensor for run in runs} or {name: tensor}
        return Model(shape, tensors, self.tokenizer, self.name, self.source, self.metadata)

    def quantized(self, quant: str) -> Model:
        """The same model stored as ``quant`` says, a name that :func:`~deepthin.engine.formats.scheme_named` understands.

        Tensors already in the wanted format are kept as they are, so no bits change twice.

        Raises:
            UsageError: no such format.
            FormatError: a value does not fit; the message names the tensor.
            UnsupportedError: the format is only read.
        """
        scheme = scheme_named(quant)
        made = {}
        for spec in tensor_specs(self.shape):
            try:
                made[spec.name] = self.tensors[spec.name].converted(stored_format(spec, scheme))
            except FormatError as error:
                raise FormatError(f"{self.source}: tensor '{spec.name}' cannot become {quant}: {error}") from None
        return Model(self.shape, made, self.tokenizer, self.name, self.source, self.metadata)


def random_model(shape: Shape, *, seed: int = 0, quant: str = "f32", distinct_rows: int | None = None) -> Model:
    """A model with seeded random weights.

    With ``distinct_rows`` a matrix repeats its first so many rows, which makes a large model many times as fast: for timing.

    Norms are 1 and biases 0; matrices are normal with sigma 0.02 and the residual output projections (``attn_output``,
    ``ffn_down``) are scaled by 1/sqrt(2L) (GPT-2, Radford et al. 2019, section 2.3). Each tensor has its own
    stream, so the same seed gives the same tensor whatever the others are.
    """
    scheme = scheme_named(quant)
    tensors = {}
    for index, spec in enumerate(tensor_specs(shape)):
        fmt = stored_format(spec, scheme)
        if spec.role in ("norm", "bias"):
            tensors[spec.name] = Tensor.from_values(np.full(spec.dims, spec.role == "norm", np.float32), fmt)
        else:
            sigma = 0.02
            if spec.name.endswith(("attn_output", "ffn_down")):
                sigma /= math.sqrt(2 * shape.num_executed_layers)
            generator = np.random.Generator(np.random.PCG64([seed, index]))
            rows, cols = spec.dims
            made = min(rows, distinct_rows or rows)
            some = Tensor.from_values(generator.standard_normal((made, cols), np.float32) * np.float32(sigma), fmt)
            if made < rows:
                some = replace(some, dims=spec.dims, stored=np.resize(some.stored, (rows, some.stored.shape[1])))
            tensors[spec.name] = some
    return Model(shape, tensors, name=f"random-{shape.text}-seed{seed}", source=f"random(seed={seed})")


def _check_tensor(source: str, spec: TensorSpec, tensor: Tensor) -> None:
    if tensor.dims != spec.dims:
        raise FormatError(
            f"{source}: tensor '{spec.name}' has dimensions {list(tensor.dims)}, but the shape needs {list(spec.dims)}; "
            f"do the configuration and the weights belong together?"
        )
    rows = spec.dims[0] if len(spec.dims) == 2 else 1
    need = (rows, tensor.format.row_bytes(spec.dims[-1]))
    if tensor.stored.dtype != np.uint8 or tensor.stored.shape != need:
        raise FormatError(
            f"{source}: tensor '{spec.name}' holds {tensor.stored.shape} {tensor.stored.dtype} bytes, "
            f"but {tensor.format.name} with dimensions {list(spec.dims)} needs {need} of uint8"
        )
