"""What a shape costs before anything runs: parameters, bytes, cache, operations, and two curves for thinking.

Pure arithmetic on a :class:`Shape`. Nothing here is measured; measured costs live in ``profiles``.

    L layers   D hidden size   H query heads   K key/value heads   E head dim   F MLP width   V vocabulary

One block with a two-matrix MLP of width 4D and as many key/value as query heads holds 12·D² matrix parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepthin.engine.errors import UsageError
from deepthin.engine.formats import F16, BlockFormat, Scheme, scheme_of
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, stored_format, tensor_specs

HEALTHY_ASPECT = (60.0, 160.0)  # D / L; most models trained for quality alone fall inside
EXAMPLE_VOCABULARIES = (32_000, 49_152, 128_256, 262_144)  # Llama 2, SmolLM2, Llama 3, Gemma 3


@dataclass(frozen=True, slots=True)
class Parts:
    """A count (parameters or bytes) split by the tensors' roles; biases count with the matrix they belong to.

    ``head`` is 0 when the head is tied to the embedding.
    """

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    norm: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        """All parts together; what a budget is checked against."""
        return self.embedding + self.attention + self.mlp + self.norm + self.head

    @property
    def non_embedding(self) -> int:
        """Everything except the embedding and an untied head."""
        return self.attention + self.mlp + self.norm

    @property
    def block_matrices(self) -> int:
        """Attention and MLP matrices only; the "body" of scaling laws."""
        return self.attention + self.mlp

    def to_json(self) -> dict[str, int]:
        """Every part by name, with ``total`` and ``non_embedding``."""
        return {**asdict(self), "total": self.total, "non_embedding": self.non_embedding}


@dataclass(frozen=True, slots=True)
class LatencyTerms:
    """T = weight bytes / bandwidth + L · t_layer, in seconds per token, both terms kept apart.

    A thought model, not a measurement: it says nothing about kernels, caches or threads.
    """

    weight_read_s: float
    layers_s: float

    @property
    def total_s(self) -> float:
        """Seconds per token."""
        return self.weight_read_s + self.layers_s


@dataclass(frozen=True, slots=True)
class BlockRecipe:
    """How a block's widths follow from D, so that one number fixes a block: matrix parameters = ``params_per_d2`` · D².

    Attributes:
        q_ratio: H·E / D.
        kv_ratio: K·E / D.
        ff_ratio: F / D.
        mlp_matrices: 3 when gated, else 2.
    """

    q_ratio: float = 1.0
    kv_ratio: float = 1.0
    ff_ratio: float = 4.0
    mlp_matrices: int = 2

    @classmethod
    def of(cls, shape: Shape) -> BlockRecipe:
        """The proportions of ``shape``."""
        width = shape.hidden_size
        matrices = 3 if shape.mlp == "swiglu" else 2
        return cls(shape.q_size / width, shape.kv_size / width, shape.intermediate_size / width, matrices)

    @property
    def params_per_d2(self) -> float:
        """Matrix parameters of one block divided by D²: query and output, key and value, MLP."""
        return 2 * self.q_ratio + 2 * self.kv_ratio + self.mlp_matrices * self.ff_ratio


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One (L, D) pair of an iso-parameter curve; ``params`` counts block matrices at the rounded D."""

    num_layers: int
    hidden_size: int
    params: int

    @property
    def aspect_ratio(self) -> float:
        """D / L."""
        return self.hidden_size / self.num_layers


@dataclass(frozen=True, slots=True)
class VocabularyRow:
    """What one vocabulary leaves for layers at a fixed total.

    Attributes:
        table_params: embedding, plus the head when untied.
        left_params: total minus tables and final norm; negative when the tables alone exceed the total.
        num_layers: whole blocks of the given shape that fit into what is left.
    """

    vocab_size: int
    tied: bool
    table_params: int
    left_params: int
    num_layers: int

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def count_params(shape: Shape) -> Parts:
    """Exact parameters of ``shape``; shared layers and a tied head count once."""
    return _by_role(shape, lambda spec: spec.num_elements)


