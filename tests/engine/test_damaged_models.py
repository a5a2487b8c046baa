"""Whatever happens to the bytes of a model, loading gives a checked Model or one clear line."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import FormatError, UnsupportedError
from deepthin.engine.load import load_model
from deepthin.engine.model import Model
from deepthin.engine.tokenizer import Tokenizer
from tests.support.gguf_bytes import BOOL, STRING, UINT32, key, key_array, key_f32, key_text, key_u32, llama_file, string, u32
from tests.support.hf_folders import write_hf_folder
from tests.support.refusal import assert_one_line
from tests.support.tiny_models import lively_model, tiny_shape

NASTY_NUMBERS = [
    0,
    1,
    2,
    3,
    31,
    33,
    255,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 60,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
QUIET = settings(max_examples=400, derandomize=True, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def gguf_bytes() -> bytes:
    """A small llama with everything that the reader looks at."""
    keys: dict[str, bytes | None] = {
        "general.name": key_text("general.name", "tiny"),
        "general.alignment": key_u32("general.alignment", 32),
        "llama.vocab_size": key_u32("llama.vocab_size", 3),
        "llama.attention.head_count_kv": key_u32("llama.attention.head_count_kv", 1),
        "llama.rope.freq_base": key_f32("llama.rope.freq_base", 1e4),
        "llama.rope.dimension_count": key_u32("llama.rope.dimension_count", 2),
        "tokenizer.ggml.model": key_text("tokenizer.ggml.model", "gpt2"),
        "tokenizer.ggml.pre": key_text("tokenizer.ggml.pre", "smollm"),
        "tokenizer.ggml.tokens": key_array("tokenizer.ggml.tokens", STRING, [string("a"), string("b"), string("ab")]),
        "tokenizer.ggml.token_type": key_array("tokenizer.ggml.token_type", UINT32, [u32(1)] * 3),
        "tokenizer.ggml.merges": key_array("tokenizer.ggml.merges", STRING, [string("a b")]),
        "tokenizer.ggml.bos_token_id": key_u32("tokenizer.ggml.bos_token_id", 1),
        "tokenizer.ggml.add_bos_token": key("tokenizer.ggml.add_bos_token", BOOL, b"\x01"),
    }
    return llama_file(keys=keys).build()


def flip(raw: bytes, at: int, bit: int) -> bytes:
    at %= len(raw)
    return raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :]


def put(raw: bytes, at: int, new: bytes) -> bytes:
    at %= len(raw)
    return raw[:at] + new + raw[at + len(new) :]


POSITION = st.integers(0, 1 << 16)
DAMAGE: st.SearchStrategy[Callable[[bytes], bytes]] = st.one_of(
    st.builds(lambda at, bit: lambda raw: flip(raw, at, bit), POSITION, st.integers(0, 7)),
    st.builds(lambda at, number: lambda raw: put(raw, at, struct.pack("<Q", number)), POSITION, st.sampled_from(NASTY_NUMBERS)),
    st.builds(
        lambda at, number: lambda raw: put(raw, at, struct.pack("<I", number & 0xFFFFFFFF)),
        POSITION,
        st.sampled_from(NASTY_NUMBERS),
    ),
    st.builds(lambda at: lambda raw: raw[: at % len(raw)], POSITION),
    st.builds(lambda at, count: lambda raw: raw[: at % len(raw)] + raw[at % len(raw) + count :], POSITION, st.integers(1, 40)),
    st.builds(
        lambda at, new: lambda raw: raw[: at % len(raw)] + new + raw[at % len(raw) :],
        POSITION,
        st.binary(min_size=1, max_size=20),
    ),
)


def assert_loads_or_says_why(path: Path) -> bool:
    """Whether it loads; anything but a whole Model or a one-line refusal fails."""
    try:
        model = load_model(path)
        if model.tokenizer is not None:
            Tokenizer(model.tokenizer).encode("ab a\n")
    except (FormatError, UnsupportedError) as error:
        assert_one_line(str(error))
        return False
    assert isinstance(model, Model)
    for tensor in model.tensors.values():
        assert tensor.dequantize().shape == tensor.dims
    return True


@QUIET
@given(damages=st.lists(DAMAGE, min_size=1, max_size=3))
def test_damaged_gguf(damages: list[Callable[[bytes], bytes]], tmp_path: Path) -> None:
    raw = gguf_bytes()
    for damage in damages:
        raw = damage(raw or b"\0")
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    assert_loads_or_says_why(path)


def test_each_flipped_bit_of_a_gguf_header(tmp_path: Path) -> None:
    raw = gguf_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    assert assert_loads_or_says_why(path)
    outcomes = []
    for at in range(raw.rindex(b"output_norm.weight") + 40):
        path.write_bytes(flip(raw, at, at * 5 % 8))
        outcomes.append(assert_loads_or_says_why(path))
    assert 0.02 < sum(outcomes) / len(outcomes) < 0.6  # names and such may change; sizes and counts may not


@QUIET
@given(damages=st.lists(DAMAGE, min_size=1, max_size=3), file=st.sampled_from(["model.safetensors", "config.json"]))
def test_damaged_hugging_face_folder(damages: list[Callable[[bytes], bytes]], file: str, hf_folder: Path) -> None:
    folder, files = hf_folder, {path.name: path.read_bytes() for path in (hf_folder.parent / "whole").iterdir()}
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    raw = files[file]
    head = min(len(raw), 2000)  # positions fall into the header, where they matter
    for damage in damages:
        raw = damage(raw[:head] or b"{") + raw[head:]
    (folder / file).write_bytes(raw)
    assert_loads_or_says_why(folder)


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to damage, with the whole one beside it."""
    models = tmp_path_factory.mktemp("models")
    for name in ("hf", "whole"):
        assert assert_loads_or_says_why(write_hf_folder(models / name, lively_model(tiny_shape("plain"))))
    return models / "hf"
