"""Compiled kernels hold the instructions they were written for, are reused across processes, and never outlive a change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from deepthin.engine import jit
from deepthin.engine.cpu import simd_target
from deepthin.engine.decoder import Decoder
from deepthin.engine.kernels.sync import PHASE, PHASE_PARKED, ctl_words, publish, wait_while
from deepthin.engine.model import random_model
from deepthin.engine.plan import aligned_bytes
from deepthin.engine.shape import Shape
from tests.support.cross_compile import kernel_assembly

SMALL = Shape.parse("L=1,d=32,heads=2,kv=2,ff=32,vocab=32,tied")
INSTRUCTIONS: dict[str, dict[str, tuple[str, ...]]] = {  # target -> kernel -> what its inner loop must hold
    "avx512_vnni": {
        "matvec_q4_0": ("vpdpbusd", "zmm"),
        "matvec_q8_0": ("vpdpbusd", "zmm"),
        "matvec_f16": ("vcvtph2ps", "vfmadd"),
    },
    "avx_vnni": {
        "matvec_q4_0": ("vpdpbusd", "ymm"),
        "matvec_q8_0": ("vpdpbusd", "ymm"),
        "matvec_f16": ("vcvtph2ps", "vfmadd"),
    },
    "avx2": {"matvec_q4_0": ("vpmaddubsw",), "matvec_q8_0": ("vpsignb", "vpmaddubsw"), "matvec_f16": ("vcvtph2ps", "vfmadd")},
    "neon": {
        "matvec_q4_0": ("smull", "sadalp"),
        "matvec_q8_0": ("smull", "sadalp"),
        "matvec_f16": ("fcvtl", "fmla"),
    },
}
INSTRUCTIONS["neon_dotprod"] = INSTRUCTIONS["neon"] | {"matvec_q4_0": ("sdot",), "matvec_q8_0": ("sdot",)}
INSTRUCTIONS["neon_i8mm"] = INSTRUCTIONS["neon_dotprod"] | {"tiles_q4_0": ("smmla",), "tiles_q8_0": ("smmla",)}


def test_kernels_use_the_instructions_of_their_target(tmp_path: Path) -> None:
    wanted = INSTRUCTIONS.get(simd_target())
    if wanted is None:
        pytest.skip(f"the {simd_target()} target promises no particular instruction")
    code = kernel_assembly(tmp_path)
    assert code["target"] == simd_target()
    for name, words in wanted.items():
        for word in words:
            assert word in code[name], f"{name} holds no {word}"


_PROGRAM = """
import numpy as np, time
from deepthin.engine.kernels.elementwise import add_rows
x = np.zeros(32, np.float32)
add_rows(x, 0, x, 0, 32)
stats = add_rows.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def _run(tree: Path, cache: Path) -> list[int]:
    environment = {**os.environ, "DEEPTHIN_CACHE_DIR": str(cache), "PYTHONPATH": str(tree / "src")}
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=environment, cwd=tree, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [int(word) for word in result.stdout.split()]


def test_cache_is_used_again_and_an_edit_anywhere_in_the_kernels_recompiles(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    tree, cache = tmp_path / "tree", tmp_path / "cache"
    (tree / "src").mkdir(parents=True)
    shutil.copytree(root / "src" / "deepthin", tree / "src" / "deepthin", symlinks=True)
    for folder in ("engine", "search", "export", "profiles", "cli"):
        shutil.copytree(root / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert _run(tree, cache) == [0, 1]
    assert _run(tree, cache) == [1, 0]
    other = tree / "engine" / "simd" / "vectors.py"  # a callee in another file, which Numba alone does not notice
    other.write_text(other.read_text() + "\n# changed\n")
    assert _run(tree, cache) == [0, 1]


def test_what_is_compiled_is_counted_once_and_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "kernel_cache_dir", lambda: None)
    counts: list[int] = []

    def half(a: float) -> float:
        return a / 2

    halve = jit.kernel(half)

    def quarter(a: float) -> float:
        return halve(halve(a))

    quartered = jit.kernel(quarter)
    with jit.compilations(counts.append):
        assert quartered(8.0) == quartered(8.0) == 2.0
    assert counts == [1, 2]
    assert quartered(8) == 2.0
    assert counts == [1, 2]


def test_an_unwritable_cache_folder_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DEEPTHIN_CACHE_DIR", str(blocked))
    jit.kernel_cache_dir.cache_clear()
    try:
        assert jit.kernel_cache_dir() is None

        def add(a: int, b: int) -> int:
            return a + b

        assert jit.kernel(add)(1, 2) == 3
    finally:
        jit.kernel_cache_dir.cache_clear()


def test_kernels_count_no_references(tmp_path: Path) -> None:
    """The counters are atomic and shared by all threads; each array handed to a kernel that is not inlined touched one."""
    program = (
        "import numpy as np\nfrom deepthin.engine.jit import assembly\n"
        "from deepthin.engine.kernels.elementwise import head_norm\n"
        "x = np.zeros(64, np.float32)\nhead_norm(x.copy(), 0, x, 0, x, 0, 64, np.float32(1))\nprint(assembly(head_norm))"
    )
    environment = {**os.environ, "DEEPTHIN_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "rms_norm" in result.stdout and "NRT_incref" not in result.stdout and "NRT_decref" not in result.stdout


def test_only_one_module_decorates_with_numba() -> None:
    root = Path(__file__).resolve().parents[2]
    users = [p for folder in ("engine", "search", "export", "profiles", "cli") for p in (root / folder).rglob("*.py")]
    assert [p.name for p in users if "njit(" in p.read_text() or "fastmath=" in p.read_text()] == ["jit.py"]


def test_a_waiter_parks_instead_of_burning_a_core() -> None:
    ctl = aligned_bytes(ctl_words(2) * 4).view(np.int32)
    wait_while(ctl, PHASE, PHASE_PARKED, np.int32(7), 0)  # compiled; returns at once, the word is 0
    waiter = threading.Thread(target=wait_while, args=(ctl, PHASE, PHASE_PARKED, np.int32(0), 100_000))
    waiter.start()
    while ctl[PHASE_PARKED] == 0:
        time.sleep(0.001)
    before = time.process_time()
    time.sleep(0.2)
    burnt = time.process_time() - before
    publish(ctl, PHASE, PHASE_PARKED, np.int32(1))
    waiter.join(timeout=10)
    assert not waiter.is_alive() and ctl[PHASE_PARKED] == 0
    assert burnt < 0.1, f"an idle waiter used {burnt:.3f} s of CPU in 0.2 s"


def test_threads_end_with_their_decoder_and_an_unclosed_one_ends_the_process() -> None:
    before = threading.active_count()
    decoder = Decoder(random_model(SMALL), threads=3, context=16)
    decoder.step(1)
    assert threading.active_count() == before + 2
    decoder.close()
    decoder.close()
    assert threading.active_count() == before
    program = (
        "from deepthin.engine.decoder import Decoder\nfrom deepthin.engine.model import random_model\n"
        "from deepthin.engine.shape import Shape\n"
        f"d = Decoder(random_model(Shape.parse({SMALL.text!r})), threads=2, context=16)\nd.step(1)\nprint('done')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr[-2000:]
