import pytest

from deepthin.engine.known_shapes import known_shape
from deepthin.engine.rope_scaling import RopeScaling
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
        ({"head_dim": 60}, "onnx", True, "head_dim=60 is no multiple of 8, so attention is the standard operator (opset 23,"),
        ({"head_dim": 72}, "onnx", True, "no multiple of 16"),
        ({"num_heads": 10, "num_kv_heads": 5}, "hf", False, "d=576 that is no multiple of heads=10"),
        ({"intermediate_size": 1500}, "gguf-q4_0", True, "ffn_down are no multiple of 32 and stay f16"),
        ({"mlp": "gelu"}, "gguf-f16", False, "mlp=gelu (it needs a SwiGLU gate or relu2)"),
        ({"mlp": "gelu"}, "engine", True, "mlp=gelu; no published architecture"),
        ({"mlp": "relu2"}, "gguf-q8_0", True, "architecture arcee"),
        ({"mlp": "relu2", "num_heads": 10, "num_kv_heads": 5}, "hf", False, "ArceeConfig refuses d=576"),
        ({"qk_norm": True}, "hf", True, "Qwen3ForCausalLM"),
        ({"qk_norm": True, "num_heads": 10, "num_kv_heads": 5}, "hf", True, "Qwen3ForCausalLM"),
        ({"qk_norm": True, "qkv_bias": True}, "hf", False, "qk_norm with qkv_bias (no published architecture has them"),
        ({"qkv_bias": True}, "gguf-f16", True, "architecture qwen2"),
        ({"qkv_bias": True, "head_dim": 128}, "gguf-f16", True, "architecture llama"),
        ({"nope_every": 4}, "hf", True, "SmolLM3ForCausalLM"),
        ({"nope_every": 3}, "hf", False, "nope=3 (smollm3 leaves out every 4th)"),
        ({"rope_scaling": RopeScaling("llama3", 8, 8192)}, "gguf-f16", True, "architecture llama"),
        ({"rope_scaling": RopeScaling("llama3", 8, 8192), "nope_every": 4}, "gguf-f16", False, "in llama and arcee files only"),
        ({"rope_scaling": RopeScaling("yarn", 8, 8192, 2.0)}, "gguf-f16", False, "yarn's bounds to be 1 and 32"),
        ({"rope_scaling": RopeScaling("yarn", 8, 8192, 2.0)}, "hf", True, "LlamaForCausalLM"),
        ({"layer_sharing": 2}, "onnx", True, "GroupQueryAttention with built-in"),
        ({"layer_sharing": 2, "nope_every": 4}, "onnx", False, "share=2 with nope=4"),
        ({"layer_sharing": 2}, "gguf-f16", True, "architecture llama, shared blocks written out as 60"),
        ({"layer_sharing": 2}, "hf", True, "LlamaForCausalLM, shared blocks written out as 60"),
        ({"layer_sharing": 2, "nope_every": 4}, "gguf-f16", False, "nope=4 with share=2"),
        ({"layer_sharing": 20}, "gguf-q4_0", False, "at most 512 layers, not 600"),
        ({"layer_sharing": 2}, "engine", True, "share=2"),
    ],
)
def test_each_rule_names_its_number(changes: dict[str, object], target: str, ok: bool, why: str) -> None:
    verdict = target_verdicts(SMOLLM2.replace(**changes))[target]
    assert verdict.ok is ok
    assert why in verdict.why
