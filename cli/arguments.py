"""The argument parser all subcommands share: one-line errors instead of usage dumps, options that every command has."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from deepthin.cli.output import write_out
from deepthin.engine.errors import FormatError, UsageError

MAX_CONTEXT = 1 << 22  # positions the engine can cache
OVERSUBSCRIPTION = 4  # threads per usable CPU beyond which a request is a mistake
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

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or version as all output is printed; argparse itself passes over what cannot be written."""
        write_out(message, end="")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as an argparse type that keeps the message of its :class:`UsageError`."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def parse_path(text: str) -> Path:
    """A path that names something; ``Path("")`` would be the current folder.

    Raises:
        UsageError: nothing but blanks, or a NUL.
    """
    if not text.strip() or "\0" in text:
        raise UsageError(f"{text!r} names no file or folder")
    return Path(text)


def require_out(path: Path, marker: str, ours: str, ignored: Collection[str] = ()) -> None:
    """Check, before anything slow, that ``path`` is absent, empty, or a folder of ours, which holds a file ``marker``.

    Raises:
        FormatError: it is a file, lies below one, or is a folder of something else.
    """
    nearest = next((item for item in (path, *path.parents) if item.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise FormatError(f"--out {path}: {nearest} is a file, but a folder is needed; name one that does not exist yet")
    strangers = sorted({item.name for item in path.iterdir()} - {*ignored}) if nearest == path else []
    if strangers and marker not in strangers:
        raise FormatError(
            f"--out {path}: is not empty and no {ours} (it holds {strangers[0]!r} but no {marker}); "
            f"name another --out, or an empty folder"
        )


def usable_cpus() -> int:
    """Number of CPUs this process may run on; as the engine counts them, without loading it."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def parse_threads(text: str) -> int:
    """A number of threads that makes sense here.

    Raises:
        UsageError: no whole number from 1 to four times the usable CPUs.
    """
    cpus = usable_cpus()
    hint = f"; {cpus} CPUs are usable here, so try --threads {cpus}"
    return parse_within(text, int, "whole number", 1, OVERSUBSCRIPTION * cpus, hint)


def context(low: int, high: int = MAX_CONTEXT) -> Callable[[str], int]:
    """An argparse type for cached tokens, up to ``high``: as many as the engine can cache."""
    hint = f"; try 2048, since this engine caches {MAX_CONTEXT} positions at most"
    return argument(lambda text: parse_within(text, int, "whole number", low, high, hint))


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An argparse type for values of ``parse`` separated by commas."""
    return argument(lambda text: [parse(part) for part in text.split(",")])


def whole(low: int, high: int = 1 << 31) -> Callable[[str], int]:
    """An argparse type for whole numbers from ``low`` to ``high``."""
    return argument(lambda text: parse_within(text, int, "whole number", low, high))


def real(low: float, high: float) -> Callable[[str], float]:
    """An argparse type for numbers from ``low`` to ``high``."""
    return argument(lambda text: parse_within(text, float, "number", low, high))


def parse_within(text: str, convert: Callable[[str], N], kind: str, low: N, high: N, hint: str = "") -> N:
    """A number from ``low`` to ``high``.

    Raises:
        UsageError: it is none; ``hint`` ends the message.
    """
    try:
        value = convert(text)
    except ValueError:
        raise UsageError(f"{text!r} is no {kind}{hint}") from None
    if not low <= value <= high:  # NaN is outside too
        raise UsageError(f"{text} is outside {low} to {high}{hint}")
    return value


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
    group.add_argument(
        "--config", type=argument(parse_path), metavar="FILE.toml", help="take options from a TOML file; flags here win"
    )
    group.add_argument("--quiet", action="store_true", help="no progress on standard error")
    group.add_argument("--debug", action="store_true", help="show a traceback when something fails")


def add_source(parser: argparse.ArgumentParser) -> None:
    """The positional SOURCE."""
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
