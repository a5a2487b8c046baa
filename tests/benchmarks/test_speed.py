from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles.statistics import measured
from tests.support.benchmark_scripts import load_script

models, tables = load_script("speed_models"), load_script("speed_tables")
speed = load_script("speed")


def record(runtime: str, file: str, threads: int, tok_s: float, **changes: Any) -> dict[str, Any]:
    machine = {
        "arch": "x86_64", "cpu_model": "Example 9000", "usable_cpus": 4, "simd": "avx2", "os": "Linux 6.1",
        "versions": {"llama-cpp-python": "0.3.36"},
    }  # fmt: skip
    line = {
        "schema": tables.SCHEMA,
        "created_utc": "2026-01-02T03:04:05+00:00",
        "command": "python benchmarks/speed.py",
        "commit": "abcdef0123",
        "dirty": False,
        "machine": machine,
        "model": "smollm2-135m",
        "runtime": runtime,
        "test": "tg128",
        "threads": threads,
        "file": file,
        "quant": file,
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


def test_the_table_names_numbers_targets_machine_and_command() -> None:
    text = tables.render(run())
    cells = "200 / 400 | 100 / 200 | 2.00 (2.00..2.00) / 2.00 (2.00..2.00) | 1.6 / 2.0 | 75% of 20 GB/s / 75% of 40 GB/s |"
    assert f"| smollm2-135m | Q4_0 | tg128 | {cells}" in text
    for words in ("Example 9000", "4 CPUs", "commit abcdef0123", "python benchmarks/speed.py", "Threads: 1 / 2"):
        assert words in text
    assert "Flagged" not in text


def test_several_calls_are_summed_up() -> None:
    lines = [{**line, "config": {"repetitions": 5}} for line in run()]
    lines += [{**line, "config": {"repetitions": 9}, "command": "another"} for line in run(test="pp256", roofline_share=None)]
    assert "2 calls of `python benchmarks/speed.py` with 5 or 9 rounds a batch." in tables.render(lines)


def test_names_with_a_dot_stay_whole() -> None:
    assert models.short_name("qwen2.5-0.5b") == "qwen2.5-0.5b"
    assert models.short_name("folder/my.model.gguf") == "my.model"


def test_flags_and_failures_stay_in_the_table() -> None:
    lines = run()
    lines[0]["flags"] = ["steal"]
    lines[3] = record("llama.cpp", "q4_0", 2, 1.0, status="failed", why="killed by SIGABRT")
    text = tables.render(lines)
    assert "2.00 (2.00..2.00) [a] / " in text
    assert "[a] steal." in text
    assert "100 / failed: killed by SIGABRT" in text
    assert tables.ratios(lines) == {"smollm2-135m q4_0 tg128 1": 2.0}


def test_prompts_stand_without_a_share_and_other_models_can_be_left_out() -> None:
    lines = run(test="pp256", roofline_share=None) + run(model="62x384")
    assert "| smollm2-135m | Q4_0 | pp256 | 200 / 400 | 100 / 200 | 2.00 (2.00..2.00) / 2.00 (2.00..2.00) | 2.0 / 2.0 |  |" in (
        tables.render(lines, models=["smollm2-135m"])
    )
    assert "62x384" not in tables.render(lines, models=["smollm2-135m"])
    assert "62x384" in tables.render(lines)


@pytest.mark.parametrize(
    ("model", "test", "file", "threads", "goal"),
    [
        ("smollm2-135m", "tg64", "q8_0", 1, 1.5),
        ("12x768", "tg64", "q8_0", 4, 2.0),
        ("15m", "tg64", "f16", 1, 3.0),
        ("15m", "pp256", "q4_0", 1, None),
        ("62x384", "tg32@d4096", "q4_0", 1, None),
        ("62x384", "tg64", "q5_1", 1, None),
    ],
)
def test_targets(model: str, test: str, file: str, threads: int, goal: float | None) -> None:
    assert tables.target(model, test, file, threads) == goal


def test_slower_at_a_depth_is_a_ratio_of_each_runtime_to_itself() -> None:
    deep = {"test": "tg32@d4096"}
    lines = [*run(), record("deepthin", "q4_0", 1, 100.0, **deep), record("llama.cpp", "q4_0", 1, 25.0, **deep)]
    # ours 5 -> 10 ms, theirs 10 -> 40 ms: 5 of 30 ms added
    assert tables.render_depth(lines).splitlines()[2:] == ["| smollm2-135m | Q4_0 | 4096 | 1 | 2.00x | 4.00x | 17% |"]
    assert tables.render_depth(run()) == ""


def test_more_flags_than_letters_have_marks_of_their_own() -> None:
    lines = [
        record(name, "q4_0", 1, 100.0, model=f"m{i}", flags=[f"flag{i}"])
        for i in range(30)
        for name in ("deepthin", "llama.cpp")
    ]
    text = tables.render(lines)
    assert "[z] flag25; [aa] flag26;" in text


def test_results_are_kept_by_machine_date_and_commit_and_each_machine_shows_its_newest(tmp_path: Path) -> None:
    old, new = run(), run(created_utc="2026-02-01T00:00:00+00:00", commit="fedcba", dirty=True)
    other = run(created_utc="2026-01-01T00:00:00+00:00", machine={**old[0]["machine"], "simd": "neon"})
    assert tables.save(new, tmp_path).relative_to(tmp_path) == Path("example-9000-4cpu-avx2/2026-02-01-fedcba-dirty.jsonl")
    tables.save(old, tmp_path)
    tables.save(other, tmp_path)
    assert tables.newest(tmp_path) == [new, other]
    assert {path.suffix for path in tmp_path.rglob("*.*")} == {".jsonl"}


def test_a_second_run_of_the_same_commit_adds_cases_and_replaces_those_measured_again(tmp_path: Path) -> None:
    first, again = run(), run(model="62x384")
    again[0:0] = [record("deepthin", "q4_0", 1, 999.0)]
    path = tables.save(first, tmp_path)
    assert tables.save(again, tmp_path) == path
    stored = tables.read(path)
    assert len(stored) == 8
    assert stored[0]["tok_s"]["median"] == 999.0


def test_no_results_and_damaged_ones_are_said(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no speed results yet"):
        tables.newest(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x.jsonl").write_text('{"schema": 1}\nnot json\n')
    with pytest.raises(FormatError, match=r"x\.jsonl"):
        tables.newest(tmp_path)


def test_rewriting_touches_only_what_is_between_the_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# T\n\n<!-- results -->\nold\n<!-- /results -->\n\nrest\n", encoding="utf-8")
    tables.rewrite(readme, "results", "| new |")
    assert readme.read_text(encoding="utf-8") == "# T\n\n<!-- results -->\n| new |\n<!-- /results -->\n\nrest\n"
    assert tables.text_in(readme, "results") == "| new |"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    "text", ["", "<!-- results -->", "<!-- /results --><!-- results -->", "<!-- results --><!-- results --><!-- /results -->"]
)
def test_a_document_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match="needs one line"):
        tables.rewrite(readme, "results", "| new |")
    assert readme.read_text(encoding="utf-8") == text


def test_readme_and_docs_show_the_newest_results_and_nothing_else(tmp_path: Path) -> None:
    readme, docs = tmp_path / "README.md", tmp_path / "speed.md"
    for path in (readme, docs):
        path.write_text("<!-- results -->\n<!-- /results -->\n", encoding="utf-8")
    speed.rewrite_documents(speed.RESULTS, readme, docs)
    assert tables.text_in(readme, "results") == tables.text_in(speed.ROOT / "README.md", "results")
    assert tables.text_in(docs, "results") == tables.text_in(speed.ROOT / "docs" / "speed.md", "results")


def test_records_carry_their_session_bandwidth_and_agreement() -> None:
    body = {
        "shape": {"text": "L=1"},
        "config": {"gen": 4},
        "results": [{"runtime": "deepthin", "test": "tg4", "threads": 2, "status": "ran"}],
        "agreement": [{"threads": 1, "nmse": 0.0}, {"threads": 2, "nmse": 0.1}],
        "bandwidth": [{"test": "tg4", "threads": 2, "num_bytes": 5}, {"test": "tg9", "threads": 2, "num_bytes": 7}],
        "sessions": [{"test": "tg4", "threads": 1, "flags": []}, {"test": "tg4", "threads": 2, "flags": ["steal"]}],
    }
    (line,) = speed.records(body)
    assert line["session"]["flags"] == ["steal"]
    assert line["agreement"] == [{"threads": 2, "nmse": 0.1}]
    assert (line["shape"], line["bandwidth"]) == ("L=1", [{"test": "tg4", "threads": 2, "num_bytes": 5}])


def test_tests_of_one_depth_are_timed_together() -> None:
    options = speed._parser().parse_args(["--tests", "tg64,pp256,tg32@d4096", "--threads", "1"])
    assert [[test.name for test in config.tests] for config in speed.plan(options)] == [["pp256", "tg64"], ["tg32@d4096"]]
    with pytest.raises(UsageError, match="'tg0' is no test"):
        speed.plan(speed._parser().parse_args(["--tests", "tg0"]))


def test_a_file_of_a_shape_is_made_once_in_the_format_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepthin.engine.load import load_model
    from deepthin.profiles.bench import body_quant

    monkeypatch.setitem(models.SHAPES, "15m", "L=1,d=64,heads=2,kv=1,ff=96,vocab=320,tied")
    path = models.model_file("15m", "q4_1", tmp_path)
    assert body_quant(load_model(path)) == "q4_1"
    stamp = path.stat().st_mtime_ns
    assert models.model_file("15m", "q4_1", tmp_path).stat().st_mtime_ns == stamp


def test_a_file_of_llama_cpps_quantiser_is_made_from_the_f16_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    from deepthin.engine.load import load_model
    from deepthin.profiles.bench import body_quant

    monkeypatch.setitem(models.SHAPES, "15m", "L=1,d=64,heads=2,kv=1,ff=96,vocab=320,tied")
    assert body_quant(load_model(models.model_file("15m", "q4_k_m", tmp_path))) == "q5_0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["15m-f16.gguf", "15m-q4_k_m.gguf"]


def test_a_short_real_run_stores_nothing_and_prints_table_and_json(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(speed.RESULTS.rglob("*"))
    arguments = ["--formats", "q4_1", "--threads", "2", "--tests", "tg3", "--repetitions", "1", "--budget-s", "0", "--no-save"]
    assert speed.main(arguments) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert table[2].startswith("| smollm2-135m | Q4_1 | tg3 |")
    assert str(smollm2_path.parent) not in "\n".join(table)
    assert json.loads(last)["ratios"]["smollm2-135m q4_1 tg3 2"] > 0
    assert sorted(speed.RESULTS.rglob("*")) == before


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    assert speed.main(["--models", str(tmp_path / "text.gguf"), "--no-save"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.out == ""
    assert speed.main(["--formats", "q9_9"]) == 2
    assert speed.main(["--models", "gpt-7"]) == 2
