"""Single words out of and into byte arrays, wherever they start: what moving stored blocks takes.

Values are whole numbers of 64 bits in between, so that shifts and masks in kernels need no casts.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from deepthin.engine.simd._ir import I16, I32, I64, intrinsic, pointer


def _load(stored: ir.Type) -> Any:
    @intrinsic
    def op(typing: Any, array: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at = pointer(context, builder, signature.args[0], args[0], args[1], stored)
            return builder.zext(builder.load(at, align=1), I64)

        return types.int64(array, types.intp), emit

    return op


def _store(stored: ir.Type) -> Any:
    @intrinsic
    def op(typing: Any, array: Any, index: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at = pointer(context, builder, signature.args[0], args[0], args[1], stored)
            builder.store(builder.trunc(args[2], stored), at, align=1)
            return context.get_dummy_value()

        return types.void(array, types.intp, types.int64), emit

    return op


# (array, index): 2 or 4 bytes from byte ``index`` on, little-endian, without sign
load_half, load_word = _load(I16), _load(I32)
# (array, index, value): the low 2 or 4 bytes of ``value``
store_half, store_word = _store(I16), _store(I32)
