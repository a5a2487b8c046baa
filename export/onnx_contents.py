"""What an ONNX decoder file says, read back from its graph: facts and weights. Shares nothing with the code that writes it.

A weight's name comes from where it is used, not from what its initializer is called: the operator whose output is
``blk.0.ffn_gate.out`` holds ``blk.0.ffn_gate``. So a file with two weights exchanged is caught whichever way it was done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepthin.engine.arrays import F32, F64
from deepthin.engine.errors import FormatError
from deepthin.engine.rope import rope_magnitude, rope_rates
from deepthin.engine.shape import Shape

_ATTENTION = ("GroupQueryAttention", "Attention")
_CAUSAL = {"GroupQueryAttention": ("causal", 1), "Attention": ("is_causal", 0)}  # attribute and its default
_MATMULS = ("MatMul", "FusedMatMul", "Gemm", "MatMulNBits")
_BIASED = ".biased"
_OF_CONSTANTS = ("Reshape", "Transpose", "DequantizeLinear", "Cast")  # what makes a constant of constants
_THROUGH = (*_OF_CONSTANTS, "Gather")  # from a use to its initializer
_LOOKUP = ("Reshape", "Mul", "Sub", "Concat", "Unsqueeze", "Cast", "Gather")  # from looked-up rows back to their codes
_MAX_DEPTH = 32  # of operators behind one another in a lookup; ours have 10
_TABLE_TOLERANCE = 1e-6  # an f32 cosine may round either way
_RECOVERED_TOLERANCE = 1e-2  # a base recovered from one f32 sine is off by some 1e-6, which grows with the position


@dataclass(slots=True)
class OnnxContents:
    """A graph in memory.

    Attributes:
        path: where it was read.
        nodes: in graph order.
        initializers: ``TensorProto`` by name.
        made_by: the node behind each value.
        properties: what the file says about itself.
    """

    path: Path
    nodes: list[Any]
    initializers: dict[str, Any]
    made_by: dict[str, Any] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """Values of initializer ``name``, or what turning, dequantising or widening makes of one; None when it is no constant.

        A Reshape is looked through: its users give the dimensions.
        """
        from onnx import numpy_helper

        if name not in self.initializers:
            node = self.made_by.get(name)
            if node is None or node.op_type not in _OF_CONSTANTS:
                return None
            made = [self.array(part) for part in node.input]
            if made[0] is None:
                return None
            if node.op_type == "DequantizeLinear":
                return None if made[1] is None else _dequantized(made[0], made[1], _attributes(node))
            return made[0].T if node.op_type == "Transpose" else made[0]
        try:
            values: npt.NDArray[Any] = numpy_helper.to_array(self.initializers[name])
        except (ValueError, TypeError, KeyError) as error:
            why = " ".join(str(error).split())[:120]
            raise FormatError(f"{self.path}: constant {name[:60]!a} does not hold what its dimensions say ({why})") from None
        return values

    def root(self, name: str) -> str:
        """The initializer that ``name`` comes from, or whatever is behind it."""
        node = self.made_by.get(name)
        return self.root(node.input[0]) if node is not None and node.op_type in _THROUGH else name

    @property
    def head(self) -> Any:
        """The product behind the logits, or None."""
        node = self.made_by.get("logits")
        while node is not None and node.op_type == "Reshape":
            node = self.made_by.get(node.input[0])
        return node

    @property
    def table(self) -> Any:
        """The node that makes rows of the embedding, or None."""
        gathers = [node for node in self.nodes if node.op_type == "Gather" and "input_ids" in node.input]
        apart = {name for node in gathers for name in node.output}
        rows = self.made_by.get("token_embd.out")
        if len(gathers) > 1 and rows is not None and rows.op_type == "Reshape":
            return rows  # of blocks, dequantised by operators of their own
        joined = [node for node in self.nodes if node.op_type == "DequantizeLinear" and node.input[0] in apart]
        return next(iter(joined or gathers), None)


def read_onnx(path: Path) -> OnnxContents:
    """Read the graph at ``path``; external data must lie in the same folder.

    Raises:
        FormatError: the file is no ONNX model, a name occurs twice, or external data is not where and what it should be.
    """
    from deepthin.export.onnx_external import load_onnx  # loads `onnx`

    proto = load_onnx(path)
    contents = OnnxContents(path, list(proto.graph.node), {item.name: item for item in proto.graph.initializer})
    contents.properties = {item.key: item.value for item in proto.metadata_props}
    contents.made_by = {name: node for node in contents.nodes for name in node.output if name}
    return contents


def onnx_weights(contents: OnnxContents) -> dict[str, F32]:
    """Every weight as f32 by canonical name, [out, in] or [width]; what is used in no known place is left out.

    Raises:
        FormatError: a constant has dimensions that its operator cannot use.
    """
    found: dict[str, F32] = {}
    head, table = contents.head, contents.table
    for node in contents.nodes:
        name = "output" if node is head else "token_embd" if node is table else _weight_name(node)
        try:
            values = None if name is None else _node_weight(contents, node)
        except (ValueError, IndexError, KeyError, TypeError) as error:
            if isinstance(error, FormatError):
                raise
            why = " ".join(str(error).split())[:120]
            raise FormatError(f"{contents.path}: node {node.name[:60]!a} has constants that do not fit it ({why})") from None
        if name is not None and values is not None:
            found[name] = values
    return found


def onnx_facts(contents: OnnxContents, shape: Shape) -> dict[str, Any]:
    """What the graph fixes beside weights, in the terms of ``Shape`` where it has them.

    A fact that operators disagree on is a sorted list of what they say. ``rope_theta`` is recovered from the tables; it is
    that of ``shape`` exactly when the tables are, and words when no base explains them.
    """
    attention = [_attributes(node) for node in contents.nodes if node.op_type in _ATTENTION]
    facts: dict[str, Any] = {
        "num_layers": len(attention),
        "num_heads": _agreed([item.get("num_heads", item.get("q_num_heads")) for item in attention]),
        "num_kv_heads": _agreed([item.get("kv_num_heads") for item in attention]),
        "rms_norm_eps": _agreed(_epsilons(contents)),
        "tie_word_embeddings": _is_tied(contents),
        "rope_interleaved": _agreed([_attributes(n).get(_interleaved_key(n), 0) for n in _rotary_nodes(contents)]),
        "attention_causal": _agreed(
            [_attributes(n).get(*_CAUSAL[n.op_type]) for n in contents.nodes if n.op_type in _ATTENTION]
        ),
        "attention_window": _agreed([item.get("local_window_size", -1) for item in attention]),
        "attention_scale": _agreed([item.get("scale", 0.0) for item in attention]),
        "attention_softcap": _agreed([item.get("softcap", 0.0) for item in attention]),
    }
    pairs = {tuple(name for name in node.input if "cache" in name)[-2:] for node in _rotary_nodes(contents)}
    tables = [(contents.array(pair[0]), contents.array(pair[1])) for pair in sorted(pairs) if len(pair) == 2]
    facts["nope_every"] = _nope_every(contents, shape)
    facts["max_seq_len"] = _agreed([len(cos) for cos, _ in tables if cos is not None])
    facts["rope_theta"] = _agreed([_rope_theta(cos, sin, shape) for cos, sin in tables if cos is not None and sin is not None])
    return facts


def rounds_activations(contents: OnnxContents) -> bool:
    """Whether runtimes round activations to int8 unless told otherwise.

    They do where a product asks for it (accuracy level 4), and where a MatMul follows a DequantizeLinear in blocks along its
    first axis, which onnxruntime joins into one product of that level.
    """
    found = [(node.op_type, _attributes(node)) for node in contents.nodes]
    return any(
        (op == "MatMulNBits" and attributes.get("accuracy_level", 0) == 4)
        or (op == "DequantizeLinear" and attributes.get("block_size", 0) > 0 and attributes.get("axis", 1) == 0)
        for op, attributes in found
    )


def _weight_name(node: Any) -> str | None:
    if not node.output:
        return None
    output = node.output[0]
    if node.op_type == "Add" and output.endswith(_BIASED):
        return str(output.removesuffix("ed"))
    known = (*_MATMULS, "Add", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
    is_plain_norm = node.op_type == "Mul" and output.endswith("norm.out")
    return output.removesuffix(".out") if output.endswith(".out") and (node.op_type in known or is_plain_norm) else None


def _node_weight(contents: OnnxContents, node: Any) -> F32 | None:
    attributes = _attributes(node)
    if node.op_type == "MatMulNBits":
        return _blockwise(contents, list(node.input[1:]), attributes, attributes["K"])
    if node is contents.table and node.op_type == "Reshape":
        return np.ascontiguousarray(_looked_up(contents, node.output[0])[0], np.float32)
    if node.op_type == "Add" and len(node.input) == 2:
        product, addend = (contents.made_by.get(name) for name in node.input)
        if product is not None and addend is not None and (product.op_type, addend.op_type) == ("MatMulNBits", "MatMul"):
            values, added = _node_weight(contents, product), contents.array(addend.input[1])
            if values is None or added is None:
                return None
            wide: F32 = np.repeat(added.T, _attributes(product)["block_size"], axis=1)[:, : values.shape[1]]
            return values + wide
    if node is contents.table and node.op_type == "DequantizeLinear":
        codes, scales = (contents.array(contents.root(name)) for name in node.input[:2])
        return None if codes is None or scales is None else _dequantized(codes, scales, {**attributes, "axis": 1})
    index = {"Gather": 0, "SkipSimplifiedLayerNormalization": 2}.get(node.op_type, 1)
    values = contents.array(node.input[index])
    if values is None:
        return None
    transposed = node.op_type == "MatMul" or (node.op_type in ("FusedMatMul", "Gemm") and not attributes.get("transB", 0))
    return np.ascontiguousarray(values.T if transposed else values, np.float32)


def _dequantized(codes: npt.NDArray[Any], scales: npt.NDArray[Any], attributes: dict[str, Any]) -> F32:
    """Blocked DequantizeLinear of signed integers, f32 with the dimensions of ``codes``."""
    axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
    wide = np.repeat(scales, block, axis=axis) if block else scales
    values: F32 = codes.astype(np.float32) * wide[tuple(slice(size) for size in codes.shape)].astype(np.float32)
    return values


def _blockwise(contents: OnnxContents, names: list[str], attributes: dict[str, Any], cols: int | None) -> F32 | None:
    """(q - zero point) * scale, f32 [N, K]; q in ascending nibbles for 4 bits."""
    parts = [contents.array(name) for name in names if name]
    if len(parts) < 2 or parts[0] is None or parts[1] is None:
        return None
    bits, block = attributes.get("bits", 4), attributes["block_size"]
    codes, scales = parts[0].reshape(len(parts[0]), -1), parts[1].reshape(len(parts[0]), -1).astype(np.float32)
    if bits == 4:
        codes = np.stack([codes & 0x0F, codes >> 4], axis=-1)
    q = codes.reshape(*scales.shape, block).astype(np.float32)
    zero = np.float32(1 << (bits - 1))
    points = parts[2].reshape(scales.shape)[:, :, None] if len(parts) > 2 and parts[2] is not None else zero
    values: F32 = ((q - points) * scales[:, :, None]).reshape(len(codes), -1)
    return values if cols is None else values[:, :cols]


def _looked_up(contents: OnnxContents, name: str, depth: int = 0) -> npt.NDArray[Any]:
    """Value ``name`` between ``input_ids`` and the embedded rows, for all ids in order at once: [1, V, ...].

    Raises:
        ValueError: what makes it belongs to no lookup that this package writes.
    """
    node = contents.made_by.get(name)
    if node is None or (node.op_type == "Gather" and node.input[1] == "input_ids"):
        held = contents.array(name if node is None else node.input[0])
        if held is None:
            raise ValueError(f"{name} is no constant")
        return held if node is None else held[None]
    if depth > _MAX_DEPTH:
        raise ValueError("the lookup of the embedding has no end")
    parts = [_looked_up(contents, part, depth + 1) for part in node.input]
    return _computed(node.op_type, parts, _attributes(node))


def _computed(operator: str, parts: list[npt.NDArray[Any]], attributes: dict[str, Any]) -> npt.NDArray[Any]:
    """One operator of a lookup, in f32 as onnxruntime computes it.

    Raises:
        ValueError: it belongs to no lookup that this package writes, or its parts do not fit each other.
    """
    first, second = parts[0], parts[-1]
    if operator == "Reshape":
        return first.reshape([first.shape[axis] if size == 0 else int(size) for axis, size in enumerate(second)])
    if operator == "Unsqueeze":
        return np.expand_dims(first, [int(axis) for axis in second])
    if operator == "Concat":
        return np.concatenate(parts, axis=attributes.get("axis", 0))
    if operator == "Cast":
        return first.astype(np.float32)
    arithmetic: dict[str, Any] = {
        "Mul": np.multiply,
        "Sub": np.subtract,
        "Div": np.divide,
        "Floor": lambda value, _: np.floor(value),
    }
    if operator not in arithmetic or math.prod(np.broadcast_shapes(first.shape, second.shape)) > max(first.size, second.size):
        raise ValueError(f"{operator} in the lookup of the embedding")
    values: npt.NDArray[Any] = arithmetic[operator](first, second)
    return values


def _is_tied(contents: OnnxContents) -> bool:
    table, head = contents.table, contents.head
    if table is None or head is None or len(head.input) < 2:
        return False
    source = table.input[0]
    for _ in range(_MAX_DEPTH):
        node = contents.made_by.get(source)
        if node is None or node.op_type not in _LOOKUP or not node.input:
            break
        source = node.input[0]
    return str(source) == str(contents.root(head.input[1]))


def _epsilons(contents: OnnxContents) -> list[float]:
    """Every norm's epsilon: an attribute, or the constant that is added to a mean."""
    found = []
    for node in contents.nodes:
        attributes = _attributes(node)
        if "epsilon" in attributes:
            found.append(_shortest(attributes["epsilon"]))
        elif node.op_type == "Add" and any(_op_behind(contents, name) == "ReduceMean" for name in node.input):
            constants = [values for name in node.input if (values := contents.array(name)) is not None]
            found += [_shortest(values.reshape(-1)[0]) for values in constants if values.size == 1]
    return found


