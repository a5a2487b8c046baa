"""Tokens per second of the engine and of peers on the same weights, interleaved; what ``deepthin bench`` prints.

``pp256`` and ``tg128`` mean what they mean in llama-bench: a prompt of random tokens into an empty cache, and single-token
steps of random tokens, nothing tokenised or sampled, after ``depth`` untimed tokens; ``pp256+tg128`` is one behind the other,
timed together. Lists give one test per combination.

Before timing, each peer's logits along the engine's greedy text must be those of the same model.
A speed stands beside its ceiling: weight bytes per token x tok/s over the measured read bandwidth for as many bytes.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepthin.engine.bandwidth import read_bandwidth
from deepthin.engine.errors import PeerError, PeerMissingError, UnsupportedError, UsageError, VerificationError
from deepthin.engine.model import Model
from deepthin.engine.tensors import tensor_specs
from deepthin.profiles.contestants import Contestant, Engine, Peer, agreement, peer_kind
from deepthin.profiles.kernel_report import kernel_report
from deepthin.profiles.layer_times import LAYER_TOKENS, layer_times
from deepthin.profiles.protocol import Instruments, Rule, Session, Subject, measure
from deepthin.profiles.statistics import measured, median

WriteModel = Callable[[Model, Path], object]
ENGINE = "deepthin"
_SETTLE_S = 0.02  # idle before each timed call; llama.cpp's and onnxruntime's threads spin for some milliseconds
_CHECKED_TOKENS = 16
_CEILING = "read bandwidth"
_CEILING_PASSES = 5
_MIN_CEILING_BYTES = 1 << 20


class BenchTest(NamedTuple):
    """One thing to time.

    Attributes:
        prompt: tokens taken in as one prompt; 0 is none.
        gen: tokens taken in one by one after it; 0 is none.
        depth: cached before.
    """

    prompt: int
    gen: int
    depth: int

    @property
    def name(self) -> str:
        """``pp256``, ``tg128`` or ``pp256+tg128``, with ``@d512`` at a depth, as in llama-bench."""
        parts = [f"pp{self.prompt}"] * bool(self.prompt) + [f"tg{self.gen}"] * bool(self.gen)
        return "+".join(parts) + (f"@d{self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """All that are timed."""
        return self.prompt + self.gen

    @property
    def is_decode(self) -> bool:
        """Whether it reads all weights once per token, so that the memory's ceiling says something."""
        return not self.prompt


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to time.

    Attributes:
        threads: one bench per entry.
        prompt: tokens of each prompt test, 0 is none.
        gen: tokens of each decode test, 0 is none.
        prompt_gen: tokens of a prompt and of the steps after it, timed together.
        depth: tokens cached before any of them, untimed; all tests at each depth.
        against: peers, by name.
        repetitions: interleaved rounds of one batch.
        budget_s: seconds per test and thread count for further batches while an interval is wider than 3 %.
        seed: of the random tokens.
        kv_format: how the engine caches keys and values; f16 is what llama.cpp does unless told.
        kernels: also say which kernel runs for each tensor.
        layers: also time each block and product of our own engine, at each depth.

    Raises:
        UsageError: a number out of range, an unknown peer, or nothing to time.
    """

    threads: tuple[int, ...]
    prompt: tuple[int, ...] = (256,)
    gen: tuple[int, ...] = (128,)
    prompt_gen: tuple[tuple[int, int], ...] = ()
    depth: tuple[int, ...] = (0,)
    against: tuple[str, ...] = ()
    repetitions: int = 9
    budget_s: float = 60.0
    seed: int = 0
    kv_format: str = "f16"
    kernels: bool = False
    layers: bool = False

    def __post_init__(self) -> None:
        """Check everything before anything is loaded."""
        for name in self.against:
            peer_kind(name)
        together = tuple(count for pair in self.prompt_gen for count in pair)
        low = {"prompt": self.prompt, "gen": self.gen, "prompt_gen": together, "depth": self.depth}
        for name, counts in low.items():
            if any(count < 0 for count in counts):
                raise UsageError(f"bench: {name} is {min(counts)}, but at least 0 is needed")
        if self.repetitions < 1:
            raise UsageError(f"bench: repetitions is {self.repetitions}, but at least 1 is needed")
        if not self.depth:
            raise UsageError("bench: depth is empty, but at least one number is needed; 0 is an empty cache")
        if not self.threads or min(self.threads) < 1:
            raise UsageError(f"bench: threads is {list(self.threads)}, but thread counts of at least 1 are needed")
        if not self.tests and not self.kernels and not self.layers:
            raise UsageError("bench: prompt and gen are both 0, so there is nothing to time; give --prompt or --gen a number")

    @property
    def context(self) -> int:
        """Cached tokens to make room for."""
        together = map(sum, self.prompt_gen)
        tokens = max(*self.prompt, *self.gen, *together, LAYER_TOKENS if self.layers else 0, 0)
        return max(max(self.depth) + tokens, _CHECKED_TOKENS)

    @property
    def tests(self) -> list[BenchTest]:
        """Every test, in llama-bench's order."""
        found = []
        for depth in self.depth:
            pairs = [(count, 0) for count in self.prompt] + [(0, count) for count in self.gen]
            found += [BenchTest(*pair, depth) for pair in (*pairs, *self.prompt_gen) if any(pair)]
        return list(dict.fromkeys(found))


