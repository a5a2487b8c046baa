"""One thing is wrong with one file of a bundle, its checksum is made to fit, and verify has to say what and where."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from deepthin.engine.model import Model, TokenizerSpec
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import canonical_row_order, gguf_row_order
from deepthin.export.bundle import export_bundle
from deepthin.export.runs import RUNTIMES
from deepthin.export.verify import verify_bundle
from tests.support.bundles import bless, edit_onnx, exchanged, flip_bits, put, quiet_model, reshaped, rows_taken, with_values

HF, GGUF, ONNX = "hf", "gguf/model-f32.gguf", "transformersjs/onnx/model.onnx"
GGUF_Q4, ONNX_Q4 = "gguf/model-q4_0.gguf", "transformersjs/onnx/model_q4.onnx"
QUANT = {HF: "f32", GGUF: "f32", ONNX: "f32", GGUF_Q4: "q4_0", ONNX_Q4: "q4_0"}
READERS = {GGUF: "engine llama.cpp", GGUF_Q4: "engine llama.cpp", ONNX: "onnxruntime", ONNX_Q4: "onnxruntime"}


@pytest.fixture(scope="module")
def model() -> Model:
    return quiet_model(Shape.parse("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied,ctx=64"))


@pytest.fixture(scope="module")
def exported(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verify") / "good"
    export_bundle(model, out, targets=("hf", "transformersjs", "gguf"), quants=("f32", "q4_0"), accuracy_level=0, seed=0)
    return out


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_the_bundle_passes_before_it_is_touched(exported: Path) -> None:
    result = verify_bundle(exported, runtimes=RUNTIMES[:3])
    assert result["verdict"] == "pass" and result["first_parting"] is None
    assert [runtime["status"] for runtime in result["runtimes"]][:4] == ["ran"] * 4
    compared = {(pair["b"], pair["file"], pair["phase"]) for pair in result["pairs"]}
    assert compared == {
        (runtime, file, phase)
        for file, readers in (READERS | {HF: "engine"}).items()
        for runtime in readers.split()
        for phase in ("prefill", "decode", "chunks")
    }


@dataclass(frozen=True)
class Mutation:
    """``change`` makes a wrong model out of a right one; ``says`` must stand beside the file's name in the summary.

    ``position`` is where logits part: 0 for weights, 1 for anything that only turns by position. ``shows_in_q4`` is False where
    int8 activations hide the change from logits, so that only the comparison of files can tell.
    """

    name: str
    change: Callable[[Model], Model]
    says: str
    position: int = 0
    shows_in_q4: bool = True


MUTATIONS = (
    Mutation(
        "gate and up swapped",
        lambda m: exchanged(m, "blk.0.ffn_gate", "blk.0.ffn_up"),
        "blk.0.ffn_gate: it equals what blk.0.ffn_up",
    ),
    Mutation("k and v swapped", lambda m: exchanged(m, "blk.1.attn_k", "blk.1.attn_v"), "blk.1.attn_k: it equals", position=0),
    Mutation(
        "q/k permutation dropped", lambda m: rows_taken(m, canonical_row_order), "blk.0.attn_q: its rows are in the", position=1
    ),
    Mutation(
        "q/k permutation made twice", lambda m: rows_taken(m, gguf_row_order), "blk.0.attn_q: its rows are in the", position=1
    ),
    Mutation("rope base", lambda m: reshaped(m, rope_theta=500000.0), "rope_theta is 500000.0, but 10000.0", position=1),
    Mutation("eps", lambda m: reshaped(m, rms_norm_eps=1e-6), "rms_norm_eps is 1e-06, but 1e-05", shows_in_q4=False),
    Mutation(
        "zeroed layer",
        lambda m: with_values(m, blk_1_attn_output=lambda v: v * 0, blk_1_ffn_down=lambda v: v * 0),
        "blk.1.attn_output: it is all zeros",
    ),
    Mutation(
        "layers swapped", lambda m: exchanged(m, "blk.0.ffn_down", "blk.1.ffn_down"), "it equals what blk.1.ffn_down should be"
    ),
    Mutation("norms swapped", lambda m: exchanged(m, "blk.0.ffn_norm", "output_norm"), "it equals what output_norm should be"),
)


CASES = [
    pytest.param(mutation, file, id=f"{mutation.name}-{file}".replace(" ", "_").replace("/", "_"))
    for mutation in MUTATIONS
    for file in READERS
    if QUANT[file] == "f32" or mutation.name in ("q/k permutation dropped", "eps")
]


@pytest.mark.parametrize(("mutation", "file"), CASES)
def test_one_wrong_file_is_named(model: Model, bundle: Path, mutation: Mutation, file: str) -> None:
    put(bundle, file, mutation.change(model), QUANT[file])
    result = verify_bundle(bundle, runtimes=READERS[file].split())
    assert result["verdict"] == "fail"
    assert all(check["ok"] for check in result["files"])  # it is not the checksum that tells
    assert any(file in line and mutation.says in line for line in result["summary"]), result["summary"]
    assert not any(line.startswith("suspect") for line in result["summary"])
    wrong = {pair["file"] for pair in result["pairs"] if not pair["ok"]}
    parting = result["first_parting"]
    if file == GGUF_Q4 and not mutation.shows_in_q4:
        assert not wrong and parting["runtime"] is None and parting["file"] == file
        assert file in result["summary"][0] and mutation.says in result["summary"][0]
        return
    assert wrong == {file}
    assert {pair["b"] for pair in result["pairs"] if not pair["ok"]} == set(READERS[file].split())
    assert parting["file"] == file and parting["runtime"] in READERS[file] and parting["phase"] == "prefill"
    late = file == GGUF_Q4 and mutation.position > 0  # the first positions hardly turn, and int8 activations hide that
    assert mutation.position <= parting["position"] <= (12 if late else mutation.position)
    assert f"first part at position {parting['position']} of prefill: {parting['runtime']} on {file}" in result["summary"][0]


@pytest.mark.parametrize("mutation", MUTATIONS[::4], ids=lambda mutation: mutation.name.replace(" ", "_").replace("/", ""))
def test_a_wrong_truth_is_suspected(model: Model, bundle: Path, mutation: Mutation) -> None:
    put(bundle, HF, mutation.change(model))
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert result["summary"][1].startswith("suspect: ") and result["summary"][1].endswith("so hf itself looks changed")


def _wire_gate_to_up(proto: Any) -> None:
    nodes = {node.output[0]: node for node in proto.graph.node}
    gate, up = nodes["blk.0.ffn_gate.out"], nodes["blk.0.ffn_up.out"]
    gate.input[1], up.input[1] = up.input[1], gate.input[1]


def _activate_up(proto: Any) -> None:
    for node in proto.graph.node:
        if node.output[0].startswith("blk.0.ffn_"):
            swapped = {"blk.0.ffn_gate.out": "blk.0.ffn_up.out", "blk.0.ffn_up.out": "blk.0.ffn_gate.out"}
            for index, name in enumerate(node.input):
                node.input[index] = swapped.get(name, name)


def _attribute(op: str, name: str, value: Any) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        for node in proto.graph.node:
            if node.op_type == op:
                kept = [item for item in node.attribute if item.name != name]
                del node.attribute[:]
                node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def _seqlens(step: int) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        proto.graph.initializer.append(numpy_helper.from_array(np.array(1 + step, np.int64), "off_by_one"))
        for node in proto.graph.node:
            if node.output[0] == "last_position":
                node.input[1] = "off_by_one"

    return change


def _untie(proto: Any) -> None:
    for node in proto.graph.node:
        if "logits" in node.output:
            table = next(item for item in proto.graph.initializer if item.name == node.input[1])
            values = numpy_helper.to_array(table)[::-1]
            proto.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), "head"))
            node.input[1] = "head"


def _first_eps(proto: Any) -> None:
    for item in proto.graph.initializer:
        if item.name == "rms_norm_eps":
            item.CopyFrom(numpy_helper.from_array(np.array(1e-6, np.float32), item.name))


def _one_table_row(proto: Any) -> None:
    for item in proto.graph.initializer:
        if item.name == "sin_cache":
            values = numpy_helper.to_array(item).copy()
            values[30] = values[31]
            item.CopyFrom(numpy_helper.from_array(values, item.name))


@pytest.mark.parametrize(
    ("change", "says", "position"),
    [
        (_wire_gate_to_up, "blk.0.ffn_gate: it equals what blk.0.ffn_up should be: gate and up look swapped", 0),
        (_activate_up, f"onnxruntime on {ONNX} parts from position 0", 0),
        (_attribute("GroupQueryAttention", "rotary_interleaved", 1), "rope_interleaved is 1, but 0", 1),
        (_attribute("GroupQueryAttention", "scale", 0.3), "attention_scale is 0.3", 1),
        (_attribute("GroupQueryAttention", "local_window_size", 16), "attention_window is 16, but -1", 16),
        (_attribute("GroupQueryAttention", "do_rotary", 0), f"onnxruntime on {ONNX} parts from position 1", 1),
        (_untie, "tie_word_embeddings is False, but True", 0),
        (_first_eps, "rms_norm_eps is [1e-05, 1e-06], but 1e-05", 0),
        (_one_table_row, "rope_theta is 10000.0 up to position 29 only, but 10000.0 in hf", 30),
    ],
)
def test_one_wrong_node_is_named(bundle: Path, change: Callable[[Any], None], says: str, position: int) -> None:
    edit_onnx(bundle, ONNX, change)
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert any(ONNX in line and says in line for line in result["summary"]), result["summary"]
    parting = result["first_parting"]
    assert (parting["runtime"], parting["file"]) == ("onnxruntime", ONNX)
    assert parting["position"] == position


def _changed(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Alters the values of initializer ``name``."""

    def edit(proto: Any) -> None:
        (item,) = [item for item in proto.graph.initializer if item.name == name]
        item.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(numpy_helper.to_array(item))), name))

    return edit


