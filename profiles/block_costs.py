"""What one block, the head and a step's overhead cost on this machine, for any shape; measured once, found again by key.

    T(token) = L · block + head + embedding + overhead

Blocks are timed as a whole model would run them: enough distinct ones that each step streams its weights, or, when the
model is so small that caches keep part of it, exactly the model's own blocks. Which of the two is part of the key, so a
stored time is only reused where the caches would see the same.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import deepthin.engine as engine_package
from deepthin.engine.accounting import bytes_read_per_token, count_bytes
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import scheme_named
from deepthin.engine.kv_cache import cache_format_named
from deepthin.engine.shape import Shape
from deepthin.profiles.contention import CONTENTION_FLAGS
from deepthin.profiles.machine import fingerprint, last_level_cache_bytes, machine_record
from deepthin.profiles.protocol import Instruments, Rule, Session, measure
from deepthin.profiles.schema import Measured, TokenCost, as_str
from deepthin.profiles.statistics import composed, measured, median
from deepthin.profiles.step_timer import MakeTimer, MakeWhole, StepTimer
from deepthin.profiles.store import MeasurementStore

STREAMED_CACHES = 3  # a model this many times the last-level cache is streamed: caches keep nothing of it between tokens
WORKING_SET_CACHES = 4  # what a streamed measurement reads per step, in last-level caches
UNKNOWN_CACHE_BYTES = 64 << 20  # assumed where the platform does not tell; larger than most, so it errs towards real memory
DEFAULT_KV_FORMAT = "f16"  # of the key/value cache while timing, as in engine/accounting.py
MIN_STREAMED_BLOCKS = 6  # fewer would magnify the noise of one block by the depth
PATIENCE = 3.0  # budgets a shape may take while other processes leave no quiet fifth of a second
_ROUNDS = 9
_ROUND_S = 0.02  # of one round: long against the clock, short enough for nine rounds to fit three times into a second
_MAX_STEPS = 256
_PARTS = ("block_s", "head_s", "embed_s", "overhead_s")


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """How many distinct blocks to time, and the name under which equal cache conditions are found again."""

    num_blocks: int
    name: str


class BlockCosts:
    """Measures and remembers; the object behind the callable that ``search`` receives: pass ``costs.measure``.

    Args:
        store_path: JSON lines file, shared by runs and shapes; made when the first measurement is stored.
        threads: threads to decode with.
        context: cached tokens each timed token attends to.
        budget_s: seconds a new shape may take, the making of its timer included; up to ``patience`` times that
            while other processes disturb every batch.
        patience: see ``budget_s``; 1 takes what it gets.
        retry_disturbed: time stored parts again that were taken while others used the machine; the new ones replace them.
        kv_format: how the engine caches keys and values; part of every key.
        progress: told in a few words what is being measured.
        make_timer: stands for ``engine.synthetic.SyntheticDecoder`` in tests.
        make_whole: stands for :class:`~deepthin.profiles.whole_model.WholeModel` in tests.
        machine: stands for :func:`machine_record` in tests.
        instruments: clocks and counters of the protocol.

    Raises:
        UsageError: threads, context or budget out of range.
        FormatError: the store is another kind of file.
    """

    def __init__(
        self,
        store_path: Path,
        threads: int,
        context: int,
        budget_s: float = 1.0,
        *,
        patience: float = PATIENCE,
        retry_disturbed: bool = False,
        kv_format: str = DEFAULT_KV_FORMAT,
        progress: Callable[[str], None] | None = None,
        make_timer: MakeTimer | None = None,
        make_whole: MakeWhole | None = None,
        machine: Mapping[str, Any] | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        if threads < 1 or context < 0 or budget_s <= 0:
            raise UsageError(
                f"measuring: threads={threads}, context={context}, budget_s={budget_s}; at least one thread, no negative "
                f"context and some time are needed"
            )
        self.threads, self.context, self.budget_s, self.patience = threads, context, budget_s, patience
        self.store = MeasurementStore(store_path)
        record = machine_record() if machine is None else machine
        self.cache_bytes = last_level_cache_bytes(record) or UNKNOWN_CACHE_BYTES
        self.retry_disturbed = retry_disturbed
        self.kv_format = cache_format_named(kv_format).name
        self.num_measured = 0  # shapes timed by this object, not found in the store
        self._here = {"machine": fingerprint(record), "engine": engine_digest(), "threads": threads, "context": context}
        self._here["kv_format"] = self.kv_format
        self._make_timer = make_timer or functools.partial(_synthetic_decoder, kv_format=self.kv_format)
        self._make_whole = make_whole or functools.partial(_whole_model, kv_format=self.kv_format)
        self._instruments = instruments or Instruments.real(threads=threads)
        self._say = progress or (lambda _: None)

    def measure(self, shape: Shape, quant: str) -> TokenCost:
        """Cost of one decoded token of ``shape`` stored as ``quant``; times the parts that the store lacks.

        Raises:
            UnsupportedError: the engine cannot run the shape.
            FormatError: a width is no multiple of the format's block.
            UsageError: no such format.
        """
        keys = self.keys(shape, quant)
        found = {name: self._usable(self.store.get(key)) for name, key in keys.items()}
        measured_now = None in found.values()
        if measured_now:
            fresh = self._time_parts(shape, quant)
            self.num_measured += 1
            for name, key in keys.items():
                if found[name] is None:  # what is known stays, so that costs composed earlier stay the same
                    self.store.put(key, fresh[name])
                    found[name] = fresh[name]
        parts: dict[str, Measured] = {}
        flags: set[str] = set()
        for value in found.values():
            if value is not None:
                flags |= {as_str(flag, "flags[]") for flag in value["flags"]}
                parts |= {name: Measured.from_json(value[name]) for name in _PARTS if name in value}
        total = composed([(float(shape.num_executed_layers), parts["block_s"]), *((1.0, parts[name]) for name in _PARTS[1:])])
        return TokenCost(
            seconds_per_token=total,
            **parts,
            bytes_per_token=bytes_read_per_token(shape, quant),
            threads=self.threads,
            context=self.context,
            quant=quant,
            measured_now=measured_now,
            flags=tuple(sorted(flags)),
        )

    def keys(self, shape: Shape, quant: str) -> dict[str, dict[str, Any]]:
        """Store keys of the two measurements a cost is made of: ``block``, and ``head`` with embedding and overhead."""
        name = working_set(shape, quant, self.context, self.cache_bytes, self.kv_format).name
        scheme = scheme_named(quant)
        head = {"width": shape.hidden_size, "vocab": shape.vocab_size, "head_format": scheme.head.name}
        block = {
            "width": shape.hidden_size,
            "heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "inner": shape.intermediate_size,
            "mlp": shape.mlp,
            "qk_norm": shape.qk_norm,
            **({"qkv_bias": True} if shape.qkv_bias else {}),
            "quant": scheme.body.name,
        }
        return {
            "block": {"part": "block", "working_set": name, **block, **self._here},
            "head": {"part": "head", "working_set": name, **head, **self._here},
        }

    def check_residual(self, shapes: Sequence[tuple[Shape, str]]) -> list[dict[str, Any]]:
        """Sums of parts against whole models with random weights, for each (shape, quant); stored and reused like costs.

        Parts and whole model take turns within each round, so that the residual is the model's error, not the machine's
        drift since the parts were stored.

        Returns:
            One row each: ``shape``, ``quant``, ``threads``, ``context``; ``residual``, a measured ratio: parts timed now over
            the whole, less 1; ``composed_s``, the cost the search used, and ``whole_s``, both measured;
            ``composed_over_whole``, the ratio of their medians less 1, which holds the drift too; ``flags`` of either side.
        """
        rows = []
        for shape, quant in shapes:
            cost = self.measure(shape, quant)
            key = {"part": "whole", "shape": shape.text, "quant": scheme_named(quant).name, **self._here}
            value = self._usable(self.store.get(key))
            if value is None:
                value = self._time_whole(shape, quant)
                self.store.put(key, value)
            whole_s = Measured.from_json(value["whole_s"])
            rows.append(
                {
                    "shape": shape.text,
                    "quant": quant,
                    "threads": self.threads,
                    "context": self.context,
                    "residual": value["residual"],
                    "composed_s": cost.seconds_per_token.to_json(),
                    "whole_s": value["whole_s"],
                    "composed_over_whole": cost.seconds_per_token.median / whole_s.median - 1,
                    "flags": sorted({*cost.flags, *value["flags"]}),
                }
            )
        return rows

    def _time_whole(self, shape: Shape, quant: str) -> dict[str, Any]:
        self._say(f"timing the whole of {shape.text} in {quant}")
        blocks = working_set(shape, quant, self.context, self.cache_bytes).num_blocks
        with (
            self._make_timer(shape, quant, threads=self.threads, context=self.context + 1, num_blocks=blocks) as timer,
            self._make_whole(shape, quant, self.threads, self.context) as whole,
        ):
            subjects = {"parts": _Steps(timer, blocks, self.context), "whole": _Steps(whole, shape.num_layers, self.context)}
            rule = Rule(rounds=_ROUNDS, budget_s=2 * self.budget_s, patience=PATIENCE)
            session = measure(subjects, rule, gates=("total_s",), instruments=self._instruments)
        parts = session.samples["parts"]
        sums = np.asarray(parts["block_s"]) * shape.num_executed_layers + sum(np.asarray(parts[name]) for name in _PARTS[1:])
        return {
            "whole_s": session.measured("whole", "total_s").to_json(),
            "residual": measured(list(sums / np.asarray(session.samples["whole"]["total_s"]) - 1), "ratio").to_json(),
            "flags": sorted(session.flags_of("whole", "total_s")),
        }

    def _usable(self, value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        disturbed = value is not None and not CONTENTION_FLAGS.isdisjoint(value["flags"])
        return None if disturbed and self.retry_disturbed else value

    def _time_parts(self, shape: Shape, quant: str) -> dict[str, dict[str, Any]]:
        start = time.perf_counter()
        blocks = working_set(shape, quant, self.context, self.cache_bytes, self.kv_format).num_blocks
        self._say(f"timing {blocks} blocks of {shape.text} in {quant}")
        with self._make_timer(shape, quant, threads=self.threads, context=self.context + 1, num_blocks=blocks) as timer:
            subject = _Steps(timer, blocks, self.context)
            left = max(self.budget_s - (time.perf_counter() - start), self.budget_s / 2)
            rule = Rule(rounds=_ROUNDS, budget_s=left, patience=self.patience)
            session = measure({"step": subject}, rule, gates=("block_s", "head_s"), instruments=self._instruments)
        return {
            "block": _record(session, ("block_s",), ("block_s",)),
            "head": _record(session, ("head_s", "embed_s", "overhead_s"), ("head_s",)),
        }


class _Steps:
    """One round: so many steps that they last :data:`_ROUND_S`, reduced to the median of each part."""

    def __init__(self, timer: StepTimer, num_blocks: int, position: int) -> None:
        self.timer, self.num_blocks, self.position = timer, num_blocks, position
        first = timer.run(1, position=position)
        again = timer.run(2, position=position)
        step_s = max(min(float(first.total_s.min()), float(again.total_s.min())), 1e-7)
        self.steps = int(min(max(_ROUND_S / step_s, 3), _MAX_STEPS))

    def __call__(self) -> Mapping[str, float]:
        times = self.timer.run(self.steps, position=self.position)
        rest = np.maximum(times.total_s - times.embed_s - times.blocks_s - times.head_s, 0.0)
        return {
            "total_s": median(list(times.total_s)),
            "block_s": median(list(times.blocks_s)) / self.num_blocks,
            "head_s": median(list(times.head_s)),
            "embed_s": median(list(times.embed_s)),
            "overhead_s": median(list(rest)),
        }


def working_set(shape: Shape, quant: str, context: int, cache_bytes: int, kv_format: str = DEFAULT_KV_FORMAT) -> WorkingSet:
    """Blocks to time for ``shape``: all of its own when caches keep part of the model, else enough to stream.

    A token reads every block with its cached keys and values, and the head. At :data:`STREAMED_CACHES` last-level caches
    or more nothing survives until the next token, so the depth no longer matters to the time of one block.
    """
    parts = count_bytes(shape, quant)
    head = parts.embedding if shape.tie_word_embeddings else parts.head
    kv = 2 * shape.num_kv_heads * context * cache_format_named(kv_format).bytes_per_position(shape.head_dim)
    block = (parts.attention + parts.mlp + parts.norm) // shape.num_layers + kv
    total = shape.num_layers * block + head
    if total < STREAMED_CACHES * cache_bytes:
        return WorkingSet(shape.num_layers, f"whole:{shape.num_layers}x{block}+{head}")
    wanted = -(-max(WORKING_SET_CACHES * cache_bytes - head, 0) // block)
    return WorkingSet(min(max(wanted, MIN_STREAMED_BLOCKS), shape.num_layers), "streamed")


def engine_digest() -> str:
    """Short hex digest of every source file that a timed step runs through, so that a changed engine is timed anew."""
    folder = Path(engine_package.__path__[0])
    names = ("cpu", "decoder", "jit", "kv_cache", "pack", "plan", "synthetic", "threads")
    files = [folder / f"{name}.py" for name in names]
    files += sorted(folder.glob("kernels/*.py")) + sorted(folder.glob("simd/*.py"))
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:12]


def _record(session: Session, readings: Sequence[str], gated: Sequence[str]) -> dict[str, Any]:
    flags = sorted({flag for reading in gated for flag in session.flags_of("step", reading)})
    return {**{name: session.measured("step", name).to_json() for name in readings}, "flags": flags}


def _synthetic_decoder(shape: Shape, quant: str, *, threads: int, context: int, num_blocks: int, kv_format: str) -> StepTimer:
    from deepthin.engine.synthetic import SyntheticDecoder  # loads the kernels, so only when something must be timed

    return SyntheticDecoder(shape, quant, threads=threads, context=context, num_blocks=num_blocks, kv_format=kv_format)


def _whole_model(shape: Shape, quant: str, threads: int, context: int, *, kv_format: str) -> StepTimer:
    from deepthin.profiles.whole_model import WholeModel

    return WholeModel(shape, quant, threads, context, kv_format)
