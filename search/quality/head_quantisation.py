"""What an embedding and head of another format than goes with the body cost: dL_head, judged by analogy.

dL_quant was judged on files whose tables are finer than their bodies (``formats.head_format``). No figure is published for
coarser tables, though llama.cpp's quantiser spends bits on them, so twice the body's damage a parameter is taken as likely.

    N body parameters   T training tokens
"""

from __future__ import annotations

from deepthin.engine.formats import Scheme
from deepthin.search.quality.quantisation import INT8_PENALTY, int4_penalty, rounding_share
from deepthin.search.quality.term import JUDGEMENT, Term, strengths

TERM = "dL_head"
_PER_BODY_PARAMETER = 2.0  # judgement: rounded logits are not corrected by later layers
_MOST = 0.15  # what the law of the body is cut at too
_SOURCE = "no published figure; twice the damage of as many body parameters"


def head_term(scheme: Scheme, tables: int, body: int, tokens: float, multiplier: float) -> Term:
    """Damage of the tables beyond what dL_quant holds; half and twice as much is possible.

    Args:
        scheme: formats of body and head.
        tables: parameters of embedding and untied head.
        body: all other parameters.
        tokens: training tokens.
        multiplier: 4-bit damage relative to per-row GPTQ.
    """
    head, share = scheme.head, tables / body
    if head.bits_per_weight >= 16 or (head.bits_per_weight >= 8 and scheme.body.is_quantized):
        return Term(
            TERM, strengths(0.0, 0.0, 0.0), JUDGEMENT, "finer tables than the body's published figures had earn nothing"
        )
    if head.bits_per_weight >= 8:
        nats = min(_MOST, INT8_PENALTY * share)
    else:
        nats = min(_MOST, _PER_BODY_PARAMETER * share * int4_penalty(body, tokens, multiplier) * rounding_share(head.name))
    why = f"embedding and head in {head.name}: nobody has published what that costs"
    return Term(TERM, strengths(nats, nats / 2, 2 * nats), JUDGEMENT, _SOURCE, (why,))
