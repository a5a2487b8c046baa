"""What threads need from the CPU and the kernel: atomics, a pause, a cycle counter, and parking.

Numba has no atomics of its own and hoists plain loads out of spin loops (numba/numba#1351), so every shared word goes
through here. Words are int32, the size a futex takes.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba.core import types

from deepthin.engine.simd._ir import I32, I64, call, intrinsic, pointer

_MACHINE = platform.machine().lower()
_IS_X86 = _MACHINE in ("x86_64", "amd64")
_IS_ARM64 = _MACHINE in ("aarch64", "arm64")
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(_MACHINE) if sys.platform == "linux" else None
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129  # Source: Linux include/uapi/linux/futex.h


@intrinsic
def atomic_load(typing: Any, array: Any, index: Any) -> Any:
    """Acquire-load int32 ``array[index]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(context, builder, signature.args[0], args[0], args[1], I32), "acquire", 4)

    return types.int32(array, types.intp), emit


@intrinsic
def atomic_add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to int32 ``array[index]`` and return what was there before; sequentially consistent."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = pointer(context, builder, signature.args[0], args[0], args[1], I32)
        return builder.atomic_rmw("add", at, args[2], "seq_cst")

    return types.int32(array, types.intp, types.int32), emit


@intrinsic
def atomic_exchange(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Store int32 ``value`` and return what was there before; sequentially consistent, so later loads see later."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = pointer(context, builder, signature.args[0], args[0], args[1], I32)
        return builder.atomic_rmw("xchg", at, args[2], "seq_cst")

    return types.int32(array, types.intp, types.int32), emit


@intrinsic
def never_inline(typing: Any) -> Any:
    """Keep the function this stands in out of its callers: compiled once instead of once per call site."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def spin_pause(typing: Any) -> Any:
    """Tell the core that this is a spin loop (``pause`` on x86, ``isb`` on arm64)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif _IS_ARM64:
            call(builder, "llvm.aarch64.isb", ir.VoidType(), [ir.Constant(I32, 15)])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def read_cycles(typing: Any) -> Any:
    """A counter that runs at a constant rate (``rdtsc``, ``CNTVCT_EL0``); its rate is calibrated at run time."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call(builder, "llvm.readcyclecounter", I64, [])

    return types.int64(), emit


@intrinsic
def futex_wait(typing: Any, array: Any, index: Any, expected: Any) -> Any:
    """Sleep while int32 ``array[index]`` equals ``expected``; may return early, so callers loop.

    Where there is no futex the thread only gives up its time slice.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = pointer(context, builder, signature.args[0], args[0], args[1], I32)
        _park(builder, at, _FUTEX_WAIT_PRIVATE, args[2])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int32), emit


@intrinsic
def futex_wake(typing: Any, array: Any, index: Any) -> Any:
    """Wake every thread asleep on ``array[index]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _FUTEX_CALL is not None:
            at = pointer(context, builder, signature.args[0], args[0], args[1], I32)
            _park(builder, at, _FUTEX_WAKE_PRIVATE, ir.Constant(I32, 2**31 - 1))
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


def _park(builder: Any, at: Any, operation: int, value: Any) -> None:
    if _FUTEX_CALL is None:
        call(builder, "SwitchToThread" if sys.platform == "win32" else "sched_yield", I32, [])
        return
    null = ir.Constant(at.type, None)
    number = ir.Constant(I64, _FUTEX_CALL)
    syscall = ir.FunctionType(I64, [I64], var_arg=True)
    function = builder.module.globals.get("syscall") or ir.Function(builder.module, syscall, "syscall")
    builder.call(function, [number, at, ir.Constant(I32, operation), value, null])
