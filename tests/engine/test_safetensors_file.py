import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deepthin.engine.errors import FormatError, UnsupportedError
from deepthin.engine.quants import f32_to_bf16
from deepthin.engine.safetensors_file import read_safetensors, read_safetensors_folder
from tests.support.refusal import assert_refused
from tests.support.safetensors_bytes import entry, safetensors_bytes

HUGE = 1 << 60
A = {"a": entry("F32", [2, 3], 0, 24)}


def test_files_of_the_safetensors_package_read_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values: dict[str, np.ndarray] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.float16),
        "z": np.ones((2, 1, 3), np.float32),
    }
    save_file(values, path, metadata={"format": "pt"})
    read = read_safetensors(path)
    assert set(read) == set(values)
    for name, held in values.items():
        assert read[name].dims == held.shape
        assert np.array_equal(read[name].data.reshape(-1), np.frombuffer(held.tobytes(), np.uint8))
        assert np.array_equal(read[name].dequantize(), held.astype(np.float32))
        assert not read[name].data.flags.writeable


def test_bf16_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = np.array([1.0, -2.5, 3e38], np.float32)
    raw = safetensors_bytes({"a": entry("BF16", [3], 0, 6)}) + f32_to_bf16(values).tobytes()
    path.write_bytes(raw)
    tensor = read_safetensors(path)["a"]
    assert tensor.format.name == "bf16" and np.allclose(tensor.dequantize(), values, rtol=2**-8)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes"),
    "seven_bytes": (bytes(7), "it has 7 bytes"),
    "header_2_63": (safetensors_bytes(A, 24, header_bytes=1 << 63), "header claims 9223372036854775808 bytes"),
    "header_past_end": (safetensors_bytes(A, 24, header_bytes=5000), "header claims 5000 bytes"),
    "header_over_limit": (safetensors_bytes(A, 9 << 20, header_bytes=(8 << 20) + 1), "header claims 8388609 bytes"),
    "not_json": (safetensors_bytes("{'a': 1}"), "not JSON"),
    "not_utf8": (safetensors_bytes(b'{"\xff": 1}'), "not UTF-8"),
    "json_list": (safetensors_bytes("[1]"), "a JSON object is needed, but it holds a list"),
    "json_nan": (safetensors_bytes('{"a": NaN}'), "holds NaN"),
    "json_deep": (safetensors_bytes('{"a":' * 100_000), "nested too deeply"),
    "json_long_number": (safetensors_bytes('{"a": ' + "9" * 5000 + "}"), "number that is too long"),
    "key_twice": (safetensors_bytes('{"a": {}, "a": {}}'), "key 'a' appears twice"),
    "inner_key_twice": (safetensors_bytes('{"a": {"dtype": "F32", "dtype": "F16"}}'), "key 'dtype' appears twice"),
    "entry_list": (safetensors_bytes({"a": []}), "entry for tensor 'a' is no object"),
    "no_dtype": (safetensors_bytes({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4), "tensor 'a' has no dtype"),
    "shape_text": (safetensors_bytes({"a": entry("F32", "2", 0, 4)}, 4), "tensor 'a' needs 1 to 8 dimensions"),
    "shape_float": (safetensors_bytes({"a": entry("F32", [1.0], 0, 4)}, 4), "tensor 'a' needs 1 to 8 dimensions"),
    "shape_bool": (safetensors_bytes({"a": entry("F32", [True], 0, 4)}, 4), "tensor 'a' needs 1 to 8 dimensions"),
    "shape_negative": (safetensors_bytes({"a": entry("F32", [-1], 0, 4)}, 4), "tensor 'a' needs 1 to 8 dimensions"),
    "shape_zero": (safetensors_bytes({"a": entry("F32", [0], 0, 0)}), "tensor 'a' needs 1 to 8 dimensions of at least 1"),
    "shape_scalar": (safetensors_bytes({"a": entry("F32", [], 0, 4)}, 4), "tensor 'a' needs 1 to 8 dimensions"),
    "shape_deep": (safetensors_bytes({"a": entry("F32", [1] * 9, 0, 4)}, 4), "tensor 'a' needs 1 to 8 dimensions"),
    "elements_2_60": (safetensors_bytes({"a": entry("F32", [HUGE], 0, 4 * HUGE)}, 64), "the file holds 64"),
    "elements_wrap": (safetensors_bytes({"a": entry("F32", [1 << 32, 1 << 32], 0, 0)}, 64), "spans bytes 0 to 0"),
    "offsets_one": (safetensors_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, 4), "two data offsets"),
    "offsets_text": (safetensors_bytes({"a": entry("F32", [1], 0, "4")}, 4), "two data offsets"),
    "span_other": (safetensors_bytes({"a": entry("F32", [2, 3], 0, 20)}, 24), "spans bytes 0 to 20; 0 to 24 are needed"),
    "span_backwards": (safetensors_bytes({"a": entry("F32", [2, 3], 24, 0)}, 24), "spans bytes 24 to 0"),
    "gap": (safetensors_bytes({**A, "b": entry("F32", [1], 28, 32)}, 32), "tensor 'b' .* spans bytes 28 to 32; 24 to 28"),
    "overlap": (safetensors_bytes({**A, "b": entry("F32", [1], 20, 24)}, 24), "tensor 'b' .* spans bytes 20 to 24"),
    "first_gap": (safetensors_bytes({"a": entry("F32", [1], 4, 8)}, 8), "tensor 'a' .* spans bytes 4 to 8; 0 to 4"),
    "past_end": (safetensors_bytes(A, 23), "ends at data byte 24, but the file holds 23"),
    "trailing": (safetensors_bytes(A, 25), "1 bytes follow the last tensor"),
    "name_empty": (safetensors_bytes({"": entry("F32", [1], 0, 4)}, 4), "a tensor is called ''"),
    "name_line_break": (safetensors_bytes({"a\nb": entry("F32", [1], 0, 4)}, 4), r"a tensor is called 'a\\nb'"),
    "name_long": (safetensors_bytes({"x" * 300: entry("F32", [1], 0, 4)}, 4), "a tensor is called 'xxx"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    raw, match = HOSTILE[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    assert_refused(read_safetensors, path, match)


@pytest.mark.parametrize("dtype", ["F64", "I64", "U8", "BOOL", "F8_E4M3", "nonsense"])
def test_other_dtypes_are_refused_by_name(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": entry(dtype, [1], 0, 8)}, 8))
    assert_refused(read_safetensors, path, f"tensor 'a' is stored as '{dtype}'", error=UnsupportedError)


def test_truncation_at_every_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.float16)}, path)
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(FormatError):
            read_safetensors(path)


