"""Attention over the key/value cache: against softmax in float64 on what is cached, and bit for bit against itself."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest

from deepthin.engine.arrays import F32, F64
from deepthin.engine.cpu import TARGETS, codegen_cpu
from deepthin.engine.decoder import Decoder
from deepthin.engine.errors import UsageError
from deepthin.engine.jit import kernel
from deepthin.engine.kernels import attention
from deepthin.engine.kv_cache import CACHE_FORMATS, cache_format_named
from deepthin.engine.model import random_model
from deepthin.engine.plan import aligned_bytes
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from deepthin.engine.simd import MAX_ROWS, W, load_f32, store_f16
from deepthin.engine.simd.vectors import Vectors
from deepthin.export.tolerances import gate

NAMES = list(CACHE_FORMATS)
_slow = Vectors(W, has_half_and_fma=False)
_slow_store = _slow.store_f16


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@dataclass
class Head:
    """Cache and scratch of one key/value head; every byte not written is 0xFF: NaN as f32, as f16 and as a scale."""

    head_dim: int
    name: str
    room: int
    rows: int
    values: F32 = field(init=False)

    def __post_init__(self) -> None:
        e, fmt = self.head_dim, CACHE_FORMATS[self.name]
        self.code = NAMES.index(self.name)
        self.key_tile, self.value_tile = fmt.key_tile_bytes(e, W), fmt.value_tile_bytes(e, W)
        tiles = -(-self.room // W)
        self.cache = aligned_bytes(tiles * self.key_tile), aligned_bytes(tiles * self.value_tile)
        for part in self.cache:
            part[:] = 0xFF
        wide, self.blocks = padded(e, 32), -(-e // 32)
        self.stride = attention.row_stride(e)
        self.parts = np.full(self.rows * self.stride, np.nan, np.float32)
        self.scores = np.zeros(MAX_ROWS * (1 + self.blocks) * attention.chunk_length(self.room) + 16 + wide, np.float32)
        self.scratch = (
            np.zeros((self.rows + 1) * wide, np.float32),
            np.zeros((self.rows + 1) * wide, np.int8),
            np.zeros((self.rows + 1) * self.blocks, np.float32),
            np.zeros((self.rows + 1) * self.blocks, np.int32),
        )
        self.still = np.ones(e // 2, np.float32), np.zeros(e // 2, np.float32)
        self.eps = np.float32(0)

    def write(self, k: F32, v: F32) -> None:
        """Cache keys and values f32 [P, E] as positions 0 .. P - 1."""
        (keys, values), e = self.cache, self.head_dim
        both = np.concatenate([k, v], axis=1).reshape(-1)
        for p in range(len(k)):
            attention.cache_token(
                keys, 0, self.key_tile, values, 0, self.value_tile, self.code, p, e,
                both, p * 2 * e, p * 2 * e + e, self.still[0], -1, self.eps, *self.still, 0, *self.scratch, self.rows,
            )  # fmt: skip

    def attend(self, q: F32, positions: int) -> F32:
        """Chunk by chunk, as one token does it: q f32 [G, E] gives f32 [G, E]."""
        (keys, values), (group, e) = self.cache, q.shape
        for g in range(group):
            attention.prepare_query(
                *self.scratch, g, q.reshape(-1), g * e, self.still[0], -1, self.eps, *self.still, 0, e, np.float32(1), self.code
            )
        length = attention.chunk_length(positions)
        chunks = -(-positions // length)
        for c in reversed(range(chunks)):  # their order must not matter
            tile = c * length // W
            attention.attend(
                self.parts, 0, c, length, keys, tile * self.key_tile, self.key_tile, values, tile * self.value_tile,
                self.value_tile, self.code, positions - c * length, group, e, *self.scratch, 0, group, self.scores,
            )  # fmt: skip
        out = np.full(group * e + 2, 7, np.float32)
        for g in range(group):
            attention.combine(out, 1 + g * e, self.parts, g * self.stride, chunks, e, self.scores)
        assert out[0] == out[-1] == 7, "something beside the heads was written"
        return out[1:-1].reshape(group, e)

    def stored(self, x: F32) -> F64:
        """What the cache holds of x f32 [..., E]."""
        if self.name == "f32":
            return x.astype(np.float64)
        if self.name == "f16":
            return x.astype(np.float16).astype(np.float64)
        return self.coded(x, np.float16)

    def coded(self, x: F32, scale_type: type) -> F64:
        """X in blocks of 32 codes, with scales kept as ``scale_type``."""
        whole = np.zeros((*x.shape[:-1], self.blocks * 32), np.float32)
        whole[..., : x.shape[-1]] = x
        blocks = whole.reshape(*x.shape[:-1], self.blocks, 32)
        peak = np.abs(blocks).max(axis=-1, keepdims=True)
        codes = np.rint(blocks * np.where(peak > 0, np.float32(127) / np.where(peak > 0, peak, 1), 0).astype(np.float32))
        scales = (peak / np.float32(127)).astype(scale_type).astype(np.float64)
        result: F64 = (codes * scales).reshape(whole.shape)[..., : x.shape[-1]]
        return result


def softmax(q: F64, k: F64, v: F64) -> F64:
    scores = q @ k.T
    weight = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: F64 = weight / weight.sum(axis=1, keepdims=True) @ v
    return result


def random(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


POSITIONS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1000)


@pytest.mark.parametrize("head_dim", [2, 10, 16, 64, 80, 128])
@pytest.mark.parametrize("name", NAMES)
def test_attention_equals_softmax_in_float64(name: str, head_dim: int) -> None:
    k, v = random(1000, head_dim), random(1000, head_dim, seed=1)
    q = random(8, head_dim, seed=2) * np.float32(4 / head_dim**0.5)
    head = Head(head_dim, name, 1000, 8)
    head.write(k, v)
    keys, values = head.stored(k), head.stored(v)
    queries = head.coded(q, np.float32) if name == "q8_0" else q.astype(np.float64)
    for positions in POSITIONS:
        expected = softmax(queries, keys[:positions], values[:positions])
        found = head.attend(q, positions)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
        for group in (1, 2, 3, 4, 5, 7):
            np.testing.assert_array_equal(head.attend(q[:group], positions), found[:group])


@pytest.mark.parametrize("name", NAMES)
def test_what_lies_beyond_the_last_position_has_no_influence(name: str) -> None:
    for positions in (1, 15, 17, 33, 65, 257):
        k, v, q = random(positions, 48), random(positions, 48, seed=1), random(3, 48, seed=2)
        results = []
        for rubbish in (0x00, 0xFF):
            head = Head(48, name, positions + 40, 3)
            for part in head.cache:
                part[:] = rubbish
            head.write(k, v)
            results.append(head.attend(q, positions))
        assert np.isfinite(results[0]).all()
        np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_reach_the_result(name: str) -> None:
    """The bad position is the newest, or one whose chunk others follow."""
    k, v, q = random(70, 16), random(70, 16, seed=1), random(2, 16, seed=2)
    for where, at in (("query", 1), ("key", 69), ("key", 5), ("value", 69), ("value", 5)):
        for bad in (np.nan, np.inf):
            parts = {"query": q.copy(), "key": k.copy(), "value": v.copy()}
            parts[where][at, 3] = bad
            head = Head(16, name, 70, 2)
            head.write(parts["key"], parts["value"])
            found = head.attend(parts["query"], 70)
            if where == "query":
                assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).any()
            elif where == "value":
                assert not np.isfinite(found[:, 3]).any()
            else:  # turning by an angle of 0 makes NaN of infinity times 0
                assert not np.isfinite(found).any()


def test_softmax_of_scores_that_are_not_finite() -> None:
    def weights(*scores: float) -> tuple[F32, float]:
        room, parts = np.full(32, np.nan, np.float32), np.zeros(2, np.float32)
        room[: len(scores)] = scores
        attention.soften(room, 0, len(scores), parts, 0, 1)
        return room[: len(scores)], float(parts[1])

    found, total = weights(0.5, -np.inf, 0.5, *[0.5] * 20)
    assert total == 22 and found[1] < 1e-37 and (np.delete(found, 1) == 1).all()
    for bad in (np.nan, np.inf):
        for at in (0, 7, 21):
            scores = [0.5] * 22
            scores[at] = bad
            found, total = weights(*scores)
            assert np.isnan(total) and np.isnan(found[at])
    assert np.isnan(weights(*[-np.inf] * 9)[1])


@pytest.mark.parametrize("name", NAMES)
def test_scores_beyond_f32_are_not_finite_and_tiny_ones_are(name: str) -> None:
    k, v, q = np.ones((40, 16), np.float32), random(40, 16), np.full((1, 16), 1e-42, np.float32)
    head = Head(16, name, 40, 1)
    head.write(k, v)
    np.testing.assert_allclose(head.attend(q, 40)[0], head.stored(v).mean(axis=0), rtol=1e-5, atol=1e-6)
    assert not np.isfinite(head.attend(np.full((1, 16), 3e38, np.float32), 40)).any()


def test_a_key_may_dwarf_the_others_by_any_factor() -> None:
    k, v, q = np.zeros((100, 16), np.float32), random(100, 16), np.zeros((1, 16), np.float32)
    q[0, 0], k[77, 0] = 1, 1e30
    head = Head(16, "f32", 100, 1)
    head.write(k, v)
    np.testing.assert_allclose(head.attend(q, 100)[0], v[77], rtol=1e-6)


@pytest.mark.parametrize(
    "text", ["heads=8,kv=1", "heads=7,kv=1", "heads=6,kv=2", "heads=5,kv=5", "heads=4,kv=2", "heads=5,kv=1"]
)
def test_bits_depend_neither_on_threads_nor_on_who_goes_in_together(text: str) -> None:
    shape = Shape.parse(f"L=2,d=32,{text},head_dim=10,ff=32,vocab=64,tied")
    model = random_model(shape, seed=1)
    ids = [i * 7 % 64 for i in range(80)]
    for name in NAMES:
        with Decoder(model, threads=1, context=80, kv_format=name) as one:
            expected = one.logits(ids)
        for threads in (2, 3):
            with Decoder(model, threads=threads, context=80, kv_format=name) as many:
                np.testing.assert_array_equal(many.logits(ids), expected)
                many.reset()
                for at in range(0, len(ids), 5):  # pieces of 5, then 75..79 one by one
                    np.testing.assert_array_equal(many.logits(ids[at : at + 5]), expected[at : at + 5])
                many.position = 60
                for at in range(60, len(ids)):
                    np.testing.assert_array_equal(many.step(ids[at]), expected[at])


@pytest.mark.parametrize("name", NAMES)
def test_long_texts_have_the_same_bits_across_changes_of_chunk_length(name: str) -> None:
    shape = Shape.parse("L=1,d=32,heads=3,kv=1,head_dim=16,ff=32,vocab=64,tied")
    ids = [i * 11 % 64 for i in range(1100)]
    with Decoder(random_model(shape, seed=1), threads=2, context=1100, kv_format=name) as decoder:
        expected = decoder.logits(ids)
        for start in (500, 1015):
            decoder.position = start
            for at in range(start, start + 30):
                np.testing.assert_array_equal(decoder.step(ids[at]), expected[at])


@pytest.mark.parametrize("name", NAMES)
def test_cache_formats_cost_no_more_than_their_budget(name: str) -> None:
    shape = Shape.parse("L=3,d=96,heads=6,kv=2,head_dim=48,ff=160,vocab=95,untied")
    model = random_model(shape, seed=1)
    ids = [i * 7 % 95 for i in range(90)]
    expected = Reference(shape, model.dequantized()).logits(ids)
    with Decoder(model, threads=2, context=90, kv_format=name) as decoder:
        found = decoder.logits(ids)
    assert ((found - expected) ** 2).sum() / (expected**2).sum() < gate(f"cache_{name}")["nmse"]


def test_sizes_of_the_cache_are_those_of_its_format() -> None:
    assert [CACHE_FORMATS[name].bytes_per_position(64) for name in NAMES] == [256, 128, 68]
    assert CACHE_FORMATS["q8_0"].bytes_per_position(80) == 80 + 3 * 2
    for name in NAMES:
        fmt = CACHE_FORMATS[name]
        assert fmt.key_tile_bytes(64, 16) == fmt.value_tile_bytes(64, 16) == 16 * fmt.bytes_per_position(64)
    with pytest.raises(UsageError, match="'q4_0' is no format of the key/value cache; use one of f32, f16, q8_0"):
        cache_format_named("q4_0")


@kernel
def _store_fast(out: np.ndarray, x: np.ndarray) -> None:
    for i in range(0, len(x), W):
        store_f16(out, 2 * i, load_f32(x, i))  # type: ignore[call-arg]


@kernel
def _store_slow(out: np.ndarray, x: np.ndarray) -> None:
    for i in range(0, len(x), W):
        _slow_store(out, 2 * i, load_f32(x, i))  # type: ignore[call-arg]


@pytest.mark.parametrize("store", [_store_fast, _store_slow], ids=["target", "integer"])
def test_f16_is_stored_rounded_to_nearest_even(store: object) -> None:
    """Every f16 value, every midpoint between two, and their neighbours on both sides; NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # a cast of NaN may count as invalid: on arm64 it does
        exact = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(exact[np.isfinite(exact)])
    middles = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    edges = np.array([65519.99, 65520.0, 65536.0, 1e30, np.finfo(np.float32).max, 1e-45, 2.0**-25, 2.0**-26], np.float32)
    x = np.concatenate([exact, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf), edges, -edges])
    x = np.concatenate([x, random(1000) * 100, np.zeros(-(len(x) + 1000) % W, np.float32)]).astype(np.float32)
    out = np.zeros(2 * len(x), np.uint8)
    store(out, x)  # type: ignore[operator]
    found = out.view(np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    nan = np.isnan(x)
    assert np.isnan(found[nan]).all()
    np.testing.assert_array_equal(found[~nan].view(np.uint16), expected[~nan].view(np.uint16))


_SCRIPT = """
import numpy as np
from deepthin.engine.cpu import simd_target
from deepthin.engine.decoder import Decoder
from deepthin.engine.model import random_model
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from deepthin.export.tolerances import gate
shape = Shape.parse("L=2,d=96,heads=6,kv=2,head_dim=48,ff=160,vocab=95,untied")
ids = [i * 7 % 95 for i in range(70)]
model = random_model(shape, seed=1)
expected = Reference(shape, model.dequantized()).logits(ids)
for name in ("f32", "f16", "q8_0"):
    with Decoder(model, threads=2, context=70, kv_format=name) as decoder:
        found = decoder.logits(ids)
        decoder.reset()
        steps = np.stack([decoder.step(i).copy() for i in ids])
    assert (found == steps).all(), name
    nmse = ((found - expected) ** 2).sum() / (expected ** 2).sum()
    assert nmse < gate(f"cache_{name}")["nmse"], (name, nmse)
print("target", simd_target())
"""


def _forced(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("target", [t for t, needs in TARGETS.items() if codegen_cpu().features.issuperset(needs)])
def test_every_target_this_cpu_has_attends(target: str) -> None:
    result = _forced(DEEPTHIN_SIMD=target)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["target", target]


def test_a_plain_cpu_attends() -> None:
    result = _forced(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert result.returncode == 0, result.stderr[-2000:]


def test_no_weight_of_a_softmax_makes_subnormal_products() -> None:
    """An Intel core takes each by microcode, which made prompts of sharp attention twice as slow."""
    scores = np.linspace(0, -120, 8 * W, dtype=np.float32)
    wanted = np.exp(scores.astype(np.float64))
    parts = np.zeros(2, np.float32)
    attention.soften(scores, 0, len(scores), parts, 0, 1)
    assert ((scores == 0) | (scores > 1e-30)).all()
    np.testing.assert_allclose(scores, wanted, rtol=2.5e-7, atol=1.1e-30)  # what is left out cannot be seen beside 1
    np.testing.assert_allclose(parts, [0, wanted.sum()], rtol=1e-6)
