"""Time of shapes that were not measured, from those that were: a sum of what a token is made of, and a smooth correction.

M measured candidates   N asked for   F features
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from deepthin.engine.accounting import count_bytes, count_params, kv_bytes_per_token
from deepthin.engine.arrays import F64
from deepthin.engine.formats import scheme_named
from deepthin.search.space import Candidate

_RIDGE = 1e-6  # of the features' own scale; some are nearly collinear
_LENGTH = 1.5  # of the correction, in standard deviations of the logarithms of the features
_NOISE = 0.01  # relative; what one measurement is uncertain by at best
_LEAST_SPREAD = 0.02


@lru_cache(maxsize=1 << 15)
def features(candidate: Candidate, context: int) -> tuple[float, ...]:
    """What the time of a token is made of: a constant, layers, bytes by part, cache, and vector elements per layer."""
    shape = candidate.shape
    parts = count_bytes(shape, candidate.quant)
    head = parts.embedding if shape.tie_word_embeddings else parts.head
    body = (parts.attention + parts.mlp) * shape.layer_sharing
    wide = not scheme_named(candidate.quant).body.is_quantized
    return (
        1.0,
        float(shape.num_executed_layers),
        float(head),
        0.0 if wide else float(body),
        float(body) if wide else 0.0,
        float(context * kv_bytes_per_token(shape)),
        float(shape.num_executed_layers * (shape.hidden_size + shape.intermediate_size)),
    )


@lru_cache(maxsize=1 << 15)
def prompt_features(candidate: Candidate, context: int) -> tuple[float, ...]:
    """What the time of a prompt of ``context`` tokens is made of: products by kind of format, attention, and what a token has.

    A prompt is bound by arithmetic where a token is bound by bytes, so parameters count here, once a token.
    """
    shape = candidate.shape
    params = count_params(shape)
    body = float(context * (params.attention + params.mlp) * shape.layer_sharing)
    wide = not scheme_named(candidate.quant).body.is_quantized
    pairs = float(context * context * shape.num_executed_layers * shape.num_heads * shape.head_dim)
    return (*features(candidate, 0), 0.0 if wide else body, body if wide else 0.0, pairs)


def predicted_log_seconds(rows: F64, seconds: F64, wanted: F64) -> tuple[F64, F64]:
    """Log of the seconds at ``wanted`` [N, F] from ``rows`` [M, F] measured at ``seconds`` [M], and its standard deviation.

    A non-negative sum of the features fitted in relative error, times a smooth correction: Gaussian process regression of
    what the sum leaves, since bandwidth depends on the working set and kernels on widths.
    """
    return TimeModel(rows, seconds).predict(wanted)


class TimeModel:
    """Fitted to ``rows`` [M, F] measured at ``seconds`` [M]; see :func:`predicted_log_seconds`."""

    def __init__(self, rows: F64, seconds: F64) -> None:
        self._rows = rows
        self._weights = _non_negative_fit(rows / seconds[:, None])
        self._left = np.log(seconds) - self.summed(rows)
        self._spread = max(float(self._left.std()), _LEAST_SPREAD)

    @property
    def spread(self) -> float:
        """Standard deviation of what the sum leaves, as a logarithm."""
        return self._spread

    def summed(self, wanted: F64) -> F64:
        """Log of the seconds by the sum alone, f64 [N]; costs next to nothing."""
        return np.asarray(np.log(np.maximum(wanted @ self._weights, 1e-12)))

    def predict(self, wanted: F64) -> tuple[F64, F64]:
        """Log of the seconds with the correction and its standard deviation, f64 [N] each."""
        rows, left = self._rows, self._left
        centre, scale = np.log1p(rows).mean(axis=0), np.log1p(rows).std(axis=0) + 1e-9
        known, asked = ((np.log1p(x) - centre) / scale for x in (rows, wanted))
        gram = _kernel(known, known) * self._spread**2
        gram[np.diag_indices_from(gram)] += _NOISE**2
        factor = np.linalg.cholesky(gram)
        across = _kernel(asked, known) * self._spread**2
        solved = np.linalg.solve(factor, across.T)
        correction = solved.T @ np.linalg.solve(factor, left - left.mean()) + left.mean()
        doubt = np.sqrt(np.maximum(self._spread**2 - (solved**2).sum(axis=0), 0.0))
        return np.asarray(self.summed(wanted) + correction), np.asarray(doubt)


def _non_negative_fit(design: F64) -> F64:
    """Weights w >= 0 that bring ``design`` @ w near 1, [F]; what would turn negative is left out, worst first."""
    scale = np.maximum(np.abs(design).mean(axis=0), 1e-300)
    scaled = design / scale
    kept = list(range(design.shape[1]))
    while True:
        part = scaled[:, kept]
        gram = part.T @ part
        gram[np.diag_indices_from(gram)] += _RIDGE * len(design)
        weights = np.linalg.solve(gram, part.sum(axis=0))
        if len(kept) == 1 or weights.min() >= 0:
            break
        del kept[int(np.argmin(weights))]
    found = np.zeros(design.shape[1])
    found[kept] = np.maximum(weights, 0.0)
    return np.asarray(found / scale)


def _kernel(a: F64, b: F64) -> F64:
    """Squared-exponential similarity [N, M] of rows."""
    distance = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    return np.asarray(np.exp(-0.5 * np.maximum(distance, 0.0) / _LENGTH**2))
