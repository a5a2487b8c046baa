"""Blocks that run several times with the same weights: no law exists, so only unique weights count and repeats earn nothing."""

from __future__ import annotations

from deepthin.search.quality.term import JUDGEMENT, Term, strengths

# Context only: running each block twice in a row gained 0.7 (125M) and 0.8 (350M) accuracy points after 1T tokens, which the
# read-out of accuracy.py puts at 0.035 to 0.06 nats. Source: MobileLLM-LS, arXiv 2402.14905 (second-hand).
PUBLISHED_GAIN = 0.06

SOURCE = "no law; MobileLLM-LS gained 0.7-0.8 accuracy points by running each block twice (arXiv 2402.14905)"


def sharing_term(sharing: int) -> Term:
    """Nothing for repeats, with the published gain as the other reading; any sharing counts as extrapolated."""
    if sharing == 1:
        return Term("dL_share", strengths(0.0, 0.0, 0.0), JUDGEMENT, SOURCE)
    return Term(
        "dL_share",
        strengths(0.0, 0.0, -PUBLISHED_GAIN),
        JUDGEMENT,
        SOURCE,
        (f"each block runs {sharing} times, and no law credits or charges that",),
    )
