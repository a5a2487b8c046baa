"""genai as a contestant, where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepthin.cli.bench import write_genai_for_timing
from deepthin.engine.reference import Reference
from deepthin.profiles.contestants import Peer
from tests.support.tiny_models import PROMPT, lively_model, tiny_shape

pytest.importorskip("onnxruntime_genai", reason="the extra interop is not installed")
pytestmark = pytest.mark.interop


@pytest.mark.parametrize("name", ["plain", "rotary_apart", "narrow_heads"])
def test_logits_times_and_a_cache_that_goes_back(name: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name))
    write_genai_for_timing(model, tmp_path / "genai")
    peer = Peer("genai", tmp_path / "genai", 1, 24)
    try:
        want = Reference(model.shape, model.dequantized()).logits(list(PROMPT))
        for before in (0, 5, 5, 3):
            found = peer.logits(PROMPT[before:], PROMPT[:before])
            assert np.square(found - want[before:]).sum() / np.square(want[before:]).sum() < 1e-10
        assert peer.prompt(PROMPT[5:], PROMPT[:5]) > 0 and peer.decode(PROMPT, ()) > 0
        assert peer.answer(PROMPT[:5], PROMPT[5:], ()) > 0 and peer.version
        again = peer.logits(PROMPT, ())
        assert np.square(again - want).sum() / np.square(want).sum() < 1e-10
    finally:
        peer.close()
