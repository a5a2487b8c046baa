from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest

from deepthin.engine.errors import DeepthinError, FormatError, UnsupportedError, UsageError
from deepthin.engine.gguf_file import read_gguf
from deepthin.engine.load import load_model
from deepthin.engine.model import Model
from deepthin.engine.shape import Shape
from deepthin.engine.targets import target_verdicts
from deepthin.engine.tensors import tensor_specs
from deepthin.export import bundle_files
from deepthin.export.bundle import export_bundle
from deepthin.export.manifest import check_files, read_manifest, record_verdict
from tests.support.tiny_models import lively_model, tiny_shape

QUANTS = ("f32", "f16", "q8_0", "q4_0", "q4_1")
GENAI = ("genai/f32/genai_config.json", "genai/f32/model.onnx")


@pytest.fixture(scope="module")
def model() -> Model:
    return lively_model(tiny_shape("plain"))


@pytest.fixture(scope="module")
def exported(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "tiny"
    export_bundle(model, out, quants=QUANTS, seed=7, created_utc="2026-01-02T03:04:05Z")
    return out


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_layout_and_manifest(exported: Path, model: Model) -> None:
    manifest = read_manifest(exported)
    assert set(tree(exported)) == {file.path for file in manifest.files} | {"manifest.json"}
    assert set(tree(exported)) == {
        "hf/config.json", "hf/generation_config.json", "hf/model.safetensors",
        *(f"genai/{quant}/{name}" for quant in QUANTS for name in ("genai_config.json", "model.onnx")),
        "transformersjs/config.json", "transformersjs/generation_config.json", "transformersjs/onnx/model.onnx",
        *(f"transformersjs/onnx/model_{name}.onnx" for name in ("fp16", "quantized", "q4", "q4_1")),
        *(f"gguf/model-{quant}.gguf" for quant in QUANTS), "manifest.json",
    }  # fmt: skip
    assert all(check.ok for check in check_files(exported, manifest))
    assert manifest.shape == model.shape
    assert manifest.document["seed"] == 7 and manifest.document["created_utc"] == "2026-01-02T03:04:05Z"
    assert manifest.document["not_in_onnx"] == [] == list(manifest.document["refused"]) == list(manifest.document["left_out"])
    assert [file.quant for file in manifest.select(target="gguf")] == list(QUANTS)
    decoders = manifest.select(format="onnx", quant="q4_0")
    assert [file.path for file in decoders] == ["genai/q4_0/model.onnx", "transformersjs/onnx/model_q4.onnx"]
    assert decoders[0].sha256 == decoders[1].sha256
    assert not [path for path in exported.parent.iterdir() if path != exported]  # nothing half-made is left


def test_the_manifest_says_what_files_need_and_memory_holds(exported: Path) -> None:
    document = read_manifest(exported).document
    record = document["onnx"]
    assert record["rung"] == 0 and record["attention"].startswith("GroupQueryAttention with built-in") and record["notes"] == []
    assert record["onnxruntime_by_quant"] == {"f32": ">=1.20", "f16": ">=1.20", **dict.fromkeys(QUANTS[2:], ">=1.23")}
    held = {(entry["target"], entry["quant"]): (entry["runtime"], entry["bytes"]) for entry in document["memory"]}
    assert set(held) == {(target, quant) for target in ("genai", "transformersjs", "gguf") for quant in QUANTS}
    assert held["genai", "f16"] == ("onnxruntime-genai", held["genai", "f32"][1])  # widened when loaded
    assert held["genai", "q8_0"][1] > held["gguf", "q8_0"][1]  # f32 scales, and the tied table twice


def test_the_same_integers_in_gguf_and_onnx(exported: Path, model: Model) -> None:
    """Read by two packages that know nothing of each other."""
    reader = gguf.GGUFReader(exported / "gguf" / "model-q4_0.gguf")
    found = {
        i.name: onnx.numpy_helper.to_array(i)
        for i in onnx.load(str(exported / "genai" / "q4_0" / "model.onnx")).graph.initializer
    }
    blocks = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    for spec in tensor_specs(model.shape):
        if spec.role not in ("attention", "mlp") or spec.rope_heads:
            continue
        raw = blocks[spec.gguf_name].reshape(-1, 18)
        nibbles = np.concatenate([raw[:, 2:] & 15, raw[:, 2:] >> 4], axis=1)
        codes = found[spec.hf_name + "_quant"].reshape(-1, 16)
        np.testing.assert_array_equal(np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, 32), nibbles, err_msg=spec.name)
        np.testing.assert_array_equal(found[spec.hf_name + "_scales"].ravel(), raw[:, :2].copy().view(np.float16).ravel())
    raw = blocks["token_embd.weight"].reshape(-1, 34)
    codes = found["model.embed_tokens.weight_quant"].reshape(-1, 32)
    np.testing.assert_array_equal(codes.astype(np.int16) - 128, raw[:, 2:].copy().view(np.int8))


