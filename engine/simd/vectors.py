"""Vector operations whose LLVM form is the same on every CPU, for a given number of lanes.

W lanes of f32 or i32      4·W lanes of bytes
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from deepthin.engine.simd._ir import FLOAT, HALF, I8, I16, I32, Vec, call, constant, intrinsic, pointer, splat, vector

# exp(x) = 2^n * 2^f with |f| <= 1/2; Taylor coefficients ln(2)^k / k!, k = 0..7: relative error below 2e-8 before rounding
_EXP2 = [1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477]
_EXP2 += [0.0013333558146428443, 0.00015403530393381608, 1.5252733804059841e-05]
_LOG2_E = 1.4426950408889634
# 2^-99.5 at the low end, and 0 below: what a softmax cannot see of its largest weight, but whose products with cached values
# would be subnormal numbers, which an Intel core takes by microcode. 2^128 = infinity at the high end.
_EXP_LOW, _EXP_HIGH = -69.0, 88.7


def f16_to_f32(builder: Any, bits: Any, lanes: int) -> Any:
    """Widen i16 vector ``bits`` holding f16 to f32 with integer steps only, for CPUs without a conversion; always exact."""
    wide = builder.zext(bits, vector(I32, lanes))
    sign = builder.shl(builder.and_(wide, constant(I32, lanes, 0x8000)), constant(I32, lanes, 16))
    magnitude = builder.shl(builder.and_(wide, constant(I32, lanes, 0x7FFF)), constant(I32, lanes, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, vector(FLOAT, lanes)), constant(FLOAT, lanes, 2.0**112))
    is_special = builder.icmp_signed(">", magnitude, constant(I32, lanes, (0x7C00 << 13) - 1))  # infinity and NaN
    special = builder.or_(magnitude, constant(I32, lanes, 0x7F800000))
    result = builder.select(is_special, special, builder.bitcast(scaled, vector(I32, lanes)))
    return builder.bitcast(builder.or_(result, sign), vector(FLOAT, lanes))


def f32_to_f16(builder: Any, value: Any, lanes: int) -> Any:
    """Round f32 vector ``value`` to f16, ties to even, with integer steps and one addition; i16 vector of its bits.

    As the conversion instructions do: too large becomes infinite, tiny becomes subnormal or zero, NaN stays NaN (quiet).
    """
    i32, half = vector(I32, lanes), constant(FLOAT, lanes, 0.5)
    bits = builder.bitcast(value, i32)
    sign = builder.and_(builder.lshr(bits, constant(I32, lanes, 16)), constant(I32, lanes, 0x8000))
    size = builder.and_(bits, constant(I32, lanes, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, constant(I32, lanes, 13)), constant(I32, lanes, 1))
    normal = builder.add(builder.add(size, constant(I32, lanes, 0xFFF)), odd)
    normal = builder.sub(builder.lshr(normal, constant(I32, lanes, 13)), constant(I32, lanes, 112 << 10))
    # below 2^-14: the last bit of 0.5 + |x| is worth 2^-24, one step of a subnormal, so the addition rounds
    small = builder.bitcast(builder.fadd(builder.bitcast(size, half.type), half), i32)
    small = builder.sub(small, constant(I32, lanes, 0x3F000000))
    result = builder.select(builder.icmp_unsigned("<", size, constant(I32, lanes, 0x38800000)), small, normal)
    is_large = builder.icmp_unsigned(">=", size, constant(I32, lanes, 0x47800000))  # 65536 and infinity
    result = builder.select(is_large, constant(I32, lanes, 0x7C00), result)
    payload = builder.and_(builder.lshr(size, constant(I32, lanes, 13)), constant(I32, lanes, 0x3FF))
    is_nan = builder.icmp_unsigned(">", size, constant(I32, lanes, 0x7F800000))
    result = builder.select(is_nan, builder.or_(payload, constant(I32, lanes, 0x7E00)), result)
    return builder.trunc(builder.or_(result, sign), vector(I16, lanes))


class Vectors:
    """The intrinsics for ``lanes`` lanes; each attribute is called from kernels.

    ``load_*`` and ``store_*`` take (array, index); the index counts the array's own elements and needs no alignment.
    """

    def __init__(self, lanes: int, *, has_half_and_fma: bool) -> None:
        """Build every intrinsic once; ``has_half_and_fma`` says that the CPU widens f16 and fuses a * b + c itself."""
        self.lanes = lanes
        f32, i32, byte = Vec("f32", lanes), Vec("i32", lanes), Vec("i8", 4 * lanes)
        v_f32, v_i32 = vector(FLOAT, lanes), vector(I32, lanes)

        def unary(result: Vec, operand: Vec, emit: Any) -> Any:
            @intrinsic
            def op(typing: Any, a: Any) -> Any:
                return result(operand), lambda context, builder, signature, args: emit(builder, args[0])

            return op

        def binary(kind: Vec, emit: Any) -> Any:
            @intrinsic
            def op(typing: Any, a: Any, b: Any) -> Any:
                return kind(kind, kind), lambda context, builder, signature, args: emit(builder, *args)

            return op

        def load(result: Vec, stored: ir.Type, widen: Any) -> Any:
            @intrinsic
            def op(typing: Any, array: Any, index: Any) -> Any:
                def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                    at = pointer(context, builder, signature.args[0], args[0], args[1], stored)
                    return widen(builder, builder.load(at, align=1))

                return result(array, types.intp), emit

            return op

        def bf16(builder: Any, bits: Any) -> Any:
            wide = builder.zext(bits, v_i32)
            return builder.bitcast(builder.shl(wide, constant(I32, lanes, 16)), v_f32)

        # one element in every lane, by one load where the CPU has it; ``array[index]`` would first test for a negative index
        self.broadcast_f32 = load(f32, FLOAT, lambda builder, value: splat(builder, value, lanes))
        self.broadcast_i32 = load(i32, I32, lambda builder, value: splat(builder, value, lanes))
        self.load_f32 = load(f32, v_f32, lambda builder, value: value)
        self.load_bytes = load(byte, vector(I8, 4 * lanes), lambda builder, value: value)
        self.load_bf16 = load(f32, vector(I16, lanes), bf16)
        if has_half_and_fma:
            self.load_f16 = load(f32, vector(HALF, lanes), lambda builder, value: builder.fpext(value, v_f32))
        else:
            self.load_f16 = load(f32, vector(I16, lanes), lambda builder, value: f16_to_f32(builder, value, lanes))

        narrow = vector(I8, lanes)
        self.load_u8 = load(f32, narrow, lambda builder, value: builder.uitofp(builder.zext(value, v_i32), v_f32))
        self.load_s8 = load(f32, narrow, lambda builder, value: builder.sitofp(builder.sext(value, v_i32), v_f32))

        self.add = binary(f32, lambda b, x, y: b.fadd(x, y))
        self.sub = binary(f32, lambda b, x, y: b.fsub(x, y))
        self.mul = binary(f32, lambda b, x, y: b.fmul(x, y))
        self.div = binary(f32, lambda b, x, y: b.fdiv(x, y))
        self.add_i32 = binary(i32, lambda b, x, y: b.add(x, y))
        self.sub_i32 = binary(i32, lambda b, x, y: b.sub(x, y))
        self.mul_i32 = binary(i32, lambda b, x, y: b.mul(x, y))
        self.maximum = binary(f32, lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
        self.absolute = unary(f32, f32, lambda b, x: call(b, f"llvm.fabs.v{lanes}f32", v_f32, [x]))
        self.larger = binary(f32, self._larger)
        self.as_f32 = unary(f32, i32, lambda b, x: b.sitofp(x, v_f32))
        self.low_nibbles = unary(byte, byte, lambda b, x: b.and_(x, constant(I8, 4 * lanes, 15)))
        self.high_nibbles = unary(byte, byte, lambda b, x: b.lshr(x, constant(I8, 4 * lanes, 4)))
        self.raised = unary(byte, byte, lambda b, x: self._shifted(b, x, b.shl, ir.Constant(I32, 4)))
        self.round_i32 = unary(i32, f32, self._round_i32)
        self.exp = unary(f32, f32, self._exp)

        @intrinsic
        def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
            """A * b + c, rounded once where the CPU can (it must: the portable form rounds twice)."""

            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                if has_half_and_fma:
                    return call(builder, f"llvm.fma.v{lanes}f32", v_f32, list(args))
                return builder.fadd(builder.fmul(args[0], args[1]), args[2])

            return f32(f32, f32, f32), emit

        @intrinsic
        def splat_f32(typing: Any, x: Any) -> Any:
            return f32(types.float32), lambda context, builder, signature, args: splat(builder, args[0], lanes)

        @intrinsic
        def splat_i32(typing: Any, x: Any) -> Any:
            return i32(types.int32), lambda context, builder, signature, args: splat(builder, args[0], lanes)

        @intrinsic
        def broadcast4(typing: Any, array: Any, index: Any) -> Any:
            """Four bytes of ``array`` repeated in every lane."""

            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                at = pointer(context, builder, signature.args[0], args[0], args[1], I32)
                return builder.bitcast(splat(builder, builder.load(at, align=1), lanes), vector(I8, 4 * lanes))

            return byte(array, types.intp), emit

        @intrinsic
        def with_high_bits(typing: Any, low: Any, plane: Any, shift: Any, mask: Any) -> Any:
            """Low | (plane >> shift) & mask in every byte; the bits that mask keeps must come from the byte itself."""

            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                low, plane, shift, mask = args
                moved = self._shifted(builder, plane, builder.lshr, builder.trunc(shift, I32))
                return builder.or_(low, builder.and_(moved, splat(builder, builder.trunc(mask, I8), 4 * lanes)))

            return byte(byte, byte, types.int64, types.int64), emit

        @intrinsic
        def splat_byte(typing: Any, value: Any) -> Any:
            """The low byte of ``value`` everywhere."""

            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return splat(builder, builder.trunc(args[0], I8), 4 * lanes)

            return byte(types.int64), emit

        @intrinsic
        def store_f32(typing: Any, array: Any, index: Any, value: Any) -> Any:
            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                builder.store(args[2], pointer(context, builder, signature.args[0], args[0], args[1], v_f32), align=1)
                return context.get_dummy_value()

            return types.void(array, types.intp, f32), emit

        def narrow_f16(builder: Any, value: Any, count: int) -> Any:
            if has_half_and_fma:
                return builder.fptrunc(value, vector(HALF, count))
            return f32_to_f16(builder, value, count)

        @intrinsic
        def store_f16(typing: Any, array: Any, index: Any, value: Any) -> Any:
            """Store every lane rounded to f16, ties to even: 2·W bytes."""

            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                narrow = narrow_f16(builder, args[2], lanes)
                builder.store(narrow, pointer(context, builder, signature.args[0], args[0], args[1], narrow.type), align=1)
                return context.get_dummy_value()

            return types.void(array, types.intp, f32), emit

        @intrinsic
        def store_scalar_f16(typing: Any, array: Any, index: Any, value: Any) -> Any:
            """Store one f32 rounded to f16, ties to even: 2 bytes."""

            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                narrow = _one(builder, narrow_f16(builder, splat(builder, args[2], 1), 1))
                builder.store(narrow, pointer(context, builder, signature.args[0], args[0], args[1], narrow.type), align=1)
                return context.get_dummy_value()

            return types.void(array, types.intp, types.float32), emit

        @intrinsic
        def store_i8(typing: Any, array: Any, index: Any, value: Any) -> Any:
            """Store the low byte of every lane: W bytes."""

            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                narrow = vector(I8, lanes)
                at = pointer(context, builder, signature.args[0], args[0], args[1], narrow)
                builder.store(builder.trunc(args[2], narrow), at, align=1)
                return context.get_dummy_value()

            return types.void(array, types.intp, i32), emit

        @intrinsic
        def reduce_add(typing: Any, v: Any) -> Any:
            return types.float32(f32), lambda context, builder, signature, args: self._tree(builder, args[0], "fadd")

        @intrinsic
        def reduce_add_i32(typing: Any, v: Any) -> Any:
            return types.int32(i32), lambda context, builder, signature, args: self._tree(builder, args[0], "add")

        @intrinsic
        def reduce_max(typing: Any, v: Any) -> Any:
            return types.float32(f32), lambda context, builder, signature, args: self._tree(builder, args[0], "max")

        @intrinsic
        def reduce_larger(typing: Any, v: Any) -> Any:
            return types.float32(f32), lambda context, builder, signature, args: self._tree(builder, args[0], "larger")

        self.fma, self.splat, self.splat_i32, self.broadcast4 = fma, splat_f32, splat_i32, broadcast4
        self.store_f32, self.store_i8 = store_f32, store_i8
        self.store_f16, self.store_scalar_f16 = store_f16, store_scalar_f16
        self.reduce_add, self.reduce_add_i32 = reduce_add, reduce_add_i32
        self.reduce_max, self.reduce_larger = reduce_max, reduce_larger
        self.with_high_bits, self.splat_byte = with_high_bits, splat_byte

    def _shifted(self, builder: Any, value: Any, shift: Any, count: Any) -> Any:
        """Bytes shifted as the words they make up, since few CPUs shift bytes; bits cross into the next byte."""
        words = builder.bitcast(value, vector(I32, self.lanes))
        return builder.bitcast(shift(words, splat(builder, count, self.lanes)), value.type)

    def _tree(self, builder: Any, value: Any, kind: str) -> Any:
        """Reduce lanes by halves, so the order is fixed: lane i meets lane i + half."""
        lanes = self.lanes
        while lanes > 1:
            lanes //= 2
            undefined = ir.Constant(value.type, ir.Undefined)
            low = builder.shuffle_vector(value, undefined, ir.Constant(vector(I32, lanes), list(range(lanes))))
            high = builder.shuffle_vector(value, undefined, ir.Constant(vector(I32, lanes), list(range(lanes, 2 * lanes))))
            if kind == "max":
                value = builder.select(builder.fcmp_ordered(">", low, high), low, high)
            elif kind == "larger":
                value = self._larger(builder, low, high)
            else:
                value = getattr(builder, kind)(low, high)
        return builder.extract_element(value, ir.Constant(I32, 0))

    def _larger(self, builder: Any, x: Any, y: Any) -> Any:
        """The larger of two that are not negative; NaN is the largest of all, which no comparison of floats would make it."""
        a, b = (builder.bitcast(side, ir.VectorType(I32, x.type.count)) for side in (x, y))
        return builder.bitcast(builder.select(builder.icmp_signed(">", a, b), a, b), x.type)  # one integer maximum

    def _round_i32(self, builder: Any, value: Any) -> Any:
        """Nearest integer, ties to even, as i32."""
        v_f32 = vector(FLOAT, self.lanes)
        whole = call(builder, f"llvm.rint.v{self.lanes}f32", v_f32, [value])
        return builder.fptosi(whole, vector(I32, self.lanes))

    def _exp(self, builder: Any, value: Any) -> Any:
        """e^value, relative error below 2.5e-7 (a few ulp); below -69 it is 0, above 88.37 infinite.

        NaN stays NaN.
        """
        lanes, v_f32 = self.lanes, vector(FLOAT, self.lanes)
        low, high = constant(FLOAT, lanes, _EXP_LOW), constant(FLOAT, lanes, _EXP_HIGH)
        is_tiny = builder.fcmp_ordered(">", low, value)
        value = builder.select(is_tiny, low, value)
        value = builder.select(builder.fcmp_ordered("<", high, value), high, value)
        # n = round(x log2 e); f = x log2 e - n computed as (x - n ln2) log2 e with ln2 in two parts, so f keeps its bits
        whole = call(builder, f"llvm.rint.v{lanes}f32", v_f32, [builder.fmul(value, constant(FLOAT, lanes, _LOG2_E))])
        rest = builder.fsub(value, builder.fmul(whole, constant(FLOAT, lanes, 0.693359375)))
        rest = builder.fsub(rest, builder.fmul(whole, constant(FLOAT, lanes, -2.12194440e-4)))
        fraction = builder.fmul(rest, constant(FLOAT, lanes, _LOG2_E))
        result = constant(FLOAT, lanes, _EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            product = builder.fmul(result, fraction, flags=("contract",))
            result = builder.fadd(product, constant(FLOAT, lanes, coefficient), flags=("contract",))
        power = builder.add(builder.fptosi(whole, vector(I32, lanes)), constant(I32, lanes, 127))
        power = builder.bitcast(builder.shl(power, constant(I32, lanes, 23)), v_f32)
        return builder.select(is_tiny, constant(FLOAT, lanes, 0.0), builder.fmul(result, power))


def _scalar_load(stored: ir.Type, widen: Any) -> Any:
    @intrinsic
    def op(typing: Any, array: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at = pointer(context, builder, signature.args[0], args[0], args[1], stored)
            return widen(builder, builder.load(at, align=1))

        return types.float32(array, types.intp), emit

    return op


def _one(builder: Any, vector_value: Any) -> Any:
    return builder.extract_element(vector_value, ir.Constant(I32, 0))


@intrinsic
def store_scalar_f32(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Store one f32 at any place: 4 bytes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], pointer(context, builder, signature.args[0], args[0], args[1], FLOAT), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), emit


load_scalar_f32 = _scalar_load(FLOAT, lambda builder, value: value)
load_scalar_f16 = _scalar_load(vector(I16, 1), lambda builder, value: _one(builder, f16_to_f32(builder, value, 1)))
load_scalar_bf16 = _scalar_load(
    I16,
    lambda builder, value: builder.bitcast(builder.shl(builder.zext(value, I32), ir.Constant(I32, 16)), FLOAT),
)
