from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import FormatError
from deepthin.engine.formats import BODY_QUANTS
from deepthin.export.parity import compare_logits
from deepthin.export.tolerances import Budget, all_budgets, budget_named, gate, parse_budgets, parse_gates

BUDGET = Budget("test", nmse=1e-6, position_nmse=1e-4, kl=1e-6, position_kl=1e-4, near_tie=1e-3, reason="only for this test")
LOOSE = Budget("loose", nmse=1e9, position_nmse=1e9, kl=1e9, position_kl=1e9, near_tie=1e9, reason="only for this test")


def logits(seed: int = 0, positions: int = 12, vocab: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((positions, vocab)) * 3


def test_by_hand() -> None:
    r = np.array([[0.0, 3.0, 4.0], [0.0, 0.0, 5.0]])
    x = np.array([[0.0, 3.0, 4.0], [0.0, 0.0, 4.0]])
    report = compare_logits(r, x, LOOSE)
    assert report.max_abs == 1.0
    assert report.nmse == pytest.approx(1 / 50)  # (5 - 4)^2 over 9 + 16 + 25
    assert report.max_position_nmse == pytest.approx(1 / 25)
    p = np.exp([0, 0, 5]) / np.exp([0, 0, 5]).sum()
    q = np.exp([0, 0, 4]) / np.exp([0, 0, 4]).sum()
    assert report.kl_max == pytest.approx(float((p * np.log(p / q)).sum()))
    assert report.kl_mean == pytest.approx(report.kl_max / 2)
    assert report.top1 == 1.0 and report.top10 == 1.0 and report.ok


def test_top_ten_by_hand() -> None:
    r = np.arange(24.0)[None, :]
    x = r.copy()
    x[0, :3] += 100  # three of the ten largest are others now
    report = compare_logits(r, x, LOOSE)
    assert report.top10 == 0.7
    assert report.max_shortfall == pytest.approx(21 / r.std())  # the token on top, 2, lies 21 below 23
    assert compare_logits(r[:, :4], r[:, :4], LOOSE).top10 == 1.0  # fewer than ten tokens


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.integers(0, 1000), st.floats(1e-7, 1e-1))
def test_metrics_against_their_definitions(seed: int, scale: float) -> None:
    r = logits(seed)
    x = r + np.random.default_rng(seed + 1).standard_normal(r.shape) * scale
    report = compare_logits(r, x.astype(np.float32), LOOSE)
    d = x.astype(np.float32).astype(np.float64) - r
    assert report.max_abs == np.abs(d).max()
    assert report.nmse == pytest.approx((d**2).mean() / (r**2).mean())
    assert report.kl_mean <= report.kl_max and report.nmse <= report.max_position_nmse


def test_equal_logits_are_at_distance_zero() -> None:
    report = compare_logits(logits(), logits(), BUDGET)
    assert (report.max_abs, report.nmse, report.kl_max, report.top1, report.first_divergence) == (0.0, 0.0, 0.0, 1.0, None)
    assert report.ok and report.why == ""
    zeros = np.zeros((3, 4))
    assert compare_logits(zeros, zeros, BUDGET).nmse == 0.0
    assert compare_logits(zeros, zeros + 1e-9, BUDGET).nmse == np.inf


@pytest.mark.parametrize("at", [0, 5, 11])
def test_first_divergence_is_found(at: int) -> None:
    x = logits()
    x[at:] += np.random.default_rng(1).standard_normal(x[at:].shape)
    report = compare_logits(logits(), x, BUDGET)
    assert not report.ok and report.first_divergence is not None and report.first_divergence.position == at
    assert "NMSE" in report.why


def test_a_shift_of_all_logits_is_no_kl_but_is_nmse() -> None:
    report = compare_logits(logits(), logits() + 0.5, BUDGET)
    assert report.kl_max < 1e-12 and not report.ok and report.first_divergence is not None


def test_a_small_error_everywhere_is_placed_where_it_begins() -> None:
    x = logits()
    x[4:] *= 1.005  # 2.5e-5 per position: within the limit of each, beyond that of the whole
    report = compare_logits(logits(), x, BUDGET)
    assert report.max_position_nmse < BUDGET.position_nmse and report.nmse > BUDGET.nmse
    assert report.first_divergence is not None and report.first_divergence.position == 4


