"""Kernels against NumPy on the same stored blocks, at sizes that leave remainders in every loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepthin.engine.arrays import F32
from deepthin.engine.formats import FORMATS
from deepthin.engine.jit import kernel
from deepthin.engine.kernels import elementwise, matmul, matvec
from deepthin.engine.kernels.rows import read_row
from deepthin.engine.model import Tensor
from deepthin.engine.pack import KERNEL_FORMATS, Packed, align, pack_tensors, place
from deepthin.engine.plan import aligned_bytes
from deepthin.engine.simd import Q8_BIAS, W, exp, load_f32, store_f32
from tests.support.k_blocks import stored

# every format at widths that it takes
WIDTHS = [(name, max(1, fmt.block_elements // 32) * cols) for name, fmt in FORMATS.items() for cols in (32, 96, 160)]


def _random(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _padded(count: int) -> int:
    return -(-count // W) * W


def _packed(tensor: Tensor, front: int = 0) -> tuple[np.ndarray, np.ndarray, Packed]:
    """An arena holding ``tensor`` behind ``front`` other bytes, and its row of the plan."""
    packed = place(tensor.format, tensor.dims[0], tensor.dims[1], W, align(front))
    arena = aligned_bytes(align(packed.scale_at + packed.scale_bytes))
    arena[: packed.data_at] = 0xFF
    pack_tensors(arena, [(packed, tensor)], W, Q8_BIAS)
    return arena, np.array([packed.op], np.int64), packed


def _magnitudes(tensor: Tensor) -> np.ndarray:
    """Size f64 of each weight, of its scaled integer and its minimum taken apart where it has both: they are summed apart."""
    parts = []
    for field in ("m", "dmin"):
        if field in (tensor.format.dtype.names or ()):
            for zeroed in (field, "d"):
                data = tensor.data.copy()
                data.reshape(-1).view(tensor.format.dtype)[zeroed] = 0
                parts.append(Tensor(tensor.format, tensor.dims, data))
    return np.sum([np.abs(part.dequantize().astype(np.float64)) for part in parts or [tensor]], axis=0)  # type: ignore[no-any-return]


def _product(arena: np.ndarray, ops: np.ndarray, tiles: int, x: F32) -> F32:
    """W x f32 [rows padded to W], every operand at an odd place of a larger array and the arena off its alignment."""
    xq, xs, xn = _quantized_activation(x) if len(x) % 32 == 0 else (np.zeros(0, np.int8), np.zeros(0, np.float32), None)
    beside = [np.concatenate([np.full(at, 77, part.dtype), part]) for at, part in ((3, x), (5, xq), (1, xs))]
    sums = np.concatenate([np.full(1, 77, np.int32), np.zeros(0, np.int32) if xn is None else xn])
    moved = np.concatenate([np.zeros(1, np.uint8), arena])[1:]
    out = np.full(tiles * W + 8, np.nan, np.float32)
    matvec.matvec(out, 7, moved, ops, 0, beside[0], 3, beside[1], 5, beside[2], sums, 1, 0, tiles)
    assert np.isnan(out[:7]).all() and np.isnan(out[-1]), "values beside the range were written"
    return out[7:-1]


def _quantized_activation(x: F32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    xq, xs, xn = np.zeros(len(x), np.int8), np.zeros(len(x) // 32, np.float32), np.zeros(len(x) // 32, np.int32)
    elementwise.quantize(x, 0, len(x), xq, 0, xs, xn, 0)
    return xq, xs, xn


def test_kernels_number_every_format_in_its_order() -> None:
    assert tuple(FORMATS) == KERNEL_FORMATS
    assert [getattr(matvec, name.upper()) for name in KERNEL_FORMATS] == list(range(len(KERNEL_FORMATS)))
    assert all(fmt.is_quantized == (getattr(matvec, name.upper()) >= matvec.Q8_0) for name, fmt in FORMATS.items())


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 48, 81])
@pytest.mark.parametrize(("name", "cols"), WIDTHS)
def test_matvec_equals_numpy_on_the_same_operands(name: str, rows: int, cols: int) -> None:
    assert_matvec_equals_numpy(stored(_random(rows, cols), FORMATS[name]))


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-37, 1e-30, 1e30])
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_activations_of_any_size(name: str, scale: float) -> None:
    cols = max(96, FORMATS[name].block_elements)
    assert_matvec_equals_numpy(stored(_random(17, cols), FORMATS[name]), np.float32(scale))


def assert_matvec_equals_numpy(tensor: Tensor, scale: np.float32 = np.float32(1)) -> None:  # noqa: B008
    rows, cols = tensor.dims
    name = tensor.format.name
    arena, ops, packed = _packed(tensor, front=100)
    x = scale * _random(cols, seed=1)
    out = _product(arena, ops, packed.tiles, x)[:rows]
    used = x.astype(np.float64)
    if FORMATS[name].is_quantized:
        xq, xs, _ = _quantized_activation(x)
        used = (xq.reshape(-1, 32) * xs[:, None].astype(np.float64)).reshape(-1)
    expected = tensor.dequantize().astype(np.float64) @ used
    # f32 rounding only: at most cols + a few roundings, each eps of the sum of magnitudes; and steps below the normal numbers
    float32 = np.finfo(np.float32)
    bound = (cols + 8) * (float32.eps * (_magnitudes(tensor) @ np.abs(used)) + 256 * float32.tiny)
    np.testing.assert_array_less(np.abs(out - expected), bound)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 9])
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_matmul_gives_each_token_the_bits_of_matvec(name: str, tokens: int) -> None:
    cols, rows = max(96, 2 * FORMATS[name].block_elements), 37
    tensor = stored(_random(rows, cols), FORMATS[name])
    x = _random(tokens, cols, seed=1)
    arena, ops, packed = _packed(tensor)
    for one, given in zip(_matmul(tensor, x), x, strict=True):
        np.testing.assert_array_equal(one, _product(arena, ops, packed.tiles, given))


def _matmul(tensor: Tensor, given: F32) -> F32:
    """W x of each token of f32 [tokens, columns]: f32 [tokens, rows padded to W]; operands and results lie apart."""
    tokens, cols = given.shape
    arena, ops, packed = _packed(tensor)
    wide, blocks, pad = cols + 32, cols // 32 + 1, 5
    x = np.zeros((tokens, wide), np.float32)
    x[:, :cols] = given
    xq = np.zeros((tokens, wide), np.int8)
    xs, xn = np.zeros((tokens, blocks), np.float32), np.zeros((tokens, blocks), np.int32)
    for m in range(tokens):
        elementwise.quantize(
            x.reshape(-1), m * wide, cols, xq.reshape(-1), m * wide, xs.reshape(-1), xn.reshape(-1), m * blocks
        )
    flat = x.reshape(-1), xq.reshape(-1), xs.reshape(-1), xn.reshape(-1)
    out = np.zeros((tokens, packed.tiles * W + pad), np.float32)
    matmul.matmul(
        out.reshape(-1), 0, out.shape[1], arena, ops, 0, flat[0], 0, wide, flat[1], 0, wide, *flat[2:], 0, blocks,
        tokens, 0, packed.tiles,
    )  # fmt: skip
    assert not out[:, -pad:].any(), "values beyond a token's rows were written"
    return out[:, :-pad]


@pytest.mark.parametrize("cols", [1, 7, 50])
@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_float_matvec_takes_any_width(name: str, cols: int) -> None:
    assert_matvec_equals_numpy(Tensor.from_values(_random(20, cols), FORMATS[name]))


BAD = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_an_activation_that_is_not_finite_reaches_every_output(name: str) -> None:
    """At each place of a block, where the largest value is looked for in steps of a vector; the last block is whole."""
    cols = max(64, FORMATS[name].block_elements)
    arena, ops, packed = _packed(stored(_random(5, cols), FORMATS[name]))
    for bad in BAD:
        for at in (*range(32), cols - 1):
            x = _random(cols, seed=1)
            x[at] = bad
            out = _product(arena, ops, packed.tiles, x)[:5]
            assert not np.isfinite(out).any(), (bad, at)
            assert np.isnan(out).all() or np.isinf(bad), (bad, at)


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_one_tokens_infinity_leaves_the_others_alone(name: str) -> None:
    cols = max(64, FORMATS[name].block_elements)
    tensor = stored(_random(W + 1, cols), FORMATS[name])
    x = _random(6, cols, seed=1)
    clean = _matmul(tensor, x)
    for at, bad in ((1, np.nan), (4, np.inf)):
        x[at, 40] = bad
    found = _matmul(tensor, x)
    assert not np.isfinite(found[[1, 4], : W + 1]).any()
    np.testing.assert_array_equal(found[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_a_weight_that_is_not_finite_spoils_its_row_alone(name: str) -> None:
    """As a value, or as a scale or minimum of a block."""
    fmt = FORMATS[name]
    cols = 2 * max(32, fmt.block_elements)
    clean = stored(_random(W + 3, cols), fmt)
    x = _random(cols, seed=1)
    arena, ops, packed = _packed(clean)
    expected = _product(arena, ops, packed.tiles, x)
    fields = [field for field in ("d", "m", "dmin") if field in (fmt.dtype.names or ())]
    for field in fields:
        for bad in BAD:
            data = clean.data.copy()
            blocks = data.reshape(-1).view(fmt.dtype).reshape(W + 3, -1)
            value = np.array([bad], np.float32)
            blocks[field][W - 2, -1] = value.view(np.uint16)[1] if name == "bf16" else value[0]
            tensor = Tensor(fmt, clean.dims, data)
            arena, ops, packed = _packed(tensor)
            out = _product(arena, ops, packed.tiles, x)
            assert not np.isfinite(out[W - 2]), (field, bad)
            out[W - 2] = expected[W - 2]
            np.testing.assert_array_equal(out, expected)
            row = np.zeros(cols, np.float32)
            read_row(row, 0, arena, ops, 0, W - 2)
            assert not np.isfinite(row[-1]) and np.isfinite(row[: cols // 2]).all(), (field, bad)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.is_quantized])
def test_any_bytes_with_any_scales_are_read_as_dequantised(name: str) -> None:
    """Random bits in every field but the f16 scales, which are zero, negative, subnormal and large by turns; a row of zeros."""
    fmt = FORMATS[name]
    cols = 3 * fmt.block_elements
    data = np.random.default_rng(0).integers(0, 256, (19, fmt.row_bytes(cols)), np.uint8)
    blocks = data.reshape(-1).view(fmt.dtype)
    for at, field in enumerate(("d", "m", "dmin")):
        if field in (fmt.dtype.names or ()):
            scales = np.array([0.01, -0.02, 0.0, -0.0, 6e-8, -3e-6, 40.0, -250.0, 1.5, 0.7, -1e-3], np.float16)
            blocks[field] = np.roll(np.resize(scales, len(blocks)), at)
    data[7] = 0
    assert_matvec_equals_numpy(Tensor(fmt, (19, cols), data))


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.is_quantized])
def test_largest_codes_meet_largest_activations_exactly(name: str) -> None:
    """Every code bit set and activations of 127 in every place: no 16-bit step may saturate, no sum may wrap."""
    fmt = FORMATS[name]
    data = np.full((W, fmt.block_bytes), 0xFF, np.uint8)
    blocks = data.reshape(-1).view(fmt.dtype)
    for field in ("d", "m", "dmin"):
        if field in (fmt.dtype.names or ()):
            blocks[field] = 1.0
    tensor = Tensor(fmt, (W, fmt.block_elements), data)
    arena, ops, packed = _packed(tensor)
    signs = np.ones((4, fmt.block_elements), np.int8)
    signs[1] = -1
    signs[2, ::2] = -1
    signs[3] = np.random.default_rng(0).choice([-1, 1], fmt.block_elements)
    xq, count = np.int8(127) * signs, fmt.block_elements // 32
    xs, xn = np.ones(4 * count, np.float32), xq.reshape(-1, 32).sum(axis=1, dtype=np.int32)
    expected = xq.astype(np.float64) @ tensor.dequantize().T.astype(np.float64)
    together, cols = np.zeros((4, W), np.float32), fmt.block_elements
    flat = xq.reshape(-1)
    matmul.matmul(
        together.reshape(-1), 0, W, arena, ops, 0, xs, 0, 0, flat, 0, cols, xs, xn, 0, count, 4, 0, packed.tiles
    )  # fmt: skip
    np.testing.assert_array_equal(together, expected)
    for m in range(4):
        out = np.zeros(W, np.float32)
        matvec.matvec(out, 0, arena, ops, 0, xs, 0, flat, m * cols, xs, xn, m * count, 0, packed.tiles)
        np.testing.assert_array_equal(out, expected[m])


def test_extreme_8_bit_codes_are_exact() -> None:
    """Weights of -128 and activations of 127 in every place: no 16-bit step may saturate."""
    data = np.zeros((16, 1), FORMATS["q8_0"].dtype)
    data["d"], data["qs"] = 1.0, -128
    tensor = Tensor(FORMATS["q8_0"], (16, 32), data.view(np.uint8).reshape(16, -1))
    arena, ops, packed = _packed(tensor)
    for sign in (1, -1):
        xq, xs = np.full(32, 127 * sign, np.int8), np.ones(1, np.float32)
        xn = np.array([xq.sum(dtype=np.int32)], np.int32)
        out = np.zeros(16, np.float32)
        matvec.matvec(out, 0, arena, ops, 0, xs, 0, xq, 0, xs, xn, 0, 0, packed.tiles)
        assert (out == -128 * 127 * 32 * sign).all()


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_rows_come_back_as_dequantised(name: str) -> None:
    cols = max(64, 2 * FORMATS[name].block_elements)
    tensor = stored(_random(37, cols), FORMATS[name])
    arena, ops, _ = _packed(tensor)
    expected = tensor.dequantize()
    # formats with a minimum may fuse d*q + m where NumPy rounds twice; everything else is exact
    loose = name in ("q4_1", "q5_1", "q4_k", "q5_k")
    for row in (0, 15, 16, 36):
        out = np.zeros(cols, np.float32)
        read_row(out, 0, arena, ops, 0, row)
        np.testing.assert_allclose(out, expected[row], rtol=3e-7 if loose else 0, atol=5e-7 if loose else 0)


@pytest.mark.parametrize("name", ["f16", "q4_0"])
def test_f16_zeros_subnormals_and_largest_values_survive(name: str) -> None:
    scales = np.array([0.0, 6e-8, 1e-5, 65504.0, -65504.0], np.float16)
    if name == "f16":
        tensor = Tensor(FORMATS["f16"], (5, 1), scales.reshape(5, 1).view(np.uint8))
        expected = scales.astype(np.float32)[:, None]
    else:
        data = np.zeros((5, 1), FORMATS["q4_0"].dtype)
        data["d"], data["qs"] = scales[:, None], 0x99  # every code 9, value d
        tensor = Tensor(FORMATS["q4_0"], (5, 32), data.view(np.uint8).reshape(5, -1))
        expected = np.repeat(scales.astype(np.float32)[:, None], 32, axis=1)
    arena, ops, _ = _packed(tensor)
    for row in range(5):
        out = np.zeros(tensor.dims[1], np.float32)
        read_row(out, 0, arena, ops, 0, row)
        np.testing.assert_array_equal(out, expected[row])


def test_quantize_is_within_half_a_step_and_sums_its_codes() -> None:
    x = _random(96)
    x[32:64] = 0
    xq, xs, xn = _quantized_activation(x)
    np.testing.assert_array_less(np.abs(xq * np.repeat(xs, 32) - x), np.repeat(xs, 32) * 0.5001 + 1e-30)
    np.testing.assert_array_equal(xn, xq.reshape(-1, 32).sum(axis=1, dtype=np.int32))
    assert not xq[32:64].any() and xs[1] == 0


@pytest.mark.parametrize("bad", BAD)
def test_quantize_marks_the_blocks_that_are_not_finite(bad: float) -> None:
    for at in range(32, 64):
        x = _random(96)
        x[at] = bad
        xq, xs, xn = _quantized_activation(x)
        assert not np.isfinite(xs[1]) and not xq[32:64].any() and xn[1] == 0
        clean = _quantized_activation(_random(96))
        for found, wanted, wide in zip((xq, xs, xn), clean, (32, 1, 1), strict=True):
            np.testing.assert_array_equal(np.delete(found, slice(wide, 2 * wide)), np.delete(wanted, slice(wide, 2 * wide)))


@pytest.mark.parametrize("width", [1, 16, 50, 576])
def test_rms_norm(width: int) -> None:
    x, weight = np.zeros(_padded(width), np.float32), np.zeros(_padded(width), np.float32)
    x[:width], weight[:width] = _random(width), _random(width, seed=1)
    out = np.zeros_like(x)
    elementwise.rms_norm(out, 0, x, 0, weight, 0, width, np.float32(1e-5))
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).sum() / width + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [*BAD, 1e30])
def test_rms_norm_hides_nothing(bad: float) -> None:
    """An infinite sum of squares would turn every number into zero."""
    x, weight = _random(4 * W), np.ones(4 * W, np.float32)
    x[2 * W + 3] = bad
    out = np.zeros_like(x)
    elementwise.rms_norm(out, 0, x, 0, weight, 0, 3 * W + 1, np.float32(1e-5))
    assert not np.isfinite(out[: 3 * W + 1]).any()


@pytest.mark.parametrize("activation", [elementwise.relu2, elementwise.gelu])
def test_activations_without_a_gate_pass_nan_and_infinity_on(activation: Any) -> None:
    x = np.full(2 * W, 0.5, np.float32)
    x[[1, W]] = np.nan, np.inf
    activation(x, 0, 2 * W)
    np.testing.assert_array_equal(np.flatnonzero(~np.isfinite(x)), [1, W])
    x[:] = -np.inf
    activation(x, 0, 2 * W)
    assert (x == 0).all() if activation is elementwise.relu2 else np.isnan(x).all()  # as max(x, 0)^2 and x sigmoid(..) are


@kernel
def _exp(out: np.ndarray, x: np.ndarray) -> None:
    for i in range(0, len(x), W):
        store_f32(out, i, exp(load_f32(x, i)))  # type: ignore[call-arg]


def test_exp_over_its_whole_range_and_beyond() -> None:
    x = np.linspace(-69, 88.3, 8 * 4096, dtype=np.float32)
    out = np.zeros_like(x)
    _exp(out, x)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=2.5e-7)
    edges = np.resize(np.array([np.nan, np.inf, 1e30, 89, -0.0, -69.01, -88, -np.inf], np.float32), 2 * W)
    out = np.zeros_like(edges)
    _exp(out, edges)
    wanted = np.resize([np.nan, np.inf, np.inf, np.inf, 1, 0, 0, 0], 2 * W)
    np.testing.assert_allclose(out, wanted, rtol=2.5e-7)


def test_swiglu_over_the_whole_range_of_exp() -> None:
    gate = np.linspace(-120, 120, 16 * 100, dtype=np.float32)
    up = np.ones_like(gate)
    out = gate.copy()
    elementwise.swiglu(out, up, 0, len(gate))
    exact = gate.astype(np.float64)
    expected = exact / (1 + np.exp(-exact))
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-35)
    out[:4] = -1e38, -np.inf, np.inf, np.nan  # x sigmoid(x): 0, -infinity times 0, infinity, NaN
    elementwise.swiglu(out, up, 0, W)
    assert out[0] == 0 and out[2] == np.inf and np.isnan(out[[1, 3]]).all()


def test_swiglu_passes_nan_on() -> None:
    gate, up = _random(W), _random(W, seed=1)
    gate[1], up[2] = np.nan, np.nan
    elementwise.swiglu(gate, up, 0, W)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(gate)), [1, 2])


@pytest.mark.parametrize("half", [1, 5, 16, 24, 32, 40])
def test_rotate_turns_pairs_half_a_head_apart(half: int) -> None:
    x, angle = _random(2 * half), np.linspace(-1, 3, half, dtype=np.float32)
    out = np.zeros(2 * half + 2, np.float32)
    elementwise.rotate(out, 2, x, 0, np.cos(angle), np.sin(angle), 0, half, np.float32(0.5))
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angle.astype(np.float64)) * 0.5
    np.testing.assert_allclose(out[2 : 2 + half], turned.real, rtol=1e-6, atol=3e-7)
    np.testing.assert_allclose(out[2 + half :], turned.imag, rtol=1e-6, atol=3e-7)
    assert not out[:2].any()
