"""What is known of a runtime before it is probed: how it batches and caches, and where its costs are likely to lie.

Prior means are geometric and their spreads generous: a few probes override them, and where there are none the intervals are
wide. Times and rates were seen on virtual machines (Zen 2 with AVX2, Zen 4 and Zen 5 with AVX-512 VNNI) at 1 and 2 threads; how
formats, head sizes and shared heads compare was fitted on the Zen 5 one to some 130 shapes a runtime (``LOG.md``); shares of
the peak on other devices are from the roofline reports named in ``profiles/devices``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deepthin.engine.errors import UsageError
from deepthin.engine.formats import FORMATS

ENGINE, LLAMA_CPP, ONNXRUNTIME = "deepthin", "llama.cpp", "onnxruntime"
ROWS_TOGETHER = 4  # query heads that an attention kernel may pass over the cache together; more cost in proportion
HEAD_DIMS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a test is likely to cost on one runtime, at one thread.

    Attributes:
        layer_s: fixed seconds of a layer and pass.
        product_s: of a multiply-add.
        attend_s: of a multiply-add of a query with the cache, heads of 64, one query head to a cached one.
        formats: body format -> cost of its product against ``product_s``.
        dims: head dim -> cost of attending, element by element, against heads of 64.
    """

    layer_s: float
    product_s: float
    attend_s: float
    formats: Mapping[str, float]
    dims: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Runtime:
    """One runtime's habits and likely costs.

    Attributes:
        name: as in results.
        cache_bytes: bytes of one cached key or value element.
        batch: tokens of a prompt that pass through the layers together; 0 is all of them.
        unit: tokens of a pass that share a load of the weights; what is left of a pass is multiplied one by one.
        all_logits: whether a prompt's logits are computed at every position.
        overhead_s: likely seconds of a call outside the layers.
        cache_share: likely share of the bandwidth that cached keys and values are read at.
        rows: cost of attending with 1, 2, 3 and 4 query heads to a cached one, against one.
        shares: body format -> share of the bandwidth against other formats.
        decode: costs of a decoded token.
        prompt: costs of a prompt.
        formats: body formats it runs as they are stored.
    """

    name: str
    cache_bytes: int
    batch: int
    unit: int
    all_logits: bool
    overhead_s: float
    cache_share: float
    rows: tuple[float, float, float, float]
    shares: Mapping[str, float]
    decode: Costs
    prompt: Costs
    formats: tuple[str, ...]


_ALL = tuple(name for name, fmt in FORMATS.items() if fmt.can_quantize)
_LEGACY = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")


def _by_format(*values: float, k: float) -> dict[str, float]:
    """Values of ``_LEGACY`` in their order, and ``k`` for the K-quants."""
    return dict.fromkeys(FORMATS, k) | dict(zip(_LEGACY, values, strict=True))


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime(
            ENGINE, 2, 32, 4, False, 8e-6, 0.75, (1.0, 0.9, 1.5, 1.2),
            _by_format(1.15, 1.07, 1.07, 1.1, 0.96, 0.95, 0.9, 0.85, k=0.9),
            Costs(2e-6, 15e-12, 60e-12, _by_format(1, 2, 2, 0.65, 0.6, 0.7, 0.6, 0.75, k=0.8), {32: 1.3, 64: 1, 128: 0.7}),
            Costs(8e-6, 12e-12, 25e-12, _by_format(1.6, 1.5, 1.4, 0.7, 0.6, 0.7, 0.7, 0.75, k=0.8), {32: 2.5, 64: 1, 128: 0.8}),
            _ALL,
        ),
        Runtime(
            LLAMA_CPP, 2, 512, 1, False, 30e-6, 0.35, (1.0, 1.75, 2.4, 3.2),
            _by_format(1.05, 1, 1, 1, 0.97, 1, 1, 1, k=1),
            Costs(7e-6, 35e-12, 160e-12, _by_format(1.2, 0.9, 0.8, 0.9, 0.7, 1.2, 1.3, 1.3, k=0.8), {32: 5, 64: 1, 128: 0.8}),
            Costs(80e-6, 25e-12, 80e-12, _by_format(1, 0.75, 0.7, 1, 0.5, 2, 1.2, 2.2, k=1.5), {32: 1.2, 64: 1, 128: 1}),
            _ALL,
        ),
        Runtime(
            ONNXRUNTIME, 4, 0, 1, True, 30e-6, 0.5, (1.0, 1.9, 2.5, 3.8),
            _by_format(1.2, 1, 1, 0.88, 0.92, 1, 1, 1, k=1),
            Costs(15e-6, 30e-12, 160e-12, _by_format(1, 1, 1, 0.85, 0.75, 1.8, 1, 1, k=1), {32: 0.8, 64: 1, 128: 0.75}),
            Costs(70e-6, 15e-12, 60e-12, _by_format(0.85, 1, 1, 0.85, 0.9, 1, 1, 1, k=1), {32: 1, 64: 1, 128: 0.75}),
            ("f32", "q8_0", "q4_0", "q4_1"),
        ),
    )
}  # fmt: skip

SPREAD = math.log(2.5)  # of a cost known only by its kind


def runtime_named(name: str) -> Runtime:
    """The runtime called ``name``.

    Raises:
        UsageError: no such runtime; the message lists the known ones.
    """
    if name not in RUNTIMES:
        raise UsageError(f"runtime {name!r} is unknown; known are {', '.join(RUNTIMES)}")
    return RUNTIMES[name]
