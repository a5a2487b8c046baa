from __future__ import annotations

import numpy as np
import pytest

from deepthin.engine.decoder import Decoder
from deepthin.engine.errors import UsageError
from deepthin.engine.plan import block_products
from tests.support.tiny_models import lively_model, tiny_shape

PROMPT = (3, 17, 44, 9)


@pytest.mark.parametrize("name", ["plain", "gelu"])
@pytest.mark.parametrize("threads", [1, 2])
def test_each_product_counts_when_left_out_and_is_back_afterwards(name: str, threads: int) -> None:
    model = lively_model(tiny_shape(name), quant="q8_0")
    with Decoder(model, threads=threads, context=32) as decoder:
        whole = decoder.prefill(PROMPT).copy()
        step = decoder.step(5).copy()
        for product in [*filter(None, block_products(model.shape)), "output"]:
            other = Decoder(model, threads=threads, context=32)
            with other, other.without((product,)):
                missing = other.prefill(PROMPT).copy()
            assert not np.array_equal(missing, whole), product
        with decoder.without(("attn_q", "ffn_down", "output")):
            decoder.step(7)
        decoder.reset()
        np.testing.assert_array_equal(decoder.prefill(PROMPT), whole)
        np.testing.assert_array_equal(decoder.step(5), step)


def test_an_unknown_product_is_refused() -> None:
    with Decoder(lively_model(tiny_shape("gelu")), threads=1, context=16) as decoder:
        for product in ("ffn_gate", ""):
            with (
                pytest.raises(UsageError, match=r"none of this shape's: attn_q, .*, ffn_up, ffn_down, output"),
                decoder.without([product]),
            ):
                pass
