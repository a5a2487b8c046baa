"""Measures a profile of this machine within a time budget: noise floor, bandwidth, probes of each runtime, sustained speed.

Order: the noise floor first (the same model timed as two subjects, A/A), then bandwidth by working set and threads, then each
runtime's models in order of importance until its share of the time is used, then some of the engine's models once more (what
repeats tells how far this machine drifts within minutes), and last the sustained speed and the scan for alignment cliffs.
Everything goes through the measuring protocol; what was taken while others used the machine is flagged, and a profile with
many such probes is flagged as a whole.

A virtual machine's CPUs may move to cores of another distance meanwhile, and times of several threads then belong to another
machine, so to say. While they are away, one thread is timed instead, or waited for; at the end the placement that most probes
of a runtime were taken in is the one its model is for, and the others are flagged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from deepthin.engine.accounting import bytes_read_per_token
from deepthin.engine.errors import DeepthinError, PeerMissingError, UsageError
from deepthin.engine.shape import Shape
from deepthin.profiles.contention import CONTENTION_FLAGS, MOVED_CORES, has_moved
from deepthin.profiles.findings import cliffs, dear_heads, slow_kernels
from deepthin.profiles.latency.curve import BandwidthCurve, BandwidthPoint
from deepthin.profiles.latency.model import LatencyModel, fit_model
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.runtimes import ENGINE, RUNTIMES
from deepthin.profiles.latency.terms import Conditions
from deepthin.profiles.latency.workload import TESTS
from deepthin.profiles.machine import fingerprint, machine_name
from deepthin.profiles.probe_shapes import ProbeModel
from deepthin.profiles.probing import OpenTimed, time_model
from deepthin.profiles.profile import MEASURED, Profile
from deepthin.profiles.protocol import Instruments, Rule, measure
from deepthin.profiles.statistics import median
from deepthin.profiles.sustained import sustained

DEFAULT_BUDGET_S = 176.0
MIN_BUDGET_S = 10.0
DISTURBED_SHARE = 0.1  # of probes taken while others used the machine, from which the whole profile is flagged
UNSTEADY = 0.1  # relative change within minutes, in the median, from which a profile is flagged
BANDWIDTH_MIB = (0.125, 0.25, 0.5, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
REFERENCE = Shape.parse("L=12,d=512,heads=8,kv=4,ff=1536,vocab=8192,tied")  # for noise, sustained speed and repeats
CLIFF_WIDTHS = (448, 480, 512, 544, 576, 608, 640, 672, 704, 736, 768)
CLIFF_QUANTS = ("q4_0", "q8_0")
_SHARES = {"noise": 0.03, "bandwidth": 0.07, "engine": 0.35, "peers": 0.40, "repeats": 0.03, "sustained": 0.07, "cliffs": 0.05}
_REPEATS = 6
_ENGINE_RULE = Rule(rounds=3, budget_s=0.25, patience=2.0)  # of one model at one thread count; it opens at once, so many are
_PEER_RULE = Rule(rounds=5, budget_s=0.45, patience=2.0, settle_s=0.01)
_AA_ROUNDS = 15
_AWAY_S = 0.25  # between looks whether cores are back


class ReadBandwidth(Protocol):
    """``engine.bandwidth.read_bandwidth``: bytes per second, one value per repetition."""

    def __call__(self, threads: int, num_bytes: int, repetitions: int) -> Sequence[float]:
        """Measure."""


@dataclass(frozen=True)
class Bench:
    """What measuring needs from outside; tests hand in machines made of arithmetic.

    Attributes:
        machine: this machine's record.
        engine_digest: of the engine being timed.
        threads: thread counts, ascending.
        open_runtimes: runtime -> how to open it; the engine first.
        plans: runtime -> models in order of importance.
        read_bandwidth: measures the memory.
        versions: asked once a runtime was timed.
        instruments: of the protocol, given the processes that are ours and the number of threads.
        clock: monotonic seconds.
    """

    machine: Mapping[str, Any]
    engine_digest: str
    threads: tuple[int, ...]
    open_runtimes: Mapping[str, OpenTimed]
    plans: Mapping[str, Sequence[ProbeModel]]
    read_bandwidth: ReadBandwidth
    versions: Callable[[str], str]
    instruments: Callable[[Sequence[int], int], Instruments] = Instruments.real
    clock: Callable[[], float] = time.perf_counter


@dataclass
class _Taken:
    """What has been collected."""

    probes: list[Probe] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)  # of bandwidth, in order
    findings: list[dict[str, Any]] = field(default_factory=list)


def measure_profile(
    bench: Bench, *, budget_s: float = DEFAULT_BUDGET_S, progress: Callable[[str, int | None, int | None], None] | None = None
) -> Profile:
    """Measure everything and fit the models.

    Args:
        bench: the machine.
        budget_s: seconds for all of it; the first compilation of kernels comes on top.
        progress: told what happens next, with models done and in all.

    Raises:
        UsageError: no thread count, or too little time.
        DeepthinError: not one runtime could be timed.
    """
    if not bench.threads or min(bench.threads) < 1 or budget_s < MIN_BUDGET_S:
        raise UsageError(
            f"measuring a profile: threads {list(bench.threads)}, {budget_s:g} s; thread counts from 1 and at least "
            f"{MIN_BUDGET_S:g} s are needed"
        )
    say = progress or (lambda _message, _done, _total: None)
    start, taken = bench.clock(), _Taken()
    ends = _stage_ends(start, budget_s, [name for name in bench.open_runtimes if name != ENGINE])
    say("noise floor: one model against itself", None, None)
    noise = _noise_floor(bench, ends["noise"] - start)
    say("read bandwidth by working set", None, None)
    _bandwidth(bench, taken, ends["bandwidth"])
    for runtime in bench.open_runtimes:
        _time_runtime(bench, runtime, taken, ends[runtime], say)
    if not taken.probes:
        raise DeepthinError(f"profile: no runtime could be timed; {'; '.join(taken.notes) or 'none was asked for'}")
    noise |= _repeats(bench, taken, ends["repeats"], say)
    taken.probes, placements = marked_by_placement(taken.probes)
    noise["placements"] = [{"runtime": name, "threads": n, "barrier_s": value} for (name, n), value in placements.items()]
    first = taken.probes[0].runtime
    curve = _curve(bench, taken, {threads: placements.get((first, threads)) for threads in bench.threads})
    lasting = None
    if ENGINE in bench.open_runtimes:
        say("sustained speed", None, None)
        lasting = _sustained(bench, max(ends["sustained"] - bench.clock(), 3.0))
        say("widths side by side", None, None)
        _scan_cliffs(bench, taken, ends["cliffs"])
    models = fit_models(taken.probes, curve)
    flags = profile_flags(taken.probes, noise)
    runtimes = tuple(dict.fromkeys(probe.runtime for probe in taken.probes))
    return Profile(
        name=machine_name(bench.machine),
        title=str(bench.machine.get("cpu_model", bench.machine.get("arch", "this machine"))),
        basis=MEASURED,
        created_utc=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=bench.machine,
        curve=curve,
        models=models,
        fingerprint=fingerprint(bench.machine),
        engine_digest=bench.engine_digest,
        versions={name: bench.versions(name) for name in runtimes},
        probes=tuple(taken.probes),
        bandwidth_samples=tuple(taken.samples),
        noise=noise,
        sustained=lasting,
        findings=(*taken.findings, *dear_heads(models), *slow_kernels(models)),
        flags=flags,
        notes=tuple(taken.notes),
        wall_s=bench.clock() - start,
    )


def fit_models(probes: Sequence[Probe], curve: BandwidthCurve) -> tuple[LatencyModel, ...]:
    """One model per runtime, thread count and test that has probes."""
    found = []
    for runtime, threads in dict.fromkeys((probe.runtime, probe.threads) for probe in probes):
        mine = [probe for probe in probes if (probe.runtime, probe.threads) == (runtime, threads)]
        conditions = Conditions(RUNTIMES[runtime], threads, curve)
        found += [fit_model(mine, conditions, test) for test in TESTS if any(probe.work.test == test for probe in mine)]
    return tuple(found)


def profile_flags(probes: Sequence[Probe], noise: Mapping[str, Any]) -> tuple[str, ...]:
    """What speaks against a whole profile: contention in many probes, an A/A test that finds a difference, times that move."""
    flags: list[str] = []
    for flag in sorted(CONTENTION_FLAGS):
        disturbed = sum(flag in probe.flags for probe in probes)
        flags += [flag] if disturbed > DISTURBED_SHARE * len(probes) else []
    low, high = (noise["aa"][key] for key in ("ci_low", "ci_high")) if noise.get("aa") else (1.0, 1.0)
    if not low <= 1.0 <= high:
        flags.append("unequal-to-itself")
    if noise.get("repeat", {}).get("median", 0.0) > UNSTEADY:
        flags.append("does-not-repeat")
    return tuple(flags)


def _stage_ends(start: float, budget_s: float, peers: Sequence[str]) -> dict[str, float]:
    """When each stage should be over; peers share theirs. What one takes too long the next has less."""
    ends, at = {}, start
    for stage, share in _SHARES.items():
        for name in peers if stage == "peers" else [ENGINE if stage == "engine" else stage]:
            at += budget_s * share / (len(peers) if stage == "peers" else 1)
            ends[name] = at
    return ends


def _noise_floor(bench: Bench, seconds: float) -> dict[str, Any]:
    """One model timed as two subjects; their ratio should be 1, and its interval is the floor.

    Opened once: two that are opened lie differently against the caches, and really differ by a percent.
    """
    runtime = next(iter(bench.open_runtimes))
    threads = max(bench.threads)
    try:
        opened = bench.open_runtimes[runtime](ProbeModel(REFERENCE, "q8_0"), threads)
    except DeepthinError:  # said again, with its reason, when its models are timed
        return {}
    with closing(opened) as timed:
        subject, _ = timed.decode(0)
        rule = Rule(rounds=_AA_ROUNDS, budget_s=seconds)
        session = measure({"a": subject, "b": subject}, rule, instruments=bench.instruments(timed.pids, threads))
    if session.failures:
        return {}
    return {"aa": session.speed_ratio("a", "b", "seconds").to_json(), "aa_flags": list(session.flags)}


def _bandwidth(bench: Bench, taken: _Taken, end: float) -> None:
    """Every size at every thread count, up to three times over, so that a disturbance does not bend the curve."""
    for turn in range(3):
        for threads in bench.threads:
            if not turn or bench.clock() < end:
                _read_all_sizes(bench, taken, threads)


def _read_all_sizes(bench: Bench, taken: _Taken, threads: int) -> None:
    barrier_s = bench.instruments((), threads).barrier()
    for mib in BANDWIDTH_MIB:
        size = int(mib * (1 << 20))
        rates = [float(rate) for rate in bench.read_bandwidth(threads, size, 9 if mib <= 4 else 3)]
        taken.samples.append({"threads": threads, "num_bytes": size, "bytes_per_s": rates, "barrier_s": barrier_s})


def _curve(bench: Bench, taken: _Taken, placements: Mapping[int, float | None]) -> BandwidthCurve:
    """Medians of the rates read in the first runtime's placement, which is tried once more where there are none; or of all."""
    points = []
    for threads, place in placements.items():
        if all(_is_elsewhere(one, threads, place) for one in taken.samples):
            _read_all_sizes(bench, taken, threads)
        mine = [one for one in taken.samples if one["threads"] == threads]
        kept = [one for one in mine if not _is_elsewhere(one, threads, place)] or mine
        for size in dict.fromkeys(int(one["num_bytes"]) for one in kept):
            rates = [rate for one in kept if one["num_bytes"] == size for rate in one["bytes_per_s"]]
            points.append(BandwidthPoint(threads, size, median(rates)))
    return BandwidthCurve(tuple(points))


