import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import UsageError
from deepthin.profiles.latency.evaluation import Comparison, compare, noise_floor, regime, spearman, summary
from deepthin.profiles.latency.model import fit_model
from deepthin.profiles.latency.workload import DECODE, Workload
from deepthin.profiles.schema import Predicted
from tests.support.probed import SMALL, Device, conditions, decode_works


def comparison(predicted: float, measured: float, half: float = 0.1) -> Comparison:
    device = Device(conditions())
    probe = device.probe(Workload(SMALL, "q4_0"))
    factor = measured / probe.seconds.median
    seconds = type(probe.seconds)(measured, measured, measured, 1, "s", (measured,))
    assert factor > 0
    ends = predicted * (1 - half), predicted * (1 + half)
    return Comparison(type(probe)("llama.cpp", 1, probe.work, seconds), Predicted(predicted, *ends, "s", "predicted"), False)


def test_the_figures_are_what_they_say() -> None:
    found = summary([comparison(1.0, 1.0), comparison(1.05, 1.0), comparison(2.4, 2.0), comparison(2.7, 3.0)])
    assert found["n"] == 4
    assert found["median"] == pytest.approx((0.05 + 0.1) / 2)
    assert found["max"] == pytest.approx(0.2)
    assert found["bias"] == pytest.approx(0.025)
    assert (found["within_10"], found["within_15"]) == (0.75, 0.75)
    assert found["coverage"] == 0.5
    assert found["spearman"] == pytest.approx(math.sqrt(0.9))  # two of the four were measured alike


def test_nothing_compared_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing was compared"):
        summary([])


def test_only_the_models_own_kind_is_compared() -> None:
    where = conditions()
    device = Device(where)
    model = fit_model(device.probes(decode_works(6)), where, DECODE)
    other = Device(conditions(threads=2)).probes(decode_works(3, seed=4))
    assert len(compare(model, [*device.probes(decode_works(5, seed=3)), *other])) == 5


def test_the_noise_floor_is_the_change_of_what_was_measured_twice() -> None:
    device = Device(conditions())
    works = decode_works(9)
    first, second = device.probes(works), Device(conditions(), {"layer": 1.2e-5, "share": 0.9, "overhead": 4e-5}).probes(works)
    assert noise_floor(first, first) == {"n": 9, "median": 0.0, "p90": 0.0, "max": 0.0}
    floor = noise_floor(first, second)
    assert floor is not None
    assert floor["max"] > 0
    assert noise_floor(first, device.probes(decode_works(3, seed=77))) is None


def test_regimes_follow_the_cache() -> None:
    work = Workload(SMALL, "f16")
    held = work.body_bytes + work.head_bytes
    assert [regime(work, cache) for cache in (4 * held, held, held // 4)] == ["cache", "edge", "memory"]


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=20, unique=True))
def test_ranks_do_not_change_under_monotone_maps(values: list[float]) -> None:
    assert spearman(values, [v**3 for v in values]) == pytest.approx(1.0)
    assert spearman(values, [-v for v in values]) == pytest.approx(-1.0)


def test_rank_correlation_with_ties_and_without_variation() -> None:
    assert spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2], [1, 2]) is None
    random = np.random.Generator(np.random.PCG64(0))
    assert abs(spearman(random.random(500).tolist(), random.random(500).tolist()) or 1) < 0.15
