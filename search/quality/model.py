"""Predicted quality of a shape: one number in nats per token with its interval, its terms, and where they are extrapolated.

It ranks shapes of one budget; it forecasts no benchmark score and compares nothing across tokenizers. Designs closer than
:data:`TIE_BAND` are tied, and then measured time decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deepthin.engine.accounting import count_params
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import head_format, scheme_named
from deepthin.engine.shape import Shape
from deepthin.search.quality.head_quantisation import head_term
from deepthin.search.quality.kv_heads import kv_heads_term
from deepthin.search.quality.layer_sharing import sharing_term
from deepthin.search.quality.mlp_attention import mlp_attention_term
from deepthin.search.quality.quantisation import GROUP_WISE, quantisation_term
from deepthin.search.quality.shape_laws import REFERENCE_TOKENS, shape_term
from deepthin.search.quality.term import JUDGEMENT, Term
from deepthin.search.quality.tying import tying_term
from deepthin.search.quality.vocabulary import vocabulary_term

TIE_BAND = 0.02  # nats; seeds differ by this much in the fitted table, so closer designs are tied (judgement)
MIN_TOKENS, MAX_TOKENS = 1e9, 1e14
SHAPE_TERMS = ("F4", "m_attn")


@dataclass(frozen=True, slots=True)
class Quality:
    """Prediction for one shape and format.

    Attributes:
        terms: summands; their sum is :attr:`loss`.
    """

    terms: tuple[Term, ...]

    @property
    def loss(self) -> float:
        """Q in nats per token."""
        return sum(term.nats for term in self.terms)

    @property
    def low(self) -> float:
        """Q at the least of every term, less the tie band."""
        return sum(term.low for term in self.terms) - TIE_BAND

    @property
    def high(self) -> float:
        """Q at the most of every term, plus the tie band."""
        return sum(term.high for term in self.terms) + TIE_BAND

    @property
    def extrapolated(self) -> dict[str, tuple[str, ...]]:
        """By term, one sentence per limit of its evidence that the shape leaves; terms inside are absent."""
        return {term.name: term.extrapolated for term in self.terms if term.extrapolated}

    @property
    def shape_extrapolated(self) -> bool:
        """Whether the shape lies outside what the shape law was fitted to."""
        return any(name in self.extrapolated for name in SHAPE_TERMS)

    def without(self, name: str) -> float:
        """Q with one term left out."""
        return sum(term.nats for term in self.terms if term.name != name)

    def difference(self, reference: Quality) -> dict[str, float]:
        """Q minus the reference's Q: ``value``, and ``low`` and ``high`` over the readings of every term and the tie band.

        Readings of the same name are compared with one another, since what is unknown about a term is the same for both
        shapes: laws carry offsets that say nothing about shape, and a multiplier too low for one is too low for the other.
        """
        low = high = 0.0
        ours, theirs = ({term.name: term for term in one.terms} for one in (self, reference))
        for name in {**ours, **theirs}:
            gaps = _gaps(ours.get(name), theirs.get(name))
            low, high = low + min(gaps), high + max(gaps)
        return {"value": self.loss - reference.loss, "low": low - TIE_BAND, "high": high + TIE_BAND}

    def to_json(self, reference: Quality, doubt: float = 0.0) -> dict[str, Any]:
        """The predicted-value object of the command-line contract; low and high stem from differences to ``reference``.

        Args:
            reference: the candidate that readings are compared at.
            doubt: nats added on both sides.
        """
        gap = self.difference(reference)
        return {
            "value": self.loss,
            "low": reference.loss + gap["low"] - doubt,
            "high": reference.loss + gap["high"] + doubt,
            "unit": "nats/token",
            "basis": "predicted",
        }


@dataclass(frozen=True, slots=True)
class QualityModel:
    """The settings of a prediction.

    Attributes:
        tokens: training tokens T, the same for every candidate.
        vocab_term: whether dL_vocab is added. Without it a smaller vocabulary always looks better, because loss per
            token is not comparable between vocabularies.
        int4_multiplier: 4-bit damage relative to per-row GPTQ (``quantisation.PER_ROW``, ``GROUP_WISE``, ``GROUP_WISE_QAT``).
    """

    tokens: float = REFERENCE_TOKENS
    vocab_term: bool = True
    int4_multiplier: float = GROUP_WISE

    def predict(self, shape: Shape, quant: str) -> Quality:
        """Predict ``shape`` stored as ``quant``; a head that follows the body's format is part of dL_quant.

        Raises:
            UsageError: no such format.
        """
        params, scheme = count_params(shape), scheme_named(quant)
        body, width = params.non_embedding, shape.hidden_size
        by_shape = shape_term(shape.num_layers, width, body, params.total, self.tokens)
        terms = [by_shape, mlp_attention_term(params.mlp / params.attention, by_shape.nats, shape.q_size / width)]
        if self.vocab_term:
            terms.append(vocabulary_term(shape.vocab_size, width, body, self.tokens))
        terms += [
            kv_heads_term(shape.num_heads / shape.num_kv_heads),
            tying_term(shape.tie_word_embeddings, params.total),
            sharing_term(shape.layer_sharing),
            quantisation_term(scheme.body.name, body, self.tokens, self.int4_multiplier),
        ]
        if scheme.head is not head_format(scheme.body):
            tables = params.embedding + params.head
            terms.append(head_term(scheme, tables, body, self.tokens, self.int4_multiplier))
        return Quality(tuple(terms))


def judged_terms(qualities: Iterable[Quality]) -> list[str]:
    """Names of the judgement terms that are not zero in any of ``qualities``; every report names them."""
    terms = (term for quality in qualities for term in quality.terms)
    return list(dict.fromkeys(term.name for term in terms if term.status == JUDGEMENT and any(term.readings.values())))


def check_tokens(tokens: float) -> None:
    """Refuse training-token counts no law can be evaluated at.

    Raises:
        UsageError: outside 1e9 to 1e14.
    """
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        raise UsageError(f"training tokens {tokens:g}: a number from 1e9 to 1e14 is needed, for example 1e11")


def _gaps(ours: Term | None, theirs: Term | None) -> list[float]:
    """Differences of one term by reading; a reading only one side knows is compared with what the other one uses."""
    mine, other = (term.readings if term else {} for term in (ours, theirs))
    return [
        mine.get(name, ours.nats if ours else 0.0) - other.get(name, theirs.nats if theirs else 0.0)
        for name in {**mine, **other}
    ]
