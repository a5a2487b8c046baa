"""Published and fitted scaling laws, one function each: plain numbers in, nats per token out. No shapes, no policy.

    L layers   D width   N body parameters (everything but embedding and head)   T training tokens   V vocabulary
    R = D / L  aspect ratio   r  MLP parameters per attention parameter of one block

"Own fit" means fitted by this project to a public table; it is not a published law. Which laws are used, and how they are
combined and hedged, is decided in ``search/quality.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

REFERENCE_TOKENS = 1e11  # T for every candidate; the laws are additive in T, so shape differences do not depend on it

# Gemstones shapes hold 15 · L · D² body parameters (MLP 12 D², attention 3 D²) and two untied tables of 50304 rows.
# Source: McLeish et al. 2025, arXiv 2502.06857; exact on its 22 shapes but for two of width 384 (14.67).
_BODY_PER_LD2 = 15.0
_GEMSTONES_VOCAB = 50304


@dataclass(frozen=True, slots=True)
class AdditiveLaw:
    """loss = e^base + e^depth · L^-a_depth + e^width · D^-a_width + e^tokens · T^-a_tokens + e^params · P^-a_params.

    P is whatever parameter count the law was fitted with.
    """

    base: float
    depth: float
    a_depth: float
    width: float
    a_width: float
    tokens: float
    a_tokens: float
    params: float
    a_params: float

    def loss(self, layers: float, width: float, params: float, tokens: float) -> float:
        """Nats per token."""
        return (
            math.exp(self.base)
            + math.exp(self.depth) * math.pow(layers, -self.a_depth)
            + math.exp(self.width) * math.pow(width, -self.a_width)
            + math.exp(self.tokens) * math.pow(tokens, -self.a_tokens)
            + math.exp(self.params) * math.pow(params, -self.a_params)
        )


@dataclass(frozen=True, slots=True)
class AspectLaw:
    """loss = e^p0 + e^p1 · N^-p2 · (1 + p5² (ln R - p6 - p7 · ln(N / 1e8))²) + e^p3 · T^-p4."""

    p0: float
    p1: float
    p2: float
    p3: float
    p4: float
    p5: float
    p6: float
    p7: float

    def loss(self, aspect: float, body: float, tokens: float) -> float:
        """Nats per token."""
        off = math.log(aspect) - self.p6 - self.p7 * math.log(body / 1e8)
        size = math.exp(self.p1) * math.pow(body, -self.p2) * (1 + self.p5**2 * off**2)
        return math.exp(self.p0) + size + math.exp(self.p3) * math.pow(tokens, -self.p4)


# Own fit to the cooldown rows of Gemstones (199 rows, Huber 1e-3 on log loss, rmse 0.0235); P is the body.
# Source: table mcleish7/gemstone-scaling-laws@5f420478 wandb_dfs (MIT), arXiv 2502.06857.
F4_COOLDOWN = AdditiveLaw(
    base=0.459360,
    depth=-0.107139,
    a_depth=0.247861,
    width=2.293331,
    a_width=0.472896,
    tokens=11.922334,
    a_tokens=0.554359,
    params=2.992541,
    a_params=0.222572,
)
# Own fit to the same rows, rmse 0.0235. Source: as F4.
F2_COOLDOWN = AspectLaw(0.480885, 2.983206, 0.151451, 11.872723, 0.552429, 0.099249, 3.612304, -0.282816)
# Published, cooldown end; P counts both untied tables. rmse 0.0232 on its rows.
# Source: mcleish7/gemstone-scaling-laws@5f420478 parameters_delta-4 (MIT), arXiv 2502.06857.
GEM4_COOLDOWN = AdditiveLaw(
    base=0.4195179541,
    depth=-0.0254911443,
    a_depth=0.3655461733,
    width=1.6375654653,
    a_width=0.30146699,
    tokens=9.9838221358,
    a_tokens=0.4670177667,
    params=7.8653383939,
    a_params=0.5055007692,
)


def equivalent_shape(layers: float, width: float, body: float) -> tuple[float, float]:
    """(L_e, D_e) with the same aspect ratio that would hold ``body`` parameters at 15 · L · D².

    The Gemstones shapes make ln N, ln L and ln D collinear, so F4 and gem4 fed a raw shape with another MLP or KV recipe
    reward starving the MLP (a false 0.13 nats at 125M). This moves the shape onto the surface that was fitted.
    """
    aspect = width / layers
    layers_e = math.cbrt(body / (_BODY_PER_LD2 * aspect**2))
    return layers_e, aspect * layers_e


def f4_loss(layers: float, width: float, body: float, tokens: float = REFERENCE_TOKENS) -> float:
    """F4 as fitted, for the raw shape; callers pass an equivalent shape."""
    return F4_COOLDOWN.loss(layers, width, body, tokens)


def f2_loss(layers: float, width: float, body: float, tokens: float = REFERENCE_TOKENS) -> float:
    """F2; it knows only aspect ratio and body, so it needs no equivalent shape."""
    return F2_COOLDOWN.loss(width / layers, body, tokens)


def gem4_loss(layers: float, width: float, body: float, tokens: float = REFERENCE_TOKENS) -> float:
    """gem4 as published, for the raw shape, with its own two tables of 50304 rows added to ``body``."""
    return GEM4_COOLDOWN.loss(layers, width, body + 2 * _GEMSTONES_VOCAB * width, tokens)


# Fit to 80-297M models, layers fixed per size. Source: arXiv 2510.18245 sections 3.3 and 5.1.
_B0, _B1, _B2 = 0.3870, 0.0063, 0.0065
_RATIO_RANGE = (0.5, 5.0)
GEMSTONES_RATIO = 4.0  # r of the shapes F4 was fitted to


def mlp_attention_factor(ratio: float) -> float:
    """m(r): loss relative to the best r, at least 1; ``ratio`` is used as given."""
    best = _B2 / _B1  # where the derivative b1 / r - b2 / r² is zero
    return _mlp_curve(ratio) / _mlp_curve(best)


def attention_factor(ratio: float) -> float:
    """m_attn: half of the published effect of r, relative to r = 4 where F4 was fitted; r is clamped to [0.5, 5].

    Halving is our judgement: the measured effect was 0.6 of the predicted one.
    """
    low, high = _RATIO_RANGE
    return _half(min(max(ratio, low), high)) / _half(GEMSTONES_RATIO)


def _mlp_curve(ratio: float) -> float:
    return _B0 + _B1 * math.log(ratio) + _B2 / ratio


def _half(ratio: float) -> float:
    return 1 + (mlp_attention_factor(ratio) - 1) / 2


# Compute-optimal vocabulary parameters against body parameters, approach 1 with C eliminated.
# Source: Tao et al. 2024, arXiv 2407.13623; sail-sg/scaling-with-vocab@6701cc20.
_TAO_BODY = (-2.4846510161625193, 0.5)
_TAO_VOCAB = (-1.589031299255507, 0.4163622634135234)
# k: own fit to that repository's runs (4-37 tokens per body parameter); drift: one over-trained pair, arXiv 2407.13623.
_VOCAB_K = 0.040
_VOCAB_DRIFT = 0.32
_TOKENS_PER_BODY = 24.0  # what approach 1 implies


def best_vocab_params(body: float, tokens: float | None = None) -> float:
    """Nv*: embedding parameters V·D the law prefers for ``body``, moved to ``tokens`` when given."""
    (body_c, body_e), (vocab_c, vocab_e) = _TAO_BODY, _TAO_VOCAB
    static = math.exp(vocab_c) * math.pow(body / math.exp(body_c), vocab_e / body_e)
    return static if tokens is None else static * math.pow(tokens / (_TOKENS_PER_BODY * body), _VOCAB_DRIFT)


def vocab_penalty(vocab: float, width: float, body: float, tokens: float = REFERENCE_TOKENS) -> float:
    """dL_vocab: nats lost by a vocabulary other than the preferred one."""
    return _VOCAB_K * math.log(vocab * width / best_vocab_params(body, tokens)) ** 2


def kv_penalty(group: float) -> float:
    """dL_kv for ``group`` query heads per key/value head: none to 4, then 0.04 a doubling, at most 0.10.

    Source: judgement from two MobileLLM rows, arXiv 2402.14905 (1 KV head of 16 cost 0.9 and 1.7 accuracy points).
    """
    return min(0.10, 0.04 * max(0.0, math.log2(group / 4)))


# Source: judgement from one MobileLLM seed (tying cost 0.2 accuracy points), arXiv 2402.14905.
TIE_PENALTY = 0.015

# Source: Ouyang et al., ACL 2025, Figure 6 (per-row GPTQ on Pythia 160M-12B), with bounds from GPTQ's OPT table.
_QUANT_K, _QUANT_TOKENS, _QUANT_BODY, _QUANT_BITS = 0.017, 0.5251, 0.2261, 5.4967
_QUANT_TOKEN_CAP = 1.8e11
_QUANT_BOUNDS = (0.02, 0.15)
# Source: Q8_0 of Salamandra-2B costs 0.0002 and of Llama-3.2-1B 0.0006 nats (published perplexities); rounded up.
INT8_PENALTY = 0.001
# Multipliers on the per-row law: 1.0 per-row, 0.5 group-wise after training, 0.25 group-wise in training. Judgement.
PER_ROW, GROUP_WISE, GROUP_WISE_QAT = 1.0, 0.5, 0.25


def int4_penalty(body: float, tokens: float = REFERENCE_TOKENS, multiplier: float = GROUP_WISE) -> float:
    """dL_quant of 4-bit weights: multiplier · clamp(0.017 · T^0.5251 / (N^0.2261 · 4^5.4967), 0.02, 0.15)."""
    law = _QUANT_K * math.pow(min(tokens, _QUANT_TOKEN_CAP), _QUANT_TOKENS) / (math.pow(body, _QUANT_BODY) * 4**_QUANT_BITS)
    low, high = _QUANT_BOUNDS
    return multiplier * min(max(law, low), high)


# Tokens per character of one corpus; replace by the real tokenizer's once it exists.
# Source: sail-sg/scaling-with-vocab@6701cc20, arXiv 2407.13623.
_FERTILITY = (0.00639222, -0.15811069, 1.20470122)
_FERTILITY_CAP = 200_000


def tokens_per_char(vocab: float) -> float:
    """f(V): tokens a character of text takes; vocabularies above 200,000 count as 200,000."""
    log = math.log(min(vocab, _FERTILITY_CAP))
    square, linear, constant = _FERTILITY
    return square * log**2 + linear * log + constant
