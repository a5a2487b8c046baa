"""Lists of numbers as llama-bench takes them: ``512``, ``128,256``, ``1-4``, ``0-4096+1024``, ``128-2048*2``; and of pairs."""

from __future__ import annotations

import itertools
import re

from deepthin.engine.errors import UsageError

MAX_NUMBERS = 1000  # also the most pairs
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")


def parse_ranges(text: str, *, low: int, high: int) -> tuple[int, ...]:
    """The numbers of ``text``, in order.

    Raises:
        UsageError: no list or range, a range that does not grow or has too many numbers, or a number out of bounds.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{part!r} is not understood; write numbers such as 512, 128,256, 0-4096+1024 or 128-2048*2")
        first = int(match[1])
        last = int(match[2] or first)
        step = int(match[4] or 1)
        number = first
        while number <= last:
            if not low <= number <= high:
                raise UsageError(f"{part!r} is {'below' if number < low else 'above'} {low if number < low else high}")
            if len(found) == MAX_NUMBERS:
                raise UsageError(f"{text!r} are more than {MAX_NUMBERS} numbers; take a larger step")
            found.append(number)
            following = number * step if match[3] == "*" else number + step
            if following <= number:
                raise UsageError(f"{part!r} never ends; give a step that grows")
            number = following
        if last < first:
            raise UsageError(f"{part!r} holds no number; the second one is the last, so it cannot be smaller")
    return tuple(found)


def parse_pairs(text: str, *, low: int, high: int) -> tuple[tuple[int, int], ...]:
    """The pairs of ``text``, two items each (``512,128`` or ``512,128,64,16``); a range in either gives every combination.

    Raises:
        UsageError: an odd number of items, or what :func:`parse_ranges` refuses.
    """
    parts = text.split(",")
    if len(parts) % 2:
        raise UsageError(f"{text!r} is no list of pairs; write a prompt and what follows it, such as 512,128")
    sides = [parse_ranges(part, low=low, high=high) for part in parts]
    found = [pair for first, second in zip(sides[::2], sides[1::2], strict=True) for pair in itertools.product(first, second)]
    if len(found) > MAX_NUMBERS:
        raise UsageError(f"{text!r} are more than {MAX_NUMBERS} pairs; take larger steps")
    return tuple(found)
