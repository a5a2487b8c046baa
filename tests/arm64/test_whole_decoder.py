"""The whole decoder on tiny models against NumPy, in as few seconds as will do: ``run.sh`` runs it on emulated CPUs too.

Every kind of architecture, five weight formats and every cache format, not all of each with all of the others; a prompt at
once, then token by token, on one thread and on two.
"""

from __future__ import annotations

import numpy as np
import pytest

from deepthin.engine.decoder import Decoder
from deepthin.engine.formats import FORMATS
from deepthin.engine.kv_cache import CACHE_FORMATS
from deepthin.engine.model import Model
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from tests.support.k_blocks import stored_model
from tests.support.tiny_models import VARIANT_SHAPES, lively_model, long_prompt, tiny_shape

WIDE = Shape.parse("L=1,d=256,heads=4,kv=2,ff=256,vocab=96,tied,ctx=64")  # takes super-blocks of 256 too
PROMPT = 33  # past the original context of every scaling, and no multiple of the tokens that share a load of weights
STEPS = 4
# NMSE of a position's logits that rounding may cost: f32; 8-bit activations; cached keys and values. Several layers of sharp
# attention make small errors large: they get what export/tolerances.toml gives such models, one layer a tenth.
EXACT = 1e-10
ACTIVATIONS, CACHE = 5e-3, {"f32": 0.0, "f16": 1e-6, "q8_0": 3e-3}


def turn(values: tuple[str, ...], index: int) -> str:
    return values[index % len(values)]


CACHES = tuple(CACHE_FORMATS)
KINDS = [(name, turn(("f16", "q8_0", "f32", "q4_0", "q5_0"), i), turn(CACHES, i // 2)) for i, name in enumerate(VARIANT_SHAPES)]


def assert_decodes(model: Model, cache: str, share: float) -> None:
    ids = long_prompt(model.shape, PROMPT + STEPS)
    found = []
    for threads in (1, 2):
        with Decoder(model, threads=threads, context=len(ids), kv_format=cache) as decoder:
            prompt = decoder.logits(ids[:PROMPT])
            found.append(np.stack([*prompt, *(decoder.step(token).copy() for token in ids[PROMPT:])]))
    np.testing.assert_array_equal(found[0], found[1])
    expected = Reference(model.shape, model.dequantized()).logits(ids)
    nmse = ((found[0] - expected) ** 2).sum(axis=1) / (expected**2).sum(axis=1)
    quantized = any(tensor.format.is_quantized for tensor in model.tensors.values())
    budget = EXACT + share * (ACTIVATIONS * quantized + CACHE[cache])
    assert nmse.max() < budget, f"position {nmse.argmax()}: NMSE {nmse.max():.2e}, budget {budget:.2e}"


@pytest.mark.parametrize(("name", "quant", "cache"), KINDS)
def test_every_kind_of_architecture(name: str, quant: str, cache: str) -> None:
    assert_decodes(lively_model(tiny_shape(name), quant=quant), cache, share=1.0)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_0", "q5_0", "q4_k"])
def test_weights_and_cache_of_every_format(quant: str, cache: str) -> None:
    model = stored_model(WIDE, lively_model(WIDE).dequantized(), [FORMATS[quant]])
    assert_decodes(model, cache, share=0.1)
