"""The terms of a decoded token and of a prompt, as :mod:`regression` wants them: weights, layers, attention, head, overhead.

Reading is bytes over (bandwidth of the working set x utilisation), so utilisation is what is fitted and interpolated, not time.
Its logarithm is piecewise linear in the logarithm of the working set, with knots around the caches; within one working set
it is shared by all formats, which differ in bytes and in the cost of a product. Reading and computing overlap.

What is started anew costs on its own: a layer, a row of a matrix (several streams of memory begin with each group of rows),
a head's attention, and each chunk of cached positions. From memory such a start costs several times what it does from
near caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepthin.engine.formats import FORMATS
from deepthin.profiles.latency.curve import BandwidthCurve, hats
from deepthin.profiles.latency.regression import Factor, Prior, Term
from deepthin.profiles.latency.runtimes import COLD_MIB, HEAD_DIMS, ROWS_TOGETHER, SPREAD, Runtime
from deepthin.profiles.latency.workload import DECODE, Workload

PARTS = ("weights", "layers", "attention", "head", "overhead")
FORMAT_SD = math.log(1.5)  # of the cost of a product between formats, against what the runtime is known for
FORMAT_SHARE_SD = math.log(1.12)  # of the share of the bandwidth between formats
LONE_TOKEN = 2.0  # a token multiplied alone, against one of four that share each load (AVX2 and AVX-512 VNNI: 1.6 to 2.6)
DIM_SD = math.log(1.7)
ROWS_SD = math.log(1.3)
COLD_SD = math.log(1.8)
ROW_SD = math.log(1.6)
KNOTS_MIB = (1, 4, 8, 12, 16, 24, 32, 64, 128, 512)  # of the working set; close around the sizes of last-level caches
CACHE_AT_SD = math.log(1.15)
EXPONENT_SD = 0.3  # of what a whole cost is raised by where parts of it wait for each other
MAX_CHUNKS = 16  # of a token's cached positions; engine/kernels/attention.py
_LAYER_COLD, _ROW_COLD = ({f"{name}_{knot}" for knot in COLD_MIB} for name in ("cold_at", "row_cold_at"))
_FIXED = 1e-3  # spread of what the others are counted against


@dataclass(frozen=True)
class Conditions:
    """Where the terms hold: one runtime at one thread count on one device.

    Attributes:
        runtime: the runtime.
        threads: its threads.
        curve: read bandwidth by working set; at ``threads``, or at 1 for a device known by its memory alone.
        share_sd: spread of the share of ``curve`` that weights are read at; wide where ``curve`` is itself a guess.
        share: likely share.
        pace: how many times slower than the prior's CPUs this one computes.
        cache_sd: spread of the utilisation at each working set about the others; wide where ``curve`` knows no caches.
    """

    runtime: Runtime
    threads: int
    curve: BandwidthCurve
    share: float = 0.8
    share_sd: float = math.log(1.4)
    pace: float = 1.0
    cache_sd: float = math.log(1.25)

    def rate(self, num_bytes: float) -> float:
        """Bytes per second from a working set."""
        known = self.threads if self.threads in self.curve.threads else max(self.curve.threads)
        return self.curve.rate(known, num_bytes)


def priors(conditions: Conditions, test: str) -> dict[str, Prior]:
    """Every unknown of the terms of ``test`` with what is believed of it before probing."""
    runtime, threads = conditions.runtime, conditions.threads
    speed = conditions.pace / threads**0.8  # computing scales nearly with threads
    costs = runtime.decode if test == DECODE else runtime.prompt
    found = {
        "share": Prior(math.log(conditions.share), conditions.share_sd),
        "product": Prior(math.log(costs.product_s * speed), SPREAD),
        "head": Prior(0.0, math.log(1.2)),
        "layer": Prior(math.log(costs.layer_s * conditions.pace), SPREAD),
        "element": Prior(math.log(costs.element_s * speed), SPREAD),
        "logit": Prior(math.log(costs.logit_s * speed), SPREAD),
        "attend": Prior(math.log(costs.attend_s * speed), SPREAD),
        "softmax": Prior(math.log(costs.softmax_s * speed), SPREAD),
        "cache_share": Prior(math.log(runtime.cache_share), math.log(1.5)),
        "row": Prior(math.log(costs.row_s * speed), SPREAD),
        "head_call": Prior(math.log(costs.head_s * speed), SPREAD),
        "kv_call": Prior(math.log(costs.kv_head_s * speed), SPREAD),
        "chunk": Prior(math.log(costs.chunk_s * speed), SPREAD),
        "uneven": Prior(1.0, EXPONENT_SD),
        "lone": Prior(1.0, EXPONENT_SD),
        "overhead": Prior(math.log(runtime.overhead_s * conditions.pace), SPREAD),
    }
    found |= {f"dim_{size}": Prior(math.log(value), DIM_SD if size != 64 else _FIXED) for size, value in costs.dims.items()}
    found |= {
        f"rows_{n}": Prior(math.log(runtime.rows[n - 1]), ROWS_SD if n > 1 else _FIXED) for n in range(1, ROWS_TOGETHER + 1)
    }
    found |= {f"product_{name}": Prior(math.log(costs.formats[name]), FORMAT_SD) for name in FORMATS}
    found |= {f"share_{name}": Prior(math.log(runtime.shares[name]), FORMAT_SHARE_SD) for name in FORMATS}
    found |= {f"row_{name}": Prior(math.log(costs.rows[name]), ROW_SD) for name in FORMATS}
    found |= {f"cold_at_{knot}": Prior(math.log(value), COLD_SD) for knot, value in costs.cold.items()}
    found |= {f"row_cold_at_{knot}": Prior(math.log(value), COLD_SD) for knot, value in costs.row_cold.items()}
    found |= {f"share_at_{knot}": Prior(0.0, conditions.cache_sd) for knot in KNOTS_MIB}
    found |= {f"cache_at_{knot}": Prior(0.0, CACHE_AT_SD) for knot in KNOTS_MIB}
    return found


def terms(work: Workload, conditions: Conditions) -> tuple[Term, ...]:
    """The terms of ``work``."""
    runtime = conditions.runtime
    cached = work.cached_elements * runtime.cache_bytes
    held = work.body_bytes + work.head_bytes + cached * (work.context + work.tokens)
    rate = conditions.rate(held)
    share = _share(held)
    head_share = {**share, f"share_{work.head_quant}": -1.0, "head": 1.0}
    share[f"share_{work.body_quant}"] = -1.0
    passes = 1 if runtime.batch == 0 else math.ceil(work.tokens / runtime.batch)
    head_tokens = work.tokens if runtime.all_logits else 1
    uneven = {"uneven": math.log(_uneven(work, conditions))}
    weights = (
        Factor(math.log(passes * work.body_read / rate), share),
        Factor(
            math.log(work.tokens * work.body_products),
            {"product": 1, f"product_{work.body_quant}": 1, "lone": math.log(_lone(work, runtime))},
        ),
    )
    head = (
        Factor(math.log(work.head_bytes / rate), head_share),
        Factor(math.log(head_tokens * work.head_products), {"product": 1, f"product_{work.head_quant}": 1, "head": 1}),
    )
    return (
        Term("weights", weights),
        Term("weights", (Factor(math.log(passes * work.body_rows), _row(work, held)),)),
        Term("layers", (Factor(math.log(passes * work.layers), {"layer": 1} | _cold(held)),)),
        Term("layers", (Factor(math.log(work.tokens * work.vector_elements), {"element": 1}),)),
        Term("attention", _attention(work, cached, rate, passes, held, uneven)),
        Term("attention", (Factor(math.log(work.scores), {"softmax": 1} | uneven),)),
        Term("attention", (Factor(math.log(work.tokens * work.layers * work.shape.num_heads), {"head_call": 1} | uneven),)),
        Term("attention", (Factor(math.log(work.tokens * work.layers * work.shape.num_kv_heads), {"kv_call": 1} | uneven),)),
        *_chunks_term(work, runtime, uneven),
        Term("head", head),
        Term("head", (Factor(math.log(head_tokens * work.shape.vocab_size), {"logit": 1}),)),
        Term("overhead", (Factor(0.0, {"overhead": 1}),)),
    )


def _attention(
    work: Workload, cached: int, rate: float, passes: int, held: float, uneven: dict[str, float]
) -> tuple[Factor, ...]:
    """Cached keys and values are read once per pass, and each is multiplied by every query head that shares it.

    How much cheaper heads get by sharing differs from runtime to runtime and is not proportional to anything.
    """
    read = cached * (work.context + (work.tokens + 1) / 2) * passes
    ends: Sequence[float] = [math.log(size) for size in HEAD_DIMS]
    dims = dict(zip((f"dim_{size}" for size in HEAD_DIMS), hats(math.log(work.shape.head_dim), ends), strict=True))
    group = work.shape.num_heads / work.shape.num_kv_heads
    rows = min(max(round(group), 1), ROWS_TOGETHER)
    return (
        Factor(math.log(read / rate), {"cache_share": -1} | _at("cache_at", held, -1.0) | uneven),
        Factor(
            math.log(work.cached_elements * work.attended * max(group / ROWS_TOGETHER, 1.0)),
            {"attend": 1, f"rows_{rows}": 1} | dims | uneven,
        ),
    )


def _chunks(work: Workload, runtime: Runtime) -> int:
    """Parts that the cached positions of a decoded token are cut into, for threads to share; 0 where they are not cut."""
    if work.tokens > 1 or not runtime.chunk:
        return 0
    length = runtime.chunk
    while length * MAX_CHUNKS < work.context + 1:
        length *= 2
    return math.ceil((work.context + 1) / length)


def _chunks_term(work: Workload, runtime: Runtime, uneven: dict[str, float]) -> tuple[Term, ...]:
    """Each chunk leaves sums that are joined."""
    chunks = _chunks(work, runtime)
    if not chunks:
        return ()
    return (Term("attention", (Factor(math.log(work.layers * work.shape.num_heads * chunks), {"chunk": 1} | uneven),)),)


def _uneven(work: Workload, conditions: Conditions) -> float:
    """How much longer the thread with the most parts of attention takes than an even share would."""
    parts = work.shape.num_kv_heads * _chunks(work, conditions.runtime)
    return math.ceil(parts / conditions.threads) * conditions.threads / parts if parts else 1.0


def _lone(work: Workload, runtime: Runtime) -> float:
    """Cost of a prompt's products where some tokens are multiplied one by one, at the end of each pass, against none."""
    unit = runtime.units.get(work.body_quant, runtime.unit)
    passes, last = divmod(work.tokens, runtime.batch) if runtime.batch else (0, work.tokens)
    rest = last % unit + passes * (runtime.batch % unit)
    return 1 + (LONE_TOKEN - 1) * rest / work.tokens if work.tokens > 1 else 1.0


