"""Which ONNX files there can be, as data: for a range of onnxruntime versions, the opset and the operators that it runs.

``contrib`` is what onnxruntime, its genai and transformers.js run fastest; ``standard`` uses no operator outside the ONNX
standard, for other runtimes. Run with onnxruntime 1.20, 1.22, 1.23 and 1.32; each takes the IR version of its own day and
older ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from deepthin.engine.errors import UsageError
from deepthin.engine.formats import STORED, scheme_named
from deepthin.engine.shape import Shape
from deepthin.engine.targets import ONNX_RUNGS, attention_rung


@dataclass(frozen=True, slots=True)
class OnnxProfile:
    """One kind of ONNX file.

    Attributes:
        name: as in ``--onnx-profile``.
        opset: version of the standard operators.
        ir_version: of the file.
        onnxruntime: the first version that runs it.
        blocks_onnxruntime: the first one that runs its quantised matrices, of which embedding and head have 8 bits.
        contrib: whether operators of com.microsoft are used.
        quants: formats that bodies may have.
    """

    name: str
    opset: int
    ir_version: int
    onnxruntime: str
    blocks_onnxruntime: str
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

    def first_onnxruntime(self, quant: str) -> str:
        """The first version of onnxruntime that runs a file stored as ``quant``."""
        blocks = quant == STORED or scheme_named(quant).coarsest.is_quantized
        return self.blocks_onnxruntime if blocks else self.onnxruntime

    def record(self, shape: Shape, quants: Iterable[str]) -> dict[str, Any]:
        """What files of ``shape`` need and how they are written, for manifests and people.

        Keys: ``profile``, ``opset``, ``ir_version``, ``onnxruntime`` (of f32 files), ``onnxruntime_by_quant``, ``rung`` (0 to 2
        of the attention ladder, the lower the faster; 3 where only standard operators are wanted), ``attention`` (which rung
        and why), and ``notes`` (one sentence on each other thing that the shape asks for).
        """
        used = self.of(shape)
        rung = attention_rung(shape.head_dim) if used.contrib else len(ONNX_RUNGS)
        asked = f"RotaryEmbedding and Attention of the ONNX standard, since profile {used.name} has no other"
        return {
            "profile": used.name,
            "opset": used.opset,
            "ir_version": used.ir_version,
            "onnxruntime": f">={used.onnxruntime}",
            "onnxruntime_by_quant": {quant: f">={used.first_onnxruntime(quant)}" for quant in quants if used.writes(quant)},
            "rung": rung,
            "attention": ONNX_RUNGS[rung].format(head_dim=shape.head_dim) if used.contrib else asked,
            "notes": _notes(shape),
        }


def _notes(shape: Shape) -> list[str]:
    scaling = shape.rope_scaling
    every = {
        "query and key norms are operators of their own; onnxruntime refuses GroupQueryAttention's on CPUs": shape.qk_norm,
        "biases are added behind the products of queries, keys and values": shape.qkv_bias,
        f"{shape.mlp} stands between two matrices, without a gate": shape.mlp != "swiglu",
        f"every {shape.nope_every}th block turns no positions": shape.nope_every > 0,
        f"{scaling.kind if scaling else ''} scaling is in the tables of cosines and sines": scaling is not None,
        f"{shape.layer_sharing} runs of a block read the same weights, stored once": shape.layer_sharing > 1,
    }
    return [text for text, holds in every.items() if holds]


PROFILES = {
    profile.name: profile
    for profile in (
        OnnxProfile("contrib", 21, 10, "1.20", "1.23", True, ("f32", "f16", "q8_0", "q4_0", "q4_1", STORED)),
        OnnxProfile("standard", 23, 11, "1.23", "1.23", False, ("f32", "f16", "q8_0", "q4_0")),
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
