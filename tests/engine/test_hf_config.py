import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.architectures import architecture_of, missing_architecture
from deepthin.engine.errors import DeepthinError, FormatError, UnsupportedError
from deepthin.engine.hf_config import config_from_shape, shape_from_config
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.shape import Shape
from tests.support.refusal import assert_one_line
from tests.support.tiny_models import VARIANT_SHAPES, tiny_shape

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
HUGE = 10**400


def test_defaults_are_llama_config_s() -> None:
    shape = shape_from_config(BASE, "config.json")
    assert shape == Shape(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        intermediate_size=96,
        vocab_size=96,
        num_kv_heads=4,
        head_dim=16,
        tie_word_embeddings=False,
        max_seq_len=2048,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
    )


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"num_key_value_heads": 2}, "num_kv_heads", 2),
        ({"num_key_value_heads": None}, "num_kv_heads", 4),
        ({"head_dim": 32}, "head_dim", 32),
        ({"head_dim": None}, "head_dim", 16),
        ({"hidden_size": 66, "head_dim": 16}, "hidden_size", 66),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({"rope_theta": 500000}, "rope_theta", 500000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, "rope_theta", 1e5),
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_theta": 100000}, "rope_theta", 1e5),
        ({"rope_parameters": None, "rope_theta": 3e4}, "rope_theta", 3e4),
        ({"rope_scaling": None}, "rope_theta", 1e4),
        ({"rope_scaling": {"rope_type": "default"}}, "rope_theta", 1e4),
        ({"architectures": None, "model_type": "llama"}, "num_layers", 2),
        ({"attention_bias": False, "mlp_bias": None, "partial_rotary_factor": 1.0}, "num_layers", 2),
        ({"rms_norm_eps": 0}, "rms_norm_eps", 0.0),
    ],
)
def test_keys_reach_the_shape(change: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(shape_from_config({**BASE, **change}, "config.json"), field) == value


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architecture is 'Qwen3MoeForCausalLM'"),
        ({"architectures": ["ArceeForCausalLM"], "hidden_act": "silu"}, "'hidden_act' is 'silu'.*; 'relu2' is needed"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 2}, "'layer_types' asks for"),
        ({"architectures": ["SmolLM3ForCausalLM"], "attention_bias": True}, "biases in attention"),
        ({"architectures": None, "model_type": "gemma"}, "architecture is 'gemma'"),
        ({"architectures": ["A", "B"]}, r"architecture is \['A', 'B'\]"),
        ({"architectures": {"x": 1}}, "architecture is {'x': 1}"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"attention_bias": True}, "'attention_bias' asks for biases in attention"),
        ({"mlp_bias": True}, "'mlp_bias' asks for biases in the MLP"),
        ({"mlp_bias": 0}, "'mlp_bias' asks for biases"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "'rope_scaling' asks for rotary scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "asks for rotary scaling 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 3}}, "of kind 'linear' has 'beta'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "bounds that are not rounded"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by another tool"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"sliding_window": 4096}, "sliding-window"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_name(change: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as caught:
        shape_from_config({**BASE, **change}, "config.json")
    assert_one_line(str(caught.value))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        *(({key: None}, f"'{key}' is None") for key in BASE if key != "architectures"),
        ({"hidden_size": "64"}, "'hidden_size' is '64'"),
        ({"hidden_size": 64.0}, "'hidden_size' is 64.0"),
        ({"hidden_size": True}, "'hidden_size' is True"),
        ({"hidden_size": 0}, "'hidden_size' is 0"),
        ({"hidden_size": -64}, "'hidden_size' is -64"),
        ({"hidden_size": HUGE}, "'hidden_size' is 1000"),
        ({"num_hidden_layers": 5000}, "num_layers is 5000"),
        ({"num_attention_heads": 5}, "5 heads do not divide a hidden_size of 64"),
        ({"num_key_value_heads": 3}, "kv=3 does not divide heads=4"),
        ({"num_key_value_heads": 0}, "'num_key_value_heads' is 0"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' is '1e-5'"),
        ({"rms_norm_eps": -1e-5}, "'rms_norm_eps' is -1e-05"),
        ({"rms_norm_eps": float("inf")}, "'rms_norm_eps' is inf"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' is None"),
        ({"rope_theta": 0}, "'rope_theta' is 0"),
        ({"rope_theta": HUGE}, "'rope_theta' is 1000"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, "'rope_theta' is 10000, but 20000 in 'rope_parameters'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'original_max_position_embeddings' is None"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is None"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "'factor' is 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"type": "linear", "factor": 4}}, "differ"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 0]}, "nope=1, but 0"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "must list 0 or 1 for each of 2 layers"),
        ({"rope_parameters": [1]}, r"'rope_parameters' is \[1\]"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1"),
        ({"tie_word_embeddings": None}, "'tie_word_embeddings' is None"),
        ({"max_position_embeddings": 1 << 40}, "'max_position_embeddings' is 1099511627776"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        shape_from_config({**BASE, **change}, "folder/config.json")
    assert_one_line(str(caught.value))
    assert str(caught.value).startswith("folder/config.json: ")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
OTHERS = ["no_rope_layers", "use_sliding_window", "layer_types"]
KEYS = [
    *BASE,
    *OTHERS,
    "head_dim",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "hidden_act",
]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*KEYS, "tie_word_embeddings", "max_position_embeddings", "sliding_window"]), JUNK, max_size=3
    )
)
def test_any_value_gives_a_shape_or_one_clear_line(change: dict[str, Any]) -> None:
    try:
        shape = shape_from_config({**BASE, **change}, "config.json")
    except DeepthinError as error:
        assert isinstance(error, (FormatError, UnsupportedError))
        assert_one_line(str(error))
    else:
        assert isinstance(shape, Shape)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    kv=st.integers(1, 4),
    group=st.integers(1, 4),
    width=st.integers(1, 40),
    layers=st.integers(1, 200),
    head_dim=st.integers(1, 64),
    tied=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-6, 1e-8]),
    theta=st.sampled_from([1e4, 1e5, 5e5]),
)
def test_config_from_shape_is_the_inverse(
    kv: int, group: int, width: int, layers: int, head_dim: int, tied: bool, eps: float, theta: float
) -> None:
    shape = Shape(
        num_layers=layers,
        hidden_size=width * kv * group,
        num_heads=kv * group,
        num_kv_heads=kv,
        head_dim=2 * head_dim,
        intermediate_size=100,
        vocab_size=1000,
        tie_word_embeddings=tied,
        rms_norm_eps=eps,
        rope_theta=theta,
    )
    assert shape_from_config(config_from_shape(shape), "config.json") == shape


