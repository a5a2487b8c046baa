"""The fast decoder against the NumPy one, and against itself on other threads and in other steps."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from deepthin.engine.cpu import usable_targets
from deepthin.engine.decoder import Decoder
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import BODY_QUANTS, FORMATS
from deepthin.engine.kv_cache import CACHE_FORMATS
from deepthin.engine.model import Model, random_model
from deepthin.engine.reference import Reference
from deepthin.engine.shape import Shape
from deepthin.engine.synthetic import SyntheticDecoder
from deepthin.export.tolerances import gate
from tests.support.k_blocks import stored_model

IDS = [1, 5, 7, 90, 3, 2, 94, 94, 0, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
ODD = Shape.parse("L=3,d=96,heads=6,kv=2,head_dim=16,ff=160,vocab=95,untied,theta=5000.0")
WIDE = Shape.parse("L=3,d=256,heads=4,kv=2,ff=512,vocab=95,tied")  # takes super-blocks of 256 too

EXACT_NMSE, INT8_ACTIVATION_NMSE = gate("random_f32")["nmse"], gate("random_int8")["nmse"]


def nmse(found: np.ndarray, expected: np.ndarray) -> float:
    return float(((found - expected) ** 2).sum() / (expected**2).sum())


def mixed_model(shape: Shape, *quants: str) -> Model:
    """Every matrix in another format."""
    return stored_model(shape, random_model(shape, seed=3).dequantized(), [FORMATS[quant] for quant in quants or BODY_QUANTS])


@pytest.mark.parametrize("quant", FORMATS)
def test_logits_equal_the_reference(quant: str) -> None:
    model = random_model(ODD, seed=1, quant=quant) if quant in BODY_QUANTS else mixed_model(WIDE, quant)
    expected = Reference(model.shape, model.dequantized()).logits(IDS)
    with Decoder(model, threads=2, context=32) as decoder:
        found = decoder.logits(IDS)
    assert nmse(found, expected) < (INT8_ACTIVATION_NMSE if FORMATS[quant].is_quantized else EXACT_NMSE)


@pytest.mark.parametrize(
    "text",
    [
        "L=1,d=32,heads=1,kv=1,head_dim=2,ff=32,vocab=3,tied",
        "L=2,d=50,heads=5,kv=5,head_dim=10,ff=37,vocab=41,tied",
        "L=2,d=40,heads=3,kv=1,head_dim=24,ff=70,vocab=33,untied",
        "L=2,d=64,heads=8,kv=2,head_dim=80,ff=96,vocab=50,tied",
    ],
)
def test_any_even_head_and_any_width(text: str) -> None:
    shape = Shape.parse(text)
    model = random_model(shape, seed=2)
    ids = [i % shape.vocab_size for i in range(20)]
    with Decoder(model, threads=2, context=20) as decoder:
        assert nmse(decoder.logits(ids), Reference(shape, model.dequantized()).logits(ids)) < EXACT_NMSE


def test_formats_mix_freely() -> None:
    model = mixed_model(ODD)
    with Decoder(model, threads=2, context=32) as decoder:
        assert nmse(decoder.logits(IDS), Reference(ODD, model.dequantized()).logits(IDS)) < INT8_ACTIVATION_NMSE


@pytest.mark.parametrize("kv_format", CACHE_FORMATS)
@pytest.mark.parametrize("shape", [ODD, WIDE])
def test_bits_depend_neither_on_threads_nor_on_the_run(shape: Shape, kv_format: str) -> None:
    """Every weight format is in both of the wide shape's halves; the second run finds the first one's cache and scratch."""
    model = mixed_model(shape, *([] if shape is ODD else FORMATS))
    runs = []
    for threads in (1, 2, 3, 5):
        with Decoder(model, threads=threads, context=32, kv_format=kv_format) as decoder:
            for _ in range(2):
                decoder.reset()
                runs.append(decoder.logits(IDS))
                decoder.reset()
                runs.append(np.stack([decoder.step(token).copy() for token in IDS]))
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0], other)


def test_prefill_steps_and_reset_give_the_same_bits() -> None:
    with Decoder(random_model(ODD, seed=1, quant="q4_0"), threads=2, context=80) as decoder:
        whole = decoder.logits(IDS)
        decoder.reset()
        np.testing.assert_array_equal(decoder.prefill(IDS[:7]), whole[6])
        for at in range(7, len(IDS)):
            np.testing.assert_array_equal(decoder.step(IDS[at]), whole[at])
        long = (IDS * 4)[:70]  # more than one chunk
        decoder.reset()
        every = decoder.logits(long)
        decoder.reset()
        np.testing.assert_array_equal(decoder.prefill(long), every[-1])


def test_times_of_the_last_token_add_up() -> None:
    with Decoder(random_model(ODD), threads=2, context=32) as decoder:
        decoder.prefill(IDS)
        start = time.perf_counter()
        decoder.step(3)
        wall = time.perf_counter() - start
        times = decoder.last_times()
    assert len(times.blocks_s) == ODD.num_layers and (times.blocks_s > 0).all() and times.head_s > 0
    assert times.embed_s + times.blocks_s.sum() + times.head_s <= wall * 1.01


def test_bytes_per_token_are_those_of_the_file_plus_padding() -> None:
    shape = Shape.parse("L=2,d=64,heads=4,kv=2,ff=128,vocab=64,tied")
    model = random_model(shape, quant="q4_0")
    stored = sum(t.data.nbytes for t in model.tensors.values() if len(t.dims) == 2)
    with Decoder(model, threads=1, context=16) as decoder:  # every row count here is a multiple of the tile
        assert decoder.bytes_per_token == stored + FORMATS["q8_0"].row_bytes(64)


def test_wrong_calls_are_refused_and_change_nothing() -> None:
    with Decoder(random_model(ODD), threads=1, context=8) as decoder:
        for ids, word in (([], "no token ids"), ([95], "outside the vocabulary of 95"), ([-1], "-1"), (IDS, "larger context")):
            with pytest.raises(UsageError, match=word):
                decoder.prefill(ids)
        assert decoder.position == 0
    for threads, context in ((-1, 16), (1, 0)):
        with pytest.raises(UsageError):
            Decoder(random_model(ODD), threads=threads, context=context)


@pytest.mark.parametrize("quant", FORMATS)
def test_synthetic_steps_take_time_and_count_bytes(quant: str) -> None:
    shape = Shape.parse(f"L=2,d={256 if '_k' in quant else 64},heads=4,kv=2,ff=256,vocab=1000,untied")
    with SyntheticDecoder(shape, quant, threads=2, context=64, num_blocks=5) as decoder:
        times = decoder.run(3, position=40)
        inside = times.embed_s + times.blocks_s + times.head_s
        assert (inside > 0).all() and (inside <= times.total_s * 1.01).all()
        row = FORMATS["q8_0" if FORMATS[quant].is_quantized else quant].row_bytes(shape.hidden_size)
        assert decoder.bytes_per_token == 5 * decoder.bytes_per_block + decoder.head_bytes + row


@pytest.mark.parametrize("quant", FORMATS)
def test_synthetic_logits_are_finite(quant: str) -> None:
    """Made-up weights must not slow kernels down with infinities, NaN or subnormals."""
    shape = Shape.parse(f"L=2,d={256 if '_k' in quant else 64},heads=4,kv=2,ff=256,vocab=1000,tied")
    with SyntheticDecoder(shape, quant, threads=1, context=64, num_blocks=40) as decoder:
        decoder.run(2, position=63)
        logits = decoder.last_logits()
    assert np.isfinite(logits).all()
    assert (np.abs(logits) > np.finfo(np.float32).tiny).mean() > 0.99


_SCRIPT = """
from deepthin.engine.cpu import simd_target
from tests.engine import test_decoder, test_kernels
from deepthin.engine.formats import FORMATS
for name, cols in test_kernels.WIDTHS:
    for rows in (1, 17):
        test_kernels.test_matvec_equals_numpy_on_the_same_operands(name, rows, cols)
