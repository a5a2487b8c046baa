"""Decode steps of a whole model with random weights through the ordinary decoder: the truth that sums of parts are held to."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import numpy as np

from deepthin.engine.decoder import Decoder
from deepthin.engine.model import Model, random_model
from deepthin.engine.shape import Shape
from deepthin.engine.synthetic import StepTimes


class WholeModel:
    """A :class:`~deepthin.profiles.step_timer.StepTimer` over real packed weights of every block.

    Args:
        shape: the model's; making its weights takes about 30 ns a parameter.
        quant: format of its blocks.
        threads: threads to decode with.
        context: tokens to cache before the first step.
        kv_format: how keys and values are cached.
        model: weights in that shape and format; random ones are made when None.
    """

    def __init__(
        self, shape: Shape, quant: str, threads: int, context: int, kv_format: str, *, model: Model | None = None
    ) -> None:
        self._decoder = Decoder(
            model or random_model(shape, quant=quant), threads=threads, context=context + 1, kv_format=kv_format
        )
        self._random = np.random.Generator(np.random.PCG64(0))
        if context:
            self._decoder.prefill(self._tokens(context))

    def run(self, steps: int, *, position: int = 0) -> StepTimes:
        """Decode ``steps`` random tokens, each at cache position ``position``; ``total_s`` is the time of ``Decoder.step``."""
        out = np.empty((4, steps), np.float64)
        for step, token in enumerate(self._tokens(steps)):
            self._decoder.position = position
            start = time.perf_counter()
            self._decoder.step(token)
            total = time.perf_counter() - start
            times = self._decoder.last_times()
            out[:, step] = total, times.embed_s, times.blocks_s.sum(), times.head_s
        return StepTimes(*out)

    def prompt(self, tokens: int) -> float:
        """Seconds to take in a prompt of ``tokens`` random ids into an empty cache; what was cached is overwritten."""
        ids = self._tokens(tokens)
        self._decoder.reset()
        start = time.perf_counter()
        self._decoder.prefill(ids)
        return time.perf_counter() - start

    def close(self) -> None:
        """Stop the threads."""
        self._decoder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _tokens(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._decoder.shape.vocab_size, count).tolist()
        return ids
