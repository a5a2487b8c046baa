import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepthin.engine.child import TAIL_BYTES, Child
from deepthin.engine.errors import PeerError, PeerMissingError

PEER = """
import ctypes, os, sys, time
import numpy as np

def echo(**params): return params
def twice(values): return {"values": values * 2, "nested": [{"first": values[:1]}], "pid": os.getpid()}
def chatter(count):
    print("{}garbage, not JSON" * count)
    os.write(1, b'{"id": 1, "result": {"forged": true}}' + bytes([10]))
    sys.stderr.write("x" * count + "end of chatter" + chr(10))
    return {"said": count}
def die(how):
    os.write(2, b"GGML_ASSERT(n_head % n_head_kv == 0) failed" + bytes([10]))
    if how == "abort": os.abort()
    if how == "segfault": ctypes.string_at(0)
    if how == "exit": sys.exit(7)
def hang(): time.sleep(600)
def spawn_and_hang():
    import subprocess
    print("grandchild", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
    time.sleep(600)
def wrong(): raise ValueError("first line" + chr(10) + "second line")
def bad_result(): return {"objects": np.array([object()], dtype=object)}
def not_a_dict(): return 3
def needs_package(): import package_that_nobody_has
def settings(): return {"stdin": sys.stdin.read(), "marker": os.environ["DEEPTHIN_TEST_MARKER"]}

def broken_package(): raise ImportError("libpeer.so: cannot open shared object file")

METHODS = {name: value for name, value in list(globals().items()) if callable(value)}
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "peer_fake.py").write_text(PEER)
    (tmp_path / "peer_absent.py").write_text("import package_that_nobody_has\nMETHODS = {}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "peer_fake"


@pytest.fixture
def child(peer: str) -> Iterator[Child]:
    with Child(peer, deadline_s=60.0, env={"DEEPTHIN_TEST_MARKER": "here"}) as running:
        yield running


def assert_gone(pid: int) -> None:
    """No process has this id any more: neither running nor waiting to be reaped."""
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_process_serves_many_calls(child: Child) -> None:
    sent: dict[str, Any] = {"number": 1.5, "text": "é\n", "list": [1, None, True], "nested": {"key": [2]}}
    assert child.call("echo", **sent) == sent
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(3):
        answer = child.call("twice", values=values)
        np.testing.assert_array_equal(answer["values"], values * 2)
        np.testing.assert_array_equal(answer["nested"][0]["first"], values[:1])
        assert answer["values"].dtype == np.float32
        assert answer["pid"] == child.pid != os.getpid()
    assert list(child._folder.iterdir()) == []


def test_environment_and_input_of_the_peer(child: Child) -> None:
    assert child.call("settings") == {"stdin": "", "marker": "here"}


def test_what_the_peer_prints_stays_between_it_and_the_tail(child: Child) -> None:
    assert child.call("chatter", count=200_000) == {"said": 200_000}
    assert child.call("echo", still="in step") == {"still": "in step"}
    deadline = time.monotonic() + 10
    while not child.tail.endswith("end of chatter\n") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.tail.endswith("xend of chatter\n")
    assert len(child.tail) <= TAIL_BYTES


@pytest.mark.parametrize(("how", "said"), [("abort", "SIGABRT"), ("segfault", "SIGSEGV"), ("exit", "exit code 7")])
def test_death_is_one_line(child: Child, how: str, said: str) -> None:
    with pytest.raises(PeerError) as caught:
        child.call("die", how=how)
    message = str(caught.value)
    assert message.startswith("fake: die ended its process") and said in message and "\n" not in message
    assert "GGML_ASSERT(n_head % n_head_kv == 0) failed" in message
    assert_gone(child.pid)
    with pytest.raises(PeerError, match=f"process is gone .*{said}"):
        child.call("echo")


def test_deadline_is_enforced_by_killing(child: Child) -> None:
    began = time.monotonic()
    with pytest.raises(PeerError, match="hang did not finish before its deadline and was killed"):
        child.call("hang", deadline_s=0.2)
    assert time.monotonic() - began < 20
    assert_gone(child.pid)
    with pytest.raises(PeerError, match=r"gone .it missed its deadline"):
        child.call("echo")


def test_deadline_takes_grandchildren_along(child: Child) -> None:
    with pytest.raises(PeerError, match="deadline"):
        child.call("spawn_and_hang", deadline_s=3.0)
    grandchild = int(child.tail.split("grandchild ")[1].split()[0])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _is_running(grandchild):
        time.sleep(0.05)
    assert not _is_running(grandchild)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # an orphan may wait for init to reap it
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("wrong", "fake: wrong failed: ValueError: first line second line"),
        ("bad_result", "bad_result failed: TypeError: a ndarray in the result"),
        ("not_a_dict", "not_a_dict failed: it returned int, but a dict is needed"),
        ("broken_package", "broken_package failed: ImportError: libpeer.so: cannot open"),
        ("unknown", "there is no method 'unknown'; the methods are bad_result, broken_package, "),
    ],
)
def test_an_error_leaves_the_child_serving(child: Child, method: str, message: str) -> None:
    with pytest.raises(PeerError, match=message) as caught:
        child.call(method)
    assert not isinstance(caught.value, PeerMissingError)
    assert child.call("echo", a=1) == {"a": 1}


def test_missing_package_in_a_method(child: Child) -> None:
    with pytest.raises(PeerMissingError, match=r"fake is not installed: .*package_that_nobody_has"):
        child.call("needs_package")


def test_missing_package_at_start(peer: str) -> None:
    with pytest.raises(PeerMissingError, match=r"llama\.cpp is not installed: .*package_that_nobody_has"):
        Child("peer_absent", peer="llama.cpp", deadline_s=60.0)


def test_our_own_broken_module_is_not_called_missing() -> None:
    with pytest.raises(PeerError, match=r"start failed: .*deepthin.no_such_module") as caught:
        Child("deepthin.no_such_module", deadline_s=60.0)
    assert not isinstance(caught.value, PeerMissingError)


def test_start_has_a_deadline_too(peer: str) -> None:
    with pytest.raises(PeerError, match="start did not finish before its deadline"):
        Child(peer, deadline_s=0.0)


def test_close_reaps_and_removes(peer: str) -> None:
    running = Child(peer, deadline_s=60.0)
    folder, pid = running._folder, running.pid
    assert folder.is_dir()
    running.close()
    running.close()
    assert_gone(pid)
    assert not folder.exists()
    with pytest.raises(PeerError, match="it was closed"):
        running.call("echo")


def test_forgotten_child_is_ended_with_its_object(peer: str) -> None:
    running = Child(peer, deadline_s=60.0)
    pid = running.pid
    del running
    assert_gone(pid)


def test_late_answer_of_an_interrupted_call_is_not_taken_for_the_next(child: Child) -> None:
    child._process.stdin.write(b'{"id": 99, "method": "echo", "params": {"who": "interrupted"}}\n')  # type: ignore[union-attr]
    assert child.call("echo", who="next") == {"who": "next"}
