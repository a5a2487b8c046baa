"""Times probe models on one runtime, by the measuring protocol; what ``deepthin profile measure`` and the benchmarks run.

A runtime is opened with one model at a time. Our engine needs no weights (``engine/synthetic.py``); peers read a file with
random ones, which is written into a temporary folder and removed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from deepthin.engine.errors import DeepthinError, PeerError
from deepthin.engine.model import Model, random_model
from deepthin.profiles.contestants import Peer, peer_kind
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload
from deepthin.profiles.probe_shapes import ProbeModel
from deepthin.profiles.protocol import Instruments, Rule, Subject, measure
from deepthin.profiles.statistics import median

WriteModel = Callable[[Model, Path], object]
ROUND_S = 0.03  # of one round of decoding: long against the clock and a wake-up
_MAX_STEPS = 64
_MIN_STEPS = 4
_DEADLINE_S = 120.0  # of one call of a peer
_DISTINCT_ROWS = 64  # of a peer's matrices; making them all would take a third of a profile's time


class Timed(Protocol):
    """A runtime with one model loaded."""

    def decode(self, context: int) -> tuple[Subject, int]:
        """A subject that reads ``seconds`` per token at about ``context`` cached tokens, and the mean number of them."""

    def prompt(self, tokens: int) -> Subject:
        """A subject that reads the ``seconds`` of a prompt into an empty cache."""

    @property
    def pids(self) -> Sequence[int]:
        """Processes of its own, whose CPU time is no disturbance."""

    @property
    def contexts_apart(self) -> bool:
        """Whether a context costs a prompt each time something else ran in between, so that it has a session of its own."""

    def close(self) -> None:
        """End threads or processes."""


class OpenTimed(Protocol):
    """Opens a runtime with a probe model at a thread count."""

    def __call__(self, model: ProbeModel, threads: int) -> Timed:
        """Load the model."""


class EngineTimed:
    """Our engine over made-up weights, with exactly the model's own blocks."""

    pids: Sequence[int] = ()
    contexts_apart = False

    def __init__(self, model: ProbeModel, threads: int) -> None:
        from deepthin.engine.synthetic import SyntheticDecoder  # loads the kernels

        shape = model.shape
        self._decoder = SyntheticDecoder(
            shape, model.quant, threads=threads, context=model.room + 1, num_blocks=shape.num_executed_layers, kv_format="f16"
        )

    def decode(self, context: int) -> tuple[Subject, int]:
        """See :class:`Timed`."""
        decoder = self._decoder
        step_s = min(float(decoder.run(2, position=context).total_s.min()) for _ in range(2))
        steps = _steps(step_s)

        def run() -> Mapping[str, float]:
            return {"seconds": median(list(decoder.run(steps, position=context).total_s))}

        return run, context

    def prompt(self, tokens: int) -> Subject:
        """See :class:`Timed`."""
        return lambda: {"seconds": self._decoder.prompt(tokens)}

    def close(self) -> None:
        """Stop the threads."""
        self._decoder.close()


class PeerTimed:
    """A peer in a child process, reading a model file.

    Args:
        peer: started and loaded.
        vocab_size: of the model, to draw tokens from.
        seed: of the tokens.
    """

    contexts_apart = True

    def __init__(self, peer: Peer, vocab_size: int, seed: int = 0) -> None:
        self._peer = peer
        self._vocab = vocab_size
        self._random = np.random.Generator(np.random.PCG64(seed))

    @property
    def pids(self) -> Sequence[int]:
        """See :class:`Timed`."""
        return () if self._peer.pid is None else (self._peer.pid,)

    def decode(self, context: int) -> tuple[Subject, int]:
        """See :class:`Timed`."""
        first = self._peer.decode(self._draw(_MIN_STEPS), ()) / _MIN_STEPS
        steps, before = _steps(first), self._draw(context)

        def run() -> Mapping[str, float]:
            return {"seconds": self._peer.decode(self._draw(steps), before) / steps}

        return run, context + steps // 2

    def prompt(self, tokens: int) -> Subject:
        """See :class:`Timed`."""
        return lambda: {"seconds": self._peer.prompt(self._draw(tokens), ())}

    def row_seconds(self, gen: int, prompt: int, depth: int) -> float:
        """Seconds of one repetition of a llama-bench row: ``gen`` tokens decoded or ``prompt`` taken in, after ``depth``."""
        if gen:
            return self._peer.decode(self._draw(gen), self._draw(depth))
        return self._peer.prompt(self._draw(prompt), self._draw(depth))

    def close(self) -> None:
        """Nothing: the process stays for the next model, and ends with :class:`PeerFiles`."""

    def _draw(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._vocab, count).tolist()
        return ids


