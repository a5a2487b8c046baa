"""Shipped devices: every value is sourced, every profile predicts, and published speeds fall inside the stated intervals."""

import tomllib
from importlib.resources import files

import numpy as np
import pytest

from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.known_shapes import known_shape
from deepthin.profiles.device_facts import STATUSES, device_facts, device_names, parse_device
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload

GOOD = """
schema = "deepthin/device/1"
name = "x"
title = "X"
class = "phone"
[bandwidth]
value = 5e10
unit = "bytes/s"
kind = "peak"
status = "published"
source = "sheet"
date = "2026-01-31"
[cores]
value = 4
unit = "threads"
status = "published"
source = "sheet"
date = "2026-01-31"
"""


def test_there_are_at_least_twenty_phones_laptops_and_boards() -> None:
    kinds = [device_facts(name).kind for name in device_names()]
    assert len(kinds) >= 20
    assert {"phone", "laptop", "board"} <= set(kinds)


@pytest.mark.parametrize("name", device_names())
def test_every_value_has_unit_source_date_and_status(name: str) -> None:
    text = files("deepthin.profiles.devices").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    facts = device_facts(name)
    assert facts.name == document["name"] == name
    rows = [document["bandwidth"], document["cores"], *document.get("fact", []), *document.get("speed", [])]
    for row in rows:
        assert row["unit"]
        assert len(row["source"]) > 5
        assert row["status"] in STATUSES
        assert len(row["date"]) == 10


@pytest.mark.parametrize("name", device_names())
def test_every_device_predicts_plausible_speeds_with_wide_intervals(name: str) -> None:
    profile = device_facts(name).profile()
    (runtime,) = profile.runtimes
    for test, tokens in ((DECODE, 1), (PREFILL, 128)):
        found = profile.predict(runtime, None, Workload(known_shape("smollm2-135m").shape, "q4_0", test, tokens, 64))
        assert found.seconds.basis == "published"
        assert found.seconds.high / found.seconds.low > 2
    decode = profile.predict(runtime, None, Workload(known_shape("smollm2-135m").shape, "q4_0", context=64))
    assert 3 < 1 / decode.seconds.value < 2000


def test_published_speeds_fall_inside_the_intervals_mostly_and_the_median_is_within_a_factor_of_two() -> None:
    ratios, inside = [], []
    for name in device_names():
        facts = device_facts(name)
        for speed in facts.speeds:
            predicted = facts.profile(speed.threads).predict("llama.cpp", None, Workload(speed.shape, speed.quant, context=128))
            rate = predicted.seconds.rate(1.0, "tok/s")
            ratios.append(rate.value / float(speed.fact.value))
            inside.append(rate.low <= float(speed.fact.value) <= rate.high)
    assert len(ratios) >= 20
    assert 0.5 < np.median(ratios) < 2
    assert np.mean(inside) >= 0.8


def test_a_tiny_model_is_extrapolated_since_caches_are_not_known() -> None:
    profile = device_facts("pixel-9").profile()
    tiny = known_shape("smollm2-135m").shape.replace(num_layers=2, vocab_size=512)
    assert profile.predict("llama.cpp", None, Workload(tiny, "q4_0")).extrapolated


def test_a_profile_of_facts_survives_json() -> None:
    profile = device_facts("raspberry-pi-5").profile()
    assert type(profile).from_json(profile.to_json()).to_json() == profile.to_json()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="device 'nokia-3310' is unknown; known are"):
        device_facts("nokia-3310")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('source = "sheet"', 'source = ""', "source is ''"),
        ('unit = "threads"', "", "unit is None"),
        ('date = "2026-01-31"', 'date = "January"', "date 'January', but a day"),
        ('status = "published"', 'status = "sure"', "status 'sure', but one of"),
        ("value = 5e10", "value = 0", "memory_bandwidth is 0, but a number above 0"),
        ("value = 5e10", 'value = "fast"', "memory_bandwidth is 'fast'"),
        ("value = 5e10", "", "memory_bandwidth has value None"),
        ('kind = "peak"', 'kind = "great"', "bandwidth kind 'great' is unknown"),
        ('class = "phone"', 'class = "toaster"', "class 'toaster'"),
        ("[cores]", "[kores]", r"table \[cores\] is missing"),
        ("deepthin/device/1", "deepthin/device/9", "schema is 'deepthin/device/9'"),
        ("[bandwidth]", "[bandwidth", "is no TOML"),
    ],
)
def test_a_file_that_lacks_something_is_refused(old: str, new: str, says: str) -> None:
    assert parse_device(GOOD, "x.toml").bandwidth.value == 5e10
    with pytest.raises(FormatError, match=says):
        parse_device(GOOD.replace(old, new), "x.toml")
