"""Measuring a profile: order, budget, what is flagged, what is left out; on a machine made of arithmetic."""

from dataclasses import replace
from typing import Any

import pytest

from deepthin.engine.errors import DeepthinError, UsageError
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload
from deepthin.profiles.machine import fingerprint
from deepthin.profiles.measuring import marked_by_placement, measure_profile, profile_flags
from deepthin.profiles.profile import Profile
from tests.support.fake_runtimes import FakeHost, small_plan
from tests.support.probed import CURVE, SMALL, TRUTH, Device, conditions

BOTH = ("deepthin", "llama.cpp")


def profiled(host: FakeHost, runtimes: tuple[str, ...] = BOTH, budget_s: float = 120.0, **settings: Any) -> Profile:
    bench = host.bench(runtimes, {name: small_plan() for name in runtimes}, **settings)
    return measure_profile(bench, budget_s=budget_s)


def test_a_quiet_machine_gives_a_clean_profile_that_predicts() -> None:
    host = FakeHost()
    profile = profiled(host)
    assert profile.flags == ()
    assert profile.runtimes == BOTH
    assert profile.threads_of("llama.cpp") == (1, 2)
    assert profile.versions == {"deepthin": "deepthin 1.0", "llama.cpp": "llama.cpp 1.0"}
    assert profile.fingerprint == fingerprint(profile.machine)
    assert host.open_count == 0
    work = Workload(SMALL, "q8_0", context=100)
    for runtime in BOTH:
        for threads in (1, 2):
            truth = Device(conditions(runtime, threads), TRUTH).seconds(work)
            assert profile.predict(runtime, threads, work).seconds.value == pytest.approx(truth, rel=0.1)
            assert profile.predict(runtime, threads, Workload(SMALL, "q8_0", PREFILL, 64)).seconds.value > 0


def test_it_keeps_to_its_budget() -> None:
    host = FakeHost()
    profile = profiled(host, budget_s=60.0)
    assert profile.wall_s == pytest.approx(host.now)
    assert host.now < 66


def test_models_that_time_does_not_allow_are_left_out_and_said_so() -> None:
    profile = profiled(FakeHost(), budget_s=10.0)
    assert any("timings were left out for lack of time" in note for note in profile.notes)
    assert {model.test for model in profile.models} == {DECODE, PREFILL}


def test_a_competing_process_flags_the_profile() -> None:
    profile = profiled(FakeHost(others=1.0))
    assert "other-processes" in profile.flags
    assert all("other-processes" in probe.flags for probe in profile.probes)


def test_the_noise_floor_is_measured_and_stated() -> None:
    quiet, noisy = profiled(FakeHost(noise=0.001)), profiled(FakeHost(noise=0.05))
    for profile in (quiet, noisy):
        assert profile.noise["aa"]["ci_low"] <= 1.0 <= profile.noise["aa"]["ci_high"]
    width = [p.noise["aa"]["ci_high"] - p.noise["aa"]["ci_low"] for p in (quiet, noisy)]
    assert width[0] < 0.005 < width[1]
    assert quiet.noise["repeat"]["median"] < noisy.noise["repeat"]["median"]


def test_what_differs_from_itself_or_moves_within_minutes_is_flagged() -> None:
    noise = {"aa": {"ci_low": 1.02, "ci_high": 1.05}, "repeat": {"median": 0.2, "max": 0.3, "n": 6}}
    assert profile_flags([], noise) == ("unequal-to-itself", "does-not-repeat")
    calm = {"aa": {"ci_low": 0.99, "ci_high": 1.01}, "repeat": {"median": 0.02, "max": 0.3, "n": 6}}
    assert profile_flags([], calm) == ()
    assert profile_flags([], {}) == ()


NEAR, FAR = 7.5e-8, 2.8e-7  # seconds of a barrier in the two placements of a Zen 5 guest


