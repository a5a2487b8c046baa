"""The kernels' machine code as text, for this CPU or for another: LLVM and Numba compile it here, nothing runs it.

Numba compiles for the process it is in, so a child process believes that it is the other machine: LLVM's triple, the CPU and
the features that LLVM and the system say it has. What the child compiles it never calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import json, platform, sys
import llvmlite.binding as llvm
import llvmlite.binding.targets as targets

import deepthin.engine.cpu as cpu

machine, cpu_name, features, system = sys.argv[1:]
if machine:
    host = targets.FeatureMap({part[1:]: part[0] == "+" for part in features.split(",") if part})
    platform.machine = lambda: machine
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for module in (llvm, targets):
        module.get_process_triple = module.get_default_triple = lambda: machine + "-unknown-linux-gnu"
        module.get_host_cpu_name, module.get_host_cpu_features = lambda: cpu_name, lambda: host
    cpu.arm64_features = lambda: set(system.split())

from numba import float32, int32, int64, int8, uint8
from deepthin.engine.jit import assembly
from deepthin.engine.kernels import matmul, matvec, sync

f32, i32, i8, u8, n = float32[::1], int32[::1], int8[::1], uint8[::1], int64
block_vector = (f32, n, u8, n, n, n, i8, n, f32, i32, n, n, n)
float_vector = (f32, n, u8, n, n, f32, n, n, n)
block_tiles = (f32, n, n, u8, n, n, n, i8, n, n, f32, i32, n, n, n, n, n)
kernels = {
    matvec.matvec_q4_0: block_vector,
    matvec.matvec_q8_0: block_vector,
    matvec.matvec_f16: float_vector,
    matmul.tiles_q4_0: block_tiles,
    matmul.tiles_q8_0: block_tiles,
    matmul.tiles_q5_0: block_tiles,
    sync.wait_while: (i32, n, n, int32, n),
}
found = {"target": cpu.simd_target()}
for kernel, signature in kernels.items():
    kernel.compile(signature)
    found[kernel.__name__] = assembly(kernel)
print(json.dumps(found))
"""


def kernel_assembly(
    cache: Path, machine: str = "", cpu: str = "", features: str = "", *, hwcap: str = "", simd: str = ""
) -> dict[str, str]:
    """Assembly text by kernel, and under ``target`` the SIMD target that was chosen.

    Args:
        cache: an empty folder for compiled kernels.
        machine: ``x86_64`` or ``aarch64``; empty for this one as it is.
        cpu: LLVM's name of the CPU.
        features: LLVM's list of the host's features, such as ``+avx2,+fma``.
        hwcap: those that an arm64 system lists besides, apart by blanks.
        simd: the target to force; empty for the best.
    """
    environment = {**os.environ, "DEEPTHIN_CACHE_DIR": str(cache)}
    if machine:
        environment["DEEPTHIN_SIMD"] = simd
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, machine, cpu, features, hwcap],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return dict(json.loads(result.stdout))
