"""Tokens per second of the engine and of peers on the same weights, interleaved; what ``deepthin bench`` prints.

``pp256`` and ``tg128`` mean what they mean in llama-bench: a prompt of random tokens into an empty cache, and single-token
steps of random tokens, nothing tokenised or sampled, after ``depth`` untimed tokens.

Before timing, each peer's logits along the engine's greedy text must be those of the same model.
A speed stands beside its ceiling: weight bytes per token x tok/s over the measured read bandwidth for as many bytes.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.bandwidth import read_bandwidth
from deepthin.engine.errors import PeerError, PeerMissingError, UnsupportedError, UsageError, VerificationError
from deepthin.engine.model import Model
from deepthin.engine.tensors import tensor_specs
from deepthin.profiles.contestants import Contestant, Engine, Peer, agreement, peer_kind
from deepthin.profiles.protocol import Instruments, Rule, Session, Subject, measure
from deepthin.profiles.statistics import measured, median

WriteModel = Callable[[Model, Path], object]
ENGINE = "deepthin"
_SETTLE_S = 0.02  # idle before each timed call; llama.cpp's and onnxruntime's threads spin for some milliseconds
_CHECKED_TOKENS = 16
_CEILING = "read bandwidth"
_CEILING_PASSES = 5
_MIN_CEILING_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to time.

    Attributes:
        threads: one bench per entry.
        prompt: tokens of the prompt test, 0 leaves it out.
        gen: tokens of the decode test, 0 leaves it out.
        depth: tokens cached before either, untimed.
        against: peers, by name.
        repetitions: interleaved rounds of one batch.
        budget_s: seconds per test and thread count for further batches while an interval is wider than 3 %.
        seed: of the random tokens.
        kv_format: how the engine caches keys and values; f16 is what llama.cpp does unless told.

    Raises:
        UsageError: a number out of range, an unknown peer, or nothing to time.
    """

    threads: tuple[int, ...]
    prompt: int = 256
    gen: int = 128
    depth: int = 0
    against: tuple[str, ...] = ()
    repetitions: int = 9
    budget_s: float = 60.0
    seed: int = 0
    kv_format: str = "f16"

    def __post_init__(self) -> None:
        """Check everything before anything is loaded."""
        for name in self.against:
            peer_kind(name)
        low = {"prompt": 0, "gen": 0, "depth": 0, "repetitions": 1}
        for name, least in low.items():
            if getattr(self, name) < least:
                raise UsageError(f"bench: {name} is {getattr(self, name)}, but at least {least} is needed")
        if not self.threads or min(self.threads) < 1:
            raise UsageError(f"bench: threads is {list(self.threads)}, but thread counts of at least 1 are needed")
        if self.prompt + self.gen == 0:
            raise UsageError("bench: prompt and gen are both 0, so there is nothing to time; give --prompt or --gen a number")

    @property
    def context(self) -> int:
        """Cached tokens to make room for."""
        return max(self.depth + max(self.prompt, self.gen), _CHECKED_TOKENS)

    @property
    def tests(self) -> list[tuple[str, str, int]]:
        """Name, method and tokens of each test; the name gains ``@d512`` at a depth, as in llama-bench."""
        suffix = f"@d{self.depth}" if self.depth else ""
        every = [(f"pp{self.prompt}{suffix}", "prompt", self.prompt), (f"tg{self.gen}{suffix}", "decode", self.gen)]
        return [test for test in every if test[2]]


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
        The body of the ``bench`` document: ``model``, ``shape``, ``quant``, ``config``, ``results`` (one row per runtime, test
        and thread count), ``agreement`` (logits of each peer against ours, checked before timing), ``bandwidth`` (one per
        thread count) and ``sessions`` (how measuring went). A row has ``runtime``, ``test``, ``threads``, ``quant`` and
        ``status``: "skipped" (not installed) or "failed" with ``why``, or "ran" with ``runtime_version``, ``tok_s``,
        ``bytes_per_token`` (of weights; None for onnxruntime), ``roofline_share`` (of the measured read bandwidth; decode
        only), ``ratio_to_engine`` (peers only: their tok/s over ours) and ``flags``.

    Raises:
        UnsupportedError: the engine cannot run the model.
        UsageError: a peer has neither file nor writer.
        VerificationError: ``strict`` and a peer's logits are another model's.
    """
    say = progress or (lambda _: None)
    files = dict(files or {})
    document: dict[str, Any] = {
        "model": model.name,
        "shape": model.shape.to_json(),
        "quant": body_quant(model),
        "config": {
            "threads": list(config.threads),
            "prompt": config.prompt,
            "gen": config.gen,
            "depth": config.depth,
            "repetitions": config.repetitions,
            "seed": config.seed,
        },
        "results": [],
        "agreement": [],
        "bandwidth": [],
        "sessions": [],
    }
    with tempfile.TemporaryDirectory(prefix="deepthin-bench-") as folder:
        unavailable = _write_missing(model, config, files, writers or {}, Path(folder), say)
        for threads in config.threads:
            run = _Run(model, config, threads, document, say)
            with ExitStack() as stack:
                run.start(stack, files, unavailable, strict=strict)
                for name, method, tokens in config.tests:
                    run.time(name, method, tokens)
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
    others = sum(tensor.data.nbytes for name, tensor in model.tensors.items() if name != "token_embd")
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

    def start(self, stack: ExitStack, files: Mapping[str, Path], unavailable: Mapping[str, str], *, strict: bool) -> None:
        """Load everyone, check that all compute the same model, and note who cannot take part."""
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

    def time(self, test: str, method: str, tokens: int) -> None:
        """Time one test of all contestants in interleaved rounds and add their rows."""
        self.say(f"timing {test}, {self.threads} threads: {', '.join(self.contestants)}")
        subjects: dict[str, Subject] = {name: self._subject(one, method, tokens) for name, one in self.contestants.items()}
        if method == "decode":
            subjects[_CEILING] = self._ceiling
        rule = Rule(rounds=self.config.repetitions, budget_s=self.config.budget_s, settle_s=_SETTLE_S)
        pids = [one.pid for one in self.contestants.values() if one.pid is not None]
        session = measure(subjects, rule, gates=("seconds",), instruments=Instruments.with_peers(pids), progress=self.say)
        self.document["sessions"].append({"test": test, "threads": self.threads, **session.state_json()})
        if method == "decode":
            bandwidth = session.measured(_CEILING, "bytes_per_s", "bytes/s").to_json()
            entry = {"threads": self.threads, "num_bytes": self._ceiling_bytes, "bytes_per_s": bandwidth}
            self.document["bandwidth"].append(entry)
        for name in list(self.contestants):
            if name in session.failures:
                self._note(name, "failed", session.failures[name], (test,))
                del self.contestants[name]
            else:
                self.document["results"].append(self._row(session, name, test, method, tokens))

    def _row(self, session: Session, name: str, test: str, method: str, tokens: int) -> dict[str, Any]:
        num_bytes = self.bytes_per_token.get(name)
        share = None
        if method == "decode" and num_bytes is not None:
            seconds, ceiling = session.samples[name]["seconds"], session.samples[_CEILING]["bytes_per_s"]
            pairs = zip(seconds, ceiling, strict=True)
            share = measured([num_bytes * tokens / s / rate for s, rate in pairs], "ratio").to_json()
        ratio = None if name == ENGINE else session.speed_ratio(name, ENGINE, "seconds").to_json()
        return {
            **self._label(name, test),
            "runtime_version": self.contestants[name].version,
            "status": "ran",
            "tok_s": session.rate(name, "seconds", tokens, "tok/s").to_json(),
            "bytes_per_token": num_bytes,
            "roofline_share": share,
            "ratio_to_engine": ratio,
            "flags": list(session.flags_of(name, "seconds")),
        }

    def _note(self, name: str, status: str, why: str, tests: Sequence[str] | None = None) -> None:
        """Rows of a contestant without times."""
        for test in [name for name, _, _ in self.config.tests] if tests is None else tests:
            self.document["results"].append({**self._label(name, test), "status": status, "why": why})

    def _label(self, name: str, test: str) -> dict[str, Any]:
        return {"runtime": name, "test": test, "threads": self.threads, "quant": self.document["quant"]}

    def _subject(self, contestant: Contestant, method: str, tokens: int) -> Subject:
        vocab, depth = self.model.shape.vocab_size, self.config.depth
        seeds = itertools.count(self.config.seed + 1)

        def run() -> Mapping[str, float]:
            ids = _random_ids(next(seeds), vocab, depth + tokens)
            take = contestant.prompt if method == "prompt" else contestant.decode
            return {"seconds": take(ids[depth:], ids[:depth])}

        return run

    @property
    def _ceiling_bytes(self) -> int:
        return max(self.bytes_per_token[ENGINE], _MIN_CEILING_BYTES)

    def _ceiling(self) -> Mapping[str, float]:
        return {"bytes_per_s": median(list(read_bandwidth(self.threads, self._ceiling_bytes, _CEILING_PASSES)))}


def _random_ids(seed: int, vocab_size: int, count: int) -> list[int]:
    ids: list[int] = np.random.Generator(np.random.PCG64(seed)).integers(0, vocab_size, count).tolist()
    return ids