def _gguf_nibbles(codes: Any) -> Any:
    """Bytes that hold values j and j + 16 of a block, as GGUF has them, where 2j and 2j + 1 belong."""
    whole = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], 32)
    return whole[..., :16] | whole[..., 16:] << 4


def _zero_point(name: str, point: int) -> Callable[[Any], None]:
    def edit(proto: Any) -> None:
        (node,) = [node for node in proto.graph.node if node.op_type == "MatMulNBits" and node.input[1] == name + "_quant"]
        (scales,) = [item for item in proto.graph.initializer if item.name == name + "_scales"]
        points = np.full(list(scales.dims), point, np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(points, name + "_zero_points"))
        node.input.append(name + "_zero_points")

    return edit


_UP, _O = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        (
            ONNX_Q4,
            _changed(_UP + "_scales", lambda v: np.roll(v, 1)),
            "blk.0.ffn_up: .*by the same factor, as by the scale of an",
        ),
        (ONNX_Q4, _changed(_UP + "_quant", lambda v: v << 4 | v >> 4), "blk.0.ffn_up: its values are swapped in pairs"),
        (ONNX_Q4, _changed(_UP + "_quant", _gguf_nibbles), "blk.0.ffn_up: its values are in GGUF's nibble order"),
        (ONNX_Q4, _zero_point(_UP, 7), "blk.0.ffn_up: .*by the same amount, as by a wrong zero point"),
        (ONNX, _changed(_O, lambda v: v.T), "blk.1.attn_output: it is stored transposed"),
    ],
)
def test_wrong_blocks_are_described(bundle: Path, file: str, change: Callable[[Any], None], says: str) -> None:
    edit_onnx(bundle, file, change)
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert any(re.search(f"{file}: {says}", line) for line in result["summary"]), result["summary"]
    assert {pair["file"] for pair in result["pairs"] if not pair["ok"]} == {file}


