"""Embedding and head in a format of their own: files carry it, and every runtime computes what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.formats import BODY_QUANTS
from deepthin.engine.gguf_file import read_gguf
from deepthin.export.bundle import export_bundle
from deepthin.export.contents import model_files
from deepthin.export.manifest import read_manifest
from deepthin.export.onnx_profiles import PROFILES
from deepthin.export.tolerances import budget_named
from deepthin.export.verify import verify_bundle
from tests.support.tiny_models import lively_model, tiny_shape

QUANTS = ("f32", "q4_0-head_q4_0", "q4_0-head_f16", "q8_0-head_q5_1", "f16-head_q8_0", "q5_0-head_f16")


@pytest.mark.parametrize("name", ["smollm_like", "wide_heads"])  # tied and untied
def test_a_bundle_with_heads_of_their_own_verifies_in_every_runtime(name: str, tmp_path: Path) -> None:
    document = export_bundle(lively_model(tiny_shape(name)), tmp_path / "bundle", quants=QUANTS)
    assert document["quants"] == list(QUANTS)
    assert document["not_in_onnx"] == ["q5_0-head_f16"]
    paths = {file["path"] for file in document["files"]}
    assert "gguf/model-q4_0-head_f16.gguf" in paths
    assert "transformersjs/onnx/model_q4_0-head_q4_0.onnx" in paths
    verdict = verify_bundle(tmp_path / "bundle", runtimes=("engine", "onnxruntime"))
    assert verdict["verdict"] == "pass", verdict
    ran = {(pair["b"], pair["file"]) for pair in verdict["pairs"]}
    assert {("engine", f"gguf/model-{quant}.gguf") for quant in QUANTS} <= ran
    assert {("onnxruntime", f"genai/{quant}/model.onnx") for quant in QUANTS[:-1]} <= ran
    for quant, formats in {"q4_0-head_q4_0": ("q4_0", "q4_0"), "q8_0-head_q5_1": ("q8_0", "q5_1")}.items():
        model = read_gguf(tmp_path / "bundle" / "gguf" / f"model-{quant}.gguf")
        found = {tensor: info.type_name.lower() for tensor, info in model.tensors.items()}
        heads = [tensor for tensor in found if tensor.startswith(("token_embd", "output.weight"))]
        assert {found[tensor] for tensor in heads} == {formats[1]}
        assert found["blk.0.ffn_up.weight"] == formats[0]


def test_a_manifest_may_not_name_a_head_nobody_makes(tmp_path: Path) -> None:
    export_bundle(lively_model(tiny_shape("plain")), tmp_path / "b", targets=("gguf",), quants=("q4_0-head_f16",))
    path = tmp_path / "b" / "manifest.json"
    path.write_text(path.read_text().replace('"quant": "q4_0-head_f16"', '"quant": "q4_0-head_q6_k"'))
    with pytest.raises(FormatError, match="is said to hold 'q4_0-head_q6_k'; known are f32"):
        model_files(read_manifest(tmp_path / "b"))
    with pytest.raises(UsageError, match="'q6_k' is only read"):
        export_bundle(lively_model(tiny_shape("plain")), tmp_path / "c", quants=("q4_0-head_q6_k",))


def test_profiles_write_what_they_have_operators_for() -> None:
    contrib, standard = PROFILES["contrib"], PROFILES["standard"]
    assert contrib.writes("q4_1-head_q5_0") and not standard.writes("q4_1-head_q5_0")
    assert standard.writes("q4_0-head_f16") and standard.writes("q8_0-head_q4_0") and not standard.writes("q8_0-head_q5_0")
    assert contrib.writes("f16-head_q8_0") and not contrib.writes("q5_0-head_f16")
    assert contrib.writes("stored") and not standard.writes("stored")


def test_files_are_held_to_the_tolerances_of_their_coarser_format() -> None:
    from deepthin.export.verify import _budget_quant

    assert _budget_quant("q4_0-head_f16", "gguf") == _budget_quant("f16-head_q4_0", "gguf") == "q4_0"
    assert _budget_quant("stored", "onnx") == _budget_quant("q8_0-head_q5_1", "onnx") == "stored"
    assert _budget_quant("q8_0-head_q5_1", "gguf") == "q5_1"
    assert _budget_quant("f32-head_f16", "onnx") == "f16" and _budget_quant("f32-head_bf16", "onnx") == "f32"
    for body in ("f32", "q8_0", "q4_0", "q4_1"):
        for head in BODY_QUANTS:
            for rounds in ("onnxruntime", "onnxruntime_int8"):
                name = _budget_quant(f"{body}-head_{head}", "onnx")
                assert name in ("f32", "f16") or budget_named(f"{rounds}.{name}")
