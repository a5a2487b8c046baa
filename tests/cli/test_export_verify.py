"""``export`` then ``verify`` through the front door; what each file holds is tested in tests/export."""

import json
import shutil
from pathlib import Path

import pytest

from deepthin.cli.main import main

TINY = "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "bundle"
    assert main(["export", TINY, "--out", str(out), "--quant", "f32,q4_0", "--seed", "3", "--quiet"]) == 0
    return out


def test_export_writes_what_its_manifest_lists(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["seed"] == 3
    listed = {item["path"] for item in manifest["files"]}
    assert listed >= {
        "hf/config.json",
        "transformersjs/onnx/model.onnx",
        "genai/q4_0/model.onnx",
        "gguf/model-f32.gguf",
        "gguf/model-q4_0.gguf",
    }
    assert all((bundle / path).stat().st_size for path in listed)


def test_export_as_json_and_as_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", TINY, "--out", str(tmp_path / "b"), "--to", "gguf", "--quant", "q8_0"]
    assert main(arguments) == 0
    assert "gguf/model-q8_0.gguf" in capsys.readouterr().out
    assert main([*arguments, "--force", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "deepthin/manifest/1"
    assert [item["path"] for item in found["files"]] == ["gguf/model-q8_0.gguf"]
    assert found["created_utc"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--to", "tflite"], 2, "'tflite' is unknown; use one or more of hf, genai, transformersjs, gguf, onnx"),
        (["--quant", "q5_k"], 2, "format 'q5_k' is only read, weights cannot be converted to it"),
        (["--quant", "q4_0-head_q9"], 2, "format 'q9' is unknown; use one of f32"),
        ([], 1, "not empty"),
    ],
)
def test_exports_that_are_refused(
    arguments: list[str], code: int, says: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.txt").write_text("mine")
    assert main(["export", TINY, "--out", str(tmp_path), *arguments]) == code
    assert says in capsys.readouterr().err
    assert (tmp_path / "taken.txt").read_text() == "mine"


@pytest.mark.parametrize("command", [["export", TINY], ["search"]])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("file", "is a file, but a folder is needed; name one that does not exist yet"),
        ("file/below", "is a file, but a folder is needed; name one that does not exist yet"),
        ("foreign", "is not empty and no"),
    ],
)
def test_an_unusable_out_exits_1_before_anything_slow(
    command: list[str],
    name: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def slow(*_: object, **__: object) -> None:
        pytest.fail("something slow was done first")

    monkeypatch.setattr("deepthin.engine.model.random_model", slow)
    monkeypatch.setattr("deepthin.profiles.machine.machine_record", slow)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "taken.txt").write_text("mine")
    assert main([*command, "--out", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert f"--out {tmp_path / name}: " in error
    assert says in error


def test_a_bundle_in_the_way_names_the_option(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", TINY, "--out", str(bundle)]) == 1
    assert "name another folder, or replace it with --force" in capsys.readouterr().err


def test_what_quant_does_not_reach_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", TINY, "--out", str(tmp_path / "b"), "--to", "hf,onnx", "--quant", "q4_0,q5_0,f16", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "hf holds f32 weights, as --hf-dtype says; --quant applies to gguf and onnx" in text
    assert "onnx has no files for q5_0, since it has no operators for them" in text
    needs = "onnxruntime >=1.23 for q4_0, onnxruntime >=1.20 for f16"
    assert f"onnx: opset 21, {needs}; GroupQueryAttention with built-in rotary embedding" in text
    assert (
        "of f16 in onnxruntime-genai, transformers.js (matrices widened to f32; the tied table twice: as products want" in text
    )


def test_the_rung_and_what_else_a_shape_asks_for_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "L=4,d=96,heads=4,kv=2,ff=64,vocab=40,tied,qk_norm,share=2"
    assert main(["export", shape, "--out", str(tmp_path / "b"), "--to", "onnx", "--quant", "f32", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert (
        "; head_dim=24 is no multiple of 16, so rotary embedding is an operator of its own before GroupQueryAttention" in text
    )
    assert "onnx: query and key norms are operators of their own; onnxruntime refuses GroupQueryAttention's on CPUs" in text
    assert "onnx: 2 runs of a block read the same weights, stored once" in text


def test_accuracy_level_and_profile_reach_the_files(tmp_path: Path) -> None:
    arguments = ["export", TINY, "--out", str(tmp_path / "b"), "--to", "genai", "--quant", "q4_0", "--quiet"]
    assert main([*arguments, "--onnx-accuracy-level", "4"]) == 0
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["onnx_accuracy_level"] == 4 and manifest["onnx"]["profile"] == "contrib"
    assert main([*arguments, "--force", "--onnx-profile", "standard"]) == 0
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["onnx"]["opset"] == 23 and manifest["onnx"]["onnxruntime"] == ">=1.23"
    config = json.loads((tmp_path / "b" / "genai" / "q4_0" / "genai_config.json").read_text())
    assert config["search"]["past_present_share_buffer"] is False


def test_verify_counts_what_ran_apart_from_what_was_compared(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(bundle), "--runtimes", "onnxruntime"]) == 0
    text = capsys.readouterr().out
    assert "pass: 7 models hold the weights of hf, and onnxruntime gives the logits of the reference when run on 2 of" in text


def test_verify_notes_its_verdict_unless_told_not_to(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    path = copy / "manifest.json"
    fresh = json.loads(path.read_text()) | {"verification": None}
    path.write_text(json.dumps(fresh))
    assert main(["verify", str(copy), "--runtimes", "engine", "--no-record", "--quiet"]) == 0
    assert json.loads(path.read_text()) == fresh
    assert main(["verify", str(copy), "--runtimes", "engine", "--quiet"]) == 0
    noted = json.loads(path.read_text())["verification"]
    assert noted["verdict"] == "pass" and set(noted["runtimes"]) == {"reference", "engine"}
    assert main(["verify", str(copy), "--runtimes", "engine", "--quiet"]) == 0  # a noted verdict does not disturb the next one
    assert sorted(item.name for item in copy.iterdir()) == sorted(item.name for item in bundle.iterdir())


def test_out_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", TINY]) == 2
    assert "required: --out" in capsys.readouterr().err


def test_out_may_come_from_a_config(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[export]\nout = "{(tmp_path / "b").as_posix()}"\nto = ["gguf"]\nquant = "f16"\n')
    assert main(["export", TINY, "--config", str(config), "--quiet"]) == 0
    assert (tmp_path / "b" / "gguf" / "model-f16.gguf").is_file()


def test_a_shape_no_target_takes_is_refused_with_the_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", TINY + ",mlp=gelu", "--out", str(tmp_path / "b")]) == 1
    assert "mlp=gelu (it needs a SwiGLU gate or relu2)" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_verify_passes_and_says_who_was_asked(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(bundle), "--runtimes", "engine,onnxruntime", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "deepthin/verification/1"
    assert found["verdict"] == "pass"
    states = {runtime["name"]: runtime["status"] for runtime in found["runtimes"]}
    assert states == {"reference": "ran", "engine": "ran", "onnxruntime": "ran", "llama.cpp": "skipped"} | dict.fromkeys(
        ("genai", "transformers.js"), "skipped"
    )
    assert {pair["b"] for pair in found["pairs"]} == {"engine", "onnxruntime"}


def test_verify_of_a_damaged_file_exits_4_and_names_it(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    path = copy / "gguf" / "model-f32.gguf"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 0x40
    path.write_bytes(bytes(data))
    assert main(["verify", str(copy), "--runtimes", "engine"]) == 4
    assert "gguf/model-f32.gguf" in capsys.readouterr().out


def test_verify_of_no_bundle_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 1
    assert "manifest.json" in capsys.readouterr().err


def test_a_bundle_is_a_source(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"]["num_layers"] == 2