def _row(work: Workload, held: float) -> dict[str, float]:
    """Exponents of what a row of a matrix costs beside its bytes: its streams start with misses, more of them from memory."""
    return {"row": 1.0, f"row_{work.body_quant}": 1.0} | {k: w for k, w in _at("row_cold_at", held).items() if k in _ROW_COLD}


def _cold(num_bytes: float) -> dict[str, float]:
    """Exponents of what a layer costs more when its matrices come from memory: each starts with misses nobody foresaw."""
    return {k: w for k, w in _at("cold_at", num_bytes).items() if k in _LAYER_COLD}


def _share(num_bytes: float) -> dict[str, float]:
    """Exponents of 1 / utilisation at a working set."""
    return {"share": -1.0} | _at("share_at", num_bytes, -1.0)


def _at(name: str, num_bytes: float, sign: float = 1.0) -> dict[str, float]:
    """Exponents of the unknowns called ``name`` at each knot."""
    return {f"{name}_{k}": sign * w for k, w in _hats(num_bytes).items() if w}


def _hats(num_bytes: float) -> dict[int, float]:
    """Weight of each knot at a working set; they add up to 1."""
    at: Sequence[float] = [math.log(knot << 20) for knot in KNOTS_MIB]
    return dict(zip(KNOTS_MIB, hats(math.log(num_bytes), at), strict=True))
