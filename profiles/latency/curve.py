"""Read bandwidth by working set and thread count: what caches and memory deliver, interpolated between measured sizes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles.schema import as_float, as_int, exact_keys


@dataclass(frozen=True, slots=True)
class BandwidthPoint:
    """Bytes per second that ``threads`` threads together read from a working set of ``num_bytes``."""

    threads: int
    num_bytes: int
    bytes_per_s: float

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {"threads": self.threads, "num_bytes": self.num_bytes, "bytes_per_s": self.bytes_per_s}


@dataclass(frozen=True, slots=True)
class BandwidthCurve:
    """Piecewise log-linear rates; beyond the measured sizes the nearest one holds.

    Raises:
        FormatError: a size or rate is not positive.
    """

    points: tuple[BandwidthPoint, ...]

    def __post_init__(self) -> None:
        """Sort by threads and size, and check."""
        for point in self.points:
            if point.threads < 1 or point.num_bytes < 1 or not 0 < point.bytes_per_s < math.inf:
                raise FormatError(
                    f"bandwidth point {point.threads} threads, {point.num_bytes} bytes, {point.bytes_per_s} bytes/s: "
                    f"all three must be positive; the record is damaged, so measure again"
                )
        object.__setattr__(self, "points", tuple(sorted(self.points, key=lambda p: (p.threads, p.num_bytes))))

    @property
    def threads(self) -> tuple[int, ...]:
        """Thread counts with points, ascending."""
        return tuple(sorted({point.threads for point in self.points}))

    def of(self, threads: int) -> tuple[BandwidthPoint, ...]:
        """The points of one thread count, by size."""
        return tuple(point for point in self.points if point.threads == threads)

    def rate(self, threads: int, num_bytes: float) -> float:
        """Bytes per second from a working set of ``num_bytes``.

        Raises:
            UsageError: this thread count has no points.
        """
        points = self.of(threads)
        if not points:
            raise UsageError(
                f"bandwidth at {threads} threads was not measured; known thread counts are {', '.join(map(str, self.threads))}"
            )
        sizes = [math.log(point.num_bytes) for point in points]
        rates = [math.log(point.bytes_per_s) for point in points]
        return math.exp(interpolate(math.log(max(num_bytes, 1.0)), sizes, rates))

    def to_json(self) -> list[dict[str, Any]]:
        """One object per point."""
        return [point.to_json() for point in self.points]

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            FormatError: a key is missing or unknown, or a value has the wrong type.
        """
        if not isinstance(document, list):
            raise FormatError(f"bandwidth: found {type(document).__name__}, but a list of points is needed")
        points = []
        for item in document:
            fields = exact_keys(item, "bandwidth point", ("threads", "num_bytes", "bytes_per_s"))
            points.append(
                BandwidthPoint(
                    as_int(fields["threads"], "threads"),
                    as_int(fields["num_bytes"], "num_bytes"),
                    as_float(fields["bytes_per_s"], "bytes_per_s"),
                )
            )
        return cls(tuple(points))


def flat_curve(bytes_per_s: float, threads: int = 1) -> BandwidthCurve:
    """The same rate at every size; for devices of which only the memory is known."""
    return BandwidthCurve((BandwidthPoint(threads, 1, bytes_per_s),))


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Piecewise linear through ascending (xs, ys), constant beyond the ends."""
    at = bisect.bisect_left(xs, x)
    if at == 0:
        return ys[0]
    if at == len(xs):
        return ys[-1]
    share = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] + share * (ys[at] - ys[at - 1])


def hats(x: float, knots: Sequence[float]) -> list[float]:
    """Weights of each of the ascending ``knots`` at ``x``, as :func:`interpolate` gives them; they add up to 1."""
    return [interpolate(x, knots, [float(i == k) for i in range(len(knots))]) for k in range(len(knots))]