def test_while_the_cores_are_elsewhere_one_thread_is_timed() -> None:
    host = FakeHost(moves=lambda now: FAR if 12.0 < now < 60.0 else NEAR)
    profile = profiled(host)
    several = [probe for probe in profile.probes if probe.threads == 2 and probe.runtime == "deepthin"]
    assert len(several) == len([probe for probe in profile.probes if probe.threads == 1 and probe.runtime == "deepthin"])
    order = [threads for runtime, _, threads in host.opened if runtime == "deepthin"]
    assert order != [1, 2] * (len(order) // 2)
    assert sum(probe.barrier_s == NEAR for probe in several) > len(several) / 2
    assert {probe.barrier_s for probe in profile.probes if probe.threads == 1} == {None}


def test_the_placement_of_most_probes_is_the_profile_s_and_the_others_are_flagged() -> None:
    bench = FakeHost().bench(("deepthin",), {"deepthin": small_plan()})
    clean = measure_profile(bench, budget_s=120).probes
    moved = [replace(p, barrier_s=FAR if i % 3 == 0 else NEAR, flags=("moved-cores", "drift")) for i, p in enumerate(clean)]
    marked, placements = marked_by_placement(moved)
    assert set(placements.values()) == {NEAR}
    for probe in marked:
        assert probe.flags == (("drift", "moved-cores") if probe.barrier_s == FAR else ("drift",))


def test_bandwidth_read_in_another_placement_is_left_out() -> None:
    """Until the first probe, while the memory is read, the cores are far apart and fast, then near and slow."""
    host = FakeHost()
    host.moves = lambda _: FAR if len(host.opened) <= 1 else NEAR
    host.rate_factor = lambda: 3.0 if len(host.opened) <= 1 else 1.0
    profile = profiled(host, ("deepthin",))
    assert profile.noise["placements"] == [{"runtime": "deepthin", "threads": 2, "barrier_s": NEAR}]
    assert profile.curve.rate(2, 256 << 20) == pytest.approx(CURVE.rate(2, 256 << 20))
    assert {row["barrier_s"] for row in profile.bandwidth_samples if row["threads"] == 2} == {NEAR, FAR}


def test_sustained_speed_is_kept_with_the_profile() -> None:
    profile = profiled(FakeHost())
    assert profile.sustained is not None
    assert not profile.sustained["throttles"]
    assert profile.sustained["wall_s"] >= 0.08 * 120.0
    assert profiled(FakeHost(), ("llama.cpp",)).sustained is None


def test_a_runtime_that_is_not_installed_is_noted() -> None:
    profile = profiled(FakeHost(missing=("llama.cpp",)))
    assert profile.runtimes == ("deepthin",)
    assert "llama.cpp: skipped, llama.cpp is not installed" in profile.notes


def test_a_model_that_a_runtime_refuses_is_noted_and_the_others_count() -> None:
    profile = profiled(FakeHost(refuses=("q4_0",)), ("llama.cpp",))
    assert any("refused by this test: q4_0" in note for note in profile.notes)
    assert {probe.work.quant for probe in profile.probes} == {"q8_0"}


def test_without_any_runtime_nothing_is_pretended() -> None:
    with pytest.raises(DeepthinError, match=r"no runtime could be timed; llama\.cpp: skipped"):
        profiled(FakeHost(missing=("llama.cpp",)), ("llama.cpp",))


@pytest.mark.parametrize(("threads", "budget_s"), [((), 60.0), ((0,), 60.0), ((1,), 1.0)])
def test_impossible_requests_are_refused(threads: tuple[int, ...], budget_s: float) -> None:
    with pytest.raises(UsageError, match="measuring a profile"):
        profiled(FakeHost(), budget_s=budget_s, threads=threads)


def test_progress_counts_the_models_of_each_runtime() -> None:
    host = FakeHost()
    bench = host.bench(("llama.cpp",), {"llama.cpp": small_plan()})
    said: list[tuple[str, int | None, int | None]] = []
    measure_profile(bench, budget_s=120, progress=lambda message, done, total: said.append((message, done, total)))
    assert [done for message, done, total in said if total == 16] == list(range(1, 17))
    assert said[0][0].startswith("noise floor")
