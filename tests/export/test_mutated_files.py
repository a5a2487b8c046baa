"""Files of a bundle changed behind verify's back: bytes, sizes, names in the manifest, tokenizers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepthin.engine.model import Model, TokenizerSpec
from deepthin.export.bundle import export_bundle
from deepthin.export.verify import verify_bundle
from tests.support.bundles import GGUF, GGUF_Q4, ONNX, ONNX_Q4, QUANT, bless, flip_bits, put, with_values


def _offset_of_weight(bundle: Path, name: str, quiet: Model) -> int:
    """Somewhere inside ``blk.0.ffn_up`` as the file stores it, at the last byte of an f32 or within a block."""
    values = quiet.tensors["blk.0.ffn_up"].dequantize()
    data = (bundle / name).read_bytes()
    if QUANT.get(name, "f32") == "q4_0":
        blocks = quiet.quantized("q4_0").tensors["blk.0.ffn_up"].data
        start = data.find(blocks.tobytes())
        return start + 5
    stored = values.T if name.endswith(".onnx") else values
    return data.index(np.ascontiguousarray(stored).tobytes()) + 4 * 130 + 3


@pytest.mark.parametrize("blessed", [True, False], ids=["checksum_fixed", "checksum_left"])
@pytest.mark.parametrize("file", ["hf/model.safetensors", GGUF, ONNX, GGUF_Q4])
def test_a_damaged_weight_byte(quiet: Model, bundle: Path, file: str, blessed: bool) -> None:
    flip_bits(bundle, file, _offset_of_weight(bundle, file, quiet), 0x80, blessed=blessed)
    result = verify_bundle(bundle, runtimes=["onnxruntime" if file == ONNX else "engine"])
    assert result["verdict"] == "fail"
    assert [check["path"] for check in result["files"] if not check["ok"]] == ([] if blessed else [file])
    assert any(line.startswith(f"checksum: {file}") for line in result["summary"]) is not blessed
    said = "blk.0.ffn_up: 1 of 6144 values differ, 1 of 96 rows, the first at ["
    named = [line for line in result["summary"] if line.startswith("differs: ") and said in line]
    if file.startswith("hf/"):  # it is the truth, so all f32 files differ from it, and verify says whom it suspects
        assert any(GGUF in line for line in named) and any(ONNX in line for line in named)
        assert result["summary"][1].startswith("suspect: all others agree on blk.0.ffn_up against hf")
    else:
        assert len(named) == 1 and file in named[0]
        assert result["first_parting"]["file"] == file


@pytest.mark.parametrize("file", [GGUF, ONNX])
def test_the_lowest_bit_of_one_weight(quiet: Model, bundle: Path, file: str) -> None:
    flip_bits(bundle, file, _offset_of_weight(bundle, file, quiet) - 3, 0x01, blessed=True)
    result = verify_bundle(bundle, runtimes=["onnxruntime", "engine"])
    assert result["verdict"] == "fail" and all(pair["ok"] for pair in result["pairs"])
    assert "no runtime left its budget" in result["summary"][0] and file in result["summary"][0]
    assert "blk.0.ffn_up: 1 of 6144 values differ" in result["summary"][0]


def test_a_damaged_byte_outside_the_weights(bundle: Path) -> None:
    data = (bundle / GGUF).read_bytes()
    flip_bits(bundle, GGUF, data.index(b"general.name") + len("general.name") + 12, 0x01, blessed=False)
    result = verify_bundle(bundle, runtimes=["engine"])
    assert result["verdict"] == "fail" and all(pair["ok"] for pair in result["pairs"])
    assert GGUF in result["summary"][0] and "sha256" in result["summary"][0]


def test_weights_wrong_alike_in_both_quantised_files(quiet: Model, bundle: Path) -> None:
    """Each file agrees with its own dequantised weights and with the other; only the truth does not."""
    for file in (GGUF_Q4, ONNX_Q4):
        put(bundle, file, with_values(quiet, blk_0_ffn_up=lambda values: values * np.float32(1.01)), "q4_0")
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert [line["file"] for line in result["weights"] if not line["ok"]] == [GGUF_Q4, ONNX_Q4]
    assert result["first_parting"]["file"] == ONNX_Q4


def test_a_manifest_of_another_shape(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text(encoding="utf-8")
    assert text.count('"rope_theta": 10000.0') == 1
    (bundle / "manifest.json").write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'), encoding="utf-8")
    result = verify_bundle(bundle, runtimes=["engine"])
    assert result["verdict"] == "fail"
    assert "manifest.json: rope_theta is 20000.0, but 10000.0 in hf" in result["summary"][0]


def test_a_truncated_file(bundle: Path) -> None:
    data = (bundle / GGUF).read_bytes()
    (bundle / GGUF).write_bytes(data[: len(data) // 2])
    bless(bundle, GGUF)
    result = verify_bundle(bundle, runtimes=["engine"])
    assert result["verdict"] == "fail"
    assert any(line.startswith(f"unreadable: {bundle / GGUF}") for line in result["summary"])


TOKENIZER = TokenizerSpec(
    "gpt-2", (*"abcdefgh", "ab", "abc", "<s>", "</s>"), (1,) * 10 + (3, 3), ("a b", "ab c"), bos_id=10, eos_id=11, add_bos=True
)


@pytest.fixture(scope="module")
def with_text(quiet: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text") / "good"
    export_bundle(replace(quiet, tokenizer=TOKENIZER), out, targets=["hf", "gguf"], quants=("f32",))
    return out


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (TOKENIZER, None),  # the 84 unused tokens that GGUF adds to fill the vocabulary are no difference
        (replace(TOKENIZER, pre="smollm"), "tokenizer.pre is smollm, but gpt-2 in hf"),
        (replace(TOKENIZER, merges=("b c", "ab c")), "tokenizer.merges is 'b c' at 0, but 'a b' at 0 in hf"),
        (replace(TOKENIZER, merges=("a b",)), "tokenizer.merges is over at 1, but 'ab c' at 1 in hf"),
        (replace(TOKENIZER, eos_id=9), "tokenizer.eos_id is 9, but 11 in hf"),
        (replace(TOKENIZER, add_bos=False), "tokenizer.add_bos is False, but True in hf"),
        (
            replace(TOKENIZER, tokens=(*"abczefgh", "ab", "abc", "<s>", "</s>")),
            "tokenizer.tokens is 'z' at 3, but 'd' at 3 in hf",
        ),
        (None, "tokenizer is absent, but present in hf"),
    ],
)
def test_a_wrong_tokenizer(
    quiet: Model, with_text: Path, tmp_path: Path, tokenizer: TokenizerSpec | None, says: str | None
) -> None:
    shutil.copytree(with_text, tmp_path / "bundle")
    put(tmp_path / "bundle", GGUF, replace(quiet, tokenizer=tokenizer))
    result = verify_bundle(tmp_path / "bundle", runtimes=["engine"])
    assert result["verdict"] == ("pass" if says is None else "fail"), result["summary"]
    assert says is None or f"{GGUF}: {says}" in result["summary"][0]
