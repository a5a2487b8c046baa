"""Any CPU LLVM knows: 8 lanes of generic vector code, byte products through widening multiplies."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from deepthin.engine.simd._ir import I16, I32, Vec, intrinsic, vector

W = 8
Q8_BIAS = 0

_i32, _bytes = Vec("i32", W), Vec("i8", 4 * W)


@intrinsic
def _dot4(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + dot4(i8 weights, i8 activations) per lane; codes of 0..63 are the same read signed or unsigned."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, *sides = args
        w, x = (builder.sext(side, vector(I16, 4 * W)) for side in sides)
        products = builder.sext(builder.mul(w, x), vector(I32, 4 * W))  # |product| <= 2^14: exact in 16 bits
        undefined = ir.Constant(products.type, ir.Undefined)
        for k in range(4):
            at = ir.Constant(vector(I32, W), list(range(k, 4 * W, 4)))
            acc = builder.add(acc, builder.shuffle_vector(products, undefined, at))
        return acc

    return _i32(_i32, _bytes, _bytes), emit


dot4_nibbles = _dot4
dot4_q8 = _dot4
