from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.runtimes import Runtimes


@pytest.fixture(scope="session")
def runtimes() -> Iterator[Runtimes]:
    """Every runtime that a bundle is for, started when a test first asks for it."""
    running = Runtimes()
    yield running
    running.close()
