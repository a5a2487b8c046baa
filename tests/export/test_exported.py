from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from deepthin.engine.errors import FormatError
from deepthin.engine.model import Model
from deepthin.export.bundle import export_bundle
from deepthin.export.exported import exported_models, model_of_onnx
from tests.support.tiny_models import lively_model, tiny_shape

QUANTS = ("f32", "f16", "q8_0", "q4_0")


@pytest.fixture(scope="module")
def model() -> Model:
    return lively_model(tiny_shape("smollm_like"))


@pytest.fixture(scope="module")
def bundle(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "bundle"
    export_bundle(model, out, quants=QUANTS)
    return out


def held(path: Path) -> dict[str, dict[str, str]]:
    root = path.absolute()
    return {
        model.quant: {name: file.absolute().relative_to(root).as_posix() for name, file in model.files.items()}
        for model in exported_models(path)
    }


def test_a_bundle_names_the_file_of_each_runtime(bundle: Path) -> None:
    assert held(bundle) == {
        quant: {
            "llama.cpp": f"gguf/model-{quant}.gguf",
            "onnxruntime": f"genai/{quant}/model.onnx",
            "genai": f"genai/{quant}",
        }
        for quant in QUANTS
    }


@pytest.mark.parametrize("alone", [False, True])
def test_one_folder_of_it(alone: bool, bundle: Path, tmp_path: Path) -> None:
    """Inside its bundle or taken out of it."""
    if alone:
        for part in ("genai", "gguf", "transformersjs"):
            shutil.copytree(bundle / part, tmp_path / part)
    root = tmp_path if alone else bundle
    assert held(root / "genai" / "q4_0") == {"q4_0": {"onnxruntime": "model.onnx", "genai": "."}}
    assert set(held(root / "genai")) == set(QUANTS)
    assert held(root / "gguf") == {quant: {"llama.cpp": f"model-{quant}.gguf"} for quant in QUANTS}
    assert {quant: files["onnxruntime"] for quant, files in held(root / "transformersjs").items()} == {
        "f32": "onnx/model.onnx",
        "f16": "onnx/model_fp16.onnx",
        "q8_0": "onnx/model_quantized.onnx",
        "q4_0": "onnx/model_q4.onnx",
    }


def test_the_engine_gets_the_very_weights(bundle: Path, model: Model, tmp_path: Path) -> None:
    shutil.copytree(bundle / "genai", tmp_path / "genai")
    for folder in (bundle, bundle / "genai", tmp_path / "genai"):
        for one in exported_models(folder):
            loaded, want = one.load(), model.quantized(one.quant)
            assert loaded.shape == want.shape
            for name, tensor in want.tensors.items():
                assert loaded.tensors[name].format is tensor.format
                np.testing.assert_array_equal(loaded.tensors[name].data, tensor.data, err_msg=f"{folder} {name}")


def test_what_is_no_export_folder_holds_nothing(bundle: Path, tmp_path: Path) -> None:
    assert exported_models(tmp_path) == exported_models(tmp_path / "absent") == exported_models(bundle / "hf") == []
    for name in ("model.onnx", "someone-elses.gguf", "manifest.json"):
        (tmp_path / name).write_bytes(b"no configuration of genai beside it, no name of ours, no manifest of ours")
    below = tmp_path / "hub"
    shutil.copytree(bundle / "transformersjs", below)
    (below / "model.safetensors").write_bytes(b"")
    assert exported_models(below) == []
    (tmp_path / "manifest.json").unlink()
    assert exported_models(tmp_path) == []


def test_an_onnx_file_of_others_is_refused(bundle: Path, tmp_path: Path) -> None:
    proto = onnx.load(bundle / "genai" / "q4_0" / "model.onnx")
    kept = [item for item in proto.graph.initializer if "layers.1.mlp.up_proj" not in item.name]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    onnx.save(proto, tmp_path / "lacking.onnx")
    with pytest.raises(FormatError, match=r"'blk\.1\.ffn_up\.out/MatMulNBits' uses .*, which nothing before it makes"):
        model_of_onnx(tmp_path / "lacking.onnx", "q4_0")
    proto = onnx.load(bundle / "genai" / "q4_0" / "model.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "foreign.onnx")
    with pytest.raises(FormatError, match="names no shape"):
        model_of_onnx(tmp_path / "foreign.onnx", "q4_0")
