"""Plain aligned tables for terminals: no colour, no box lines, numbers to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1, indent: str = "") -> str:
    """Rows under ``headers``, columns two blanks apart; the first ``left`` columns are flush left, the others flush right."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return (indent + "  ".join(parts)).rstrip()

    return "\n".join([line(cells[0]), indent + "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> str:
    """The same as a Markdown table."""
    cells = [list(headers), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    rule = ["---" if column < left else "---:" for column in range(len(headers))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:]))
