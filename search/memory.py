"""Bytes a decoder needs while it runs: the weights, the cached keys and values, and scratch. Arithmetic, no allocation.

D width   F MLP width   V vocabulary   E head dim
"""

from __future__ import annotations

from dataclasses import dataclass

from deepthin.engine.accounting import count_bytes, kv_bytes_per_token
from deepthin.engine.shape import Shape

ROWS = 32  # tokens that go through the blocks together, as in engine/kernels/decode.py; tests hold the two equal
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by use."""

    weights: int
    cache: int
    scratch: int

    @property
    def total(self) -> int:
        """Everything together; what ``--ram`` limits."""
        return self.weights + self.cache + self.scratch

    def to_json(self) -> dict[str, int]:
        """All uses by name, with ``total``."""
        return {"weights": self.weights, "cache": self.cache, "scratch": self.scratch, "total": self.total}


def memory(shape: Shape, quant: str, context: int) -> Memory:
    """What decoding ``shape`` takes with ``context`` tokens in an F16 cache; the program itself apart.

    Scratch is what this engine allocates for one thread: rows of activations and logits, and the rotary tables.

    Raises:
        UsageError: no such format.
    """
    widest = max(shape.hidden_size, shape.intermediate_size, shape.q_size)
    row = shape.vocab_size + shape.hidden_size + shape.q_size + 2 * shape.kv_size + 4 * widest
    scratch = _FLOAT * (ROWS * row + context * shape.head_dim) + ROWS * widest
    return Memory(count_bytes(shape, quant).total, context * kv_bytes_per_token(shape), scratch)