@pytest.mark.parametrize("part", ["hf", "gguf/model-f32.gguf"])
def test_our_loader_reads_identical_tensors(part: str, exported: Path, model: Model) -> None:
    again = load_model(exported / part)
    assert again.shape == model.shape
    for name, tensor in model.tensors.items():
        np.testing.assert_array_equal(again.tensors[name].dequantize(), tensor.dequantize(), err_msg=name)


@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_0", "q4_1"])
def test_our_loader_reads_identical_blocks(quant: str, exported: Path, model: Model) -> None:
    again, stored = load_model(exported / "gguf" / f"model-{quant}.gguf"), model.quantized(quant)
    for name, tensor in stored.tensors.items():
        assert again.tensors[name].format is tensor.format
        np.testing.assert_array_equal(again.tensors[name].data, tensor.data, err_msg=name)


def test_two_exports_are_equal_byte_for_byte(model: Model, tmp_path: Path) -> None:
    trees = []
    for name in ("a", "b"):
        export_bundle(model, tmp_path / name, quants=("f32", "q4_0"))
        trees.append(tree(tmp_path / name))
    assert trees[0] == trees[1] and "manifest.json" in trees[0]


def verified(verdict: str) -> dict[str, Any]:
    """What verify_bundle returns, as far as the manifest is concerned."""
    ran = {"name": "engine", "version": "1.2", "status": "ran"}
    skipped = {"name": "genai", "version": "", "status": "skipped"}
    return {"verdict": verdict, "summary": [f"{verdict}: a reason", "more"], "tokens": [1, 2, 3], "runtimes": [ran, skipped]}


