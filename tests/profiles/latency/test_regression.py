"""The fit recovers what the times were made of, and its intervals hold as many of them as they say."""

import math

import numpy as np
import pytest

from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles.latency.regression import CORNER, Factor, Fitted, Observation, Prior, Term, fit

PRIORS = {"a": Prior(math.log(2e-9), 1.0), "b": Prior(math.log(1e-5), 1.0), "idle": Prior(math.log(3.0), 0.7)}


def two_terms(x: float, y: float) -> tuple[Term, ...]:
    return (Term("bytes", (Factor(math.log(x), {"a": 1}),)), Term("layers", (Factor(math.log(y), {"b": 1}),)))


def observed(count: int, noise: float, seed: int) -> list[Observation]:
    random = np.random.Generator(np.random.PCG64(seed))
    found = []
    for _ in range(count):
        x, y = float(10 ** random.uniform(5, 8)), float(random.integers(2, 80))
        exact = 1e-9 * x + 3e-5 * y
        found.append(Observation(two_terms(x, y), exact * math.exp(noise * random.standard_normal()), noise or 1e-4))
    return found


def test_exact_times_give_the_exact_costs() -> None:
    fitted = fit(observed(12, 0.0, 0), PRIORS)
    assert fitted.value("a")[0] == pytest.approx(1e-9, rel=1e-2)
    assert fitted.value("b")[0] == pytest.approx(3e-5, rel=1e-2)


def test_what_no_probe_shows_stays_as_uncertain_as_before() -> None:
    fitted = fit(observed(12, 0.01, 0), PRIORS)
    at = fitted.index["idle"]
    assert fitted.theta[at] == pytest.approx(math.log(3.0))
    assert fitted.covariance[at, at] == pytest.approx(0.49)
    assert fitted.covariance[fitted.index["a"], fitted.index["a"]] < 0.01


def test_without_observations_the_priors_speak() -> None:
    seconds, low, high, named = fit([], PRIORS).predict(two_terms(1e6, 10))
    assert seconds == pytest.approx(2e-3 + 1e-4)
    assert low < 0.4 * seconds < seconds < 0.5 * high
    assert named == pytest.approx({"bytes": 2e-3, "layers": 1e-4})


def test_terms_add_up_to_the_whole_and_the_interval_holds_it() -> None:
    fitted = fit(observed(20, 0.03, 1), PRIORS)
    seconds, low, high, named = fitted.predict(two_terms(3e6, 30))
    assert sum(named.values()) == pytest.approx(seconds)
    assert low < seconds < high


def test_overlapping_factors_cost_the_larger_one_with_a_rounded_corner() -> None:
    priors = {"read": Prior(0.0, 1.0), "compute": Prior(0.0, 1.0)}

    def predicted(read: float, compute: float) -> float:
        return fit([], priors).predict(
            (Term("w", (Factor(math.log(read), {"read": 1}), Factor(math.log(compute), {"compute": 1}))),)
        )[0]

    assert predicted(1.0, 1e-3) == pytest.approx(1.0, rel=1e-3)
    assert predicted(1.0, 1.0) == pytest.approx(2 ** (1 / CORNER))


def test_one_wild_observation_does_not_move_the_rest() -> None:
    clean = observed(20, 0.01, 2)
    wild = [*clean[:-1], Observation(clean[-1].terms, clean[-1].seconds * 5, 0.01)]
    assert fit(wild, PRIORS).value("a")[0] == pytest.approx(fit(clean, PRIORS).value("a")[0], rel=0.05)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_intervals_hold_nine_of_ten_new_observations(noise: float) -> None:
    inside = total = 0
    for seed in range(12):
        fitted = fit(observed(25, noise, seed), PRIORS)
        for new in observed(50, noise, 100 + seed):
            _, low, high, _ = fitted.predict(new.terms)
            inside, total = inside + (low <= new.seconds <= high), total + 1
    assert 0.85 <= inside / total <= 0.97


def test_left_out_residuals_are_those_of_refitting_without_the_observation() -> None:
    data = observed(15, 0.05, 3)
    fitted = fit(data, PRIORS)
    for index in (0, 7):
        rest = fit([one for i, one in enumerate(data) if i != index], PRIORS)
        truth = math.log(data[index].seconds / rest.predict(data[index].terms)[0])
        assert fitted.left_out[index] == pytest.approx(truth, abs=0.01)


def test_json_round_trip_predicts_the_same() -> None:
    fitted = fit(observed(10, 0.02, 4), PRIORS)
    again = Fitted.from_json(fitted.to_json())
    assert again.predict(two_terms(1e6, 5)) == fitted.predict(two_terms(1e6, 5))


def test_damaged_json_is_refused() -> None:
    document = fit([], PRIORS).to_json()
    with pytest.raises(FormatError, match="another size"):
        Fitted.from_json(document | {"theta": [1.0]})
    with pytest.raises(FormatError, match="names is str"):
        Fitted.from_json(document | {"names": "abc"})


def test_a_time_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="not positive"):
        fit([Observation(two_terms(1, 1), 0.0, 0.01)], PRIORS)
