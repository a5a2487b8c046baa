from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from deepthin.search.space import Dimension
from deepthin.search.study import SearchStudy

DIMENSIONS = (Dimension("layers", 3, 80, log=True), Dimension("vocab", 0, 7), Dimension("quant", 0, 0))


def journal_trials(path: Path) -> list[FrozenTrial]:
    """What another program with Optuna reads from the journal."""
    return optuna.load_study(study_name="deepthin", storage=JournalStorage(JournalFileBackend(str(path)))).get_trials()


def advance(study: SearchStudy, steps: int) -> list[dict[str, int]]:
    """Take steps whose objectives follow from the point; returns the points."""
    points = []
    for step in range(len(study.steps), steps):
        proposal = study.propose(step, 0)
        layers, vocab = proposal.point["layers"], proposal.point["vocab"]
        study.tell(proposal, step, {"name": str(proposal.point)}, (abs(layers - 20) + vocab, layers + 1.0), {})
        points.append(proposal.point)
    return points


def test_points_are_whole_numbers_inside_their_dimensions(tmp_path: Path) -> None:
    for point in advance(SearchStudy(tmp_path / "journal", DIMENSIONS, 0), 25):
        assert set(point) == {"layers", "vocab", "quant"}
        assert 3 <= point["layers"] <= 80
        assert 0 <= point["vocab"] <= 7
        assert point["quant"] == 0


def test_reopening_after_every_step_changes_no_proposal(tmp_path: Path) -> None:
    whole = advance(SearchStudy(tmp_path / "whole", DIMENSIONS, 5), 16)
    pieces = []
    for steps in range(1, 17):
        pieces += advance(SearchStudy(tmp_path / "pieces", DIMENSIONS, 5), steps)
    assert pieces == whole
    assert len({tuple(point.values()) for point in whole}) > 8


def test_seed_step_and_attempt_each_change_the_proposal(tmp_path: Path) -> None:
    def proposed(name: str, seed: int, step: int, attempt: int) -> dict[str, int]:
        return SearchStudy(tmp_path / name, DIMENSIONS, seed).propose(step, attempt).point

    base = proposed("a", 0, 0, 0)
    assert proposed("b", 0, 0, 0) == base
    assert base not in [proposed("c", 1, 0, 0), proposed("d", 0, 1, 0), proposed("e", 0, 0, 1)]


def test_open_trial_of_a_killed_process_is_closed_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    advance(SearchStudy(path, DIMENSIONS, 0), 3)
    SearchStudy(path, DIMENSIONS, 0).propose(3, 0)
    assert [trial.state for trial in journal_trials(path)][-1] is TrialState.RUNNING
    study = SearchStudy(path, DIMENSIONS, 0)
    assert [trial.state for trial in journal_trials(path)][-1] is TrialState.FAIL
    assert len(study.steps) == 3


def test_rejected_proposals_are_attempts_of_their_step_and_failures_are_steps(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    study = SearchStudy(path, DIMENSIONS, 0)
    advance(study, 2)
    study.reject(study.propose(2, 0), 2, {"name": "seen"})
    study.reject(study.propose(2, 1), 2, {"name": "seen"})
    assert study.attempts(2) == 2
    assert study.attempts(1) == 0
    study.fail(study.propose(2, 2), 2, {"name": "broken"})
    reopened = SearchStudy(path, DIMENSIONS, 0)
    assert [(blob["step"], blob["kind"]) for blob in reopened.steps] == [(0, "measured"), (1, "measured"), (2, "failed")]
    assert reopened.attempts(2) == 2


def test_prescribed_points_are_proposed_as_given(tmp_path: Path) -> None:
    study = SearchStudy(tmp_path / "journal", DIMENSIONS, 0)
    point = {"layers": 41, "vocab": 6, "quant": 0}
    assert study.propose(0, 0, point).point == point


def test_each_trial_has_one_attribute_and_its_violations_as_constraints(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    study = SearchStudy(path, DIMENSIONS, 0, constrained=True)
    study.tell(study.propose(0, 0), 0, {"name": "x"}, (3.0, 900.0), {"ms_per_token": 0.25})
    (trial,) = journal_trials(path)
    assert trial.values == [3.0, 900.0]
    assert trial.user_attrs == {"deepthin": {"step": 0, "kind": "measured", "violations": {"ms_per_token": 0.25}, "name": "x"}}
    native = hasattr(optuna.trial.Trial, "set_constraint")  # Optuna 5; 4 keeps a list without names
    assert trial.constraints == {"ms_per_token": 0.25} if native else trial.system_attrs["constraints"] == [0.25]
