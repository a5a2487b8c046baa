"""Counts, bytes, rates and times as people write and read them. Decimal prefixes are powers of 1000, ``Ki`` ones of 1024."""

from __future__ import annotations

import re
from collections.abc import Mapping

from deepthin.engine.errors import UsageError

MAX_VALUE = 1 << 63
_COUNT = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTES = {"": 1, **{p + "b": 1000**i for i, p in enumerate(("", "k", "m", "g", "t"))}}
_BYTES |= {p + "ib": 1024**i for i, p in enumerate(("", "k", "m", "g", "t")) if i}
_NUMBER = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_count(text: str) -> int:
    """A number of parameters or tokens: ``30M``, ``100k``, ``1.5B``, ``134515008``.

    Raises:
        UsageError: not a number with a known suffix, below 1, or above 2^63.
    """
    return _scaled(text, _COUNT, "a count such as 30M, 100k, 1.5B or 49152")


def parse_bytes(text: str) -> int:
    """A number of bytes: ``90MB`` (10^6), ``64MiB`` (2^20), ``94371840``.

    Raises:
        UsageError: not a number with a known suffix, below 1, or above 2^63.
    """
    return _scaled(text, _BYTES, "bytes such as 90MB, 64MiB or 94371840")


def parse_bandwidth(text: str) -> int:
    """Bytes per second: ``50GB/s``, ``15.1TB/s``.

    Raises:
        UsageError: not bytes followed by ``/s``.
    """
    if not text.strip().endswith("/s"):
        raise UsageError(f"{text!r} is no bandwidth; write bytes per second such as 50GB/s or 15.1TB/s")
    return parse_bytes(text.strip()[:-2])


def parse_counts(text: str) -> list[int]:
    """Counts separated by commas.

    Raises:
        UsageError: as :func:`parse_count`.
    """
    return [parse_count(part) for part in text.split(",")]


def count_text(count: float) -> str:
    """``count`` with four figures and a decimal suffix: 134515008 is ``134.5M``."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit * 0.99995:
            return f"{count / limit:.4g}{suffix}"
    return f"{count:.4g}"


def bytes_text(count: float) -> str:
    """``count`` bytes with a decimal suffix: 90000000 is ``90.0 MB``."""
    for limit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= limit * 0.99995:
            return f"{count / limit:.1f} {suffix}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """``seconds`` in the unit that keeps three figures in front: 0.00256 is ``2.56 ms``."""
    for limit, factor, suffix in ((1.0, 1, "s"), (1e-3, 1e3, "ms"), (1e-6, 1e6, "us")):
        if seconds >= limit * 0.9995:
            return f"{seconds * factor:.3g} {suffix}"
    return f"{seconds * 1e9:.3g} ns"


def _scaled(text: str, units: Mapping[str, float], wanted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise UsageError(f"{text!r} is not understood; write {wanted}")
    exact = float(match[1]) * units[match[2].lower()]
    if exact > MAX_VALUE:  # infinity too
        raise UsageError(f"{text!r} is above 2^63, more than anything can hold; write {wanted}")
    value = round(exact)
    if value < 1:
        raise UsageError(f"{text!r} is below 1; write {wanted}")
    return value
