"""One search from settings to front: propose, predict, measure, store, choose. Resumable at any point.

What a shape costs comes from ``measure``, which the caller hands in; nothing here knows how it is done.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepthin.engine.accounting import count_params
from deepthin.engine.errors import DeepthinError
from deepthin.engine.known_shapes import known_shape, nearest_known
from deepthin.engine.shape import Shape
from deepthin.search.config import SearchConfig
from deepthin.search.cost import Cost, CostOf, MeasuringStoppedError, RepeatedCostOf, Timing, pooled
from deepthin.search.design import initial_design, random_generator
from deepthin.search.file_sizes import FileSizes, with_file_sizes
from deepthin.search.folder import RunFolder
from deepthin.search.front import comparison, feasible, front_document
from deepthin.search.guide import Guide
from deepthin.search.least_cache import require_cache
from deepthin.search.membership import front_probabilities
from deepthin.search.objectives import Scored
from deepthin.search.picks import RECOMMENDED, choose
from deepthin.search.plateau import on_plateau
from deepthin.search.sampler import EXHAUSTIVE, GUIDED, NSGA2, RANDOM, TPE
from deepthin.search.space import Candidate, Space
from deepthin.search.study import Proposal, SearchStudy, TrialLog
from deepthin.search.warm_start import started

__all__ = ["SearchConfig", "run_search"]

Progress = Callable[[str, int | None, int | None], None]
Announce = Callable[[Sequence[tuple[Shape, str]], int], None]  # candidates; 0, or the number of the repeat

_SAMPLER_ATTEMPTS = {GUIDED: 2}  # proposals of known candidates before others are tried; TPE keeps to what it knows
_MOST_ATTEMPTS = 8
_RANDOM_ATTEMPTS = 1000  # random points before the space counts as used up
REPEATS = 3
OPEN = 0.05  # a chance of leading between this and its complement is open
_MOST_REPEATED = 8  # candidates per round, the most open first
_OPTUNA_EVERY = 8  # guided steps leave every eighth to Optuna's sampler, which believes in no time model
_LEAST_REPEATS = 8  # of one search, all candidates together; a larger one may take as many as a quarter of its trials


def run_search(
    config: SearchConfig,
    *,
    measure: CostOf,
    out: Path,
    progress: Progress | None = None,
    remeasure: RepeatedCostOf | None = None,
    log: TrialLog | None = None,
    announce: Announce | None = None,
    sizes: FileSizes | None = None,
) -> dict[str, Any]:
    """Run, resume or repeat a search in the folder ``out`` and return the document of its ``front.json``.

    No shape is measured twice. A run killed at any point and started again proposes, measures and writes what it would have
    without the interruption, given the same measurements.

    Args:
        config: the settings; a folder holds one search.
        measure: what a shape costs whose body is stored in a format, measured or predicted; a :class:`DeepthinError` from it
            fails that shape only, unless it is a :class:`MeasuringStoppedError`.
        out: the run folder.
        remeasure: measures a shape anew; used on candidates whose place on the front their intervals leave open, until it is
            settled or each was repeated :data:`REPEATS` times.
        progress: called as ``progress(message, done, total)``.
        log: keeps the trials instead of the folder's journal.
        announce: told ahead which candidates will surely be measured.
        sizes: bytes of the files beside GGUF, for the document; the exporter knows them, which this folder does not.

    Raises:
        MeasuringStoppedError: from ``measure``; the run can be resumed.
        InfeasibleError: no shape meets the budget, or no measured one the limits.
        UsageError: ``out`` holds another search or something else.
        DeepthinError: the folder cannot be used, or not one shape could be measured.
    """
    space = config.space
    space.require_feasible()
    require_cache(config.limits, space)
    say = progress or _silent
    with RunFolder(out, config) as folder:
        if log is not None:
            folder.write_storage(log.description)
        run = _Run(config, space, folder, measure, log)
        run.advance(say, announce)
        if remeasure is not None:
            run.settle(remeasure, say, announce)
        document = run.document(say)
        if sizes is not None:
            document = with_file_sizes(document, sizes)
        folder.write_front(document)
        return document


class _Run:
    """The state of one call: what was proposed so far, and the way to measurements."""

    def __init__(
        self, config: SearchConfig, space: Space, folder: RunFolder, measure: CostOf, log: TrialLog | None = None
    ) -> None:
        self._config = config
        self._space = space
        self._quality = config.quality
        self._folder = folder
        self._measure = measure
        kind = config.choice.name
        optunas = kind if kind in (TPE, NSGA2, RANDOM) else TPE
        constrained = bool(config.limits.names)
        self._study = SearchStudy(
            folder.journal, space.dimensions, config.seed, constrained=constrained, sampler=optunas, log=log
        )
        self._guide = Guide(space, self._quality, config.context, config.seed, config.limits) if kind == GUIDED else None
        self._every = iter(space.points()) if kind == EXHAUSTIVE else None
        self._stopped = "trials"
        self._scored: list[Scored] = []
        self._failures: list[dict[str, str]] = []
        self._keys: set[str] = set()
        self._takes: dict[str, list[Timing]] = {}
        for blob in self._study.steps:
            self._record(blob["step"], Candidate(Shape.parse(blob["shape"]), blob["quant"]), blob["point"])

    def advance(self, say: Progress, announce: Announce | None = None) -> None:
        """Take steps until there are as many as asked for, or every candidate has been seen."""
        total = self._config.trials
        if len(self._keys) >= total:
            return
        free = self._config.choice.name in (NSGA2, RANDOM, EXHAUSTIVE)
        most_cache = self._config.limits.cache_per_token
        design = [] if free else initial_design(self._space, self._quality, self._config.seed, most_cache)
        design = started(self._space, self._config.start, design)
        say("searching", len(self._keys), total)
        if announce is not None:
            coming = [self._space.decode(point) for point in design[len(self._keys) : total]]
            announce([(one.shape, one.quant) for one in coming if self._new(one.key)], 0)
        for step in range(len(self._keys), total):
            if self._on_plateau(step):
                self._stopped = "plateau"
                return
            proposed = self._propose(step, design[step] if step < len(design) else self._guided(step))
            if proposed is None:
                self._stopped = "space"
                return
            proposal, candidate = proposed
            facts = {"shape": candidate.shape.text, "quant": candidate.quant, "point": proposal.point}
            scored = self._record(step, candidate, proposal.point)
            if scored is None:
                self._study.fail(proposal, step, facts)
            else:
                self._study.tell(proposal, step, facts, (scored.loss, scored.time), self._config.limits.violations(scored))
            say(_told(candidate, scored), step + 1, total)

    def _guided(self, step: int) -> Mapping[str, int] | None:
        """The point for ``step`` where it does not come from Optuna's sampler."""
        if self._every is not None:
            return next((point for point in self._every if self._space.decode(point).key not in self._keys), None)
        if self._guide is None or not self._scored or step % _OPTUNA_EVERY == 0:
            return None
        return self._guide.propose(step, self._scored, self._keys)

    def _on_plateau(self, step: int) -> bool:
        """Whether the last ``plateau`` steps added next to nothing; a space that is taken whole is taken to its end."""
        if self._every is not None or not self._config.plateau:
            return False
        met = [one for one in self._scored if self._config.limits.met(one)]
        return on_plateau([(one.step, (one.loss, math.log(one.time))) for one in met], step, self._config.plateau)

    def settle(self, remeasure: RepeatedCostOf, say: Progress, announce: Announce | None = None) -> None:
        """Measure the candidates again whose place on the front is open, the most open first; their times become those of all.

        It ends when no place is open, when each open one was repeated :data:`REPEATS` times, or when a quarter as many
        repeats as trials were spent: some places stay open however long one measures.
        """
        done: Counter[str] = Counter()
        left = max(_LEAST_REPEATS, self._config.trials // 4)
        while left > 0:
            usable = [one for one in self._scored if self._config.limits.met(one)]
            chances = front_probabilities(usable)
            unsettled = [one for one in usable if OPEN < chances[one.candidate.key] < 1 - OPEN]
            unsettled = [one for one in unsettled if done[one.candidate.key] < REPEATS]
            unsettled.sort(key=lambda one: (abs(chances[one.candidate.key] - 0.5), one.candidate.key))
            if not unsettled:
                return
            say(f"measuring leaders again, {len(unsettled)} of which have no sure place", None, None)
            batch = unsettled[: min(_MOST_REPEATED, left)]
            done.update(one.candidate.key for one in batch)
            left -= len(batch)
            for number in sorted({done[one.candidate.key] for one in batch}):
                coming = [one.candidate for one in batch if done[one.candidate.key] == number]
                new = [one for one in coming if self._folder.repeated(one.key, number) is None]
                if announce is not None:
                    announce([(one.shape, one.quant) for one in new], number)
            for one in batch:
                self._repeat(one, done[one.candidate.key], remeasure)

    def _repeat(self, one: Scored, number: int, remeasure: RepeatedCostOf) -> None:
        key = one.candidate.key
        cost = self._folder.repeated(key, number)
        if cost is None:
            try:
                found = Cost.of(remeasure(one.candidate.shape, one.candidate.quant, number))
            except MeasuringStoppedError:
                raise
            except DeepthinError:  # it was measured once, which stays
                return
            cost = self._folder.store_repeat(key, number, found)
        self._takes.setdefault(key, [one.cost.decode]).append(cost.decode)
        flags = tuple(sorted({*one.cost.flags} & {*cost.flags}))  # what disturbed only one of them is outweighed
        joint = replace(one.cost, decode=pooled(self._takes[key]), flags=flags)
        self._scored[self._scored.index(one)] = replace(one, cost=joint)

    def document(self, say: Progress) -> dict[str, Any]:
        """The front and its picks, each beside the nearest public shape."""
        if not self._scored:
            first = self._failures[0]
            name = f"{first['shape']}, {first['quant']}"
            raise DeepthinError(
                f"not one of {len(self._failures)} shapes could be measured; the first ({name}): {first['why']}"
            )
        usable = feasible(self._config, self._scored)
        baseline = self._baseline(choose(usable)[RECOMMENDED], say)
        picks = choose(usable, baseline=None if baseline is None else baseline[1])
        comparisons = {name: self._compared(pick, say) for name, pick in picks.items()}
        return front_document(self._config, self._scored, self._failures, comparisons, self._stopped, baseline)

    def _propose(self, step: int, point: Mapping[str, int] | None) -> tuple[Proposal, Candidate] | None:
        """An open proposal whose candidate was not seen in this run, or None when there is none left."""
        attempt = self._study.attempts(step)
        if point is not None and attempt == 0:
            proposal = self._study.propose(step, attempt, point)
        elif attempt < _SAMPLER_ATTEMPTS.get(self._config.choice.name, _MOST_ATTEMPTS):
            proposal = self._study.propose(step, attempt)
        else:
            unseen = self._unseen_point(step)
            if unseen is None:
                return None
            proposal = self._study.propose(step, attempt, unseen)
        candidate = self._space.decode(proposal.point)
        if candidate.key not in self._keys:
            return proposal, candidate
        facts = {"shape": candidate.shape.text, "quant": candidate.quant, "point": proposal.point}
        self._study.reject(proposal, step, facts)
        return self._propose(step, point)

    def _unseen_point(self, step: int) -> dict[str, int] | None:
        if self._guide is not None and self._scored:
            point = self._guide.propose(step, self._scored, self._keys)
            if point is not None:
                return point
        generator = random_generator(self._config.seed, step)
        for _ in range(_RANDOM_ATTEMPTS):
            point = self._space.sample(generator)
            if self._space.decode(point).key not in self._keys:
                return point
        return None

    def _record(self, step: int, candidate: Candidate, point: Mapping[str, int]) -> Scored | None:
        """Measure ``candidate`` unless that was done, and remember it as step ``step``; None if it cannot be measured."""
        self._keys.add(candidate.key)
        cost = self._cost(candidate)
        if isinstance(cost, str):
            self._failures.append({"shape": candidate.shape.text, "quant": candidate.quant, "why": cost})
            return None
        scored = Scored(step, candidate, self._quality.predict(candidate.shape, candidate.quant), cost, point)
        self._scored.append(scored)
        return scored

    def _new(self, key: str) -> bool:
        return self._folder.measured(key) is None and self._folder.failed(key) is None

    def _cost(self, candidate: Candidate) -> Cost | str:
        """The measurement of ``candidate``, stored or new, or why there is none."""
        stored = self._folder.measured(candidate.key) or self._folder.failed(candidate.key)
        if stored is not None:
            return stored
        try:
            cost = Cost.of(self._measure(candidate.shape, candidate.quant))
        except MeasuringStoppedError:
            raise
        except DeepthinError as error:
            self._folder.store_failed(candidate.key, str(error))
            return str(error)
        return self._folder.store_measured(candidate.key, cost)

    def _baseline(self, pick: Scored, say: Progress) -> tuple[str, Scored] | None:
        """The public shape of ``--baseline``, or the nearest one, costed in the format of ``pick``; None if it cannot be."""
        shape = pick.candidate.shape
        wanted = self._config.baseline
        known = known_shape(wanted) if wanted else nearest_known(count_params(shape).total)
        candidate = Candidate(known.shape.replace(max_seq_len=shape.max_seq_len), pick.candidate.quant)
        say(f"comparing with {known.name} {candidate.quant}", None, None)
        cost = self._cost(candidate)
        if isinstance(cost, str):
            return None
        return known.name, Scored(-1, candidate, self._quality.predict(candidate.shape, candidate.quant), cost)

    def _compared(self, pick: Scored, say: Progress) -> dict[str, Any]:
        shape = pick.candidate.shape
        wanted = self._config.baseline
        known = known_shape(wanted) if wanted else nearest_known(count_params(shape).total)
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
