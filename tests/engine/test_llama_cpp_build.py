import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepthin.engine.child import Child
from deepthin.engine.errors import PeerError
from deepthin.engine.llama_cpp_build import REINSTALL, warn_of_amx

PEER = """
import ctypes
from deepthin.engine.llama_cpp_build import warn_of_amx

def load(info):
    warn_of_amx(info)
    print("llama_context: n_ctx = 512", flush=True)
    return {}
def prompt(): ctypes.string_at(0)

METHODS = {"load": load, "prompt": prompt}
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    (tmp_path / "peer_crashing.py").write_text(PEER)
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    with Child("peer_crashing", peer="llama.cpp") as made:
        yield made


@pytest.mark.parametrize(
    ("info", "is_told"), [("CPU : AVX2 = 1 | AMX_INT8 = 1 | REPACK = 1 |", True), ("CPU : AVX2 = 1 |", False)]
)
def test_a_crash_of_a_build_with_amx_says_how_to_reinstall(child: Child, info: str, is_told: bool) -> None:
    child.call("load", info=info)
    with pytest.raises(PeerError, match="prompt ended its process: killed by SIGSEGV") as caught:
        child.call("prompt")
    assert (REINSTALL in str(caught.value)) == is_told
    assert "\n" not in str(caught.value)


def test_builds_without_amx_are_not_spoken_of(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_amx("CPU : AVX512 = 1 | AMX_INT8 = 0 |")
    assert capsys.readouterr().err == ""