def count_bytes(shape: Shape, quant: str | BlockFormat | Scheme) -> Parts:
    """Bytes of the stored blocks of a model quantised to ``quant``.

    Norms are f32, embedding and head follow ``formats.head_format`` unless ``quant`` names their format, and matrices whose
    rows the block does not divide fall back to f16; file headers and alignment are not counted.

    Raises:
        UsageError: no such format.
    """
    scheme = scheme_of(quant)
    return _by_role(shape, lambda spec: _stored_bytes(spec, scheme))


def fallback_matrices(shape: Shape, quant: str | BlockFormat | Scheme) -> list[str]:
    """Matrices (without block number) that cannot use ``quant`` because their rows are no multiple of its block."""
    body = scheme_of(quant).body
    specs = [spec for spec in tensor_specs(shape.replace(num_layers=1)) if spec.role in ("attention", "mlp")]
    return [spec.name.removeprefix("blk.0.") for spec in specs if stored_format(spec, body) is not body]


def kv_bytes_per_token(shape: Shape, element_bytes: int = F16.block_bytes) -> int:
    """Bytes one cached token takes over all executed layers: 2 · K · E · element bytes each (F16 unless told)."""
    return shape.num_executed_layers * 2 * shape.kv_size * element_bytes


def bytes_read_per_token(shape: Shape, quant: str | BlockFormat | Scheme, *, context: int = 0) -> int:
    """Bytes one decoded token must read: every executed block, the head, one embedding row, and the cached keys and values.

    A shared block counts once per run, since its weights leave the caches in between. ``context`` is in tokens.
    """
    parts = count_bytes(shape, quant)
    final_norm = 4 * shape.hidden_size
    blocks = parts.attention + parts.mlp + parts.norm - final_norm
    head = parts.embedding if shape.tie_word_embeddings else parts.head
    embedding_row = parts.embedding // shape.vocab_size
    return blocks * shape.layer_sharing + final_norm + head + embedding_row + context * kv_bytes_per_token(shape)


def flops_per_token(shape: Shape, *, context: int = 0) -> int:
    """Floating-point operations of one decoded token: two per matrix parameter used, plus 4·H·E per cached token and layer.

    Norms, rotary turns and softmax are left out (under 1 % at these widths).
    """
    matrices = count_params(shape).block_matrices * shape.layer_sharing + shape.vocab_size * shape.hidden_size
    return 2 * matrices + 4 * shape.q_size * context * shape.num_executed_layers


def aspect_ratio(shape: Shape) -> float:
    """D / L over unique layers."""
    return shape.hidden_size / shape.num_layers


def shape_flags(shape: Shape) -> list[dict[str, str]]:
    """Warnings about the proportions of ``shape``: each has ``flag``, ``text``, and says what suffers.

    Sources: depth pays little per parameter past some point and latency grows with L (arXiv 2310.19956);
    latency-led designs settle on 10-16 layers (arXiv 2603.15954).
    """
    flags = []
    low, high = HEALTHY_ASPECT
    ratio = aspect_ratio(shape)
    band = f"d/L = {ratio:.1f}, healthy is about {low:.0f}-{high:.0f}"
    if ratio < low:
        flags.append(
            _flag(
                "aspect_low",
                f"{band}: deep and thin. Time per token suffers: {shape.num_executed_layers} layers run one after "
                f"another and each has a fixed cost that no bandwidth hides, matrices {shape.hidden_size} wide keep "
                f"kernels below their best rate, and the KV cache grows with every layer. Measure it before training it.",
            )
        )
    elif ratio > high:
        flags.append(
            _flag(
                "aspect_high",
                f"{band}: shallow and wide. Quality suffers: {shape.num_layers} layers give few steps of composition, "
                f"and parameters spent on width return less loss than the same parameters spent on depth.",
            )
        )
    params = count_params(shape)
    share = (params.embedding + params.head) / params.total
    if share > 0.5:
        flags.append(
            _flag(
                "vocabulary_heavy",
                f"{share:.0%} of all parameters are vocabulary tables, so layers get the smaller part; a smaller vocabulary"
                f"{'' if shape.tie_word_embeddings else ' or tying'} buys depth or width.",
            )
        )
    if shape.num_heads // shape.num_kv_heads > 4:
        flags.append(
            _flag(
                "few_kv_heads",
                f"{shape.num_heads // shape.num_kv_heads} query heads share one key/value head; published ablations lose "
                f"quality past 4 (MobileLLM, arXiv 2402.14905).",
            )
        )
    fallbacks = fallback_matrices(shape, "q4_0")
    if fallbacks:
        flags.append(
            _flag(
                "block_fallback",
                f"rows of {', '.join(fallbacks)} are no multiple of 32, so 4-bit and 8-bit files keep them in f16; "
                f"widths that are multiples of 32 avoid that.",
            )
        )
    return flags


