"""Which ONNX files there can be, as data: for a range of onnxruntime versions, the opset and the operators that it runs.

``contrib`` is what onnxruntime, its genai and transformers.js run fastest; ``standard`` uses no operator outside the ONNX
standard, for other runtimes. Measured with onnxruntime 1.20 to 1.32; each takes the IR version of its own day and older ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepthin.engine.errors import UsageError
from deepthin.engine.formats import STORED, scheme_named
from deepthin.engine.shape import Shape
from deepthin.engine.targets import attention_rung


@dataclass(frozen=True, slots=True)
class OnnxProfile:
    """One kind of ONNX file.

    Attributes:
        name: as in ``--onnx-profile``.
        opset: version of the standard operators.
        ir_version: of the file.
        onnxruntime: the first version that runs it.
        contrib: whether operators of com.microsoft are used.
        quants: formats that bodies may have: those it has operators for, and f32.
    """

    name: str
    opset: int
    ir_version: int
    onnxruntime: str
    contrib: bool
    quants: tuple[str, ...]

    def writes(self, quant: str) -> bool:
        """Whether files are written for ``quant``; embedding and head may also be floats, which become f32.

        Raises:
            UsageError: no such format.
        """
        if quant == STORED:
            return STORED in self.quants
        scheme = scheme_named(quant)
        return scheme.body.name in self.quants and (
            self.contrib or not scheme.head.is_quantized or scheme.head.name in self.quants
        )

    def of(self, shape: Shape) -> OnnxProfile:
        """The profile of a file of ``shape``: standard attention needs a newer opset."""
        newer = PROFILES["standard"]
        if attention_rung(shape.head_dim) < 2 or self.opset >= newer.opset:
            return self
        return replace(self, opset=newer.opset, ir_version=newer.ir_version, onnxruntime=newer.onnxruntime)


PROFILES = {
    profile.name: profile
    for profile in (
        OnnxProfile("contrib", 21, 10, "1.20", True, ("f32", "q8_0", "q4_0", "q4_1", STORED)),
        OnnxProfile("standard", 23, 11, "1.23", False, ("f32", "q8_0", "q4_0")),
    )
}


def profile_named(name: str) -> OnnxProfile:
    """The profile called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in PROFILES:
        raise UsageError(f"ONNX profile {name!r} is unknown; use one of {', '.join(PROFILES)}")
    return PROFILES[name]
