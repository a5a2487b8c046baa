from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = (
    *("cost", "file_sizes", "filesystem", "guide", "hypervolume", "k_quants", "membership", "memory", "sampler", "targets"),
    *("budget", "config", "design", "folder", "front", "objectives", "picks", "quality.model", "space"),
)


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (LIGHT, ("optuna", "numba", "onnx", "llvmlite", "deepthin.engine.kernels", "deepthin.export")),
        (("run", "study"), ("numba", "onnx", "llvmlite", "torch", "sqlalchemy", "deepthin.engine.decoder", "deepthin.export")),
    ],
)
def test_search_loads_neither_kernels_nor_exporters(modules: tuple[str, ...], absent: tuple[str, ...]) -> None:
    imports = "; ".join(f"import deepthin.search.{module}" for module in modules)
    program = f"{imports}; import sys; print(sorted(set({absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
