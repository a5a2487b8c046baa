"""AVX2 with FMA and F16C, no VNNI: 8 lanes, byte products through ``vpmaddubsw`` and ``vpmaddwd``."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from deepthin.engine.simd._ir import I8, I16, Vec, call, constant, intrinsic, vector

W = 8
Q8_BIAS = 0  # vpmaddubsw saturates at 16 bits, so 8-bit weights stay signed and go in as |w| with the sign moved over

_i32, _bytes = Vec("i32", W), Vec("i8", 4 * W)


def _dot(builder: Any, acc: Any, unsigned: Any, signed: Any) -> Any:
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", vector(I16, 2 * W), [unsigned, signed])
    quads = call(builder, "llvm.x86.avx2.pmadd.wd", acc.type, [pairs, constant(I16, 2 * W, 1)])
    return builder.add(acc, quads)


@intrinsic
def dot4_nibbles(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + dot4(u8 weights of 0..63, i8 activations); exact: a pair stays below 2 * 63 * 127 < 2^15."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _dot(builder, *args)

    return _i32(_i32, _bytes, _bytes), emit


@intrinsic
def dot4_q8(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + dot4(i8 weights, i8 activations in -127..127); exact: a pair stays within 2 * 128 * 127 < 2^15."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, w, x = args
        zero = ir.Constant(vector(I8, 4 * W), None)
        magnitude = builder.select(builder.icmp_signed("<", w, zero), builder.sub(zero, w), w)  # -128 becomes 128 unsigned
        return _dot(builder, acc, magnitude, call(builder, "llvm.x86.avx2.psign.b", x.type, [x, w]))

    return _i32(_i32, _bytes, _bytes), emit
