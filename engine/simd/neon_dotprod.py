"""NEON with dot products (Raspberry Pi 5, Graviton2, Apple M1 and later): 8 lanes in two registers, ``sdot`` on each."""

from __future__ import annotations

from typing import Any

from deepthin.engine.simd._ir import I32, Vec, call, halves, intrinsic, joined, needs, vector

W = 8  # two registers share each broadcast of activation bytes
Q8_BIAS = 0

_i32, _bytes = Vec("i32", W), Vec("i8", 4 * W)


@intrinsic
def _sdot(typing: Any, acc: Any, weights: Any, activations: Any) -> Any:
    """Acc + dot4(i8 weights, i8 activations) per lane; exact, and codes 0..127 are the same read signed."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        needs(builder, "+dotprod")
        parts = zip(*(halves(builder, arg) for arg in args), strict=True)
        sums = [call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", vector(I32, 4), list(part)) for part in parts]
        return joined(builder, *sums)

    return _i32(_i32, _bytes, _bytes), emit


dot4_nibbles = _sdot
dot4_q8 = _sdot