def test_config_holds_both_rope_forms_dtype_and_token_ids() -> None:
    shape = Shape.parse("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied,theta=100000.0")
    spec = TokenizerSpec("gpt-2", ("a", "b", "c"), (1, 1, 3), (), bos_id=2, eos_id=1, pad_id=None)
    config = config_from_shape(shape, dtype="bf16", tokenizer=spec)
    assert config["rope_theta"] == 1e5 and config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e5}
    assert config["dtype"] == "bfloat16"
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (2, 1, None)
    assert config_from_shape(shape)["bos_token_id"] is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("L=1,d=64,heads=4,ff=96,vocab=9,mlp=gelu", "cannot express mlp=gelu"),
        ("L=1,d=64,heads=4,ff=96,vocab=9,qk_norm,qkv_bias", "cannot express qk_norm with qkv_bias"),
        ("L=1,d=64,heads=4,ff=96,vocab=9,share=2", "cannot express share=2"),
        ("L=1,d=66,heads=4,head_dim=16,ff=96,vocab=9", "d=66 with heads=4, which do not divide it"),
    ],
)
def test_shapes_llama_cannot_express_are_refused(text: str, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        config_from_shape(Shape.parse(text))


CHECKPOINTS: dict[str, tuple[dict[str, Any], str]] = {  # keys as such checkpoints carry them, without those of no meaning here
    "qwen2.5-0.5b": (
        {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
            "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
        },
        "L=24,d=896,heads=14,kv=2,ff=4864,vocab=151936,tied,qkv_bias,ctx=32768,eps=1e-06,theta=1000000.0",
    ),
    "qwen3-0.6b": (
        {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        "L=28,d=1024,heads=16,kv=8,head_dim=128,ff=3072,vocab=151936,tied,qk_norm,ctx=40960,eps=1e-06,theta=1000000.0",
    ),
    "llama-3.2-1b": (
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
            "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
        "L=16,d=2048,heads=32,kv=8,ff=8192,vocab=128256,tied,ctx=131072,theta=500000.0,rope=llama3_32_8192",
    ),
    "smollm3-3b": (
        {
            "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "mlp_bias": False,
            "max_position_embeddings": 65536, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
            "vocab_size": 128256,
        },
        "L=36,d=2048,heads=16,kv=4,ff=11008,vocab=128256,tied,ctx=65536,eps=1e-06,theta=5000000.0,nope=4",
    ),
    "afm-4.5b": (
        {
            "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "attention_bias": False, "head_dim": 128,
            "hidden_act": "relu2", "hidden_size": 2560, "intermediate_size": 18432, "max_position_embeddings": 65536,
            "mlp_bias": False, "num_attention_heads": 20, "num_hidden_layers": 36, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 128004,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn",
            },
        },
        "L=36,d=2560,heads=20,kv=4,ff=18432,vocab=128004,untied,mlp=relu2,ctx=65536,rope=yarn_20_4096",
    ),
    "mobilellm-125m-layer-share": (
        {
            "architectures": ["MobileLLMForCausalLM"], "model_type": "mobilellm", "hidden_act": "silu", "hidden_size": 576,
            "intermediate_size": 1536, "layer_sharing": True, "max_position_embeddings": 2048, "num_attention_heads": 9,
            "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "share_embedding": True, "tie_word_embeddings": False, "vocab_size": 32000,
        },
        "L=30,d=576,heads=9,kv=3,ff=1536,vocab=32000,tied,share=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_configurations_of_published_models(name: str) -> None:
    config, text = CHECKPOINTS[name]
    assert shape_from_config(config, "config.json").text == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen2ForCausalLM", "kv=32,ff=96,vocab=9,untied,qkv_bias,ctx=32768,eps=1e-06"),
        ("Qwen3ForCausalLM", "kv=32,head_dim=128,ff=96,vocab=9,untied,qk_norm,ctx=32768,eps=1e-06"),
        ("ArceeForCausalLM", "kv=32,ff=96,vocab=9,untied,mlp=relu2,ctx=4096"),
        ("SmolLM3ForCausalLM", "kv=4,ff=96,vocab=9,tied,ctx=32768,eps=1e-06,theta=2000000.0,nope=4"),
    ],
)
def test_missing_keys_mean_what_each_class_means(name: str, text: str) -> None:
    config = {"architectures": [name], "hidden_size": 64, "num_attention_heads": 32, "num_hidden_layers": 5}
    found = shape_from_config({**config, "intermediate_size": 96, "vocab_size": 9}, "config.json")
    assert found.text == f"L=5,d=64,heads=32,{text}"


def test_yarn_takes_its_magnitude_from_either_pair_of_keys() -> None:
    def scaling(**more: Any) -> Any:
        parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **more}
        return shape_from_config({**BASE, "rope_parameters": parameters}, "config.json").rope_scaling

    assert scaling().attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert scaling(attention_factor=1.5, mscale=2.0, mscale_all_dim=1.0).attention_factor == 1.5
    both = (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    assert scaling(mscale=2.0, mscale_all_dim=1.0).attention_factor == pytest.approx(both)
    assert scaling(beta_fast=None, attention_factor=None) == scaling()
    assert (scaling(beta_fast=16, beta_slow=2).low, scaling(beta_fast=16, beta_slow=2).high) == (2.0, 16.0)


@pytest.mark.parametrize("name", [name for name in VARIANT_SHAPES if not missing_architecture(tiny_shape(name))])
def test_config_of_every_architecture_is_the_inverse(name: str) -> None:
    shape = tiny_shape(name)
    config = json.loads(json.dumps(config_from_shape(shape)))
    assert shape_from_config(config, "config.json") == shape
    assert config["architectures"] == [architecture_of(shape).hf_class]
    assert ("attention_bias" in config) == (not shape.qkv_bias)
