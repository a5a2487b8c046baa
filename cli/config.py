"""Options from a TOML file: ``--config run.toml``. Values become defaults, so flags on the command line win.

Keys are the long options without dashes in front (``max-kv-mb = 20``, or ``max_kv_mb``). They stand at the top level, or in a
table named after the command (``[search]``); tables of other commands are skipped, any other key must be an option.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from deepthin.engine.errors import UsageError

MAX_CONFIG_BYTES = 1 << 20


def apply_config(path: Path, command: str, parser: argparse.ArgumentParser, known: set[str]) -> None:
    """Turn the options of ``path`` for ``command`` into defaults of ``parser``.

    Args:
        path: the TOML file.
        command: the subcommand being run.
        parser: that subcommand's parser.
        known: names of all subcommands, which may stand as tables.

    Raises:
        UsageError: the file is unreadable, no TOML, or holds a key or value that does not fit.
    """
    settings = _read(path)
    options = {option: action for action in parser._actions for option in action.option_strings}
    own = settings.pop(command, {})
    if not isinstance(own, dict):
        raise UsageError(f"{path}: {command} is {own!r}, but a table [{command}] with options is needed")
    for key in [key for key, value in settings.items() if isinstance(value, dict)]:
        if key not in known:
            raise UsageError(f"{path}: table [{key}] is named after no command; the commands are {', '.join(sorted(known))}")
        del settings[key]
    for key, value in [*settings.items(), *own.items()]:
        action = options.get("--" + key.replace("_", "-"))
        if action is None or action.dest in ("config", "help"):
            names = sorted(option[2:] for option in options if option.startswith("--") and option not in ("--help", "--config"))
            raise UsageError(f"{path}: {key!r} is no option of {command}; its options are {', '.join(names)}")
        parser.set_defaults(**{action.dest: _converted(path, key, value, action)})
        action.required = False


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UsageError(f"{path}: over {MAX_CONFIG_BYTES} bytes, which no configuration needs; is this the right file?")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); --config takes a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is no TOML ({error})") from error


def _converted(path: Path, key: str, value: Any, action: argparse.Action) -> Any:
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise UsageError(f"{path}: {key} is {value!r}, but a switch takes true or false")
        return value if action.const else not value
    if isinstance(value, list):
        value = ",".join(str(item) for item in value)
    if isinstance(value, bool | dict) or not isinstance(value, str | int | float):
        raise UsageError(f"{path}: {key} is {value!r}, but a number or a text is needed")
    convert = action.type if callable(action.type) else str
    try:
        converted = convert(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{path}: {key} is {value!r}: {error}") from error
    if action.choices is not None and converted not in action.choices:
        raise UsageError(f"{path}: {key} is {value!r}, but one of {', '.join(map(str, action.choices))} is needed")
    return converted
