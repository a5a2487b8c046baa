"""What should be known before a search is believed: alignment cliffs, dear head sizes, and kernels far below their roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepthin.engine.formats import format_named
from deepthin.profiles.latency.model import LatencyModel
from deepthin.profiles.latency.regression import NORMAL_90
from deepthin.profiles.latency.runtimes import HEAD_DIMS
from deepthin.profiles.latency.terms import DIM_SD
from deepthin.profiles.latency.workload import DECODE

CLIFF = 0.2  # slower per byte than the widths on both sides, by this share
DEAR = 1.5  # times the cost of heads of 64, at the low end of the interval
LOW_ROOFLINE = 0.6  # of the read bandwidth in memory
_STREAMED_BYTES = 512e6


def cliffs(rates: Mapping[int, float], runtime: str, quant: str) -> list[dict[str, Any]]:
    """Widths whose rate lies far below that of both neighbours.

    Args:
        rates: bytes per second of one block's products by width.
        runtime: that was timed.
        quant: its format.
    """
    found = []
    widths = sorted(rates)
    for left, width, right in zip(widths, widths[1:], widths[2:], strict=False):
        expected = math.sqrt(rates[left] * rates[right])
        loss = 1 - rates[width] / min(expected, rates[left], rates[right])
        if loss > CLIFF:
            found.append(
                {
                    "kind": "cliff",
                    "runtime": runtime,
                    "quant": quant,
                    "width": width,
                    "loss": loss,
                    "text": f"{runtime} {quant}: width {width} is {loss:.0%} slower per byte than {left} and {right}",
                }
            )
    return found


def dear_heads(models: Sequence[LatencyModel]) -> list[dict[str, Any]]:
    """Head sizes at which attending costs much more, element by element, than at 64, as far as probes and not priors say so."""
    found = []
    for model in models:
        if model.test != DECODE:
            continue
        conditions = model.conditions
        for size in HEAD_DIMS:
            times, low, high = model.fitted.value(f"dim_{size}")
            if low > DEAR and math.log(high / times) < NORMAL_90 * DIM_SD / 2:
                found.append(
                    {
                        "kind": "dear-heads",
                        "runtime": conditions.runtime.name,
                        "head_dim": size,
                        "threads": conditions.threads,
                        "times": times,
                        "text": (
                            f"{conditions.runtime.name}, {conditions.threads} threads: attention with heads of {size} costs "
                            f"{times:.1f} times as much per element as with heads of 64"
                        ),
                    }
                )
    return sorted(found, key=lambda row: -float(row["times"]))


def slow_kernels(models: Sequence[LatencyModel]) -> list[dict[str, Any]]:
    """Formats whose products cannot keep up with the memory, so that fewer bytes no longer mean fewer milliseconds."""
    found = []
    for model in models:
        if model.test != DECODE:
            continue
        conditions, fitted = model.conditions, model.fitted
        memory = conditions.rate(_STREAMED_BYTES)
        for quant in model.hull.quants:
            seconds = fitted.value("product")[0] * fitted.value(f"product_{quant}")[0]
            rate = format_named(quant).bits_per_weight / 8 / seconds
            share = rate / memory
            if share < LOW_ROOFLINE:
                found.append(
                    {
                        "kind": "slow-kernel",
                        "runtime": conditions.runtime.name,
                        "quant": quant,
                        "threads": conditions.threads,
                        "share": share,
                        "text": (
                            f"{conditions.runtime.name} {quant}, {conditions.threads} threads: products run at {share:.0%} "
                            f"of the memory's rate, so computing, not reading, limits it"
                        ),
                    }
                )
    return sorted(found, key=lambda row: float(row["share"]))
