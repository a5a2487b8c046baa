"""This machine as :mod:`measuring` wants it: the runtimes that are installed, their plans, and the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from deepthin.engine.bandwidth import read_bandwidth
from deepthin.engine.cores import default_threads
from deepthin.engine.errors import PeerMissingError
from deepthin.engine.shape import Shape
from deepthin.profiles.block_costs import engine_digest
from deepthin.profiles.latency.runtimes import ENGINE, LLAMA_CPP, ONNXRUNTIME
from deepthin.profiles.measuring import Bench
from deepthin.profiles.probe_plans import plan_of
from deepthin.profiles.probe_shapes import ProbeModel
from deepthin.profiles.probing import EngineTimed, OpenTimed, PeerFiles, Timed, WriteModel, open_engine

_PACKAGES = {LLAMA_CPP: "llama_cpp", ONNXRUNTIME: "onnxruntime"}
_TINY = Shape.parse("L=1,d=64,heads=2,ff=64,vocab=64,tied")


@contextmanager
def host_bench(
    machine: Mapping[str, Any],
    runtimes: Sequence[str],
    writers: Mapping[str, WriteModel],
    threads: Sequence[int] | None = None,
) -> Iterator[Bench]:
    """Everything to measure this machine with; temporary files are removed at the end. Loads the kernels.

    Args:
        machine: this machine's record.
        runtimes: wanted; peers that are not installed say so when they are opened, and are skipped.
        writers: how peers' files are written.
        threads: thread counts; 1 and all usable CPUs when None.
    """
    counts = tuple(sorted(set(threads or (1, default_threads()))))
    with ExitStack() as stack:
        opened: dict[str, OpenTimed] = {}
        files: dict[str, PeerFiles] = {}
        for name in runtimes:
            if name == ENGINE:
                opened[name] = open_engine
            elif find_spec(_PACKAGES[name]) is None:
                opened[name] = _missing(name)
            else:
                files[name] = stack.enter_context(PeerFiles(name, writers[name]))
                opened[name] = files[name]
        EngineTimed(ProbeModel(_TINY, "q4_0", prompts=(2,)), 1).close()  # compiles what is not compiled yet
        yield Bench(
            machine=machine,
            engine_digest=engine_digest() if ENGINE in opened else "",
            threads=counts,
            open_runtimes=opened,
            plans={name: plan_of(name) for name in opened},
            read_bandwidth=_rates,
            versions=_versions(files),
        )


def _missing(name: str) -> OpenTimed:
    """Stands for a peer that is not installed, so that its absence is said and not hidden."""

    def open_timed(model: ProbeModel, threads: int) -> Timed:
        raise PeerMissingError(f"{name} is not installed")

    return open_timed


def _rates(threads: int, num_bytes: int, repetitions: int) -> list[float]:
    rates: list[float] = read_bandwidth(threads, num_bytes, repetitions).tolist()
    return rates


def _versions(files: Mapping[str, PeerFiles]) -> Callable[[str], str]:
    from deepthin._version import VERSION

    return lambda name: VERSION if name == ENGINE else files[name].version
