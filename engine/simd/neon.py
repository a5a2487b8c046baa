"""NEON as every arm64 CPU has it (Raspberry Pi 4): 8 lanes in two registers, byte products through ``smull`` and ``sadalp``."""

from __future__ import annotations

from typing import Any

from deepthin.engine.simd._ir import FLOAT, I16, I32, Vec, call, halves, intrinsic, joined, vector

W = 8  # two registers share each broadcast of activation bytes
Q8_BIAS = 0

_i32, _bytes = Vec("i32", W), Vec("i8", 4 * W)


def _products(builder: Any, weights: Any, activations: Any) -> list[Any]:
    """16 products of bytes as two vectors of i16.

    ``smull2`` reads upper halves, but LLVM makes the halves of repeated activations one, and then moves those of the weights
    down. What comes out of a fence it takes as it is; the fence itself is no instruction.
    """
    v_f32 = vector(FLOAT, 4)
    fenced = call(builder, "llvm.arithmetic.fence.v4f32", v_f32, [builder.bitcast(activations, v_f32)])
    sides = (halves(builder, weights), halves(builder, builder.bitcast(fenced, activations.type)))
    return [call(builder, "llvm.aarch64.neon.smull.v8i16", vector(I16, 8), list(pair)) for pair in zip(*sides, strict=True)]


@intrinsic
def _dot4(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + dot4(i8 weights, i8 activations in -127..127) per lane; codes 0..127 are the same read signed.

    Exact: two neighbouring products sum to at most 2 * 128 * 127 < 2^15.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = []
        for total, w, x in zip(*(halves(builder, arg) for arg in args), strict=True):
            pairs = call(builder, "llvm.aarch64.neon.addp.v8i16", vector(I16, 8), _products(builder, w, x))
            quads = call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", vector(I32, 4), [pairs])
            sums.append(builder.add(total, quads))  # together with saddlp: one sadalp
        return joined(builder, *sums)

    return _i32(_i32, _bytes, _bytes), emit


dot4_nibbles = _dot4
dot4_q8 = _dot4
