"""AVX2 with FMA and F16C, no VNNI: 8 lanes, byte products through ``vpmaddubsw`` and ``vpmaddwd``.

These CPUs multiply integers on one port (Zen 2, Zen 3) or two, so the sums of a block of 32 columns stay in 16 bits as long as
they fit, and one ``vpmaddwd`` widens them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from deepthin.engine.simd._ir import I8, I16, Vec, call, constant, intrinsic, vector

W = 8
Q8_BIAS = 0  # vpmaddubsw saturates at 16 bits, so 8-bit weights stay signed and go in as |w| with the sign moved over
Q6_BIAS = 0  # centred codes are half as large, so twice as many of their products fit into 16 bits

_i32, _narrow, _bytes = Vec("i32", W), Vec("i16", 2 * W), Vec("i8", 4 * W)


def _pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    return call(builder, "llvm.x86.avx2.pmadd.ub.sw", vector(I16, 2 * W), [unsigned, signed])


def _signed_pairs(builder: Any, weights: Any, activations: Any) -> Any:
    """As |weights| times activations with the weights' signs; -128 becomes 128 unsigned."""
    magnitude = call(builder, f"llvm.abs.v{4 * W}i8", weights.type, [weights, ir.Constant(ir.IntType(1), 0)])
    return _pairs(builder, magnitude, call(builder, "llvm.x86.avx2.psign.b", activations.type, [activations, weights]))


def _widened(builder: Any, total: Any, pairs: Any) -> Any:
    return builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", total.type, [pairs, constant(I16, 2 * W, 1)]))


@intrinsic
def dot4_nibbles(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + dot4(u8 weights of 0..63, i8 activations); exact: a pair stays below 2 * 63 * 127 < 2^15."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, w, x = args
        return _widened(builder, acc, _pairs(builder, w, x))

    return _i32(_i32, _bytes, _bytes), emit


@intrinsic
def dot4_q8(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + dot4(i8 weights, i8 activations in -127..127); exact: a pair stays within 2 * 128 * 127 < 2^15."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, w, x = args
        return _widened(builder, acc, _signed_pairs(builder, w, x))

    return _i32(_i32, _bytes, _bytes), emit


@intrinsic
def start_narrow(typing: Any, total: Any) -> Any:
    """Zero, for the sums of pairs of products that will be added to ``total``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(vector(I16, 2 * W), None)

    return _narrow(_i32), emit


@intrinsic
def dot_narrow(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + u8 weights times i8 activations in -127..127; 8 times with codes of 0..15, 4 times with codes of 0..31.

    Exact: 8 * 2 * 15 * 127 and 4 * 2 * 31 * 127 are below 2^15.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, w, x = args
        return builder.add(acc, _pairs(builder, w, x))

    return _narrow(_narrow, _bytes, _bytes), emit


@intrinsic
def dot_narrow_6bit(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + (codes of 0..63 less 32) times i8 activations in -127..127, 4 times.

    Exact: 4 * 2 * 32 * 127 is below 2^15.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, w, x = args
        return builder.add(acc, _signed_pairs(builder, builder.sub(w, constant(I8, 4 * W, 32)), x))

    return _narrow(_narrow, _bytes, _bytes), emit


@intrinsic
def end_narrow(typing: Any, acc: Any, total: Any) -> Any:
    """The four columns of each row together in i32, and ``total``, which ``start_narrow`` was given."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, total = args
        return _widened(builder, total, acc)

    return _i32(_narrow, _i32), emit


@intrinsic
def together(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The same four vectors, of which none is worked on further before all are here.

    No instruction: an empty piece of assembly that LLVM believes to change them, so it neither sums one to its end before the
    next nor adds up in another order.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [arg.type for arg in args]
        function_type = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
        changed = builder.asm(function_type, "", "=x,=x,=x,=x,0,1,2,3", args, False)
        return context.make_tuple(builder, signature.return_type, [builder.extract_value(changed, k) for k in range(4)])

    return types.UniTuple(a, 4)(a, b, c, d), emit  # type: ignore[attr-defined]
