"""Workers and askers in processes of their own, whose measurements need no quiet machine: times as in ``fake_costs.py``.

    python -m tests.support.fleet_process worker URL LOG [--lease S] [--takes S] [--idle-exit S]
    python -m tests.support.fleet_process asker URL OUT TRIALS [--lease S]

LOG gets ``start NAME TIME SHAPE QUANT TAKE`` and ``end ...`` lines, so that measurements of killed processes count too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from deepthin.engine.shape import Shape
from deepthin.profiles.schema import TokenCost
from deepthin.search.config import SearchConfig
from deepthin.search.fleet.asker import FleetCosts, wait_for_device
from deepthin.search.fleet.database import Database
from deepthin.search.fleet.host import HostLock, host_name
from deepthin.search.fleet.jobs import Device, JobQueue, JobSpec
from deepthin.search.fleet.url import parse_storage
from tests.support.fake_costs import CONTEXT, fake_cost

TAG, ENGINE = "box", "0123456789ab"
DEVICE = Device(TAG, "f00d", "a machine made of arithmetic", 2, ENGINE)
MACHINE = f"{DEVICE.machine} {DEVICE.fingerprint}"


def config(trials: int) -> SearchConfig:
    """The search of all these tests; TPE proposes in less time than the guide."""
    return SearchConfig(params=2_000_000, vocabs=(4096,), trials=trials, machine=MACHINE, sampler="tpe")


def worker(url: str, log: Path, lease_s: float, takes_s: float, idle_exit_s: float) -> None:
    from deepthin.search.fleet.worker import Worker

    def measure(spec: JobSpec) -> TokenCost:
        words = f"{os.getpid()} {{:.6f}} {spec.shape} {spec.quant} {spec.take}"
        _write(log, f"start {words.format(time.time())}")
        end = time.monotonic() + takes_s
        while time.monotonic() < end:  # in steps, as a measurement goes, so that a signal comes through
            time.sleep(0.01)
        _write(log, f"end {words.format(time.time())}")
        return fake_cost(Shape.parse(spec.shape), spec.quant)

    queue = JobQueue(Database(parse_storage(url)))
    found = Worker(queue, DEVICE, host_name(), HostLock(log.parent), measure, lease_s=lease_s)
    report = found.run(idle_exit_s=idle_exit_s)
    print(
        json.dumps({"measured": report.measured, "given_back": report.given_back, "lost": report.lost, "ended": report.ended})
    )


def asker(url: str, out: Path, trials: int) -> None:
    from deepthin.search.fleet.trials import SharedTrials
    from deepthin.search.run import run_search

    queue = JobQueue(Database(parse_storage(url)))
    device = wait_for_device(queue, TAG)
    costs = FleetCosts(queue, device, engine=ENGINE, context=CONTEXT)
    settings = config(trials)
    with SharedTrials(queue.database, "study", settings.to_json()) as log:
        run_search(settings, measure=costs.measure, out=out, remeasure=costs.remeasure, log=log, announce=costs.announce)


def _write(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("url")
    parser.add_argument("path", type=Path)
    parser.add_argument("trials", type=int, nargs="?", default=0)
    parser.add_argument("--lease", type=float, default=2.0)
    parser.add_argument("--takes", type=float, default=0.03)
    parser.add_argument("--idle-exit", type=float, default=90.0)
    given = parser.parse_args()
    if given.role == "worker":
        worker(given.url, given.path, given.lease, given.takes, given.idle_exit)
    else:
        asker(given.url, given.path, given.trials)
