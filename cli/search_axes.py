"""The options of ``deepthin search`` that open, narrow or fix one axis of its space each."""

from __future__ import annotations

import argparse
from typing import Any

from deepthin.cli.arguments import argument, listed, one_of, parse_within, real, whole
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import BODY_QUANTS

TYINGS = {"tied": (True,), "untied": (False,), "either": (True, False)}
QK_NORMS = {"no": (False,), "yes": (True,), "either": (False, True)}
_MOST_LAYERS = 512  # llama.cpp runs no more


def parse_layers(text: str) -> tuple[int, int]:
    """The fewest and the most layers of ``12`` or ``6-40``.

    Raises:
        UsageError: no number or range, or one that holds nothing.
    """
    first, apart, last = text.partition("-")
    try:
        low, high = (parse_within(part, int, "whole number", 1, _MOST_LAYERS) for part in (first, last if apart else first))
    except UsageError as error:
        raise UsageError(f"{error}; write layers as 12 or 6-40") from error
    if low > high:
        raise UsageError(f"{text!r} holds no number of layers, since the second number is the last; write 12 or 6-40")
    return low, high


def add_axes(group: argparse._ArgumentGroup) -> None:
    """One option an axis; D is none, since it is solved so that the budget is used and never exceeded."""
    group.add_argument("--layers", type=argument(parse_layers), metavar="L-L", help="layers, 12 or 6-40 (default: 3-80)")
    group.add_argument(
        "--head-dim", type=listed(whole(16, 1024)), metavar="E,E,..", help="head dims, multiples of 16 (default: 32,64,96,128)"
    )
    group.add_argument(
        "--query-ratio",
        type=listed(real(0.125, 8.0)),
        metavar="R,R,..",
        help="width of all query heads over d, rounded up to heads every target takes (default: 1, heads x head_dim = d)",
    )
    group.add_argument(
        "--kv-group",
        type=listed(whole(1, 64)),
        metavar="N,N,..",
        help="query heads per key/value head at most (default: 1,2,3,4,8)",
    )
    group.add_argument(
        "--mlp-ratio",
        type=listed(real(0.125, 6.0)),
        metavar="R,R,..",
        help="MLP width over d, before the rest of the budget is added (default: 1,1.5,2,2.67,3.5,4.5)",
    )
    group.add_argument("--tying", choices=tuple(TYINGS), help="head is the embedding: tied, untied or either (default: either)")
    group.add_argument("--share", type=listed(whole(1, 16)), metavar="N,N,..", help="runs of each block (default: 1)")
    group.add_argument("--qk-norm", choices=tuple(QK_NORMS), help="normalise queries and keys (default: no)")
    group.add_argument(
        "--head-quant",
        type=one_of(*BODY_QUANTS),
        metavar="Q,Q,..",
        help="formats of embedding and head, as for --quant (default: q8_0 beside bodies of 4 to 6 bits, else the body's)",
    )


def axes(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of ``SearchConfig``; None where an option was not given."""

    def some(values: Any) -> Any:
        return values and tuple(values)

    return {
        "layers": options.layers,
        "head_dims": some(options.head_dim),
        "query_ratios": some(options.query_ratio),
        "kv_groups": some(options.kv_group),
        "mlp_ratios": some(options.mlp_ratio),
        "tyings": options.tying and TYINGS[options.tying],
        "sharings": some(options.share),
        "qk_norms": options.qk_norm and QK_NORMS[options.qk_norm],
        "head_quants": some(options.head_quant),
    }
