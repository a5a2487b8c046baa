from collections.abc import Mapping

import pytest

from deepthin.engine.errors import UsageError
from deepthin.profiles.sustained import sustained


class Warming:
    """Takes 10 ms a call, and ``slow`` ms after ``after`` seconds."""

    def __init__(self, after: float, slow: float) -> None:
        self.now, self.after, self.slow = 0.0, after, slow

    def __call__(self) -> Mapping[str, float]:
        seconds = (self.slow if self.now > self.after else 10.0) * 1e-3
        self.now += seconds
        return {"seconds": seconds}


def test_a_steady_machine_keeps_its_speed() -> None:
    machine = Warming(1e9, 0)
    found = sustained(machine, 6.0, clock=lambda: machine.now)
    assert found["factor"]["median"] == pytest.approx(1.0)
    assert not found["throttles"]
    assert found["time_to_floor_s"] is None
    assert found["wall_s"] == pytest.approx(6.0, abs=0.6)


def test_a_throttling_machine_is_caught_with_the_time_it_took() -> None:
    machine = Warming(3.0, 20.0)
    found = sustained(machine, 9.0, clock=lambda: machine.now)
    assert found["factor"]["median"] == pytest.approx(0.5)
    assert found["throttles"]
    assert found["time_to_floor_s"] == pytest.approx(3.5, abs=0.6)


def test_too_little_time_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 3 s, not 1"):
        sustained(lambda: {"seconds": 1.0}, 1.0)
