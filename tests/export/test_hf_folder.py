from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tokenizers

from deepthin.engine.errors import FormatError, UnsupportedError, UsageError
from deepthin.engine.formats import BF16, F16, F32, Q8_0
from deepthin.engine.load import load_model
from deepthin.engine.model import Tensor, TokenizerSpec
from deepthin.engine.quants import f32_to_bf16, quantize
from deepthin.engine.shape import Shape
from deepthin.engine.targets import target_verdicts
from deepthin.engine.tensors import tensor_specs
from deepthin.export.hf_folder import write_hf_folder
from deepthin.export.safetensors_writer import StoredTensor, write_safetensors
from tests.support.tiny_models import VARIANT_SHAPES, lively_model, tiny_shape


@pytest.mark.parametrize("name", ["plain", "wide_heads"])
def test_safetensors_package_reads_back_every_tensor(name: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name)).quantized("q4_1")
    written = write_hf_folder(model, tmp_path)
    found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    specs = tensor_specs(model.shape)
    assert set(found) == {spec.hf_name for spec in specs}
    for spec in specs:
        np.testing.assert_array_equal(found[spec.hf_name], model.tensors[spec.name].dequantize())
    assert written == sum(values.nbytes for values in found.values())
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


def test_half_precision_folders(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("plain"))
    want = model.tensors["blk.0.attn_q"].dequantize()
    for dtype, number in (("f16", "F16"), ("bf16", "BF16")):
        (tmp_path / dtype).mkdir()
        write_hf_folder(model, tmp_path / dtype, dtype=dtype)
        data = (tmp_path / dtype / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        entry = json.loads(data[8 : 8 + length])["model.layers.0.self_attn.q_proj.weight"]
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        assert entry["dtype"] == number
        bits = np.frombuffer(data[start:end], np.uint16).reshape(want.shape)
        np.testing.assert_array_equal(bits, want.astype(np.float16).view(np.uint16) if dtype == "f16" else f32_to_bf16(want))
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_config_says_what_the_shape_says(tmp_path: Path) -> None:
    shape = tiny_shape("wide_heads")
    write_hf_folder(lively_model(shape), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 32 and config["num_key_value_heads"] == 1 and config["tie_word_embeddings"] is False
    assert config["rope_parameters"]["rope_theta"] == 500000.0 and config["rms_norm_eps"] == 1e-5
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # else readers assume 1 and 2


def test_tokenizer_files(tmp_path: Path) -> None:
    texts = (*"abcdefgh", "é", "ab", "abc", "<|end|>", "<bos>")
    spec = TokenizerSpec("gpt-2", texts, (1,) * 11 + (3, 3), ("a b", "ab c"), bos_id=12, eos_id=11, add_bos=True)
    write_hf_folder(dataclasses.replace(lively_model(tiny_shape("plain")), tokenizer=spec), tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode("abcab<|end|>").ids == [12, 10, 9, 11]
    assert theirs.get_vocab_size() == 13
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|end|>" and settings["bos_token"] == "<bos>" and settings["model_max_length"] == 64
    assert "pad_token" not in settings and "chat_template" not in settings
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 12, "eos_token_id": 11, "pad_token_id": None}
    assert load_model(tmp_path).tokenizer == spec


def test_exact_bytes_of_a_small_file(tmp_path: Path) -> None:
    tensors = [
        StoredTensor("b", F32, (2,), lambda: quantize(np.array([1, -2], np.float32), F32)),
        StoredTensor("a", F16, (1, 1), lambda: quantize(np.array([[0.5]], np.float32), F16)),
        StoredTensor("c", BF16, (1,), lambda: quantize(np.array([1], np.float32), BF16)),
    ]
    assert write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt"}) == 12
    header = (
        b'{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F16","shape":[1,1],"data_offsets":[8,10]},"c":{"dtype":"BF16","shape":[1],"data_offsets":[10,12]}}'
    )
    header += b" " * (-len(header) % 8)
    data = b"\x00\x00\x80\x3f\x00\x00\x00\xc0" + b"\x00\x38" + b"\x80\x3f"
    assert (tmp_path / "x.safetensors").read_bytes() == len(header).to_bytes(8, "little") + header + data


def test_same_model_same_bytes(tmp_path: Path) -> None:
    digests = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_hf_folder(lively_model(tiny_shape("plain")), tmp_path / name)
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((tmp_path / name).iterdir())])
    assert digests[0] == digests[1]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no multiple of heads=3"):
        write_hf_folder(lively_model(Shape.parse("L=1,d=64,heads=3,head_dim=32,ff=64,vocab=40")), tmp_path)
    with pytest.raises(UsageError, match="dtype 'q8_0' is unknown; use one of f32, f16, bf16"):
        write_hf_folder(lively_model(tiny_shape("plain")), tmp_path, dtype="q8_0")
    assert not list(tmp_path.iterdir())
    model = lively_model(tiny_shape("plain"))
    huge = Tensor.from_values(np.full((64, 64), 1e6, np.float32), F32)
    overflowing = type(model)(model.shape, {**model.tensors, "blk.0.attn_q": huge})
    with pytest.raises(FormatError, match="larger than f16 can hold"):
        write_hf_folder(overflowing, tmp_path, dtype="f16")
    one = StoredTensor("a", F32, (1,), lambda: quantize(np.ones(1, np.float32), F32))
    with pytest.raises(FormatError, match="two tensors are called 'a'"):
        write_safetensors(tmp_path / "twice", [one, one], {})
    blocks = StoredTensor("a", Q8_0, (32,), lambda: quantize(np.ones(32, np.float32), Q8_0))
    with pytest.raises(FormatError, match="no type for q8_0"):
        write_safetensors(tmp_path / "blocks", [blocks], {})


@pytest.mark.parametrize(
    "name", [name for name in VARIANT_SHAPES if target_verdicts(tiny_shape(name))["hf"].ok and name != "shared"]
)
def test_every_architecture_reads_back_whole(name: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name))
    write_hf_folder(model, tmp_path)
    read = load_model(tmp_path)
    assert read.shape == model.shape
    for part, values in model.dequantized().items():
        np.testing.assert_array_equal(read.tensors[part].dequantize(), values, err_msg=part)
    names = set(safetensors.numpy.load_file(tmp_path / "model.safetensors"))
    assert ("model.layers.0.self_attn.q_proj.bias" in names) == model.shape.qkv_bias
    assert ("model.layers.0.self_attn.k_norm.weight" in names) == model.shape.qk_norm
    assert ("model.layers.0.mlp.gate_proj.weight" in names) == (model.shape.mlp == "swiglu")


def test_a_folder_with_shared_layers_is_run_twice_a_layer(tmp_path: Path) -> None:
    """As Meta's MobileLLM folders say it; no class of transformers itself does."""
    shared = lively_model(tiny_shape("shared"))
    write_hf_folder(dataclasses.replace(shared, shape=shared.shape.replace(layer_sharing=1)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changed = {**config, "architectures": ["MobileLLMForCausalLM"], "layer_sharing": True, "share_embedding": True}
    (tmp_path / "config.json").write_text(json.dumps({**changed, "tie_word_embeddings": False}))
    assert load_model(tmp_path).shape == shared.shape
