from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from sqlalchemy import Engine, event

from deepthin.engine.errors import DeepthinError, UsageError
from deepthin.engine.shape import Shape
from deepthin.profiles.schema import TokenCost
from deepthin.search.config import SearchConfig
from deepthin.search.cost import Cost, MeasuringStoppedError
from deepthin.search.fleet.database import Database
from deepthin.search.fleet.trials import SharedTrials, study_name_of
from deepthin.search.fleet.url import parse_storage
from deepthin.search.run import run_search
from tests.support.fake_costs import FakeMeasure
from tests.support.postgres import Server
from tests.support.stored_trials import stored_trials

SETTINGS = {"params": 1}


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    found = Database(parse_storage(url))
    yield found
    found.close()


def trial(number: int) -> optuna.trial.FrozenTrial:
    return create_trial(values=[float(number), 1.0], user_attrs={"deepthin": {"step": number}})


def test_each_number_is_written_once_whoever_comes_first(database: Database) -> None:
    with SharedTrials(database, "s", SETTINGS) as one, SharedTrials(database, "s", SETTINGS) as other:
        for number in range(3):
            for log in (one, other):
                log.append(number, trial(number))
        assert [found.values for found in other.load()] == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert len(stored_trials(database.url.text, "s")) == 3


def test_writing_at_the_same_moment_writes_once(url: str) -> None:
    parties, start = 4, threading.Barrier(4)
    problems: list[BaseException] = []

    def write() -> None:
        try:
            connection = Database(parse_storage(url))
            start.wait()
            with SharedTrials(connection, "s", SETTINGS) as log:  # four make the tables and the study at once
                for number in range(5):
                    log.append(number, trial(number))
            connection.close()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=write) for _ in range(parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert problems == []
    found = stored_trials(parse_storage(url).text, "s")
    assert [one.values[0] for one in found] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {one.state for one in found} == {TrialState.COMPLETE}


def test_a_process_that_went_another_way_is_told_to_start_again(database: Database) -> None:
    with SharedTrials(database, "s", SETTINGS) as one, SharedTrials(database, "s", SETTINGS) as other:
        one.append(0, trial(0))
        with pytest.raises(DeepthinError, match="another shape; start this command again to go on from what is stored"):
            other.append(0, trial(5))
        with pytest.raises(DeepthinError, match="1 trials are stored, but 2 were; somebody removed some"):
            other.append(2, trial(2))


def test_a_study_belongs_to_one_search(database: Database) -> None:
    SharedTrials(database, "s", SETTINGS).close()
    with pytest.raises(
        UsageError, match=r"study s of .* holds a search with other settings \(params\); choose another --study"
    ):
        SharedTrials(database, "s", {"params": 2})
    assert study_name_of({"a": 1, "b": 2}) == study_name_of({"b": 2, "a": 1}) != study_name_of({"a": 1, "b": 3})


@pytest.mark.fleet
def test_a_connection_lost_before_any_statement_of_a_write_costs_nothing(
    server: Server, postgres_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The connection is cut before the n-th statement, for every n there is: Optuna's own and ours."""
    cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{postgres_url.rsplit('/', 1)[1]}'"
    seen, victim = 0, -1

    def before(*_: object) -> None:
        nonlocal seen
        if seen == victim:
            server.sql(cut, database="postgres")
        seen += 1

    database = Database(parse_storage(postgres_url))
    event.listen(Engine, "before_cursor_execute", before)
    try:
        with SharedTrials(database, "s", SETTINGS) as log:
            log.append(0, trial(0))
            written = 1
            while seen > victim:  # the last write ended before its statement came, so every statement has had its turn
                seen, victim = 0, victim + 1
                log.append(written, trial(written))
                written += 1
            victim = -1
            assert [found.values[0] for found in log.load()] == [float(number) for number in range(written)]
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        database.close()
    assert written > 20  # or the listener heard nothing
    assert len(stored_trials(parse_storage(postgres_url).text, "s")) == written
    assert capfd.readouterr().err == ""


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_the_front_is_the_same_bytes_as_with_a_journal_and_after_every_restart(
    database: Database, tmp_path: Path, sampler: str
) -> None:
    config = SearchConfig(params=2_000_000, vocabs=(4096,), trials=18, sampler=sampler)
    run_search(config, measure=FakeMeasure(), out=tmp_path / "journal")
    for trials in (3, 17):  # the study of an earlier call that ended after so many

        def stopping(message: str, done: int | None, total: int | None, trials: int = trials) -> None:
            if done == trials:
                raise StoppedError

        with SharedTrials(database, "s", {}) as log:
            with pytest.raises(StoppedError):
                run_search(config, measure=FakeMeasure(), out=tmp_path / f"part{trials}", progress=stopping, log=log)
            assert sum(one.state is TrialState.COMPLETE for one in log.load()) == trials
    with SharedTrials(database, "s", {}) as log:
        run_search(config, measure=FakeMeasure(), out=tmp_path / "shared", log=log)
    assert (tmp_path / "shared" / "front.json").read_bytes() == (tmp_path / "journal" / "front.json").read_bytes()
    assert not (tmp_path / "shared" / "journal.log").exists()
    assert '"study"' in (tmp_path / "shared" / "storage.json").read_text()


def test_losing_the_fleet_ends_the_run_but_fails_no_shape(tmp_path: Path) -> None:
    config = SearchConfig(params=2_000_000, vocabs=(4096,), trials=3, sampler="random")
    measure, calls = FakeMeasure(), 0

    def losing(shape: Shape, quant: str) -> TokenCost | Cost:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MeasuringStoppedError("the database is gone")
        return measure(shape, quant)

    with pytest.raises(MeasuringStoppedError, match="the database is gone"):
        run_search(config, measure=losing, out=tmp_path / "run")
    document = run_search(config, measure=measure, out=tmp_path / "run")
    assert document["failures"] == []
    assert document["measurements"] == 3