def _is_elsewhere(sample: Mapping[str, Any], threads: int, barrier_s: float | None) -> bool:
    return sample["threads"] != threads or has_moved(sample["barrier_s"], barrier_s)


def marked_by_placement(probes: Sequence[Probe]) -> tuple[list[Probe], dict[tuple[str, int], float]]:
    """Probes flagged ``moved-cores`` where their cores were not as far apart as for most of their runtime and thread count.

    Returns:
        the probes, and (runtime, threads) -> seconds of a barrier in the placement of most, where there are barriers.
    """
    placements: dict[tuple[str, int], float] = {}
    for key in dict.fromkeys((probe.runtime, probe.threads) for probe in probes):
        known = [probe.barrier_s for probe in probes if (probe.runtime, probe.threads) == key and probe.barrier_s]
        if known:
            usual = max(known, key=lambda one: sum(not has_moved(one, other) for other in known))
            placements[key] = median([one for one in known if not has_moved(one, usual)])
    marked = []
    for probe in probes:
        flags = [flag for flag in probe.flags if flag != MOVED_CORES]
        if has_moved(probe.barrier_s, placements.get((probe.runtime, probe.threads))):
            flags.append(MOVED_CORES)
        marked.append(replace(probe, flags=tuple(flags)))
    return marked, placements