def test_caches_of_two_layers_exchanged(bundle: Path) -> None:
    """A prefill starts from empty caches and cannot tell; the first token after it reads rows that are not its own."""

    def change(proto: Any) -> None:
        first, second = (node for node in proto.graph.node if node.op_type == "GroupQueryAttention")
        for index in (3, 4):
            first.input[index], second.input[index] = second.input[index], first.input[index]

    edit_onnx(bundle, ONNX, change)
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    phases = {pair["phase"]: pair["ok"] for pair in result["pairs"] if pair["file"] == ONNX}
    assert phases == {"prefill": True, "decode": False, "chunks": False}
    assert result["first_parting"]["position"] == 1 and result["first_parting"]["phase"] == "decode"


@pytest.mark.parametrize("step", [-1, 1])
def test_seqlens_off_by_one(bundle: Path, step: int) -> None:
    edit_onnx(bundle, ONNX, _seqlens(step))
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    parting = result["first_parting"]
    assert (parting["runtime"], parting["file"]) == ("onnxruntime", ONNX) and parting["why"]
    assert "onnxruntime" in result["summary"][0] and ONNX in result["summary"][0]


def test_wrong_kv_heads_in_onnx(bundle: Path) -> None:
    edit_onnx(bundle, ONNX, _attribute("GroupQueryAttention", "kv_num_heads", 4))
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert any(f"{ONNX}: num_kv_heads is 4, but 2 in hf" in line for line in result["summary"])
    (state,) = [runtime for runtime in result["runtimes"] if runtime["name"] == "onnxruntime"]
    assert state["status"] == "failed" and ONNX in state["why"]
    assert result["first_parting"]["file"] == ONNX and result["first_parting"]["runtime"] == "onnxruntime"
    assert {pair["file"] for pair in result["pairs"] if pair["ok"]} == {ONNX_Q4}  # the other file still runs


