from __future__ import annotations

import numpy as np
import pytest

from deepthin.engine.arrays import F32
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import canonical_row_order, gguf_row_order
from deepthin.export.weight_parity import WeightDifference, first_weight_difference
from tests.support.tiny_models import lively_model

SHAPE = Shape.parse("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied,ctx=64")


@pytest.fixture
def weights() -> dict[str, F32]:
    return lively_model(SHAPE).dequantized()


def difference(weights: dict[str, F32], **changes: F32 | None) -> WeightDifference:
    found = dict(weights)
    for key, values in changes.items():
        name = {name.replace(".", "_"): name for name in [*weights, "output"]}[key]
        if values is None:
            del found[name]
        else:
            found[name] = values
    result = first_weight_difference(SHAPE, weights, found)
    assert result is not None
    return result


def test_equal(weights: dict[str, F32]) -> None:
    assert first_weight_difference(SHAPE, weights, {name: values.copy() for name, values in weights.items()}) is None
    assert first_weight_difference(SHAPE, weights, {**weights, "output": weights["token_embd"]}) is None


def test_first_in_file_order(weights: dict[str, F32]) -> None:
    changed = difference(weights, output_norm=weights["output_norm"] + 1, blk_0_attn_norm=weights["blk.0.attn_norm"] * 0)
    assert changed == WeightDifference("blk.0.attn_norm", "it is all zeros", 64)


def test_missing_and_misshapen(weights: dict[str, F32]) -> None:
    assert difference(weights, blk_1_ffn_up=None).why == "it is missing"
    assert "dimensions [2, 2] instead of [96, 64]" in difference(weights, blk_1_ffn_up=np.ones((2, 2), np.float32)).why
    assert "dimensions [64, 96]" in difference(weights, blk_1_ffn_up=np.ascontiguousarray(weights["blk.1.ffn_up"].T)).why


def test_one_value(weights: dict[str, F32]) -> None:
    values = weights["blk.0.attn_v"].copy()
    values[3, 7] += 1
    found = difference(weights, blk_0_attn_v=values)
    assert found.num_different == 1
    assert found.why.startswith("1 of 2048 values differ, 1 of 32 rows, the first at [3, 7]: ")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite(weights: dict[str, F32], bad: float) -> None:
    values = weights["blk.0.attn_v"].copy()
    values[0] = bad
    assert difference(weights, blk_0_attn_v=values).why == "64 of its 2048 values are not finite"


def test_known_mistakes_are_recognised(weights: dict[str, F32]) -> None:
    q, k = weights["blk.0.attn_q"], weights["blk.0.attn_k"]
    assert "permutation was dropped" in difference(weights, blk_0_attn_q=q[canonical_row_order(64, 4)]).why
    assert "made once too often" in difference(weights, blk_0_attn_k=k[gguf_row_order(32, 2)]).why
    assert difference(weights, blk_0_attn_q=np.ascontiguousarray(q.T)).why == "it is stored transposed"
    assert difference(weights, blk_0_attn_k=weights["blk.0.attn_v"]).why.endswith("should be: k and v look swapped")
    assert difference(weights, blk_0_ffn_up=weights["blk.0.ffn_gate"]).why.endswith("gate and up look swapped")
    assert difference(weights, blk_0_ffn_up=weights["blk.1.ffn_up"]).why == "it equals what blk.1.ffn_up should be"


def test_a_head_of_its_own_must_be_the_embedding(weights: dict[str, F32]) -> None:
    assert difference(weights, output=weights["token_embd"][::-1].copy()).tensor == "output"


def test_rounding_is_relative_to_the_largest_value(weights: dict[str, F32]) -> None:
    values = weights["blk.0.attn_v"] + np.float32(2e-7)
    found = {**weights, "blk.0.attn_v": values}
    assert first_weight_difference(SHAPE, weights, found) is not None
    assert first_weight_difference(SHAPE, weights, found, rounding=1e-6) is None  # the largest is 0.4
    assert (
        first_weight_difference(SHAPE, weights, {**weights, "blk.0.attn_v": values + np.float32(1e-6)}, rounding=1e-6)
        is not None
    )
