"""Shapes to time: drawn at random for what is held out, chosen by hand for what identifies the terms of a latency model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepthin.engine.accounting import count_params
from deepthin.engine.shape import Shape

_VOCABS = (512, 2048, 8192, 16384, 32000, 49152, 65536, 128256)
_HEAD_DIMS = (32, 64, 128)
_KV_GROUPS = (1, 2, 3, 4)
_MLP_RATIOS = (2.0, 2.67, 3.0, 3.5, 4.0)
_MULTIPLE = 32
_WIDTHS = (64, 3072)
_MAX_TABLE_SHARE = 0.7  # of the parameters in the embedding
_ATTEMPTS = 1000
_TOLERANCE = 0.35  # of the parameters aimed at; narrow deep shapes come in coarse steps


@dataclass(frozen=True, slots=True)
class ProbeModel:
    """A model with made-up weights and what to time with it.

    Attributes:
        shape: of the model.
        quant: format of its body.
        contexts: decode one token at so many cached ones.
        prompts: take in a prompt of so many tokens into an empty cache.
    """

    shape: Shape
    quant: str
    contexts: tuple[int, ...] = (0,)
    prompts: tuple[int, ...] = ()

    @property
    def room(self) -> int:
        """Positions to cache for all of it, those decoded meanwhile not counted."""
        return max(*self.contexts, *self.prompts, 0, 0)


def random_shape(
    generator: np.random.Generator, params: tuple[float, float], layers: tuple[int, int], *, vocabs: Sequence[int] = _VOCABS
) -> Shape:
    """A shape with parameters and depth drawn evenly in their logarithms, everything else from common choices.

    Args:
        generator: source of every choice.
        params: smallest and largest number of parameters, embedding included.
        layers: smallest and largest depth.
        vocabs: vocabularies to choose from; those whose table would take most of the parameters are passed over.

    Raises:
        RuntimeError: the ranges hold no shape.
    """
    for _ in range(_ATTEMPTS):
        wanted = math.exp(generator.uniform(math.log(params[0]), math.log(params[1])))
        depth = int(layers[0] * ((layers[1] + 1) / layers[0]) ** generator.random())
        vocab = int(generator.choice(vocabs))
        head_dim = int(generator.choice(_HEAD_DIMS))
        ratio = float(generator.choice(_MLP_RATIOS))
        group = int(generator.choice(_KV_GROUPS))
        per_d2 = depth * (2 + 2 / group + 3 * ratio)
        width = (math.sqrt(vocab**2 + 4 * per_d2 * wanted) - vocab) / (2 * per_d2)
        step = math.lcm(head_dim, _MULTIPLE)
        width = round(width / step) * step
        heads = width // head_dim
        if not _WIDTHS[0] <= width <= _WIDTHS[1] or heads % group or vocab * width > _MAX_TABLE_SHARE * wanted:
            continue
        shape = Shape(
            num_layers=depth,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=heads // group,
            head_dim=head_dim,
            intermediate_size=max(_MULTIPLE, round(ratio * width / _MULTIPLE) * _MULTIPLE),
            vocab_size=vocab,
        )
        if abs(count_params(shape).total / wanted - 1) <= _TOLERANCE:
            return shape
    raise RuntimeError(f"Bug: no shape of {params} parameters and {layers} layers was found in {_ATTEMPTS} attempts")
