from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmark_scripts import load_script

TINY = "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("contention")


def test_every_contestant_is_timed_alone_and_beside_a_busy_process(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepthin.engine.model import random_model
    from deepthin.engine.shape import Shape
    from deepthin.export.gguf_writer import write_gguf

    path = tmp_path / "tiny.gguf"
    write_gguf(random_model(Shape.parse(TINY), quant="q8_0"), path)
    monkeypatch.setattr(script, "SETTLE_S", 0)
    assert script.main(["--model", str(path), "--quant", "q8_0", "--tokens", "4", "--rounds", "2"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0] for row in rows][:2] == ["| 1 thread", "| 2 threads"]
    assert rows[2].startswith("| automatic: ") and rows[3].startswith("| llama.cpp, 2 threads")
    for row in rows:
        assert all(float(cell.strip(" |")) >= 0 for cell in row.split(" | ")[1:])


def test_the_busy_process_is_busy_and_ends(script: Any) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("reads /proc")
    with script.busy_process() as child:
        stat = Path(f"/proc/{child}/stat")

        def ticks() -> int:
            return int(stat.read_text().rpartition(")")[2].split()[11])

        end = time.monotonic() + 20
        while ticks() < 5 and time.monotonic() < end:
            time.sleep(0.05)
        assert ticks() >= 5
    assert not stat.exists()


def test_a_missing_model_is_one_line(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--model", "nowhere.gguf"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
