"""The trials of a study in Optuna's RDB storage, shared by everybody who asks for it.

Trials are written once, finished. Proposing is deterministic, so two processes that extend one study propose the same
trial under the same number, and the first to finish writes it. Nobody's death leaves an open trial behind.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial
from sqlalchemy import Connection, insert, or_, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from deepthin.engine.errors import DeepthinError, UsageError
from deepthin.search.fleet.database import Database, database_time
from deepthin.search.fleet.tables import STUDIES, prepare

_SETTINGS = "deepthin"  # user attribute of the study
_APPENDING_S = 10.0  # that a lock lasts if its holder dies; appending a trial takes milliseconds
_MAKING_S = 60.0  # making Optuna's tables takes seconds
_ANY_STUDY = "*"  # no study is called so
_PAUSE_S = 0.02


def study_name_of(settings: Mapping[str, Any]) -> str:
    """The name of a search's study where none is given: the same for the same settings, wherever it is asked for."""
    return "deepthin-" + hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


class SharedTrials:
    """One study of a database.

    Args:
        database: where it is.
        name: of the study; made if absent.
        settings: of the search; a study belongs to one search.

    Raises:
        UsageError: the study holds another search.
        DeepthinError: another version of Optuna made the tables.
        MeasuringStoppedError: the database is away or refuses; so do all methods.
    """

    def __init__(self, database: Database, name: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        self._database = database
        self._me = uuid.uuid4().hex
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logging.getLogger("optuna.storages").setLevel(logging.ERROR)  # of an outage, the database tells in one line
        prepare(database)
        self._storage: RDBStorage | None = None
        try:
            self._study = self._opened(name)
            self._check(dict(settings))
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> dict[str, str]:
        """Where the study is, without credentials."""
        return {"storage": self._database.url.shown, "study": self.name}

    def close(self) -> None:
        """Drop Optuna's connections."""
        if self._storage is not None:
            self._storage.remove_session()
            self._storage.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self) -> list[FrozenTrial]:
        """All trials in order; each number once, even if two processes wrote one."""
        trials = self._call(lambda: self._study.get_trials(deepcopy=False))
        kept: list[FrozenTrial] = []
        for trial in trials:
            if trial.state.is_finished() and not (kept and _same(kept[-1], trial)):
                kept.append(trial)
        return kept

    def append(self, number: int, trial: FrozenTrial) -> None:
        """Write ``trial`` as the ``number``-th of the study, unless another process has done so.

        Raises:
            DeepthinError: that one is a different trial.
        """
        with self._locked(self.name, _APPENDING_S):
            stored = self.load()
            if len(stored) < number:
                raise DeepthinError(
                    f"study {self.name}: {len(stored)} trials are stored, but {number} were; somebody removed some, so start "
                    f"this command again"
                )
            if len(stored) == number:
                self._add(number, trial)
            elif not _same(stored[number], trial):
                raise DeepthinError(
                    f"study {self.name}: another process, perhaps with other versions of its packages, went on with another "
                    f"shape; start this command again to go on from what is stored"
                )

    def _add(self, number: int, trial: FrozenTrial) -> None:
        def once() -> None:
            if len(self.load()) == number:  # tried again after a lost acknowledgement, the first try may have been stored
                self._study.add_trial(trial)

        self._call(once)

    def _opened(self, name: str) -> optuna.Study:
        """The study; one process at a time, since Optuna's tables and studies can be made by one only."""
        url = self._database.url
        options = {"pool_pre_ping": True, "pool_size": 1, "connect_args": self._database.connect_args}

        def opened() -> optuna.Study:
            self._storage = RDBStorage(url.text, engine_kwargs=options)
            return optuna.create_study(
                storage=self._storage, study_name=name, directions=["minimize", "minimize"], load_if_exists=True
            )

        with self._locked(_ANY_STUDY, _MAKING_S):
            study: optuna.Study = self._call(opened)
        return study

    def _check(self, settings: dict[str, Any]) -> None:
        found = self._call(lambda: self._study.user_attrs.get(_SETTINGS))
        if found is None:
            self._call(lambda: self._study.set_user_attr(_SETTINGS, settings))
            return
        differing = sorted(key for key in {*found, *settings} if found.get(key) != settings.get(key))
        if differing:
            raise UsageError(
                f"study {self.name} of {self._database.url.shown} holds a search with other settings ({', '.join(differing)}); "
                f"choose another --study, or leave it out: each search then has its own"
            )

    def _call(self, call: Any) -> Any:
        """What Optuna answers; it wraps some errors of the database, which decide whether waiting helps."""

        def unwrapped() -> Any:
            try:
                return call()
            except optuna.exceptions.StorageInternalError as error:
                if isinstance(error.__cause__, SQLAlchemyError):
                    raise error.__cause__ from None
                raise
            except RuntimeError as error:
                raise DeepthinError(
                    f"database {self._database.url.shown}: {self._database.failure(error)}; use the same Optuna everywhere"
                ) from None

        return self._database.retried(unwrapped)

    @contextmanager
    def _locked(self, name: str, seconds: float) -> Iterator[None]:
        """Hold a lock that ends by itself. No lock of a row: Optuna writes through connections of its own."""

        def work(connection: Connection) -> bool:
            now = database_time(connection)
            ours = {"holder": self._me, "expires": now + seconds}
            free = or_(STUDIES.c.holder.is_(None), STUDIES.c.holder == self._me, STUDIES.c.expires < now)
            if connection.execute(update(STUDIES).where(STUDIES.c.name == name, free).values(**ours)).rowcount:
                return True
            if connection.execute(select(STUDIES.c.name).where(STUDIES.c.name == name)).first() is not None:
                return False
            try:
                with connection.begin_nested():
                    connection.execute(insert(STUDIES).values(name=name, **ours))
            except IntegrityError:  # another process was quicker
                return False
            return True

        while not self._database.run(work):
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            mine = update(STUDIES).where(STUDIES.c.name == name, STUDIES.c.holder == self._me)
            self._database.run(lambda connection: connection.execute(mine.values(holder=None, expires=None)))


def _same(one: FrozenTrial, other: FrozenTrial) -> bool:
    """Whether two trials are one: the same point with the same outcome, written for the same step."""
    facts: Sequence[Any] = [(trial.state, trial.params, trial.user_attrs, trial.values) for trial in (one, other)]
    return bool(facts[0] == facts[1])
