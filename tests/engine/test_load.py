import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepthin.engine.errors import FormatError
from deepthin.engine.load import load_model
from tests.support.gguf_bytes import llama_file
from tests.support.gguf_files import write_gguf
from tests.support.hf_folders import write_hf_folder
from tests.support.refusal import assert_one_line, assert_refused
from tests.support.tiny_models import lively_model, tiny_shape

HEAVY = {"numba", "llvmlite", "onnx", "onnxruntime", "optuna", "tokenizers", "gguf", "safetensors"}
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "text": (b"Dear reader,\nthis is no model.\n", "it is a text file; a GGUF file"),
    "text_of_one_byte": (b"x", "it is a text file"),
    "binary": (bytes(range(256)), "it does not begin with 'GGUF'"),
    "almost_gguf": (b"GGU", "it is a text file"),
    "json": (b'{"a": 1}', "it is a JSON file; give the folder"),
    "safetensors": (b"\x40\0\0\0\0\0\0\0{...", "it is a safetensors file; give the folder"),
    "git_lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer, .* 'git lfs pull'"),
    "web_page": (b"\n <!doctype html><html>", "it is a web page"),
    "web_page_short": (b"<HTML>", "it is a web page"),
    "zip": (b"PK\x03\x04\0\0", "a zip archive, as PyTorch checkpoints are; those can run code"),
    "pickle": (b"\x80\x02}q\x00.", "a Python pickle; those can run code"),
    "old_ggml": (b"tjgg\x01\0\0\0", "a GGML file from before GGUF"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("suffix", [".gguf", ".safetensors", ""])
def test_files_that_are_no_model_get_one_clear_line(name: str, suffix: str, tmp_path: Path) -> None:
    raw, match = FILES[name]
    path = tmp_path / f"model{suffix}"
    path.write_bytes(raw)
    assert_refused(load_model, path, match)


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "holiday.jpg"
    path.write_bytes(llama_file().build())
    assert load_model(path).shape.num_layers == 1 and load_model(str(path)).source == str(path)


@pytest.mark.parametrize("name", ["absent", "absent.gguf", "absent/model.gguf"])
def test_missing_paths_are_refused(name: str, tmp_path: Path) -> None:
    assert_refused(load_model, tmp_path / name, "there is no such file or folder")


def test_a_file_used_as_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert_refused(load_model, tmp_path / "file" / "model.gguf", "cannot be read .*directory")


def test_names_no_file_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no file can have that name") as caught:
        load_model("model\0.gguf")
    assert_one_line(str(caught.value))
    with pytest.raises(FormatError, match="cannot be read") as caught:
        load_model(tmp_path / ("x" * 5000))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    os.mkfifo(path)
    assert_refused(load_model, path, "neither a file nor a folder")


def test_a_folder_of_nothing_is_refused_and_a_gguf_in_it_suggested(tmp_path: Path) -> None:
    assert_refused(load_model, tmp_path, "holds neither config.json .* nor manifest.json .*bundle\\)$")
    (tmp_path / "b.gguf").touch()
    line = assert_refused(load_model, tmp_path, "did you mean")
    assert line.endswith(f"did you mean {tmp_path / 'b.gguf'}?")


def _bundle(folder: Path, schema: object = "deepthin/manifest/1") -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"schema": schema}))
    return folder


def test_a_bundle_gives_its_hugging_face_part(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle")
    model = lively_model(tiny_shape("plain"))
    write_hf_folder(bundle / "hf", model)
    assert load_model(bundle).source == str(bundle / "hf")


def test_a_bundle_without_one_gives_its_most_exact_gguf_file(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle")
    (bundle / "gguf").mkdir()
    assert_refused(load_model, bundle, "there are no weights to read")
    for quant in ("q4_0", "f16", "q8_0"):
        write_gguf(bundle / "gguf" / f"model-{quant}.gguf", lively_model(tiny_shape("plain"), quant=quant))
    assert load_model(bundle).tensors["blk.0.ffn_up"].format.name == "f16"


@pytest.mark.parametrize("schema", [None, 1, "deepthin/manifest/2", "x" * 900, ["\n"]])
def test_a_manifest_of_something_else_is_refused(schema: object, tmp_path: Path) -> None:
    assert_refused(load_model, _bundle(tmp_path / "bundle", schema), "its schema is .*, but a bundle of 'deepthin/manifest/1'")


def test_smollm2_loads_quickly(smollm2_path: Path) -> None:
    start = time.process_time()
    load_model(smollm2_path)
    assert time.process_time() - start < 1.0  # of processor time; 0.1 on a quiet machine


def test_loading_imports_nothing_heavy(smollm2_path: Path) -> None:
    program = (
        "import sys; from deepthin.engine.load import load_model; from deepthin.engine.reference import Reference; "
        f"load_model({str(smollm2_path)!r}); "
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
