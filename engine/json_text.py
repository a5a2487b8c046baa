"""JSON from files nobody vouches for: bounded, no duplicate keys, no NaN, and one kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from deepthin.engine.errors import FormatError


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``raw``; ``where`` begins every message.

    Raises:
        FormatError: it is no UTF-8, no JSON, nested too deeply, holds a key twice or NaN, or is no object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise FormatError(f"{where}: key {key[:80]!r} appears twice; keys must be unique")
                seen.add(key)
        return out

    def no_constant(text: str) -> NoReturn:
        raise FormatError(f"{where}: it holds {text}, which is no JSON number")

    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: it is not UTF-8 at byte {error.start}; is it damaged?") from None
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{where}: it is not JSON ({error.msg} at character {error.pos}); is it damaged or cut short?"
        ) from None
    except RecursionError:
        raise FormatError(f"{where}: its JSON is nested too deeply to be a model's") from None
    except ValueError:  # an integer of thousands of digits
        raise FormatError(f"{where}: it holds a number that is too long to be meant") from None
    if not isinstance(document, dict):
        raise FormatError(f"{where}: a JSON object is needed, but it holds a {type(document).__name__}")
    return document


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the file ``path``, which may be ``max_bytes`` long.

    Raises:
        FormatError: as :func:`parse_json_object`, or the file is longer.
        OSError: it cannot be opened.
    """
    with path.open("rb") as handle:
        size = handle.seek(0, 2)
        if size > max_bytes:
            raise FormatError(f"{path}: it has {size} bytes, too many for what it should be; at most {max_bytes} are read")
        handle.seek(0)
        raw = handle.read(size)
    return parse_json_object(raw, str(path))
