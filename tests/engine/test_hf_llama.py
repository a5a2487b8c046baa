import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deepthin.engine.errors import FormatError, UnsupportedError
from deepthin.engine.hf_llama import model_from_hf_folder
from deepthin.engine.hf_tokenizer import tokenizer_document
from deepthin.engine.load import load_model
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.reference import Reference
from tests.support.gguf_files import write_gguf
from tests.support.hf_folders import hf_weights, write_hf_folder
from tests.support.refusal import assert_refused
from tests.support.tiny_models import PROMPT, TINY_SHAPES, lively_model, tiny_shape

SMALL = TokenizerSpec("smollm", ("<|end|>", "a", "b", "ab"), (3, 1, 1, 1), ("a b",), bos_id=0, eos_id=0)


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_folders_of_the_safetensors_package_load_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name))
    loaded = load_model(write_hf_folder(tmp_path / "tiny", model))
    assert loaded.shape == model.shape and loaded.name == "tiny"
    for part, values in model.tensors.items():
        assert np.array_equal(loaded.tensors[part].data, values.data), part


def test_folder_and_gguf_file_of_one_model_give_the_same_logits(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("wide_heads"))
    folder = load_model(write_hf_folder(tmp_path / "hf", model, config={"hidden_size": 96}))
    file = load_model(write_gguf(tmp_path / "model.gguf", model))
    one, other = (Reference(held.shape, held.dequantized()).logits(PROMPT) for held in (folder, file))
    assert np.array_equal(one, other)


