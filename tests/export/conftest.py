"""What the tests of exports share: peers that stay alive from test to test, and a small bundle to tamper with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.model import Model
from deepthin.engine.shape import Shape
from deepthin.export import verify
from deepthin.export.bundle import export_bundle
from deepthin.export.runs import Runtime, make_runtime
from tests.support.bundles import quiet_model


class _Kept:
    """A runtime that is closed at the end of all tests only; starting a peer takes longer than a tiny model."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def close(self) -> None:
        """Not yet."""


@pytest.fixture(scope="session")
def keep_runtime() -> Iterator[Callable[..., Any]]:
    """``make_runtime``, but what it has made is given again."""
    made: dict[str, Any] = {}

    def make(name: str, *, deadline_s: float) -> Any:
        if name not in made:
            made[name] = _Kept(make_runtime(name, deadline_s=deadline_s))
        return made[name]

    yield make
    for runtime in made.values():
        runtime._runtime.close()


@pytest.fixture(autouse=True)
def _verify_keeps_its_peers(keep_runtime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "make_runtime", keep_runtime)


@pytest.fixture(scope="session")
def quiet() -> Model:
    """The model in ``bundle``."""
    return quiet_model(Shape.parse("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied,ctx=64"))


@pytest.fixture(scope="session")
def good_bundle(quiet: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that passes; not to be written to."""
    out = tmp_path_factory.mktemp("verify") / "good"
    export_bundle(quiet, out, targets=("hf", "transformersjs", "gguf"), quants=("f32", "q4_0"), accuracy_level=0, seed=0)
    return out


@pytest.fixture
def bundle(good_bundle: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    shutil.copytree(good_bundle, tmp_path / "bundle")
    return tmp_path / "bundle"
