"""NEON with 8-bit matrix products (Graviton3, Cortex-A510/A710/X2 and later, Apple M2 and later): ``smmla`` besides ``sdot``.

One ``smmla`` multiplies two rows of weights by two tokens over eight columns, 32 products where ``sdot`` makes 16. It needs two
tokens, so decode keeps ``sdot`` and only the products of prefill use what is here.

    token pair   the i32 sums of 8 rows for two tokens: [row][token], 16 lanes in four registers
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from deepthin.engine.simd._ir import I8, I32, Vec, call, constant, halves, intrinsic, joined, needs, pointer, vector
from deepthin.engine.simd.neon_dotprod import Q8_BIAS, W, dot4_nibbles, dot4_q8

__all__ = [
    "Q8_BIAS",
    "W",
    "dot4_nibbles",
    "dot4_q8",
    "dot8_pair",
    "less_32",
    "load_pair",
    "of_first",
    "of_second",
    "splat_pair",
]

_i32, _bytes = Vec("i32", W), Vec("i8", 4 * W)
_pair_i32, _pair_bytes = Vec("i32", 2 * W), Vec("i8", 16)


@intrinsic
def load_pair(typing: Any, array: Any, first: Any, second: Any) -> Any:
    """Eight bytes of ``array`` from ``first`` on, then eight from ``second`` on: the same columns of two tokens."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        eight = vector(I8, 8)
        at = (pointer(context, builder, signature.args[0], args[0], index, eight) for index in args[1:])
        return joined(builder, *(builder.load(p, align=1) for p in at))

    return _pair_bytes(array, types.intp, types.intp), emit


@intrinsic
def splat_pair(typing: Any, first: Any, second: Any) -> Any:
    """Sums that start at ``first`` and at ``second`` in every row."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        both = ir.Constant(vector(I32, 2), ir.Undefined)
        for k, start in enumerate(args):
            both = builder.insert_element(both, start, ir.Constant(I32, k))
        undefined = ir.Constant(both.type, ir.Undefined)
        return builder.shuffle_vector(both, undefined, ir.Constant(vector(I32, 2 * W), [0, 1] * W))

    return _pair_i32(types.int32, types.int32), emit


@intrinsic
def dot8_pair(typing: Any, acc: Any, left: Any, right: Any, activations: Any) -> Any:
    """Acc + dot8(i8 weights, i8 activations) for 8 rows and two tokens; exact.

    ``left`` and ``right`` are two neighbouring groups of four columns as ``load_bytes`` gives them.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        needs(builder, "+dotprod,+i8mm")
        acc, left, right, x = args
        left, right = (builder.bitcast(side, vector(I32, W)) for side in (left, right))  # one word: a row's four columns
        sums = []
        for k, total in enumerate(part for half in halves(builder, acc) for part in halves(builder, half)):
            pick = [2 * k, W + 2 * k, 2 * k + 1, W + 2 * k + 1]  # rows 2k and 2k + 1, eight columns each
            rows = builder.shuffle_vector(left, right, ir.Constant(vector(I32, 4), pick))
            operands = [total, builder.bitcast(rows, vector(I8, 16)), x]
            sums.append(call(builder, "llvm.aarch64.neon.smmla.v4i32.v16i8", vector(I32, 4), operands))
        return joined(builder, joined(builder, *sums[:2]), joined(builder, *sums[2:]))

    return _pair_i32(_pair_i32, _bytes, _bytes, _pair_bytes), emit


@intrinsic
def less_32(typing: Any, codes: Any) -> Any:
    """Codes 0..63 less their offset; ``smmla`` takes signed bytes, so nothing is left to correct afterwards."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sub(args[0], constant(I8, 4 * W, 32))

    return _bytes(_bytes), emit


def _of(token: int) -> Any:
    @intrinsic
    def op(typing: Any, pair: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            undefined = ir.Constant(args[0].type, ir.Undefined)
            return builder.shuffle_vector(args[0], undefined, ir.Constant(vector(I32, W), list(range(token, 2 * W, 2))))

        return _i32(_pair_i32), emit

    return op


of_first, of_second = _of(0), _of(1)
