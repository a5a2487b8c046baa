"""Public tables that stand beside the repository, not in it: their licences or their size keep them out of the package."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def shared_folder() -> Path:
    """``../shared/data``; the test is skipped where that folder does not stand beside the repository."""
    if not FOLDER.is_dir():
        pytest.skip("the folder ../shared/data with the public tables is absent")
    return FOLDER


def shared_rows(name: str) -> list[dict[str, str]]:
    """Rows of ``name`` in ``../shared/data``, or a skip."""
    with (shared_folder() / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))
