"""Equal logits in every runtime over head widths, hidden widths and numbers of key heads, as a covering array of tiny models.

Each pair of (head width, hidden width), (head width, key heads) and (hidden width, key heads) occurs; so does each rung of the
attention ladder of ONNX, and each fallback of rows that 32 does not divide.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deepthin.engine.shape import Shape
from deepthin.export.bundle import export_bundle
from deepthin.export.runs import RUNTIMES
from deepthin.export.verify import verify_bundle
from tests.support.tiny_models import lively_model

HEAD_DIMS = (40, 48, 56, 64, 72, 80, 96, 128)
WIDTHS = (320, 576, 896, 960)
HEADS = {"1": (3, 1), "2": (4, 2), "3": (6, 3), "all": (5, 5)}  # query heads, key heads
CASES = [
    (head_dim, width, list(HEADS)[(row + column) % len(HEADS)])
    for row, head_dim in enumerate(HEAD_DIMS)
    for column, width in enumerate(WIDTHS)
]


def test_every_pair_occurs() -> None:
    for axes, count in (((0, 1), 32), ((0, 2), 32), ((1, 2), 16)):
        assert len({tuple(case[axis] for axis in axes) for case in CASES}) == count


@pytest.mark.parametrize(("head_dim", "width", "key_heads"), CASES)
def test_equal_logits(tmp_path: Path, head_dim: int, width: int, key_heads: str) -> None:
    heads, kv = HEADS[key_heads]
    norms = ",qk_norm" if (head_dim // 8 + width // 64) % 2 else ""  # another architecture, and another order of rows in GGUF
    shape = Shape.parse(f"L=1,d={width},heads={heads},kv={kv},head_dim={head_dim},ff=96,vocab=96,tied,ctx=64{norms}")
    bundle = tmp_path / "b"
    export_bundle(lively_model(shape, seed=2), bundle, targets=("genai", "gguf"), quants=("f32", "q4_0"))
    result = verify_bundle(bundle, runtimes=RUNTIMES[:3], tokens=[(5 + 37 * i + i * i) % 96 for i in range(16)])
    assert result["verdict"] == "pass", result["summary"]
    assert {pair["b"] for pair in result["pairs"]} == set(RUNTIMES[:3])
    assert len(result["pairs"]) == 3 * (2 * 1 + 2 * 2 + 1 + 2)  # phases x (engine, llama.cpp, onnxruntime f32 and q4_0)
