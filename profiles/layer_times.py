"""Where a decoded token's time goes: each block, the embedding row, the head, and each product; ``deepthin bench --layers``.

Blocks, row and head are timed by the cycle counts that the engine takes at each block's last barrier. Products have no counts
of their own: each group is left out of all blocks in turn, in the same interleaved rounds, and what the token gets shorter by
is what the group costs. That includes the wait it causes at its barrier, and what the caches then keep of the rest, so the
parts of a model that fits a cache need not add up exactly; what remains is norms, attention, rotary turns and barriers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from deepthin.engine.arrays import F64
from deepthin.engine.model import Model
from deepthin.engine.plan import block_products
from deepthin.profiles.kernel_report import packed_tensors
from deepthin.profiles.protocol import Instruments, Rule, Session, Subject, measure
from deepthin.profiles.schema import Measured
from deepthin.profiles.statistics import measured, median

LAYER_TOKENS = 32  # decoded per round; a part's reading is the median of theirs
_WHOLE = "whole token"
_CEILING = "read bandwidth"
_NO_CACHE = "cache left out"


class Dissected(Protocol):
    """What is asked of the engine."""

    def parts(self, ids: Sequence[int], position: int) -> F64:
        """Seconds f64 [tokens, blocks + 3] of each of ``ids``, decoded from ``position`` on: all, row, blocks, head."""

    def fill(self, ids: Sequence[int]) -> None:
        """Cache ``ids``, so that positions up to their number may be decoded at."""

    def without(self, products: Sequence[str]) -> AbstractContextManager[None]:
        """Leave products out of every token meanwhile."""


def operations(model: Model) -> dict[str, tuple[str, ...]]:
    """The products by the phase between two barriers that they share."""
    names = block_products(model.shape)
    inner = tuple(name for name in names[4:6] if name)
    return {
        "q, k, v": names[:3],
        "attention output": names[3:4],
        ", ".join(name.removeprefix("ffn_") for name in inner): inner,
        "down": names[6:],
        "head": ("output",),
    }


def layer_times(
    engine: Dissected,
    model: Model,
    *,
    threads: int,
    depth: int,
    rule: Rule,
    ceiling: Subject,
    draw: Callable[[int, int], list[int]],
    instruments: Instruments | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time one token's parts.

    Args:
        engine: loaded, with room for ``depth + LAYER_TOKENS``.
        model: what it runs.
        threads: its threads, for the record.
        depth: tokens cached before.
        rule: rounds and budget.
        ceiling: gives ``bytes_per_s``.
        draw: (seed, count) to random token ids.
        instruments: clock and counters.
        progress: told what happens next.

    Returns:
        One entry of ``layers``: ``threads``, ``depth``, ``tokens`` (per round), ``token_s``, ``embed_s``, ``bytes_per_s`` (the
        ceiling), ``blocks`` and ``operations`` (``seconds``, ``bytes`` and ``roofline_share`` each, the latter None without
        bytes or where noise exceeds the time), ``flags`` and ``session``. The head is the last block.
    """
    groups = operations(model)
    engine.fill(draw(0, depth))
    seeds = itertools.count(1)

    def subject(products: Sequence[str], position: int) -> Subject:
        def run() -> Mapping[str, float]:
            with engine.without(products) if products else nullcontext():
                times = engine.parts(draw(next(seeds), LAYER_TOKENS), position)
            return {str(i): float(seconds) for i, seconds in enumerate(np.median(times, axis=0))}

        return run

    subjects = {_WHOLE: subject((), depth), _CEILING: ceiling}
    subjects |= {name: subject(products, depth) for name, products in groups.items()}
    if depth:
        subjects[_NO_CACHE] = subject((), 0)
    tools = instruments or Instruments.real(threads=threads)
    session = measure(subjects, rule, gates=("0",), instruments=tools, progress=progress)
    sizes = {name: one.num_bytes for name, one in packed_tensors(model).items()}
    return {
        "threads": threads,
        "depth": depth,
        "tokens": LAYER_TOKENS,
        "token_s": session.measured(_WHOLE, "0").to_json(),
        "embed_s": session.measured(_WHOLE, "1").to_json(),
        "bytes_per_s": session.measured(_CEILING, "bytes_per_s", "bytes/s").to_json(),
        "blocks": _blocks(session, model, sizes),
        "operations": _operations(session, model, sizes, groups, depth),
        "flags": list(session.flags_of(_WHOLE, "0")),
        "session": session.state_json(),
    }


def _blocks(session: Session, model: Model, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows of the executed blocks, then the head."""
    shape = model.shape
    found = []
    for run in range(shape.num_executed_layers):
        block = run // shape.layer_sharing
        num_bytes = sum(sizes[f"blk.{block}.{name}"] for name in block_products(shape) if name)
        found.append(_part(session, str(run), f"blk.{block}", session.samples[_WHOLE][str(run + 2)], num_bytes))
    head = session.samples[_WHOLE][str(shape.num_executed_layers + 2)]
    found.append(_part(session, "head", "head", head, _head_bytes(model, sizes)))
    return found


def _operations(
    session: Session, model: Model, sizes: Mapping[str, int], groups: Mapping[str, Sequence[str]], depth: int
) -> list[dict[str, Any]]:
    """Rows of the products, of the cache at a depth, then what is left."""
    shape = model.shape
    whole = session.samples[_WHOLE]["0"]
    left = np.array(whole)
    found = []
    for name, products in groups.items():
        taken = [all_of - less for all_of, less in zip(whole, session.samples[name]["0"], strict=True)]
        left -= taken
        num_bytes = sum(sizes[f"blk.{i}.{product}"] for i in range(shape.num_layers) for product in products if name != "head")
        num_bytes = num_bytes * shape.layer_sharing or _head_bytes(model, sizes)
        found.append(_part(session, name, ", ".join(products), taken, num_bytes))
    if depth:
        taken = [all_of - less for all_of, less in zip(whole, session.samples[_NO_CACHE]["0"], strict=True)]
        left -= taken
        found.append(_part(session, f"attention over {depth} cached tokens", "", taken, 0))
    found.append(_part(session, "everything else", "", left.tolist(), 0))
    return found


def _part(session: Session, name: str, tensors: str, seconds: Sequence[float], num_bytes: int) -> dict[str, Any]:
    share: Measured | None = None
    if num_bytes and min(seconds) > 0 and median(seconds) > 0:
        rates = session.samples[_CEILING]["bytes_per_s"]
        share = measured([num_bytes / s / rate for s, rate in zip(seconds, rates, strict=True)], "ratio")
    return {
        "name": name,
        "tensors": tensors,
        "seconds": measured(seconds, "s").to_json(),
        "bytes": num_bytes,
        "roofline_share": None if share is None else share.to_json(),
    }


def _head_bytes(model: Model, sizes: Mapping[str, int]) -> int:
    return sizes["token_embd" if model.shape.tie_word_embeddings else "output"]