def _shards(folder: Path, weight_map: Any = None) -> Path:
    save_file({"a": np.ones(2, np.float32)}, folder / "one.safetensors")
    save_file({"b": np.full(3, 2, np.float32)}, folder / "two.safetensors")
    good = {"a": "one.safetensors", "b": "two.safetensors"}
    index = {"metadata": {"total_size": 20}, "weight_map": good if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_read_as_one(tmp_path: Path) -> None:
    read = read_safetensors_folder(_shards(tmp_path))
    assert {name: tensor.dequantize().tolist() for name, tensor in read.items()} == {"a": [1, 1], "b": [2, 2, 2]}


SHARD_ERRORS: dict[str, tuple[Any, str]] = {
    "list": (["a"], "'weight_map' must map"),
    "number": ({"a": 3}, "'weight_map' must map"),
    "absent": ({"a": "one.safetensors", "b": "three.safetensors"}, "names 'three.safetensors', which is not in the folder"),
    "swapped": ({"a": "two.safetensors", "b": "one.safetensors"}, "which the index places elsewhere"),
    "invented": (
        {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
        "places tensor 'c' in 'two.safetensors'",
    ),
    "parent": ({"a": "../one.safetensors"}, "'../one.safetensors' is no plain file name"),
    "absolute": ({"a": "/etc/passwd"}, "'/etc/passwd' is no plain file name"),
    "drive": ({"a": "C:one.safetensors"}, "'C:one.safetensors' is no plain file name"),
    "backslash": ({"a": "..\\one.safetensors"}, "is no plain file name"),
    "dots": ({"a": ".."}, "'..' is no plain file name"),
    "nul": ({"a": "one\0"}, "is no plain file name"),
    "long": ({"a": "x" * 3000}, "is no plain file name"),
    "many": ({str(number): f"{number}.safetensors" for number in range(1025)}, "names 1025 files"),
}


@pytest.mark.parametrize("name", SHARD_ERRORS)
def test_bad_index_is_refused(name: str, tmp_path: Path) -> None:
    weight_map, match = SHARD_ERRORS[name]
    assert_refused(read_safetensors_folder, _shards(tmp_path, weight_map), match)


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.ones(2, np.float32)}, outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(FormatError, match="a link out of the folder"):
        read_safetensors_folder(folder)


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": np.ones(2, np.float32)}, blobs / "f00d")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    assert list(read_safetensors_folder(snapshot)) == ["a"]


def test_a_folder_of_pickles_says_so(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert_refused(read_safetensors_folder, tmp_path, "'pytorch_model.bin' is a pickle")
    (tmp_path / "pytorch_model.bin").unlink()
    assert_refused(read_safetensors_folder, tmp_path, "neither model.safetensors nor model.safetensors.index.json$")


def test_a_directory_named_as_the_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert_refused(read_safetensors_folder, tmp_path, "a regular file is needed")