def _time_runtime(
    bench: Bench, runtime: str, taken: _Taken, end: float, say: Callable[[str, int | None, int | None], None]
) -> None:
    """The models of a runtime until ``end``; what would probably end later, taking as long as most so far, is left out."""
    plan = bench.plans[runtime]
    jobs = [(model, threads) for model in plan for threads in bench.threads]
    total, took = len(jobs), [0.0]
    while jobs:
        begin = bench.clock()
        if len(jobs) < total and begin + median(took) > end:
            taken.notes.append(f"{runtime}: {len(jobs)} of {total} timings were left out for lack of time")
            return
        model, threads = jobs.pop(_next_job(bench, [threads for _, threads in jobs], end - max(took) * len(jobs)))
        say(f"{runtime}, {threads} threads: {model.shape.text} {model.quant}", total - len(jobs), total)
        try:
            taken.probes += _session(bench, runtime, model, threads)
        except PeerMissingError as error:
            taken.notes.append(f"{runtime}: skipped, {error}")
            return
        except DeepthinError as error:
            taken.notes.append(f"{runtime}: {model.shape.text} {model.quant}: {error}")
            jobs = [job for job in jobs if job[0] is not model]
        took.append(bench.clock() - begin)


def _next_job(bench: Bench, threads: Sequence[int], until: float) -> int:
    """The first job whose cores are where they were at first; waits for them ``until`` then, and takes what comes first."""
    while True:
        away = {count for count in set(threads) if _is_away(bench, count)}
        found = next((at for at, count in enumerate(threads) if count not in away), None)
        if found is not None:
            return found
        if bench.clock() >= until:
            return 0
        bench.instruments((), 1).sleep(_AWAY_S)


