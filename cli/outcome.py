"""What a subcommand hands back: one JSON body, one text for people, one exit code. Printing is ``main``'s business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one command.

    Attributes:
        kind: names the JSON schema, ``deepthin/<kind>/1``.
        body: the document without its envelope.
        text: what is printed without ``--json``; empty when everything has been printed already.
        exit_code: 0 done, 3 nothing feasible, 4 verification failed.
    """

    kind: str
    body: Mapping[str, Any]
    text: str
    exit_code: int = 0
