"""What depth and width are worth at a given body size: F4, the default, with F2 and gem4 as second and third opinion.

    L layers   D width   N body parameters (everything but embedding and head)   T training tokens   R = D / L

All three were fitted to one table, Gemstones (22 shapes, 48M to 2B); no other public table has enough shapes and raw losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepthin.search.quality.term import OWN_FIT, Evidence, Support, Term

REFERENCE_TOKENS = 1e11  # T for every candidate; the laws are additive in T, so shape differences do not depend on it

# Gemstones shapes hold 15 · L · D² body parameters (MLP 12 D², attention 3 D²) and two untied tables of 50304 rows.
# Source: McLeish et al. 2025, arXiv 2502.06857; exact on its 22 shapes but for two of width 384 (14.67).
_BODY_PER_LD2 = 15.0
_GEMSTONES_VOCAB = 50304

EVIDENCE = Evidence(
    name="F4",
    status=OWN_FIT,
    source="fit to Gemstones cooldown rows (arXiv 2502.06857), equivalent shape; spread from F2 and the published gem4",
    support=(
        Support("layers", 3, 80),
        Support("width", 256, 3072),
        Support("aspect ratio", 3.2, 320),
        Support("body parameters", 22.6e6, 1.77e9),
        Support("total parameters", 48e6, 2.1e9),
        Support("training tokens", 10e9, 350e9),
    ),
)


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
# Source: table mcleish7/gemstone-scaling-laws@5f420478 wandb_dfs (MIT), arXiv 2502.06857; benchmarks/refit_quality.py.
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


def shape_term(layers: int, width: int, body: int, total: int, tokens: float) -> Term:
    """F4 of the equivalent shape, with F2 and gem4 as other readings.

    Args:
        layers: blocks with weights of their own.
        width: hidden size.
        body: parameters without embedding and head.
        total: all parameters, for the range of support only.
        tokens: training tokens.
    """
    layers_e, width_e = equivalent_shape(layers, width, body)
    return EVIDENCE.term(
        {
            "F4": f4_loss(layers_e, width_e, body, tokens),
            "F2": f2_loss(layers, width, body, tokens),
            "gem4": gem4_loss(layers_e, width_e, body, tokens),
        },
        {
            "layers": layers,
            "width": width,
            "aspect ratio": width / layers,
            "body parameters": body,
            "total parameters": total,
            "training tokens": tokens,
        },
    )
