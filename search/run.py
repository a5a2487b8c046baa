"""One search from settings to front: propose, predict, measure, store, choose. Resumable at any point.

What a shape costs comes from ``measure``, which the caller hands in; nothing here knows how it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepthin.engine.accounting import count_params
from deepthin.engine.errors import DeepthinError
from deepthin.engine.known_shapes import nearest_known
from deepthin.engine.shape import Shape
from deepthin.search.config import SearchConfig
from deepthin.search.cost import Cost, CostOf
from deepthin.search.design import initial_design, random_generator
from deepthin.search.folder import RunFolder
from deepthin.search.front import comparison, feasible, front_document
from deepthin.search.objectives import Scored
from deepthin.search.picks import choose
from deepthin.search.space import Candidate, Space
from deepthin.search.study import Proposal, SearchStudy

__all__ = ["SearchConfig", "run_search"]

Progress = Callable[[str, int | None, int | None], None]

_SAMPLER_ATTEMPTS = 8  # proposals of known candidates before random points are tried
_RANDOM_ATTEMPTS = 1000  # random points before the space counts as used up


def run_search(config: SearchConfig, *, measure: CostOf, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Run, resume or repeat a search in the folder ``out`` and return the document of its ``front.json``.

    No shape is measured twice. A run killed at any point and started again proposes, measures and writes what it would have
    without the interruption, given the same measurements.

    Args:
        config: the settings; a folder holds one search.
        measure: what a shape costs whose body is stored in a format, measured or predicted; a :class:`DeepthinError` from it
            fails that shape only.
        out: the run folder.
        progress: called as ``progress(message, done, total)``.

    Raises:
        InfeasibleError: no shape meets the budget, or no measured one the limits.
        UsageError: ``out`` holds another search or something else.
        DeepthinError: the folder cannot be used, or not one shape could be measured.
    """
    space = config.space
    space.require_feasible()
    say = progress or _silent
    with RunFolder(out, config) as folder:
        run = _Run(config, space, folder, measure)
        run.advance(say)
        document = run.document(say)
        folder.write_front(document)
        return document


class _Run:
    """The state of one call: what was proposed so far, and the way to measurements."""

    def __init__(self, config: SearchConfig, space: Space, folder: RunFolder, measure: CostOf) -> None:
        self._config = config
        self._space = space
        self._quality = config.quality
        self._folder = folder
        self._measure = measure
        self._study = SearchStudy(folder.journal, space.dimensions, config.seed, constrained=bool(config.limits.names))
        self._scored: list[Scored] = []
        self._failures: list[dict[str, str]] = []
        self._keys: set[str] = set()
        for blob in self._study.steps:
            self._record(blob["step"], Candidate(Shape.parse(blob["shape"]), blob["quant"]))

    def advance(self, say: Progress) -> None:
        """Take steps until there are as many as asked for, or every candidate has been seen."""
        total = self._config.trials
        if len(self._keys) >= total:
            return
        design = initial_design(self._space, self._quality, self._config.seed)
        say("searching", len(self._keys), total)
        for step in range(len(self._keys), total):
            proposed = self._propose(step, design[step] if step < len(design) else None)
            if proposed is None:
                return
            proposal, candidate = proposed
            facts = {"shape": candidate.shape.text, "quant": candidate.quant}
            scored = self._record(step, candidate)
            if scored is None:
                self._study.fail(proposal, step, facts)
            else:
                self._study.tell(proposal, step, facts, (scored.loss, scored.time), self._config.limits.violations(scored))
            say(_told(candidate, scored), step + 1, total)

    def document(self, say: Progress) -> dict[str, Any]:
        """The front and its picks, each beside the nearest public shape."""
        if not self._scored:
            first = self._failures[0]
            name = f"{first['shape']}, {first['quant']}"
            raise DeepthinError(
                f"not one of {len(self._failures)} shapes could be measured; the first ({name}): {first['why']}"
            )
        picks = choose(feasible(self._config, self._scored))
        comparisons = {name: self._compared(pick, say) for name, pick in picks.items()}
        return front_document(self._config, self._scored, self._failures, comparisons)

    def _propose(self, step: int, point: Mapping[str, int] | None) -> tuple[Proposal, Candidate] | None:
        """An open proposal whose candidate was not seen in this run, or None when there is none left."""
        attempt = self._study.attempts(step)
        if point is not None and attempt == 0:
            proposal = self._study.propose(step, attempt, point)
        elif attempt < _SAMPLER_ATTEMPTS:
            proposal = self._study.propose(step, attempt)
        else:
            unseen = self._unseen_point(step)
            if unseen is None:
                return None
            proposal = self._study.propose(step, attempt, unseen)
        candidate = self._space.decode(proposal.point)
        if candidate.key not in self._keys:
            return proposal, candidate
        self._study.reject(proposal, step, {"shape": candidate.shape.text, "quant": candidate.quant})
        return self._propose(step, point)

    def _unseen_point(self, step: int) -> dict[str, int] | None:
        generator = random_generator(self._config.seed, step)
        for _ in range(_RANDOM_ATTEMPTS):
            point = self._space.sample(generator)
            if self._space.decode(point).key not in self._keys:
                return point
        return None

    def _record(self, step: int, candidate: Candidate) -> Scored | None:
        """Measure ``candidate`` unless that was done, and remember it as step ``step``; None if it cannot be measured."""
        self._keys.add(candidate.key)
        cost = self._cost(candidate)
        if isinstance(cost, str):
            self._failures.append({"shape": candidate.shape.text, "quant": candidate.quant, "why": cost})
            return None
        scored = Scored(step, candidate, self._quality.predict(candidate.shape, candidate.quant), cost)
        self._scored.append(scored)
        return scored

    def _cost(self, candidate: Candidate) -> Cost | str:
        """The measurement of ``candidate``, stored or new, or why there is none."""
        stored = self._folder.measured(candidate.key) or self._folder.failed(candidate.key)
        if stored is not None:
            return stored
        try:
            cost = Cost.of(self._measure(candidate.shape, candidate.quant))
        except DeepthinError as error:
            self._folder.store_failed(candidate.key, str(error))
            return str(error)
        return self._folder.store_measured(candidate.key, cost)

    def _compared(self, pick: Scored, say: Progress) -> dict[str, Any]:
        shape = pick.candidate.shape
        known = nearest_known(count_params(shape).total)
        candidate = Candidate(known.shape.replace(max_seq_len=shape.max_seq_len), pick.candidate.quant)
        say(f"comparing with {known.name} {candidate.quant}", None, None)
        cost = self._cost(candidate)
        if isinstance(cost, str):
            return {"name": known.name, "quant": candidate.quant, "why_not": cost}
        quality = self._quality.predict(candidate.shape, candidate.quant)
        return comparison(pick, Scored(-1, candidate, quality, cost), known.name)


def _told(candidate: Candidate, scored: Scored | None) -> str:
    shape = candidate.shape
    name = f"L={shape.num_layers} d={shape.hidden_size} V={shape.vocab_size} {candidate.quant}"
    return f"{name}: not measurable" if scored is None else f"{name}: loss {scored.loss:.3f}, {scored.time:.1f} ms per 1k chars"


def _silent(message: str, done: int | None, total: int | None) -> None:
    return None
