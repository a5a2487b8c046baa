"""Which way of proposing suits a search: an offline rule by the size of its space and the number of trials, with its reason.

The two objectives are always the same, predicted loss and time, and limits are relative violations to every choice, so
neither moves the rule: the guide models limits, Optuna's samplers take them as constraints. ``benchmarks/search.py`` measures
the choices against each other on spaces small enough to know the true front. Optuna's GP sampler is left out: it needs torch,
whose threads stay busy between proposals, and its surrogate has to learn the loss, which is known here.
"""

from __future__ import annotations

from dataclasses import dataclass

EXHAUSTIVE, GUIDED, TPE, NSGA2, RANDOM = "exhaustive", "guided", "tpe", "nsga2", "random"
CHOICES = (EXHAUSTIVE, GUIDED, TPE, NSGA2, RANDOM)
GUIDED_TRIALS = 2000  # beyond, a step of the guide with the trials so far takes longer than dozens of evolution's
_EXHAUSTIVE_POINTS = 4096  # decoding more points than this to list candidates takes longer than it saves


@dataclass(frozen=True, slots=True)
class SamplerChoice:
    """One of :data:`CHOICES`, and why.

    Attributes:
        name: ``exhaustive`` takes every candidate, ``guided`` asks ``search/guide.py`` with every eighth step by Optuna's
            TPE, the others are Optuna's TPE, NSGA-II and random samplers.
        why: for people.
    """

    name: str
    why: str

    def to_json(self) -> dict[str, str]:
        """Both fields by name."""
        return {"name": self.name, "why": self.why}


def choose_sampler(num_points: int, trials: int) -> SamplerChoice:
    """The rule.

    Args:
        num_points: points of the space.
        trials: most candidates to cost.
    """
    if num_points <= min(trials, _EXHAUSTIVE_POINTS):
        return SamplerChoice(EXHAUSTIVE, f"all {num_points} points fit into {trials} trials")
    if trials <= GUIDED_TRIALS:
        return SamplerChoice(
            GUIDED, f"{trials} trials of {num_points:,} points: predicted loss is free and a time model needs few measurements"
        )
    return SamplerChoice(NSGA2, f"{trials} trials are enough generations for evolution, whose proposals cost nothing")
