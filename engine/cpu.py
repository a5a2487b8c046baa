"""Which SIMD target this process compiles for, decided once and before any code generation.

LLVM aborts the process when code asks for an instruction the code-generation target lacks, so the choice follows what
Numba will really compile for (``NUMBA_CPU_NAME`` / ``NUMBA_CPU_FEATURES`` where set, else the host), and a forced target
that does not fit is refused here.

On arm64 LLVM's host list never names ``dotprod`` and ``i8mm``; the operating system does, and the intrinsics switch them on for
the functions that hold them (``engine/simd/_ir.py``). Code that needs them is reached only where the system lists them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
from dataclasses import dataclass

from deepthin.engine.errors import UsageError

# target -> features its kernels need, in LLVM's spelling; best first
TARGETS: dict[str, tuple[str, ...]] = {
    "avx512_vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"),
    "avx_vnni": ("avx2", "fma", "f16c", "avxvnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon_i8mm": ("neon", "dotprod", "i8mm"),
    "neon_dotprod": ("neon", "dotprod"),
    "neon": ("neon",),
    "portable": (),
}

# feature -> (auxiliary vector entry, bit) and name of the sysctl
# Source: Linux arch/arm64/include/uapi/asm/hwcap.h and include/uapi/linux/auxvec.h; Apple, "Determining instruction set
# characteristics"
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_ARM64_LINUX = {"dotprod": (_AT_HWCAP, 20), "i8mm": (_AT_HWCAP2, 13)}
_ARM64_MACOS = {"dotprod": b"hw.optional.arm.FEAT_DotProd", "i8mm": b"hw.optional.arm.FEAT_I8MM"}


@dataclass(frozen=True, slots=True)
class CodegenCpu:
    """What Numba compiles for: LLVM's CPU name and the features that kernels may use."""

    name: str
    features: frozenset[str]


def _is_arm64() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


@functools.cache
def codegen_features() -> str:
    """The feature list Numba hands to LLVM, such as ``+avx2,-sve``; empty where LLVM is left to the CPU's name.

    Source: Numba's ``core/config.py`` and ``core/codegen.py``.
    """
    import llvmlite.binding as llvm

    text = os.environ.get("NUMBA_CPU_FEATURES")
    if text is not None:
        return text
    if os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic":
        return ""
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on this system
        return ""
    if os.environ.get("NUMBA_ENABLE_AVX") == "0":
        features.update({name: False for name in features if name.startswith("avx")})
    return str(features.flatten())


@functools.cache
def codegen_cpu() -> CodegenCpu:
    """The code-generation target of this process.

    Raises:
        UsageError: ``NUMBA_CPU_FEATURES`` has Numba compile for features of x86 that this CPU lacks.
    """
    import llvmlite.binding as llvm

    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = {part[1:] for part in codegen_features().split(",") if part.startswith("+")}
    if "NUMBA_CPU_FEATURES" in os.environ and not _is_arm64():
        _refuse_absent(features)
    if features.issuperset(("avx512vl", "avx512vnni")):
        features.add("avxvnni")  # the same 256-bit vpdpbusd; LLVM picks the encoding that the CPU has
    if _is_arm64():
        present = arm64_features()
        if "NUMBA_CPU_NAME" in os.environ or "NUMBA_CPU_FEATURES" in os.environ:
            present &= features
        features = features - set(_ARM64_LINUX) | present | {"neon"}
    return CodegenCpu(name, frozenset(features))


def _refuse_absent(features: set[str]) -> None:
    """Numba's own code would stop the process as well as ours, so a lesser target is no way out."""
    import llvmlite.binding as llvm

    with contextlib.suppress(RuntimeError):  # LLVM cannot tell on this system
        host = llvm.get_host_cpu_features()
        lacking = sorted(name for name in features & set().union(*TARGETS.values()) if not host.get(name))
        if lacking:
            raise UsageError(
                f"NUMBA_CPU_FEATURES has {', '.join(lacking)}, which CPU '{llvm.get_host_cpu_name()}' lacks; leave that out"
            )


def arm64_features() -> set[str]:
    """Those of ``dotprod`` and ``i8mm`` that the operating system says all cores have; empty where it does not say."""
    try:
        libc = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return {feature for feature, key in _ARM64_MACOS.items() if _sysctl(libc, key)}
        libc.getauxval.restype, libc.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        return {feature for feature, (entry, bit) in _ARM64_LINUX.items() if libc.getauxval(entry) >> bit & 1}
    except (AttributeError, OSError, TypeError):  # no such function, or (Windows) no such library
        return set()


def _sysctl(libc: ctypes.CDLL, key: bytes) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    return libc.sysctlbyname(key, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)) == 0 and value.value == 1


def has_half_and_fma() -> bool:
    """Whether code may widen f16 and fuse multiply-add in hardware: F16C and FMA on x86, always on arm64."""
    return codegen_cpu().features.issuperset(("f16c", "fma")) or _is_arm64()


def usable_targets() -> list[str]:
    """The targets this process can compile for and run, best first."""
    return [name for name, needs in TARGETS.items() if codegen_cpu().features.issuperset(needs)]


@functools.cache
def simd_target() -> str:
    """Name of the kernels' target: ``DEEPTHIN_SIMD`` where set, else the best one the code-generation CPU supports.

    Raises:
        UsageError: ``DEEPTHIN_SIMD`` names no target, or one this CPU cannot run.
    """
    cpu, usable = codegen_cpu(), usable_targets()
    forced = os.environ.get("DEEPTHIN_SIMD")
    if not forced:
        return usable[0]
    if forced not in TARGETS:
        raise UsageError(f"DEEPTHIN_SIMD={forced!r} is no target; use one of {', '.join(TARGETS)}")
    if forced not in usable:
        lacking = sorted(set(TARGETS[forced]) - cpu.features)
        raise UsageError(
            f"DEEPTHIN_SIMD={forced} needs {', '.join(lacking)}, which CPU '{cpu.name}' lacks; use one of {', '.join(usable)}"
        )
    return forced
