"""A whole machine made of arithmetic: runtimes, memory and clock, for measuring profiles without measuring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deepthin.engine.errors import DeepthinError, PeerMissingError
from deepthin.engine.shape import Shape
from deepthin.profiles.contention import Counters
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload
from deepthin.profiles.measuring import Bench
from deepthin.profiles.probe_shapes import ProbeModel
from deepthin.profiles.probing import Timed
from deepthin.profiles.protocol import Instruments, Subject
from tests.support.probed import CURVE, TRUTH, Device, conditions


@dataclass
class FakeHost:
    """Times follow ``tests.support.probed``; ``others`` is the CPU share that another process takes of one core."""

    noise: float = 0.005
    others: float = 0.0
    now: float = 0.0
    opened: list[tuple[str, str, int]] = field(default_factory=list)
    open_count: int = 0
    moves: Callable[[float], float] = lambda _: 1e-7  # seconds of a barrier at a time
    rate_factor: Callable[[], float] = lambda: 1.0
    missing: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()  # quants

    def bench(
        self, runtimes: Sequence[str], plans: dict[str, Sequence[ProbeModel]], threads: tuple[int, ...] = (1, 2)
    ) -> Bench:
        return Bench(
            machine={"cpu_model": "Fake CPU", "usable_cpus": 2, "simd": "avx2"},
            engine_digest="digest",
            threads=threads,
            open_runtimes={name: self._opener(name) for name in runtimes},
            plans=plans,
            read_bandwidth=self._rates,
            versions=lambda name: f"{name} 1.0",
            instruments=lambda _, threads: self.instruments(threads),
            clock=lambda: self.now,
        )

    def instruments(self, threads: int) -> Instruments:
        several = threads > 1
        return Instruments(
            clock=lambda: self.now,
            sleep=self.spend,
            counters=lambda: Counters(self.now, busy_s=self.now * (1 + self.others), own_s=self.now, steal_s=0.0, switches=0),
            sentinel=lambda: 1e-4,
            fastest_sentinel=lambda: 1e-4,
            barrier=lambda: self.moves(self.now) if several else None,
            reference_barrier=lambda: self.moves(0.0),
        )

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def _rates(self, threads: int, num_bytes: int, repetitions: int) -> list[float]:
        rate = CURVE.rate(threads, num_bytes) * self.rate_factor()
        self.spend(repetitions * num_bytes / rate)
        return [rate] * repetitions

    def _opener(self, runtime: str):  # type: ignore[no-untyped-def]
        def open_timed(model: ProbeModel, threads: int) -> Timed:
            if runtime in self.missing:
                raise PeerMissingError(f"{runtime} is not installed")
            if model.quant in self.refuses:
                raise DeepthinError(f"refused by this test: {model.quant}")
            self.opened.append((runtime, model.shape.text, threads))
            return FakeTimed(self, runtime, model, threads)

        return open_timed


class FakeTimed:
    """See ``profiles.probing.Timed``."""

    pids: Sequence[int] = ()
    contexts_apart = False

    def __init__(self, host: FakeHost, runtime: str, model: ProbeModel, threads: int) -> None:
        self.host, self.model = host, model
        self.device = Device(conditions(runtime, threads), TRUTH)
        self.random = np.random.Generator(np.random.PCG64(len(host.opened)))
        host.open_count += 1
        host.spend(0.01)

    def decode(self, context: int) -> tuple[Subject, int]:
        return self._subject(Workload(self.model.shape, self.model.quant, DECODE, 1, context), 8), context

    def prompt(self, tokens: int) -> Subject:
        return self._subject(Workload(self.model.shape, self.model.quant, PREFILL, tokens, 0), 1)

    def close(self) -> None:
        self.host.open_count -= 1

    def _subject(self, work: Workload, steps: int) -> Subject:
        exact = self.device.seconds(work)

        def run() -> dict[str, float]:
            seconds = exact * float(np.exp(self.host.noise * self.random.standard_normal()))
            self.host.spend(seconds * steps)
            return {"seconds": seconds}

        return run


def small_plan() -> list[ProbeModel]:
    texts = (
        "L=24,d=256,heads=4,kv=2,ff=768,vocab=4096,tied",
        "L=4,d=512,heads=8,kv=4,ff=1536,vocab=8192,tied",
        "L=40,d=128,heads=4,kv=4,ff=384,vocab=2048,tied",
        "L=8,d=768,heads=12,kv=4,ff=2048,vocab=16384,tied",
    )
    return [ProbeModel(Shape.parse(text), quant, (0, 512), (32,)) for text in texts for quant in ("q4_0", "q8_0")]
