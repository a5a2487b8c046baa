"""Sizes predicted from a shape alone against the files that the exporter writes: every target, format and kind of shape."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from deepthin.engine.errors import UnsupportedError
from deepthin.engine.model import Model
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import tensor_specs
from deepthin.export.bundle import export_bundle
from deepthin.export.feasibility import ONNX_TARGETS, refusals
from deepthin.export.file_sizes import file_sizes, hollow_model, stored_as
from deepthin.export.memory import gguf_memory, onnx_memory
from deepthin.export.onnx_model import onnx_bytes, onnx_file_bytes, write_onnx
from deepthin.export.target_profiles import TARGET_PROFILES
from tests.support.tiny_models import TINY_SHAPES, VARIANT_SHAPES, lively_model, tiny_shape

QUANTS = ("f32", "f16", "q8_0", "q4_0", "q4_1")
BARE = {  # what the shapes below do not have: rows no block divides, two and three digits of blocks, padded vocabulary
    "odd_rows": "L=3,d=80,heads=5,kv=5,ff=112,vocab=96,tied",
    "eleven": "L=11,d=96,heads=3,kv=1,ff=160,vocab=257,untied,ctx=40",
    "deep": "L=101,d=32,heads=1,kv=1,ff=32,vocab=64,tied,ctx=16",
    "padded": "L=2,d=64,heads=4,kv=2,ff=96,vocab=128,tied,ctx=64",
}
SHAPES = {**TINY_SHAPES, **VARIANT_SHAPES, **BARE}


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "genai_config.json")


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_target_and_format_to_the_byte_and_past_the_checker(name: str, tmp_path: Path) -> None:
    shape = Shape.parse(SHAPES[name])
    model = lively_model(shape)
    fit = [target for target in ("hf", "genai", "gguf") if target not in refusals(["hf", "genai", "gguf"], shape)]
    if not fit:
        pytest.skip(f"no target takes {shape.text}, which has no size then")
    document = export_bundle(model, tmp_path / "b", targets=fit, quants=(*QUANTS, "q5_0") if "gguf" in fit else QUANTS)
    for quant in document["quants"]:
        found = file_sizes(shape, quant, name=model.name)
        written = {
            "gguf": tmp_path / "b" / "gguf" / f"model-{quant}.gguf",
            "onnx": tmp_path / "b" / "genai" / quant / "model.onnx",
        }
        for kind, path in written.items():
            assert found.get(kind) == (path.stat().st_size if path.exists() else None), (kind, quant)
        if "onnx" in found:
            onnx.checker.check_model(str(written["onnx"]), full_check=True)
    if "hf" in fit:
        assert file_sizes(shape, "f32")["hf"] == on_disk(tmp_path / "b" / "hf")


@pytest.mark.parametrize("name", ["plain", "narrow_heads", "qwen3_odd", "qwen2_odd", "shared", "llama3", "deep"])
def test_files_of_standard_operators_to_the_byte(name: str, tmp_path: Path) -> None:
    shape = Shape.parse(SHAPES[name])
    for quant in ("f32", "f16", "q8_0", "q4_0"):
        paths, weights = write_onnx(lively_model(shape).quantized(quant), tmp_path / f"{quant}.onnx", profile="standard")
        assert onnx_file_bytes(hollow_model(shape, quant), f"{quant}.onnx", profile="standard") == [paths[0].stat().st_size]
        assert weights == onnx_bytes(shape, quant)


def test_data_beside_the_model_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model(tiny_shape("plain")).quantized("q4_0")
    paths, _ = write_onnx(model, tmp_path / "model.onnx", external_bytes=1000)
    predicted = onnx_file_bytes(hollow_model(model.shape, "q4_0"), external_bytes=1000)
    assert predicted == [path.stat().st_size for path in paths] and len(predicted) == 2


def test_a_hollow_model_takes_no_memory_and_keeps_what_names_it() -> None:
    large = Shape.parse("L=24,d=1024,heads=16,ff=4096,vocab=151936,untied")
    hollow = hollow_model(large, "q4_0")
    assert sum(tensor.stored.base.nbytes for tensor in hollow.tensors.values() if tensor.stored.base is not None) < 1000
    model = Model(
        tiny_shape("plain"), lively_model(tiny_shape("plain")).tensors, name="mine", metadata={"general.author": "me"}
    )
    made = stored_as(model, "q8_0")
    assert (made.name, made.metadata) == (model.name, model.metadata) and stored_as(model, "stored") is model


def test_a_decoder_too_large_for_a_browser_is_left_out_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model(tiny_shape("smollm_like"))
    limit = onnx_file_bytes(hollow_model(model.shape, "f16"), accuracy_level=4)[0]
    small = {name: target if name != "transformersjs" else _limited(limit) for name, target in TARGET_PROFILES.items()}
    monkeypatch.setattr("deepthin.export.bundle.TARGET_PROFILES", small)
    document = export_bundle(model, tmp_path / "b", targets=ONNX_TARGETS, quants=("f32", "f16"))
    assert list(document["left_out"]["transformersjs"]) == ["f32"]
    assert f"at most {limit} are possible: browsers keep a file" in document["left_out"]["transformersjs"]["f32"]
    here = {path.relative_to(tmp_path / "b").as_posix() for path in (tmp_path / "b").rglob("*.onnx")}
    assert here == {"genai/f32/model.onnx", "genai/f16/model.onnx", "transformersjs/onnx/model_fp16.onnx"}
    with pytest.raises(UnsupportedError, match=r"transformersjs: f32 takes .* add a smaller format to --quant"):
        export_bundle(model, tmp_path / "none", targets=ONNX_TARGETS, quants=("f32",))
    assert not (tmp_path / "none").exists()


def _limited(limit: int):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(TARGET_PROFILES["transformersjs"], max_bytes=limit)


@pytest.mark.parametrize(
    ("name", "quant", "parts"),
    [
        ("smollm_like", "f32", ["the tied table twice"]),
        ("smollm_like", "f16", ["matrices widened to f32", "the tied table twice"]),
        ("smollm_like", "q4_0", ["the tied table twice", "scales and sums of blocks"]),
        ("wide_heads", "f32", ["one copy"]),
        ("wide_heads", "f16", ["matrices widened to f32"]),
        ("wide_heads", "q8_0", ["scales and sums of blocks"]),
    ],
)
def test_what_memory_holds_is_said(name: str, quant: str, parts: list[str]) -> None:
    """By hand: f32 values, or blocks of 32 with their integers, a scale, and a scale and a sum more beside packed ones."""
    shape = tiny_shape(name)
    found = onnx_memory(hollow_model(shape, quant))
    said = found["holds"].split("; ")
    assert len(said) == len(parts) and all(text.startswith(part) for text, part in zip(said, parts, strict=True))
    count = {
        role: sum(s.num_elements for s in tensor_specs(shape) if s.role == role)
        for role in ("attention", "mlp", "norm", "embedding", "head")
    }
    body, table = count["attention"] + count["mlp"], count["embedding"]
    per = {"f32": 4.0, "f16": 4.0, "q8_0": 1 + 12 / 32, "q4_0": 0.5 + 12 / 32}
    vocabulary = "q8_0" if quant == "q4_0" else quant
    want = per[quant] * body + 4 * count["norm"] + per[vocabulary] * count["head"]
    looked_up = {"f32": 4.0, "f16": 4.0 if shape.tie_word_embeddings else 2.0}.get(vocabulary, 1 + 4 / 32)
    want += looked_up * table + per[vocabulary] * table * shape.tie_word_embeddings
    assert found["bytes"] == want


def test_llama_cpp_lays_only_q4_0_out_anew() -> None:
    shape = tiny_shape("smollm_like")
    for quant in ("f32", "q8_0", "q4_1"):
        model = hollow_model(shape, quant)
        assert gguf_memory(model) == {"bytes": model.num_bytes, "holds": "the mapped file"}
    model = hollow_model(shape, "q4_0")
    found = gguf_memory(model)
    blocks = sum(s.num_elements for s in tensor_specs(shape) if s.role in ("attention", "mlp")) * 18 // 32
    assert found["bytes"] == model.num_bytes + blocks and found["holds"].endswith("q4_0 matrices laid out anew")
