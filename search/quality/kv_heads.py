"""What few key/value heads cost: dL_kv, judged from two rows."""

from __future__ import annotations

import math

from deepthin.search.quality.term import JUDGEMENT, Evidence, Support, Term, strengths

# One key/value head of 16 cost 0.9 (125M) and 1.7 (350M) accuracy points, which the read-out of accuracy.py puts at 0.045 to
# 0.12 nats; used are 0.08. Part of it may be body parameters that F4 already charges. Source: MobileLLM, arXiv 2402.14905.
_FREE_GROUP = 4
_PER_DOUBLING = 0.04
_MOST = 0.10
_WEAK, _STRONG = 0.55, 1.5

EVIDENCE = Evidence(
    name="dL_kv",
    status=JUDGEMENT,
    source="two MobileLLM rows (arXiv 2402.14905)",
    support=(Support("query heads per key/value head", 1, 16),),
)


def kv_penalty(group: float) -> float:
    """Nats lost with ``group`` query heads per key/value head: none to 4, then 0.04 a doubling, at most 0.10."""
    return min(_MOST, _PER_DOUBLING * max(0.0, math.log2(group / _FREE_GROUP)))


def kv_heads_term(group: float) -> Term:
    """The penalty, and what the two rows allow at least and at most."""
    nats = kv_penalty(group)
    return EVIDENCE.term(strengths(nats, _WEAK * nats, _STRONG * nats), {"query heads per key/value head": group})