def test_shards_load(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("plain"))
    folder = write_hf_folder(tmp_path / "hf", model)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, (name, values) in enumerate(hf_weights(model).items()):
        weight_map[name] = f"model-{number}.safetensors"
        save_file({name: values}, folder / weight_map[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load_model(folder)
    assert all(np.array_equal(loaded.tensors[part].data, held.data) for part, held in model.tensors.items())


def test_a_copy_of_the_embedding_and_old_buffers_are_let_through(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("plain"))
    folder = write_hf_folder(tmp_path / "hf", model)
    weights = hf_weights(model)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(weights, folder / "model.safetensors")
    assert load_model(folder).shape.tie_word_embeddings


WEIGHT_ERRORS: dict[str, tuple[dict[str, Any], Mapping[str, Any], str, type[Exception]]] = {
    "missing": ({"model.norm.weight": None}, {}, "tensor 'model.norm.weight' is missing", FormatError),
    "no_head": (
        {},
        {"tie_word_embeddings": False},
        "'lm_head.weight' is missing, .* 'tie_word_embeddings' be true",
        FormatError,
    ),
    "other_head": ({"lm_head.weight": np.zeros((96, 64), np.float32)}, {}, "'lm_head.weight' differs", FormatError),
    "narrow_head": ({"lm_head.weight": np.zeros((96, 32), np.float32)}, {}, "'lm_head.weight' differs", FormatError),
    "bias": (
        {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)},
        {},
        "q_proj.bias' is a bias",
        UnsupportedError,
    ),
    "foreign": ({"vision.weight": np.zeros(4, np.float32)}, {}, "'vision.weight' belongs to no part", FormatError),
    "more_layers": ({}, {"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight' is missing", FormatError),
    "many_layers": ({}, {"num_hidden_layers": 4096}, "announces 4096 layers, but there are only 20 tensors", FormatError),
    "fewer_layers": ({}, {"num_hidden_layers": 1}, "'model.layers.1.* belongs to no part", FormatError),
    "wider": ({}, {"hidden_size": 128}, r"dimensions \[96, 64\], but config.json needs \[96, 128\]", FormatError),
    "vocabulary": ({}, {"vocab_size": 97}, r"'model.embed_tokens.weight' has dimensions \[96, 64\]", FormatError),
    "kv_heads": (
        {},
        {"num_key_value_heads": 4},
        r"k_proj.weight' has dimensions \[32, 64\], but config.json needs \[64, 64\]",
        FormatError,
    ),
    "inner": ({}, {"intermediate_size": 64}, r"mlp.[a-z]*_proj.weight' has dimensions", FormatError),
    "transposed": (
        {"model.layers.0.mlp.up_proj.weight": np.zeros((64, 96), np.float32)},
        {},
        "up_proj.weight' has",
        FormatError,
    ),
    "flat": (
        {"model.norm.weight": np.zeros((64, 1), np.float32)},
        {},
        r"'model.norm.weight' has dimensions \[64, 1\]",
        FormatError,
    ),
    "architecture": ({}, {"architectures": ["GPT2LMHeadModel"]}, "architecture is 'GPT2LMHeadModel'", UnsupportedError),
    "dynamic_rope": ({}, {"rope_scaling": {"rope_type": "dynamic"}}, "'rope_scaling' asks for", UnsupportedError),
}


@pytest.mark.parametrize("name", WEIGHT_ERRORS)
def test_config_and_weights_that_disagree_are_refused(name: str, tmp_path: Path) -> None:
    changes, config, match, error = WEIGHT_ERRORS[name]
    model = lively_model(tiny_shape("plain"))
    folder = write_hf_folder(tmp_path / "hf", model, config=config)
    weights = {part: held for part, held in {**hf_weights(model), **changes}.items() if held is not None}
    save_file(weights, folder / "model.safetensors")
    assert_refused(load_model, folder, match, error=error)  # type: ignore[arg-type]


CONFIG_ERRORS = {
    "empty": ("", "not JSON"),
    "list": ("[]", "a JSON object is needed"),
    "cut": ('{"architectures": ["Llama', "not JSON"),
    "twice": ('{"hidden_size": 64, "hidden_size": 64}', "key 'hidden_size' appears twice"),
    "deep": ('{"a":' * 90_000, "nested too deeply"),
    "nan": ('{"rms_norm_eps": NaN}', "it holds NaN"),
    "large": (json.dumps({"a": "x" * (1 << 20)}), "too many for what it should be"),
}


@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_bad_config_is_refused(name: str, tmp_path: Path) -> None:
    text, match = CONFIG_ERRORS[name]
    folder = write_hf_folder(tmp_path / "hf", lively_model(tiny_shape("plain")))
    (folder / "config.json").write_text(text)
    line = assert_refused(load_model, folder, match)
    assert "config.json" in line


def test_no_config_is_refused(tmp_path: Path) -> None:
    assert_refused(model_from_hf_folder, tmp_path, "there is no config.json")


def _with_tokenizer(folder: Path, document: Any, settings: Any = None) -> Path:
    write_hf_folder(folder, lively_model(tiny_shape("plain")))
    (folder / "tokenizer.json").write_text(document if isinstance(document, str) else json.dumps(document))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_tokenizer_is_read(tmp_path: Path) -> None:
    settings = {"bos_token": "<|end|>", "eos_token": "<|end|>", "chat_template": "{{ 1/0 }}"}
    model = load_model(_with_tokenizer(tmp_path / "hf", tokenizer_document(SMALL), settings))
    assert model.tokenizer == SMALL and "tokenizer_note" not in model.metadata
    assert "chat_template" not in json.dumps(dict(model.metadata))


def test_without_a_usable_tokenizer_the_weights_load_and_say_why(tmp_path: Path) -> None:
    model = load_model(write_hf_folder(tmp_path / "none", lively_model(tiny_shape("plain"))))
    assert model.tokenizer is None and model.metadata["tokenizer_note"] == "there is no tokenizer.json"
    model = load_model(_with_tokenizer(tmp_path / "unigram", {"model": {"type": "Unigram"}}))
    assert model.tokenizer is None
    assert model.metadata["tokenizer_note"] == "tokenizer.json is not used: it is no BPE tokenizer but 'Unigram'"


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ("{", "not JSON"),
        (
            {**tokenizer_document(dataclasses.replace(SMALL, merges=())), "added_tokens": [{"id": 96, "content": "x"}]},
            "must be 0 to 95",
        ),
        (tokenizer_document(dataclasses.replace(SMALL, merges=("b a",))), "merge 0, 'b a', does not join"),
    ],
)
def test_damaged_tokenizer_is_refused(document: Any, match: str, tmp_path: Path) -> None:
    line = assert_refused(load_model, _with_tokenizer(tmp_path / "hf", document), match)
    assert "tokenizer.json" in line


def test_huge_tokenizer_is_refused_unread(tmp_path: Path) -> None:
    folder = _with_tokenizer(tmp_path / "hf", "")
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    assert_refused(load_model, folder, "1099511627776 bytes, too many")


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "hf", lively_model(tiny_shape("plain")))
    (folder / "config.json").rename(tmp_path / "elsewhere.json")
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    assert_refused(load_model, folder, "a link out of the folder")
