"""The argument parser all subcommands share: one-line errors instead of usage dumps, options that every command has."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from deepthin.engine.errors import UsageError

T = TypeVar("T")
N = TypeVar("N", int, float)

SOURCE_HELP = (
    "a shape text (L=30,d=576,heads=9,kv=3,ff=1536,vocab=49152,tied), a public shape's name (smollm2-135m), "
    "a shape JSON file, a GGUF file, a Hugging Face folder, or a folder written by deepthin export"
)


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are :class:`UsageError` with a hint at ``--help``; no abbreviated options."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and exiting.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{message}; see {self.prog} --help")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as an argparse type that keeps the message of its :class:`UsageError`."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def whole(low: int, high: int = 1 << 31) -> Callable[[str], int]:
    """An argparse type for whole numbers from ``low`` to ``high``."""
    return _within(int, "whole number", low, high)


def real(low: float, high: float) -> Callable[[str], float]:
    """An argparse type for numbers from ``low`` to ``high``."""
    return _within(float, "number", low, high)


def _within(convert: Callable[[str], N], kind: str, low: N, high: N) -> Callable[[str], N]:
    def parse(text: str) -> N:
        try:
            value = convert(text)
        except ValueError:
            raise UsageError(f"{text!r} is no {kind}") from None
        if not low <= value <= high:  # NaN is outside too
            raise UsageError(f"{text} is outside {low} to {high}")
        return value

    return argument(parse)


def one_of(*names: str) -> Callable[[str], list[str]]:
    """An argparse type for names separated by commas, each one of ``names``; order kept, repeats dropped."""

    def parse(text: str) -> list[str]:
        found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        wrong = [name for name in found if name not in names]
        if wrong or not found:
            raise UsageError(f"{wrong[0] if wrong else text!r} is unknown; use one or more of {', '.join(names)}")
        return found

    return argument(parse)


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of every subcommand."""
    group = parser.add_argument_group("common options")
    group.add_argument("--json", action="store_true", help="print exactly one JSON document on standard output")
    group.add_argument("--config", type=Path, metavar="FILE.toml", help="take options from a TOML file; flags here win")
    group.add_argument("--quiet", action="store_true", help="no progress on standard error")
    group.add_argument("--debug", action="store_true", help="show a traceback when something fails")


def add_source(parser: argparse.ArgumentParser) -> None:
    """The positional SOURCE."""
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
