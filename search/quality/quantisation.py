"""What rounding the matrices to few bits costs after training: dL_quant by format.

Judged, because nothing is published for group-wise formats below 300M; replace it by a measured difference as soon as a
trained checkpoint can be quantised.

    N body parameters   T training tokens
"""

from __future__ import annotations

import math

from deepthin.engine.formats import FORMATS, format_named
from deepthin.search.quality.shape_laws import REFERENCE_TOKENS
from deepthin.search.quality.term import JUDGEMENT, PUBLISHED, Evidence, Support, Term, strengths

# Source: Ouyang et al., ACL 2025, Figure 6 (per-row GPTQ on Pythia 160M-12B), with bounds from GPTQ's OPT table.
_K, _TOKENS, _BODY, _BITS = 0.017, 0.5251, 0.2261, 5.4967
_TOKEN_CAP = 1.8e11
_BOUNDS = (0.02, 0.15)

# Multipliers on the per-row law: 1.0 per-row, 0.5 group-wise after training, 0.25 group-wise in training. Judgement.
PER_ROW, GROUP_WISE, GROUP_WISE_QAT = 1.0, 0.5, 0.25

# Q8_0 costs 0.0002 (Salamandra-2B) and 0.0006 nats (Llama-3.2-1B), rounded up. Source: their published perplexities.
INT8_PENALTY = 0.001
_INT8_LEAST = 0.0002

# Mean squared rounding error of normal weights over their mean square, llama.cpp's own rounding for K-formats. Own
# computation: benchmarks/refit_quality.py.
ROUNDING_ERROR = {"q4_k": 5.10e-3, "q5_0": 1.83e-3, "q5_1": 1.43e-3, "q5_k": 1.31e-3, "q6_k": 3.15e-4}
# The published 4-bit damage that the multiplier 0.5 was judged by was that of Q4_K.
_JUDGED_ON = "q4_k"

EVIDENCE = Evidence(
    name="dL_quant",
    status=JUDGEMENT,
    source="per-row law (Ouyang et al. 2025) times a multiplier",
    support=(Support("body parameters", 85e6, 12e9),),
)


def int4_penalty(body: float, tokens: float = REFERENCE_TOKENS, multiplier: float = GROUP_WISE) -> float:
    """Nats lost with 4-bit weights: multiplier · clamp(0.017 · T^0.5251 / (N^0.2261 · 4^5.4967), 0.02, 0.15)."""
    law = _K * math.pow(min(tokens, _TOKEN_CAP), _TOKENS) / (math.pow(body, _BODY) * 4**_BITS)
    low, high = _BOUNDS
    return multiplier * min(max(law, low), high)


def rounding_share(quant: str) -> float:
    """Damage of a 4- to 6-bit format relative to 4 bits: the ratio of squared rounding errors to that of Q4_K, at most 1.

    Small damage grows with the square of the error. On Salamandra-2B that puts Q5_K_S at 1.3 and Q6_K at 2.1 times the
    published ratio to Q4_K_S; Q4_0 and Q4_1 count as 4 bits, although they round 1.2 to 1.45 times as coarsely as Q4_K.
    """
    return ROUNDING_ERROR.get(quant, ROUNDING_ERROR[_JUDGED_ON]) / ROUNDING_ERROR[_JUDGED_ON]


def quantisation_term(quant: str, body: int, tokens: float, multiplier: float) -> Term:
    """Damage of storing the body as ``quant``; half and twice as much is possible.

    Raises:
        UsageError: no such format.
    """
    name = format_named(quant).name
    bits = FORMATS[name].bits_per_weight
    if bits >= 16:
        readings, source = strengths(0.0, 0.0, 0.0), "16 bits and more count as lossless"
        return Term(EVIDENCE.name, readings, PUBLISHED, source)
    if bits >= 8:
        readings, source = strengths(INT8_PENALTY, _INT8_LEAST, INT8_PENALTY), "Q8_0 of two published models, rounded up"
        return Term(EVIDENCE.name, readings, PUBLISHED, source)
    nats = int4_penalty(body, tokens, multiplier) * rounding_share(name)
    return EVIDENCE.term(strengths(nats, nats / 2, 2 * nats), {"body parameters": body})
