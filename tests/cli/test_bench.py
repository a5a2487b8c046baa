import itertools
import json
from pathlib import Path

import pytest

from deepthin.cli.main import main

TINY = "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"
QUICK = ["--repetitions", "2", "--prompt", "4", "--gen", "3", "--threads", "1", "--budget-s", "0", "--quiet"]


def test_rows_of_engine_and_peers_on_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TINY, "--against", "llama.cpp,onnxruntime", *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "deepthin/bench/1"
    assert found["quant"] == "q4_0"
    rows = {(row["runtime"], row["test"]): row for row in found["results"]}
    assert set(rows) == {(name, test) for name in ("deepthin", "llama.cpp", "onnxruntime") for test in ("pp4", "tg3")}
    for row in rows.values():
        assert row["status"] == "ran"
        assert row["tok_s"]["unit"] == "tok/s"
        assert row["tok_s"]["n"] == len(row["tok_s"]["samples"]) >= 2
    assert rows["deepthin", "tg3"]["bytes_per_token"] > 0
    assert rows["deepthin", "tg3"]["ratio_to_engine"] is None
    assert rows["llama.cpp", "tg3"]["ratio_to_engine"]["median"] > 0


def test_an_export_folder_is_timed_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle"
    assert main(["export", TINY, "--out", str(bundle), "--to", "genai,gguf", "--quant", "f32,f16,q4_0", "--quiet"]) == 0
    (bundle / "gguf" / "model-f16.gguf").rename(tmp_path / "set-aside.gguf")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"] = [item for item in manifest["files"] if item["path"] != "gguf/model-f16.gguf"]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    for name in ("write_gguf", "write_onnx"):
        module = {"write_gguf": "gguf_writer", "write_onnx": "onnx_model"}[name]
        monkeypatch.setattr(f"deepthin.export.{module}.{name}", lambda *_, **__: pytest.fail("it wrote a file of its own"))
    assert main(["bench", str(bundle), "--against", "onnxruntime,llama.cpp", *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ran = {(row["quant"], row["runtime"], row["test"]) for row in found["results"] if row["status"] == "ran"}
    runtimes = ("deepthin", "onnxruntime", "llama.cpp")
    every = set(itertools.product(("f32", "f16", "q4_0"), runtimes, ("pp4", "tg3")))
    assert ran == every - {("f16", "llama.cpp", test) for test in ("pp4", "tg3")}
    assert found["files"]["f16"] == {"onnxruntime": str(bundle / "genai" / "f16" / "model.onnx")}
    why = next(row["why"] for row in found["results"] if row["status"] != "ran")
    assert why == "the export folder holds nothing for llama.cpp in f16; export it with --to gguf --quant f16"
    assert main(["bench", str(bundle / "gguf"), "--quant", "q4_0", "--against", "llama.cpp", *QUICK]) == 0
    assert "| llama.cpp" in capsys.readouterr().out.replace("llama.cpp ", "| llama.cpp ")
    assert main(["bench", str(bundle), "--quant", "q8_0", *QUICK]) == 2
    assert "an export folder that holds f32, f16, q4_0, not q8_0" in capsys.readouterr().err
    assert main(["bench", str(bundle), "--kernels", *QUICK]) == 2
    assert "choose one of them with --quant (f32,f16,q4_0)" in capsys.readouterr().err


def test_a_table_names_who_could_not_take_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TINY, "--quant", "bf16", "--against", "onnxruntime", *QUICK]) == 0
    text = capsys.readouterr().out
    assert f"{TINY}, bf16" in text
    assert "onnxruntime failed (tg3, 1 threads): our ONNX files hold bf16 weights as f32" in text
    assert "read bandwidth with 1 threads" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "vllm"], "'vllm' is unknown; use one or more of llama.cpp, onnxruntime, genai"),
        (["--prompt", "0", "--gen", "0"], "nothing to time"),
        (["--threads", "0"], "--threads: 0 is outside 1 to"),
        (["--depth", "1048576", "--prompt", "1048576", "--threads", "100000000000"], "is outside 1 to"),
        (["-p", "8-4"], "holds no number"),
        (["-pg", "512"], "--prompt-gen: '512' is no list of pairs; write a prompt and what follows it, such as 512,128"),
        (["-pg", "1048576,1048576", "-d", "2100000"], "is above 1048576"),
        (["--format", "llama-bench", "--kernels"], "has no place for --kernels"),
        (["--format", "llama-bench", "--json"], "has no place for --json"),
    ],
)
def test_requests_that_make_no_sense(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TINY, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_llama_bench_format_is_one_document_of_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--repetitions", "2", "-p", "4,8", "-n", "3", "-d", "0,5", "-t", "1", "--budget-s", "0", "-o", "llama-bench"]
    assert main(["bench", TINY, "--against", "llama.cpp", *arguments, "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)
    tests = [(4, 0, 0), (8, 0, 0), (0, 3, 0), (4, 0, 5), (8, 0, 5), (0, 3, 5)]
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows[::2]] == tests
    assert [row["build_commit"].split()[0] for row in rows] == ["deepthin", "llama.cpp"] * 6
    for row in rows:
        assert row["model_filename"] == TINY
        assert len(row["samples_ns"]) == len(row["samples_ts"]) >= 2
        assert row["model_size"] > 0


def test_json_by_format_is_the_document_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TINY, *QUICK, "--kernels", "--layers", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "deepthin/bench/1"
    assert found["kernels"]["groups"][0]["product"] == "attn_q"
    assert [part["name"] for part in found["layers"][0]["blocks"]] == ["0", "1", "head"]
    assert found["layers"][0]["token_s"]["unit"] == "s"


def test_markdown_tables_of_kernels_and_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TINY, *QUICK, "--kernels", "--layers", "-o", "md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = ("| deepthin | tg3 | 1 |", "| attention | attn_k | matvec.matvec_q4_0 |", "| embedding row |", "| q, k, v |")
    for start in starts:
        (row,) = [line for line in lines if line.startswith(start)]
        header = next(line for line in reversed(lines[: lines.index(row)]) if line.startswith("| ---"))
        assert row.count(" | ") == header.count(" | ")


def test_kernels_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TINY, "-p", "0", "-n", "0", "--kernels", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "tok/s" not in text
    assert "rows.read_row" in text


def test_prompts_with_answers_gather_and_win_over_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    settings = tmp_path / "run.toml"
    settings.write_text("[bench]\nprompt-gen = [8, 2, 4, 4]\n")
    arguments = ["bench", TINY, "-p", "0", "-n", "0", "-t", "1", "--budget-s", "0", "-r", "2", "--quiet", "-o", "llama-bench"]
    found = []
    for more in (["-pg", "5,2", "-pg", "6-7,3"], []):
        assert main([*arguments, "--config", str(settings), *more]) == 0
        found.append([(row["n_prompt"], row["n_gen"]) for row in json.loads(capsys.readouterr().out)])
    assert found == [[(5, 2), (6, 3), (7, 3)], [(8, 2), (4, 4)]]
