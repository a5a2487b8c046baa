"""What the ONNX file of a shape will weigh, within 0.5 %: quick enough to be asked for every proposal of a search.

The exporter knows it to the byte, by building the graph, which takes too long for that.
"""

from __future__ import annotations

from deepthin.engine.formats import BF16, F16, F32, Q4_1, Q5_1, BlockFormat, scheme_named
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import TensorSpec, stored_format, tensor_specs

_BODIES = ("f32", "f16", "q4_0", "q4_1", "q8_0")
_BLOCK_BITS = {"q4_0": 4, "q4_1": 4, "q5_0": 8, "q5_1": 8, "q8_0": 8}
# Measured on exported graphs of 1 to 12 layers: nodes and frames of initializers, names included.
_GRAPH_BYTES = 1_750
_GRAPH_BLOCK_BYTES = 2_730
_GRAPH_DIGIT_BYTES = 55
_GRAPH_ROTARY_BYTES = 235
_GRAPH_MATRIX_BYTES = {1: 217, 2: 701}  # one block matrix more than a plain one, by float fields a block
_GRAPH_F16_BYTES = 155  # a Cast behind each matrix
_GRAPH_EXTRA_BYTES = {"norm": 916, "bias": 200}  # query and key norms, biases


def onnx_bytes(shape: Shape, quant: str) -> int | None:
    """Bytes of the ONNX file, within 0.5 %; None for formats it has no operators for.

    Raises:
        UsageError: no such format.
    """
    scheme = scheme_named(quant)
    if scheme.body.name not in _BODIES:
        return None
    positions = shape.max_seq_len * shape.head_dim * 4  # cosines and sines, half a head each
    runs = shape.num_executed_layers
    total = positions + _GRAPH_BYTES + runs * _GRAPH_BLOCK_BYTES + _GRAPH_DIGIT_BYTES * _digits_beyond_first(runs)
    if shape.head_dim % 16:
        total += runs * _GRAPH_ROTARY_BYTES
    for spec in tensor_specs(shape.replace(num_layers=1)):
        times = shape.num_layers if spec.name.startswith("blk.") else 1
        total += times * _tensor_bytes(spec, stored_format(spec, scheme))
    return total


def _tensor_bytes(spec: TensorSpec, fmt: BlockFormat) -> int:
    bits = None if spec.role == "embedding" and fmt in (Q4_1, Q5_1) else _BLOCK_BITS.get(fmt.name)
    if bits is None:
        each = (F32 if fmt is BF16 or fmt.is_quantized else fmt).block_bytes
        more = _GRAPH_EXTRA_BYTES.get(spec.role, 0) if _is_extra(spec) else _GRAPH_F16_BYTES if fmt is F16 else 0
        return each * spec.num_elements + more
    floats = 2 if fmt in (Q4_1, Q5_1) else 1
    blocks = spec.num_elements // fmt.block_elements
    return spec.num_elements * bits // 8 + blocks * 4 * floats + _GRAPH_MATRIX_BYTES[floats]


def _is_extra(spec: TensorSpec) -> bool:
    """Whether a tensor is one that plain shapes have not: norms of queries and keys, biases."""
    return spec.role == "bias" or spec.name.endswith(("_q_norm", "_k_norm"))


def _digits_beyond_first(count: int) -> int:
    """How many digits 0 ... count - 1 have in all beyond one each."""
    return sum(len(str(number)) - 1 for number in range(count))
