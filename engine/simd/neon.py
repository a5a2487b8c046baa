"""NEON as every arm64 CPU has it (Raspberry Pi 4): 8 lanes in two registers, bytes multiplied through ``smull`` and ``smlal``.

These CPUs multiply on one of their two pipes, so the sums of a block of 32 columns stay in 16 bits as long as they fit, one for
each column of a group of four, and two additions of neighbours widen them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core.types.containers import UniTuple

from deepthin.engine.simd._ir import FLOAT, I8, I16, I32, Vec, call, constant, halves, intrinsic, joined, vector

W = 8  # two registers share each broadcast of activation bytes
Q8_BIAS = 0
Q6_BIAS = 0  # centred codes are half as large, so twice as many of their products fit into 16 bits

_i32, _bytes = Vec("i32", W), Vec("i8", 4 * W)
_narrow = UniTuple(Vec("i16", 8), 4)  # rows 0 and 1, 2 and 3, ..: four registers, which as one vector LLVM finds costly


def _products(builder: Any, weights: Any, activations: Any) -> list[Any]:
    """16 products of bytes as two vectors of i16.

    ``smull2`` reads upper halves, but LLVM makes the halves of repeated activations one, and then moves those of the weights
    down. What comes out of a fence it takes as it is; the fence itself is no instruction.
    """
    v_f32 = vector(FLOAT, 4)
    fenced = call(builder, "llvm.arithmetic.fence.v4f32", v_f32, [builder.bitcast(activations, v_f32)])
    sides = (halves(builder, weights), halves(builder, builder.bitcast(fenced, activations.type)))
    return [call(builder, "llvm.aarch64.neon.smull.v8i16", vector(I16, 8), list(pair)) for pair in zip(*sides, strict=True)]


def _row_sums(builder: Any, total: Any, columns: list[Any]) -> Any:
    """``total`` i32 of four rows plus their four columns each, two vectors of i16; neighbours must fit into 16 bits."""
    pairs = call(builder, "llvm.aarch64.neon.addp.v8i16", vector(I16, 8), columns)
    quads = call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", vector(I32, 4), [pairs])
    return builder.add(total, quads)  # together with saddlp: one sadalp


@intrinsic
def _dot4(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + dot4(i8 weights, i8 activations in -127..127) per lane; codes 0..127 are the same read signed.

    Exact: two neighbouring products sum to at most 2 * 128 * 127 < 2^15.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = zip(*(halves(builder, arg) for arg in args), strict=True)
        return joined(builder, *(_row_sums(builder, total, _products(builder, w, x)) for total, w, x in parts))

    return _i32(_i32, _bytes, _bytes), emit


dot4_nibbles = _dot4
dot4_q8 = _dot4


@intrinsic
def start_narrow(typing: Any, total: Any) -> Any:
    """Zero, for the sums of products that will be added to ``total``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(_narrow), None)

    return _narrow(_i32), emit


def _accumulated(builder: Any, acc: Any, weights: Any, activations: Any) -> Any:
    sides = zip(halves(builder, weights), halves(builder, activations), strict=True)
    for k, products in enumerate(part for w, x in sides for part in _products(builder, w, x)):
        acc = builder.insert_value(acc, builder.add(builder.extract_value(acc, k), products), k)  # one smlal
    return acc


@intrinsic
def dot_narrow(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + u8 weights times i8 activations in -127..127; 8 times with codes of 0..15, 4 times with codes of 0..31.

    Exact, and so is the sum of two neighbours: 2 * 8 * 15 * 127 and 2 * 4 * 31 * 127 are below 2^15.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _accumulated(builder, *args)

    return _narrow(_narrow, _bytes, _bytes), emit


@intrinsic
def dot_narrow_6bit(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + (codes of 0..63 less 32) times i8 activations in -127..127, 4 times.

    Exact, and so is the sum of two neighbours: 2 * 4 * 32 * 127 is below 2^15.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, w, x = args
        return _accumulated(builder, acc, builder.sub(w, constant(I8, 4 * W, 32)), x)

    return _narrow(_narrow, _bytes, _bytes), emit


@intrinsic
def end_narrow(typing: Any, acc: Any, total: Any) -> Any:
    """The four columns of each row together in i32, and ``total``, which ``start_narrow`` was given."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        columns = [builder.extract_value(args[0], k) for k in range(4)]
        totals = halves(builder, args[1])
        return joined(builder, *(_row_sums(builder, totals[k], columns[2 * k : 2 * k + 2]) for k in range(2)))

    return _i32(_narrow, _i32), emit
