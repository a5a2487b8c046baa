"""Changes to an ONNX decoder in memory, each as a function of its ModelProto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

Edit = Callable[[Any], None]


def set_attribute(op: str, name: str, value: Any) -> Edit:
    """Every operator ``op`` gets attribute ``name``."""

    def change(proto: Any) -> None:
        for node in proto.graph.node:
            if node.op_type == op:
                kept = [item for item in node.attribute if item.name != name]
                del node.attribute[:]
                node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def set_constant(name: str, change: Callable[[Any], Any]) -> Edit:
    """The values of initializer ``name`` are changed."""

    def edit(proto: Any) -> None:
        (item,) = [item for item in proto.graph.initializer if item.name == name]
        item.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(numpy_helper.to_array(item))), name))

    return edit


def shift_seqlens(step: int) -> Edit:
    """What GroupQueryAttention is told of the cache's length is off by ``step``."""

    def edit(proto: Any) -> None:
        proto.graph.initializer.append(numpy_helper.from_array(np.array(1 - step, np.int64), "off_by_one"))
        for node in proto.graph.node:
            if node.output[0] == "last_position":
                node.input[1] = "off_by_one"

    return edit


def untie(proto: Any) -> None:
    """The head gets a table of its own, upside down."""
    for node in proto.graph.node:
        if "logits" in node.output:
            table = next(item for item in proto.graph.initializer if item.name == node.input[1])
            values = numpy_helper.to_array(table)[::-1]
            proto.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), "head"))
            node.input[1] = "head"


def zero_point(weight: str, point: int) -> Edit:
    """The product with ``weight`` gets a zero point for all blocks."""

    def edit(proto: Any) -> None:
        (node,) = [node for node in proto.graph.node if node.op_type == "MatMulNBits" and node.input[1] == weight + "_quant"]
        (scales,) = [item for item in proto.graph.initializer if item.name == weight + "_scales"]
        points = np.full(list(scales.dims), point, np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(points, weight + "_zero_points"))
        node.input.append(weight + "_zero_points")

    return edit


def drop_node(output: str) -> Edit:
    """The operator that makes ``output`` is left out; its first input takes its place."""

    def edit(proto: Any) -> None:
        (dropped,) = [node for node in proto.graph.node if output in node.output]
        for node in proto.graph.node:
            for index, name in enumerate(node.input):
                if name == output:
                    node.input[index] = dropped.input[0]
        proto.graph.node.remove(dropped)

    return edit


def keep_stale_row(layer: int) -> Edit:
    """The keys that block ``layer`` hands on end with its first row instead of its last one."""

    def edit(proto: Any) -> None:
        graph, present = proto.graph, f"present.{layer}.key"
        (attention,) = [node for node in graph.node if present in node.output]
        for index, name in enumerate(attention.output):
            if name == present:
                attention.output[index] = "fresh"
        constants = {"s0": [0], "s1": [1], "s_1": [-1], "s2": [2]}
        graph.initializer.extend(numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items())
        graph.node.extend(
            [
                helper.make_node("Slice", ["fresh", "s0", "s_1", "s2"], ["older"]),
                helper.make_node("Slice", ["fresh", "s0", "s1", "s2"], ["first"]),
                helper.make_node("Concat", ["older", "first"], [present], axis=2),
            ]
        )

    return edit


def exchange_caches(proto: Any) -> None:
    """The first two blocks read one another's past."""
    first, second = [node for node in proto.graph.node if node.op_type == "GroupQueryAttention"][:2]
    for index in (3, 4):
        first.input[index], second.input[index] = second.input[index], first.input[index]


def gguf_nibbles(codes: Any) -> Any:
    """Bytes that hold values j and j + 16 of a block, as GGUF has them, where 2j and 2j + 1 belong."""
    whole = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], 32)
    return whole[..., :16] | whole[..., 16:] << 4
