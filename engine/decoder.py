"""A loaded model that decodes: packed weights, KV cache, persistent threads. Token ids in, logits out.

Knows nothing of files, text or sampling.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from deepthin.engine.arrays import F32, F64, I64
from deepthin.engine.cpu import simd_target
from deepthin.engine.errors import UsageError
from deepthin.engine.kernels import decode as k
from deepthin.engine.kernels.sync import ctl_words, cycles
from deepthin.engine.model import Model
from deepthin.engine.plan import Plan, aligned_bytes, plan_model
from deepthin.engine.rope import rope_tables
from deepthin.engine.shape import MLP_KINDS, Shape
from deepthin.engine.simd import Q8_BIAS, W

# how long a waiting thread spins before it parks: a barrier inside a token is reached by all within some 10 us unless one
# of them lost its core; between tokens Python samples for some 50 us
_SPIN_S = 50e-6
_IDLE_SPIN_S = 300e-6


def default_threads() -> int:
    """Number of CPUs this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Runner:
    """Buffers and threads that run a :class:`~deepthin.engine.plan.Plan`; used by decoders, not by users.

    Buffers are allocated once; every array the workers see keeps its place for the runner's life.
    """

    def __init__(self, plan: Plan, *, threads: int, context: int) -> None:
        """Allocate, and start ``threads - 1`` workers."""
        shape = plan.shape
        if threads < 1:
            raise UsageError(f"threads is {threads}, but at least 1 is needed")
        if not 1 <= context <= 1 << 22:
            raise UsageError(f"context is {context}, but 1 to {1 << 22} positions can be cached")
        self.plan, self.threads = plan, threads
        self.context = -(-context // W) * W
        hidden, inner, vocab = _padded(shape.hidden_size), _padded(shape.intermediate_size), _padded(shape.vocab_size)
        head, q_size, kv_size = _padded(shape.head_dim), _padded(shape.q_size), _padded(shape.kv_size)
        widest = -(-max(hidden, inner, q_size, 32) // 32) * 32
        scratch = max(threads, k.ROWS)
        self.vocab_padded = vocab
        rate = cycles_per_second()
        self.ints = np.zeros(k.NUM_INTS, np.int64)
        for index, value in (
            (k.NUM_BLOCKS, plan.num_blocks),
            (k.HIDDEN, shape.hidden_size),
            (k.HEADS, shape.num_heads),
            (k.KV_HEADS, shape.num_kv_heads),
            (k.HEAD_DIM, shape.head_dim),
            (k.INNER, shape.intermediate_size),
            (k.VOCAB, shape.vocab_size),
            (k.CONTEXT, self.context),
            (k.SPIN, int(_SPIN_S * rate)),
            (k.IDLE_SPIN, int(_IDLE_SPIN_S * rate)),
            (k.WIDEST, widest),
            (k.MLP, MLP_KINDS.index(shape.mlp)),
            (k.QK_NORM, shape.qk_norm),
            (k.QKV_BIAS, shape.qkv_bias),
            (k.NOPE_EVERY, shape.nope_every),
            (k.RUNS, plan.runs),
        ):
            self.ints[index] = value
        self.tokens = np.zeros(k.ROWS, np.int64)
        self.logits = _f32(k.ROWS * vocab)
        self.stamps = np.zeros(plan.num_blocks + 3, np.int64)
        self.ctl = aligned_bytes(ctl_words(threads) * 4).view(np.int32)
        cosine, sine = _turns(shape, self.context)
        cached = plan.num_blocks * shape.num_kv_heads * self.context
        self.keys, self.values = np.zeros(cached * shape.head_dim, np.float32), np.zeros(cached * head, np.float32)
        self.arrays: tuple[Any, ...] = (
            self.ctl, self.ints, np.float32(shape.rms_norm_eps), self.tokens, plan.ops, plan.arena, plan.norms,
            cosine, sine,
            _f32(k.ROWS * hidden), _f32(k.ROWS * (q_size + 2 * kv_size)),
            _f32(k.ROWS * widest), _f32(k.ROWS * widest), _f32(k.ROWS * widest),
            self.logits, self.keys, self.values,
            _f32(scratch * widest), aligned_bytes(scratch * widest).view(np.int8),
            _f32(scratch * widest // 32), aligned_bytes(scratch * widest // 32 * 4).view(np.int32),
            _rows(threads, self.context, np.float32), _rows(threads, 2 * head, np.float32),
            self.stamps,
        )  # fmt: skip
        self._workers = [
            threading.Thread(target=k.work, args=(tid, threads, *self.arrays), name=f"deepthin-{tid}", daemon=True)
            for tid in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()
        self._finalizer = weakref.finalize(self, _stop, self.ctl, self._workers)

    def run(self, num_tokens: int, position: int, logits: int) -> None:
        """Run ``self.tokens[:num_tokens]`` at ``position``; ``logits`` is one of the kernels' LOGITS_ values."""
        self.ints[k.NUM_TOKENS], self.ints[k.POSITION], self.ints[k.LOGITS] = num_tokens, position, logits
        k.work(0, self.threads, *self.arrays)

    def fill_cache(self, value: float) -> None:
        """Write every cached key and value, so that their pages exist and reading them costs what it would."""
        self.keys.fill(value)
        self.values.fill(value)

    def close(self) -> None:
        """Stop the workers; the runner cannot be used afterwards."""
        self._finalizer()


class Decoder:
    """Decode with ``model``'s weights.

    Args:
        model: shape and weights; not referred to afterwards.
        threads: threads to use; the calling thread is one of them. Default: every CPU this process may use.
        context: most positions that can be cached.

    Raises:
        UnsupportedError: the shape or a format cannot be run; raised before any kernel runs.
        UsageError: threads or context out of range.
    """

    def __init__(self, model: Model, *, threads: int | None = None, context: int = 2048) -> None:
        """Pack the weights, allocate the cache, start the threads."""
        self.shape: Shape = model.shape
        plan = plan_model(model, lanes=W, q8_bias=Q8_BIAS)
        self._runner = Runner(plan, threads=threads or default_threads(), context=context)
        self.threads, self.context = self._runner.threads, context
        self.simd = simd_target()
        self.bytes_per_token = plan.bytes_per_token
        self.position = 0

    def reset(self) -> None:
        """Forget every cached position."""
        self.position = 0

    def prefill(self, ids: Sequence[int]) -> F32:
        """Append ``ids`` and return the logits f32 [V] after the last; a view, valid until the next call.

        Raises:
            UsageError: no ids, an id outside the vocabulary, or no room left in the cache.
        """
        tokens = self._checked(ids)
        for start in range(0, len(tokens), k.ROWS):
            part = tokens[start : start + k.ROWS]
            last = start + len(part) == len(tokens)
            self._append(part, k.LOGITS_LAST if last else k.LOGITS_NONE)
        return self._runner.logits[: self.shape.vocab_size]

    def step(self, token: int) -> F32:
        """Append one id and return the logits f32 [V] after it; a view, valid until the next call."""
        return self.prefill((token,))

    def logits(self, ids: Sequence[int]) -> F32:
        """Append ``ids`` and return the logits f32 [S, V] after each of them."""
        tokens = self._checked(ids)
        out = np.empty((len(tokens), self.shape.vocab_size), np.float32)
        for start in range(0, len(tokens), k.ROWS):
            part = tokens[start : start + k.ROWS]
            self._append(part, k.LOGITS_ALL)
            rows = self._runner.logits.reshape(k.ROWS, -1)[: len(part), : self.shape.vocab_size]
            out[start : start + len(part)] = rows
        return out

    def last_times(self) -> TokenTimes:
        """Where the time of the last decoded token went, from cycle counts taken by thread 0 at each block's last barrier."""
        return token_times(self._runner.stamps, self._runner.plan.num_blocks)

    def close(self) -> None:
        """Stop the threads."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _checked(self, ids: Sequence[int]) -> I64:
        tokens = np.asarray(ids, np.int64).reshape(-1)
        if not len(tokens):
            raise UsageError("no token ids were given; a prompt needs at least one")
        bad = tokens[(tokens < 0) | (tokens >= self.shape.vocab_size)]
        if len(bad):
            raise UsageError(f"token id {bad[0]} is outside the vocabulary of {self.shape.vocab_size}")
        if self.position + len(tokens) > self.context:
            raise UsageError(
                f"{len(tokens)} more tokens do not fit: {self.position} of {self.context} cached positions are taken; "
                f"ask for a larger context"
            )
        return tokens

    def _append(self, part: I64, logits: int) -> None:
        self._runner.tokens[: len(part)] = part
        self._runner.run(len(part), self.position, logits)
        self.position += len(part)


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Seconds one token took: embedding row, each block, output head (0 where no logits were asked for)."""

    embed_s: float
    blocks_s: F64
    head_s: float


def token_times(stamps: I64, num_blocks: int) -> TokenTimes:
    """Cycle counts of one token as seconds."""
    seconds = np.diff(stamps[: num_blocks + 3].astype(np.float64)) / cycles_per_second()
    return TokenTimes(float(seconds[0]), seconds[1 : num_blocks + 1], max(0.0, float(seconds[num_blocks + 1])))


_rate: list[float] = []


def cycles_per_second() -> float:
    """Rate of the cycle counter, calibrated once per process against ``perf_counter`` over 20 ms."""
    if not _rate:
        cycles()
        start_s, start = time.perf_counter(), cycles()
        time.sleep(0.02)
        end, end_s = cycles(), time.perf_counter()
        _rate.append((end - start) / (end_s - start_s))
    return _rate[0]


def _turns(shape: Shape, context: int) -> tuple[F32, F32]:
    """Cosines and sines f32 [(context + 1) * E / 2]; the last position is no turn at all, for blocks without positions."""
    cosine, sine = rope_tables(shape.head_dim, shape.rope_theta, shape.rope_scaling, context + 1)
    cosine[context], sine[context] = 1, 0
    return cosine.reshape(-1), sine.reshape(-1)


def _stop(ctl: Any, workers: list[threading.Thread]) -> None:
    if workers:
        k.stop_workers(ctl)
        for worker in workers:
            worker.join()


def _padded(width: int) -> int:
    return -(-width // W) * W


def _f32(count: int) -> F32:
    return aligned_bytes(count * 4).view(np.float32)


def _rows(threads: int, width: int, dtype: Any) -> Any:
    """One 64-byte aligned row of scratch a thread, no cache line shared."""
    item = np.dtype(dtype).itemsize
    stride = -(-width * item // 64) * 64
    return aligned_bytes(threads * stride).view(dtype).reshape(threads, stride // item)
