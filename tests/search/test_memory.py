from __future__ import annotations

import pytest

from deepthin.engine.accounting import count_bytes, kv_bytes_per_token
from deepthin.engine.decoder import Decoder
from deepthin.engine.kernels import decode
from deepthin.engine.model import random_model
from deepthin.engine.shape import Shape
from deepthin.search import memory as module
from deepthin.search.memory import memory


def test_rows_are_those_of_the_kernels() -> None:
    assert module.ROWS == decode.ROWS


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ("L=3,d=256,heads=4,kv=2,ff=704,vocab=8192,tied", 512),
        ("L=2,d=384,heads=6,kv=1,ff=1536,vocab=32768,untied", 2048),
    ],
)
def test_scratch_is_about_what_the_engine_allocates(text: str, context: int) -> None:
    shape = Shape.parse(text)
    with Decoder(random_model(shape, quant="q8_0"), threads=1, context=context, kv_format="f16") as decoder:
        runner = decoder._runner
        plan, cache = runner.plan, (runner.keys, runner.values)
        kept = {id(array) for array in (plan.arena, plan.norms, plan.ops, *cache)}
        real = sum(array.nbytes for array in runner.arrays if hasattr(array, "nbytes") and id(array) not in kept)
        real_cache = sum(array.nbytes for array in cache)
    assert memory(shape, "q8_0", context).scratch == pytest.approx(real, rel=0.1)
    assert memory(shape, "q8_0", context).cache == pytest.approx(real_cache, rel=0.1)


def test_parts_and_total() -> None:
    shape = Shape.parse("L=3,d=256,heads=4,kv=2,ff=704,vocab=8192,tied")
    found = memory(shape, "q4_0", 1000)
    assert found.weights == count_bytes(shape, "q4_0").total
    assert found.cache == 1000 * kv_bytes_per_token(shape)
    assert found.total == found.weights + found.cache + found.scratch == found.to_json()["total"]
