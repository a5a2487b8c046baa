"""The JSON envelope that every document of the command line shares.

``{"schema": "deepthin/<kind>/1", "version", "created_utc", "machine", ...}``; times are UTC in ISO 8601 with seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from deepthin import __version__
from deepthin.engine.errors import DeepthinError

SCHEMA_VERSION = 1


def document(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """``body`` in its envelope; keys of the envelope win over keys of the body."""
    envelope = {
        "schema": f"deepthin/{kind}/{SCHEMA_VERSION}",
        "version": __version__,
        "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": _machine(),
    }
    return envelope | {key: value for key, value in body.items() if key not in envelope}


def error_document(error: DeepthinError) -> dict[str, Any]:
    """What ``--json`` prints when a command fails: kind, message and exit code of ``error``."""
    found = {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
    return document("error", {"error": found})


def to_text(document: Mapping[str, Any]) -> str:
    """``document`` as indented JSON; infinities and NaN are bugs here, not values."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def _machine() -> dict[str, Any]:
    from deepthin.profiles.machine import machine_record

    try:
        return machine_record()
    except DeepthinError as error:  # a wrong DEEPTHIN_SIMD must not hide the message it causes
        return {"unknown": str(error)}
