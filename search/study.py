"""The door to Optuna: which point to try next, and a journal that survives being killed. No other module imports it.

Deterministic by construction. Every proposal draws from a generator seeded by (seed, step, attempt) and sees only finished
steps, so a run resumed after a kill proposes what an uninterrupted one does. A step is one measured (or failed) candidate;
proposals of candidates already seen are closed as attempts of the same step and do not count.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from deepthin.search.sampler import NSGA2, RANDOM, TPE
from deepthin.search.space import Dimension

_BLOB = "deepthin"  # the one user attribute of a trial; many small ones make storages slow
_NAME = "deepthin"
_STARTUP_TRIALS = 10
_POPULATION = 32
_MEASURED, _FAILED, _SEEN = "measured", "failed", "seen"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A point to try, with the open trial behind it."""

    point: dict[str, int]
    trial: Trial


class TrialLog(Protocol):
    """Finished trials kept elsewhere, by several processes that all propose the same; ``search/fleet/trials.py`` has one."""

    @property
    def description(self) -> Mapping[str, str]:
        """Where they are, without credentials."""
        ...

    def load(self) -> Sequence[FrozenTrial]:
        """All of them, in order."""
        ...

    def append(self, number: int, trial: FrozenTrial) -> None:
        """Keep ``trial`` under ``number`` unless it is there."""
        ...


class SearchStudy:
    """The steps of one run, in a journal file that only this process has open (the run folder's lock sees to that).

    Args:
        path: the journal; created if absent. Trials that a killed process left open are closed as failed. None keeps the
            study in memory.
        log: keeps the finished trials instead of the journal; open ones stay in memory.
        dimensions: the space's free numbers.
        seed: start of every random choice.
        constrained: whether steps come with violations of soft limits.
        sampler: ``tpe``, ``nsga2`` or ``random``: Optuna's sampler behind :meth:`propose`.
    """

    def __init__(
        self,
        path: Path | None,
        dimensions: Sequence[Dimension],
        seed: int,
        *,
        constrained: bool = False,
        sampler: str = TPE,
        log: TrialLog | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage: BaseStorage = InMemoryStorage()
        self._log = log
        if path is not None and log is None:
            storage = JournalStorage(JournalFileBackend(str(path), lock_obj=cast(Any, _HeldElsewhere())))
        self._kind = sampler
        self._study = optuna.create_study(
            storage=storage, study_name=_NAME, directions=["minimize", "minimize"], load_if_exists=True
        )
        self._distributions: dict[str, BaseDistribution] = {
            dimension.name: IntDistribution(dimension.low, dimension.high, log=dimension.log) for dimension in dimensions
        }
        self._seed = seed
        self._constraints_by_function = constrained and not hasattr(Trial, "set_constraint")  # Optuna 4
        if log is not None:
            self._study.add_trials(log.load())
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What was told about each finished step, in order."""
        return [blob for blob, state in self._blobs() if blob["kind"] == _FAILED or state is TrialState.COMPLETE]

    def attempts(self, step: int) -> int:
        """How many proposals of ``step`` turned out to be seen already."""
        return sum(blob["step"] == step and blob["kind"] == _SEEN for blob, _ in self._blobs())

    def propose(self, step: int, attempt: int, point: Mapping[str, int] | None = None) -> Proposal:
        """The next point by Optuna's sampler, or ``point`` if given."""
        self._study.sampler = self._sampler(step, attempt) if point is None else _Prescribed(point)
        trial = self._study.ask(fixed_distributions=self._distributions)
        return Proposal({name: int(value) for name, value in trial.params.items()}, trial)

    def tell(
        self, proposal: Proposal, step: int, facts: Mapping[str, Any], values: Sequence[float], violations: Mapping[str, float]
    ) -> None:
        """Finish a step with its two objectives, both to be minimised, and the relative excess over each soft limit."""
        self._describe(proposal, {"step": step, "kind": _MEASURED, "violations": dict(violations), **facts})
        if self._constraints_by_function:
            self._study.sampler = self._sampler(step, 0)  # it stores them when the trial ends
        else:
            for name, violation in violations.items():
                proposal.trial.set_constraint(name, violation)
        self._study.tell(proposal.trial, list(values))
        self._keep(proposal)

    def fail(self, proposal: Proposal, step: int, facts: Mapping[str, Any]) -> None:
        """Finish a step whose candidate could not be measured."""
        self._describe(proposal, {"step": step, "kind": _FAILED, **facts})
        self._study.tell(proposal.trial, state=TrialState.FAIL)
        self._keep(proposal)

    def reject(self, proposal: Proposal, step: int, facts: Mapping[str, Any]) -> None:
        """Close a proposal of a candidate seen before; the step stays open."""
        self._describe(proposal, {"step": step, "kind": _SEEN, "attempt": self.attempts(step), **facts})
        self._study.tell(proposal.trial, state=TrialState.FAIL)
        self._keep(proposal)

    def _keep(self, proposal: Proposal) -> None:
        if self._log is not None:
            number = proposal.trial.number
            self._log.append(number, self._study.get_trials(deepcopy=False)[number])

    def _describe(self, proposal: Proposal, blob: Mapping[str, Any]) -> None:
        proposal.trial.set_user_attr(_BLOB, dict(blob))

    def _blobs(self) -> list[tuple[dict[str, Any], TrialState]]:
        trials = self._study.get_trials(deepcopy=False)
        return [(trial.user_attrs[_BLOB], trial.state) for trial in trials if _BLOB in trial.user_attrs]

    def _sampler(self, step: int, attempt: int) -> optuna.samplers.BaseSampler:
        options: dict[str, Any] = {}
        if self._constraints_by_function:
            options["constraints_func"] = _stored_violations
        with warnings.catch_warnings():  # multivariate and constraints_func were experimental in Optuna 4
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            seed = _derived_seed(self._seed, step, attempt)
            if self._kind == RANDOM:
                return optuna.samplers.RandomSampler(seed=seed)
            if self._kind == NSGA2:
                return optuna.samplers.NSGAIISampler(seed=seed, population_size=_POPULATION, **options)
            return optuna.samplers.TPESampler(
                seed=seed,
                n_startup_trials=_STARTUP_TRIALS,
                multivariate=True,
                constant_liar=False,  # one proposal at a time
                **options,
            )


class _Prescribed(optuna.samplers.BaseSampler):
    """Gives the numbers it was made with."""

    def __init__(self, point: Mapping[str, int]) -> None:
        self._point = point

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._point[param_name]


class _HeldElsewhere:
    """A journal lock that does nothing: the run folder is locked, and a lock file left by a kill would stall half a minute."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


def _derived_seed(seed: int, step: int, attempt: int) -> int:
    return int(np.random.SeedSequence([seed, step, attempt]).generate_state(1)[0])


def _stored_violations(trial: FrozenTrial) -> list[float]:
    return list(trial.user_attrs[_BLOB]["violations"].values())
