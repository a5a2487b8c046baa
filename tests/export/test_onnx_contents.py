from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from deepthin.engine.errors import FormatError
from deepthin.engine.model import Model
from deepthin.export.contents import ModelFile, compare_facts, model_files, read_contents
from deepthin.export.manifest import BundleFile, Manifest
from deepthin.export.onnx_contents import onnx_facts, onnx_weights, read_onnx, rounds_activations
from deepthin.export.onnx_model import write_onnx
from deepthin.export.weight_parity import first_weight_difference
from tests.support.tiny_models import TINY_SHAPES, lively_model, tiny_shape


@pytest.mark.parametrize("quant", ["f32", "f16", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("name", [*TINY_SHAPES, "qwen3_odd", "qwen2", "arcee", "smollm3", "linear", "llama3", "yarn_tuned"])
def test_weights_and_facts_read_back(tmp_path: Path, name: str, quant: str) -> None:
    model = lively_model(tiny_shape(name), quant=quant)
    write_onnx(model, tmp_path / "m.onnx", accuracy_level=4 if name == "plain" else 0)
    contents = read_onnx(tmp_path / "m.onnx")
    rounding = 1e-6 if quant == "q4_1" else 0.0
    assert first_weight_difference(model.shape, model.dequantized(), onnx_weights(contents), rounding=rounding) is None
    assert rounds_activations(contents) is (name == "plain" and quant not in ("f32", "f16"))
    facts = onnx_facts(contents, model.shape)
    for fact in ("num_layers", "num_heads", "num_kv_heads", "max_seq_len", "rope_theta", "tie_word_embeddings", "nope_every"):
        assert facts[fact] == getattr(model.shape, fact), fact
    assert facts["rms_norm_eps"] == model.shape.rms_norm_eps
    whole = read_contents(tmp_path, ModelFile("m.onnx", "onnx", quant), model.shape)
    assert compare_facts("itself", model.shape, whole) == []
    assert [item.name for item in compare_facts("base", model.shape.replace(rope_theta=777.0), whole)] == ["rope_theta"]


@pytest.mark.parametrize("theta", [500.0, 10000.0, 12345.0, 1e6, 500000.0])
def test_rope_base_is_recovered(tmp_path: Path, theta: float) -> None:
    model = lively_model(tiny_shape("plain"))
    write_onnx(Model(model.shape.replace(rope_theta=theta), model.tensors), tmp_path / "m.onnx")
    found = onnx_facts(read_onnx(tmp_path / "m.onnx"), model.shape.replace(rope_theta=2.0))["rope_theta"]
    assert found == pytest.approx(theta, rel=1e-4)


def test_a_table_that_is_none(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("plain"))
    write_onnx(model, tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    for item in proto.graph.initializer:
        if item.name == "cos_cache":
            values = onnx.numpy_helper.to_array(item)
            item.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(values[:, ::-1]), item.name))
    onnx.save(proto, tmp_path / "m.onnx")
    assert onnx_facts(read_onnx(tmp_path / "m.onnx"), model.shape)["rope_theta"] == "not a rotary table"


def changed_lookup(path: Path, operator: str, **changes: Any) -> None:
    """Write ``path`` again with the nodes of its embedding that are called ``operator`` changed."""
    proto = onnx.load(path)
    for node in proto.graph.node:
        if node.op_type == operator and node.output[0].startswith("token_embd."):
            for key, value in changes.items():
                if key == "inputs":
                    del node.input[:]
                    node.input.extend(value)
                else:
                    setattr(node, key, value)
    onnx.save(proto, path)


def test_the_lookup_of_an_embedding_is_read_as_it_computes(tmp_path: Path) -> None:
    model = lively_model(tiny_shape("plain"), quant="q8_0")
    path = tmp_path / "m.onnx"
    write_onnx(model, path)
    proto = onnx.load(path)
    (zero,) = (item for item in proto.graph.initializer if item.name == "zero_of_8_bits")
    zero.CopyFrom(onnx.numpy_helper.from_array(np.array(127, np.float32), zero.name))
    onnx.save(proto, path)
    difference = first_weight_difference(model.shape, model.dequantized(), onnx_weights(read_onnx(path)))
    assert difference is not None and difference.tensor == "token_embd"


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [
        ("Sub", {"op_type": "Pow"}, "Pow in the lookup of the embedding"),
        ("Unsqueeze", {"inputs": ["token_embd.scales", "row_of_blocks"]}, "has constants that do not fit it"),
    ],
)
def test_lookups_that_nobody_writes_are_refused(operator: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write_onnx(lively_model(tiny_shape("plain"), quant="q8_0"), path)
    changed_lookup(path, operator, **changes)
    with pytest.raises(FormatError, match=message):
        onnx_weights(read_onnx(path))
    assert onnx_facts(read_onnx(path), tiny_shape("plain"))["tie_word_embeddings"] in (True, False)  # whatever it is, it ends


@pytest.mark.parametrize(("operator", "inputs"), [("Cast", ["token_embd.scaled"]), ("Mul", ["token_embd.centred", "nowhere"])])
def test_lookups_in_circles_or_from_nowhere_are_refused(operator: str, inputs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write_onnx(lively_model(tiny_shape("plain"), quant="q8_0"), path)
    changed_lookup(path, operator, inputs=inputs)
    with pytest.raises(FormatError, match=f"uses '{inputs[-1]}', which nothing before it makes"):
        read_onnx(path)


@pytest.mark.parametrize("data", [b"", b"hello, this is a text file\n" * 20, b"GGUF" + bytes(64)])
def test_what_is_no_model_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(FormatError, match=r"m\.onnx: it is not a readable ONNX model"):
        read_onnx(tmp_path / "m.onnx")


def test_external_data_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "secret").write_bytes(bytes(64))
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[16], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    graph = onnx.helper.make_graph([], "g", [], [], [tensor])
    (tmp_path / "inner" / "m.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    with pytest.raises(FormatError, match="not a readable ONNX model"):
        read_onnx(tmp_path / "inner" / "m.onnx")


def test_models_are_ordered_by_exactness() -> None:
    def line(path: str, target: str, kind: str, quant: str) -> BundleFile:
        return BundleFile(path, 1, "0" * 64, target, kind, quant)

    lines = [
        line("gguf/q4.gguf", "gguf", "gguf", "q4_0"),
        line("onnx/m.onnx", "onnx", "onnx", "f32"),
        line("onnx/m.onnx_data", "onnx", "onnx_data", "f32"),
        line("gguf/f16.gguf", "gguf", "gguf", "f16"),
        line("hf/config.json", "hf", "json", "f32"),
        line("hf/model.safetensors", "hf", "safetensors", "f32"),
    ]
    order = [model.path for model in model_files(Manifest(tiny_shape("plain"), tuple(lines), {}))]
    assert order == ["hf", "onnx/m.onnx", "gguf/f16.gguf", "gguf/q4.gguf"]
    odd: Any = (line("gguf/x.gguf", "gguf", "gguf", "q9_9"),)
    with pytest.raises(FormatError, match=r"gguf/x\.gguf is said to hold 'q9_9'"):
        model_files(Manifest(tiny_shape("plain"), odd, {}))
