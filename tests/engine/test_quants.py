"""Blocks against the ``gguf`` package bit for bit, and one block of each new format by hand."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest

from deepthin.engine.errors import UnsupportedError, UsageError
from deepthin.engine.formats import BODY_QUANTS, FORMATS, Q4_K, Q5_0, Q5_K, Q6_K, quant_named
from deepthin.engine.model import random_model
from deepthin.engine.quants import convert, dequantize, quantize
from deepthin.engine.shape import Shape
from tests.support.k_blocks import stored

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.is_quantized]


def kind(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(FORMATS[name].gguf_type)


@pytest.mark.parametrize("name", FORMATS)
def test_block_sizes_are_those_of_the_gguf_package(name: str) -> None:
    fmt = FORMATS[name]
    assert gguf.GGML_QUANT_SIZES[kind(name)] == (fmt.block_elements, fmt.block_bytes)
    assert kind(name).name == name.upper()


@pytest.mark.parametrize("name", QUANTIZED)
def test_any_bytes_dequantise_to_the_same_bits(name: str) -> None:
    """Random bytes in every field; only scales that f16 has as NaN or infinity are replaced, since NaN bits are free."""
    fmt = FORMATS[name]
    data = np.random.default_rng(1).integers(0, 256, (11, 7 * fmt.block_bytes), np.uint8)
    blocks = data.reshape(-1).view(fmt.dtype)
    for field in ("d", "m", "dmin"):
        if field in (fmt.dtype.names or ()):
            blocks[field] = np.nan_to_num(blocks[field], nan=-0.5, posinf=65504, neginf=-65504)
    found, theirs = dequantize(data, fmt), gguf.quants.dequantize(data, kind(name))
    np.testing.assert_array_equal(found.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", [name for name in QUANTIZED if FORMATS[name].can_quantize])
def test_values_quantise_to_the_same_bytes_within_the_error_bound(name: str) -> None:
    fmt = FORMATS[name]
    values = np.random.default_rng(2).standard_normal((40, 96), np.float32)
    values[0], values[1], values[2], values[3] = 0, 1, -3.25, np.abs(values[3]) + 5
    found = quantize(values, fmt)
    np.testing.assert_array_equal(found, gguf.quants.quantize(values, kind(name)))
    largest = np.abs(values.reshape(-1, 32)).max(axis=1, keepdims=True)
    assert (np.abs(dequantize(found, fmt) - values).reshape(-1, 32) <= fmt.max_error * largest).all()


def test_one_block_by_hand() -> None:
    block = np.zeros(1, Q5_0.dtype)
    block["d"], block["qs"][0, 3], block["qh"][0] = 0.5, 0xA1, [0b1000, 0, 0b1000, 0]  # values 3: 1 + 16 and 19: 10 + 16
    values = dequantize(block.view(np.uint8).reshape(1, -1), Q5_0)[0]
    assert (values[3], values[19], values[0]) == (0.5, 5.0, -8.0)

    block = np.zeros(1, Q4_K.dtype)
    block["d"], block["dmin"] = 0.25, 2.0
    # sub-block 1: scale 3, min 5; sub-block 5: scale 0b101001 = 41, min 0b010111 = 23
    block["scales"][0, [1, 5, 9]] = [0b10_000011, 0b01_000101, 0b0111_1001]
    block["qs"][0, 0:64:32] = [0xB4, 0xC0]
    block["qs"][0, 64] = 0x90  # group 2: sub-blocks 4 and 5
    values = dequantize(block.view(np.uint8).reshape(1, -1), Q4_K)[0]
    assert (values[32], values[33]) == (0.25 * 3 * 11 - 2 * 5, -10.0)
    assert (values[160], values[161]) == (0.25 * 41 * 9 - 2 * 23, -46.0)

    block = np.zeros(1, Q5_K.dtype)
    block["d"], block["scales"][0, 0], block["qh"][0, 7], block["qs"][0, 7] = 1.0, 2, 1, 0x05
    assert dequantize(block.view(np.uint8).reshape(1, -1), Q5_K)[0, 7] == 2 * 21

    block = np.zeros(1, Q6_K.dtype)
    block["d"], block["scales"][0, 15] = 0.5, -4  # the last 16 values
    block["ql"][0, 127], block["qh"][0, 63] = 0xF0, 0b11_000000
    values = dequantize(block.view(np.uint8).reshape(1, -1), Q6_K)[0]
    assert (values[255], values[254], values[0]) == (0.5 * -4 * 31, 0.5 * -4 * -32, 0.0)


def test_k_quants_are_read_and_never_made() -> None:
    assert set(FORMATS) - set(BODY_QUANTS) == {"q4_k", "q5_k", "q6_k"}
    with pytest.raises(UsageError, match=r"'q4_k' is only read, .* or use one of f32, .*q5_1"):
        quant_named("Q4_K")
    with pytest.raises(UnsupportedError, match="cannot be stored as q6_k here, only read"):
        quantize(np.zeros((1, 256), np.float32), Q6_K)
    with pytest.raises(UnsupportedError, match="llama-quantize"):
        random_model(Shape.parse("L=1,d=256,heads=4,kv=4,ff=256,vocab=32,tied"), quant="q5_k")


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_the_tests_own_k_blocks_are_close_to_their_values(name: str) -> None:
    values = np.random.default_rng(3).standard_normal((5, 512), np.float32)
    values[0, :256] = 0
    error = np.abs(stored(values, FORMATS[name]).dequantize() - values)
    assert error.max() < {"q4_k": 0.3, "q5_k": 0.15, "q6_k": 0.1}[name]


@pytest.mark.parametrize(("source", "target"), [("f16", "q8_0"), ("q8_0", "f32"), ("f32", "bf16"), ("q5_1", "q4_0")])
def test_converting_equals_quantising_the_values_and_never_holds_them_all(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).standard_normal((1031, 512), np.float32)
    data = quantize(values, FORMATS[source])
    whole = quantize(dequantize(data, FORMATS[source]), FORMATS[target])
    monkeypatch.setattr("deepthin.engine.quants._CHUNK_VALUES", 1 << 14)
    tracemalloc.start()
    made = convert(data, FORMATS[source], FORMATS[target])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(made, whole)
    assert peak < made.nbytes + (1 << 20) < made.nbytes + values.nbytes
