import pytest

from deepthin.engine.errors import UnsupportedError
from deepthin.engine.known_shapes import known_shape
from deepthin.engine.plan import check_runnable
from deepthin.engine.targets import target_verdicts

SMOLLM2 = known_shape("smollm2-135m").shape


def test_a_llama_shape_is_taken_everywhere_but_by_k_quants() -> None:
    verdicts = target_verdicts(SMOLLM2)
    assert {name for name, verdict in verdicts.items() if not verdict.ok} == {"gguf-k-quants"}
    assert "d=576" in verdicts["gguf-k-quants"].why
    assert target_verdicts(SMOLLM2.replace(num_heads=8, num_kv_heads=8, head_dim=64, hidden_size=512))["gguf-k-quants"].ok


@pytest.mark.parametrize(
    ("changes", "target", "ok", "why"),
    [
        ({"head_dim": 60}, "onnx", False, "multiple of 8, not 60"),
        ({"head_dim": 72}, "onnx", True, "no multiple of 16"),
        ({"num_heads": 10, "num_kv_heads": 5}, "hf", False, "d=576 that is no multiple of heads=10"),
        ({"intermediate_size": 1500}, "gguf-q4_0", True, "ffn_down are no multiple of 32 and stay f16"),
        ({"mlp": "gelu"}, "gguf-f16", False, "mlp=gelu"),
        ({"qk_norm": True}, "hf", False, "qk_norm"),
        ({"layer_sharing": 2}, "onnx", False, "share=2"),
        ({"mlp": "relu2"}, "engine", False, "mlp=relu2"),
    ],
)
def test_each_rule_names_its_number(changes: dict[str, object], target: str, ok: bool, why: str) -> None:
    verdict = target_verdicts(SMOLLM2.replace(**changes))[target]
    assert verdict.ok is ok
    assert why in verdict.why


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp": "gelu"},
        {"mlp": "relu2"},
        {"qk_norm": True},
        {"layer_sharing": 2},
        {"head_dim": 2},
        {"intermediate_size": 33},
    ],
)
def test_the_engine_verdict_is_what_the_engine_does(changes: dict[str, object]) -> None:
    shape = SMOLLM2.replace(**changes)
    if target_verdicts(shape)["engine"].ok:
        check_runnable(shape)
    else:
        with pytest.raises(UnsupportedError):
            check_runnable(shape)
