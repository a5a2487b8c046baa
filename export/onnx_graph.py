"""The operators a decoder needs, as methods that append ONNX nodes and initializers and return the name of what they compute.

Knows which operator a stored format takes; knows nothing of blocks, caches or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import helper

from deepthin.engine.formats import Q4_1
from deepthin.engine.model import Model
from deepthin.engine.tensors import tensor_specs
from deepthin.export.onnx_weights import BLOCK, BlockMatrix, Initializer, block_matrix, constant, float_matrix, is_block_matrix

CONTRIB = "com.microsoft"


class OnnxGraph:
    """Nodes and initializers in the making.

    Value names follow the canonical tensor names (``blk.3.attn_q.out``), initializers the Hugging Face ones.
    """

    def __init__(self, model: Model, *, accuracy_level: int) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Initializer] = []
        self._tensors = model.tensors
        self._hf_names = {spec.name: spec.hf_name for spec in tensor_specs(model.shape)}
        self._constants: set[str] = set()
        self._epsilon = model.shape.rms_norm_eps
        self._accuracy_level = accuracy_level
        self._table: BlockMatrix | Initializer | None = None

    def add(self, op: str, inputs: Sequence[str], output: str | Sequence[str], *, domain: str = "", **attributes: Any) -> str:
        """Append one node; returns its first output."""
        outputs = [output] if isinstance(output, str) else list(output)
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=f"{outputs[0]}/{op}", domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, values: Any, dtype: type[np.generic]) -> str:
        """A small initializer; the same name again gives the same one."""
        if name not in self._constants:
            self._constants.add(name)
            self.initializers.append(constant(name, np.asarray(values, dtype)))
        return name

    @property
    def weight_bytes(self) -> int:
        """Bytes of all initializers that hold weights; constants and position tables apart."""
        return sum(item.num_bytes for item in self.initializers if item.name not in self._constants)

    def embedding(self, ids: str, output: str) -> str:
        """Rows of ``token_embd``. Its initializers stay known, so that :meth:`tied_head` reads the same bytes."""
        tensor, name = self._tensors["token_embd"], self._hf_names["token_embd"]
        # NOTE: GatherBlockQuantized refuses float zero points, so a q4_1 table is written as f32.
        if not is_block_matrix(tensor) or tensor.format is Q4_1:
            self._table = table = float_matrix(name, tensor, transposed=False)
            self.initializers.append(table)
            return self.add("Gather", [table.name, ids], output, axis=0)
        self._table = matrix = block_matrix(name, tensor)
        self.initializers += matrix.parts
        rows = self.constant("token_embd.dims", [tensor.dims[0], tensor.dims[1] * matrix.bits // 8], np.int64)
        codes = self.add("Reshape", [matrix.codes.name, rows], "token_embd.codes")
        options = {"bits": matrix.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        return self.add("GatherBlockQuantized", [codes, ids, matrix.scales.name], output, domain=CONTRIB, **options)

    def tied_head(self, activation: str, output: str) -> str:
        """Multiply activation [..., D] by the embedding table's transpose, from the table's own initializers."""
        if isinstance(self._table, BlockMatrix):
            return self._matmul_nbits(activation, self._table, output)
        if self._table is None:
            raise AssertionError("Bug: a tied head before the embedding")
        # Transpose + MatMul would be folded into a second copy in memory.
        return self.add("FusedMatMul", [activation, self._table.name], output, domain=CONTRIB, transB=1)

    def matmul(self, activation: str, name: str, output: str | None = None) -> str:
        """Multiply activation [..., in] by the transpose of tensor ``name`` [out, in]."""
        tensor, output = self._tensors[name], output or f"{name}.out"
        if is_block_matrix(tensor):
            matrix = block_matrix(self._hf_names[name], tensor)
            self.initializers += matrix.parts
            return self._matmul_nbits(activation, matrix, output)
        weight = float_matrix(self._hf_names[name], tensor, transposed=True)
        self.initializers.append(weight)
        return self.add("MatMul", [activation, weight.name], output)

    def _matmul_nbits(self, activation: str, matrix: BlockMatrix, output: str) -> str:
        rows, blocks = matrix.scales.dims
        options = {"N": rows, "K": blocks * BLOCK, "bits": matrix.bits, "block_size": BLOCK}
        inputs = [activation, *(part.name for part in matrix.parts)]
        return self.add("MatMulNBits", inputs, output, domain=CONTRIB, accuracy_level=self._accuracy_level, **options)

    def plain_norm(self, hidden: str, name: str) -> str:
        """Compute hidden / sqrt(mean(hidden^2) + eps) * weight, in standard operators; onnxruntime fuses them."""
        two = self.constant("two", 2, np.float32)
        epsilon = self.constant("rms_norm_eps", self._epsilon, np.float32)
        last_axis = self.constant("last_axis", [-1], np.int64)
        mean = self.add(
            "ReduceMean", [self.add("Pow", [hidden, two], f"{name}.squared"), last_axis], f"{name}.mean", keepdims=1
        )
        root = self.add("Sqrt", [self.add("Add", [mean, epsilon], f"{name}.mean_eps")], f"{name}.root")
        unit = self.add("Div", [hidden, root], f"{name}.unit")
        return self.add("Mul", [unit, self._norm_weight(name)], f"{name}.out")

    def residual_norm(self, added: str, stream: str, name: str) -> tuple[str, str]:
        """The norm of ``added`` + ``stream``, and that sum."""
        inputs = [added, stream, self._norm_weight(name)]
        outputs = (f"{name}.out", "", "", f"{name}.sum")
        self.add("SkipSimplifiedLayerNormalization", inputs, outputs, domain=CONTRIB, epsilon=self._epsilon)
        return outputs[0], outputs[3]

    def head_norm(self, heads: str, name: str, count: int) -> str:
        """The norm of each of ``count`` heads side by side in heads [..., count * E].

        NOTE: GroupQueryAttention has inputs for these norms, which onnxruntime refuses on CPUs.
        """
        width = self._tensors[name].dims[0]
        apart = self.constant(f"heads_{count}x{width}", [0, 0, count, width], np.int64)
        together = self.constant(f"heads_{count * width}", [0, 0, count * width], np.int64)
        normed = self.plain_norm(self.add("Reshape", [heads, apart], f"{name}.heads"), name)
        return self.add("Reshape", [normed, together], f"{name}.flat")

    def biased(self, value: str, name: str) -> str:
        """``value`` [..., width] plus the bias ``name``."""
        return self.add("Add", [value, self._norm_weight(name)], f"{name}ed")

    def relu2(self, value: str, name: str) -> str:
        """Compute max(value, 0)^2."""
        kept = self.add("Relu", [value], f"{name}.relu")
        return self.add("Mul", [kept, kept], f"{name}.relu2")

    def gelu(self, value: str, name: str) -> str:
        """Compute GELU in its tanh form."""
        return self.add("Gelu", [value], f"{name}.gelu", approximate="tanh")

    def silu(self, gate: str, name: str) -> str:
        """Compute gate * sigmoid(gate)."""
        return self.add("Mul", [gate, self.add("Sigmoid", [gate], f"{name}.sigmoid")], f"{name}.silu")

    def _norm_weight(self, name: str) -> str:
        weight = float_matrix(self._hf_names[name], self._tensors[name], transposed=False)
        self.initializers.append(weight)
        return weight.name
