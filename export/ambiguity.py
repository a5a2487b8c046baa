"""When a runtime beyond its budget may still be right: near ties, and the noise of rounded activations. Numbers in, words out.

Asked only about a file whose checksums, facts, tokenizer and weights are all as they should be, and about finite logits. Then a
distance is *explained*, and the verdict on it "ambiguous" instead of "fail", in two cases; [gate.ambiguous] has the numbers:

- near tie: NMSE and KL are within the budget, and wherever another token is on top, the reference has it at most ``tie_reach``
  near-ties below its own;
- noise: every measure is within the budget or at most ``times`` what the same rounding of activations does to the reference on
  these weights and tokens (:mod:`deepthin.export.noise`), tokens on top included, and the whole list's NMSE is at most
  ``most_nmse``.

Nothing is then known to be wrong, and nothing is proven: a longer token list, or a file with more bits, decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepthin.export.parity import ParityReport
from deepthin.export.tolerances import gate


def excuse(report: ParityReport, noise: Sequence[ParityReport]) -> str:
    """What explains that ``report`` is beyond its budget, one clause; empty when nothing does.

    Args:
        report: beyond its budget.
        noise: distances of the reference with rounded activations from the reference itself.
    """
    limits, budget = gate("ambiguous"), report.budget
    if not math.isfinite(report.nmse):
        return ""
    measures = (
        (report.nmse, budget.nmse, [item.nmse for item in noise]),
        (report.max_position_nmse, budget.position_nmse, [item.max_position_nmse for item in noise]),
        (report.kl_mean, budget.kl, [item.kl_mean for item in noise]),
        (report.kl_max, budget.position_kl, [item.kl_max for item in noise]),
    )
    near_tie = limits["tie_reach"] * budget.near_tie
    if all(found <= limit for found, limit, _ in measures):
        if report.max_shortfall > near_tie:
            return ""
        down = f"{report.max_shortfall:.2g} deviations down where {budget.near_tie:.2g} are a near-tie"
        return f"only tokens on top differ, at most {down}"
    if not noise or report.nmse > limits["most_nmse"]:
        return ""
    near_tie = max(near_tie, limits["times"] * max(item.max_shortfall for item in noise))
    in_noise = all(found <= max(limit, limits["times"] * max(made)) for found, limit, made in measures)
    if not in_noise or report.max_shortfall > near_tie:
        return ""
    largest = max(item.nmse for item in noise)
    return f"rounding activations alone moves the reference by NMSE {largest:.2g} on these weights and tokens"
