"""Estimated sizes of ONNX files against the exporter's."""

from __future__ import annotations

import pytest

from deepthin.engine.shape import Shape
from deepthin.export.file_sizes import file_sizes
from deepthin.search.onnx_size import onnx_bytes

SEARCHED = [  # as the search proposes them at a few million parameters
    "L=12,d=192,heads=6,kv=2,ff=512,vocab=4096,tied",
    "L=80,d=64,heads=2,kv=1,ff=256,vocab=4096,tied",
    "L=4,d=320,heads=5,kv=5,ff=864,vocab=4096,untied",
    "L=9,d=128,heads=4,kv=2,ff=384,vocab=8192,tied,qk_norm",
]
QUANTS = ["f32", "f16", "q8_0", "q4_0", "q4_1"]
HEADS = ["q4_0-head_q4_0", "q4_0-head_f16", "q4_0-head_q4_1", "q8_0-head_q5_1", "f16-head_q8_0", "f32-head_q5_0"]


@pytest.mark.parametrize("text", SEARCHED)
@pytest.mark.parametrize("quant", [*QUANTS, *HEADS])
def test_within_half_a_percent_of_the_file(text: str, quant: str) -> None:
    shape = Shape.parse(text)
    assert onnx_bytes(shape, quant) == pytest.approx(file_sizes(shape, quant)["onnx"], rel=0.005)


def test_formats_without_operators_have_no_size() -> None:
    assert onnx_bytes(Shape.parse(SEARCHED[0]), "q5_0") is None
