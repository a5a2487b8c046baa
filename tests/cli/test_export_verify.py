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
    assert listed >= {"hf/config.json", "onnx/model.onnx", "onnx/model_q4.onnx", "gguf/model-f32.gguf", "gguf/model-q4_0.gguf"}
    assert all((bundle / path).stat().st_size for path in listed)


def test_export_as_json_and_as_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", TINY, "--out", str(tmp_path / "b"), "--to", "gguf", "--quant", "q8_0"]
    assert main(arguments) == 0
    assert "gguf/model-q8_0.gguf" in capsys.readouterr().out
    assert main([*arguments, "--overwrite", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "deepthin/manifest/1"
    assert [item["path"] for item in found["files"]] == ["gguf/model-q8_0.gguf"]
    assert found["created_utc"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--to", "tflite"], 2, "'tflite' is unknown; use one or more of hf, onnx, gguf"),
        (["--quant", "q5_k"], 2, "'q5_k' is unknown; use one or more of f32"),
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
    assert states == {"reference": "ran", "engine": "ran", "onnxruntime": "ran", "llama.cpp": "skipped"}
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
