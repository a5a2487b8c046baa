"""``deepthin search worker``: this machine measures for searches that run elsewhere and share a database with it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from deepthin.cli.arguments import argument, parse_path, real
from deepthin.cli.fleet import add_storage, device_tag, open_queue
from deepthin.cli.outcome import Outcome
from deepthin.cli.progress import Progress
from deepthin.engine.errors import UsageError
from deepthin.engine.shape import Shape

if TYPE_CHECKING:
    from deepthin.profiles.schema import TokenCost
    from deepthin.search.fleet.jobs import JobSpec

_ENDINGS = {"once": "one job was asked for", "idle": "no job came", "stopped": "was told to stop"}
EXAMPLES = """examples:
  deepthin search worker --storage postgresql://me@db/deepthin --device laptop
  deepthin search worker --storage postgresql://me@db/deepthin --device pi5 --idle-exit 600

and anywhere, the search that asks for the measurements:
  deepthin search --storage postgresql://me@db/deepthin --device laptop --params 150M

A tag stands for one kind of machine; several machines of that kind may serve it, each one job at a time, whatever runs on it.
A worker that dies loses nothing: its job goes to another one after --lease seconds. SIGTERM gives the job back at once.
Passwords come from PGPASSWORD or ~/.pgpass rather than from the URL, which other users of the machine can see.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    add_storage(parser)
    parser.add_argument("--device", type=device_tag, metavar="TAG", help="name of this kind of machine (needed)")
    parser.add_argument("--once", action="store_true", help="end after one job")
    parser.add_argument(
        "--idle-exit", type=real(0, 1e9), metavar="S", help="end after S seconds without a job (default: never)"
    )
    parser.add_argument(
        "--lease", type=real(1, 86_400), metavar="S", help="seconds after which a job is taken from a dead worker (default: 60)"
    )
    parser.add_argument(
        "--store", type=argument(parse_path), metavar="FILE", help="timings to reuse and add to (default: in the cache folder)"
    )


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure until told to stop.

    Raises:
        UsageError: no database or tag is named, or the tag stands for other hardware.
        DeepthinError: the database is away for too long or refuses, or the timings cannot be kept.
    """
    if options.storage is None or options.device is None:
        raise UsageError("search worker needs --storage URL and --device TAG; see deepthin search worker --help")
    with open_queue(options.storage, progress) as queue:
        progress("loading kernels (compiled once per machine)")
        from deepthin.engine.cores import default_threads
        from deepthin.engine.jit import user_cache_dir
        from deepthin.profiles.block_costs import BlockCosts, engine_digest
        from deepthin.profiles.machine import fingerprint, machine_name, machine_record
        from deepthin.search.fleet.host import HostLock, host_name
        from deepthin.search.fleet.jobs import Device
        from deepthin.search.fleet.worker import DEFAULT_LEASE_S, Worker

        record = machine_record()
        device = Device(options.device, fingerprint(record), machine_name(record), default_threads(), engine_digest())
        store: Path = options.store or user_cache_dir() / "fleet" / options.device / "timings.jsonl"
        costs: dict[tuple[int, int, int], BlockCosts] = {}

        def measure(spec: JobSpec) -> TokenCost:
            settings = (spec.threads, spec.context, spec.take)
            if settings not in costs:  # each repeat has a store of its own, so that nothing is found but everything is kept
                path = store.with_name(f"{store.stem}-repeat{spec.take}.jsonl") if spec.take else store
                costs[settings] = BlockCosts(path, spec.threads, spec.context)
            return costs[settings].measure(Shape.parse(spec.shape), spec.quant)

        lock = HostLock(user_cache_dir())
        lease_s = options.lease or DEFAULT_LEASE_S
        worker = Worker(queue, device, host_name(), lock, measure, lease_s=lease_s, say=progress)
        report = worker.run(once=options.once, idle_exit_s=options.idle_exit)
    parts = [f"{report.measured} measured", f"{report.failed} not measurable"]
    parts += [f"{report.given_back} given back"] if report.given_back else []
    parts += [f"{report.lost} lost to another worker"] if report.lost else []
    text = f"device {options.device}: {', '.join(parts)}; ended, since {_ENDINGS[report.ended]}"
    return Outcome("search-worker", {"device": options.device, **asdict(report)}, text)
