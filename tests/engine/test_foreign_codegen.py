"""Machine code for CPUs that are not here: the instruction each target is for, and none that the CPU lacks.

The arm64 kernels' results are checked under emulation, by ``tests/arm64/run.sh``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepthin.engine.formats import FORMATS
from tests.support.cross_compile import kernel_assembly

BLOCK_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt.is_quantized)
PHASES = ("matvec", "tiles")  # decode, prefill
# every instruction that multiplies bytes and adds the products up, of any target
ARM_DOTS = r"\b(sdot|udot|usdot|smmla|ummla|usmmla)\b"
X86_DOTS = r"(\{vex\}\s+)?\b(vpdpbusds?|vpmaddubsw)\b[^\n]*?%([xyz]mm)[^\n]*"
# LLVM's own list for these CPUs names neither dotprod nor i8mm; the system does
ARM_LIST = "+aes,+crc,+fp-armv8,+lse,+neon,-rand,+sha2,-sve"
AVX2_LIST = "+avx,+avx2,+fma,+f16c"


def _words(text: str) -> set[str]:
    return set(re.findall(r"\b[a-z]\w+\b", text.lower()))


def _arm_dots(text: str) -> set[str]:
    return set(re.findall(ARM_DOTS, text))


def _x86_dots(text: str) -> set[str]:
    """Such as ``{vex} vpdpbusd ymm``."""
    return {" ".join(filter(None, (part.strip() for part in found))) for found in re.findall(X86_DOTS, text)}


@pytest.mark.parametrize(("cpu", "formats"), [("cortex-a76", BLOCK_FORMATS), ("generic", ("q4_0", "q8_0"))])
def test_dot_products_where_the_system_lists_them_even_for_a_cpu_unknown_to_llvm(
    tmp_path: Path, cpu: str, formats: tuple[str, ...]
) -> None:
    code = kernel_assembly(tmp_path, "aarch64", cpu, ARM_LIST, hwcap="dotprod", formats=formats)
    assert code["target"] == "neon_dotprod"
    for name in (f"{phase}_{fmt}" for fmt in formats for phase in PHASES):
        assert _arm_dots(code[name]) == {"sdot"}, name
        assert "ld1r" in code[name], f"{name} does not broadcast four activations by one load"
    assert {"fcvtl", "fmla"} <= _words(code["matvec_f16"])


def test_matrix_products_in_prefill_where_the_system_lists_them(tmp_path: Path) -> None:
    code = kernel_assembly(tmp_path, "aarch64", "neoverse-v1", ARM_LIST, hwcap="dotprod i8mm", formats=BLOCK_FORMATS)
    assert code["target"] == "neon_i8mm"
    for fmt in BLOCK_FORMATS:
        assert _arm_dots(code[f"matvec_{fmt}"]) == {"sdot"}, fmt
        assert _arm_dots(code[f"tiles_{fmt}"]) == {"smmla"}, fmt


def test_no_dot_product_where_the_system_lists_none(tmp_path: Path) -> None:
    code = kernel_assembly(tmp_path, "aarch64", "cortex-a72", ARM_LIST, formats=BLOCK_FORMATS)
    assert code.pop("target") == "neon"
    for name, text in code.items():
        assert not _arm_dots(text), name
    for fmt in BLOCK_FORMATS:
        for name in (f"{phase}_{fmt}" for phase in PHASES):
            words = _words(code[name])
            assert {"smull2" if fmt == "q8_0" else "smlal2", "addp"} <= words and "ext" not in words, name


def test_arm64_threads_wait_with_instructions_of_their_own(tmp_path: Path) -> None:
    code = kernel_assembly(tmp_path, "aarch64", "generic", simd="portable", formats=())
    assert code["target"] == "portable"
    assert {"isb", "ldar", "cntvct_el0", "syscall"} <= _words(code["wait_while"])


def test_avx512_vnni_uses_whole_registers(tmp_path: Path) -> None:
    features = AVX2_LIST + ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"
    code = kernel_assembly(tmp_path, "x86_64", "znver4", features, formats=BLOCK_FORMATS)
    assert code["target"] == "avx512_vnni"
    for name in (f"{phase}_{fmt}" for fmt in BLOCK_FORMATS for phase in PHASES):
        assert _x86_dots(code[name]) == {"vpdpbusd zmm"}, name


@pytest.mark.parametrize(("cpu", "formats"), [("alderlake", BLOCK_FORMATS), ("gracemont", ("q4_0", "q8_0"))])
def test_avx_vnni_takes_the_vex_form(tmp_path: Path, cpu: str, formats: tuple[str, ...]) -> None:  # gracemont: LLVM's N100
    code = kernel_assembly(tmp_path, "x86_64", cpu, AVX2_LIST + ",+avxvnni", formats=formats)
    assert code.pop("target") == "avx_vnni"
    for name in (f"{phase}_{fmt}" for fmt in formats for phase in PHASES):
        assert _x86_dots(code[name]) == {"{vex} vpdpbusd ymm"}, name
    _assert_no_avx512(code)


def test_avx2_multiplies_without_vnni(tmp_path: Path) -> None:
    code = kernel_assembly(tmp_path, "x86_64", "znver2", AVX2_LIST, formats=BLOCK_FORMATS)
    assert code.pop("target") == "avx2"
    for name in (f"{phase}_{fmt}" for fmt in BLOCK_FORMATS for phase in PHASES):
        assert _x86_dots(code[name]) == {"vpmaddubsw ymm"}, name
    _assert_no_avx512(code)


def _assert_no_avx512(code: dict[str, str]) -> None:
    for name, text in code.items():
        assert not re.search("zmm|[xy]mm(1[6-9]|[23][0-9])|%k[0-7]", text), f"{name} needs AVX-512"
