import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import FormatError
from deepthin.engine.gguf_file import read_gguf
from deepthin.engine.gguf_header import GGML_TYPES
from tests.support.gguf_bytes import (
    ARRAY,
    BOOL,
    STRING,
    UINT32,
    UINT64,
    GgufBytes,
    key,
    key_array,
    key_f32,
    key_text,
    key_u32,
    llama_file,
    string,
    tensor,
    u32,
    u64,
)
from tests.support.refusal import MAX_SECONDS, assert_refused

HUGE = 1 << 60
ONE = [tensor("a", [4], 0, 0)]
TWO = [tensor("a", [4], 0, 0), tensor("b", [4], 0, 32)]

HOSTILE: dict[str, tuple[GgufBytes, str]] = {
    "magic": (GgufBytes(magic=b"GGUX"), "does not begin with 'GGUF'"),
    "version_1": (GgufBytes(version=1), "GGUF version 1 file"),
    "version_9": (GgufBytes(version=9), "GGUF version 9 file"),
    "big_endian": (GgufBytes(version=3 << 24), "big-endian"),
    "keys_2_60": (GgufBytes(num_keys=HUGE), f"announces {HUGE} metadata keys"),
    "keys_2_64": (GgufBytes(num_keys=(1 << 64) - 1), "announces 18446744073709551615 metadata keys"),
    "tensors_2_60": (GgufBytes(num_tensors=HUGE), f"announces {HUGE} tensors"),
    "tensors_one_too_many": (GgufBytes(tensors=ONE, num_tensors=2), "announces 2 tensors|name of tensor 1"),
    "key_name_huge": (GgufBytes([string("", length=HUGE) + bytes(64)]), "name of metadata key 0 .* claims"),
    "key_name_past_end": (GgufBytes([string("abc", length=4000) + bytes(64)]), "needs 4000 bytes, but"),
    "key_empty": (GgufBytes([key_u32("", 1)]), "name of metadata key 0"),
    "key_twice": (GgufBytes([key_u32("a", 1), key_u32("a", 2)]), "key 'a' appears twice"),
    "key_line_break": (GgufBytes([key_u32("a\nb", 2)]), r"name of metadata key 0 is 'a\\nb'"),
    "key_not_utf8": (GgufBytes([key(b"\xff\xfe", UINT32, u32(1))]), "not UTF-8"),
    "value_type": (GgufBytes([key("a", 99, u32(1))]), "key 'a' has type 99"),
    "bool_2": (GgufBytes([key("a", BOOL, b"\x02")]), "a bool of value 2"),
    "string_huge": (GgufBytes([key("a", STRING, string("", length=HUGE))]), "value of key 'a' .* claims"),
    "string_past_end": (GgufBytes([key("a", STRING, string("xy", length=5000))]), "needs 5000 bytes"),
    "array_2_60": (GgufBytes([key_array("a", UINT32, [], count=HUGE)]), f"announces {HUGE} items of key 'a'"),
    "array_strings_2_60": (GgufBytes([key_array("a", STRING, [], count=HUGE)]), f"announces {HUGE} items of key 'a'"),
    "array_past_end": (GgufBytes([key_array("a", UINT64, [], count=100)]), "announces 100 items of key 'a'"),
    "array_string_past_end": (
        GgufBytes([key_array("a", STRING, [string("xy", length=999)])]),
        "item 0 of key .a. reaches",
    ),
    "array_string_wraps": (
        GgufBytes([key_array("a", STRING, [string("xy", length=(1 << 64) - 9)])]),
        "item 0 of key 'a' reaches",
    ),
    "array_string_not_utf8": (GgufBytes([key_array("a", STRING, [string(b"\xff")])]), "not UTF-8"),
    "array_nested": (GgufBytes([key_array("a", ARRAY, [u32(UINT32) + u64(0)])]), "array of type 9"),
    "array_of_unknown": (GgufBytes([key_array("a", 77, [])]), "array of type 77"),
    "alignment_0": (GgufBytes([key_u32("general.alignment", 0)]), "'general.alignment' is 0"),
    "alignment_3": (GgufBytes([key_u32("general.alignment", 3)]), "'general.alignment' is 3"),
    "alignment_2_31": (GgufBytes([key_u32("general.alignment", 0x80000000)]), "'general.alignment' is 2147483648"),
    "alignment_u64": (GgufBytes([key("general.alignment", UINT64, u64(32))]), r"32 \(uint64\)"),
    "alignment_text": (GgufBytes([key_text("general.alignment", "32")]), r"32 \(string\)"),
    "tensor_name_long": (GgufBytes(tensors=[tensor("x" * 64, [4], 0, 0)], data_bytes=32), "name of tensor 0"),
    "tensor_name_empty": (GgufBytes(tensors=[tensor("", [4], 0, 0)], data_bytes=32), "name of tensor 0"),
    "tensor_name_twice": (GgufBytes(tensors=[*ONE, tensor("a", [4], 0, 32)], data_bytes=64), "tensor 'a' appears twice"),
    "dims_0": (GgufBytes(tensors=[tensor("a", [], 0, 0), bytes(64)], num_tensors=1), "tensor 'a' has 0 dimensions"),
    "dims_5": (GgufBytes(tensors=[tensor("a", [1] * 5, 0, 0)], data_bytes=32), "tensor 'a' has 5 dimensions"),
    "dims_2_32": (GgufBytes(tensors=[tensor("a", [4], 0, 0, num_dims=0xFFFFFFFF)], data_bytes=32), "has 4294967295 dim"),
    "dim_zero": (
        GgufBytes(tensors=[tensor("a", [4, 0], 0, 0)], data_bytes=32),
        r"\[4, 0\]; each must be at least 1",
    ),
    "elements_2_60": (GgufBytes(tensors=[tensor("a", [HUGE], 0, 0)], data_bytes=64), "needs 4611686018427387904 bytes"),
    "elements_wrap_to_0": (GgufBytes(tensors=[tensor("a", [1 << 32, 1 << 32], 0, 0)], data_bytes=64), "but the file ends at"),
    "elements_wrap_small": (GgufBytes(tensors=[tensor("a", [1 << 62, 4, 1, 4], 0, 0)], data_bytes=64), "but the file ends at"),
    "type_unknown": (GgufBytes(tensors=[tensor("a", [4], 1234, 0)], data_bytes=32), "tensor 'a' has type 1234"),
    "type_removed": (GgufBytes(tensors=[tensor("a", [4], 4, 0)], data_bytes=32), "tensor 'a' has type 4"),
    "row_no_block": (GgufBytes(tensors=[tensor("a", [33], 2, 0)], data_bytes=64), "rows of 33 values"),
    "past_end": (GgufBytes(tensors=TWO, data_bytes=47), "tensor 'b' .* needs 16 bytes"),
    "offset_overlap": (GgufBytes(tensors=[*ONE, tensor("b", [4], 0, 0)], data_bytes=64), "'b' starts at data offset 0, but 32"),
    "offset_misaligned": (GgufBytes(tensors=[*ONE, tensor("b", [4], 0, 16)], data_bytes=64), "'b' starts at data offset 16"),
    "offset_gap": (GgufBytes(tensors=[*ONE, tensor("b", [4], 0, 64)], data_bytes=128), "'b' starts at data offset 64"),
    "offset_2_64": (GgufBytes(tensors=[tensor("a", [4], 0, (1 << 64) - 32)], data_bytes=64), "'a' starts at data offset 1844"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    parts, match = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(parts.build())
    assert_refused(read_gguf, path, match)


def test_truncation_at_every_byte_is_refused(tmp_path: Path) -> None:
    whole = llama_file(keys={"tokens": key_array("tokens", STRING, [string("ab"), string("c")])})
    whole.data_bytes -= 24  # the padding behind the last tensor may be missing
    raw = whole.build()
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    assert len(read_gguf(path).tensors) == 11
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(FormatError, match=r"is empty|does not begin|bytes"):
            read_gguf(path)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    assert_refused(read_gguf, path, "the file is empty")


def test_header_larger_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepthin.engine.gguf_header._MAX_HEADER_BYTES", 100)
    path = tmp_path / "model.gguf"
    path.write_bytes(GgufBytes([key_text("a", "x" * 200)]).build())
    assert_refused(read_gguf, path, "makes the header longer than")


@given(
    st.lists(st.one_of(st.text(max_size=8), st.sampled_from(["", "\0", "a\0b", "e" * 255, "f" * 256, "é" * 128, "g" * 70000])))
)
@example(["a"] * 50 + ["f" * 256])
@settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_strings_of_any_length_and_content_are_read_as_written(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "model.gguf"
    keys = [key_array("texts", STRING, [string(text) for text in texts]), key_text("behind", "them")]
    path.write_bytes(GgufBytes(keys).build())
    file = read_gguf(path)
    assert file.texts("texts") == texts
    assert file.text("behind") == "them"


def test_many_small_items_are_refused_before_they_are_held(tmp_path: Path) -> None:
    count = (1 << 22) + 1
    path = tmp_path / "model.gguf"
    path.write_bytes(GgufBytes([key("a", ARRAY, u32(0) + u64(count) + bytes(count))]).build())
    assert_refused(read_gguf, path, f"announces {count} items")


def test_metadata_of_every_type_equals_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", (1 << 64) - 1)
    writer.add_int64("i64", -(1 << 63))
    writer.add_float32("f32", 1e-5)
    writer.add_float64("f64", 1e-300)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße\n")
    writer.add_array("texts", ["a", "", "日本"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_custom_alignment(64)
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(4, dtype=np.float16).reshape(4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    plain = {name: held.value for name, held in file.metadata.items()}
    assert plain["u8"] == 200 and plain["i8"] == -100 and plain["u16"] == 60000 and plain["i16"] == -30000
    assert plain["u32"] == 4_000_000_000 and plain["i32"] == -2_000_000_000
    assert plain["u64"] == (1 << 64) - 1 and plain["i64"] == -(1 << 63)
    assert plain["f32"] == 1e-5 and plain["f64"] == 1e-300 and plain["yes"] is True and plain["text"] == "grüße\n"
    assert file.texts("texts") == ["a", "", "日本"] and file.integers("ints") == [1, -2, 3]
    assert plain["floats"].tolist() == [0.5, 0.25] and file.alignment == 64
    assert file.tensors["first"].dims == (3, 2) and file.tensors["second"].start % 64 == 0
    first = file.data("first")
    assert first.shape == (2, 12) and np.array_equal(first.view("<f4"), np.arange(6).reshape(2, 3))
    assert np.array_equal(file.data("second").view("<f2")[0], np.arange(4))
    assert not first.flags.writeable


TYPED: dict[str, tuple[str, tuple[object, ...], dict[str, float], str]] = {
    "text_for_integer": ("integer", ("text",), {"high": 9}, "'text' holds string, but a whole number"),
    "bool_for_integer": ("integer", ("flag",), {"high": 9}, "'flag' holds bool, but a whole number"),
    "float_for_integer": ("integer", ("float",), {"high": 9}, "'float' holds float32"),
    "array_for_integer": ("integer", ("array",), {"high": 9}, r"'array' holds \[uint32\]"),
    "integer_too_large": ("integer", ("int",), {"high": 6}, "'int' is 7, but a value from 0 to 6"),
    "integer_too_small": ("integer", ("int",), {"low": 8, "high": 9}, "'int' is 7, but a value from 8 to 9"),
    "integer_missing": ("integer", ("none",), {"high": 6}, "'none' is missing; a whole number is needed"),
    "nan": ("number", ("nan",), {"low": 0, "high": 1}, "'nan' is nan, but a finite number"),
    "infinite": ("number", ("inf",), {"low": 0, "high": 1}, "'inf' is inf"),
    "integer_for_number": ("number", ("int",), {"low": 0, "high": 1}, "'int' holds uint32, but a number"),
    "integer_for_text": ("text", ("int",), {}, "'int' holds uint32, but a string"),
    "integer_for_flag": ("flag", ("int",), {}, "'int' holds uint32, but true or false"),
    "integers_for_texts": ("texts", ("array",), {}, r"'array' holds \[uint32\], but an array of strings"),
    "text_for_integers": ("integers", ("text",), {}, "'text' holds string, but an array of whole numbers"),
}


@pytest.mark.parametrize("name", TYPED)
def test_metadata_of_the_wrong_type_or_range_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    keys = [
        key_text("text", "x"),
        key("flag", BOOL, b"\x01"),
        key_f32("float", 0.5),
        key_f32("nan", float("nan")),
        key_f32("inf", float("inf")),
        key_array("array", UINT32, [u32(1)]),
        key_u32("int", 7),
    ]
    path.write_bytes(GgufBytes(keys).build())
    file = read_gguf(path)
    method, arguments, limits, match = TYPED[name]
    assert_refused(lambda _: getattr(file, method)(*arguments, **limits), path, match)


def test_block_sizes_equal_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    shared = theirs.keys() & GGML_TYPES.keys()
    assert {kind: GGML_TYPES[kind] for kind in shared} == {kind: theirs[kind] for kind in shared}
    assert {"F32", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "BF16"} <= {theirs[kind][0] for kind in shared}


def test_smollm2_cut_at_many_points_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    with smollm2_path.open("rb") as file:
        header = file.read(1_785_664)  # everything before the data
    path = tmp_path / "model.gguf"
    for length in [*range(1, len(header), 299_999), len(header) - 1, len(header)]:
        path.write_bytes(header[:length])
        start = time.process_time()
        with pytest.raises(FormatError, match=r"cut short|does not begin"):
            read_gguf(path)
        assert time.process_time() - start < MAX_SECONDS
    assert read_gguf(smollm2_path).tensors["token_embd.weight"].start == len(header)
