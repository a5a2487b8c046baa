"""Predicted sizes against files that the exporter writes, for shapes with odd numbers in every place."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepthin.engine.accounting import count_bytes
from deepthin.engine.errors import UsageError
from deepthin.engine.model import random_model
from deepthin.engine.shape import Shape
from deepthin.export.gguf_writer import write_gguf
from deepthin.search.file_sizes import gguf_bytes, random_weights_name, with_file_sizes, without_fallback_bytes

ODD = [
    "L=1,d=32,heads=2,kv=1,ff=32,vocab=101,tied",
    "L=11,d=96,heads=3,kv=1,ff=160,vocab=257,untied",
    "L=3,d=80,heads=5,kv=5,ff=112,vocab=96,tied",  # rows no block divides
    "L=13,d=64,heads=4,kv=2,head_dim=32,ff=96,vocab=500,tied,qk_norm",
    "L=2,d=128,heads=4,kv=4,ff=352,vocab=777,untied,ctx=4096",
    "L=101,d=32,heads=1,kv=1,ff=64,vocab=64,tied,ctx=128",
]
SEARCHED = [  # as the search proposes them at a few million parameters
    "L=12,d=192,heads=6,kv=2,ff=512,vocab=4096,tied",
    "L=30,d=96,heads=3,kv=1,ff=320,vocab=8192,tied",
    "L=80,d=64,heads=2,kv=1,ff=256,vocab=4096,tied",
    "L=4,d=320,heads=5,kv=5,ff=864,vocab=4096,untied",
    "L=9,d=128,heads=4,kv=2,ff=384,vocab=8192,tied,qk_norm",
]


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("quant", ["f32", "f16", "q8_0", "q4_0", "q4_1", "q5_0"])
def test_gguf_to_the_byte(text: str, quant: str, tmp_path: Path) -> None:
    shape = Shape.parse(text)
    model = random_model(shape, seed=7, quant=quant)
    write_gguf(model, tmp_path / "m.gguf")
    assert model.name == random_weights_name(shape, 7)
    assert gguf_bytes(shape, quant, model.name) == (tmp_path / "m.gguf").stat().st_size


HEADS = ["q4_0-head_q4_0", "q4_0-head_f16", "q4_0-head_q4_1", "q8_0-head_q5_1", "f16-head_q8_0", "f32-head_q5_0"]


@pytest.mark.parametrize("text", [ODD[1], ODD[2], ODD[3]])
@pytest.mark.parametrize("quant", HEADS)
def test_gguf_with_a_head_of_its_own_to_the_byte(text: str, quant: str, tmp_path: Path) -> None:
    shape = Shape.parse(text)
    model = random_model(shape).quantized(quant)
    write_gguf(model, tmp_path / "m.gguf")
    assert gguf_bytes(shape, quant, model.name) == (tmp_path / "m.gguf").stat().st_size


def test_other_files_are_filled_in_wherever_a_size_stands() -> None:
    shape = Shape.parse(SEARCHED[0])
    entry = {"shape": shape.to_json(), "quant": "q4_0", "file_bytes": {"gguf": 7}}
    document = {"front": [entry, {"shape": shape.text}], "picks": {"best": {"compared": entry}}, "n": 1}
    found = with_file_sizes(document, lambda one, quant: {"gguf": 0, "onnx": one.num_layers, "hf": len(quant)})
    assert (
        found["front"][0]["file_bytes"] == found["picks"]["best"]["compared"]["file_bytes"] == {"gguf": 7, "onnx": 12, "hf": 4}
    )
    assert found["front"][1] == {"shape": shape.text} and found["n"] == 1 and entry["file_bytes"] == {"gguf": 7}
    with pytest.raises(UsageError, match="'q9' is unknown"):
        gguf_bytes(shape, "q9")


def test_fallback_has_its_price() -> None:
    fits, odd = Shape.parse(SEARCHED[0]), Shape.parse(ODD[2])
    assert without_fallback_bytes(fits, "q4_0") == 0
    ideal = odd.replace(hidden_size=96, num_heads=6, num_kv_heads=6, intermediate_size=128)
    assert without_fallback_bytes(ideal, "q4_0") == 0
    body = sum(s for s in (count_bytes(odd, "f16").attention, count_bytes(odd, "f16").mlp))
    assert without_fallback_bytes(odd, "q4_0") == round(body * (16 - 4.5) / 16)


def test_a_shape_without_architecture_still_has_a_size() -> None:
    shape = Shape.parse(SEARCHED[0] + ",share=2")
    assert gguf_bytes(shape, "q4_0") == gguf_bytes(shape.replace(layer_sharing=1), "q4_0")
