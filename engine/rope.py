"""Rotary embeddings: how a record of scaling changes the rates at which pairs of a head turn.

    E head dim    i pair, 0..E/2-1    theta base    f factor    C original context    r_i = theta^(-2i/E), radians per position

linear   r_i / f
llama3   r_i s + (r_i / f) (1 - s)    s = clip((C r_i / 2pi - low) / (high - low), 0, 1)
yarn     the same mix with s = 1 - clip((i - from) / (to - from), 0, 1), where from and to are the pairs that turn ``fast``
         and ``slow`` times in C positions; cosines and sines are multiplied by ``magnitude``

Source: ``_compute_linear_scaling_rope_parameters``, ``_compute_llama3_parameters`` and ``_compute_yarn_parameters`` of
huggingface/transformers@0044e3b ``src/transformers/modeling_rope_utils.py``; ``ggml_rope_yarn_corr_dims`` of
ggml-org/llama.cpp@c392e50 computes the same. YaRN: arXiv 2309.00071.
"""

from __future__ import annotations

import math

import numpy as np

from deepthin.engine.arrays import F32, F64
from deepthin.engine.errors import ShapeError
from deepthin.engine.rope_scaling import RopeScaling

_USUAL_HIGH = (4.0, 2.0, 8.0, 3.0, 6.0, 16.0)  # tried where the factors leave a choice
_SAME_FACTOR = 2e-6  # relative; a factor is kept as f32


def rope_rates(head_dim: int, theta: float, scaling: RopeScaling | None) -> F64:
    """Radians per position of each pair, f64 [E / 2]."""
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    rates: F64 = np.float64(theta) ** (-2.0 * pairs / head_dim)
    if scaling is None:
        return rates
    if scaling.kind == "linear":
        return rates / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_context * rates / (2 * math.pi)
        kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    else:
        first, last = (_pair_that_turns(turns, head_dim, theta, scaling) for turns in (scaling.high, scaling.low))
        start, end = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
        kept = 1 - np.clip((pairs - start) / max(0.001, end - start), 0, 1)
    mixed: F64 = rates * kept + rates / scaling.factor * (1 - kept)
    return mixed


def _pair_that_turns(turns: float, head_dim: int, theta: float, scaling: RopeScaling) -> float:
    """The (fractional) pair that turns ``turns`` times in the original context."""
    if theta <= 1.0:
        return 0.0
    return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rope_magnitude(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied by."""
    return 1.0 if scaling is None else scaling.attention_factor


def rope_tables(head_dim: int, theta: float, scaling: RopeScaling | None, positions: int) -> tuple[F32, F32]:
    """Cosines and sines f32 [positions, E / 2], computed in f64."""
    angles = np.arange(positions, dtype=np.float64)[:, None] * rope_rates(head_dim, theta, scaling)
    magnitude = rope_magnitude(scaling)
    return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(np.float32)


def rope_factors(head_dim: int, theta: float, scaling: RopeScaling) -> F32:
    """By how much ``scaling`` slows each pair, f32 [E / 2]; what GGUF keeps as the tensor ``rope_freqs``."""
    factors: F64 = rope_rates(head_dim, theta, None) / rope_rates(head_dim, theta, scaling)
    return factors.astype(np.float32)


def scaling_of_factors(factors: F32, theta: float) -> RopeScaling | None:
    """The llama3 scaling whose :func:`rope_factors` are ``factors``; None when they change nothing.

    Its ``low`` is 1, since original context, low and high matter up to a common multiple only.

    Raises:
        ShapeError: no llama3 scaling has these factors.
    """
    values, head_dim = factors.astype(np.float64), 2 * len(factors)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ShapeError("rotary factors that are not positive numbers")
    if np.abs(values - 1).max() < _SAME_FACTOR:
        return None
    factor = float(values.max())
    turns = rope_rates(head_dim, theta, None) / (2 * math.pi)  # per position
    kept = (1 / values - 1 / factor) / (1 - 1 / factor)
    mixed = (kept > 1e-4) & (kept < 1 - 1e-4)
    slope, ramp = turns[mixed], kept[mixed]  # slope C - ramp (high - 1) = 1 for each pair between slow and fast
    if len(ramp) > 1:
        solved = np.linalg.lstsq(np.stack([slope, -ramp], axis=1), np.ones(len(ramp)), rcond=None)[0]
        tried = [(float(solved[0]), float(solved[1]) + 1)]
    elif len(ramp):
        tried = [((1 + float(ramp[0]) * (high - 1)) / float(slope[0]), high) for high in _USUAL_HIGH]
    else:  # anything that divides the same pairs
        slow, fast = float(turns[kept < 0.5].max(initial=0)), float(turns[kept > 0.5].min(initial=np.inf))
        longest = 1 / slow if slow else 0.0
        tried = [(longest, min(fast * math.floor(longest), _USUAL_HIGH[0]))]
    for context, high in tried:
        if not (1 <= context <= 1 << 24 and 1 < high < 1e6):
            continue
        whole = round(context) if len(ramp) else math.floor(context)
        exact = 1 + float(((slope * whole - 1) * ramp).sum() / (ramp * ramp).sum()) if len(ramp) else high
        for candidate in (float(f"{high:.3g}"), float(f"{exact:.6g}"), exact):
            if not 1 < candidate < 1e6:
                continue
            scaling = RopeScaling("llama3", factor, whole, 1.0, candidate)
            if np.allclose(rope_factors(head_dim, theta, scaling), values, rtol=_SAME_FACTOR, atol=0):
                return scaling
    raise ShapeError("rotary factors that are not those of llama3 scaling")
