"""How parameters of a block are best split between MLP and attention: m_attn, a factor on the shape law.

r  MLP parameters per attention parameter of one block
"""

from __future__ import annotations

import math

from deepthin.search.quality.term import JUDGEMENT, Evidence, Support, Term, strengths

# Fit to 80-297M models, layers fixed per size, grouped-query attention left out. Source: arXiv 2510.18245 sections 3.3, 5.1.
_B0, _B1, _B2 = 0.3870, 0.0063, 0.0065
RATIO_RANGE = (0.5, 5.0)
GEMSTONES_RATIO = 4.0  # r of the shapes F4 was fitted to, where the factor must be 1

EVIDENCE = Evidence(
    name="m_attn",
    status=JUDGEMENT,
    source="half of the MLP-to-attention effect of arXiv 2510.18245, because its 1B check measured 0.6 of what it predicts",
    support=(Support("MLP per attention parameter", *RATIO_RANGE), Support("query width per width", 1, 1)),
)


def mlp_attention_factor(ratio: float) -> float:
    """m(r) as published: loss relative to the best r, at least 1; ``ratio`` is used as given."""
    best = _B2 / _B1  # where the derivative b1 / r - b2 / r² is zero
    return _curve(ratio) / _curve(best)


def attention_factor(ratio: float, share: float = 0.5) -> float:
    """m_attn: ``share`` of the published effect of r, relative to r = 4 where F4 was fitted; r is clamped to [0.5, 5]."""
    low, high = RATIO_RANGE
    return _shared(min(max(ratio, low), high), share) / _shared(GEMSTONES_RATIO, share)


def mlp_attention_term(ratio: float, shape_nats: float, query_ratio: float = 1.0) -> Term:
    """What m_attn adds to a shape law of ``shape_nats``; weak is no effect, strong the published one in full.

    All heads of the shapes behind it are together as wide as the stream; another ``query_ratio`` is only said, not charged.
    """
    used, strong = (shape_nats * (attention_factor(ratio, share) - 1) for share in (0.5, 1.0))
    return EVIDENCE.term(
        strengths(used, 0.0, strong), {"MLP per attention parameter": ratio, "query width per width": query_ratio}
    )


def _curve(ratio: float) -> float:
    return _B0 + _B1 * math.log(ratio) + _B2 / ratio


def _shared(ratio: float, share: float) -> float:
    return 1 + (mlp_attention_factor(ratio) - 1) * share
