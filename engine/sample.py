"""Choose the next token id from logits; explicit generator, no global state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.engine.errors import FormatError, UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose: ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep every token.

    Filters apply in the order of llama.cpp and transformers: temperature, then top-k, then top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: a value is out of range.
        """
        if not 0.0 <= self.temperature <= 100.0:
            raise UsageError(f"temperature is {self.temperature}, but 0 (greedy) to 100 is needed")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}, but 0 (off) or a positive number is needed")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p is {self.top_p}, but a number above 0 and at most 1 is needed")


def sample(logits: F32, sampling: Sampling, generator: np.random.Generator) -> int:
    """One token id drawn from ``logits`` f32 [V]; the lowest id wins an exact tie under greedy choice.

    Raises:
        FormatError: the largest logit is NaN or infinite, so there is nothing to choose by.
    """
    best = int(np.argmax(logits))  # of NaN, if there is one
    if not np.isfinite(logits[best]):
        raise FormatError(
            f"logit {best} is {logits[best]}, so no token can be chosen; the weights hold numbers that are not finite or huge"
        )
    if sampling.temperature == 0.0:
        return best
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    probabilities = np.exp(scaled[order] - scaled[order[0]])
    probabilities /= probabilities.sum()
    if sampling.top_p < 1.0:
        keep = int(np.searchsorted(np.cumsum(probabilities), sampling.top_p)) + 1
        order, probabilities = order[:keep], probabilities[:keep]
        probabilities /= probabilities.sum()
    at = np.searchsorted(np.cumsum(probabilities), generator.random())
    return int(order[min(int(at), len(order) - 1)])  # the rounded sum may end below the number drawn
