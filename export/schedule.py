"""How a token list is handed to a runtime with a cache: whole, one token at a time, or in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepthin.engine.arrays import F32

PREFILL, DECODE, CHUNKS = "prefill", "decode", "chunks"
PHASES = (PREFILL, DECODE, CHUNKS)
_CHUNK_TOKENS = 7  # odd on purpose: no kernel's row count divides it


def phase_schedule(phase: str, num_tokens: int) -> list[int]:
    """Sizes of the pieces in which ``phase`` hands over ``num_tokens`` tokens."""
    if phase == PREFILL:
        return [num_tokens]
    size = 1 if phase == DECODE else _CHUNK_TOKENS
    return [min(size, num_tokens - start) for start in range(0, num_tokens, size)]


def pieces(ids: Sequence[int], schedule: Sequence[int] | None) -> Iterator[Sequence[int]]:
    """Cut ``ids`` into runs of the given sizes, or one run without a schedule.

    Raises:
        ValueError: the sizes do not add up to the number of ids.
    """
    sizes = schedule or [len(ids)]
    if sum(sizes) != len(ids) or min(sizes) < 1:
        raise ValueError(f"the schedule {list(sizes)} does not hand over the {len(ids)} tokens there are")
    at = 0
    for size in sizes:
        yield ids[at : at + size]
        at += size


def best_token(row: F32) -> tuple[int, float]:
    """The largest of ``row`` f32 [V], the lowest id among equals, and its margin over the runner-up."""
    best = int(row.argmax())
    others = row.copy()
    others[best] = -float("inf")
    return best, float(row[best] - others.max())
