from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import UsageError
from deepthin.profiles.statistics import measured
from tests.support.benchmark_scripts import load_script

TINY = "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"
exports = load_script("exports")


def line(quant: str, threads: int, test: str, rate: float, **changes: Any) -> dict[str, Any]:
    machine = {"arch": "x86_64", "cpu_model": "Example 9000", "usable_cpus": 4, "simd": "avx2", "os": "Linux 6.1"}
    return {
        "schema": exports.SCHEMA, "created_utc": "2026-01-02T03:04:05Z", "command": "python benchmarks/exports.py --models 60m",
        "commit": "abcdef0123", "dirty": False, "machine": machine, "model": "60m", "runtime": "onnxruntime",
        "runtime_version": "1.32.0", "quant": quant, "file_bytes": 41_000_000, "threads": threads, "test": test,
        "tok_s": measured([rate * 0.99, rate, rate * 1.01], "tok/s").to_json(),
        "ratio_to_f32": measured([rate / 100], "ratio").to_json(), "flags": [],
    } | changes  # fmt: skip


def lines() -> list[dict[str, Any]]:
    rates = {"f32": 100.0, "q4_0": 250.0}
    return [line(q, n, test, rates[q]) for q in rates for n in (1, 2) for test in ("pp128", "tg32")]


def test_the_table_has_both_thread_counts_in_a_cell_and_names_what_was_measured() -> None:
    text = exports.render([*lines()[:-1], line("q4_0", 2, "tg32", 300.0, flags=["steal"])])
    assert "| 60m | onnxruntime | f32 | 41.0 | 100 / 100 |  | 100 / 100 |  |" in text
    ratios = "250 / 250 | 2.50 (2.50..2.50) / 2.50 (2.50..2.50) | 250 / 300 | 2.50 (2.50..2.50) / 3.00 (3.00..3.00) [a] |"
    assert f"| 60m | onnxruntime | q4_0 | 41.0 | {ratios}" in text
    for words in (
        "Example 9000",
        "4 CPUs",
        "onnxruntime 1.32.0",
        "commit abcdef0123",
        "`python benchmarks/exports.py`",
        "[a] steal",
    ):
        assert words in text


def test_runs_of_one_commit_add_up_and_the_newest_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "RESULTS", tmp_path)
    path = exports.save(lines())
    assert exports.save([line("q4_0", 2, "tg32", 300.0)]) == path
    held = {exports.case(one): one["tok_s"]["median"] for one in exports.read(path)}
    assert len(held) == 8 and held["60m", "onnxruntime", "q4_0", 2, "tg32"] == 300.0
    exports.save([line("f32", 1, "tg32", 90.0, created_utc="2026-01-03T00:00:00Z", commit="ffff")])
    assert [one["commit"] for one in exports.newest(tmp_path)] == ["ffff"]
    with pytest.raises(UsageError, match="no stored results"):
        exports.newest(tmp_path / "empty")


def test_only_what_stands_between_the_marks_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{exports.MARKS[0]}\nold\n{exports.MARKS[1]}\nafter\n")
    exports.rewrite(page, "new")
    assert page.read_text() == f"before\n{exports.MARKS[0]}\nnew\n{exports.MARKS[1]}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(UsageError, match="are missing"):
        exports.rewrite(page, "new")


def test_real_files_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(exports, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(exports, "MODELS", ("tiny",))
    monkeypatch.setattr(exports, "RESULTS", tmp_path / "results")
    quick = [
        "--models",
        "tiny",
        "--quants",
        "q4_0",
        "--threads",
        "1",
        "--prompt",
        "8",
        "--gen",
        "4",
        "--rounds",
        "2",
        "--budget-s",
        "0",
    ]
    assert exports.main([*quick, "--runtimes", "onnxruntime,llama.cpp", "--files", str(tmp_path / "files")]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("| tiny | ")]
    assert [row.split(" | ")[1:3] for row in rows] == [
        [name, q] for name in ("onnxruntime", "llama.cpp") for q in ("f32", "q4_0")
    ]
    stored = [json.loads(text) for path in (tmp_path / "results").rglob("*.jsonl") for text in path.read_text().splitlines()]
    assert len(stored) == 8 and all(one["tok_s"]["n"] >= 2 for one in stored)
    assert not any(str(tmp_path) in one["command"] for one in stored)
    assert exports.main(["--models", "vicuna"]) == 2
    assert "'vicuna' is none of tiny" in capsys.readouterr().err
