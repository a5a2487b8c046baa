"""What is known of a runtime before it is probed: how it batches and caches, and where its costs are likely to lie.

Prior means are geometric and their spreads generous: a few probes override them, and where there are none the intervals are
wide. Per-layer times, reading shares and rates were seen on two virtual machines (Zen 2 with AVX2, Zen 4 with AVX-512 VNNI) at
1 and 2 threads; shares of the peak on other devices from the roofline reports named in ``profiles/devices``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepthin.engine.errors import UsageError
from deepthin.engine.formats import FORMATS

ENGINE, LLAMA_CPP, ONNXRUNTIME = "deepthin", "llama.cpp", "onnxruntime"


@dataclass(frozen=True, slots=True)
class Runtime:
    """One runtime's habits and likely costs, at one thread.

    Attributes:
        name: as in results.
        cache_bytes: bytes of one cached key or value element.
        batch: tokens of a prompt that pass through the layers together; 0 is all of them.
        unit: tokens of a pass that share a load of the weights; what is left of a pass is multiplied one by one.
        all_logits: whether a prompt's logits are computed at every position.
        layer_s: likely fixed seconds of a layer for one token.
        overhead_s: likely seconds of a call outside the layers.
        formats: body formats it runs as they are stored.
    """

    name: str
    cache_bytes: int
    batch: int
    unit: int
    all_logits: bool
    layer_s: float
    overhead_s: float
    formats: tuple[str, ...]


_ALL = tuple(name for name, fmt in FORMATS.items() if fmt.can_quantize)
RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime(ENGINE, 2, 32, 4, False, 5e-6, 15e-6, _ALL),
        Runtime(LLAMA_CPP, 2, 512, 1, False, 20e-6, 60e-6, _ALL),
        Runtime(ONNXRUNTIME, 4, 0, 1, True, 60e-6, 60e-6, ("f32", "q8_0", "q4_0", "q4_1")),
    )
}

# nanoseconds of a multiply-add in one thread, geometric mean over CPUs with 8-bit dot products or fused multiply-adds
PRODUCT_NS = 0.03
PROMPT_PRODUCT_NS = 0.02
SPREAD = math.log(2.5)  # of a cost known only by its kind


def runtime_named(name: str) -> Runtime:
    """The runtime called ``name``.

    Raises:
        UsageError: no such runtime; the message lists the known ones.
    """
    if name not in RUNTIMES:
        raise UsageError(f"runtime {name!r} is unknown; known are {', '.join(RUNTIMES)}")
    return RUNTIMES[name]
