"""A probe: one workload timed once on one runtime, as profiles keep it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from deepthin.engine.errors import FormatError, ShapeError, UsageError
from deepthin.engine.shape import Shape
from deepthin.profiles.latency.workload import Workload
from deepthin.profiles.schema import Measured, as_float, as_int, as_str, exact_keys

_KEYS = ("runtime", "threads", "shape", "quant", "test", "tokens", "context", "seconds", "flags")


@dataclass(frozen=True, slots=True)
class Probe:
    """A timed workload.

    Attributes:
        runtime: that ran it.
        threads: it used.
        work: what was run.
        seconds: of the call; per token when decoding.
        flags: why to trust it less, as the measuring protocol gives them.
        barrier_s: seconds of a barrier among its threads at the time, which tells where they ran; None for one or if unknown.
    """

    runtime: str
    threads: int
    work: Workload
    seconds: Measured
    flags: tuple[str, ...] = ()
    barrier_s: float | None = None

    def __post_init__(self) -> None:
        """Check that there is a time to fit."""
        if self.seconds.unit != "s" or not self.seconds.median > 0:
            raise FormatError(
                f"probe {self.work.shape.text}: {self.seconds.median} {self.seconds.unit}; seconds above 0 needed"
            )

    def to_json(self) -> dict[str, Any]:
        """All fields; the shape as its text."""
        work = self.work
        return {
            "runtime": self.runtime,
            "threads": self.threads,
            "shape": work.shape.text,
            "quant": work.quant,
            "test": work.test,
            "tokens": work.tokens,
            "context": work.context,
            "seconds": self.seconds.to_json(),
            "flags": list(self.flags),
            "barrier_s": self.barrier_s,
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value does not fit.
        """
        fields = exact_keys(document, "probe", _KEYS, ("barrier_s",))  # profiles from before 0.5 lack it
        barrier_s = fields.get("barrier_s")
        if not isinstance(fields["flags"], list):
            raise FormatError(f"probe: flags is {type(fields['flags']).__name__}, but a list of texts is needed")
        try:
            work = Workload(
                Shape.parse(as_str(fields["shape"], "shape")),
                as_str(fields["quant"], "quant"),
                as_str(fields["test"], "test"),
                as_int(fields["tokens"], "tokens"),
                as_int(fields["context"], "context"),
            )
        except (ShapeError, UsageError) as error:
            raise FormatError(f"probe: {error}") from error
        return cls(
            as_str(fields["runtime"], "runtime"),
            as_int(fields["threads"], "threads"),
            work,
            Measured.from_json(fields["seconds"]),
            tuple(as_str(flag, "flags[]") for flag in fields["flags"]),
            None if barrier_s is None else as_float(barrier_s, "barrier_s"),
        )
