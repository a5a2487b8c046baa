"""A chart of fronts as SVG text: loss against time, with the depth written beside the points. Equal numbers, equal bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from charts import COLOURS

WIDTH, HEIGHT = 860, 560
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 40, 52
_CLEAR = 15.0  # pixels that two labels are apart at least
_LINE, _LABEL = 13.0, 190.0  # height and most width of a named label
_TICKS = (1, 2, 3, 5, 7)


@dataclass(frozen=True)
class Mark:
    """One shape.

    Attributes:
        time: milliseconds, above 0.
        loss: nats.
        label: beside it; empty for none.
        hollow: drawn as a ring: a stand-in for something else.
    """

    time: float
    loss: float
    label: str = ""
    hollow: bool = False


def front_chart(title: str, x_label: str, y_label: str, fronts: Mapping[str, Sequence[Mark]], named: Sequence[Mark]) -> str:
    """An SVG document: each front as a line with dots and depths, the named shapes as squares.

    Args:
        title: above the plot.
        x_label: below it; the axis is logarithmic.
        y_label: beside it; smaller is better and lies lower.
        fronts: by name, from one end to the other; the name stands at its slow end.
        named: shapes from elsewhere.

    Raises:
        ValueError: there is nothing to draw.
    """
    marks = [mark for front in fronts.values() for mark in front] + list(named)
    if not marks:
        raise ValueError(f"chart {title!r}: there is nothing to draw")
    low, high = (pick(math.log(mark.time) for mark in marks) for pick in (min, max))
    bottom, top = (pick(mark.loss for mark in marks) for pick in (min, max))
    low, high = low - 0.05 * (high - low or 1), high + 0.12 * (high - low or 1)
    bottom, top = bottom - 0.05 * (top - bottom or 1), top + 0.05 * (top - bottom or 1)

    def at(mark: Mark) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (math.log(mark.time) - low) / (high - low)
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (mark.loss - bottom) / (top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *_grid(low, high, bottom, top),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(15 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]
    taken: list[tuple[float, float]] = []  # where points have labels
    texts: list[tuple[float, float]] = []  # where the labels of named shapes stand
    for mark in named:
        x, y = at(mark)
        fill = "#ffffff" if mark.hollow else "#111111"
        parts.append(f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{fill}" stroke="#111111"/>')
        taken.append((x, y))
        side, anchor = (8, "start") if x < 0.7 * WIDTH else (-8, "end")
        height = y + 4
        while any(abs(height - b) < _LINE and abs(x - a) < _LABEL for a, b in texts):
            height -= _LINE
        texts.append((x, height))
        parts.append(
            f'<text x="{x + side:.1f}" y="{height:.1f}" text-anchor="{anchor}" font-weight="bold">{escape(mark.label)}</text>'
        )
    for index, (name, front) in enumerate(fronts.items()):
        colour = COLOURS[index % len(COLOURS)]
        placed = [at(mark) for mark in front]
        parts.append(
            f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in placed)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        for (x, y), mark in zip(placed, front, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            if mark.label and all(math.hypot(x - a, y - b) >= _CLEAR for a, b in taken):
                taken.append((x, y))
                parts.append(
                    f'<text x="{x - 4:.1f}" y="{y + 13:.1f}" text-anchor="end" fill="{colour}">{escape(mark.label)}</text>'
                )
        slowest = max(placed)
        parts.append(f'<text x="{slowest[0] + 6:.1f}" y="{slowest[1] - 6:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _grid(low: float, high: float, bottom: float, top: float) -> list[str]:
    """Lines and figures of both axes; ``low`` and ``high`` are logarithms."""
    parts = []
    decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    for tick in (digit * 10.0**decade for decade in decades for digit in _TICKS):
        if low <= math.log(tick) <= high:
            x = LEFT + (WIDTH - LEFT - RIGHT) * (math.log(tick) - low) / (high - low)
            parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e5e5e5"/>')
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    step = 0.1 if top - bottom > 0.5 else 0.05 if top - bottom > 0.2 else 0.02
    for index in range(math.ceil(bottom / step), math.floor(top / step) + 1):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (index * step - bottom) / (top - bottom)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{index * step:.2f}</text>')
    return parts
