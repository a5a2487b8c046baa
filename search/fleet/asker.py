"""The asking side: a cost that comes from the fleet. Submits a job and waits until some worker has measured it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from deepthin.engine.errors import DeepthinError, FormatError
from deepthin.engine.shape import Shape
from deepthin.profiles.schema import TokenCost
from deepthin.search.cost import Cost, MeasuringStoppedError
from deepthin.search.fleet.jobs import Answer, Device, JobQueue, JobSpec
from deepthin.search.fleet.tables import DONE, FAILED

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_SAY_AFTER_S = 5.0  # of waiting for one job
_SILENT_S = 30.0  # without a sign of a worker from which that is said


def wait_for_device(
    queue: JobQueue, tag: str, *, patience_s: float | None = None, say: Callable[[str], None] | None = None
) -> Device:
    """What is known of ``tag``, as soon as its first worker has come.

    Raises:
        MeasuringStoppedError: none came within ``patience_s``.
    """
    start, pause = time.monotonic(), _FIRST_PAUSE_S
    while (device := queue.device(tag)) is None:
        if say is not None:
            say(f"waiting for the first worker: deepthin search worker --storage URL --device {tag}")
        if patience_s is not None and time.monotonic() - start > patience_s:
            known = queue.tags()
            others = f"; workers have served {', '.join(known)}" if known else ""
            raise MeasuringStoppedError(
                f"--device {tag}: no worker came within {patience_s:g} s{others}; start deepthin search worker --device {tag} "
                f"there"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return device


class FleetCosts:
    """Costs measured by the workers of one device; pass :attr:`measure` and :attr:`remeasure` to ``run_search``.

    Args:
        queue: where jobs go.
        device: from :func:`wait_for_device`.
        engine: digest of this side's engine; workers with another do not take the jobs.
        context: cached tokens.
        threads: threads to decode with; None for the device's own default.
        patience_s: seconds to wait for one job before giving up; None waits for ever.
        say: told what is waited for, if it takes long.
    """

    def __init__(
        self,
        queue: JobQueue,
        device: Device,
        *,
        engine: str,
        context: int,
        threads: int | None = None,
        patience_s: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.num_asked = 0  # jobs that nobody had asked for before
        self._queue, self._device, self._engine = queue, device, engine
        self._context, self._threads = context, threads or device.threads
        self._patience_s = patience_s
        self._say = say or (lambda _: None)

    def announce(self, candidates: Iterable[tuple[Shape, str]], number: int) -> None:
        """Ask for several at once, so that all machines of the tag have work; the other methods collect the results.

        Args:
            candidates: what to measure.
            number: 0 for :meth:`measure`, else the repeat of :meth:`remeasure`.
        """
        for shape, quant in candidates:
            self._submit(self._spec(shape, quant, number))

    def measure(self, shape: Shape, quant: str) -> TokenCost | Cost:
        """The first measurement.

        Raises:
            DeepthinError: it cannot be measured there; with the worker's reason.
            MeasuringStoppedError: the database went away, or no worker took the job within the patience.
        """
        return self._collect(self._spec(shape, quant, 0))

    def remeasure(self, shape: Shape, quant: str, number: int) -> TokenCost | Cost:
        """The ``number``-th repeat, measured anew."""
        return self._collect(self._spec(shape, quant, number))

    def _spec(self, shape: Shape, quant: str, take: int) -> JobSpec:
        return JobSpec(self._device.tag, self._engine, shape.text, quant, self._context, self._threads, take)

    def _submit(self, spec: JobSpec) -> None:
        self.num_asked += self._queue.submit(spec)

    def _collect(self, spec: JobSpec) -> TokenCost | Cost:
        self._submit(spec)
        start, pause, told = time.monotonic(), _FIRST_PAUSE_S, 0.0
        while True:
            answer = self._queue.answer(spec)
            if answer.state == FAILED:
                raise DeepthinError(answer.why)
            if answer.state == DONE:
                return _cost(answer, spec)
            waited = time.monotonic() - start
            if self._patience_s is not None and waited > self._patience_s:
                raise MeasuringStoppedError(f"{self._why_waiting(waited)}; start the same command again to go on from here")
            if waited - told > _SAY_AFTER_S:
                told = waited
                self._say(self._why_waiting(waited))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _why_waiting(self, waited: float) -> str:
        tag, device = self._device.tag, self._queue.device(self._device.tag)
        if device is not None and device.engine != self._engine:
            return f"device {tag}: its workers run engine {device.engine}, not {self._engine}; install the same deepthin there"
        if device is None or device.idle_s > _SILENT_S:
            silent = "" if device is None else f" for {device.idle_s:.0f} s"
            return f"device {tag}: no sign of a worker{silent}"
        return f"device {tag}: waiting for a measurement since {waited:.0f} s"


def _cost(answer: Answer, spec: JobSpec) -> TokenCost | Cost:
    try:
        document = answer.result or {}
        return TokenCost.from_json(document) if "seconds_per_token" in document else Cost.from_json(document)
    except FormatError as error:
        raise MeasuringStoppedError(f"the stored result of {spec.shape} {spec.quant} is damaged: {error}") from error
