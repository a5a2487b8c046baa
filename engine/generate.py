"""Prefill a prompt and decode new tokens; ids only, text belongs to the tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from deepthin.engine.decoder import Decoder
from deepthin.engine.errors import UsageError
from deepthin.engine.sample import Sampling, sample


@dataclass(frozen=True, slots=True)
class Generation:
    """New token ids and how long they took.

    Attributes:
        token_ids: generated ids, a stop token included when one was met.
        prefill_s: seconds until the first logits (time to first token, sampling apart).
        decode_s: seconds of all later steps, sampling included.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens per second."""
        return self.num_prompt_tokens / self.prefill_s

    @property
    def decode_tok_s(self) -> float | None:
        """Decoded tokens per second after the first; None when only one token came out."""
        steps = len(self.token_ids) - 1
        return steps / self.decode_s if steps > 0 else None


def generate(
    decoder: Decoder,
    ids: Sequence[int],
    num_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: Collection[int] = (),
    on_token: Callable[[int], None] | None = None,
) -> Generation:
    """Continue ``ids`` by up to ``num_tokens`` tokens, from an empty cache; only by tokens that the tokenizer has.

    Args:
        decoder: reset first.
        ids: prompt, at least one id.
        num_tokens: most tokens to generate.
        sampling: greedy by default.
        seed: of the generator used for sampling.
        stop: ids that end the generation.
        on_token: called with each id as it appears.

    Raises:
        UsageError: the prompt is empty, or prompt and new tokens do not fit the decoder's context.
        FormatError: the weights lead to logits that are not finite.
    """
    if num_tokens < 1:
        raise UsageError(f"{num_tokens} new tokens were asked for; ask for at least 1")
    if len(ids) + num_tokens - 1 > decoder.context:
        raise UsageError(
            f"a prompt of {len(ids)} tokens and {num_tokens} new ones do not fit a context of {decoder.context}; "
            f"shorten either or ask for a larger context"
        )
    sampling = sampling or Sampling()
    generator = np.random.Generator(np.random.PCG64(seed))
    decoder.reset()
    start = time.perf_counter()
    logits = decoder.prefill(ids)
    first = time.perf_counter()
    new: list[int] = []
    while True:
        token = sample(logits[: decoder.num_tokens], sampling, generator)
        new.append(token)
        if on_token:
            on_token(token)
        if token in stop or len(new) == num_tokens:
            return Generation(tuple(new), len(ids), first - start, time.perf_counter() - first)
        logits = decoder.step(token)
