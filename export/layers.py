"""Where inside the decoder two runtimes part: the first point of the residual stream that differs. Arrays in, words out.

A point is what ``Reference.watch`` calls it: ``token_embd``, then ``blk.N.attn`` and ``blk.N.ffn`` for each executed block.
Rows of a stream are brought to unit length before they are compared, so that one token with a huge stream, as trained models
have at their first position, hides no other; and what differs is held against what rounding does to the reference there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32, F64
from deepthin.export.tolerances import Budget, gate

HEAD = "output"  # behind the last point: the final norm and the head


@dataclass(frozen=True, slots=True)
class LayerParting:
    """Where one runtime on one file leaves the reference.

    Attributes:
        mode: of the runtime.
        point: the first that differs, ``output`` when only what follows them all does; empty when there are no streams.
        why: one clause.
    """

    runtime: str
    mode: str
    file: str
    phase: str
    point: str
    why: str

    def to_json(self) -> dict[str, Any]:
        """As an entry of ``layers``; ``layer`` is the block's number, or None outside the blocks."""
        layer = int(self.point.split(".")[1]) if self.point.startswith("blk.") else None
        return {
            "runtime": self.runtime,
            "mode": self.mode,
            "file": self.file,
            "phase": self.phase,
            "layer": layer,
            "point": self.point or None,
            "why": self.why,
        }


def first_parting_point(
    reference: Mapping[str, F64], found: Mapping[str, F32], noise: Sequence[Mapping[str, F64]], budget: Budget
) -> tuple[str, str]:
    """The first point where ``found`` leaves ``reference``, and a clause about it.

    Args:
        reference: streams f64 [S, D] by point, in order; complete.
        found: streams [S, D] of the runtime; points that it does not give are passed over.
        noise: streams of the reference with rounded activations.
        budget: of the runtime on the file; distances below it are never called a parting.

    Returns:
        ``output`` as the point when all streams agree, and an empty one when ``found`` has none of them.
    """
    times = gate("layers")["times"]
    floor = min(budget.nmse, gate("layers")["most_nmse"])
    before, last = "", 0.0
    for point, wanted in reference.items():
        stream = found.get(point)  # asked for once: it may be made only now
        if stream is None or stream.shape != wanted.shape:
            continue
        distances = _distances(wanted, stream)
        made = [_distances(wanted, sample[point]) for sample in noise]
        mean_limit = max(floor, times * max((float(item.mean()) for item in made), default=0.0))
        worst_limit = max(100 * floor, times * max((float(item.max()) for item in made), default=0.0))
        if not (distances.mean() <= mean_limit and distances.max() <= worst_limit):
            limit = worst_limit if distances.mean() <= mean_limit else mean_limit
            first = int(np.argmax(~(distances <= limit)))
            agreed = f"{before} agrees to {last:.1e}" if before else "nothing is before it"
            return point, f"hidden states differ by {distances.mean():.1e} from position {first} on; {agreed}"
        before, last = point, float(distances.mean())
    if not before:
        return "", "it gives no hidden states"
    return HEAD, f"hidden states agree to {last:.1e} up to {before}"


def describe(point: str) -> str:
    """``point`` for people."""
    if point == HEAD:
        return "the final norm or the head"
    if point == "token_embd":
        return "the embedding"
    _, block, part = point.split(".")
    return f"the {'attention' if part == 'attn' else 'MLP'} of block {block}"


def unit_rows(stream: Any) -> F64:
    """Rows of ``stream`` [S, D] at unit length, f64; a row of zeros stays one."""
    rows = np.asarray(stream, np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: F64 = np.divide(rows, norms, where=norms > 0, out=np.zeros_like(rows))
    return unit


def _distances(wanted: F64, found: Any) -> F64:
    """Squared distance of each row, both at unit length; what is not finite is infinitely far."""
    distances: F64 = np.square(unit_rows(found) - unit_rows(wanted)).sum(axis=1)
    return np.where(np.isfinite(distances), distances, np.inf)
