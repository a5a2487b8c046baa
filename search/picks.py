"""Which members of a front to look at first, by rules that say why, and what each pick cannot be told apart from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deepthin.engine.accounting import kv_bytes_per_token
from deepthin.search.objectives import Scored, pareto_front, predicted_loss
from deepthin.search.quality.model import TIE_BAND

BEST_QUALITY, FASTEST_TIED, KNEE, SMALLEST_KV = "best_quality", "fastest_tied", "knee", "smallest_kv"
NO_SLOWER = "no_slower_than_baseline"
RECOMMENDED = FASTEST_TIED
RULES = {
    BEST_QUALITY: "lowest predicted loss",
    FASTEST_TIED: f"fastest of those within {TIE_BAND} nats of the best, which prediction cannot tell apart",
    KNEE: "farthest below the line between the ends of the front: past it, speed costs more quality",
    SMALLEST_KV: f"smallest key/value cache of those within {TIE_BAND} nats of the best",
    NO_SLOWER: "lowest predicted loss of those no slower per text than the public shape they are compared with",
}

Loss = Callable[[Scored], float]


def choose(scored: Sequence[Scored], loss: Loss = predicted_loss, baseline: Scored | None = None) -> dict[str, Scored]:
    """The picks by name. The same candidate may be several of them.

    Args:
        scored: at least one candidate; all of them must meet the limits.
        loss: what to judge quality by, so that picks can be repeated without a doubtful term.
        baseline: a shape from elsewhere, costed alike; without one, or when all are slower, there is no pick relative to it.
    """
    best = min(scored, key=lambda one: (loss(one), one.time, one.candidate.key))
    band = tied(scored, loss)
    picks = {
        BEST_QUALITY: best,
        FASTEST_TIED: min(band, key=lambda one: (one.time, loss(one), one.candidate.key)),
        KNEE: _knee(pareto_front(scored, loss), loss),
        SMALLEST_KV: min(band, key=lambda one: (_cache(one), one.time, one.candidate.key)),
    }
    quick = [one for one in scored if baseline is not None and one.time <= baseline.time]
    if quick:
        picks[NO_SLOWER] = min(quick, key=lambda one: (loss(one), one.time, one.candidate.key))
    return picks


def named(one: Scored) -> dict[str, str]:
    """Shape and format of a candidate, as documents name it."""
    return {"shape": one.candidate.shape.text, "quant": one.candidate.quant}


def missing(scored: Sequence[Scored], picks: Mapping[str, Scored], baseline: tuple[str, Scored] | None) -> dict[str, str]:
    """Why there is no pick of a rule, in one sentence each, with the way to one."""
    if NO_SLOWER in picks:
        return {}
    if baseline is None:
        return {NO_SLOWER: "the public shape to compare with could not be timed; --baseline names another"}
    name, cost = baseline
    fastest = min(scored, key=lambda one: (one.time, one.candidate.key))
    return {
        NO_SLOWER: f"every shape found is slower per text than {name} in {cost.candidate.quant}: the fastest takes "
        f"{fastest.time:.4g} ms per 1,000 characters, {fastest.time / cost.time - 1:.1%} more than its {cost.time:.4g}; "
        f"a smaller --params or --bytes gives faster ones, --baseline another shape to compare with"
    }


def tied(scored: Sequence[Scored], loss: Loss = predicted_loss) -> list[Scored]:
    """Everything within the tie band of the lowest loss."""
    limit = min(loss(one) for one in scored) + TIE_BAND
    return [one for one in scored if loss(one) <= limit]


def indistinguishable(pick: Scored, scored: Sequence[Scored]) -> list[Scored]:
    """Other candidates within the tie band of ``pick`` whose times its interval cannot tell from its own, fastest first."""
    mine = pick.ms_per_kchar
    others = [
        one
        for one in scored
        if one.candidate != pick.candidate
        and abs(one.loss - pick.loss) <= TIE_BAND
        and one.ms_per_kchar.low <= mine.high
        and mine.low <= one.ms_per_kchar.high
    ]
    return sorted(others, key=lambda one: (one.time, one.candidate.key))


def reason(name: str, pick: Scored, scored: Sequence[Scored], baseline: tuple[str, Scored] | None = None) -> str:
    """Why ``pick`` is the one called ``name``, in one sentence with its figures.

    Args:
        name: of the pick.
        pick: the candidate.
        scored: what it was chosen from.
        baseline: name and cost of the public shape, for the pick relative to it.
    """
    best = min(scored, key=lambda one: (one.loss, one.time, one.candidate.key))
    band, shape = tied(scored), pick.candidate.shape
    if name == BEST_QUALITY:
        return (
            f"its predicted loss of {pick.loss:.3f} nats is the lowest of {len(scored)}; {len(band) - 1} more are tied with it"
        )
    if name == FASTEST_TIED:
        gain = 1 - pick.time / best.time
        start = (
            f"at {pick.time:.1f} ms per 1,000 characters it is the fastest of the {len(band)} that prediction cannot tell from"
        )
        return (
            f"{start} the best, {gain:.0%} faster than that one"
            if pick.candidate != best.candidate
            else (
                f"it is the best, and of the {len(band) - 1} that prediction cannot tell from it none takes less than its "
                f"{pick.time:.1f} ms per 1,000 characters"
            )
        )
    if name == SMALLEST_KV:
        return (
            f"its cache of {_cache(pick):,} bytes a token is the smallest of the {len(band)} that prediction cannot tell from "
            f"the best, which takes {_cache(best):,}"
        )
    if name == NO_SLOWER and baseline is not None:
        other, cost = baseline
        return (
            f"of all that take no longer per text than {other} in {cost.candidate.quant} ({cost.time:.1f} ms per 1,000 "
            f"characters) its predicted loss of {pick.loss:.3f} nats is the lowest"
        )
    return (
        f"with {shape.num_layers} layers, {pick.loss - best.loss:.3f} nats from the best at {pick.time / best.time:.2f} x its "
        f"time, it lies farthest below the line between the ends of the front"
    )


def _cache(one: Scored) -> int:
    return kv_bytes_per_token(one.candidate.shape)


def _knee(front: Sequence[Scored], loss: Loss) -> Scored:
    """The member farthest below the straight line between the ends, both axes scaled to [0, 1]; of a short front, the best."""
    first, last = front[0], front[-1]
    loss_span, time_span = loss(last) - loss(first), first.time - last.time
    if len(front) < 3 or loss_span <= 0 or time_span <= 0:
        return first

    def depth(one: Scored) -> float:
        return 1 - (loss(one) - loss(first)) / loss_span - (one.time - last.time) / time_span

    return max(front, key=lambda one: (depth(one), -one.step))
