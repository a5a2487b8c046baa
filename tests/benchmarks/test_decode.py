from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import FormatError
from deepthin.profiles.statistics import measured


def load_script(name: str) -> Any:
    """Scripts are no package: they are loaded from their file."""
    spec = spec_from_file_location(f"benchmarks_{name}", Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


decode = load_script("decode")


def record(runtime: str, quant: str, threads: int, tok_s: float, **changes: Any) -> dict[str, Any]:
    machine = {
        "arch": "x86_64", "cpu_model": "Example 9000", "usable_cpus": 4, "simd": "avx2", "os": "Linux 6.1",
        "versions": {"llama-cpp-python": "0.3.36"},
    }  # fmt: skip
    line = {
        "schema": decode.SCHEMA,
        "created_utc": "2026-01-02T03:04:05+00:00",
        "command": "python benchmarks/decode.py",
        "commit": "abcdef0123",
        "dirty": False,
        "machine": machine,
        "model": "tiny",
        "runtime": runtime,
        "test": "tg128",
        "threads": threads,
        "quant": quant,
        "status": "ran",
        "tok_s": measured([tok_s * 0.99, tok_s, tok_s * 1.01], "tok/s").to_json(),
        "bytes_per_token": 90_000_000,
        "roofline_share": measured([0.75], "ratio").to_json(),
        "ratio_to_engine": None if runtime == "deepthin" else measured([0.5], "ratio").to_json(),
        "flags": [],
        "bandwidth": [
            {"threads": threads, "num_bytes": 90_000_000, "bytes_per_s": measured([2e10 * threads], "bytes/s").to_json()}
        ],
    }
    return line | changes


def run(**changes: Any) -> list[dict[str, Any]]:
    return [
        record(name, "q4_0", n, rate * n, **changes)
        for n in (1, 2)
        for name, rate in (("deepthin", 200.0), ("llama.cpp", 100.0))
    ]


def test_the_table_names_numbers_machine_and_command() -> None:
    text = decode.render(run())
    assert (
        "| tg128 | Q4_0 | 1 | 200 (198..202) | 100 (99..101) | 2.00 (2.00..2.00) | 90.0 | 75% (75%..75%) of 20 GB/s |" in text
    )
    assert "| tg128 | Q4_0 | 2 | 400 (396..404) | 200 (198..202) |" in text
    for words in (
        "Example 9000",
        "4 CPUs",
        "commit abcdef0123",
        "python benchmarks/decode.py",
        "75% (75%..75%) of 40 GB/s",
    ):
        assert words in text
    assert "Flagged" not in text


def test_flags_and_failures_stay_in_the_table() -> None:
    lines = run()
    lines[0]["flags"] = ["steal"]
    lines[3] = record("llama.cpp", "q4_0", 2, 1.0, status="failed", why="killed by SIGABRT")
    text = decode.render(lines)
    assert "| 1 [a] |" in text
    assert "[a] steal." in text
    assert "failed: killed by SIGABRT" in text
    assert decode.ratios(lines) == {"tg128 q4_0 1": 2.0}


def test_results_are_kept_by_machine_date_and_commit_and_the_newest_is_shown(tmp_path: Path) -> None:
    old, new = run(), run(created_utc="2026-02-01T00:00:00+00:00", commit="fedcba", dirty=True)
    assert decode.save(new, tmp_path).relative_to(tmp_path) == Path("example-9000-4cpu-avx2/2026-02-01-fedcba-dirty.jsonl")
    decode.save(old, tmp_path)
    assert decode.newest(tmp_path) == new
    assert [path.suffix for path in tmp_path.rglob("*.*")] == [".jsonl", ".jsonl"]


def test_no_results_and_damaged_ones_are_said(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no decode results yet"):
        decode.newest(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x.jsonl").write_text('{"schema": 1}\nnot json\n')
    with pytest.raises(FormatError, match=r"x\.jsonl"):
        decode.newest(tmp_path)


def test_rewriting_touches_only_what_is_between_the_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# T\n\n<!-- results -->\nold\n<!-- /results -->\n\nrest\n", encoding="utf-8")
    decode.rewrite(readme, "| new |")
    assert readme.read_text(encoding="utf-8") == "# T\n\n<!-- results -->\n| new |\n<!-- /results -->\n\nrest\n"
    assert decode.table_in(readme) == "| new |"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    "text", ["", "<!-- results -->", "<!-- /results --><!-- results -->", "<!-- results --><!-- results --><!-- /results -->"]
)
def test_a_readme_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match="needs one line"):
        decode.rewrite(readme, "| new |")
    assert readme.read_text(encoding="utf-8") == text


def test_the_readme_shows_the_newest_results_and_nothing_else() -> None:
    stored = sorted(decode.RESULTS.glob("*/*.jsonl"))
    assert decode.table_in(decode.README) == (decode.render(decode.newest(decode.RESULTS)) if stored else "")


def test_records_carry_their_session_bandwidth_and_agreement() -> None:
    body = {
        "model": "tiny",
        "shape": {"text": "L=1"},
        "config": {"gen": 4},
        "results": [{"runtime": "deepthin", "test": "tg4", "threads": 2, "status": "ran"}],
        "agreement": [{"threads": 1, "nmse": 0.0}, {"threads": 2, "nmse": 0.1}],
        "bandwidth": [{"threads": 2, "num_bytes": 5}],
        "sessions": [{"test": "tg4", "threads": 1, "flags": []}, {"test": "tg4", "threads": 2, "flags": ["steal"]}],
    }
    (line,) = decode.records(body)
    assert line["session"]["flags"] == ["steal"]
    assert line["agreement"] == [{"threads": 2, "nmse": 0.1}]
    assert (line["shape"], line["bandwidth"]) == ("L=1", [{"threads": 2, "num_bytes": 5}])


def test_a_short_real_run_stores_nothing_and_prints_table_and_json(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(decode.RESULTS.rglob("*"))
    arguments = ["--formats", "q4_1", "--threads", "2", "--gen", "3", "--repetitions", "1", "--budget-s", "0", "--no-save"]
    assert decode.main([*arguments, "--model", str(smollm2_path)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert table[2].startswith("| tg3 | Q4_1 | 2")
    assert str(smollm2_path.parent) not in "\n".join(table)
    assert json.loads(last)["ratios"]["tg3 q4_1 2"] > 0
    assert sorted(decode.RESULTS.rglob("*")) == before


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    assert decode.main(["--model", str(tmp_path / "text.gguf"), "--no-save"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.out == ""
    assert decode.main(["--formats", "q9_9"]) == 2
