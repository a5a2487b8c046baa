"""Which target is chosen for which CPU, before any code is generated."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import pytest

from deepthin.engine import cpu
from deepthin.engine.errors import UsageError

ALDER_LAKE = "+avx,+avx2,+fma,+f16c,+avxvnni"
ZEN4 = "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"
A_LIST = "+neon,+crc,-sve"  # LLVM's of an arm64 Linux host: never dotprod or i8mm


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX", "DEEPTHIN_SIMD"):
        monkeypatch.delenv(name, raising=False)
    caches = (cpu.codegen_features, cpu.codegen_cpu, cpu.simd_target)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _pretend(
    monkeypatch: pytest.MonkeyPatch, machine: str, llvm_list: str | None, *system: str, name: str = "some-cpu"
) -> None:
    import llvmlite.binding as llvm
    from llvmlite.binding.targets import FeatureMap

    def features() -> object:
        if llvm_list is None:
            raise RuntimeError("failed to get host cpu features.")
        return FeatureMap({part[1:]: part[0] == "+" for part in llvm_list.split(",")})

    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: name)
    monkeypatch.setattr(llvm, "get_host_cpu_features", features)
    monkeypatch.setattr(cpu, "arm64_features", lambda: set(system))


@pytest.mark.parametrize(
    ("machine", "llvm_list", "system", "targets"),
    [
        ("x86_64", ZEN4, (), "avx512_vnni avx_vnni avx2 portable"),
        ("x86_64", ALDER_LAKE, (), "avx_vnni avx2 portable"),
        ("x86_64", "+avx,+avx2,+fma,+f16c,-avxvnni", (), "avx2 portable"),
        ("x86_64", "+sse4.2,-avx2", (), "portable"),
        ("x86_64", "+sse4.2", ("dotprod", "i8mm"), "portable"),
        ("aarch64", A_LIST, ("dotprod", "i8mm"), "neon_i8mm neon_dotprod neon portable"),
        ("aarch64", A_LIST, ("dotprod",), "neon_dotprod neon portable"),
        ("aarch64", A_LIST, (), "neon portable"),
        ("arm64", None, ("dotprod",), "neon_dotprod neon portable"),
        ("AMD64", None, (), "portable"),
    ],
)
def test_targets_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, machine: str, llvm_list: str | None, system: tuple[str, ...], targets: str
) -> None:
    _pretend(monkeypatch, machine, llvm_list, *system)
    assert cpu.usable_targets() == targets.split()
    assert cpu.simd_target() == targets.split()[0]
    assert cpu.has_half_and_fma() is (machine in ("aarch64", "arm64") or "+f16c" in (llvm_list or ""))


@pytest.mark.parametrize(
    ("variables", "targets"),
    [
        ({"NUMBA_CPU_NAME": "generic"}, "neon portable"),
        ({"NUMBA_CPU_NAME": "cortex-a53", "NUMBA_CPU_FEATURES": "+neon"}, "neon portable"),
        ({"NUMBA_CPU_FEATURES": "+neon,+dotprod"}, "neon_dotprod neon portable"),
        ({"NUMBA_CPU_FEATURES": "+neon,+dotprod,+i8mm"}, "neon_dotprod neon portable"),  # the system has no i8mm
    ],
)
def test_what_numba_is_told_to_compile_for_narrows_what_the_system_has(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], targets: str
) -> None:
    _pretend(monkeypatch, "aarch64", A_LIST, "dotprod")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cpu.usable_targets() == targets.split()


def test_numba_told_to_compile_for_more_than_an_x86_cpu_has_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "x86_64", "+avx,+avx2,+fma,+f16c,-avxvnni")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+fma,+f16c,+avxvnni,+avx512f")
    with pytest.raises(UsageError, match="NUMBA_CPU_FEATURES has avx512f, avxvnni, which CPU 'some-cpu' lacks; leave that out"):
        cpu.usable_targets()
    cpu.codegen_cpu.cache_clear()
    cpu.codegen_features.cache_clear()
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+fma,+f16c")
    assert cpu.usable_targets() == ["avx2", "portable"]


def test_avx_switched_off_in_numba_is_off_here(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "x86_64", ALDER_LAKE)
    monkeypatch.setenv("NUMBA_ENABLE_AVX", "0")
    assert cpu.usable_targets() == ["portable"]
    assert "+fma" in cpu.codegen_features() and "+avx" not in cpu.codegen_features()


def test_a_cpu_that_llvm_cannot_name_keeps_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "x86_64", ALDER_LAKE, name="generic")
    assert cpu.simd_target() == "avx_vnni"


def test_forcing_takes_a_lesser_target_and_refuses_a_better_one_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "aarch64", A_LIST, "dotprod")
    monkeypatch.setenv("DEEPTHIN_SIMD", "neon")
    assert cpu.simd_target() == "neon"
    cpu.simd_target.cache_clear()
    monkeypatch.setenv("DEEPTHIN_SIMD", "neon_i8mm")
    with pytest.raises(UsageError, match="neon_i8mm needs i8mm, which CPU 'some-cpu' lacks; use one of neon_dotprod, neon, po"):
        cpu.simd_target()


@pytest.mark.parametrize("target", cpu.TARGETS)
def test_this_cpu_takes_the_targets_it_has_and_refuses_the_others(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    usable = target in cpu.usable_targets()
    monkeypatch.setenv("DEEPTHIN_SIMD", target)
    if usable:
        assert cpu.simd_target() == target
    else:
        with pytest.raises(UsageError, match=f"DEEPTHIN_SIMD={target} needs .*which CPU .* lacks; use one of .*portable"):
            cpu.simd_target()


class _Function:
    """A C function that takes the types set on it and answers from a table."""

    def __init__(self, answers: dict[object, int]) -> None:
        self.answers = answers

    def __call__(self, key: object, *rest: object) -> int:
        if not rest:  # getauxval
            return self.answers.get(key, 0)
        if key not in self.answers:  # sysctlbyname
            return -1
        rest[0]._obj.value = self.answers[key]  # type: ignore[attr-defined]
        return 0


@pytest.mark.parametrize(
    ("system", "answers", "found"),
    [
        ("linux", {16: 1 << 20, 26: 1 << 13}, {"dotprod", "i8mm"}),
        ("linux", {16: 1 << 20, 26: 1 << 12}, {"dotprod"}),
        ("linux", {16: ~(1 << 20) & 0xFFFFFFFF, 26: 0}, set()),
        ("darwin", {b"hw.optional.arm.FEAT_DotProd": 1, b"hw.optional.arm.FEAT_I8MM": 0}, {"dotprod"}),
        ("darwin", {b"hw.optional.arm.FEAT_DotProd": 1, b"hw.optional.arm.FEAT_I8MM": 1}, {"dotprod", "i8mm"}),
        ("darwin", {}, set()),  # systems before macOS 12 do not know these names
    ],
)
def test_what_the_system_says_of_an_arm64_cpu(
    monkeypatch: pytest.MonkeyPatch, system: str, answers: dict[object, int], found: set[str]
) -> None:
    class Library:
        def __init__(self, name: None) -> None:
            function = _Function(answers)
            setattr(self, "sysctlbyname" if system == "darwin" else "getauxval", function)

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(cpu.sys, "platform", system)  # type: ignore[attr-defined]
    assert cpu.arm64_features() == found


def test_a_system_without_either_function_lists_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: None) -> object:
        raise TypeError("bad argument type for built-in operation")  # what Windows says to CDLL(None)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert cpu.arm64_features() == set()
