"""Packed bytes against the layouts written down in NumPy, and what packing costs in memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine import pack
from deepthin.engine.arrays import U8
from deepthin.engine.formats import FORMATS
from deepthin.engine.model import Tensor
from deepthin.engine.pack import Packed, align, pack_tensors, place
from deepthin.engine.plan import aligned_bytes
from tests.support.numpy_packing import pack_in_numpy

LANES = (4, 8, 16)


def _any_tensor(name: str, rows: int, cols: int, *, seed: int = 0, ordered: bool = False) -> Tensor:
    """Random bytes, which packing moves whatever they mean."""
    fmt, generator = FORMATS[name], np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, fmt.row_bytes(cols)), np.uint8)
    return Tensor(fmt, (rows, cols), data, generator.permutation(rows) if ordered else None)


def _place(tensor: Tensor, lanes: int, data_at: int) -> Packed:
    rows, cols = tensor.dims
    return place(tensor.format, rows, cols, lanes, data_at)


def _both(tensors: list[Tensor], lanes: int, q8_bias: int) -> tuple[U8, U8]:
    """Arenas with a margin at both ends, from the kernels and from NumPy."""
    places: list[Packed] = []
    end = 64
    for tensor in tensors:
        places.append(_place(tensor, lanes, align(end)))
        end = places[-1].scale_at + places[-1].scale_bytes
    ours, theirs = aligned_bytes(end + 64), aligned_bytes(end + 64)
    pack_tensors(ours, zip(places, tensors, strict=True), lanes, q8_bias)
    for packed, tensor in zip(places, tensors, strict=True):
        pack_in_numpy(theirs, packed, tensor, lanes, q8_bias)
    return ours, theirs


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_layout(name: str, lanes: int) -> None:
    block = FORMATS[name].block_elements
    for rows in (1, lanes - 1, lanes, lanes + 1, 5 * lanes + 3):
        for cols in (block, 3 * block) if block > 1 else (1, 2, 31, 33, 64, 100):
            for ordered in (False, True):
                for q8_bias in (0, 128):
                    tensor = _any_tensor(name, rows, cols, ordered=ordered)
                    np.testing.assert_array_equal(*_both([tensor], lanes, q8_bias))


@given(
    st.lists(st.tuples(st.sampled_from(list(FORMATS)), st.integers(1, 70), st.integers(1, 5), st.booleans()), min_size=1),
    st.sampled_from(LANES),
    st.sampled_from((0, 128)),
)
@settings(derandomize=True, deadline=None)
def test_any_mix_of_tensors_is_packed_side_by_side(mix: list[tuple[str, int, int, bool]], lanes: int, q8_bias: int) -> None:
    tensors = [
        _any_tensor(name, rows, blocks * FORMATS[name].block_elements, seed=seed, ordered=ordered)
        for seed, (name, rows, blocks, ordered) in enumerate(mix)
    ]
    np.testing.assert_array_equal(*_both(tensors, lanes, q8_bias))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_may_start_at_any_byte_and_lie_apart(name: str) -> None:
    fmt = FORMATS[name]
    cols = 2 * fmt.block_elements
    size = fmt.row_bytes(cols)
    wide = np.random.default_rng(0).integers(0, 256, (21, size + 7), np.uint8)
    apart = Tensor(fmt, (21, cols), wide[:, 3 : 3 + size])
    odd = Tensor(fmt, (19, cols), wide.reshape(-1)[5 : 5 + 19 * size].reshape(19, size))
    odd.stored.flags.writeable = False
    np.testing.assert_array_equal(*_both([apart, odd], 8, 128))


@pytest.mark.parametrize("name", ["f32", "f16", "q8_0", "q5_1", "q4_k", "q5_k", "q6_k"])
def test_a_tensor_of_several_parts_equals_one_of_a_single_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = _any_tensor(name, 16 * 9 + 5, 512, ordered=True)
    whole, _ = _both([tensor], 16, 128)
    monkeypatch.setattr(pack, "_PART_BYTES", 3 * 16 * tensor.stored.shape[1])
    parts, theirs = _both([tensor], 16, 128)
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_array_equal(parts, theirs)


def test_packing_needs_little_memory_beside_the_arena() -> None:
    tensors = [_any_tensor("f16", 4096, 2048), _any_tensor("q5_0", 5000, 2048), _any_tensor("q6_k", 5003, 2048)]
    places = [_place(tensor, 8, 0) for tensor in tensors]
    arena = aligned_bytes(max(packed.scale_at + packed.scale_bytes for packed in places))
    pack_tensors(arena, [(places[0], tensors[0])], 8, 0)  # so that no compiling is counted
    tracemalloc.start()
    for packed, tensor in zip(places, tensors, strict=True):
        pack_tensors(arena, [(packed, tensor)], 8, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_failure_on_any_thread_is_raised_and_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def fail(*arguments: Any) -> None:
        calls.append(arguments)
        raise MemoryError("no room")

    tensors = [_any_tensor("q8_0", 64, 64, seed=seed) for seed in range(40)]
    monkeypatch.setattr(pack, "pack_tiles", fail)
    with pytest.raises(MemoryError, match="no room"):
        _both(tensors, 8, 0)
    assert len(calls) <= 8, "threads went on after a failure"
