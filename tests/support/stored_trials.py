"""What another program with Optuna reads from a database."""

from __future__ import annotations

import optuna
from optuna.storages import RDBStorage


def stored_trials(url: str, study: str) -> list[optuna.trial.FrozenTrial]:
    """All trials of a study; ``url`` with its driver."""
    storage = RDBStorage(url)
    try:
        return optuna.load_study(study_name=study, storage=storage).get_trials()
    finally:
        storage.remove_session()
        storage.engine.dispose()
