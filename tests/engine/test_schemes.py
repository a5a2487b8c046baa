"""Body and head formats as one name, and what models, counts and plans make of it."""

from __future__ import annotations

import numpy as np
import pytest

from deepthin.engine.accounting import bytes_read_per_token, count_bytes, fallback_matrices
from deepthin.engine.decoder import Decoder
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import BODY_QUANTS, F16, Q4_0, Q4_K, Q8_0, Scheme, head_format, scheme_named, scheme_of
from deepthin.engine.model import random_model
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import stored_format, tensor_specs
from tests.support.tiny_models import lively_model, tiny_shape

SHAPE = Shape.parse("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,untied,ctx=64")


@pytest.mark.parametrize("body", BODY_QUANTS)
@pytest.mark.parametrize("head", BODY_QUANTS)
def test_names_come_back_and_are_short_where_the_head_follows(body: str, head: str) -> None:
    scheme = Scheme(scheme_named(body).body, scheme_named(head).body)
    assert scheme_named(scheme.name) == scheme
    assert scheme_named(scheme.name.upper()) == scheme
    follows = scheme.head is head_format(scheme.body)
    assert scheme.name == (body if follows else f"{body}-head_{head}")


def test_schemes_of_other_things() -> None:
    assert scheme_of(Q4_0) == scheme_of("q4_0") == Scheme(Q4_0, Q8_0)
    assert scheme_of(Scheme(Q4_0, F16)).name == "q4_0-head_f16"
    assert scheme_named("q4_k").body is Q4_K  # read, so it can be counted
    assert scheme_named("q4_0-head_f16").coarsest is Q4_0
    assert scheme_named("f16-head_q4_0").coarsest is Q4_0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("q4_0-head_q9", "format 'q9' is unknown"),
        ("q9-head_q4_0", "format 'q9' is unknown"),
        ("q4_0-head_", "format '' is unknown"),
        ("q4_0-head_q6_k", "'q6_k' is only read"),
        ("q4_0+f16", "'q4_0\\+f16' is unknown"),
    ],
)
def test_names_of_no_scheme(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        scheme_named(name, to_make=True)


def test_embedding_and_head_are_stored_as_named_and_nothing_else_moves() -> None:
    plain, own = random_model(SHAPE, quant="q4_0"), random_model(SHAPE, quant="q4_0-head_q5_1")
    formats = {name: tensor.format.name for name, tensor in own.tensors.items()}
    assert formats["token_embd"] == formats["output"] == "q5_1"
    assert formats["blk.1.ffn_down"] == "q4_0"
    assert formats["output_norm"] == "f32"
    same = [name for name in own.tensors if np.array_equal(own.tensors[name].data, plain.tensors[name].data)]
    assert set(own.tensors) - set(same) == {"token_embd", "output"}
    again = random_model(SHAPE).quantized("q4_0-head_q5_1")
    assert all(np.array_equal(again.tensors[name].data, own.tensors[name].data) for name in own.tensors)


@pytest.mark.parametrize("quant", ["q4_0-head_q4_0", "q8_0-head_f16", "f16-head_q4_1", "q5_1-head_f32"])
def test_counts_are_what_a_model_holds(quant: str) -> None:
    for text in (SHAPE.text, "L=1,d=80,heads=5,kv=5,ff=112,vocab=96,tied"):
        shape = Shape.parse(text)
        assert count_bytes(shape, quant).total == random_model(shape, quant=quant).num_bytes
        assert fallback_matrices(shape, quant) == fallback_matrices(shape, scheme_named(quant).body.name)
    own, plain = (bytes_read_per_token(SHAPE, name) for name in (quant, scheme_named(quant).body.name))
    assert (own - plain) * (count_bytes(SHAPE, quant).head - count_bytes(SHAPE, scheme_named(quant).body).head) > 0


def test_rows_no_block_divides_stay_f16_in_the_head_too() -> None:
    specs = {spec.name: spec for spec in tensor_specs(SHAPE.replace(hidden_size=72, num_heads=3, num_kv_heads=1, head_dim=24))}
    assert stored_format(specs["output"], scheme_named("f32-head_q4_0")) is F16


@pytest.mark.parametrize("quant", ["q4_0-head_q4_0", "q8_0-head_f16", "f32-head_q4_1"])
@pytest.mark.parametrize("name", ["smollm_like", "wide_heads"])  # tied and untied
def test_the_engine_decodes_any_pair(quant: str, name: str) -> None:
    model = lively_model(tiny_shape(name)).quantized(quant)
    ids = [3, 17, 44, 9]
    with Decoder(model, threads=1, context=16) as decoder:
        logits = np.asarray(decoder.prefill(ids), np.float64).copy()
    wanted = Reference(model.shape, model.dequantized(), np.float64).logits(ids)[-1]
    error = np.square(logits - wanted).mean() / np.square(wanted).mean()
    assert error < 3e-3  # activations are rounded to 8 bits; tests/engine/test_decoder.py bounds that by format
