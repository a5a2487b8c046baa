"""External data of ONNX files that somebody else wrote: read where it is right, refused in one line otherwise."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from deepthin.engine.errors import DeepthinError
from deepthin.engine.model import Model
from deepthin.export.contents import ModelFile, read_contents
from deepthin.export.onnx_contents import onnx_weights, read_onnx
from deepthin.export.onnx_model import write_onnx
from deepthin.export.verify import verify_bundle
from tests.support.bundles import ONNX, bless
from tests.support.refusal import assert_one_line, assert_refused

_DATA = "m.onnx_data"


@pytest.fixture(scope="module")
def whole(quiet: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose weights lie outside it."""
    folder = tmp_path_factory.mktemp("external")
    files, _ = write_onnx(quiet, folder / "m.onnx", external_bytes=0)
    assert [file.name for file in files] == ["m.onnx", _DATA]
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "inner"))


def edited(folder: Path, change: Callable[[Any], None]) -> None:
    """Let ``change`` alter the first tensor that lies outside."""
    proto = onnx.load(folder / "m.onnx", load_external_data=False)
    change(next(item for item in proto.graph.initializer if item.external_data))
    (folder / "m.onnx").write_bytes(proto.SerializeToString())


def entry(key: str, value: str | None) -> Callable[[Any], None]:
    """External data entry ``key`` becomes ``value``, or is taken away."""

    def change(tensor: Any) -> None:
        kept = [(item.key, item.value) for item in tensor.external_data if item.key != key]
        del tensor.external_data[:]
        for name, text in kept + ([] if value is None else [(key, value)]):
            tensor.external_data.add(key=name, value=text)

    return change


def test_what_is_right_is_read(folder: Path, quiet: Model) -> None:
    weights = onnx_weights(read_onnx(folder / "m.onnx"))
    for name, values in quiet.dequantized().items():
        np.testing.assert_array_equal(weights[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (entry("location", "../secret"), "'../secret' is no plain file name"),
        (entry("location", "/etc/passwd"), "'/etc/passwd' is no plain file name"),
        (entry("location", "..\\secret"), "is no plain file name"),
        (entry("location", "C:secret"), "is no plain file name"),
        (entry("location", "sub/secret"), "is no plain file name"),
        (entry("location", ".."), "is no plain file name"),
        (entry("location", ""), "is no plain file name"),
        (entry("location", "absent"), "is stored in 'absent', which is not in the folder"),
        (entry("location", "link"), "link out of the folder, which is not followed"),
        (entry("location", "inner_link"), "is stored in 'inner_link', which is a link; put a copy in its place"),
        (entry("location", "second_name"), r"a file with a second name \(a hard link\)"),
        (entry("location", "folder"), "a regular file is needed"),
        (entry("location", None), "no file is named"),
        (entry("offset", "999999999"), r"lies at bytes 999999999 to 1000002047 of 'm\.onnx_data', which has"),
        (entry("offset", str(1 << 64)), "has offset '18446744073709551616' in its external data; a whole number"),
        (entry("offset", "-8"), "has offset '-8' in its external data; a whole number of bytes"),
        (entry("offset", "0x10"), "a whole number of bytes is needed"),
        (entry("length", "8"), "which need 2048 bytes, but 8 are set aside"),
        (entry("length", "99999999999"), "but 99999999999 are set aside"),
        (lambda tensor: tensor.external_data.add(key="offset", value="0"), "gives 'offset' of its external data twice"),
        (lambda tensor: tensor.dims.__setitem__(0, -1), "none may be negative"),
        (lambda tensor: tensor.dims.__setitem__(0, 1 << 40), "but 2048 are set aside"),
        (lambda tensor: setattr(tensor, "data_type", onnx.TensorProto.STRING), "has data type 8"),
    ],
)
def test_what_is_not_is_refused(folder: Path, change: Callable[[Any], None], words: str) -> None:
    (folder.parent / "secret").write_bytes(bytes(1 << 16))
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "inner_link").symlink_to(_DATA)
    os.link(folder.parent / "secret", folder / "second_name")
    (folder / "folder").mkdir()
    edited(folder, change)
    assert_refused(read_onnx, folder / "m.onnx", words, max_bytes=16 << 20)


def test_data_cut_short(folder: Path) -> None:
    data = (folder / _DATA).read_bytes()
    (folder / _DATA).write_bytes(data[:-4])
    assert_refused(read_onnx, folder / "m.onnx", "was it cut short", max_bytes=16 << 20)


def test_constants_inside_of_nodes_are_looked_at_too(folder: Path) -> None:
    proto = onnx.load(folder / "m.onnx", load_external_data=False)
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    inner = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["c"], value=tensor)], "g", [], [])
    proto.graph.node.append(onnx.helper.make_node("If", ["token_embd.out"], ["x"], then_branch=inner, else_branch=inner))
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    assert_refused(read_onnx, folder / "m.onnx", "'../secret' is no plain file name", max_bytes=16 << 20)


@pytest.mark.parametrize("kind", ["constant", "value"])
def test_names_given_twice(folder: Path, kind: str) -> None:
    proto = onnx.load(folder / "m.onnx", load_external_data=False)
    held = proto.graph.initializer if kind == "constant" else proto.graph.node
    held.append(held[0])
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    assert_refused(
        read_onnx, folder / "m.onnx", "is given twice; names of constants and values must be unique", max_bytes=16 << 20
    )


def test_values_used_before_they_are_made(folder: Path) -> None:
    proto = onnx.load(folder / "m.onnx", load_external_data=False)
    node = next(node for node in proto.graph.node if node.op_type == "Cast")
    node.input[0] = node.output[0]  # which would never end for whoever follows it
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    assert_refused(read_onnx, folder / "m.onnx", "which nothing before it makes", max_bytes=16 << 20)


def test_no_damage_escapes_as_a_crash(quiet: Model, tmp_path: Path) -> None:
    """Bytes of the graph changed at random: whatever comes of it is facts and weights, or one line."""
    write_onnx(quiet, tmp_path / "m.onnx")
    raw = (tmp_path / "m.onnx").read_bytes()
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        data = bytearray(raw)
        for at in generator.integers(0, 16000, 3):  # nodes and the first constants' heads
            data[at] = generator.integers(0, 256)
        (tmp_path / "m.onnx").write_bytes(data)
        try:
            read_contents(tmp_path, ModelFile("m.onnx", "onnx", "f32"), quiet.shape).weights()
        except DeepthinError as error:
            assert_one_line(str(error))
            refused += 1
    assert refused > 10


def test_a_bundle_that_points_outside_is_unreadable_and_runs_nowhere(bundle: Path) -> None:
    proto = onnx.load(bundle / ONNX)
    tensor = max(proto.graph.initializer, key=lambda item: len(item.raw_data))
    (bundle.parent / "outside").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../outside")
    (bundle / ONNX).write_bytes(proto.SerializeToString())
    bless(bundle, ONNX)
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert [item["file"] for item in result["unreadable"]] == [ONNX] and "plain file name" in result["unreadable"][0]["why"]
    assert not [pair for pair in result["pairs"] if pair["file"] == ONNX]