def _shortest(value: float) -> float:
    """The shortest decimal number that is the same f32, such as 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _op_behind(contents: OnnxContents, name: str) -> str:
    node = contents.made_by.get(name)
    return "" if node is None else str(node.op_type)


def _rotary_nodes(contents: OnnxContents) -> list[Any]:
    apart = [node for node in contents.nodes if node.op_type == "RotaryEmbedding"]
    return apart or [node for node in contents.nodes if node.op_type == "GroupQueryAttention"]


def _interleaved_key(node: Any) -> str:
    return "interleaved" if node.op_type == "RotaryEmbedding" else "rotary_interleaved"


def _nope_every(contents: OnnxContents, shape: Shape) -> Any:
    """``shape``'s own value where the same layers have positions; else which have none."""
    layers = [node for node in contents.nodes if node.op_type in _ATTENTION]
    turned = [
        bool(_attributes(node).get("do_rotary", 0)) or _op_behind(contents, node.input[0]) == "RotaryEmbedding"
        for node in layers
    ]
    if turned == [shape.has_rope(layer) for layer in range(len(layers))]:
        return shape.nope_every
    return f"no positions in layers {[layer for layer, turns in enumerate(turned) if not turns]}"


def _rope_theta(cos: npt.NDArray[Any], sin: npt.NDArray[Any], shape: Shape) -> Any:
    """The base behind the tables cos and sin [positions, E / 2]; words when there is none."""
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != shape.head_dim // 2 or len(cos) < 2:
        return "not a rotary table"
    rates = rope_rates(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    magnitude = rope_magnitude(shape.rope_scaling)
    good = _rows_that_match(cos, sin, rates, magnitude, _TABLE_TOLERANCE * magnitude)
    if good == len(cos):
        return shape.rope_theta
    if good > 1:
        return f"{shape.rope_theta} up to position {good - 1} only"
    pairs = cos.shape[1]
    slowest = float(np.arctan2(sin[1, -1], cos[1, -1]))  # theta^(-(pairs - 1) / pairs) radians per position
    if pairs > 1 and 0 < slowest < 1:
        theta = slowest ** (-pairs / (pairs - 1))
        for candidate in (float(f"{theta:.5g}"), theta):
            plain = rope_rates(shape.head_dim, candidate, None)
            if _rows_that_match(cos, sin, plain, 1.0, _RECOVERED_TOLERANCE) == len(cos):
                return candidate if shape.rope_scaling is None else f"{candidate} without scaling"
    return "not a rotary table"


def _rows_that_match(cos: F64, sin: F64, rates: F64, magnitude: float, tolerance: float) -> int:
    """How many rows from the first on are those of ``rates`` and ``magnitude``."""
    angles = np.arange(len(cos))[:, None] * rates[None, :]
    off = np.maximum(np.abs(cos - magnitude * np.cos(angles)), np.abs(sin - magnitude * np.sin(angles)))
    wrong = ~(off.max(axis=1) <= tolerance)
    return int(wrong.argmax()) if wrong.any() else len(cos)


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


def _agreed(values: list[Any]) -> Any:
    different = sorted({value for value in values if value is not None}, key=str)
    return different[0] if len(different) == 1 else (different or None)
