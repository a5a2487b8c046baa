"""Every runtime that a bundle is for, started once for all tests; where one is missing a test is skipped, or fails.

``DEEPTHIN_REQUIRE_INTEROP`` lists the runtimes that must be there (comma-separated, or ``all``); ``.ci/run`` sets it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import pytest

from deepthin.engine.child import Child
from deepthin.engine.errors import PeerMissingError
from deepthin.export.transformersjs_folder import file_name
from tests.support.chromium import ChromiumPeer

REQUIRED_VARIABLE = "DEEPTHIN_REQUIRE_INTEROP"
_ROOT = Path(__file__).parents[2]
_CHILDREN = {
    "onnxruntime": "deepthin.export.peer_onnxruntime",
    "llama.cpp": "deepthin.export.peer_llama_cpp",
    "genai": "deepthin.export.peer_genai",
    "transformers.js": "deepthin.export.peer_transformersjs",
    "transformers": "tests.support.peer_transformers",
}
RUNTIMES = (*_CHILDREN, "chromium")


class Peer(Protocol):
    """What :class:`Child` and :class:`ChromiumPeer` have in common."""

    peer: str

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a method of the peer."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Runtimes:
    """Peers by name, started when first asked for and kept."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._running: dict[str, Peer] = {}

    def __getitem__(self, name: str) -> Peer:
        """The peer ``name``; skips or fails the test when it is not installed."""
        if name not in self._running:
            try:
                self._running[name] = _start(name)
            except PeerMissingError as error:
                missing(name, str(error))
        return self._running[name]

    def close(self) -> None:
        """End all."""
        for peer in self._running.values():
            peer.close()


def missing(name: str, why: str) -> NoReturn:
    """End the test: ``name`` is not there, for the reason ``why``."""
    required = os.environ.get(REQUIRED_VARIABLE, "")
    if required == "all" or name in required.split(","):
        pytest.fail(f"{why}, but {REQUIRED_VARIABLE}={required} wants it to run", pytrace=False)
    pytest.skip(why)


def file_for(name: str, bundle: Path, quant: str) -> Path:
    """What runtime ``name`` is given of ``bundle``, for weights stored as ``quant``."""
    if name == "transformers":
        return bundle / "hf"
    if name == "llama.cpp":
        return bundle / "gguf" / f"model-{quant}.gguf"
    if name in ("transformers.js", "chromium"):
        return bundle / "transformersjs" / "onnx" / file_name(quant)
    return bundle / "genai" / quant / "model.onnx"


def nmse(found: Any, wanted: Any) -> float:
    """Energy of the difference over the energy of ``wanted``, in float64."""
    exact = np.asarray(wanted, np.float64)
    return float(np.square(found - exact).sum() / np.square(exact).sum())


def _start(name: str) -> Peer:
    if name == "chromium":
        return ChromiumPeer()
    child = Child(_CHILDREN[name], peer=name, env={"PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1"})
    try:
        child.call("version")
    except BaseException:
        child.close()
        raise
    return child
