"""Decode steps over made-up weights: what a shape costs here, without generating or packing a model for it.

All shapes and formats share one arena of plausible bytes; a shape only gets tables that point into it. The kernels, the
threads and the order of memory reads are those of a real model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from deepthin.engine.arrays import F32, F64, U8
from deepthin.engine.decoder import Runner, token_times
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import BlockFormat, scheme_named
from deepthin.engine.kernels import decode as k
from deepthin.engine.pack import align, packed_sizes
from deepthin.engine.plan import aligned_bytes, plan_synthetic
from deepthin.engine.shape import Shape
from deepthin.engine.simd import W

_PATTERN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each decoded token, f64 [steps] each.

    Attributes:
        total_s: wall time of the call, wake-up of the threads and the last barrier included.
        embed_s: fetching the embedding row.
        blocks_s: all blocks together.
        head_s: final norm and output head.
    """

    total_s: F64
    embed_s: F64
    blocks_s: F64
    head_s: F64


class SyntheticDecoder:
    """Times decode steps of ``shape`` stored as ``quant`` with ``num_blocks`` distinct blocks in memory.

    Args:
        shape: widths, heads and vocabulary; its ``num_layers`` does not matter here.
        quant: how it is stored, as ``formats.scheme_named`` understands it.
        threads: threads to use, the calling one included.
        context: positions the cache holds; filled with values, so that attention at any position reads real memory.
        num_blocks: blocks run per step. Their bytes and the head's make up the working set.
        kv_format: how keys and values are cached: f32, f16 or q8_0.

    Raises:
        UnsupportedError: the shape cannot be run. FormatError: a width no multiple of the format's block.
    """

    def __init__(
        self, shape: Shape, quant: str, *, threads: int, context: int, num_blocks: int, kv_format: str = "f32"
    ) -> None:
        """Lay the plan over the shared arena and start the threads; packs nothing."""
        if num_blocks < 1:
            raise UsageError(f"num_blocks is {num_blocks}, but at least 1 block must run")
        scheme = scheme_named(quant)
        body, head = scheme.body, scheme.head
        data, scales = _needed(shape, body, head, num_blocks)
        arena, scales_at = _Arena.of(data, scales)
        plan = plan_synthetic(shape, body, head, num_blocks, arena, scales_at, lanes=W)
        self._runner = Runner(plan, threads=threads, context=context, kv_format=kv_format)
        self._runner.fill_cache()
        self.bytes_per_block, self.head_bytes = plan.block_bytes, plan.head_bytes
        self.bytes_per_token = plan.bytes_per_token
        self.num_blocks = num_blocks
        self._vocab = shape.vocab_size
        self._token = 0

    def run(self, steps: int, *, position: int = 0) -> StepTimes:
        """Decode ``steps`` tokens, each at cache position ``position``, and return where the time went."""
        if steps < 1 or not 0 <= position < self._runner.context:
            raise UsageError(
                f"run needs at least 1 step and a position below {self._runner.context}, not {steps} and {position}"
            )
        out = np.empty((4, steps), np.float64)
        for step in range(steps):
            self._token = (self._token * 7919 + 104729) % self._vocab  # another embedding row each time
            self._runner.tokens[0] = self._token
            start = time.perf_counter_ns()
            self._runner.run(1, position, k.LOGITS_LAST)
            total = (time.perf_counter_ns() - start) * 1e-9
            times = token_times(self._runner.stamps, self.num_blocks)
            out[:, step] = total, times.embed_s, times.blocks_s.sum(), times.head_s
        return StepTimes(*out)

    def prompt(self, tokens: int, *, position: int = 0) -> float:
        """Seconds to take in a prompt of ``tokens`` from ``position`` on, in as many passes as a real decoder makes.

        Raises:
            UsageError: no tokens, or more than the cache has room for.
        """
        if tokens < 1 or position < 0 or position + tokens > self._runner.context:
            raise UsageError(
                f"a prompt of {tokens} tokens from {position} on does not fit {self._runner.context} positions, or is empty"
            )
        self._runner.tokens[:] = np.arange(1, k.ROWS + 1) * 7919 % self._vocab
        start = time.perf_counter_ns()
        for first in range(0, tokens, k.ROWS):
            part = min(k.ROWS, tokens - first)
            is_last = first + part == tokens
            self._runner.run(part, position + first, k.LOGITS_LAST if is_last else k.LOGITS_NONE)
        return (time.perf_counter_ns() - start) * 1e-9

    def last_logits(self) -> F32:
        """Logits f32 [V] of the last step; meaningless, but finite."""
        return self._runner.logits[: self._vocab]

    def close(self) -> None:
        """Stop the threads; the shared arena stays for the next shape."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _needed(shape: Shape, body: BlockFormat, head: BlockFormat, num_blocks: int) -> tuple[int, int]:
    """Bytes of data and of scales that ``num_blocks`` blocks and the tables take."""
    width, inner = shape.hidden_size, shape.intermediate_size
    matrices = [(shape.q_size, width), (shape.kv_size, width), (shape.kv_size, width), (width, shape.q_size)]
    matrices += [(inner, width), (inner, width), (width, inner)]
    parts = [(packed_sizes(body, rows, cols, W), num_blocks) for rows, cols in matrices]
    parts.append((packed_sizes(head, shape.vocab_size, width, W), 1 if shape.tie_word_embeddings else 2))
    return sum(align(size[0]) * n for size, n in parts), sum(align(size[1]) * n for size, n in parts)


class _Arena:
    """The bytes every synthetic plan points into: data in front, scales behind; grown when a shape needs more."""

    _bytes: U8 = np.zeros(0, np.uint8)
    _scales_at: int = 0

    @classmethod
    def of(cls, data: int, scales: int) -> tuple[U8, int]:
        """The arena and where its scales begin, with room for ``data`` and ``scales`` bytes."""
        if data > cls._scales_at or scales > len(cls._bytes) - cls._scales_at:
            data = align(max(data, cls._scales_at))
            scales = align(max(scales, len(cls._bytes) - cls._scales_at))
            cls._bytes = np.zeros(0, np.uint8)  # let the old one go first
            arena = aligned_bytes(data + scales)
            _fill(arena[:data], _data_pattern())
            _fill(arena[data:], np.full(_PATTERN_BYTES // 2, 0.01, np.float16).view(np.uint8))
            cls._bytes, cls._scales_at = arena, data
        return cls._bytes, cls._scales_at


def _data_pattern() -> U8:
    """Random bytes that are normal numbers of sensible size whether read as f32, f16 or bf16, and any integers.

    Each 16-bit word has f16 exponent 14 (0.5 to 1 in size), which as the upper half of an f32 means 2^-15 to 2^-8.
    """
    words = np.random.Generator(np.random.PCG64(0)).integers(0, 1 << 16, _PATTERN_BYTES // 2, np.uint16)
    return ((words & 0x83FF) | (14 << 10)).astype(np.uint16).view(np.uint8)


def _fill(target: U8, pattern: U8) -> None:
    for start in range(0, len(target), len(pattern)):
        part = target[start : start + len(pattern)]
        part[:] = pattern[: len(part)]
