"""Measures what ``prediction.py`` judges: a profile, the probe kit, and held-out models, one line of JSON each.

On a shared machine what lies around the last-level cache is 5 % faster or slower for seconds at a time, and a session of a
second sees one such spell. So the truth is pooled: the engine's models are opened in groups and visited in turns, peers' models
are loaded and timed once more later in the run, and what was taken while others used the machine does not count.

Held-out models are timed at several threads only while the cores are as far apart as they were for the profile
(``profiles.contention.BarrierSentinel``): on a virtual machine that moves, one thread is timed meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from placement import append_line, in_turn

from deepthin.engine.accounting import count_params
from deepthin.engine.errors import DeepthinError, FormatError
from deepthin.engine.model import Model, random_model
from deepthin.profiles.kit import SUFFIXES, probe_name
from deepthin.profiles.latency.model import is_disturbed
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.runtimes import ENGINE, LLAMA_CPP, ONNXRUNTIME, RUNTIMES
from deepthin.profiles.latency.workload import Workload
from deepthin.profiles.machine import machine_name
from deepthin.profiles.probe_plans import KIT_PLAN
from deepthin.profiles.probe_shapes import ProbeModel, random_shape
from deepthin.profiles.probing import time_model
from deepthin.profiles.protocol import Rule
from deepthin.profiles.statistics import measured

SCHEMA = "deepthin/prediction-benchmark/3"
SEED = 14_2026  # 7, 11 and 12 of 2026: shapes that terms and priors were chosen with (latency/runtimes.py); 13: the EPYC's
NUM_HELD_OUT = 64
GROUP, VISITS = 16, 4  # engine models open at once, and how often each is timed
PARAMS, LAYERS = (5e6, 6e8), (2, 80)
CONTEXTS, PROMPTS = (0, 64, 256, 1024, 2048, 4096), (32, 64, 128, 256)
PEER_PRODUCTS = 2e10  # of the tokens a peer must take in before each round; larger models get shorter contexts
ENGINE_PRODUCTS = 2e11  # our decoder takes them in once
PROMPT_PRODUCTS = 1e10
KIT_TESTS = ((32, 0, 0), (32, 0, 512), (0, 128, 0))  # decoded, prompt, cached before; as run.sh asks llama-bench
PROFILE = "profile"


def held_out() -> list[dict[str, Any]]:
    """The held-out models: shape, a format for each runtime, context and prompt; always the same ones, none of them a probe."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    found = []
    for index in range(NUM_HELD_OUT):
        shape = random_shape(generator, PARAMS, LAYERS)
        quants = {name: runtime.formats[index % len(runtime.formats)] for name, runtime in RUNTIMES.items()}
        found.append(
            {
                "shape": shape,
                "quants": quants,
                "context": int(generator.choice(CONTEXTS)),
                "prompt": int(generator.choice(PROMPTS)),
            }
        )
    return found


def probe_model(item: Mapping[str, Any], runtime: str) -> ProbeModel:
    """What is timed of a held-out model on ``runtime``: an empty cache, its context, its prompt, within reason."""
    shape = item["shape"]
    params = count_params(shape).total
    limit = ENGINE_PRODUCTS if runtime == ENGINE else PEER_PRODUCTS
    context = min(item["context"], int(limit / params))
    prompt = min(item["prompt"], max(8, int(PROMPT_PRODUCTS / params)))
    return ProbeModel(shape, item["quants"][runtime], tuple(dict.fromkeys((0, context))), (prompt,))


