from __future__ import annotations

import math

import numpy as np

from deepthin.engine.arrays import F64
from deepthin.search.budget import Budget
from deepthin.search.design import random_generator
from deepthin.search.space import Candidate, Space
from deepthin.search.time_model import features, predicted_log_seconds, prompt_features
from tests.support.fake_costs import fake_cost

SPACE = Space(Budget(params=20_000_000), vocabs=(8192, 16384, 32768))


def drawn(count: int, seed: int = 0) -> list[Candidate]:
    """Random candidates."""
    generator = random_generator(seed)
    return [SPACE.decode(SPACE.sample(generator)) for _ in range(count)]


def described(candidates: list[Candidate]) -> tuple[F64, F64]:
    """Features and made-up seconds."""
    seconds = [fake_cost(one.shape, one.quant).seconds_per_token.to_json()["median"] for one in candidates]
    return np.array([features(one, 512) for one in candidates]), np.array(seconds)


def test_time_model_learns_from_few_measurements() -> None:
    rows, seconds = described(drawn(24))
    wanted, true = described(drawn(60, seed=1))
    logs, doubt = predicted_log_seconds(rows, seconds, wanted)
    errors = np.abs(logs - np.log(true))
    assert float(np.median(errors)) < 0.03  # the made-up times hold 1 % of noise
    assert doubt.min() >= 0
    again, certain = predicted_log_seconds(rows, seconds, rows)
    assert np.abs(again - np.log(seconds)).max() < 0.05
    assert certain.mean() < doubt.mean()


def test_one_measurement_is_enough_to_go_on() -> None:
    rows, seconds = described(drawn(1))
    logs, _ = predicted_log_seconds(rows, seconds, rows)
    assert math.isclose(float(logs[0]), math.log(float(seconds[0])), abs_tol=0.1)


def test_prompts_are_told_from_tokens_by_their_arithmetic() -> None:
    """Times that follow parameters, as a prompt's do: four-bit and eight-bit weights of one shape take the same."""
    candidates, others = drawn(40), drawn(40, seed=1)

    def seconds(one: Candidate) -> float:
        shape = one.shape
        products = shape.num_layers * shape.hidden_size * (2 * shape.hidden_size + 3 * shape.intermediate_size)
        return 512 * products / 5e10 + 1e-3

    rows, wanted = (np.array([prompt_features(one, 512) for one in part]) for part in (candidates, others))
    logs, _ = predicted_log_seconds(rows, np.array([seconds(one) for one in candidates]), wanted)
    assert float(np.median(np.abs(logs - np.log([seconds(one) for one in others])))) < 0.05
