"""The number of threads under contention, on a made-up machine and clock; and real threads that come and go."""

from __future__ import annotations

import numpy as np
import pytest

from deepthin.engine.decoder import Decoder
from deepthin.engine.model import random_model
from deepthin.engine.pace import CALM_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, Pace
from deepthin.engine.shape import Shape


class Machine:
    """``cores`` cores: a token takes ``work`` seconds over the threads, and a stall more when a thread has no core."""

    def __init__(self, cores: int, work: float = 8e-3, stall: float = 5e-3) -> None:
        self.cores, self.free, self.work, self.stall = cores, cores, work, stall
        self.now = 0.0
        self.pace = Pace(cores, lambda: self.now)

    def token(self) -> tuple[int, float]:
        active = self.pace.active
        lost = active > self.free
        seconds = self.work / active + (self.stall if lost else 0)
        self.now += seconds
        self.pace.record(seconds, lost=lost)
        return active, seconds

    def run(self, seconds: float) -> list[tuple[int, float]]:
        end = self.now + seconds
        tokens = []
        while self.now < end:
            tokens.append(self.token())
        return tokens


def test_nothing_changes_while_nothing_happens() -> None:
    machine = Machine(4)
    assert {active for active, _ in machine.run(3.0)} == {4}


def test_one_lost_moment_changes_nothing() -> None:
    machine = Machine(2)
    machine.run(0.5)
    machine.free = 1
    machine.token()
    machine.free = 2
    assert {active for active, _ in machine.run(0.5)} == {2}


def test_a_lost_core_costs_its_capacity_and_seldom_more() -> None:
    machine = Machine(2)
    machine.run(1.0)
    machine.free = 1
    tokens = machine.run(10.0)
    assert [active for active, _ in tokens[:3]] == [2, 2, 1]
    times = [seconds for _, seconds in tokens]
    assert np.median(times) == pytest.approx(machine.work)
    assert np.quantile(times, 0.95) == pytest.approx(machine.work)
    assert sum(active == 2 for active, _ in tokens) < 2 + 10.0 / LONGEST_PAUSE_S + 8
    machine.free = 2
    back = machine.run(LONGEST_PAUSE_S + 0.1)
    assert back[-1][0] == 2, "all threads are back when the core is"


def test_the_pause_doubles_and_starts_anew_after_a_calm_second() -> None:
    machine = Machine(2)
    machine.free = 1
    machine.run(8.0)

    def first_trial_s() -> float:
        start = machine.now
        while machine.token()[0] == 1:
            pass
        return machine.now - start

    first_trial_s()
    assert first_trial_s() > 0.9 * LONGEST_PAUSE_S
    machine.free = 2
    machine.run(LONGEST_PAUSE_S + CALM_S + 0.2)
    machine.free = 1
    machine.run(0.02)
    assert machine.pace.active == 1
    assert first_trial_s() < 2 * FIRST_PAUSE_S


def test_one_of_many_cores_lost_leaves_most_threads_at_work() -> None:
    machine = Machine(8)
    machine.free = 7
    tokens = machine.run(5.0)
    assert np.median([active for active, _ in tokens]) == 6
    machine.free = 3
    assert machine.run(2.0)[-1][0] == 3


def test_where_fewer_threads_are_no_better_all_stay() -> None:
    """Both cores are shared: each thread runs half the time whatever their number, so one thread takes twice as long."""
    pace_now = [0.0]
    pace = Pace(2, lambda: pace_now[0])
    counts = []
    for _ in range(2000):
        active = pace.active
        seconds = 2 * 8e-3 / active
        pace_now[0] += seconds
        counts.append(active)
        pace.record(seconds, lost=active == 2)
    assert np.mean([count == 2 for count in counts[200:]]) > 0.9


def test_slow_tokens_count_too_and_slow_growth_does_not() -> None:
    machine = Machine(2)
    machine.run(0.5)
    for _ in range(4):
        machine.now += 9e-3
        machine.pace.record(9e-3, lost=False)
    assert machine.pace.active == 1
    deeper = Machine(2)
    for _ in range(2000):
        deeper.work *= 1.001
        assert deeper.token()[0] == 2


def test_jobs_of_many_tokens_count_by_lost_cores_alone() -> None:
    now = [0.0]
    pace = Pace(2, lambda: now[0])
    for lost in (True, True):
        pace.record(None, lost=lost)
    assert pace.active == 1
    now[0] += FIRST_PAUSE_S
    pace.record(None, lost=False)
    assert pace.active == 2
    pace.record(None, lost=False)
    assert pace.active == 2


def test_one_thread_is_left_alone() -> None:
    pace = Pace(1)
    for _ in range(10):
        pace.record(1.0, lost=True)
    assert pace.active == 1


def test_logits_do_not_depend_on_who_takes_part() -> None:
    model = random_model(Shape.parse("L=3,d=96,heads=6,kv=2,head_dim=16,ff=160,vocab=95,untied"), seed=1, quant="q4_0")
    ids = [i * 7 % 95 for i in range(70)]
    with Decoder(model, threads=1, context=80) as one:
        expected = one.logits(ids)
    with Decoder(model, threads=4, context=80) as decoder:
        decoder._pace = Pace(4)
        for start, active in ((0, 3), (33, 1), (34, 4), (40, 2), (41, 4), (42, 1), (43, 3), (44, 4)):
            decoder._pace.active = active
            end = 33 if start == 0 else start + 1
            np.testing.assert_array_equal(decoder.logits(ids[start:end]), expected[start:end])
            decoder.position = start + 1 if start else 33
            if start == 34:
                decoder.prefill(ids[35:40])
        runner = decoder._runner
        for active in (1, 4, 2, 3, 1, 4) * 50:  # workers left out of a job are there for the next
            runner.tokens[0] = ids[45]
            runner.run(1, 45, 1, active)
            np.testing.assert_array_equal(runner.logits[:95], expected[45])
