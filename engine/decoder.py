"""A loaded model that decodes: packed weights, KV cache, persistent threads. Token ids in, logits out.

Knows nothing of files, text or sampling. Whoever measures names the number of threads; whoever only decodes leaves it to the
decoder, which then takes the fastest and steps aside while another process needs a core.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from deepthin.engine.arrays import F32, F64, I64
from deepthin.engine.cores import usable_cores
from deepthin.engine.cpu import codegen_cpu, simd_target
from deepthin.engine.errors import UsageError
from deepthin.engine.jit import source_digest, user_cache_dir
from deepthin.engine.kernels import attention
from deepthin.engine.kernels import decode as k
from deepthin.engine.kernels.sync import LOSSES, ctl_words, cycles
from deepthin.engine.kv_cache import cache_format_named
from deepthin.engine.model import Model
from deepthin.engine.pace import Pace
from deepthin.engine.plan import Plan, aligned_bytes, block_products, plan_model
from deepthin.engine.rope import rope_tables
from deepthin.engine.shape import MLP_KINDS, Shape
from deepthin.engine.simd import CACHE_F16, CACHE_F32, CACHE_Q8_0, MAX_ROWS, Q8_BIAS, W
from deepthin.engine.threads import Step, ThreadChoice, candidates, measure, remember, remembered

# how long a waiting thread spins before it parks: several times the 50 us that waking a thread on an idle virtual CPU takes;
# between tokens Python samples for some 50 us
_SPIN_S = 200e-6
_IDLE_SPIN_S = 300e-6
_CACHE_CODES = {"f32": CACHE_F32, "f16": CACHE_F16, "q8_0": CACHE_Q8_0}


class Runner:
    """Buffers and threads that run a :class:`~deepthin.engine.plan.Plan`; used by decoders, not by users.

    Buffers are allocated once; every array the workers see keeps its place for the runner's life.
    """

    def __init__(self, plan: Plan, *, threads: int, context: int, kv_format: str) -> None:
        """Allocate, and start ``threads - 1`` workers."""
        shape = plan.shape
        if threads < 1:
            raise UsageError(f"threads is {threads}, but at least 1 is needed")
        if not 1 <= context <= 1 << 22:
            raise UsageError(f"context is {context}, but 1 to {1 << 22} positions can be cached")
        self.plan, self.threads = plan, threads
        self.context = -(-context // W) * W
        hidden, inner, vocab = _padded(shape.hidden_size), _padded(shape.intermediate_size), _padded(shape.vocab_size)
        q_size, kv_size = _padded(shape.q_size), _padded(shape.kv_size)
        self.kv_format = cache_format_named(kv_format)
        key_tile = self.kv_format.key_tile_bytes(shape.head_dim, W)
        value_tile = self.kv_format.value_tile_bytes(shape.head_dim, W)
        widest = -(-max(hidden, inner, q_size, 32) // 32) * 32
        scratch = max(threads, k.ROWS)
        coded = scratch + k.ROWS  # rows of codes: of what enters a product, and of the inner values of an MLP
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
            (k.CACHE_FORMAT, _CACHE_CODES[self.kv_format.name]),
            (k.KEY_TILE, key_tile),
            (k.VALUE_TILE, value_tile),
            (k.ACTIVE, threads),
        ):
            self.ints[index] = value
        self.tokens = np.zeros(k.ROWS, np.int64)
        self.logits = _f32(k.ROWS * vocab)
        self.stamps = np.zeros(plan.num_blocks + 3, np.int64)
        self.ctl = aligned_bytes(ctl_words(threads) * 4).view(np.int32)
        cosine, sine = _turns(shape, self.context)
        tiles = plan.num_blocks * shape.num_kv_heads * self.context // W
        self.keys, self.values = aligned_bytes(tiles * key_tile), aligned_bytes(tiles * value_tile)
        # attention: rows of queries that share the cache, one more for what is being cached, blocks of 32 components
        rows, blocks = max(attention.ROWS_TOGETHER, shape.num_heads // shape.num_kv_heads), -(-shape.head_dim // 32)
        part_row = int(attention.row_stride(shape.head_dim))
        chunk = int(attention.chunk_length(self.context))
        score_room = max(MAX_ROWS * (1 + blocks) * chunk, attention.MAX_CHUNKS + W)
        self.arrays: tuple[Any, ...] = (
            self.ctl, self.ints, np.float32(shape.rms_norm_eps), self.tokens, plan.ops, plan.arena, plan.norms,
            cosine, sine,
            _f32(k.ROWS * hidden), _f32(k.ROWS * (q_size + 2 * kv_size)),
            _f32(scratch * widest), _f32(k.ROWS * widest), _f32(k.ROWS * widest),
            self.logits, self.keys, self.values,
            _f32(scratch * widest), aligned_bytes(coded * widest).view(np.int8),
            _f32(coded * widest // 32), aligned_bytes(coded * widest // 32 * 4).view(np.int32),
            _f32((shape.num_heads + threads * rows) * part_row), _rows(threads, score_room, np.float32),
            _rows(threads, (rows + 1) * blocks * 32, np.float32), _rows(threads, (rows + 1) * blocks * 32, np.int8),
            _rows(threads, (rows + 1) * blocks, np.float32), _rows(threads, (rows + 1) * blocks, np.int32),
            self.stamps,
        )  # fmt: skip
        self._workers = [
            threading.Thread(target=_worker, args=(tid, threads, self.arrays), name=f"deepthin-{tid}", daemon=True)
            for tid in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()
        self._finalizer = weakref.finalize(self, _stop, self.ctl, threads, self._workers)

    def run(self, num_tokens: int, position: int, logits: int, active: int | None = None) -> bool:
        """Run ``self.tokens[:num_tokens]`` at ``position`` on ``active`` threads (default: all).

        ``logits`` is one of the kernels' LOGITS_ values. True if a thread waited so long that another must have lost its core.
        """
        self.ints[k.NUM_TOKENS], self.ints[k.POSITION], self.ints[k.LOGITS] = num_tokens, position, logits
        self.ints[k.ACTIVE] = active or self.threads
        before = self.ctl.item(LOSSES)
        k.work(0, *self.arrays)
        return bool(self.ctl.item(LOSSES) != before)

    def step(self, active: int) -> Step:
        """Time one token at position 0 on ``active`` threads."""
        start = time.perf_counter()
        lost = self.run(1, 0, k.LOGITS_LAST, active)
        return Step(time.perf_counter() - start, lost)

    def fill_cache(self) -> None:
        """Make every cached key and value small and finite, so that their pages exist and reading them costs what it would."""
        for cache in (self.keys, self.values):
            if self.kv_format.name == "f32":
                cache.view(np.float32).fill(0.25)
            else:  # bytes 0x24: codes 36 or -92, and f16 0.016, as value or as scale
                cache.fill(0x24)

    def close(self) -> None:
        """Stop the workers; the runner cannot be used afterwards."""
        self._finalizer()


class Decoder:
    """Decode with ``model``'s weights.

    Args:
        model: shape and weights; not referred to afterwards.
        threads: threads to use for every token; the calling thread is one of them. None takes as many as decode this model
            fastest here (see :attr:`thread_choice`), and fewer while another process holds a core. The logits do not differ.
        context: most positions that can be cached.
        kv_format: how keys and values are cached: f32, f16 or q8_0.

    Raises:
        UnsupportedError: the shape or a format cannot be run; raised before any kernel runs.
        UsageError: threads or context out of range, or no such cache format.
    """

    def __init__(self, model: Model, *, threads: int | None = None, context: int = 2048, kv_format: str = "f32") -> None:
        """Pack the weights, allocate the cache, start the threads."""
        self.shape: Shape = model.shape
        plan = plan_model(model, lanes=W, q8_bias=Q8_BIAS)
        self.thread_choice = choose_threads(plan, kv_format) if threads is None else ThreadChoice(threads, "given")
        self.threads, self.context, self.kv_format = self.thread_choice.threads, context, kv_format
        self._runner = Runner(plan, threads=self.threads, context=context, kv_format=kv_format)
        self._logits = self._runner.logits[: self.shape.vocab_size]
        self._pace = Pace(self.threads) if threads is None else None
        self.simd = simd_target()
        self.bytes_per_token = plan.bytes_per_token
        # rows of the embedding beyond the tokenizer's tokens are padding: they have logits, but stand for no text
        self.num_tokens = self.shape.vocab_size if model.tokenizer is None else len(model.tokenizer.tokens)
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
        return self._logits

    def step(self, token: int) -> F32:
        """Append one id and return the logits f32 [V] after it; a view, valid until the next call.

        As :meth:`prefill` of it, but with next to no Python: after weights have passed through the caches, each of its objects
        is fetched from far away, and checking an array cost 15 to 25 us a token on a Xeon.
        """
        if not (0 <= token < self.shape.vocab_size and self.position < self.context):
            self._checked((token,))  # raises
        self._runner.tokens[0] = token
        self._advance(1, k.LOGITS_LAST)
        return self._logits

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

    @contextlib.contextmanager
    def without(self, products: Collection[str]) -> Iterator[None]:
        """Leave ``products`` (``attn_q`` ... ``ffn_down`` of all blocks, ``output``) out of every token, to see what they cost.

        Their rows keep what the buffers held, so whatever is decoded meanwhile, and cached, is meaningless. A gate and what it
        gates are computed together and left out together.

        Raises:
            UsageError: the shape has no such product.
        """
        plan = self._runner.plan
        names = block_products(self.shape)
        unknown = sorted(set(products) - {*names, "output"} | set(products) & {""})
        if unknown:
            raise UsageError(f"product {unknown[0]!r} is none of this shape's: {', '.join(filter(None, names))}, output")
        inner = {"ffn_gate", "ffn_up"}
        left_out = set(products) | (inner if inner & set(products) else set())
        rows = [block * len(names) + i for block in range(plan.num_blocks) for i, name in enumerate(names) if name in left_out]
        rows += [len(plan.ops) - 1] if "output" in products else []
        tiles = plan.ops[rows, 3]
        plan.ops[rows, 3] = 0
        try:
            yield
        finally:
            plan.ops[rows, 3] = tiles

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
        self._advance(len(part), logits)

    def _advance(self, count: int, logits: int) -> None:
        """Run the ``count`` tokens that lie ready."""
        if self._pace is None:
            self._runner.run(count, self.position, logits)
        elif count == 1:
            start = time.perf_counter()
            lost = self._runner.run(1, self.position, logits, self._pace.active)
            self._pace.record(time.perf_counter() - start if logits != k.LOGITS_NONE else None, lost=lost)
        else:  # threads may wait long for one another with much to do each; if a core was lost, the system switched too
            before = _switches()
            lost = self._runner.run(count, self.position, logits, self._pace.active)
            self._pace.record(None, lost=lost and _switches() > before)
        self.position += count


def choose_threads(plan: Plan, kv_format: str) -> ThreadChoice:
    """The number of threads that decodes ``plan`` fastest here, measured unless a measurement is remembered.

    Measuring takes a few tokens on each count, 0.3 s or so. What is remembered is found again by the CPU, its cores, the
    kernels and the plan's products.
    """
    cores = usable_cores()
    if cores.most == 1:
        return ThreadChoice(1, "only")
    products = hashlib.sha256(np.ascontiguousarray(plan.ops[:, [0, 3, 4]]).tobytes()).hexdigest()
    machine = [platform.machine(), codegen_cpu().name, len(cores.cpus), cores.num_big, cores.quota]
    key = [*machine, simd_target(), source_digest(), plan.shape.text, products, kv_format]
    folder = user_cache_dir() / "threads"
    found = remembered(folder, key, cores.most)
    if found is None:
        with contextlib.closing(Runner(plan, threads=cores.most, context=W, kv_format=kv_format)) as runner:
            runner.step(cores.most)  # kernels are compiled, pages are there
            found = measure(runner.step, candidates(cores.most))
        if not found.disturbed:
            remember(folder, key, found)
    return found


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


def _worker(tid: int, threads: int, arrays: tuple[Any, ...]) -> None:
    """Body of thread ``tid``: put on a core of its own where there are enough, then compiled code until the end.

    It is put there and not held there: when another process takes that CPU, the system must be able to move the worker to one
    that a parked thread has left (held there, 64-layer tokens took up to 80 ms beside one busy process). It is kept from
    slow cores where the fast ones are enough.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity:
        cpus, cores = affinity(0), usable_cores()
        near = cores.near & cpus if threads <= cores.num_big else cpus
        if threads <= len(cores.cpus):
            with contextlib.suppress(OSError):  # a container may forbid it; the threads then run where they are put
                os.sched_setaffinity(0, {cores.cpus[tid]})
                os.sched_setaffinity(0, near or cpus)
    k.work(tid, *arrays)


def _switches() -> int:
    """Involuntary context switches of this process so far; where nobody counts them, always another number."""
    if sys.platform == "win32":
        return time.perf_counter_ns()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _stop(ctl: Any, threads: int, workers: list[threading.Thread]) -> None:
    if workers:
        k.stop_workers(ctl, threads)
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
