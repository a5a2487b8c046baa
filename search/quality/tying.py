"""What a head tied to the embedding costs: dL_tie, judged from one seed. The freed bytes come back through the body."""

from __future__ import annotations

from deepthin.search.quality.term import JUDGEMENT, Evidence, Support, Term, strengths

# Tying cost 0.2 accuracy points from 135M to 119M parameters, less than the noise between seeds, so none or twice as much is
# possible. Source: MobileLLM, arXiv 2402.14905.
TIE_PENALTY = 0.015

EVIDENCE = Evidence(
    name="dL_tie",
    status=JUDGEMENT,
    source="one MobileLLM seed (arXiv 2402.14905)",
    support=(Support("total parameters", 100e6, 150e6),),
)


def tying_term(tied: bool, total: int) -> Term:
    """The penalty of a tied head, none of an untied one; outside the one size it was seen at it counts as extrapolated."""
    if not tied:
        return Term(EVIDENCE.name, strengths(0.0, 0.0, 0.0), EVIDENCE.status, EVIDENCE.source)
    return EVIDENCE.term(strengths(TIE_PENALTY, 0.0, 2 * TIE_PENALTY), {"total parameters": total})
