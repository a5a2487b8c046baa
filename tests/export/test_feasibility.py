from __future__ import annotations

import pytest

from deepthin.engine.errors import UnsupportedError
from deepthin.engine.shape import Shape
from deepthin.export.feasibility import TARGETS, expand_targets, nearest_shape, refusals, require_targets

PLAIN = "L=4,d=64,heads=4,kv=2,ff=96,vocab=96,tied"


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("L=4,d=100,heads=3,kv=3,head_dim=32,ff=96,vocab=96,tied", "L=4,d=99,heads=3,kv=3,head_dim=32,ff=96,vocab=96,tied"),
        (PLAIN + ",mlp=gelu", PLAIN + ",mlp=relu2"),
        (PLAIN + ",qk_norm,qkv_bias", PLAIN + ",qk_norm"),
        (PLAIN + ",nope=3", PLAIN + ",nope=4"),
        (PLAIN + ",share=2,nope=4", PLAIN + ",share=2"),
        (PLAIN + ",mlp=gelu,qk_norm,qkv_bias", PLAIN + ",qk_norm"),
        (PLAIN.replace("L=4", "L=600"), PLAIN.replace("L=4", "L=512")),
        (PLAIN.replace("L=4", "L=300") + ",share=2", PLAIN.replace("L=4", "L=300")),
    ],
)
def test_refusals_name_the_nearest_shape(text: str, nearest: str) -> None:
    shape = Shape.parse(text)
    found = nearest_shape(TARGETS, shape)
    assert found is not None and found.text == nearest and not refusals(TARGETS, found)
    with pytest.raises(UnsupportedError) as raised:
        require_targets(TARGETS, shape)
    assert f"the nearest shape for all of them is {nearest}, or leave the target out" in str(raised.value)


def test_short_names() -> None:
    assert expand_targets(["onnx", "gguf", "genai", "coreml"]) == ("genai", "transformersjs", "gguf", "coreml")
