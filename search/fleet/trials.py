"""The trials of a study in Optuna's RDB storage, shared by everybody who asks for it.

Trials are written once, finished. Proposing is deterministic, so two processes that extend one study propose the same
trial under the same number, and the first to finish writes it. Nobody's death leaves an open trial behind.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial
from sqlalchemy import Connection, insert, or_, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from deepthin.engine.errors import DeepthinError, UsageError
from deepthin.search.cost import MeasuringStoppedError
from deepthin.search.fleet.database import Database, database_time
from deepthin.search.fleet.tables import STUDIES, prepare

_SETTINGS = "deepthin"  # user attribute of the study
_LOCK_S = 10.0  # appending a trial takes milliseconds
_ATTEMPTS = 8


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
        prepare(database)
        self._study = self._opened(name)
        self._check(dict(settings))

    @property
    def description(self) -> dict[str, str]:
        """Where the study is, without credentials."""
        return {"storage": self._database.url.shown, "study": self.name}

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
        self._lock()
        try:
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
        finally:
            self._unlock()

    def _add(self, number: int, trial: FrozenTrial) -> None:
        def once() -> None:
            if len(self.load()) == number:  # tried again after a lost acknowledgement, the first try may have been stored
                self._study.add_trial(trial)

        self._call(once)

    def _opened(self, name: str) -> optuna.Study:
        url = self._database.url
        options = {"pool_pre_ping": True, "pool_size": 1, "connect_args": self._database.connect_args}

        def opened() -> optuna.Study:
            return optuna.create_study(
                storage=RDBStorage(url.text, engine_kwargs=options),
                study_name=name,
                directions=["minimize", "minimize"],
                load_if_exists=True,
            )

        for attempt in range(_ATTEMPTS):
            try:
                return self._call(opened)
            except MeasuringStoppedError:
                # Several processes start at once, and only one can make a table; Optuna leaves that to the caller.
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(0.1 * (attempt + 1))
        raise AssertionError

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

    def _lock(self) -> None:
        """Wait until nobody else appends. A lock rather than a row's: Optuna writes through connections of its own."""

        def work(connection: Connection) -> bool:
            now = database_time(connection)
            free = or_(STUDIES.c.holder.is_(None), STUDIES.c.holder == self._me, STUDIES.c.expires < now)
            row = update(STUDIES).where(STUDIES.c.name == self.name, free).values(holder=self._me, expires=now + _LOCK_S)
            if connection.execute(row).rowcount:
                return True
            if connection.execute(select(STUDIES.c.name).where(STUDIES.c.name == self.name)).first() is not None:
                return False
            try:
                with connection.begin_nested():
                    connection.execute(insert(STUDIES).values(name=self.name, holder=self._me, expires=now + _LOCK_S))
            except IntegrityError:
                return False
            return True

        while not self._database.run(work):
            time.sleep(0.02)

    def _unlock(self) -> None:
        mine = update(STUDIES).where(STUDIES.c.name == self.name, STUDIES.c.holder == self._me)
        self._database.run(lambda connection: connection.execute(mine.values(holder=None, expires=None)))


def _same(one: FrozenTrial, other: FrozenTrial) -> bool:
    """Whether two trials are one: the same point with the same outcome, written for the same step."""
    facts: Sequence[Any] = [(trial.state, trial.params, trial.user_attrs, trial.values) for trial in (one, other)]
    return bool(facts[0] == facts[1])
