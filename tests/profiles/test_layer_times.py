from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from deepthin.engine.arrays import F64
from deepthin.engine.model import Model
from deepthin.engine.shape import Shape
from deepthin.profiles.contestants import Engine
from deepthin.profiles.kernel_report import packed_tensors
from deepthin.profiles.layer_times import LAYER_TOKENS, layer_times, operations
from deepthin.profiles.protocol import Instruments, Rule
from tests.support.tiny_models import lively_model, tiny_shape

MICRO = 1e-6
COSTS = {"attn_q": 3, "attn_k": 1, "attn_v": 1, "attn_output": 2, "ffn_gate": 4, "ffn_up": 4, "ffn_down": 5, "output": 40}
RULE = Rule(rounds=5, budget_s=0.0)


class FakeEngine:
    """Products take COSTS microseconds a block, a block 10 more, a cached token half of one, the embedding row 7."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.missing: set[str] = set()
        self.filled = -1

    def fill(self, ids: Sequence[int]) -> None:
        self.filled = len(ids)

    @contextmanager
    def without(self, products: Sequence[str]) -> Iterator[None]:
        assert set(products) <= set(COSTS)
        self.missing = set(products)
        yield
        self.missing = set()

    def parts(self, ids: Sequence[int], position: int) -> F64:
        left = {name: cost for name, cost in COSTS.items() if name not in self.missing}
        head = left.pop("output", 0)
        block = 10 + sum(left.values()) + 0.5 * position
        row = [7 + self.blocks * block + head, 7, *[block] * self.blocks, head]
        return np.array([row] * len(ids), np.float64) * MICRO


def ceiling() -> Mapping[str, float]:
    return {"bytes_per_s": 1e9}


def draw(seed: int, count: int) -> list[int]:
    return [seed] * count


@pytest.fixture
def model() -> Model:
    return lively_model(tiny_shape("plain"), quant="q4_0")


def instruments() -> Instruments:
    return Instruments(sentinel=lambda: 1.0, fastest_sentinel=lambda: 1.0)


def test_blocks_products_cache_and_the_rest_by_hand(model: Model) -> None:
    engine = FakeEngine(2)
    found = layer_times(engine, model, threads=1, depth=20, rule=RULE, ceiling=ceiling, draw=draw, instruments=instruments())
    assert (engine.filled, found["depth"], found["tokens"], found["threads"]) == (20, 20, LAYER_TOKENS, 1)
    assert found["token_s"]["median"] == pytest.approx((7 + 2 * 40 + 40) * MICRO)
    assert found["embed_s"]["median"] == pytest.approx(7 * MICRO)
    assert [part["name"] for part in found["blocks"]] == ["0", "1", "head"]
    assert [part["seconds"]["median"] for part in found["blocks"]] == pytest.approx([40 * MICRO] * 3)
    sizes = {name: one.num_bytes for name, one in packed_tensors(model).items()}
    assert found["blocks"][0]["bytes"] == sum(size for name, size in sizes.items() if name.startswith("blk.0."))
    assert found["blocks"][2]["bytes"] == sizes["token_embd"]
    share = found["blocks"][2]["roofline_share"]["median"]
    assert share == pytest.approx(sizes["token_embd"] / (40 * MICRO) / 1e9)
    times = {part["name"]: part["seconds"]["median"] / MICRO for part in found["operations"]}
    assert times == pytest.approx(
        {
            "q, k, v": 2 * 5,
            "attention output": 2 * 2,
            "gate, up": 2 * 8,
            "down": 2 * 5,
            "head": 40,
            "attention over 20 cached tokens": 2 * 10,
            "everything else": 7 + 2 * 10,
        }
    )
    down = next(part for part in found["operations"] if part["name"] == "down")
    assert down["bytes"] == sizes["blk.0.ffn_down"] + sizes["blk.1.ffn_down"]
    json.dumps(found, allow_nan=False)


def test_an_operation_lost_in_noise_has_no_share(model: Model) -> None:
    class Noisy(FakeEngine):
        def parts(self, ids: Sequence[int], position: int) -> F64:
            return super().parts(ids, position) + (1e-3 if "ffn_down" in self.missing else 0)

    found = layer_times(Noisy(2), model, threads=1, depth=0, rule=RULE, ceiling=ceiling, draw=draw, instruments=instruments())
    down = next(part for part in found["operations"] if part["name"] == "down")
    assert down["seconds"]["median"] < 0
    assert down["roofline_share"] is None
    assert "cached" not in " ".join(part["name"] for part in found["operations"])


def test_shared_blocks_count_each_run_and_an_ungated_mlp_has_no_gate() -> None:
    shape = Shape.parse("L=2,d=64,heads=4,kv=2,ff=96,vocab=50,untied,share=2,mlp=gelu")
    model = lively_model(shape, quant="q8_0")
    assert operations(model)["up"] == ("ffn_up",)
    found = layer_times(
        FakeEngine(4), model, threads=1, depth=0, rule=RULE, ceiling=ceiling, draw=draw, instruments=instruments()
    )
    assert [part["tensors"] for part in found["blocks"]] == ["blk.0", "blk.0", "blk.1", "blk.1", "head"]
    sizes = {name: one.num_bytes for name, one in packed_tensors(model).items()}
    up = next(part for part in found["operations"] if part["name"] == "up")
    assert up["bytes"] == 2 * (sizes["blk.0.ffn_up"] + sizes["blk.1.ffn_up"])
    assert found["blocks"][-1]["bytes"] == sizes["output"]


def test_the_real_engine_gives_all_parts_and_computes_as_before_afterwards() -> None:
    shape = tiny_shape("smollm_like")
    model = lively_model(shape, quant="q4_0")
    engine = Engine(model, 2, 20 + LAYER_TOKENS)
    try:
        before = engine.logits([5, 6, 7], [1, 2])
        found = layer_times(
            engine,
            model,
            threads=2,
            depth=20,
            rule=Rule(rounds=2, budget_s=0.0),
            ceiling=ceiling,
            draw=lambda seed, count: [seed % shape.vocab_size] * count,
        )
        assert [part["name"] for part in found["blocks"]] == ["0", "1", "head"]
        assert all(part["seconds"]["median"] > 0 for part in found["blocks"])
        assert len(found["operations"]) == 7
        np.testing.assert_array_equal(engine.logits([5, 6, 7], [1, 2]), before)
    finally:
        engine.close()
