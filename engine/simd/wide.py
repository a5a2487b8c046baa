"""Sums of a block for CPUs that add four byte products to an i32 in one step: nothing is narrow, nothing is widened.

The names are those of ``avx2.py``, where the sums of a block stay in 16 bits as long as they fit.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from deepthin.engine.simd._ir import Vec, intrinsic

Q6_BIAS = 32  # 6-bit codes go in as they are stored


def wide_sums(lanes: int) -> tuple[Any, Any]:
    """``start_narrow`` and ``end_narrow`` for ``lanes`` lanes; in between, ``dot4_nibbles`` adds."""
    i32 = Vec("i32", lanes)

    @intrinsic
    def start_narrow(typing: Any, total: Any) -> Any:
        """The sum itself, from ``total`` on."""
        return i32(i32), lambda context, builder, signature, args: args[0]

    @intrinsic
    def end_narrow(typing: Any, acc: Any, total: Any) -> Any:
        """The sum, which has ``total`` in it."""
        return i32(i32, i32), lambda context, builder, signature, args: args[0]

    return start_narrow, end_narrow


@intrinsic
def together(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The same four vectors; LLVM orders the work on them as it likes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, signature.return_type, args)

    return types.UniTuple(a, 4)(a, b, c, d), emit  # type: ignore[attr-defined]