def test_the_verdict_is_noted_in_the_manifest(model: Model, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_bundle(model, out, targets=("gguf",), quants=("f32",))
    fresh = tree(out)
    before = read_manifest(out).document
    assert before["verification"] is None
    assert record_verdict(out, verified("pass")) == ""
    after = read_manifest(out).document
    assert after == {**before, "verification": {"verdict": "pass", "why": "", "tokens": 3, "runtimes": {"engine": "1.2"}}}
    once = tree(out)
    assert record_verdict(out, verified("pass")) == "" and tree(out) == once  # the same verdict, the same bytes
    assert {name: once[name] for name in fresh if name != "manifest.json"} | {"manifest.json": ""} == fresh | {
        "manifest.json": ""
    }
    assert record_verdict(out, verified("fail")) == ""
    noted = read_manifest(out).document["verification"]
    assert (noted["verdict"], noted["why"]) == ("fail", "fail: a reason")


def test_a_manifest_that_cannot_be_replaced_stays_whole(model: Model, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    export_bundle(model, out, targets=("gguf",), quants=("f32",))
    before = tree(out)

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    assert record_verdict(out, verified("pass")) == "Read-only file system"
    assert tree(out) == before


def test_targets_that_refuse_are_named_before_anything_is_written(tmp_path: Path) -> None:
    model = lively_model(Shape.parse("L=1,d=64,heads=3,head_dim=20,ff=64,vocab=40,tied,mlp=gelu"))
    with pytest.raises(UnsupportedError, match=r"hf: mlp=gelu.*gguf: mlp=gelu"):
        export_bundle(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    document = export_bundle(model, tmp_path / "out", quants=("f32",), skip_infeasible=True)
    assert document["targets"] == ["genai", "transformersjs"] and set(document["refused"]) == {"hf", "gguf"}
    assert {name.split("/")[0] for name in tree(tmp_path / "out")} == {"genai", "transformersjs", "manifest.json"}
    with pytest.raises(UnsupportedError, match="gguf"):
        export_bundle(model, tmp_path / "none", targets=("gguf", "hf"), skip_infeasible=True)


def test_more_layers_than_llama_cpp_runs(tmp_path: Path) -> None:
    deep = Shape.parse("L=513,d=32,heads=2,ff=32,vocab=40,tied")
    assert not target_verdicts(deep)["gguf-q4_0"].ok and target_verdicts(deep.replace(num_layers=512))["gguf-q4_0"].ok
    with pytest.raises(UnsupportedError, match=r"gguf: llama\.cpp runs at most 512 layers, not 513"):
        export_bundle(lively_model(deep), tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("hf", "coreml")}, "target 'coreml' is unknown; use one of hf, genai, transformersjs, gguf"),
        ({"quants": ("q3_k",)}, "format 'q3_k' is unknown"),
        ({"targets": ()}, "nothing to export"),
        ({"quants": ()}, "nothing to export"),
        ({"targets": ("onnx",), "quants": ("q5_0",)}, "ONNX files come in f32, f16, q8_0, q4_0"),
    ],
)
def test_unknown_or_empty_wishes(options: dict[str, Any], message: str, model: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        export_bundle(model, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_folders_in_use_are_left_alone(model: Model, tmp_path: Path) -> None:
    def export(out: Path, **options: Any) -> None:
        export_bundle(model, out, targets=("gguf",), quants=("q4_0",), **options)

    out = tmp_path / "out"
    out.mkdir()
    export(out)  # an empty folder is free
    before = tree(out)
    with pytest.raises(FormatError, match="holds a bundle already"):
        export(out)
    export(out, overwrite=True)
    assert tree(out) == before
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match=r"'notes\.txt', which is no part of the bundle"):
        export(out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(FormatError, match="not empty and no bundle"):
        export(other, overwrite=True)
    with pytest.raises(FormatError, match="is a file"):
        export(other / "thesis.tex", overwrite=True)
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(FormatError, match="is a link"):
        export(tmp_path / "link", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "other", "out"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing(error: BaseException, model: Model, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    export_bundle(model, out, targets=("gguf",), quants=("f32",))
    before = tree(out)

    def fail(*args: Any, **options: Any) -> int:
        raise error

    monkeypatch.setattr(bundle_files, "write_gguf", fail)
    expected = DeepthinError if isinstance(error, OSError) else KeyboardInterrupt
    for target in (out, tmp_path / "fresh"):
        with pytest.raises(expected, match="No space left" if isinstance(error, OSError) else None):
            export_bundle(model, target, overwrite=True)
    assert tree(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_old_bundle_comes_back_when_the_new_one_cannot_move_in(model: Model, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    export_bundle(model, out, targets=("gguf",), quants=("f32",))
    before, rename = tree(out), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(DeepthinError, match="Permission denied"):
        export_bundle(model, out, targets=("gguf",), quants=("q4_0",), overwrite=True)
    assert tree(out) == before and [path.name for path in tmp_path.iterdir()] == ["out"]


def change(folder: Path, **values: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def entry(**values: Any) -> dict[str, Any]:
    base = {
        "path": "a.gguf",
        "bytes": 4,
        "sha256": "0" * 64,
        "target": "gguf",
        "format": "gguf",
        "quant": "f32",
        "tensor_bytes": 0,
    }
    return {**base, **values}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema": "deepthin/manifest/2"}, "this version reads 'deepthin/manifest/1'"),
        ({"shape": {"num_layers": 0}}, "shape"),
        ({"shape": None}, "under 'shape', but dict is needed"),
        ({"files": {}}, "under 'files', but list is needed"),
        ({"files": ["x"]}, "an object is needed"),
        ({"files": [entry(bytes="4")]}, "under 'bytes', but int is needed"),
        ({"files": [entry(bytes=True)]}, "under 'bytes', but int is needed"),
        ({"files": [entry(bytes=-1)]}, "0 <= tensor_bytes <= bytes"),
        ({"files": [entry(sha256="ab")]}, "64 lower-case"),
        ({"files": [entry(), entry(path="A.gguf")]}, "listed twice"),
        *(
            ({"files": [entry(path=path)]}, "plain names")
            for path in ("../a", "/etc/passwd", "a/../b", "", "a//b", "a\\b", "C:a", "./a", ".hidden", "a\n", "a/b/c/d/e")
        ),
    ],
)
def test_hostile_manifests_are_refused(values: dict[str, Any], message: str, exported: Path, tmp_path: Path) -> None:
    shutil.copy(exported / "manifest.json", tmp_path)
    change(tmp_path, **values)
    with pytest.raises(FormatError, match=message):
        read_manifest(tmp_path)


def test_manifests_that_are_no_json(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is no bundle"):
        read_manifest(tmp_path)
    for text, message in (("{", "no valid JSON"), ("[" * 100_000, "no valid JSON"), ("[]", "list"), ('{"a":1,"a":2}', "twice")):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(FormatError, match=message):
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="no valid JSON"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "manifest.json").symlink_to(tmp_path / "real.json")
    with pytest.raises(FormatError, match="no plain file"):
        read_manifest(tmp_path)


def test_changed_files_are_named(model: Model, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_bundle(model, out, quants=("f32",))
    manifest = read_manifest(out)
    weights = out / "hf" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    (out / "gguf" / "model-f32.gguf").write_bytes(b"GGUF")
    (out / "hf" / "config.json").unlink()
    os.rename(out / "genai", tmp_path / "elsewhere")
    (out / "genai").symlink_to(tmp_path / "elsewhere")
    bad = {check.path: check.why for check in check_files(out, manifest) if not check.ok}
    assert set(bad) == {"hf/model.safetensors", "gguf/model-f32.gguf", "hf/config.json", *GENAI}
    assert "content has changed" in bad["hf/model.safetensors"]
    assert "has 4 bytes" in bad["gguf/model-f32.gguf"]
    assert "No such file" in bad["hf/config.json"]
    assert "is a link" in bad["genai/f32/model.onnx"]


def test_trained_blocks_pass_through_unchanged(smollm2_path: Path, tmp_path: Path) -> None:
    """SmolLM2's own Q4_1 file: every tensor of our q4_1 GGUF holds the source's bytes."""
    export_bundle(load_model(smollm2_path), tmp_path / "out", targets=("gguf",), quants=("q4_1",))
    ours, source = read_gguf(tmp_path / "out" / "gguf" / "model-q4_1.gguf"), read_gguf(smollm2_path)
    assert set(ours.tensors) == set(source.tensors)
    for name, info in source.tensors.items():
        assert ours.tensors[name].type_id == info.type_id
        assert np.array_equal(ours.data(name), source.data(name)), name
    kept = [key for key in source.metadata if key.startswith(("llama.", "tokenizer.")) and key != "tokenizer.chat_template"]
    for key in kept:
        assert np.array_equal(ours.metadata[key].value, source.metadata[key].value), key
    assert ours.metadata["general.license"].value == "apache-2.0"
