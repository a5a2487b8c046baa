"""Helpers shared by the intrinsics: vector Numba types, pointers into arrays, calls of LLVM intrinsics.

Pointers are formed by GEP from the array's own data pointer, never through integers: LLVM 22 loses provenance
otherwise and loads silently read the wrong memory (numba/numba#10695).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic as _numba_intrinsic
from numba.extending import models, register_model

from deepthin.engine.cpu import codegen_features

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()
_ELEMENTS = {"i8": I8, "i16": I16, "i32": I32, "f32": FLOAT}


F = TypeVar("F", bound=Callable[..., Any])


def intrinsic(function: F) -> F:
    """Numba's decorator, typed to return the function unchanged."""
    return _numba_intrinsic(function)  # type: ignore[no-any-return]


class Vec(types.Type):
    """Numba type of an LLVM vector; equal by element and lane count."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vec({element}, {lanes})")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vec: Vec) -> None:
        super().__init__(manager, vec, vector(_ELEMENTS[vec.element], vec.lanes))


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    """LLVM vector type."""
    return ir.VectorType(element, lanes)


def constant(element: ir.Type, lanes: int, value: float) -> ir.Constant:
    """A vector with ``value`` in every lane."""
    return ir.Constant(vector(element, lanes), [value] * lanes)


def pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: ir.Type) -> Any:
    """Pointer to element ``index`` of a Numba array, seen as ``pointee``."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """A vector with ``scalar`` in every lane."""
    undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(vector(I32, lanes), [0] * lanes))


def call(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    """Call the LLVM intrinsic or external function ``name``."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def needs(builder: Any, features: str) -> None:
    """Let LLVM use ``features`` (such as ``+dotprod``) in the function being emitted, and in no other.

    For CPUs that have more than LLVM's host list says. The attribute replaces that list, so it is repeated in it: what it
    switches off (SVE where the system hides it) must stay off. llvmlite's own ``add`` knows no attribute with a value.
    """
    listed = ",".join(filter(None, (codegen_features(), features)))
    set.add(builder.function.attributes, f'"target-features"="{listed}"')


def halves(builder: Any, value: Any) -> list[Any]:
    """The lower and the upper half of a vector."""
    lanes = value.type.count // 2
    undefined = ir.Constant(value.type, ir.Undefined)
    picks = (list(range(lanes)), list(range(lanes, 2 * lanes)))
    return [builder.shuffle_vector(value, undefined, ir.Constant(vector(I32, lanes), pick)) for pick in picks]


def joined(builder: Any, low: Any, high: Any) -> Any:
    """One vector out of two of equal length."""
    lanes = 2 * low.type.count
    return builder.shuffle_vector(low, high, ir.Constant(vector(I32, lanes), list(range(lanes))))
