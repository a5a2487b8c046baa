"""A measuring callable that needs no machine: times from bytes and layers, the same for the same shape, with a call count."""

from __future__ import annotations

import zlib
from pathlib import Path

from deepthin.engine.accounting import bytes_read_per_token
from deepthin.engine.errors import UnsupportedError
from deepthin.engine.shape import Shape
from deepthin.profiles.schema import Measured, TokenCost
from deepthin.search.cost import Cost

BANDWIDTH, LAYER_S, CONTEXT = 12e9, 33e-6, 512  # bytes/s and seconds a layer, as on a small two-core machine


class FakeMeasure:
    """``measure`` for ``run_search``.

    Args:
        log: file that gets one line per call, so that calls of a killed process can be counted too.
        refuse: shapes with this many layers raise :class:`UnsupportedError`.
    """

    def __init__(self, log: Path | None = None, refuse: int | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        self._log = log
        self._refuse = refuse

    def __call__(self, shape: Shape, quant: str) -> TokenCost | Cost:
        self.calls.append((shape.text, quant))
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{shape.text} {quant}\n")
        if shape.num_layers == self._refuse:
            raise UnsupportedError(f"{shape.text}: refused by this test")
        return fake_cost(shape, quant)


def fake_cost(shape: Shape, quant: str) -> TokenCost:
    """Bytes over bandwidth plus a serial cost per layer, with reproducible noise below one percent."""
    read = bytes_read_per_token(shape, quant, context=CONTEXT)
    noise = zlib.crc32(f"{shape.text} {quant}".encode()) / 2**32 / 100
    block = (read / BANDWIDTH / shape.num_layers * 0.8 + LAYER_S) * (1 + noise)
    head = read / BANDWIDTH * 0.2
    return TokenCost(
        seconds_per_token=_measured(block * shape.num_layers + head + 3e-5),
        block_s=_measured(block),
        head_s=_measured(head),
        embed_s=_measured(1e-6),
        overhead_s=_measured(2.9e-5),
        bytes_per_token=read,
        threads=2,
        context=CONTEXT,
        quant=quant,
        measured_now=True,
    )


def timed_cost(seconds: float, quant: str) -> TokenCost:
    """A cost with a given time per token, its parts made up."""
    part = _measured(seconds / 4)
    return TokenCost(_measured(seconds), part, part, part, part, 10**6, 2, CONTEXT, quant, measured_now=True)


def _measured(seconds: float) -> Measured:
    samples = tuple(seconds * factor for factor in (0.99, 1.0, 1.02))
    return Measured(seconds, samples[0], samples[2], 3, "s", samples)
