"""What functions that are made of one another need: to become one, with the CPU's dot products in all of it."""

from __future__ import annotations

from typing import Any

from numba.core import types

from deepthin.engine.cpu import simd_target
from deepthin.engine.simd._ir import intrinsic, needs

_DOTS = "+dotprod" if simd_target() in ("neon_dotprod", "neon_i8mm") else ""


def _allow_dots(builder: Any) -> None:
    if _DOTS:
        needs(builder, _DOTS)


@intrinsic
def always_inline(typing: Any) -> Any:
    """Put the function this stands in into each of its callers, however long it is, so that they share loads and constants.

    LLVM does so without a look at what the caller may use, so that must have :func:`allow_dots` or this too.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("alwaysinline")
        _allow_dots(builder)
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def allow_dots(typing: Any) -> Any:
    """Let LLVM use the target's dot products in the function this stands in, where its own list of features lacks them."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _allow_dots(builder)
        return context.get_dummy_value()

    return types.void(), emit