def measure(path: Path, machine: Mapping[str, Any], budget_s: float, profile_s: float) -> None:
    """Measure what is not in ``path`` yet, until the time is up."""
    from deepthin.cli.bench import write_onnx_for_timing
    from deepthin.export.gguf_writer import write_gguf
    from deepthin.profiles.host import host_bench

    writers = {LLAMA_CPP: write_gguf, ONNXRUNTIME: write_onnx_for_timing}
    with host_bench(machine, tuple(RUNTIMES), writers) as bench:
        lines = [line for line in read_lines(path) if holds(line, bench.engine_digest)] if path.exists() else []
        done = {line["key"]: line for line in lines}
        jobs = {key: job for key, job in _jobs(bench, profile_s) if key not in done}
        for key, job in in_turn(jobs, budget_s, lambda key: _placement(key, done.get(PROFILE))):
            base = {"schema": SCHEMA, "key": key, "engine": bench.engine_digest, "machine": machine_name(machine)}
            done[key] = {**base, **job(), "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
            append_line(path, done[key])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The newest line of each key; of the newest engine, but held-out models of other runtimes stay what they are.

    Raises:
        FormatError: there are none.
    """
    if not path.is_file():
        raise FormatError(f"{path}: nothing was measured yet; run without --report first")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    newest = lines[-1]["engine"]
    return list({line["key"]: line for line in lines if holds(line, newest)}.values())


def holds(line: Mapping[str, Any], engine: str) -> bool:
    """Whether a line is still true of this version, whose engine has that digest."""
    is_of_a_peer = line["key"].startswith("held-out") and f" {ENGINE} " not in line["key"]
    return is_of_a_peer or bool(line["engine"] == engine)


def _placement(key: str, profile: Mapping[str, Any] | None) -> float | None:
    """Seconds of a barrier where the profile's model of a job was timed; None before there is a profile, and for one thread."""
    if profile is None:
        return None
    *_, runtime, threads = key.split(" ")
    for place in profile["profile"]["noise"]["placements"]:
        if (place["runtime"], str(place["threads"])) == (runtime, threads):
            return float(place["barrier_s"])
    return None


def _jobs(bench: Any, profile_s: float) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Everything to measure, in order, by key; a key ends in the number of threads, but for the profile."""
    from deepthin.profiles.measuring import measure_profile

    def profile() -> dict[str, Any]:
        return {"profile": measure_profile(bench, budget_s=profile_s).to_json()}

    def kit(runtime: str, threads: int) -> dict[str, Any]:
        return {"rows": kit_rows(bench, runtime, threads)}

    def held(index: int, runtime: str, threads: int) -> dict[str, Any]:
        rule = Rule(rounds=7, budget_s=0.8, patience=2.0, settle_s=0.02)
        try:
            probes = time_model(runtime, bench.open_runtimes[runtime], probe_model(items[index], runtime), threads, rule)
        except DeepthinError as error:
            return {"probes": [], "failed": str(error)}
        return {"probes": [probe.to_json() for probe in probes], "failed": ""}

    def group(indices: Sequence[int], threads: Sequence[int]) -> dict[str, Any]:
        models = [probe_model(items[index], ENGINE) for index in indices]
        return {"probes": [probe.to_json() for probe in visited(models, threads, Rule(rounds=3, budget_s=0.3, patience=2.0))]}

    items = held_out()
    yield PROFILE, profile
    for runtime in KIT_PLAN:
        for threads in bench.threads:
            if runtime in bench.open_runtimes:
                yield f"kit {runtime} {threads}", lambda r=runtime, t=threads: kit(r, t)
    order = np.random.Generator(np.random.PCG64(SEED + 1)).permutation(NUM_HELD_OUT).tolist()
    groups = [order[first : first + GROUP] for first in range(0, NUM_HELD_OUT, GROUP)]
    for turn in (1, 2):
        for number, indices in enumerate(groups):
            if turn == 1 or number == 0:
                name = f"held-out {turn} group {number} {ENGINE} {max(bench.threads)}"
                yield name, lambda chosen=indices: group(chosen, bench.threads)
            for index in indices:
                for runtime in bench.open_runtimes:
                    for threads in bench.threads if runtime != ENGINE else ():
                        key = f"held-out {turn} {index} {runtime} {threads}"
                        yield key, lambda i=index, r=runtime, t=threads: held(i, r, t)


def visited(models: Sequence[ProbeModel], threads: Sequence[int], rule: Rule) -> list[Probe]:
    """Every one of ``models`` on our engine at every thread count, visited in turns; one probe of each visit and workload."""
    found: list[Probe] = []
    with ExitStack() as stack:
        opened: list[tuple[ProbeModel, int, DecoderTimed]] = []
        for model in models:
            weights = random_model(model.shape, quant=model.quant)
            timed = [stack.enter_context(closing(DecoderTimed(model, count, weights))) for count in threads]
            opened += [(model, count, one) for count, one in zip(threads, timed, strict=True)]
        for _ in range(VISITS):
            for model, count, timed in opened:
                found += time_model(ENGINE, lambda _model, _threads, kept=timed: Kept(kept), model, count, rule)
    return found


def held_out_probes(lines: Sequence[Mapping[str, Any]], turn: int) -> list[Probe]:
    """What was measured of held-out models in one of the two turns, a probe of each visit.

    A peer decodes as many tokens from a context on as take long enough to time, so the mean context differs a little from turn
    to turn; the first turn's counts.
    """
    by_key = {line["key"]: [Probe.from_json(probe) for probe in line["probes"]] for line in lines if "probes" in line}
    found: list[Probe] = []
    for key, probes in by_key.items():
        if key.startswith(f"held-out {turn} "):
            before = by_key.get(key.replace(f"held-out {turn} ", "held-out 1 "), probes)
            alike = len(before) == len(probes) and " group " not in key
            found += [replace(one, work=old.work) for one, old in zip(probes, before, strict=True)] if alike else probes
    return found


def pooled(probes: Sequence[Probe]) -> list[Probe]:
    """One probe of each runtime, thread count and workload: samples of all that were taken undisturbed, or else of all."""
    found: dict[tuple[str, int, Workload], list[Probe]] = {}
    for probe in probes:
        found.setdefault((probe.runtime, probe.threads, probe.work), []).append(probe)
    return [_pooled([one for one in mine if not is_disturbed(one)] or mine) for mine in found.values()]


def _pooled(probes: Sequence[Probe]) -> Probe:
    """The median over visits of each visit's median, since visits and not samples are independent."""
    if len(probes) == 1:
        return probes[0]
    flags = sorted({flag for probe in probes for flag in probe.flags})
    return replace(probes[0], seconds=measured([one.seconds.median for one in probes], "s"), flags=tuple(flags))


class DecoderTimed:
    """The ordinary decoder with packed random weights; see ``profiles.probing.Timed``."""

    pids: Sequence[int] = ()
    contexts_apart = False

    def __init__(self, model: ProbeModel, threads: int, weights: Model) -> None:
        from deepthin.profiles.whole_model import WholeModel

        self._whole = WholeModel(model.shape, model.quant, threads, model.room, "f16", model=weights)

    def decode(self, context: int) -> tuple[Callable[[], Mapping[str, float]], int]:
        """Steps at one position."""
        first = float(self._whole.run(3, position=context).total_s.min())
        steps = int(min(max(0.05 / first, 4), 64))
        return lambda: {"seconds": float(np.median(self._whole.run(steps, position=context).total_s))}, context

    def prompt(self, tokens: int) -> Callable[[], Mapping[str, float]]:
        """A prompt from the first position on."""
        return lambda: {"seconds": self._whole.prompt(tokens)}

    def close(self) -> None:
        """Stop the threads."""
        self._whole.close()


class Kept:
    """A timed model that stays open when a session closes it."""

    def __init__(self, timed: DecoderTimed) -> None:
        self.pids, self.contexts_apart = timed.pids, timed.contexts_apart
        self.decode, self.prompt = timed.decode, timed.prompt

    def close(self) -> None:
        """Nothing."""


def open_decoder(model: ProbeModel, threads: int) -> DecoderTimed:
    """The truth for our own engine."""
    return DecoderTimed(model, threads, random_model(model.shape, quant=model.quant))


def kit_rows(bench: Any, runtime: str, threads: int) -> list[dict[str, Any]]:
    """What run.sh would bring back from this machine, in llama-bench's words, for one runtime and thread count."""
    rows = []
    for model in KIT_PLAN[runtime]:
        asked = ProbeModel(model.shape, model.quant, (512,), (128,))
        with closing(bench.open_runtimes[runtime](asked, threads)) as timed:
            for gen, prompt, depth in KIT_TESTS:
                samples = [timed.row_seconds(gen, prompt, depth) for _ in range(6)][1:]
                rows.append(_kit_row(bench, runtime, model, threads, gen, prompt, depth, samples))
    return rows


def _kit_row(
    bench: Any, runtime: str, model: ProbeModel, threads: int, gen: int, prompt: int, depth: int, samples: Sequence[float]
) -> dict[str, Any]:
    return {
        "build_commit": f"{runtime} {bench.versions(runtime)}",
        "build_number": 0,
        "cpu_info": str(bench.machine.get("cpu_model", "")),
        "backends": "CPU",
        "model_filename": probe_name(model.shape, model.quant, SUFFIXES[runtime]),
        "model_type": "probe",
        "model_size": 0,
        "model_n_params": 0,
        "n_threads": threads,
        "n_prompt": prompt,
        "n_gen": gen,
        "n_depth": depth,
        "samples_ns": [round(1e9 * seconds) for seconds in samples],
    }
