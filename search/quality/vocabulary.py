"""What a vocabulary costs that does not fit the body: dL_vocab, the largest lever below 300M and the least supported one.

    V vocabulary   D width   N body parameters   T training tokens   Nv = V · D

Every run behind it had 4 to 37 training tokens per body parameter. Real training has thousands, so the preferred vocabulary
is an extrapolation, on public-model tables the term lowers rank agreement, and every report gives the answer without it too.
"""

from __future__ import annotations

import math

from deepthin.search.quality.shape_laws import REFERENCE_TOKENS
from deepthin.search.quality.term import OWN_FIT, Evidence, Support, Term

TERM = "dL_vocab"
VOCAB_DOUBT = 0.03  # nats added on both sides when the term decides a pick (judgement)
VOCAB_SUPPORT = "the vocabulary term was fitted to runs of 4-37 training tokens per body parameter"

# Compute-optimal vocabulary parameters against body parameters, approach 1 with C eliminated.
# Source: Tao et al. 2024, arXiv 2407.13623; sail-sg/scaling-with-vocab@6701cc20.
_TAO_BODY = (-2.4846510161625193, 0.5)
_TAO_VOCAB = (-1.589031299255507, 0.4163622634135234)
# k: own fit to that repository's runs, which stand under no licence and are not kept; drift of Nv* with training tokens:
# 0.32 from one over-trained pair of arXiv 2407.13623 (second-hand), 0.416 if Nv* depends on compute only.
_K = 0.040
DRIFT, DRIFT_BY_COMPUTE = 0.32, 0.416
_TOKENS_PER_BODY = 24.0  # what approach 1 implies

EVIDENCE = Evidence(
    name=TERM,
    status=OWN_FIT,
    source=f"arXiv 2407.13623; {VOCAB_SUPPORT}",
    support=(
        Support("training tokens per body parameter", 4, 37),
        Support("vocabulary", 4096, 96256),
        Support("body parameters", 33e6, 1.13e9),
    ),
)


def best_vocab_params(body: float, tokens: float | None = None, drift: float = DRIFT) -> float:
    """Nv*: embedding parameters V · D the law prefers for ``body``, moved to ``tokens`` when given."""
    (body_c, body_e), (vocab_c, vocab_e) = _TAO_BODY, _TAO_VOCAB
    static = math.exp(vocab_c) * math.pow(body / math.exp(body_c), vocab_e / body_e)
    return static if tokens is None else static * math.pow(tokens / (_TOKENS_PER_BODY * body), drift)


def vocab_penalty(vocab: float, width: float, body: float, tokens: float = REFERENCE_TOKENS, drift: float = DRIFT) -> float:
    """dL_vocab: nats lost by a vocabulary other than the preferred one."""
    return _K * math.log(vocab * width / best_vocab_params(body, tokens, drift)) ** 2


def vocabulary_term(vocab: int, width: int, body: int, tokens: float) -> Term:
    """The penalty at both drifts the evidence knows."""
    return EVIDENCE.term(
        {f"drift {drift:g}": vocab_penalty(vocab, width, body, tokens, drift) for drift in (DRIFT, DRIFT_BY_COMPUTE)},
        {"training tokens per body parameter": tokens / body, "vocabulary": vocab, "body parameters": body},
    )
