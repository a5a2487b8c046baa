"""A worker: takes one job of its device after another, measures it, stores the result. Holds nothing that its death loses.

While it measures, a thread renews the lease. If the lease is lost all the same (the process was stopped, or the database
away, for longer than it lasts), the result is thrown away, since another worker may be measuring the shape or have done so.
"""

from __future__ import annotations

import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from deepthin.engine.errors import DeepthinError
from deepthin.profiles.schema import TokenCost
from deepthin.search.cost import Cost, MeasuringStoppedError
from deepthin.search.fleet.host import HostLock
from deepthin.search.fleet.jobs import Device, JobQueue, JobSpec, Lease

DEFAULT_LEASE_S = 60.0  # far beyond the three seconds of a measurement; a killed worker's job waits this long
_RENEWALS = 4  # per lease
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0

Measure = Callable[[JobSpec], TokenCost | Cost]
ONCE, IDLE, STOPPED = "once", "idle", "stopped"


@dataclass(slots=True)
class Report:
    """What a worker did: jobs measured, failed for good, given back when it was told to stop, lost to another worker."""

    measured: int = 0
    failed: int = 0
    given_back: int = 0
    lost: int = 0
    ended: str = ""


class Worker:
    """One device's worker.

    Args:
        queue: where jobs come from.
        device: what this machine is.
        host: its name, see :func:`~deepthin.search.fleet.host.host_name`.
        lock: held while measuring.
        measure: measures a job; a :class:`DeepthinError` from it fails the job for good.
        lease_s: seconds after which a job is taken from a worker that fell silent.
        say: told what is going on.

    Raises:
        UsageError: the tag stands for other hardware.
        MeasuringStoppedError: the database is away for too long; so does :meth:`run`.
    """

    def __init__(
        self,
        queue: JobQueue,
        device: Device,
        host: str,
        lock: HostLock,
        measure: Measure,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.name = uuid.uuid4().hex
        self.report = Report()
        self._queue, self._device, self._host, self._lock = queue, device, host, lock
        self._measure, self._lease_s = measure, lease_s
        self._say = say or (lambda _: None)
        self._stop = threading.Event()
        self._interruptible = False
        queue.register(device, host)

    def run(self, *, once: bool = False, idle_exit_s: float | None = None) -> Report:
        """Take jobs until told to stop by SIGTERM, after one job (``once``), or after ``idle_exit_s`` without any."""
        with self._lock, self._stopping_on_sigterm():
            self._say(f"{self._device.tag}: waiting for jobs")
            idle_since, pause = time.monotonic(), _FIRST_PAUSE_S
            while not self._stop.is_set():
                lease = self._claim()
                if lease is not None:
                    self._do(lease)
                    if once:
                        return self._ended(ONCE)
                    self._say(f"{self._device.tag}: waiting for jobs ({self.report.measured} measured)")
                    idle_since, pause = time.monotonic(), _FIRST_PAUSE_S
                    continue
                if idle_exit_s is not None and time.monotonic() - idle_since >= idle_exit_s:
                    return self._ended(IDLE)
                self._stop.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        return self._ended(STOPPED)

    def stop(self) -> None:
        """End :meth:`run` after the job at hand."""
        self._stop.set()

    def _ended(self, why: str) -> Report:
        self.report.ended = why
        return self.report

    def _claim(self) -> Lease | None:
        if not self._lock.acquire():
            return None
        lease = self._queue.claim(self._device, self._host, self.name, self._lease_s)
        if lease is None:
            self._lock.release()
        return lease

    def _do(self, lease: Lease) -> None:
        """Measure one job and store how it ended."""
        spec = lease.spec
        repeat = f", repeat {spec.take}" if spec.take else ""
        self._say(f"{self._device.tag}: measuring {spec.shape} {spec.quant}{repeat}")
        result: dict[str, Any] | None = None
        why = ""
        try:
            with self._renewing(lease), self._being_interruptible():
                result = self._measure(spec).to_json()
        except MeasuringStoppedError:
            raise
        except DeepthinError as error:
            why = str(error)
        except MemoryError:
            why = "out of memory on the device"
        except BaseException:  # SIGTERM, Ctrl-C, a bug: others may still measure it
            if self._queue.give_back(lease, self._host, self.name):
                self.report.given_back += 1
            if self._stop.is_set():
                return
            raise
        finally:
            self._lock.release()
        kept = (
            self._queue.fail(lease, self._host, self.name, why)
            if result is None
            else self._queue.finish(lease, self._host, self.name, result)
        )
        if not kept:
            self.report.lost += 1
        elif result is None:
            self.report.failed += 1
        else:
            self.report.measured += 1

    @contextmanager
    def _renewing(self, lease: Lease) -> Iterator[None]:
        """Renew the lease from a thread until the block ends."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self._lease_s / _RENEWALS):
                try:
                    if not self._queue.renew(lease, self._host, self.name, self._lease_s):
                        return  # lost; storing will be refused
                except DeepthinError:  # the database is away; storing the result will say so if it stays away
                    continue

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    @contextmanager
    def _being_interruptible(self) -> Iterator[None]:
        """Within the block SIGTERM raises, since a measurement should not hold up a shutdown."""
        self._interruptible = True
        try:
            if self._stop.is_set():
                raise _Interrupted
            yield
        finally:
            self._interruptible = False

    @contextmanager
    def _stopping_on_sigterm(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(_signal: int, _frame: FrameType | None) -> None:
            self._stop.set()
            if self._interruptible:
                self._interruptible = False
                raise _Interrupted

        before = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


class _Interrupted(BaseException):
    """Told to stop while measuring; a ``BaseException`` so that nothing on the way takes it for a failed measurement."""
