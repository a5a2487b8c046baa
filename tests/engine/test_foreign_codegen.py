"""Machine code for CPUs that are not here: the instruction each target is for, and none that the CPU lacks.

The arm64 kernels' results are checked under emulation, by ``tests/arm64/run.sh``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cross_compile import kernel_assembly

BLOCK_KERNELS = ("matvec_q4_0", "matvec_q8_0", "tiles_q4_0", "tiles_q8_0", "tiles_q5_0")
ARM_DOTS = r"\b(sdot|udot|usdot|smmla|ummla|usmmla)\b"
# LLVM's own list for these CPUs names neither dotprod nor i8mm; the system does
ARM_LIST = "+aes,+crc,+fp-armv8,+lse,+neon,-rand,+sha2,-sve"


def _dots(text: str) -> set[str]:
    return set(re.findall(ARM_DOTS, text))


@pytest.mark.parametrize(("cpu", "hwcap"), [("cortex-a76", "dotprod"), ("generic", "dotprod")])
def test_dot_products_where_the_system_lists_them_even_for_a_cpu_unknown_to_llvm(tmp_path: Path, cpu: str, hwcap: str) -> None:
    code = kernel_assembly(tmp_path, "aarch64", cpu, ARM_LIST, hwcap=hwcap)
    assert code["target"] == "neon_dotprod"
    for name in BLOCK_KERNELS:
        assert _dots(code[name]) == {"sdot"}, name
        assert "ld1r" in code[name], f"{name} does not broadcast four activations by one load"
    assert {"fcvtl", "fmla"} <= set(re.findall(r"\b[a-z]\w+\b", code["matvec_f16"]))


def test_matrix_products_in_prefill_where_the_system_lists_them(tmp_path: Path) -> None:
    code = kernel_assembly(tmp_path, "aarch64", "neoverse-v1", ARM_LIST, hwcap="dotprod i8mm")
    assert code["target"] == "neon_i8mm"
    for name in BLOCK_KERNELS:
        assert _dots(code[name]) == {"smmla" if name.startswith("tiles") else "sdot"}, name


def test_no_dot_product_where_the_system_lists_none(tmp_path: Path) -> None:
    code = kernel_assembly(tmp_path, "aarch64", "cortex-a72", ARM_LIST)
    assert code.pop("target") == "neon"
    for name, text in code.items():
        assert not _dots(text), name
    for name in BLOCK_KERNELS:
        assert {"smull", "sadalp"} <= set(re.findall(r"\b[a-z]\w+\b", code[name])), name


def test_arm64_threads_wait_with_instructions_of_their_own(tmp_path: Path) -> None:
    code = kernel_assembly(tmp_path, "aarch64", "generic", simd="portable")
    assert code["target"] == "portable"
    words = re.findall(r"\b[a-z]\w+\b", code["wait_while"].lower())
    assert {"isb", "ldar", "cntvct_el0", "syscall"} <= set(words)


@pytest.mark.parametrize("cpu", ["alderlake", "gracemont"])  # the second is what LLVM calls an N100
def test_avx_vnni_takes_the_vex_form(tmp_path: Path, cpu: str) -> None:
    code = kernel_assembly(tmp_path, "x86_64", cpu, "+avx,+avx2,+fma,+f16c,+avxvnni")
    assert code.pop("target") == "avx_vnni"
    for name in BLOCK_KERNELS:
        assert re.search(r"\{vex\}\s+vpdpbusd\s.*%ymm", code[name]), name
        assert len(re.findall("vpdpbusd", code[name])) == len(re.findall(r"\{vex\}\s+vpdpbusd", code[name])), name
    for name, text in code.items():
        assert not re.search("zmm|[xy]mm(1[6-9]|[23][0-9])|%k[0-7]", text), f"{name} needs AVX-512"