def test_wrong_kv_heads_in_gguf(bundle: Path) -> None:
    data = (bundle / GGUF).read_bytes()
    key = b"llama.attention.head_count_kv"
    value = data.index(key) + len(key) + 4  # after the value's type
    assert data[value] == 2
    flip_bits(bundle, GGUF, value, 2 ^ 4, blessed=True)
    result = verify_bundle(bundle, runtimes=["engine"])
    assert result["verdict"] == "fail" and result["first_parting"]["file"] == GGUF
    assert any(line.startswith("unreadable") and GGUF in line and "attn_k" in line for line in result["summary"])


def test_an_untied_head_in_gguf(model: Model, bundle: Path) -> None:
    tensors = dict(model.tensors)
    tensors["output"] = tensors["token_embd"]
    untied = Model(model.shape.replace(tie_word_embeddings=False), tensors)
    put(bundle, GGUF, untied)
    result = verify_bundle(bundle, runtimes=["engine"])
    assert result["verdict"] == "fail"
    assert any(f"{GGUF}: tie_word_embeddings is False, but True in hf" in line for line in result["summary"])
    put(bundle, GGUF, with_values(untied, output=lambda values: values[::-1]))
    result = verify_bundle(bundle, runtimes=["engine"])
    assert result["first_parting"]["file"] == GGUF and result["first_parting"]["position"] == 0
    assert any(f"differs: {GGUF}: output:" in line for line in result["summary"])


def _offset_of_weight(bundle: Path, name: str, model: Model) -> int:
    """Somewhere inside ``blk.0.ffn_up`` as the file stores it, at the last byte of an f32 or within a block."""
    values = model.tensors["blk.0.ffn_up"].dequantize()
    data = (bundle / name).read_bytes()
    if QUANT.get(name, "f32") == "q4_0":
        blocks = model.quantized("q4_0").tensors["blk.0.ffn_up"].data
        start = data.find(blocks.tobytes())
        return start + 5
    stored = values.T if name.endswith(".onnx") else values
    return data.index(np.ascontiguousarray(stored).tobytes()) + 4 * 130 + 3


@pytest.mark.parametrize("blessed", [True, False], ids=["checksum_fixed", "checksum_left"])
@pytest.mark.parametrize("file", ["hf/model.safetensors", GGUF, ONNX, GGUF_Q4])
def test_a_damaged_weight_byte(model: Model, bundle: Path, file: str, blessed: bool) -> None:
    flip_bits(bundle, file, _offset_of_weight(bundle, file, model), 0x80, blessed=blessed)
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
def test_the_lowest_bit_of_one_weight(model: Model, bundle: Path, file: str) -> None:
    flip_bits(bundle, file, _offset_of_weight(bundle, file, model) - 3, 0x01, blessed=True)
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


def test_weights_wrong_alike_in_both_quantised_files(model: Model, bundle: Path) -> None:
    """Each file agrees with its own dequantised weights and with the other; only the truth does not."""
    for file in (GGUF_Q4, ONNX_Q4):
        put(bundle, file, with_values(model, blk_0_ffn_up=lambda values: values * np.float32(1.01)), "q4_0")
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


def test_onnx_weights_of_another_size(bundle: Path) -> None:
    def change(proto: Any) -> None:
        for item in proto.graph.initializer:
            if item.name == "model.norm.weight":
                item.CopyFrom(helper.make_tensor(item.name, TensorProto.FLOAT, [3], [1.0, 2.0, 3.0]))

    edit_onnx(bundle, ONNX, change)
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert any("output_norm: it has dimensions [3] instead of [64]" in line for line in result["summary"])


TOKENIZER = TokenizerSpec(
    "gpt-2", (*"abcdefgh", "ab", "abc", "<s>", "</s>"), (1,) * 10 + (3, 3), ("a b", "ab c"), bos_id=10, eos_id=11, add_bos=True
)


@pytest.fixture(scope="module")
def with_text(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text") / "good"
    export_bundle(replace(model, tokenizer=TOKENIZER), out, targets=["hf", "gguf"], quants=("f32",))
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
    model: Model, with_text: Path, tmp_path: Path, tokenizer: TokenizerSpec | None, says: str | None
) -> None:
    shutil.copytree(with_text, tmp_path / "bundle")
    put(tmp_path / "bundle", GGUF, replace(model, tokenizer=tokenizer))
    result = verify_bundle(tmp_path / "bundle", runtimes=["engine"])
    assert result["verdict"] == ("pass" if says is None else "fail"), result["summary"]
    assert says is None or f"{GGUF}: {says}" in result["summary"][0]
