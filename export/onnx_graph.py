"""The operators a decoder needs, as methods that append ONNX nodes and initializers and return the name of what they compute.

Knows which operator a stored format takes; knows nothing of blocks, caches or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from deepthin.engine.model import Model, Tensor
from deepthin.engine.tensors import tensor_specs
from deepthin.export.onnx_weights import (
    BlockMatrix,
    Initializer,
    block_matrix,
    can_be_gathered,
    constant,
    float_matrix,
    is_block_matrix,
    vector,
)

CONTRIB = "com.microsoft"


class OnnxGraph:
    """Nodes and initializers in the making.

    Value names follow the canonical tensor names (``blk.3.attn_q.out``), block numbers counting executed blocks; initializers
    have Hugging Face names, and shared blocks the same ones.
    """

    def __init__(self, model: Model, *, accuracy_level: int) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Initializer] = []
        self.epsilon = model.shape.rms_norm_eps
        self._tensors, self._sharing = model.tensors, model.shape.layer_sharing
        self._tied = model.shape.tie_word_embeddings
        self._hf_names = {spec.name: spec.hf_name for spec in tensor_specs(model.shape)}
        self._constants: set[str] = set()
        self._kept: set[str] = set()
        self._made: set[str] = set()  # values that several operators read
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

    def keep(self, *items: Initializer) -> None:
        """Add initializers that hold weights; shared blocks bring the same ones again."""
        for item in items:
            if item.name not in self._kept:
                self._kept.add(item.name)
                self.initializers.append(item)

    def weight(self, name: str) -> tuple[str, Tensor]:
        """Initializer name and tensor of ``name``, whose block number counts executed blocks."""
        blk, _, rest = name.partition(".")
        if blk == "blk":
            run, _, part = rest.partition(".")
            name = f"blk.{int(run) // self._sharing}.{part}"
        return self._hf_names[name], self._tensors[name]

    def vector(self, name: str) -> str:
        """The initializer of a norm or bias."""
        stored, tensor = self.weight(name)
        self.keep(vector(stored, tensor))
        return stored

    @property
    def weight_bytes(self) -> int:
        """Bytes of all initializers that hold weights; constants and position tables apart."""
        return sum(item.num_bytes for item in self.initializers if item.name not in self._constants)

    def embedding(self, ids: str, output: str) -> str:
        """Rows of ``token_embd``. Its initializers stay known, so that :meth:`tied_head` reads the same bytes."""
        name, tensor = self.weight("token_embd")
        if not can_be_gathered(tensor):
            self._table = table = float_matrix(name, tensor, transposed=False)
            self.keep(table)
            if self._tied or table.dtype != np.float16:  # one table in memory, read by both its users
                return self.add("Gather", [self._widened(table), ids], output, axis=0)
            rows = self.add("Gather", [table.name, ids], "token_embd.half", axis=0)
            return self.add("Cast", [rows], output, to=TensorProto.FLOAT)
        self._table = matrix = block_matrix(name, tensor)
        self.keep(*matrix.parts)
        return self._rows_of_blocks(matrix, ids, output)

    def _rows_of_blocks(self, matrix: BlockMatrix, ids: str, output: str) -> str:
        """Rows ``ids`` of ``matrix``, (q - zero point) * scale, bit for bit what dequantising all of it gives.

        GatherBlockQuantized would do it in one operator, but transformers.js's WebAssembly has none, nor had onnxruntime before
        1.23 one for 8 bits.
        """
        zero = self.constant(f"zero_of_{matrix.bits}_bits", 1 << (matrix.bits - 1), np.float32)
        codes = self.add("Gather", [matrix.codes.name, ids], "token_embd.codes", axis=0)  # [b, s, blocks, bytes]
        codes = self.add("Cast", [codes], "token_embd.bytes", to=TensorProto.FLOAT)
        last = self.constant("last_axis", [-1], np.int64)
        if matrix.bits == 4:
            sixteen = self.constant("sixteen", 16, np.float32)
            high = self.add("Floor", [self.add("Div", [codes, sixteen], "token_embd.shifted")], "token_embd.high")
            low = self.add("Sub", [codes, self.add("Mul", [high, sixteen], "token_embd.upper")], "token_embd.low")
            pairs = [self.add("Unsqueeze", [half, last], f"{half}_apart") for half in (low, high)]
            apart = self.add("Concat", pairs, "token_embd.pairs", axis=-1)
            dims = self.constant("blocks_of_nibbles", [0, 0, matrix.scales.dims[1], matrix.block], np.int64)
            codes = self.add("Reshape", [apart, dims], "token_embd.nibbles")
        scales = self.add("Gather", [matrix.scales.name, ids], "token_embd.scales", axis=0)
        centred = self.add("Sub", [codes, zero], "token_embd.centred")
        scaled = self.add("Mul", [centred, self.add("Unsqueeze", [scales, last], "token_embd.steps")], "token_embd.scaled")
        width = self.constant("row_of_blocks", [0, 0, matrix.scales.dims[1] * matrix.block], np.int64)
        return self.add("Reshape", [scaled, width], output)

    def tied_head(self, activation: str, output: str) -> str:
        """Multiply activation [..., D] by the embedding table's transpose, from the table's own initializers."""
        if isinstance(self._table, BlockMatrix):
            return self._matmul_nbits(activation, self._table, output)
        if self._table is None:
            raise AssertionError("Bug: a tied head before the embedding")
        # Transpose + MatMul would be folded into a second copy in memory.
        return self.add("FusedMatMul", [activation, self._widened(self._table)], output, domain=CONTRIB, transB=1)

    def _widened(self, item: Initializer) -> str:
        """The values of ``item`` as f32. From f16 they are made by a Cast, which onnxruntime runs once, when it loads."""
        wide = f"{item.name}.f32"
        if item.dtype != np.float16 or wide in self._made:
            return wide if wide in self._made else item.name
        self._made.add(wide)
        return self.add("Cast", [item.name], wide, to=TensorProto.FLOAT)

    def matmul(self, activation: str, name: str, output: str | None = None) -> str:
        """Multiply activation [..., in] by the transpose of tensor ``name`` [out, in]."""
        stored, tensor = self.weight(name)
        output = output or f"{name}.out"
        if is_block_matrix(tensor):
            matrix = block_matrix(stored, tensor)
            self.keep(*matrix.parts)
            return self._matmul_nbits(activation, matrix, output)
        weight = float_matrix(stored, tensor, transposed=True)
        self.keep(weight)
        return self.add("MatMul", [activation, self._widened(weight)], output)

    def _matmul_nbits(self, activation: str, matrix: BlockMatrix, output: str) -> str:
        rows, blocks = matrix.scales.dims
        options = {"N": rows, "K": blocks * matrix.block, "bits": matrix.bits, "block_size": matrix.block}
        product = output if matrix.addends is None else f"{output}.product"
        inputs = [activation, matrix.codes.name, matrix.scales.name]
        self.add("MatMulNBits", inputs, product, domain=CONTRIB, accuracy_level=self._accuracy_level, **options)
        if matrix.addends is None:
            return output
        sums = self._block_sums(activation, blocks, matrix.block)
        return self.add("Add", [product, self.add("MatMul", [sums, matrix.addends.name], f"{output}.addend")], output)

    def _block_sums(self, activation: str, blocks: int, block: int) -> str:
        """Sums of the values of each block of activation [..., blocks * block], made once for all its products."""
        name = f"{activation}.sums_{block}"
        if name not in self._made:
            self._made.add(name)
            apart = self.constant(f"blocks_{blocks}x{block}", [0, 0, blocks, block], np.int64)
            last_axis = self.constant("last_axis", [-1], np.int64)
            self.add("ReduceSum", [self.add("Reshape", [activation, apart], f"{name}.blocks"), last_axis], name, keepdims=0)
        return name

    def plain_norm(self, hidden: str, name: str) -> str:
        """Compute hidden / sqrt(mean(hidden^2) + eps) * weight, in standard operators; onnxruntime fuses them."""
        two = self.constant("two", 2, np.float32)
        epsilon = self.constant("rms_norm_eps", self.epsilon, np.float32)
        last_axis = self.constant("last_axis", [-1], np.int64)
        mean = self.add(
            "ReduceMean", [self.add("Pow", [hidden, two], f"{name}.squared"), last_axis], f"{name}.mean", keepdims=1
        )
        root = self.add("Sqrt", [self.add("Add", [mean, epsilon], f"{name}.mean_eps")], f"{name}.root")
        unit = self.add("Div", [hidden, root], f"{name}.unit")
        return self.add("Mul", [unit, self.vector(name)], f"{name}.out")

    def residual_norm(self, added: str, stream: str, name: str) -> tuple[str, str]:
        """The norm of ``added`` + ``stream``, and that sum."""
        inputs = [added, stream, self.vector(name)]
        outputs = (f"{name}.out", "", "", f"{name}.sum")
        self.add("SkipSimplifiedLayerNormalization", inputs, outputs, domain=CONTRIB, epsilon=self.epsilon)
        return outputs[0], outputs[3]

    def head_norm(self, heads: str, name: str, count: int) -> str:
        """The norm of each of ``count`` heads side by side in heads [..., count * E].

        NOTE: GroupQueryAttention has inputs for these norms, which onnxruntime refuses on CPUs.
        """
        width = self.weight(name)[1].dims[0]
        apart = self.constant(f"heads_{count}x{width}", [0, 0, count, width], np.int64)
        together = self.constant(f"heads_{count * width}", [0, 0, count * width], np.int64)
        normed = self.plain_norm(self.add("Reshape", [heads, apart], f"{name}.heads"), name)
        return self.add("Reshape", [normed, together], f"{name}.flat")

    def biased(self, value: str, name: str) -> str:
        """``value`` [..., width] plus the bias ``name``."""
        return self.add("Add", [value, self.vector(name)], f"{name}ed")

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
