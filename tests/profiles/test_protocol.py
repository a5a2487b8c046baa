from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, cycle, repeat

import numpy as np
import pytest

from deepthin.engine.errors import PeerError, UsageError
from deepthin.profiles.contention import Counters
from deepthin.profiles.protocol import Instruments, Rule, Subject, measure, reading_flags


class Bench:
    """A machine whose clock moves only when a subject runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []
        self.slept: list[float] = []
        self.others_s = 0.0  # CPU seconds of other processes
        self.sentinel_s: Iterable[float] = repeat(1e-4)
        self.barrier_s: Iterable[float | None] = repeat(None)
        self.memory: Iterable[float | None] = repeat(None)

    def subject(self, name: str, seconds: Iterable[float]) -> Subject:
        steps = iter(seconds)

        def run() -> Mapping[str, float]:
            spent = next(steps)
            self.now += spent
            self.order.append(name)
            return {"step_s": spent}

        return run

    @property
    def instruments(self) -> Instruments:
        values, barriers, rates = iter(self.sentinel_s), iter(self.barrier_s), iter(self.memory)
        return Instruments(
            clock=lambda: self.now,
            sleep=self.slept.append,
            counters=lambda: Counters(self.now, busy_s=self.now + self.others_s, own_s=self.now, steal_s=0.0, switches=0),
            sentinel=lambda: next(values),
            fastest_sentinel=lambda: 1e-4,
            barrier=lambda: next(barriers),
            reference_barrier=lambda: 7e-8,
            memory=lambda: next(rates),
            usual_memory=lambda: 4e10,
        )


def noisy(seed: int, centre: float, sigma: float) -> Iterable[float]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return (centre * float(np.exp(sigma * rng.standard_normal())) for _ in repeat(None))


def test_rounds_are_interleaved_and_a_quiet_machine_needs_one_batch() -> None:
    bench = Bench()
    session = measure(
        {"a": bench.subject("a", repeat(0.1)), "b": bench.subject("b", repeat(0.2))},
        Rule(rounds=7),
        instruments=bench.instruments,
    )
    assert bench.order == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * 7
    assert (session.rounds, session.discarded_rounds, session.flags) == (7, 0, ())
    assert session.measured("a", "step_s").median == pytest.approx(0.1)
    assert session.rate("b", "step_s", 10, "tok/s").median == pytest.approx(50.0)
    assert session.speed_ratio("a", "b", "step_s").median == pytest.approx(2.0)
    assert session.flags_of("a", "step_s") == ()


def test_warm_up_lasts_until_three_calls_agree() -> None:
    bench = Bench()
    session = measure(
        {"a": bench.subject("a", chain([9.0, 3.0, 1.5], repeat(1.0)))},
        Rule(rounds=6, budget_s=60.0),
        instruments=bench.instruments,
    )
    assert set(session.samples["a"]["step_s"]) == {1.0}
    assert len(bench.order) == 6 + 6
    assert session.flags == ()


def test_a_warm_up_that_never_settles_is_flagged() -> None:
    bench = Bench()
    session = measure(
        {"a": bench.subject("a", chain.from_iterable(repeat([1.0, 2.0])))}, Rule(rounds=6), instruments=bench.instruments
    )
    assert "unstable-warm-up" in session.flags


def test_a_contended_batch_is_taken_again_and_left_out() -> None:
    bench = Bench()
    steps = bench.subject("a", chain(repeat(0.1, 3), repeat(0.5, 7), repeat(0.1)))
    calls = 0

    def disturbed() -> Mapping[str, float]:
        nonlocal calls
        calls += 1
        if 3 < calls <= 10:
            bench.others_s += 2.0
        return steps()

    session = measure({"a": disturbed}, Rule(rounds=7), instruments=bench.instruments)
    assert (session.rounds, session.discarded_rounds, session.flags) == (7, 7, ())
    assert session.measured("a", "step_s").median == pytest.approx(0.1)


def test_a_machine_never_ours_is_flagged_and_keeps_all_samples() -> None:
    bench = Bench()
    steps = bench.subject("a", repeat(0.1))

    def disturbed() -> Mapping[str, float]:
        bench.others_s += 5.0
        return steps()

    session = measure({"a": disturbed}, Rule(rounds=5, budget_s=2.0), instruments=bench.instruments)
    assert session.flags == ("other-processes",)
    assert session.rounds >= 10
    assert session.discarded_rounds == 0


def test_a_wide_interval_adds_batches_until_narrow() -> None:
    bench = Bench()
    session = measure(
        {"a": bench.subject("a", noisy(5, 0.01, 0.04))}, Rule(rounds=6, budget_s=30.0), instruments=bench.instruments
    )
    assert session.rounds > 6
    assert session.flags_of("a", "step_s") == ()


def test_a_wide_interval_at_the_end_of_the_budget_is_flagged() -> None:
    bench = Bench()
    session = measure(
        {"a": bench.subject("a", noisy(5, 1.0, 0.5))}, Rule(rounds=6, budget_s=20.0), instruments=bench.instruments
    )
    assert "wide-interval" in session.flags_of("a", "step_s")
    assert bench.now < 20.0 + 6 * 5


def test_only_gated_readings_add_batches() -> None:
    bench = Bench()
    wild = iter(noisy(1, 1.0, 1.0))

    def run() -> Mapping[str, float]:
        bench.now += 0.01
        return {"block_s": 0.01, "overhead_s": next(wild)}

    session = measure({"a": run}, Rule(rounds=6), gates=("block_s",), instruments=bench.instruments)
    assert session.rounds == 6
    assert "wide-interval" in session.flags_of("a", "overhead_s")


def test_a_core_slowed_by_a_neighbour_that_no_counter_shows_is_flagged() -> None:
    bench = Bench()
    bench.sentinel_s = cycle([1e-4, 1.5e-4, 1.5e-4])
    session = measure({"a": bench.subject("a", repeat(0.1))}, Rule(rounds=6), instruments=bench.instruments)
    assert session.flags == ("slow-core",)


def test_a_batch_on_a_slowed_core_is_taken_again() -> None:
    bench = Bench()
    bench.sentinel_s = chain([1.6e-4] * 6, repeat(1e-4))
    session = measure({"a": bench.subject("a", repeat(0.1))}, Rule(rounds=6), instruments=bench.instruments)
    assert (session.flags, session.rounds, session.discarded_rounds) == ((), 6, 6)


def test_a_core_that_stays_slow_costs_no_more_than_the_budget() -> None:
    bench = Bench()
    bench.sentinel_s = repeat(1.6e-4)
    session = measure(
        {"a": bench.subject("a", repeat(0.1))}, Rule(rounds=6, budget_s=2.0, patience=5.0), instruments=bench.instruments
    )
    assert session.flags == ("slow-core",)
    assert session.wall_s <= 2.0


@pytest.mark.parametrize("barrier_s", [3e-8, 2.8e-7])
def test_a_batch_on_cores_that_are_elsewhere_is_taken_again(barrier_s: float) -> None:
    bench = Bench()
    bench.barrier_s = chain([7e-8, barrier_s], repeat(8e-8))
    session = measure({"a": bench.subject("a", repeat(0.1))}, Rule(rounds=6), instruments=bench.instruments)
    assert (session.flags, session.rounds, session.discarded_rounds, session.barrier_s) == ((), 6, 6, 8e-8)


def test_cores_that_stay_elsewhere_are_flagged_within_the_budget() -> None:
    bench = Bench()
    bench.barrier_s = repeat(2.8e-7)
    rule = Rule(rounds=6, budget_s=2.0, patience=5.0)
    session = measure({"a": bench.subject("a", repeat(0.1))}, rule, instruments=bench.instruments)
    assert (session.flags, session.barrier_s) == (("moved-cores",), 2.8e-7)
    assert session.wall_s <= 2.0


def test_slow_memory_is_waited_for_and_else_flagged() -> None:
    bench = Bench()
    bench.memory = chain([4e10, 3e10], repeat(4.1e10))
    session = measure({"a": bench.subject("a", repeat(0.1))}, Rule(rounds=6), instruments=bench.instruments)
    assert (session.flags, session.rounds, session.discarded_rounds) == ((), 6, 6)
    bench.memory = repeat(3e10)
    rule = Rule(rounds=6, budget_s=2.0, patience=3.0)
    session = measure({"a": bench.subject("a", repeat(0.1))}, rule, instruments=bench.instruments)
    assert session.flags == ("slow-memory",)
    assert session.wall_s > 2.0


def test_a_drifting_sentinel_is_flagged() -> None:
    bench = Bench()
    bench.sentinel_s = (1e-4 * 1.02**i for i in range(10_000))
    session = measure({"a": bench.subject("a", repeat(0.1))}, Rule(rounds=9, budget_s=5.0), instruments=bench.instruments)
    assert session.flags == ("sentinel-drift",)


@pytest.mark.parametrize("calls_before_death", [1, 8])
def test_a_peer_that_dies_becomes_a_line_and_the_rest_goes_on(calls_before_death: int) -> None:
    bench = Bench()
    calls = 0

    def dying() -> Mapping[str, float]:
        nonlocal calls
        calls += 1
        if calls > calls_before_death:
            raise PeerError("llama.cpp ended its process: killed by SIGABRT")
        return {"step_s": 1.0}

    session = measure({"a": bench.subject("a", repeat(0.1)), "peer": dying}, Rule(rounds=7), instruments=bench.instruments)
    assert session.failures == {"peer": "llama.cpp ended its process: killed by SIGABRT"}
    assert set(session.samples) == {"a"}
    assert session.rounds == 7


def test_when_everyone_dies_the_session_is_empty_but_ends() -> None:
    def dying() -> Mapping[str, float]:
        raise PeerError("gone")

    session = measure({"peer": dying}, Rule(rounds=3), instruments=Bench().instruments)
    assert (session.samples, session.rounds, session.failures) == ({}, 0, {"peer": "gone"})


def test_settling_pauses_before_each_timed_call() -> None:
    bench = Bench()
    measure({"a": bench.subject("a", repeat(0.1))}, Rule(rounds=4, settle_s=0.02), instruments=bench.instruments)
    assert bench.slept == [0.02] * 6  # and before each look at barrier and memory


def test_state_says_how_it_went() -> None:
    bench = Bench()
    state = measure({"a": bench.subject("a", repeat(0.1))}, Rule(rounds=6), instruments=bench.instruments).state_json()
    assert (state["rounds"], state["discarded_rounds"], state["flags"]) == (6, 0, [])
    assert state["sentinel_s"] == [1e-4] * 6


@pytest.mark.parametrize(
    "make", [lambda: Rule(rounds=0), lambda: Rule(budget_s=-1.0), lambda: Rule(patience=0.5), lambda: Rule(settle_s=-1.0)]
)
def test_rules_that_measure_nothing_are_refused(make: Callable[[], Rule]) -> None:
    with pytest.raises(UsageError, match="at least one round"):
        make()


def test_no_subjects_is_refused() -> None:
    with pytest.raises(UsageError, match="no subjects"):
        measure({}, Rule())


def test_one_sample_is_never_called_narrow() -> None:
    assert reading_flags([1.0]) == ("wide-interval",)
    assert reading_flags([1.0] * 6) == ()
