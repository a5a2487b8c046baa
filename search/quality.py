"""Predicted quality of a shape: one number in nats per token, the terms it is made of, and how far to trust it.

    Q = F4(equivalent shape, T) · m_attn + dL_vocab + dL_kv + dL_tie + dL_quant        lower is better

It ranks shapes of one budget; it forecasts no benchmark score and compares nothing across tokenizers. Shared layers count
once: no law credits a repeat. Designs closer than :data:`TIE_BAND` are tied, and then measured time decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deepthin.engine.accounting import Parts, count_params
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import FORMATS, format_named
from deepthin.engine.shape import Shape
from deepthin.search import laws

TIE_BAND = 0.02  # nats; seeds differ by this much in the fitted table, so closer designs are tied (judgement)
VOCAB_DOUBT = 0.03  # nats added on both sides when the vocabulary term decides a pick (judgement)
VOCAB_SUPPORT = "the vocabulary term was fitted to runs of 4-37 training tokens per body parameter"

PUBLISHED, OWN_FIT, JUDGEMENT = "published", "own fit", "judgement"

# What F4 was fitted on. Source: the 22 shapes of arXiv 2502.06857; the MLP range from arXiv 2510.18245.
_HULL = {
    "layers": (3, 80),
    "width": (256, 3072),
    "aspect ratio": (3.2, 320),
    "MLP per attention parameter": (0.5, 5),  # where m_attn is clamped
    "body parameters": (22.6e6, 1.77e9),
    "total parameters": (48e6, 2.1e9),
    "training tokens": (10e9, 350e9),
}


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the prediction.

    Attributes:
        name: ``F4``, ``m_attn``, ``dL_vocab``, ``dL_kv``, ``dL_tie`` or ``dL_quant``.
        nats: what it adds; for the factor m_attn, what multiplying adds.
        status: ``published``, ``own fit`` or ``judgement``.
        note: where it comes from, in a few words.
    """

    name: str
    nats: float
    status: str
    note: str

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return {"name": self.name, "nats": self.nats, "status": self.status, "note": self.note}


