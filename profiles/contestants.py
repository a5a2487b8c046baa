"""Who is timed in a bench: our engine in this process, each peer in a child of its own; the same few calls to all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deepthin.engine.arrays import F32, F64
from deepthin.engine.child import Child
from deepthin.engine.decoder import Decoder
from deepthin.engine.errors import PeerError, UsageError
from deepthin.engine.model import Model


@dataclass(frozen=True, slots=True)
class PeerKind:
    """How a peer is started and what it reads.

    Attributes:
        module: served by a :class:`Child`.
        suffix: of the model file it reads; empty for a folder.
    """

    module: str
    suffix: str


PEERS = {
    "llama.cpp": PeerKind("deepthin.profiles.peer_llama_bench", ".gguf"),
    "onnxruntime": PeerKind("deepthin.profiles.peer_ort_bench", ".onnx"),
    "genai": PeerKind("deepthin.profiles.peer_genai_bench", ""),
}


def peer_kind(name: str) -> PeerKind:
    """The peer called ``name``.

    Raises:
        UsageError: no such peer; the message lists the known ones.
    """
    if name not in PEERS:
        raise UsageError(f"runtime {name!r} is unknown; bench against {' or '.join(PEERS)}")
    return PEERS[name]


class Contestant(Protocol):
    """One runtime with one model loaded."""

    @property
    def version(self) -> str:
        """Version of the runtime."""

    @property
    def pid(self) -> int | None:
        """Its own process, if it has one."""

    def prompt(self, ids: Sequence[int], before: Sequence[int]) -> float:
        """Seconds to take in ``ids`` as one prompt, after ``before`` (untimed) into an empty cache."""

    def decode(self, ids: Sequence[int], before: Sequence[int]) -> float:
        """Seconds to take in ``ids`` one by one, after ``before`` (untimed) into an empty cache."""

    def answer(self, prompt: Sequence[int], ids: Sequence[int], before: Sequence[int]) -> float:
        """Seconds to take in ``prompt`` as one, then ``ids`` one by one, after ``before`` (untimed) into an empty cache."""

    def logits(self, ids: Sequence[int], before: Sequence[int]) -> F32:
        """Logits f32 [S, V] after each of ``ids``, taken in one by one after ``before``."""

    def close(self) -> None:
        """Stop its threads or process."""


class Engine:
    """Our decoder; its worker threads park within a millisecond of the last call.

    Args:
        model: shape and weights.
        threads: threads to decode with.
        context: cached tokens to make room for.
        kv_format: how keys and values are cached.
    """

    pid: int | None = None

    def __init__(self, model: Model, threads: int, context: int, kv_format: str = "f16") -> None:
        from deepthin._version import VERSION

        self._decoder = Decoder(model, threads=threads, context=context, kv_format=kv_format)
        self.version = VERSION
        self.simd = self._decoder.simd
        self.bytes_per_token = self._decoder.bytes_per_token

    def prompt(self, ids: Sequence[int], before: Sequence[int]) -> float:
        """See :class:`Contestant`."""
        self._start(before)
        start = time.perf_counter()
        self._decoder.prefill(ids)
        return time.perf_counter() - start

    def decode(self, ids: Sequence[int], before: Sequence[int]) -> float:
        """See :class:`Contestant`."""
        self._start(before)
        step = self._decoder.step
        start = time.perf_counter()
        for token in ids:
            step(token)
        return time.perf_counter() - start

    def answer(self, prompt: Sequence[int], ids: Sequence[int], before: Sequence[int]) -> float:
        """See :class:`Contestant`."""
        self._start(before)
        step = self._decoder.step
        start = time.perf_counter()
        self._decoder.prefill(prompt)
        for token in ids:
            step(token)
        return time.perf_counter() - start

    def logits(self, ids: Sequence[int], before: Sequence[int]) -> F32:
        """See :class:`Contestant`."""
        self._start(before)
        return np.stack([self._decoder.step(token).copy() for token in ids])

    def greedy(self, first: int, count: int) -> list[int]:
        """``first`` and the ``count - 1`` tokens of largest logit that follow it."""
        self._decoder.reset()
        ids = [first]
        while len(ids) < count:
            ids.append(int(self._decoder.step(ids[-1]).argmax()))
        return ids

    def fill(self, ids: Sequence[int]) -> None:
        """Cache ``ids``, so that positions up to their number may be decoded at."""
        self._start(ids)

    def parts(self, ids: Sequence[int], position: int) -> F64:
        """Seconds f64 [tokens, blocks + 3] of each of ``ids``, decoded from ``position`` on: all, row, blocks, head."""
        self._decoder.position = position
        rows = []
        for token in ids:
            start = time.perf_counter()
            self._decoder.step(token)
            whole = time.perf_counter() - start
            times = self._decoder.last_times()
            rows.append(np.concatenate([[whole, times.embed_s], times.blocks_s, [times.head_s]]))
        return np.stack(rows)

    def without(self, products: Sequence[str]) -> AbstractContextManager[None]:
        """Leave products out of every token meanwhile."""
        return self._decoder.without(products)

    def close(self) -> None:
        """Stop the threads."""
        self._decoder.close()

    def _start(self, before: Sequence[int]) -> None:
        self._decoder.reset()
        if before:
            self._decoder.prefill(before)


class Peer:
    """A peer runtime in its own process.

    Args:
        name: a key of :data:`PEERS`.
        path: the model file.
        threads: threads to decode with.
        context: cached tokens to make room for.
        deadline_s: seconds for each call.

    Raises:
        PeerMissingError: the runtime is not installed.
        PeerError: it refuses the model, died, or missed its deadline.
    """

    def __init__(self, name: str, path: Path, threads: int, context: int, *, deadline_s: float = 300.0) -> None:
        self.name = name
        self._child = Child(peer_kind(name).module, peer=name, deadline_s=deadline_s)
        try:
            self.version = str(self._child.call("version")["version"])
            self.load(path, threads, context)
        except BaseException:
            self._child.close()
            raise

    def load(self, path: Path, threads: int, context: int) -> None:
        """Replace the loaded model, in the same process.

        Raises:
            PeerError: it refuses the model, died, or missed its deadline.
        """
        self._child.call("load", path=str(path), threads=threads, context=context)

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._child.pid

    def prompt(self, ids: Sequence[int], before: Sequence[int]) -> float:
        """See :class:`Contestant`."""
        return self._seconds("prompt", ids=ids, before=before)

    def decode(self, ids: Sequence[int], before: Sequence[int]) -> float:
        """See :class:`Contestant`."""
        return self._seconds("decode", ids=ids, before=before)

    def answer(self, prompt: Sequence[int], ids: Sequence[int], before: Sequence[int]) -> float:
        """See :class:`Contestant`."""
        return self._seconds("answer", prompt=prompt, ids=ids, before=before)

    def logits(self, ids: Sequence[int], before: Sequence[int]) -> F32:
        """See :class:`Contestant`."""
        reply: Any = self._child.call("logits", ids=list(ids), before=list(before))["logits"]
        rows: F32 = reply
        return rows

    def close(self) -> None:
        """End the child."""
        self._child.close()

    def _seconds(self, method: str, **tokens: Sequence[int]) -> float:
        params: dict[str, Any] = {name: list(ids) for name, ids in tokens.items()}
        seconds = float(self._child.call(method, **params)["seconds"])
        if seconds <= 0:
            raise PeerError(f"{self.name}: {method} reports {seconds} s, which no clock can show")
        return seconds


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near a peer's logits are to ours on the path that is timed, one token at a time.

    Attributes:
        nmse: sum of squared differences over sum of our squares.
        top1: share of positions with the same largest logit, or one within :data:`NEAR_TIE` of it.
        positions: positions compared.
    """

    nmse: float
    top1: float
    positions: int

    @property
    def ok(self) -> bool:
        """Whether both sides compute the same model."""
        return self.nmse <= MAX_NMSE and self.top1 == 1.0

    def to_json(self) -> dict[str, Any]:
        """All fields, and the verdict."""
        return {"nmse": self.nmse, "top1": self.top1, "positions": self.positions, "ok": self.ok}


# A wrong weight layout, RoPE or norm gives an NMSE near 1. Two runtimes that round activations to 8 bits differ by up to
# 5e-4 (seen on SmolLM2, Q4_0), and by 0.04 to 0.2 standard deviations where their largest logits differ along greedy text.
# `deepthin verify` holds each to far tighter budgets of its own.
MAX_NMSE = 2e-2
NEAR_TIE = 0.5  # standard deviations of a row of logits, as export/tolerances.toml has it for 8-bit activations


def agreement(ours: F32, theirs: F32) -> Agreement:
    """Compare logits f32 [S, V] row by row.

    Raises:
        PeerError: the shapes differ, or the peer's logits are not finite.
    """
    if ours.shape != theirs.shape:
        raise PeerError(f"its logits have shape {list(theirs.shape)}, ours {list(ours.shape)}; is the vocabulary the same?")
    if not np.isfinite(theirs).all():
        raise PeerError("its logits are not finite")
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    rows = np.arange(len(a))
    gap = a.max(axis=1) - a[rows, b.argmax(axis=1)]
    same = gap <= NEAR_TIE * a.std(axis=1)
    return Agreement(float(np.square(a - b).sum() / max(np.square(a).sum(), 1e-30)), float(same.mean()), len(a))
