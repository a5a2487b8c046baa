"""Which SIMD target this process compiles for, decided once and before any code generation.

LLVM aborts the process when code asks for an instruction the code-generation target lacks, so the choice follows what
Numba will really compile for (``NUMBA_CPU_NAME`` / ``NUMBA_CPU_FEATURES`` where set, else the host), and a forced target
that does not fit is refused here.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass

from deepthin.engine.errors import UsageError

# target -> LLVM features its kernels need, best first
TARGETS: dict[str, tuple[str, ...]] = {
    "avx512_vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}


@dataclass(frozen=True, slots=True)
class CodegenCpu:
    """What Numba compiles for: LLVM's CPU name and the features that are on."""

    name: str
    features: frozenset[str]


@functools.cache
def codegen_cpu() -> CodegenCpu:
    """The code-generation target of this process."""
    import llvmlite.binding as llvm

    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    text = os.environ.get("NUMBA_CPU_FEATURES")
    if text is None:
        on = (feature for feature, is_on in llvm.get_host_cpu_features().items() if is_on)
        return CodegenCpu(name, frozenset() if name == "generic" else frozenset(on))
    return CodegenCpu(name, frozenset(part[1:] for part in text.split(",") if part.startswith("+")))


def has_half_and_fma() -> bool:
    """Whether code may widen f16 and fuse multiply-add in hardware: F16C and FMA on x86, always on arm64."""
    return codegen_cpu().features.issuperset(("f16c", "fma")) or platform.machine().lower() in ("aarch64", "arm64")


@functools.cache
def simd_target() -> str:
    """Name of the kernels' target: ``DEEPTHIN_SIMD`` where set, else the best one the code-generation CPU supports.

    Raises:
        UsageError: ``DEEPTHIN_SIMD`` names no target, or one this CPU cannot run.
    """
    cpu = codegen_cpu()
    usable = [name for name, needs in TARGETS.items() if cpu.features.issuperset(needs)]
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
