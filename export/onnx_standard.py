"""The operators of a decoder within the ONNX standard (opset 23): what :class:`OnnxGraph` writes, without com.microsoft.

Quantised matrices are blocked DequantizeLinear in front of MatMul, integers [in, out] in blocks along the first axis, which is
the form that onnxruntime joins into one product (at its accuracy level 4; ``session.qdq_matmulnbits_accuracy_level`` = "0" asks
for f32). A tied table stays one copy in the file: the head turns it around, which onnxruntime does once, when it loads.
"""

from __future__ import annotations

import numpy as np

from deepthin.export.onnx_graph import OnnxGraph
from deepthin.export.onnx_weights import BLOCK, Initializer, SignedMatrix, is_signed_matrix, signed_matrix


class StandardGraph(OnnxGraph):
    """Nodes and initializers in the making; see :class:`OnnxGraph`."""

    _codes: SignedMatrix | None = None

    def embedding(self, ids: str, output: str) -> str:
        """See :meth:`OnnxGraph.embedding`."""
        name, tensor = self.weight("token_embd")
        if not is_signed_matrix(tensor):
            return super().embedding(ids, output)
        self._codes = table = signed_matrix(name, tensor, transposed=False)
        parts = []
        for part, stem in ((table.codes, "codes"), (table.scales, "scales")):
            self.keep(part)
            parts.append(self.add("Gather", [part.name, ids], f"token_embd.{stem}", axis=0))
        return self.add("DequantizeLinear", parts, output, axis=2, block_size=BLOCK)

    def tied_head(self, activation: str, output: str) -> str:
        """See :meth:`OnnxGraph.tied_head`."""
        if self._codes is None:
            if not isinstance(self._table, Initializer):
                raise AssertionError("Bug: a tied head before the embedding")
            rows, width = self._table.dims
            flat = self.add("Reshape", [activation, self.constant("rows_of_width", [-1, width], np.int64)], "output.rows")
            product = self.add(
                "Gemm", [flat, self._widened(self._table)], "output.product", transB=1
            )  # MatMul would take a turned copy
            lead = self.add("Shape", ["input_ids"], "output.lead")
            dims = self.add("Concat", [lead, self.constant("vocab_size", [rows], np.int64)], "output.dims", axis=0)
            return self.add("Reshape", [product, dims], output)
        turned = [
            self.add("Transpose", [part.name], f"output.{stem}", perm=[1, 0])
            for part, stem in ((self._codes.codes, "codes"), (self._codes.scales, "scales"))
        ]
        weight = self.add("DequantizeLinear", turned, "output.weight", axis=0, block_size=BLOCK)
        return self.add("MatMul", [activation, weight], output)

    def matmul(self, activation: str, name: str, output: str | None = None) -> str:
        """See :meth:`OnnxGraph.matmul`."""
        stored, tensor = self.weight(name)
        if not is_signed_matrix(tensor):
            return super().matmul(activation, name, output)
        matrix = signed_matrix(stored, tensor, transposed=True)
        self.keep(matrix.codes)
        self.keep(matrix.scales)
        inputs = [matrix.codes.name, matrix.scales.name]
        weight = self.add("DequantizeLinear", inputs, f"{name}.weight", axis=0, block_size=BLOCK)
        return self.add("MatMul", [activation, weight], output or f"{name}.out")

    def plain_norm(self, hidden: str, name: str) -> str:
        """See :meth:`OnnxGraph.plain_norm`."""
        inputs = [hidden, self.vector(name)]
        return self.add("RMSNormalization", inputs, f"{name}.out", axis=-1, epsilon=self.epsilon)

    def residual_norm(self, added: str, stream: str, name: str) -> tuple[str, str]:
        """See :meth:`OnnxGraph.residual_norm`."""
        total = self.add("Add", [added, stream], f"{name}.sum")
        return self.plain_norm(total, name), total
