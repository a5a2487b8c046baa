"""Charts as SVG text: points and lines over logarithmic or linear axes. The same numbers give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 180, 36, 50
COLOURS = ("#0b6fa4", "#c2410c", "#3f7d20", "#7c3aed", "#525252", "#b45309", "#be185d", "#0f766e")
Points = Sequence[tuple[float, float]]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    *,
    log_x: bool = False,
    log_y: bool = False,
    lines: bool = False,
    diagonal: bool = False,
) -> str:
    """An SVG document.

    Args:
        title: above the plot.
        x_label: below it.
        y_label: beside it.
        series: name -> points; the name stands in the legend.
        log_x: logarithmic horizontal axis.
        log_y: logarithmic vertical axis.
        lines: join the points of a series.
        diagonal: draw y = x; both axes then have the same range.

    Raises:
        ValueError: there is no point to draw.
    """
    points = [point for values in series.values() for point in values]
    if not points:
        raise ValueError(f"chart {title!r}: there is no point to draw")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if diagonal:
        xs = ys = xs + ys
    x_at, x_ticks = _axis(xs, log_x, LEFT, WIDTH - RIGHT)
    y_at, y_ticks = _axis(ys, log_y, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for tick in x_ticks:
        x = x_at(tick)
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        y = y_at(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle_x:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text transform="translate(16 {middle_y:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    if diagonal:
        low, high = min(xs), max(xs)
        path = f"M{x_at(low):.1f} {y_at(low):.1f}L{x_at(high):.1f} {y_at(high):.1f}"
        parts.append(f'<path d="{path}" stroke="#a3a3a3" stroke-dasharray="4 3"/>')
    for index, (name, values) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        placed = [(x_at(x), y_at(y)) for x, y in values]
        if lines and placed:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.7"/>' for x, y in placed]
        y = TOP + 14 + 18 * index
        parts.append(f'<circle cx="{WIDTH - RIGHT + 16}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 26}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axis(values: Sequence[float], log: bool, start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Position of a value on an axis from ``start`` to ``end``, and where the ticks are."""
    low, high = min(values), max(values)
    if log:
        low, high = low / 1.15, high * 1.15
        span = math.log(high / low)
        steps = [m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)]
        return lambda v: start + (end - start) * math.log(v / low) / span, [s for s in steps if low <= s <= high]
    low, high = min(0.0, low), high * 1.05 or 1.0
    step = _round_step((high - low) / 6)
    ticks = [low + step * i for i in range(int((high - low) / step) + 1)]
    return lambda v: start + (end - start) * (v - low) / (high - low), ticks


def _round_step(step: float) -> float:
    size = 10.0 ** math.floor(math.log10(step))
    return next(size * m for m in (1, 2, 5, 10) if size * m >= step)