def test_flip_and_near_tie() -> None:
    r = logits()
    best, second = np.argsort(r[7])[-1], np.argsort(r[7])[-2]
    r[7, second] = r[7, best] - 1e-4  # about 3e-5 deviations apart
    x = r.copy()
    x[7, [best, second]] = r[7, [second, best]]
    tied = compare_logits(r, x, BUDGET)
    assert tied.ok and tied.top1 == 1.0 and tied.top1_ties == 1
    strict = Budget("strict", nmse=1e9, position_nmse=1e9, kl=1e9, position_kl=1e9, near_tie=1e-6, reason="only for this test")
    flipped = compare_logits(r, x, strict)
    assert not flipped.ok and flipped.top1 == pytest.approx(11 / 12) and flipped.top1_ties == 0
    assert flipped.first_divergence is not None and flipped.first_divergence.position == 7
    assert "another top token" in flipped.why


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    x = logits()
    x[3, 2] = bad
    report = compare_logits(logits(), x, LOOSE)
    assert not report.ok and report.first_divergence is not None and report.first_divergence.position == 3
    document = report.to_json()
    assert document["nmse"] is None and document["max_abs"] is None
    json.dumps(document, allow_nan=False)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"shape \(12, 49\) cannot be compared with reference logits of shape \(12, 50\)"):
        compare_logits(logits(), logits()[:, :-1], BUDGET)
    with pytest.raises(ValueError, match="cannot be compared"):
        compare_logits(np.empty((0, 5)), np.empty((0, 5)), BUDGET)


def test_every_shipped_budget_has_limits_in_order_and_a_reason() -> None:
    budgets = all_budgets()
    formats = set(BODY_QUANTS)
    wanted = {f"{runtime}.{quant}" for runtime in ("engine", "llama_cpp", "llama_cpp_default") for quant in formats}
    wanted |= {f"onnxruntime.{quant}" for quant in ("f32", "f16", "q8_0", "q4_0", "q4_1")}
    wanted |= {f"onnxruntime_int8.{quant}" for quant in ("q8_0", "q4_0", "q4_1")}
    wanted |= {
        f"{runtime}.stored" for runtime in ("engine", "llama_cpp", "llama_cpp_default", "onnxruntime", "onnxruntime_int8")
    }
    assert set(budgets) == wanted
    for name, budget in budgets.items():
        assert budget_named(name) is budget
        assert 0 < budget.nmse <= budget.position_nmse < 1 and 0 < budget.kl <= budget.position_kl
        assert "easured" in budget.reason or "As llama_cpp." in budget.reason
    with pytest.raises(FormatError, match=r"there is no budget 'engine\.q2'; the budgets are engine\.f32"):
        budget_named("engine.q2")


GOOD = 'nmse=1e-9\nposition_nmse=1e-8\nkl=1e-9\nposition_kl=1e-8\nnear_tie=1e-3\nreason="because it was measured like so"\n'


def test_budgets_are_read() -> None:
    (budget,) = parse_budgets(f"[a.b]\n{GOOD}", "t.toml").values()
    assert (budget.name, budget.nmse, budget.near_tie) == ("a.b", 1e-9, 1e-3)
    assert "reason" not in budget.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a.b", "t.toml: not TOML"),
        ("[a.b]\n" + GOOD.replace('reason="because it was measured like so"\n', ""), r"\[a\.b\] holds .*, but exactly nmse"),
        ("[a.b]\n" + GOOD.replace("because it was measured like so", " "), "say in a sentence why"),
        ("[a.b]\n" + GOOD.replace("kl=1e-9\npos", "kl=0\npos"), r"\[a\.b\] kl is 0, but a positive number"),
        ("[a.b]\n" + GOOD.replace("nmse=1e-9\npos", "nmse=true\npos"), "nmse is True"),
        ("[a.b]\n" + GOOD.replace("near_tie=1e-3", "near_tie=nan"), "near_tie is nan"),
        ("[a.b]\n" + GOOD + "extra=1\n", "exactly"),
        ("a = 3", r"\[a\.\] holds 3"),
    ],
)
def test_budgets_without_reason_or_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_budgets(text, "t.toml")


def test_gates_stand_beside_budgets() -> None:
    text = f"[a.b]\n{GOOD}[gate.c]\nkl=1e-3\nties=8\nreason='because it was measured like so'\n"
    assert parse_gates(text, "t.toml") == {"c": {"kl": 1e-3, "ties": 8.0}}
    assert list(parse_budgets(text, "t.toml")) == ["a.b"]
    assert gate("random_f32")["nmse"] < gate("random_int8")["nmse"]
    with pytest.raises(FormatError, match=r"there is no gate 'random_q2'; the gates are .*random_f32"):
        gate("random_q2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gate.c]\nkl=1e-3\n", r"\[gate\.c\] needs a reason and at least one limit"),
        ("[gate.c]\nreason='because it was measured like so'\n", "at least one limit"),
        ("[gate.c]\nkl=1e-3\nreason=' '\n", r"\[gate\.c\] reason is ' '; say in a sentence why"),
        ("[gate.c]\nkl=0\nreason='because it was measured like so'\n", "kl is 0, but a positive number"),
        ("gate = 3", r"\[gate\.\] needs a reason"),
    ],
)
def test_gates_without_reason_or_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_gates(text, "t.toml")
