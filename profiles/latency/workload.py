"""What one call of a runtime has to do for a shape: bytes to read, products to form, vectors to touch. Counts, no times.

L executed layers   D hidden size   H query heads   K key/value heads   E head dim   F MLP width   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

from deepthin.engine.accounting import count_bytes, count_params, fallback_matrices
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import scheme_named
from deepthin.engine.shape import Shape

DECODE, PREFILL = "decode", "prefill"
TESTS = (DECODE, PREFILL)


@dataclass(frozen=True, slots=True)
class Workload:
    """One decoded token at ``context`` cached ones, or a prompt of ``tokens`` after ``context`` cached ones.

    Attributes:
        shape: the model's.
        quant: how it is stored, as ``formats.scheme_named`` understands it.
        test: ``decode`` or ``prefill``.
        tokens: taken in by the call; 1 when decoding.
        context: cached before it.

    Raises:
        UsageError: an unknown test or format, or a count out of range.
    """

    shape: Shape
    quant: str
    test: str = DECODE
    tokens: int = 1
    context: int = 0

    def __post_init__(self) -> None:
        """Check the counts and the format's name."""
        scheme_named(self.quant)
        if self.test not in TESTS:
            raise UsageError(f"test {self.test!r} is unknown; use {' or '.join(TESTS)}")
        if self.tokens < 1 or self.context < 0 or (self.test == DECODE and self.tokens != 1):
            raise UsageError(
                f"{self.test} of {self.tokens} tokens after {self.context}: tokens are decoded one by one, "
                f"a prompt has at least one, and no fewer than 0 are cached"
            )

    @property
    def body_bytes(self) -> int:
        """Stored bytes of the blocks' matrices, each once."""
        parts = count_bytes(self.shape, self.quant)
        return parts.attention + parts.mlp

    @property
    def body_read(self) -> int:
        """Bytes of the blocks' matrices read in one pass; shared blocks are read once per run."""
        return self.body_bytes * self.shape.layer_sharing

    @property
    def body_products(self) -> int:
        """Multiply-adds of the blocks' matrices for one token."""
        return count_params(self.shape).block_matrices * self.shape.layer_sharing

    @property
    def body_rows(self) -> int:
        """Rows of the blocks' matrices, each as often as it is multiplied for one token."""
        shape = self.shape
        inner = 2 if shape.mlp == "swiglu" else 1
        return self.layers * (shape.q_size + 2 * shape.kv_size + 2 * shape.hidden_size + inner * shape.intermediate_size)

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head."""
        parts = count_bytes(self.shape, self.quant)
        return parts.embedding if self.shape.tie_word_embeddings else parts.head

    @property
    def head_products(self) -> int:
        """Multiply-adds of the head for one token."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def body_quant(self) -> str:
        """Format of the blocks' matrices."""
        return scheme_named(self.quant).body.name

    @property
    def head_quant(self) -> str:
        """Format of the head."""
        return scheme_named(self.quant).head.name

    @property
    def layers(self) -> int:
        """Executed layers."""
        return self.shape.num_executed_layers

    @property
    def vector_elements(self) -> int:
        """Values of the vectors between products, for one token and all layers: norms, rotary turns, MLP gate, residuals."""
        shape = self.shape
        gates = 3 if shape.mlp == "swiglu" else 2
        return self.layers * (4 * shape.hidden_size + 2 * shape.q_size + 2 * shape.kv_size + gates * shape.intermediate_size)

    @property
    def attended(self) -> float:
        """Cached positions attended to, summed over the tokens of the call (each attends to itself and all before it)."""
        return self.tokens * (self.context + (self.tokens + 1) / 2)

    @property
    def cached_elements(self) -> int:
        """Elements of keys and values of one position, all layers."""
        return 2 * self.shape.kv_size * self.layers

    @property
    def attention_products(self) -> int:
        """Multiply-adds of queries with one cached position, keys and values, all layers."""
        return 2 * self.shape.q_size * self.layers

    @property
    def scores(self) -> float:
        """Attention scores whose exponential is taken, all heads and layers."""
        return self.attended * self.shape.num_heads * self.layers

    @property
    def has_fallback(self) -> bool:
        """Whether some rows are no multiple of the format's block and stay f16."""
        return bool(fallback_matrices(self.shape, self.quant))
