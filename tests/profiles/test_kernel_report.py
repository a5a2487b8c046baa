from __future__ import annotations

import numpy as np
import pytest

from deepthin.engine.cpu import simd_target
from deepthin.engine.formats import FORMATS, Q8_0
from deepthin.engine.model import Model, Tensor
from deepthin.engine.pack import KERNEL_FORMATS
from deepthin.engine.plan import plan_model
from deepthin.engine.shape import Shape
from deepthin.engine.simd import Q8_BIAS, W
from deepthin.profiles.kernel_report import kernel_names, kernel_report, packed_tensors
from tests.support.tiny_models import lively_model, tiny_shape


@pytest.mark.parametrize("name", ["plain", "wide_heads", "odd_width", "gelu", "shared"])
@pytest.mark.parametrize("quant", ["f16", "q4_1"])
def test_sizes_are_those_of_the_plan_that_runs(name: str, quant: str) -> None:
    model = lively_model(tiny_shape(name), quant=quant)
    plan = plan_model(model, lanes=W, q8_bias=Q8_BIAS)
    found = packed_tensors(model)
    untied = set() if model.shape.tie_word_embeddings else {"output"}
    assert set(found) == {name for name in plan.packed if name != "output"} | untied
    for tensor, one in found.items():
        expected = plan.packed[tensor]
        assert (one.format, one.rows, one.cols, one.data_bytes, one.scale_bytes) == (
            expected.format,
            expected.rows,
            expected.cols,
            expected.data_bytes,
            expected.scale_bytes,
        )
    report = kernel_report(model)
    assert report["packed_bytes"] == sum(one.num_bytes for one in found.values()) <= len(plan.arena)


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_every_format_has_a_kernel_of_its_name_for_one_token_and_for_many(name: str) -> None:
    decode, prefill = kernel_names(FORMATS[name])
    assert decode.endswith(f".matvec_{name}")
    assert prefill.endswith(f".tiles_{name}")


def test_like_tensors_are_one_group_and_a_mixed_file_shows_which_differ() -> None:
    shape = Shape.parse("L=3,d=64,heads=4,kv=2,ff=96,vocab=50,untied")
    tensors = dict(lively_model(shape, quant="q4_0").tensors)
    tensors["blk.1.ffn_down"] = Tensor.from_values(np.ones((64, 96), np.float32), Q8_0)
    report = kernel_report(Model(shape, tensors))
    groups = {(group["product"], group["format"]): group for group in report["groups"]}
    assert groups["ffn_down", "q4_0"]["tensors"] == ["blk.0.ffn_down", "blk.2.ffn_down"]
    other = groups["ffn_down", "q8_0"]
    assert (other["tensors"], other["count"], other["role"]) == (["blk.1.ffn_down"], 1, "mlp")
    assert (other["rows"], other["cols"], other["packed_bytes"]) == (64, 96, 64 * 96 // 32 * 34)
    assert other["decode_kernel"] == "matvec.matvec_q8_0"
    assert groups["token_embd", "q8_0"]["decode_kernel"] == "rows.read_row"
    assert report["simd"] == simd_target()
    assert [group["role"] for group in report["groups"]][-2:] == ["embedding", "head"]


def test_padding_counts_and_a_tied_table_is_counted_once() -> None:
    shape = Shape.parse("L=1,d=64,heads=4,kv=2,ff=96,vocab=1,tied")
    report = kernel_report(lively_model(shape, quant="q8_0"))
    head = report["groups"][-1]
    assert (head["product"], head["role"], head["stored_bits_per_weight"]) == ("token_embd", "head", 8.5)
    assert head["bits_per_weight"] == 8.5 * W  # one row takes a whole tile
    embedding = report["groups"][-2]
    assert report["packed_bytes"] == sum(group["packed_bytes"] for group in report["groups"]) - embedding["packed_bytes"]
