"""AVX-VNNI, the 256-bit form without AVX-512: 8 lanes, one ``vpdpbusd`` per 32 products (Alder Lake, N100 and later)."""

from __future__ import annotations

from typing import Any

from deepthin.engine.simd._ir import I32, Vec, call, intrinsic, vector

W = 8
Q8_BIAS = 128  # vpdpbusd wants its first operand unsigned: 8-bit weights are stored as q + 128

_i32, _bytes = Vec("i32", W), Vec("i8", 4 * W)


@intrinsic
def _vpdpbusd(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + dot4(u8 weights, i8 activations) per lane; exact, the four products are summed in i32.

    LLVM names the AVX-512 intrinsic and picks the VEX form where only that exists.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = vector(I32, W)  # the i32 spelling of the operands is accepted by every LLVM version
        operands = [args[0], builder.bitcast(args[1], words), builder.bitcast(args[2], words)]
        return call(builder, "llvm.x86.avx512.vpdpbusd.256", words, operands)

    return _i32(_i32, _bytes, _bytes), emit


dot4_nibbles = _vpdpbusd
dot4_q8 = _vpdpbusd