def bench(
    model: Model,
    config: BenchConfig,
    *,
    files: Mapping[str, Path] | None = None,
    writers: Mapping[str, WriteModel] | None = None,
    progress: Callable[[str], None] | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """Time ``model`` as it is stored; convert it first (``model.quantized("q4_0")``) to time another format.

    Args:
        model: the weights, in the engine's terms.
        config: tests, threads, peers.
        files: model files that peers can read as they are, by peer name (the GGUF that ``model`` was loaded from).
        writers: for peers without a file: writes ``model`` to a path (``export.gguf_writer.write_gguf`` for "llama.cpp",
            ``export.onnx_model.write_onnx`` for "onnxruntime"). The CLI hands them in, since this folder knows no export.
        progress: told in a few words what happens next.
        strict: raise when a peer disagrees, instead of noting it and timing the others.

    Returns:
        The body of the ``bench`` document: ``model``, ``model_bytes``, ``model_params`` (all tensors as stored), ``shape``,
        ``quant``, ``config``, ``results`` (one row per runtime, test and thread count), ``agreement`` (logits of each peer
        against ours, checked before timing), ``bandwidth`` (one per decode test and thread count) and ``sessions`` (how
        measuring went); where asked for ``kernels`` (:func:`kernel_report`) and ``layers`` (:func:`layer_times`, one per
        thread count and depth). A row has ``runtime``, ``test``, ``threads``, ``quant`` and ``status``: "skipped" (not
        installed) or "failed" with ``why``, or "ran" with ``runtime_version``, ``n_prompt``, ``n_gen``, ``n_depth``,
        ``test_time`` (UTC, when it began), ``tok_s``, ``bytes_per_token`` (of weights; None for onnxruntime),
        ``roofline_share`` (of the measured read bandwidth; decode only), ``ratio_to_engine`` (peers only: their tok/s over
        ours) and ``flags``.

    Raises:
        UnsupportedError: the engine cannot run the model.
        UsageError: a peer has neither file nor writer.
        VerificationError: ``strict`` and a peer's logits are another model's.
    """
    say = progress or (lambda _: None)
    files = dict(files or {})
    document: dict[str, Any] = {
        "model": model.name,
        "model_bytes": model.num_bytes,
        "model_params": sum(math.prod(tensor.dims) for tensor in model.tensors.values()),
        "shape": model.shape.to_json(),
        "quant": body_quant(model),
        "config": {
            "threads": list(config.threads),
            "prompt": list(config.prompt),
            "gen": list(config.gen),
            "prompt_gen": [list(pair) for pair in config.prompt_gen],
            "depth": list(config.depth),
            "kv_format": config.kv_format,
            "repetitions": config.repetitions,
            "seed": config.seed,
        },
        "results": [],
        "agreement": [],
        "bandwidth": [],
        "sessions": [],
    }
    if config.kernels:
        document["kernels"] = kernel_report(model)
    if config.layers:
        document["layers"] = []
    if not config.tests and not config.layers:
        return document
    with tempfile.TemporaryDirectory(prefix="deepthin-bench-") as folder:
        unavailable = _write_missing(model, config, files, writers or {}, Path(folder), say)
        for threads in config.threads:
            run = _Run(model, config, threads, document, say)
            with ExitStack() as stack:
                engine = run.start(stack, files, unavailable, strict=strict)
                for test in config.tests:
                    run.time(test)
                for depth in config.depth if config.layers else ():
                    run.time_layers(engine, depth)
    return document


def body_quant(model: Model) -> str:
    """Name of the format that holds most values of the blocks' matrices."""
    totals: Counter[str] = Counter()
    for spec in tensor_specs(model.shape):
        if spec.role in ("attention", "mlp"):
            totals[model.tensors[spec.name].format.name] += spec.num_elements
    return totals.most_common(1)[0][0]


def stored_bytes_per_token(model: Model) -> int:
    """Bytes of the file that one decoded token reads: every tensor but the embedding, the head, and one embedding row."""
    embedding = model.tensors["token_embd"].data
    others = sum(tensor.num_bytes for name, tensor in model.tensors.items() if name != "token_embd")
    return int(others + embedding.shape[1] + (embedding.nbytes if model.shape.tie_word_embeddings else 0))


def _write_missing(
    model: Model,
    config: BenchConfig,
    files: dict[str, Path],
    writers: Mapping[str, WriteModel],
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, str]:
    """Write ``model`` for each peer without a file and add it to ``files``; returns why, for formats that cannot hold it."""
    unavailable = {}
    for name in config.against:
        if name in files:
            continue
        if name not in writers:
            raise UsageError(f"bench: {name} has no model file to read; give its file or a writer for its format")
        say(f"writing the model for {name}")
        path = folder / f"{name}{peer_kind(name).suffix}"
        try:
            writers[name](model, path)
        except UnsupportedError as error:
            unavailable[name] = str(error)
        else:
            files[name] = path
    return unavailable


class _Run:
    """The contestants at one thread count, and the rows they earn."""

    def __init__(
        self, model: Model, config: BenchConfig, threads: int, document: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self.model, self.config, self.threads, self.document, self.say = model, config, threads, document, say
        self.contestants: dict[str, Contestant] = {}
        self.bytes_per_token: dict[str, int] = {}

    def start(self, stack: ExitStack, files: Mapping[str, Path], unavailable: Mapping[str, str], *, strict: bool) -> Engine:
        """Load everyone, check that all compute the same model, and note who cannot take part; returns our engine."""
        self.say(f"loading the engine, {self.threads} threads")
        engine = stack.enter_context(closing(Engine(self.model, self.threads, self.config.context, self.config.kv_format)))
        self.contestants[ENGINE] = engine
        self.bytes_per_token[ENGINE] = engine.bytes_per_token
        ids = engine.greedy(_random_ids(self.config.seed, self.model.shape.vocab_size, 1)[0], _CHECKED_TOKENS)
        ours = engine.logits(ids, ())
        for name in self.config.against:
            if name in unavailable:
                self._note(name, "failed", unavailable[name])
                continue
            self.say(f"loading {name}, {self.threads} threads")
            try:
                peer = Peer(name, files[name], self.threads, self.config.context)
                stack.enter_context(closing(peer))
                agreed = agreement(ours, peer.logits(ids, ()))
            except PeerMissingError as error:
                self._note(name, "skipped", str(error))
                continue
            except PeerError as error:
                self._note(name, "failed", str(error))
                continue
            self.document["agreement"].append({"runtime": name, "threads": self.threads, **agreed.to_json()})
            if not agreed.ok:
                why = (
                    f"{name} computes another model than the engine on the same weights: NMSE {agreed.nmse:.2g}, same top "
                    f"token at {agreed.top1:.0%} of {agreed.positions} greedy positions; run deepthin verify before timing"
                )
                if strict:
                    raise VerificationError(why)
                self._note(name, "failed", why)
                continue
            self.contestants[name] = peer
            if name == "llama.cpp":  # it reads the file's blocks; what onnxruntime makes of them we do not know
                self.bytes_per_token[name] = stored_bytes_per_token(self.model)
        return engine

    def time(self, test: BenchTest) -> None:
        """Time one test of all contestants in interleaved rounds and add their rows."""
        self.say(f"timing {test.name}, {self.threads} threads: {', '.join(self.contestants)}")
        began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        subjects: dict[str, Subject] = {name: self._subject(one, test) for name, one in self.contestants.items()}
        if test.is_decode:
            subjects[_CEILING] = self._ceiling
        pids = [one.pid for one in self.contestants.values() if one.pid is not None]
        tools = Instruments.real(pids, self.threads)
        session = measure(subjects, self._rule, gates=("seconds",), instruments=tools, progress=self.say)
        self.document["sessions"].append({"test": test.name, "threads": self.threads, **session.state_json()})
        if test.is_decode:
            bandwidth = session.measured(_CEILING, "bytes_per_s", "bytes/s").to_json()
            entry = {"test": test.name, "threads": self.threads, "num_bytes": self._ceiling_bytes, "bytes_per_s": bandwidth}
            self.document["bandwidth"].append(entry)
        for name in list(self.contestants):
            if name in session.failures:
                self._note(name, "failed", session.failures[name], (test.name,))
                del self.contestants[name]
            else:
                self.document["results"].append(self._row(session, name, test, began))

    def time_layers(self, engine: Engine, depth: int) -> None:
        """Time the parts of our own engine's token at ``depth``."""
        self.say(f"timing layers at depth {depth}, {self.threads} threads")
        self.document["layers"].append(
            layer_times(
                engine,
                self.model,
                threads=self.threads,
                depth=depth,
                rule=self._rule,
                ceiling=self._ceiling,
                draw=lambda seed, count: _random_ids(self.config.seed + seed, self.model.shape.vocab_size, count),
                progress=self.say,
            )
        )

    @property
    def _rule(self) -> Rule:
        return Rule(rounds=self.config.repetitions, budget_s=self.config.budget_s, settle_s=_SETTLE_S)

    def _row(self, session: Session, name: str, test: BenchTest, began: str) -> dict[str, Any]:
        num_bytes = self.bytes_per_token.get(name)
        share = None
        if test.is_decode and num_bytes is not None:
            seconds, ceiling = session.samples[name]["seconds"], session.samples[_CEILING]["bytes_per_s"]
            pairs = zip(seconds, ceiling, strict=True)
            share = measured([num_bytes * test.tokens / s / rate for s, rate in pairs], "ratio").to_json()
        ratio = None if name == ENGINE else session.speed_ratio(name, ENGINE, "seconds").to_json()
        return {
            **self._label(name, test.name),
            "runtime_version": self.contestants[name].version,
            "status": "ran",
            "n_prompt": test.prompt,
            "n_gen": test.gen,
            "n_depth": test.depth,
            "test_time": began,
            "tok_s": session.rate(name, "seconds", test.tokens, "tok/s").to_json(),
            "bytes_per_token": num_bytes,
            "roofline_share": share,
            "ratio_to_engine": ratio,
            "flags": list(session.flags_of(name, "seconds")),
        }

    def _note(self, name: str, status: str, why: str, tests: Sequence[str] | None = None) -> None:
        """Rows of a contestant without times."""
        for test in [test.name for test in self.config.tests] if tests is None else tests:
            self.document["results"].append({**self._label(name, test), "status": status, "why": why})

    def _label(self, name: str, test: str) -> dict[str, Any]:
        return {"runtime": name, "test": test, "threads": self.threads, "quant": self.document["quant"]}

    def _subject(self, contestant: Contestant, test: BenchTest) -> Subject:
        vocab, depth = self.model.shape.vocab_size, test.depth
        seeds = itertools.count(self.config.seed + 1)

        def run() -> Mapping[str, float]:
            ids = _random_ids(next(seeds), vocab, depth + test.tokens)
            before, end = ids[:depth], depth + test.prompt
            if test.prompt and test.gen:
                return {"seconds": contestant.answer(ids[depth:end], ids[end:], before)}
            return {"seconds": (contestant.prompt if test.prompt else contestant.decode)(ids[depth:], before)}

        return run

    @property
    def _ceiling_bytes(self) -> int:
        return max(self.bytes_per_token[ENGINE], _MIN_CEILING_BYTES)

    def _ceiling(self) -> Mapping[str, float]:
        return {"bytes_per_s": median(list(read_bandwidth(self.threads, self._ceiling_bytes, _CEILING_PASSES)))}


def _random_ids(seed: int, vocab_size: int, count: int) -> list[int]:
    ids: list[int] = np.random.Generator(np.random.PCG64(seed)).integers(0, vocab_size, count).tolist()
    return ids