def iso_parameter_curve(
    body_params: float, recipe: BlockRecipe, layers: Sequence[int], *, multiple: int = 32
) -> list[CurvePoint]:
    """The (L, D) pairs whose block matrices hold ``body_params``: D = sqrt(body / (L · params_per_d2)), rounded.

    Widths are multiples of ``multiple``; layer counts that leave no such width are left out.

    Raises:
        UsageError: the budget is not positive or a layer count is below 1.
    """
    if body_params <= 0 or any(count < 1 for count in layers):
        raise UsageError(
            f"iso-parameter curve: needs a positive budget and layer counts from 1, got {body_params:g} and {list(layers)}"
        )
    points = []
    for count in layers:
        width = round(math.sqrt(body_params / (count * recipe.params_per_d2)) / multiple) * multiple
        if width:
            points.append(CurvePoint(count, width, round(count * recipe.params_per_d2 * width * width)))
    return points


def analytic_latency(weight_bytes: float, bandwidth_bytes_per_s: float, num_layers: int, layer_s: float) -> LatencyTerms:
    """T = weight bytes / bandwidth + L · t_layer.

    Args:
        weight_bytes: bytes read per token.
        bandwidth_bytes_per_s: sustained read bandwidth.
        num_layers: executed layers.
        layer_s: serial seconds per layer that no bandwidth hides (launches, barriers, dependent norms).

    Raises:
        UsageError: the bandwidth is not positive or another number is negative.
    """
    if bandwidth_bytes_per_s <= 0 or min(weight_bytes, num_layers, layer_s) < 0:
        raise UsageError(
            f"latency model: a positive bandwidth and no negative number are needed, got {weight_bytes:g} bytes, "
            f"{bandwidth_bytes_per_s:g} bytes/s, {num_layers} layers, {layer_s:g} s per layer"
        )
    return LatencyTerms(weight_bytes / bandwidth_bytes_per_s, num_layers * layer_s)


def vocabulary_table(shape: Shape, total_params: int, vocab_sizes: Sequence[int] = EXAMPLE_VOCABULARIES) -> list[VocabularyRow]:
    """For each vocabulary, tied and untied: what ``total_params`` leaves for blocks as wide as those of ``shape``."""
    width = shape.hidden_size
    block = count_params(shape.replace(num_layers=1)).non_embedding - width
    rows = []
    for vocab_size in vocab_sizes:
        for tied in (True, False):
            table = vocab_size * width * (1 if tied else 2)
            left = total_params - table - width
            rows.append(VocabularyRow(vocab_size, tied, table, left, max(0, left // block)))
    return rows


def _by_role(shape: Shape, measure: Callable[[TensorSpec], int]) -> Parts:
    sums = dict.fromkeys(("embedding", "attention", "mlp", "norm", "head"), 0)
    for spec in tensor_specs(shape.replace(num_layers=1)):
        times = shape.num_layers if spec.name.startswith("blk.") else 1
        sums["attention" if spec.role == "bias" else spec.role] += measure(spec) * times
    return Parts(**sums)


def _stored_bytes(spec: TensorSpec, scheme: Scheme) -> int:
    rows = spec.dims[0] if len(spec.dims) == 2 else 1
    return rows * stored_format(spec, scheme).row_bytes(spec.dims[-1])


def _flag(name: str, text: str) -> dict[str, str]:
    return {"flag": name, "text": text}
