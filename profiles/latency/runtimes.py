"""What is known of a runtime before it is probed: how it batches and caches, and where its costs are likely to lie.

Prior means are geometric and their spreads generous: a few probes override them, and where there are none the intervals are
wide. They were fitted on one virtual machine (Zen 5 with AVX-512 VNNI, 32 MiB of last-level cache, 1 and 2 threads): the
engine's to some 280 shapes, about half of them visited four times, the peers' to some 200 each (``LOG.md``). Shares of the
peak on other devices are from the roofline reports named in ``profiles/devices``.
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
_ALL = tuple(name for name, fmt in FORMATS.items() if fmt.can_quantize)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a test is likely to cost on one runtime, in seconds at one thread.

    Attributes:
        layer_s: fixed, of a layer and pass.
        row_s: of starting a row of a matrix, from near caches.
        product_s: of a multiply-add.
        element_s: of an element of the vectors between products.
        logit_s: of a logit beside its products.
        attend_s: of a multiply-add of a query with the cache, heads of 64, one query head to a cached one.
        softmax_s: of a score.
        head_s: of a query head, whatever is cached.
        kv_head_s: of a cached head, whatever is cached.
        chunk_s: of a chunk of cached positions, where they are cut into chunks.
        formats: body format -> cost of its product against ``product_s``.
        rows: body format -> cost of starting a row against ``row_s``; formats of several parts begin more streams.
        dims: head dim -> cost of attending, element by element, against heads of 64.
        cold: MiB of the working set -> cost of a layer against one from near caches.
        row_cold: MiB of the working set -> cost of starting a row against one from near caches.
    """

    layer_s: float
    row_s: float
    product_s: float
    element_s: float
    logit_s: float
    attend_s: float
    softmax_s: float
    head_s: float
    kv_head_s: float
    chunk_s: float
    formats: Mapping[str, float]
    rows: Mapping[str, float]
    dims: Mapping[int, float]
    cold: Mapping[int, float]
    row_cold: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Runtime:
    """One runtime's habits and likely costs.

    Attributes:
        name: as in results.
        cache_bytes: bytes of one cached key or value element.
        batch: tokens of a prompt that pass through the layers together; 0 is all of them.
        unit: tokens of a pass that share a load of the weights; what is left of a pass is multiplied one by one.
        units: body format -> the same, where it differs (ggml repacks Q4_0 and Q4_K and multiplies four tokens at a time).
        chunk: fewest cached positions that a thread takes of a decoded token's; 0 where heads are not cut.
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
    units: Mapping[str, int]
    chunk: int
    all_logits: bool
    overhead_s: float
    cache_share: float
    rows: tuple[float, float, float, float]
    shares: Mapping[str, float]
    decode: Costs
    prompt: Costs
    formats: tuple[str, ...] = _ALL


COLD_MIB = (16, 32, 64, 128, 512)  # working sets from which starts cost more
_LEGACY = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")


def _by_format(*values: float, k: float) -> dict[str, float]:
    """Values of ``_LEGACY`` in their order, and ``k`` for the K-quants."""
    return dict.fromkeys(FORMATS, k) | dict(zip(_LEGACY, values, strict=True))


def _dims(*values: float) -> dict[int, float]:
    return dict(zip(HEAD_DIMS, values, strict=True))


def _cold(*values: float) -> dict[int, float]:
    return dict(zip(COLD_MIB, values, strict=True))


_ENGINE = Runtime(
    name=ENGINE, cache_bytes=2, batch=32, unit=4, units={}, chunk=64, all_logits=False, overhead_s=2.5e-6, cache_share=0.7,
    rows=(1.0, 0.85, 1.2, 1.15), shares=_by_format(1.15, 1.05, 1.08, 1.1, 0.98, 0.95, 0.9, 0.82, k=0.9),
    decode=Costs(
        layer_s=0.85e-6, row_s=0.4e-9, product_s=4.2e-12, element_s=0.1e-9, logit_s=0.07e-9, attend_s=12e-12, softmax_s=0.08e-9,
        head_s=0.03e-6, kv_head_s=0.3e-6, chunk_s=0.08e-6,
        formats=_by_format(1.8, 2.3, 2.6, 0.8, 0.63, 0.5, 0.6, 0.65, k=0.7),
        rows=_by_format(0.65, 1.6, 1.7, 0.75, 0.83, 1.05, 1.55, 1.5, k=1.3),
        dims=_dims(1.6, 1, 0.8), cold=_cold(1.4, 2.8, 2.3, 3.7, 4), row_cold=_cold(2.8, 7.5, 7, 4, 3),
    ),
    prompt=Costs(
        layer_s=5.5e-6, row_s=2.2e-9, product_s=5.8e-12, element_s=0.035e-9, logit_s=0.3e-9, attend_s=7.6e-12,
        softmax_s=0.75e-9, head_s=0.09e-6, kv_head_s=0.03e-6, chunk_s=0.06e-6,
        formats=_by_format(1.42, 1.45, 1.45, 0.67, 0.57, 0.66, 0.7, 0.75, k=0.8),
        rows=_by_format(2.2, 2.5, 1.8, 1.3, 1, 1, 1, 1, k=1),
        dims=_dims(1.95, 1, 1.15), cold=_cold(1.6, 3.3, 2.5, 4, 4), row_cold=_cold(2, 2.8, 3.7, 3.1, 2),
    ),
)  # fmt: skip
_LLAMA_CPP = Runtime(
    name=LLAMA_CPP, cache_bytes=2, batch=512, unit=1, units={"q4_0": 4, "q4_k": 4}, chunk=0, all_logits=False, overhead_s=8e-6,
    cache_share=0.3, rows=(1.0, 1.85, 2.7, 3.4), shares=_by_format(1, 0.88, 1.02, 1, 1.03, 1, 1, 1, k=1),
    decode=Costs(
        layer_s=5e-6, row_s=2.2e-9, product_s=26e-12, element_s=0.7e-9, logit_s=2.4e-9, attend_s=95e-12, softmax_s=0.4e-9,
        head_s=0.12e-6, kv_head_s=0.1e-6, chunk_s=0.06e-6,
        formats=_by_format(2.3, 0.85, 0.85, 0.93, 0.52, 1.2, 1.1, 1.3, k=0.8),
        rows=_by_format(1.5, 0.7, 1.7, 0.88, 1.05, 0.95, 1.5, 1.05, k=1),
        dims=_dims(8.3, 1, 0.57), cold=_cold(1.3, 1.9, 2.1, 3.1, 4), row_cold=_cold(1.8, 2.6, 2.4, 2.5, 1.6),
    ),
    prompt=Costs(
        layer_s=75e-6, row_s=45e-9, product_s=11.5e-12, element_s=0.33e-9, logit_s=0.5e-9, attend_s=52e-12, softmax_s=0.4e-9,
        head_s=0.12e-6, kv_head_s=0.1e-6, chunk_s=0.06e-6,
        formats=_by_format(1.33, 0.62, 0.45, 1.03, 0.39, 2.25, 1.25, 2.8, k=1.5),
        rows=_by_format(0.9, 1.65, 0.65, 1.4, 0.8, 2.5, 1.35, 1, k=1),
        dims=_dims(1, 1, 1.55), cold=_cold(0.9, 1.6, 2.6, 2, 2.7), row_cold=_cold(1.7, 1.9, 1.5, 2.4, 2.1),
    ),
)  # fmt: skip
_ONNXRUNTIME = Runtime(
    name=ONNXRUNTIME, cache_bytes=4, batch=0, unit=1, units={}, chunk=0, all_logits=True, overhead_s=20e-6, cache_share=0.6,
    rows=(1.0, 1.85, 2.9, 3.8), shares=_by_format(1.08, 1, 1, 0.9, 0.88, 1.05, 1, 1, k=1),
    decode=Costs(
        layer_s=11e-6, row_s=4e-9, product_s=4e-12, element_s=0.4e-9, logit_s=0.65e-9, attend_s=96e-12, softmax_s=0.4e-9,
        head_s=0.65e-6, kv_head_s=0.18e-6, chunk_s=0.06e-6,
        formats=_by_format(1, 1, 1, 0.85, 0.75, 1.7, 1, 1, k=1),
        rows=_by_format(0.6, 1, 1, 1.25, 1.65, 4.2, 1, 1, k=1),
        dims=_dims(1, 1, 0.83), cold=_cold(1.6, 2.05, 3.3, 2.4, 4), row_cold=_cold(1, 1.85, 1.25, 1.35, 1),
    ),
    prompt=Costs(
        layer_s=48e-6, row_s=12e-9, product_s=8e-12, element_s=0.5e-9, logit_s=0.88e-9, attend_s=27e-12, softmax_s=0.4e-9,
        head_s=0.11e-6, kv_head_s=0.07e-6, chunk_s=0.06e-6,
        formats=_by_format(0.94, 1, 1, 0.77, 0.85, 0.94, 1, 1, k=1),
        rows=_by_format(1, 1, 1, 1.3, 1.6, 2.5, 1, 1, k=1),
        dims=_dims(1, 1, 0.85), cold=_cold(2, 1.6, 1.3, 1.3, 2.5), row_cold=_cold(1.3, 1.1, 1.1, 0.8, 0.6),
    ),
    formats=("f32", "q8_0", "q4_0", "q4_1"),
)  # fmt: skip
RUNTIMES = {runtime.name: runtime for runtime in (_ENGINE, _LLAMA_CPP, _ONNXRUNTIME)}

SPREAD = math.log(2.5)  # of a cost known only by its kind


def runtime_named(name: str) -> Runtime:
    """The runtime called ``name``.

    Raises:
        UsageError: no such runtime; the message lists the known ones.
    """
    if name not in RUNTIMES:
        raise UsageError(f"runtime {name!r} is unknown; known are {', '.join(RUNTIMES)}")
    return RUNTIMES[name]
