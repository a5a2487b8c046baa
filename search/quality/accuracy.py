"""Mean accuracy of nine benchmarks read off a loss, for display: 0.02 nats are 0.2-0.4 points, inside benchmark noise.

Never an objective, never a forecast for another tokenizer or data mix.
"""

from __future__ import annotations

import math

from deepthin.search.quality.shape_laws import AdditiveLaw, equivalent_shape

# Own fit to the constant-rate ("hot") rows of Gemstones, which the benchmark scores belong to (330 rows, Huber 1e-3 on log
# loss). Never mixed with the cooldown fit: the two lie 0.08 nats apart.
# Source: table mcleish7/gemstone-scaling-laws@5f420478 wandb_dfs (MIT), arXiv 2502.06857; benchmarks/refit_quality.py.
F4_HOT = AdditiveLaw(
    base=0.504084,
    depth=-0.536969,
    a_depth=0.343518,
    width=2.492988,
    a_width=0.577832,
    tokens=10.558686,
    a_tokens=0.498019,
    params=2.631838,
    a_params=0.159228,
)
# error = ceiling - scale · e^(-rate · loss): own fit to 154 checkpoints, rmse 0.0034. Source: the same repository, benchmarks/.
READ_OUT = (0.6759967, 13.8728455, 1.78532336)


def accuracy(hot_loss: float) -> float:
    """Mean share of right answers at a loss of F4_HOT."""
    ceiling, scale, rate = READ_OUT
    return 1 - (ceiling - scale * math.exp(-rate * hot_loss))


def points_lost(layers: float, width: float, body: float, tokens: float, nats: float) -> float:
    """Accuracy points (hundredths) that ``nats`` more loss cost a shape, which F4_HOT sees as its equivalent."""
    loss = F4_HOT.loss(*equivalent_shape(layers, width, body), body, tokens)
    return 100 * (accuracy(loss) - accuracy(loss + nats))
