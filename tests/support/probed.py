"""A device made of arithmetic: times that follow the latency model's terms with known unknowns, and noise of a known size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deepthin.engine.shape import Shape
from deepthin.profiles.latency.curve import BandwidthCurve, BandwidthPoint
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.regression import fit
from deepthin.profiles.latency.runtimes import RUNTIMES
from deepthin.profiles.latency.terms import Conditions, priors, terms
from deepthin.profiles.latency.workload import Workload
from deepthin.profiles.statistics import measured

MIB = 1 << 20
CURVE = BandwidthCurve(
    tuple(
        BandwidthPoint(threads, size, rate * threads**0.7)
        for threads in (1, 2)
        for size, rate in ((MIB, 6e10), (8 * MIB, 5e10), (24 * MIB, 2.4e10), (256 * MIB, 2e10))
    )
)
SMALL = Shape.parse("L=12,d=256,heads=4,kv=2,ff=768,vocab=8192,tied")
TRUTH = {"layer": 1.2e-5, "share": 0.9, "product": 2e-11, "overhead": 4e-5, "attend": 2e-10}


def conditions(runtime: str = "llama.cpp", threads: int = 1) -> Conditions:
    return Conditions(RUNTIMES[runtime], threads, CURVE)


class Device:
    """Answers with the time of any workload.

    Args:
        where: runtime, threads and memory.
        truth: unknown -> its exponential; the others are as the priors have them.
        noise: relative standard deviation of a sample.
    """

    def __init__(self, where: Conditions, truth: Mapping[str, float] = TRUTH, *, noise: float = 0.0, seed: int = 0) -> None:
        self.where, self.truth, self.noise = where, truth, noise
        self._random = np.random.Generator(np.random.PCG64(seed))

    def seconds(self, work: Workload) -> float:
        fitted = fit([], priors(self.where, work.test))
        theta = fitted.theta.copy()
        for name, value in self.truth.items():
            theta[fitted.index[name]] = np.log(value)
        exact = type(fitted)(fitted.names, theta, fitted.covariance, 0.0, 0.0, 0.0, (), ())
        return exact.predict(terms(work, self.where))[0]

    def probe(self, work: Workload, flags: tuple[str, ...] = ()) -> Probe:
        exact = self.seconds(work)
        samples = exact * np.exp(self.noise * self._random.standard_normal(7))
        return Probe(self.where.runtime.name, self.where.threads, work, measured(samples.tolist(), "s"), flags)

    def probes(self, works: Sequence[Workload]) -> list[Probe]:
        return [self.probe(work) for work in works]


def decode_works(count: int, seed: int = 1, quants: Sequence[str] = ("q4_0", "q8_0", "f16")) -> list[Workload]:
    """Workloads of random shapes, formats and contexts."""
    from deepthin.profiles.probe_shapes import random_shape

    generator = np.random.Generator(np.random.PCG64(seed))
    found = []
    for index in range(count):
        shape = random_shape(generator, (2e6, 2e8), (2, 64))
        found.append(Workload(shape, quants[index % len(quants)], context=int(generator.choice([0, 128, 1024]))))
    return found