@dataclass(frozen=True, slots=True)
class Quality:
    """Prediction for one shape and format.

    Attributes:
        terms: summands; their sum is :attr:`loss`.
        opinions: nats by law (``F4``, ``F2``, ``gem4``), each times m_attn, without the other terms.
        extrapolated: one sentence per limit of the fitted data that the shape leaves; empty inside.
    """

    terms: tuple[Term, ...]
    opinions: dict[str, float]
    extrapolated: tuple[str, ...]

    @property
    def loss(self) -> float:
        """Q in nats per token."""
        return sum(term.nats for term in self.terms)

    def without(self, name: str) -> float:
        """Q with one term left out."""
        return sum(term.nats for term in self.terms if term.name != name)

    def difference(self, reference: Quality) -> dict[str, float]:
        """Q minus the reference's Q: ``value``, and the ``low`` and ``high`` of the three laws, widened by the tie band.

        Only differences are compared between laws; their absolute values carry offsets that say nothing about shape.
        """
        value = self.loss - reference.loss
        shape_part = {law: nats - reference.opinions[law] for law, nats in self.opinions.items()}
        shifts = [part - shape_part["F4"] for part in shape_part.values()]
        return {"value": value, "low": value + min(shifts) - TIE_BAND, "high": value + max(shifts) + TIE_BAND}

    def to_json(self, reference: Quality, doubt: float = 0.0) -> dict[str, Any]:
        """The predicted-value object of the command-line contract; low and high stem from differences to ``reference``.

        Args:
            reference: the candidate the three laws are compared at.
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
        int4_multiplier: 4-bit damage relative to per-row GPTQ (``laws.PER_ROW``, ``GROUP_WISE``, ``GROUP_WISE_QAT``).
    """

    tokens: float = laws.REFERENCE_TOKENS
    vocab_term: bool = True
    int4_multiplier: float = laws.GROUP_WISE

    def predict(self, shape: Shape, quant: str) -> Quality:
        """Predict ``shape`` with its body stored as ``quant``.

        Raises:
            UsageError: no such format.
        """
        params = count_params(shape)
        body, width = params.non_embedding, shape.hidden_size
        layers_e, width_e = laws.equivalent_shape(shape.num_layers, width, body)
        factor = laws.attention_factor(params.mlp / params.attention)
        opinions = {
            "F4": laws.f4_loss(layers_e, width_e, body, self.tokens),
            "F2": laws.f2_loss(shape.num_layers, width, body, self.tokens),
            "gem4": laws.gem4_loss(layers_e, width_e, body, self.tokens),
        }
        f4 = opinions["F4"]
        terms = [
            Term("F4", f4, OWN_FIT, "fit to Gemstones cooldown rows (arXiv 2502.06857), equivalent shape"),
            Term("m_attn", f4 * (factor - 1), JUDGEMENT, "half of the MLP-to-attention effect of arXiv 2510.18245"),
        ]
        if self.vocab_term:
            nats = laws.vocab_penalty(shape.vocab_size, width, body, self.tokens)
            terms.append(Term("dL_vocab", nats, OWN_FIT, f"arXiv 2407.13623; {VOCAB_SUPPORT}"))
        terms += [
            Term("dL_kv", laws.kv_penalty(shape.num_heads / shape.num_kv_heads), JUDGEMENT, "two MobileLLM rows"),
            Term("dL_tie", laws.TIE_PENALTY * shape.tie_word_embeddings, JUDGEMENT, "one MobileLLM seed"),
            self._quant_term(quant, body),
        ]
        opinions = {law: nats * factor for law, nats in opinions.items()}
        return Quality(tuple(terms), opinions, self._outside(shape, params))

    def _quant_term(self, quant: str, body: int) -> Term:
        bits = _NOMINAL_BITS[format_named(quant).name]
        if bits >= 16:
            return Term("dL_quant", 0.0, PUBLISHED, "16 bits and more count as lossless")
        if bits == 8:
            return Term("dL_quant", laws.INT8_PENALTY, PUBLISHED, "Q8_0 of two published models, rounded up")
        nats = laws.int4_penalty(body, self.tokens, self.int4_multiplier)
        return Term("dL_quant", nats, JUDGEMENT, f"per-row law (Ouyang et al. 2025) times {self.int4_multiplier:g}")

    def _outside(self, shape: Shape, params: Parts) -> tuple[str, ...]:
        values = {
            "layers": shape.num_layers,
            "width": shape.hidden_size,
            "aspect ratio": shape.hidden_size / shape.num_layers,
            "MLP per attention parameter": params.mlp / params.attention,
            "body parameters": params.non_embedding,
            "total parameters": params.total,
            "training tokens": self.tokens,
        }
        return tuple(
            f"{name} {value:,.4g} is {'below' if value < low else 'above'} the fitted {low:,.4g}-{high:,.4g}"
            for name, value in values.items()
            for low, high in [_HULL[name]]
            if not low <= value <= high
        )


_NOMINAL_BITS = {name: next(b for b in (32, 16, 8, 4) if fmt.bits_per_weight >= b) for name, fmt in FORMATS.items()}


def judged_terms(qualities: Iterable[Quality]) -> list[str]:
    """Names of the judgement terms that are not zero in any of ``qualities``; every report names them."""
    names = {term.name: None for quality in qualities for term in quality.terms if term.status == JUDGEMENT and term.nats}
    return list(names)


def milliseconds_per_kchar(seconds_per_token: float, vocab_size: int) -> float:
    """Milliseconds per 1,000 characters of text: a larger vocabulary takes fewer tokens for the same text."""
    return seconds_per_token * 1e3 * laws.tokens_per_char(vocab_size) * 1e3


def check_tokens(tokens: float) -> None:
    """Refuse training-token counts no law can be evaluated at.

    Raises:
        UsageError: outside 1e9 to 1e14.
    """
    if not 1e9 <= tokens <= 1e14:
        raise UsageError(f"training tokens {tokens:g}: a number from 1e9 to 1e14 is needed, for example 1e11")
