"""The choice of a number of threads: from made-up times, through the store, and by a real decoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deepthin.engine import decoder as decoder_module
from deepthin.engine.cores import Cores
from deepthin.engine.decoder import Decoder
from deepthin.engine.model import random_model
from deepthin.engine.shape import Shape
from deepthin.engine.threads import EXPIRY_S, ROUNDS, Step, ThreadChoice, candidates, measure, remember, remembered

SMALL = Shape.parse("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied")
KEY = ["cpu", 4, None, "L=2"]


class Machine:
    """Tokens of given seconds by number of threads; the clock moves by them."""

    def __init__(self, seconds: dict[int, float], trouble: dict[int, Step] | None = None) -> None:
        self.seconds, self.trouble = seconds, trouble or {}
        self.now = 0.0
        self.calls: list[int] = []

    def step(self, count: int) -> Step:
        step = self.trouble.get(len(self.calls), Step(self.seconds[count]))
        self.calls.append(count)
        self.now += step.seconds
        return step

    def choose(self) -> ThreadChoice:
        return measure(self.step, sorted(self.seconds), lambda: self.now)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (7, [1, 2, 3, 4, 6, 7]), (16, [1, 2, 3, 4, 6, 8, 12, 16])],
)
def test_candidates_end_with_the_most(most: int, expected: list[int]) -> None:
    assert candidates(most) == expected


def test_the_fastest_is_chosen_and_the_fewest_of_a_tie() -> None:
    assert Machine({1: 5e-3, 2: 3e-3, 4: 2e-3, 8: 4e-3}).choose().threads == 4
    assert Machine({1: 5e-3, 2: 2.05e-3, 4: 2e-3}).choose().threads == 2
    found = Machine({1: 5.1e-3, 2: 3.4e-3}).choose()
    assert (found.basis, found.disturbed) == ("measured", False)
    assert found.text == "2 threads (measured: 1: 5.1 ms, 2: 3.4 ms)"
    assert found.to_json()["ms_per_token"] == pytest.approx({"1": 5.1, "2": 3.4})


def test_short_tokens_are_run_twice_in_turns_and_long_ones_only_until_the_budget() -> None:
    short = Machine({1: 2e-3, 2: 1e-3})
    short.choose()
    assert short.calls == [1, 1, 2, 2] * ROUNDS
    long = Machine({1: 0.2, 2: 0.1})
    assert long.choose().threads == 2
    assert long.calls == [1, 2] * 2


def test_a_slow_first_token_only_wakes_the_threads() -> None:
    machine = Machine({1: 3e-3, 2: 2e-3}, {2: Step(9e-3)})
    found = machine.choose()
    assert (found.threads, found.disturbed) == (2, False)


@pytest.mark.parametrize("trouble", [{3: Step(3e-3, lost=True)}, {i: Step(4e-3) for i in (3, 7, 11, 15)}])
def test_other_work_is_noticed_and_does_not_decide(trouble: dict[int, Step]) -> None:
    found = Machine({1: 2e-3, 2: 3e-3}, trouble).choose()
    assert (found.threads, found.disturbed) == (2, True)
    assert "measured beside other work" in found.text


def test_a_choice_comes_back_by_its_key(tmp_path: Path) -> None:
    choice = ThreadChoice(2, "measured", {1: 5e-3, 2: 3e-3})
    remember(tmp_path, KEY, choice, now=1000.0)
    found = remembered(tmp_path, KEY, 4, now=1000.0 + EXPIRY_S)
    assert found == ThreadChoice(2, "stored", {1: 5e-3, 2: 3e-3})
    assert found.text == "2 threads (measured before: 1: 5.0 ms, 2: 3.0 ms)"
    assert remembered(tmp_path, [*KEY, "other"], 4, now=1000.0) is None
    assert remembered(tmp_path, KEY, 1, now=1000.0) is None, "the machine has fewer cores now"
    assert remembered(tmp_path, KEY, 4, now=1001.0 + EXPIRY_S) is None
    assert remembered(tmp_path, KEY, 4, now=999.0) is None, "from the future"
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "deepthin/threads/1", "stored_unix_s": 1, "threads": 2, "seconds": []}']
)
def test_an_unreadable_entry_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    remember(tmp_path, KEY, ThreadChoice(2, "measured", {2: 1.0}), now=1.0)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert remembered(tmp_path, KEY, 4, now=1.0) is None


def test_old_entries_go_when_a_new_one_comes(tmp_path: Path) -> None:
    choice = ThreadChoice(1, "measured", {1: 1.0})
    remember(tmp_path, KEY, choice)
    (old,) = tmp_path.iterdir()
    now = old.stat().st_mtime + EXPIRY_S + 5
    remember(tmp_path, ["new"], choice, now=now)
    assert not old.exists() and remembered(tmp_path, ["new"], 1, now=now)


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    remember(blocked, KEY, ThreadChoice(1, "measured", {1: 1.0}))
    assert remembered(blocked, KEY, 4) is None


@pytest.fixture
def four_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of four cores, whatever this is, and a store of its own."""
    monkeypatch.setattr(decoder_module, "user_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(decoder_module, "usable_cores", lambda: Cores((0, 1, 2, 3), 4))
    return tmp_path


def test_a_decoder_measures_once_and_remembers(four_cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(step: object, counts: list[int]) -> ThreadChoice:
        return ThreadChoice(3, "measured", dict.fromkeys(counts, 1.0))

    model = random_model(SMALL)
    monkeypatch.setattr(decoder_module, "measure", pretend)
    with Decoder(model, context=16) as first, Decoder(model, context=16) as second, Decoder(model, threads=2) as given:
        assert (first.threads, first.thread_choice.basis) == (3, "measured")
        assert (second.threads, second.thread_choice.basis) == (3, "stored")
        assert (given.threads, given.thread_choice) == (2, ThreadChoice(2, "given"))
        np.testing.assert_array_equal(first.prefill([1, 2, 3]), given.prefill([1, 2, 3]))
    (entry,) = (four_cores / "threads").iterdir()
    assert json.loads(entry.read_text())["threads"] == 3
    with Decoder(random_model(SMALL, quant="q8_0"), context=16) as other:
        assert other.thread_choice.basis == "measured", "other products"


def test_a_disturbed_measurement_is_not_remembered(four_cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "measure", lambda step, counts: ThreadChoice(2, "measured", {2: 1.0}, disturbed=True))
    with Decoder(random_model(SMALL), context=16) as decoder:
        assert decoder.threads == 2
    assert not (four_cores / "threads").exists()


def test_real_tokens_are_measured(four_cores: Path) -> None:
    with Decoder(random_model(SMALL), context=16) as decoder:
        assert set(decoder.thread_choice.seconds) == {1, 2, 3, 4}
        assert min(decoder.thread_choice.seconds.values()) > 0
        assert decoder.position == 0


def test_one_core_needs_no_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decoder_module, "usable_cores", lambda: Cores((0,), 1))
    with Decoder(random_model(SMALL), context=16) as decoder:
        assert (decoder.threads, decoder.thread_choice.text) == (1, "1 thread")
