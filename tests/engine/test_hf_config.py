from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import DeepthinError, FormatError, UnsupportedError
from deepthin.engine.hf_config import config_from_shape, shape_from_config
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.shape import Shape
from tests.support.refusal import assert_one_line

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
        ({"architectures": ["Qwen3ForCausalLM"]}, "architecture is 'Qwen3ForCausalLM'"),
        ({"architectures": None, "model_type": "gemma"}, "architecture is 'gemma'"),
        ({"architectures": ["A", "B"]}, r"architecture is \['A', 'B'\]"),
        ({"architectures": {"x": 1}}, "architecture is {'x': 1}"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"attention_bias": True}, "'attention_bias' asks for biases in attention"),
        ({"mlp_bias": True}, "'mlp_bias' asks for biases in the MLP"),
        ({"mlp_bias": 0}, "'mlp_bias' asks for biases"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'rope_scaling' asks for rotary scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling' asks for rotary scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "asks for rotary scaling 'yarn'"),
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
KEYS = [*BASE, "head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "hidden_act"]


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
        ("L=1,d=64,heads=4,ff=96,vocab=9,qk_norm", "cannot express qk_norm"),
        ("L=1,d=64,heads=4,ff=96,vocab=9,share=2", "cannot express share=2"),
        ("L=1,d=66,heads=4,head_dim=16,ff=96,vocab=9", "d=66 with heads=4, which do not divide it"),
    ],
)
def test_shapes_llama_cannot_express_are_refused(text: str, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        config_from_shape(Shape.parse(text))