def _is_away(bench: Bench, threads: int) -> bool:
    tools = bench.instruments((), threads)
    return has_moved(tools.barrier(), tools.reference_barrier())


def _session(bench: Bench, runtime: str, model: ProbeModel, threads: int) -> list[Probe]:
    rule = _ENGINE_RULE if runtime == ENGINE else _PEER_RULE
    return time_model(runtime, bench.open_runtimes[runtime], model, threads, rule, make_instruments=bench.instruments)


def _repeats(bench: Bench, taken: _Taken, end: float, say: Callable[[str, int | None, int | None], None]) -> dict[str, Any]:
    """Some models of the first runtime once more: the relative changes are how far the same thing drifts within minutes."""
    runtime = taken.probes[0].runtime
    say(f"{runtime}: some models once more", None, None)
    threads = max(bench.threads)
    before = {p.work: p for p in taken.probes if (p.runtime, p.threads) == (runtime, threads)}
    changes: list[float] = []
    for model in bench.plans[runtime][:_REPEATS]:
        if changes and bench.clock() > end:
            break
        try:
            again = _session(bench, runtime, ProbeModel(model.shape, model.quant, model.contexts), threads)
        except DeepthinError:
            continue
        pairs = [(before[probe.work], probe) for probe in again if probe.work in before]
        changes += [
            math.fabs(now.seconds.median / then.seconds.median - 1)
            for then, now in pairs
            if not has_moved(then.barrier_s, now.barrier_s)
        ]
    return {"repeat": {"median": median(changes), "max": max(changes), "n": len(changes)}} if changes else {}


def _sustained(bench: Bench, seconds: float) -> dict[str, Any]:
    timed = bench.open_runtimes[ENGINE](ProbeModel(REFERENCE, "q8_0"), max(bench.threads))
    try:
        return sustained(timed.decode(0)[0], seconds, clock=bench.clock)
    finally:
        timed.close()


def _scan_cliffs(bench: Bench, taken: _Taken, end: float) -> None:
    """Blocks of neighbouring widths, bytes read per second of each."""
    for quant in CLIFF_QUANTS:
        rates = {}
        for width in CLIFF_WIDTHS:
            if bench.clock() > end:
                taken.notes.append(f"widths from {width} on in {quant} were not compared for lack of time")
                return
            shape = Shape(
                num_layers=4, hidden_size=width, num_heads=width // 32, intermediate_size=3 * width, vocab_size=32, head_dim=32
            )
            timed = bench.open_runtimes[ENGINE](ProbeModel(shape, quant), 1)
            try:
                subject = timed.decode(0)[0]
                seconds = min(subject()["seconds"] for _ in range(3))
            finally:
                timed.close()
            rates[width] = bytes_read_per_token(shape, quant) / seconds
        taken.findings += cliffs(rates, ENGINE, quant)
