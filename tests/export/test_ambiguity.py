"""The third verdict: what is beyond a budget and explained by near ties or by the noise of rounded activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepthin.cli.main import main
from deepthin.engine.formats import FORMATS, BlockFormat
from deepthin.engine.model import Model
from deepthin.engine.tensors import stored_format, tensor_specs
from deepthin.export import verify
from deepthin.export.ambiguity import excuse
from deepthin.export.noise import BF16, F16, FLOAT, INT8, noise_samples, sample
from deepthin.export.parity import compare_logits
from deepthin.export.tolerances import Budget, budget_named, gate
from deepthin.export.verify import verify_bundle
from tests.support.bundles import GGUF_Q4, ONNX_Q4, edit_onnx, put, with_values
from tests.support.graph_edits import shift_seqlens
from tests.support.tiny_models import PROMPT, lively_model, tiny_shape

LIMITS = gate("ambiguous")
BUDGET = Budget("test", nmse=1e-4, position_nmse=1e-2, kl=1e-3, position_kl=1e-1, near_tie=0.1, reason="only for this test")


def logits(seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((12, 50)) * 3


def off_by(nmse: float, seed: int = 1) -> Any:
    """Logits at about that distance, no top token moved beyond what it does."""
    return logits() + np.sqrt(nmse) * 3 * np.random.default_rng(seed).standard_normal((12, 50))


def report(x: Any, budget: Budget = BUDGET) -> Any:
    return compare_logits(logits(), x, budget)


def test_noise_as_large_explains_it_and_smaller_noise_does_not() -> None:
    beyond = report(off_by(1e-3))
    assert not beyond.ok
    assert "rounding activations alone moves the reference by NMSE" in excuse(beyond, [report(off_by(1e-3, seed=2))])
    assert excuse(beyond, [report(off_by(1e-3 / LIMITS["times"] / 2, seed=2))]) == ""
    assert excuse(beyond, []) == ""


def test_the_noisier_sample_counts_and_each_measure_must_be_explained() -> None:
    beyond, quiet, loud = report(off_by(1e-3)), report(off_by(1e-6, seed=3)), report(off_by(1e-3, seed=4))
    assert excuse(beyond, [quiet, loud]) and not excuse(beyond, [quiet])
    assert not excuse(beyond, [replace(loud, kl_mean=0.0, kl_max=0.0), quiet])


def test_no_noise_explains_another_model() -> None:
    far = report(off_by(2 * LIMITS["most_nmse"]))
    assert excuse(far, [report(off_by(2 * LIMITS["most_nmse"], seed=2))]) == ""
    broken = logits()
    broken[3, 2] = np.nan
    assert excuse(report(broken), [report(off_by(1e-3))]) == ""


@pytest.mark.parametrize(("down", "explained"), [(1.5, True), (1.05 * LIMITS["tie_reach"], False)])
def test_near_ties(down: float, explained: bool) -> None:
    """Another token on top, ``down`` near-ties below in the reference, everything else equal."""
    r = logits()
    best, second = np.argsort(r[7])[::-1][:2]
    r[7, second] = r[7, best] - down * BUDGET.near_tie * r[7].std()
    r[7, second] = r[7, best] - down * BUDGET.near_tie * r[7].std()  # the deviation has moved a little
    x = r.copy()
    x[7, second] = x[7, best] + 1e-9
    loose = replace(BUDGET, nmse=1.0, position_nmse=1.0, kl=1.0, position_kl=1.0)
    found = compare_logits(r, x, loose)
    assert not found.ok and "another top token" in found.why
    assert bool(excuse(found, [])) is explained
    assert not explained or "only tokens on top differ" in excuse(found, [])


def formats(model: Model, quant: str) -> dict[str, BlockFormat]:
    return {spec.name: stored_format(spec, FORMATS[quant]) for spec in tensor_specs(model.shape)}


@pytest.mark.parametrize(
    ("rounding", "quant", "low", "high"),
    [
        (FLOAT, "f32", 1e-15, 1e-11),
        (F16, "f16", 1e-9, 1e-5),
        (BF16, "bf16", 1e-7, 1e-3),
        (INT8, "q8_0", 1e-6, 3e-3),
        (INT8, "f32", 0, 1e-11),  # nothing is stored in blocks
    ],
)
def test_how_loud_each_rounding_is(rounding: str, quant: str, low: float, high: float) -> None:
    model = lively_model(tiny_shape("plain"), quant=quant)
    weights = model.dequantized()
    right = sample(model.shape, weights, PROMPT)
    made = noise_samples(model.shape, weights, PROMPT, rounding, formats(model, quant))
    assert len(made) == (1 if rounding == FLOAT else 2)
    distances = [compare_logits(right.logits, item.logits, BUDGET).nmse for item in made]
    assert low <= max(distances) <= high, distances
    assert list(right.streams) == ["token_embd", *(f"blk.{n}.{part}" for n in range(2) for part in ("attn", "ffn"))]


def tightened(factor: float) -> Callable[[str], Budget]:
    """Budgets of rounded activations ``factor`` times tighter; others as they are."""

    def named(name: str) -> Budget:
        budget = budget_named(name)
        if budget.nmse < 1e-3:
            return budget
        limits = {key: getattr(budget, key) * factor for key in ("nmse", "position_nmse", "kl", "position_kl")}
        return replace(budget, **limits)

    return named


def test_a_right_bundle_beyond_its_budget_is_ambiguous(
    good_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget is made far tighter than rounding allows; nothing is wrong with the bundle."""
    monkeypatch.setattr(verify, "budget_named", tightened(1e-3))
    result = verify_bundle(good_bundle, runtimes=["engine", "onnxruntime"])
    assert result["verdict"] == "ambiguous", result["summary"]
    verdicts = {(pair["b"], pair["mode"], pair["file"]): pair["verdict"] for pair in result["pairs"]}
    assert verdicts["engine", "", GGUF_Q4] == verdicts["onnxruntime", "level 4", ONNX_Q4] == "ambiguous"
    assert verdicts["onnxruntime", "level 0", ONNX_Q4] == "pass"  # nothing is rounded there
    assert result["summary"][0].startswith("ambiguous: all files hold the same model, but 6 of ")
    assert all("rounding activations alone moves" in pair["excuse"] for pair in result["pairs"] if not pair["ok"])
    assert main(["verify", str(good_bundle), "--runtimes", "engine"]) == 4
    assert "ambiguous: all files hold" in capsys.readouterr().out


def test_what_is_wrong_stays_a_failure(bundle: Path, quiet: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a wrong wire nor a weight that is off by less than the noise is excused."""
    monkeypatch.setattr(verify, "budget_named", tightened(1e-3))
    edit_onnx(bundle, ONNX_Q4, shift_seqlens(-1))
    assert verify_bundle(bundle, runtimes=["onnxruntime"])["verdict"] == "fail"
    put(bundle, ONNX_Q4, with_values(quiet, blk_0_ffn_up=lambda values: values * np.float32(1.001)), "q4_0")
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert {pair["verdict"] for pair in result["pairs"] if pair["file"] == ONNX_Q4} == {"fail"}