for name, fmt in FORMATS.items():
    for tokens in (1, 4, 7):
        test_kernels.test_matmul_gives_each_token_the_bits_of_matvec(name, tokens)
    test_kernels.test_rows_come_back_as_dequantised(name)
    for scale in (1e-37, 1e30):
        test_kernels.test_activations_of_any_size(name, scale)
    test_kernels.test_an_activation_that_is_not_finite_reaches_every_output(name)
    test_kernels.test_one_tokens_infinity_leaves_the_others_alone(name)
    test_kernels.test_a_weight_that_is_not_finite_spoils_its_row_alone(name)
    if fmt.is_quantized:
        test_kernels.test_any_bytes_with_any_scales_are_read_as_dequantised(name)
        test_kernels.test_largest_codes_meet_largest_activations_exactly(name)
    test_decoder.test_logits_equal_the_reference(name)
test_kernels.test_extreme_8_bit_codes_are_exact()
test_decoder.test_bits_depend_neither_on_threads_nor_on_the_run(test_decoder.WIDE, "q8_0")
for test in (test_kernels.test_rms_norm_hides_nothing, test_kernels.test_quantize_marks_the_blocks_that_are_not_finite):
    for bad in test_kernels.BAD:
        test(bad)
for activation in (test_kernels.elementwise.relu2, test_kernels.elementwise.gelu):
    test_kernels.test_activations_without_a_gate_pass_nan_and_infinity_on(activation)
test_kernels.test_swiglu_over_the_whole_range_of_exp()
print("target", simd_target())
"""


def _run_forced(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, **environment},
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("target", usable_targets())
def test_every_target_this_cpu_has_decodes(target: str) -> None:
    result = _run_forced(_SCRIPT, DEEPTHIN_SIMD=target)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["target", target]


def test_a_plain_cpu_gets_the_target_that_needs_no_extension() -> None:
    """Code for a CPU without any extension: LLVM would abort if a kernel asked for an instruction it lacks."""
    result = _run_forced(_SCRIPT, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["target", "neon" if platform.machine().lower() in ("aarch64", "arm64") else "portable"]


def test_a_target_the_cpu_lacks_is_refused_in_words() -> None:
    script = "import deepthin.engine.decoder"
    result = _run_forced(script, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", DEEPTHIN_SIMD="avx2")
    assert "DEEPTHIN_SIMD=avx2 needs avx2, f16c, fma" in result.stderr
    assert "is no target" in _run_forced(script, DEEPTHIN_SIMD="mmx").stderr