class PeerFiles:
    """Opens a peer with probe models, one at a time, in one process; a context manager.

    A model is written once however many thread counts it is timed at.

    Args:
        runtime: the peer's name.
        write: writes a model as the file it reads.
        seed: of the random weights.
    """

    def __init__(self, runtime: str, write: WriteModel, *, seed: int = 0) -> None:
        self.runtime, self.version = runtime, ""
        self._write, self._seed = write, seed
        self._folder = tempfile.TemporaryDirectory(prefix="deepthin-probes-")
        self._held: tuple[str, Path] | None = None
        self._peer: Peer | None = None

    def __call__(self, model: ProbeModel, threads: int) -> PeerTimed:
        """Write the model unless it is the one written last, and load it.

        Raises:
            PeerMissingError: the runtime is not installed.
            PeerError: it refuses the model.
            UnsupportedError: the model cannot be written for it.
        """
        path, room = self._file(model), model.room + _MAX_STEPS
        if self._peer is not None:
            try:
                self._peer.load(path, threads, room)
            except PeerError:  # dead of the model before, perhaps; a new process tells
                self._peer.close()
                self._peer = None
        if self._peer is None:
            self._peer = Peer(self.runtime, path, threads, room, deadline_s=_DEADLINE_S)
            self.version = self._peer.version
        return PeerTimed(self._peer, model.shape.vocab_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._peer is not None:
            self._peer.close()
        self._folder.cleanup()

    def _file(self, model: ProbeModel) -> Path:
        key = f"{model.shape.text} {model.quant}"
        if self._held is not None and self._held[0] == key:
            return self._held[1]
        folder = Path(self._folder.name)
        for old in folder.iterdir():
            old.unlink()
        path = folder / f"probe{peer_kind(self.runtime).suffix}"
        self._write(random_model(model.shape, seed=self._seed, quant=model.quant, distinct_rows=_DISTINCT_ROWS), path)
        self._held = (key, path)
        return path


def time_model(
    runtime: str,
    open_timed: OpenTimed,
    model: ProbeModel,
    threads: int,
    rule: Rule,
    *,
    make_instruments: Callable[[Sequence[int], int], Instruments] = Instruments.real,
) -> list[Probe]:
    """Probes of everything ``model`` asks for, timed in interleaved rounds: of one session, or of one more for each context.

    Raises:
        DeepthinError: the runtime cannot run the model, or died of it.
    """
    with closing(open_timed(model, threads)) as timed:
        groups: list[dict[str, tuple[Subject, Workload]]] = [{}]
        for context in model.contexts:
            subject, mean_context = timed.decode(context)
            if context and timed.contexts_apart:
                groups.append({})
            group = groups[-1] if context else groups[0]
            group[f"tg@{context}"] = subject, Workload(model.shape, model.quant, DECODE, 1, mean_context)
        for tokens in model.prompts:
            groups[0][f"pp{tokens}"] = timed.prompt(tokens), Workload(model.shape, model.quant, PREFILL, tokens, 0)
        found: list[Probe] = []
        for group in filter(None, groups):
            subjects = {name: subject for name, (subject, _) in group.items()}
            session = measure(subjects, rule, instruments=make_instruments(timed.pids, threads))
            for why in session.failures.values():
                raise DeepthinError(why)
            found += [
                Probe(
                    runtime,
                    threads,
                    work,
                    session.measured(name, "seconds"),
                    session.flags_of(name, "seconds"),
                    session.barrier_s,
                )
                for name, (_, work) in group.items()
            ]
    return found


def open_engine(model: ProbeModel, threads: int) -> Timed:
    """Our engine as an :class:`OpenTimed`."""
    return EngineTimed(model, threads)


def _steps(step_s: float) -> int:
    return int(min(max(ROUND_S / max(step_s, 1e-7), _MIN_STEPS), _MAX_STEPS))
