from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmark_scripts import SCRIPTS, load_script


@pytest.fixture
def startup() -> Any:
    return load_script("startup")


def line(startup: Any, case: str, samples: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    machine = {"arch": "x86_64", "cpu_model": "Example 9000", "usable_cpus": 4}
    head = {"schema": startup.SCHEMA, "command": "python benchmarks/startup.py", "commit": "abcdef0123", "dirty": False}
    return {**head, "machine": machine, "case": case, "file_bytes": 100_000_000, "samples": samples, **changes}


def sample(startup: Any, first_token_s: float, open_s: float, pack_s: float, peak_mb: int) -> dict[str, Any]:
    seconds = dict.fromkeys(startup.PHASES, 0.01) | {"open": open_s, "pack": pack_s}
    return {"first_token_s": first_token_s, "seconds": seconds, "peak_bytes": peak_mb * 10**6, "bare_bytes": 150_000_000}


def test_table_has_medians_and_ranges_beside_the_targets(startup: Any) -> None:
    samples = [
        sample(startup, 1.0, 0.02, 0.03, 260),
        sample(startup, 0.9, 0.04, 0.06, 255),
        sample(startup, 1.3, 0.03, 0.05, 270),
    ]
    text = startup.render([line(startup, "tiny q4_0", samples), line(startup, "cold", [{"seconds": 21.34}])])
    rows = text.splitlines()
    assert "at most 1.5" in rows[0] and "at least 1)" in rows[0] and "at most 1.3" in rows[0]
    assert rows[2] == "| tiny q4_0 | 100 | 1.00 (0.90..1.30) | 1.25 (1.00..2.00) | 2.60 (2.55..2.70) | 1.10 (1.05..1.20) |"
    assert rows[6] == "| tiny q4_0 | 10 | 10 | 10 | 30 | 10 | 50 | 10 | 10 |"
    assert "takes 150 MB" in text
    assert "21.3 s (at most 40)" in text
    assert "of 3 fresh processes each, on Example 9000 with 4 CPUs, commit abcdef0123," in text


def test_a_short_real_run_measures_every_phase_and_keeps_its_files(
    startup: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((SCRIPTS / "results").rglob("*"))
    options = ["--formats", "q4_1", "--large", "", "--repetitions", "1", "--no-cold", "--no-save", "--files", str(tmp_path)]
    assert startup.main(options) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[2].startswith("| smollm2-135m q4_1 | 98 | ")
    assert str(tmp_path) not in "\n".join(table)
    phases = [int(cell) for cell in table[6].strip("|").split("|")[1:]]
    assert len(phases) == len(startup.PHASES)
    assert min(phases) >= 0
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-135m-q4_1.gguf"]
    assert sorted((SCRIPTS / "results").rglob("*")) == before


def test_a_child_prints_one_json_document(startup: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.main(["--child", "bare"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] > 10**7


def test_errors_are_one_line(startup: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.main(["--formats", "q9_9"]) == 2
    (tmp_path / "smollm2-135m-q4_1.gguf").write_text("no model")
    options = ["--formats", "q4_1", "--large", "", "--repetitions", "1", "--no-cold", "--no-save", "--files", str(tmp_path)]
    assert startup.main(options) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: deepthin generate failed: deepthin: error: ")
