"""ONNX graphs with a wrong operator, wire or constant, and right checksums: verify has to say what is wrong, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from deepthin.export.verify import verify_bundle
from tests.support.bundles import ONNX, edit_onnx
from tests.support.graph_edits import set_attribute


def _wire_gate_to_up(proto: Any) -> None:
    nodes = {node.output[0]: node for node in proto.graph.node}
    gate, up = nodes["blk.0.ffn_gate.out"], nodes["blk.0.ffn_up.out"]
    gate.input[1], up.input[1] = up.input[1], gate.input[1]


def _activate_up(proto: Any) -> None:
    for node in proto.graph.node:
        if node.output[0].startswith("blk.0.ffn_"):
            swapped = {"blk.0.ffn_gate.out": "blk.0.ffn_up.out", "blk.0.ffn_up.out": "blk.0.ffn_gate.out"}
            for index, name in enumerate(node.input):
                node.input[index] = swapped.get(name, name)


def _untie(proto: Any) -> None:
    for node in proto.graph.node:
        if "logits" in node.output:
            table = next(item for item in proto.graph.initializer if item.name == node.input[1])
            values = numpy_helper.to_array(table)[::-1]
            proto.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), "head"))
            node.input[1] = "head"


def _first_eps(proto: Any) -> None:
    for item in proto.graph.initializer:
        if item.name == "rms_norm_eps":
            item.CopyFrom(numpy_helper.from_array(np.array(1e-6, np.float32), item.name))


def _one_table_row(proto: Any) -> None:
    for item in proto.graph.initializer:
        if item.name == "sin_cache":
            values = numpy_helper.to_array(item).copy()
            values[30] = values[31]
            item.CopyFrom(numpy_helper.from_array(values, item.name))


@pytest.mark.parametrize(
    ("change", "says", "position"),
    [
        (_wire_gate_to_up, "blk.0.ffn_gate: it equals what blk.0.ffn_up should be: gate and up look swapped", 0),
        (_activate_up, f"onnxruntime on {ONNX} parts from position 0", 0),
        (set_attribute("GroupQueryAttention", "rotary_interleaved", 1), "rope_interleaved is 1, but 0", 1),
        (set_attribute("GroupQueryAttention", "scale", 0.3), "attention_scale is 0.3", 1),
        (set_attribute("GroupQueryAttention", "local_window_size", 16), "attention_window is 16, but -1", 16),
        (set_attribute("GroupQueryAttention", "do_rotary", 0), f"onnxruntime on {ONNX} parts from position 1", 1),
        (_untie, "tie_word_embeddings is False, but True", 0),
        (_first_eps, "rms_norm_eps is [1e-05, 1e-06], but 1e-05", 0),
        (_one_table_row, "rope_theta is 10000.0 up to position 29 only, but 10000.0 in hf", 30),
    ],
)
def test_one_wrong_node_is_named(bundle: Path, change: Callable[[Any], None], says: str, position: int) -> None:
    edit_onnx(bundle, ONNX, change)
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert any(ONNX in line and says in line for line in result["summary"]), result["summary"]
    parting = result["first_parting"]
    assert (parting["runtime"], parting["file"]) == ("onnxruntime", ONNX)
    assert parting["position"] == position


def test_onnx_weights_of_another_size(bundle: Path) -> None:
    def change(proto: Any) -> None:
        for item in proto.graph.initializer:
            if item.name == "model.norm.weight":
                item.CopyFrom(helper.make_tensor(item.name, TensorProto.FLOAT, [3], [1.0, 2.0, 3.0]))

    edit_onnx(bundle, ONNX, change)
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert any("output_norm: it has dimensions [3] instead of [64]" in line for line in result["summary"])
