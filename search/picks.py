"""Which members of a front to look at first, by rules that say why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepthin.search.objectives import Scored, pareto_front, predicted_loss
from deepthin.search.quality.model import TIE_BAND

BEST_QUALITY, FASTEST_TIED, KNEE = "best_quality", "fastest_tied", "knee"
RECOMMENDED = FASTEST_TIED
RULES = {
    BEST_QUALITY: "lowest predicted loss",
    FASTEST_TIED: f"fastest of those within {TIE_BAND} nats of the best, which prediction cannot tell apart",
    KNEE: "farthest below the line between the ends of the front: past it, speed costs more quality",
}

Loss = Callable[[Scored], float]


def choose(scored: Sequence[Scored], loss: Loss = predicted_loss) -> dict[str, Scored]:
    """The picks by name. The same candidate may be several of them.

    Args:
        scored: at least one candidate; all of them must meet the limits.
        loss: what to judge quality by, so that picks can be repeated without a doubtful term.
    """
    best = min(scored, key=lambda one: (loss(one), one.time, one.candidate.key))
    return {
        BEST_QUALITY: best,
        FASTEST_TIED: min(tied(scored, loss), key=lambda one: (one.time, loss(one), one.candidate.key)),
        KNEE: _knee(pareto_front(scored, loss), loss),
    }


def tied(scored: Sequence[Scored], loss: Loss = predicted_loss) -> list[Scored]:
    """Everything within the tie band of the lowest loss."""
    limit = min(loss(one) for one in scored) + TIE_BAND
    return [one for one in scored if loss(one) <= limit]


def _knee(front: Sequence[Scored], loss: Loss) -> Scored:
    """The member farthest below the straight line between the ends, both axes scaled to [0, 1]; of a short front, the best."""
    first, last = front[0], front[-1]
    loss_span, time_span = loss(last) - loss(first), first.time - last.time
    if len(front) < 3 or loss_span <= 0 or time_span <= 0:
        return first

    def depth(one: Scored) -> float:
        return 1 - (loss(one) - loss(first)) / loss_span - (one.time - last.time) / time_span

    return max(front, key=lambda one: (depth(one), -one.step))
