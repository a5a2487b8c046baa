"""A peer runtime in a process of its own: JSON lines over private pipes, a deadline, and death as an ordinary error.

Runs in both processes. The parent makes a :class:`Child`; the child is ``python -m deepthin.engine.child MODULE DIR``, imports
MODULE and answers calls to the functions in its ``METHODS: dict[str, Callable[..., dict]]``. Arrays travel as ``.npy`` files in
DIR, a private temporary folder; nothing is pickled. Knows nothing of models or of any particular peer.

The child keeps the two pipes under new numbers and points the ordinary standard output at standard error, so whatever a C
library prints lands in the captured tail and never between the replies.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn, Self

import numpy as np

from deepthin.engine.errors import PeerError, PeerMissingError

TAIL_BYTES = 16384  # of the peer's output kept for messages
_MESSAGE_CHARS = 400  # of one line quoted in an error
_ARRAY_KEY = "$npy"  # a JSON object with this single key stands for an array


class Child:
    """A persistent child process serving calls to the ``METHODS`` of one module.

    Args:
        module: importable module name, such as ``deepthin.export.peer_llama_cpp``.
        deadline_s: seconds for the start and, unless a call says otherwise, for each call; then the child is killed.
        peer: name used in messages; the module's own name without ``peer_`` when absent.
        env: environment variables set in the child on top of this process's own.

    Raises:
        PeerMissingError: a package that the module imports is not installed.
        PeerError: the child died or missed its deadline while starting.
    """

    def __init__(
        self, module: str, *, deadline_s: float = 120.0, peer: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.peer = peer or module.rpartition(".")[2].removeprefix("peer_")
        self.deadline_s = deadline_s
        self._why_gone = ""
        self._next_id = 0
        self._tail = bytearray()
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._folder = Path(tempfile.mkdtemp(prefix="deepthin-child-"))
        command = [sys.executable, "-P", "-u", "-m", "deepthin.engine.child", module, str(self._folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(  # its own session: Ctrl-C reaches us alone, and we end the whole group
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=_environment(env or {}), start_new_session=True
        )
        stdout, stderr = self._process.stdout, self._process.stderr
        assert stdout is not None and stderr is not None, "Bug: Popen was asked for pipes"
        self._threads = [
            threading.Thread(target=_read_replies, args=(stdout, self._replies), daemon=True),
            threading.Thread(target=_read_tail, args=(stderr, self._tail), daemon=True),
        ]
        self._finalizer = weakref.finalize(self, _finish, self._process, self._threads, self._folder, 0.0)
        for thread in self._threads:
            thread.start()
        try:
            self._wait_for_reply(0, "start", time.monotonic() + deadline_s)
        except BaseException:
            self._finalizer()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child, dead or alive."""
        return self._process.pid

    @property
    def tail(self) -> str:
        """The last of what the peer printed, at most :data:`TAIL_BYTES` bytes."""
        return self._tail.decode("utf-8", "replace")

    def call(self, method: str, *, deadline_s: float | None = None, **params: Any) -> dict[str, Any]:
        """Run ``METHODS[method](**params)`` in the child and return its dict; arrays on both sides are NumPy arrays.

        Raises:
            PeerMissingError: a package that the method imports is not installed.
            PeerError: the method raised, the child died, or the deadline passed (the child is then killed).
        """
        if self._why_gone:
            raise PeerError(f"{self.peer}: cannot {method}, because its process is gone ({self._why_gone})")
        self._next_id += 1
        end = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        request = {"id": self._next_id, "method": method, "params": _pack(params, self._folder, f"call{self._next_id}")}
        pipe = self._process.stdin
        assert pipe is not None, "Bug: Popen was asked for pipes"
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
        except (BrokenPipeError, OSError, ValueError):
            self._raise_dead(method)
        return self._wait_for_reply(self._next_id, method, end)

    def close(self) -> None:
        """End the child, wait for it, and remove its folder; calling twice is fine."""
        self._why_gone = self._why_gone or "it was closed"
        if self._finalizer.detach():
            _finish(self._process, self._threads, self._folder, 2.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_reply(self, wanted: int, method: str, end: float) -> dict[str, Any]:
        while True:
            try:
                line = self._replies.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self._raise_late(method)
            if line is None:
                self._raise_dead(method)
            reply = json.loads(line)
            if reply["id"] == wanted:  # others answer calls that an exception on our side cut short
                break
        if "missing" in reply:
            raise PeerMissingError(f"{self.peer} is not installed: {reply['missing']}")
        if "error" in reply:
            raise PeerError(f"{self.peer}: {method} failed: {reply['error']}")
        result = _unpack(reply["result"], self._folder)
        assert isinstance(result, dict), "Bug: the child replies with dicts only"
        return result

    def _raise_late(self, method: str) -> NoReturn:
        self._why_gone = "it missed its deadline and was killed"
        self._finalizer()
        raise PeerError(f"{self.peer}: {method} did not finish before its deadline and was killed{self._last_words()}")

    def _raise_dead(self, method: str) -> NoReturn:
        for thread in self._threads:
            thread.join(timeout=1.0)  # the tail is complete once its pipe is at the end
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        self._why_gone = _how_it_ended(self._process.poll())
        self._finalizer()
        raise PeerError(f"{self.peer}: {method} ended its process: {self._why_gone}{self._last_words()}")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.tail.splitlines() if line.strip()]
        telling = [line for line in lines if any(word in line.lower() for word in ("assert", "error", "fail", "abort"))]
        words = (telling or lines)[-1:]
        return f"; it last said: {words[0][:_MESSAGE_CHARS]}" if words else ""


def serve(module_name: str, folder: Path) -> NoReturn:
    """The child's main loop: import the module, then answer one request line after another until the pipe ends."""
    requests_in, replies_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _forbid_core_files()
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A thread of its own reads, so that the end of the parent ends this process at once, even inside a long call.
    threading.Thread(target=_read_requests, args=(requests_in, requests), daemon=True).start()
    methods: dict[str, Any] = {}

    def start() -> dict[str, Any]:
        methods.update(import_module(module_name).METHODS)
        return {}

    request: dict[str, Any] = {"id": 0}
    reply = _answer(start, {})
    while True:
        if "result" in reply:
            reply["result"] = _pack(reply["result"], folder, f"reply{request['id']}")
        replies_out.write(json.dumps({"id": request["id"], **reply}).encode() + b"\n")
        replies_out.flush()
        request = json.loads(requests.get())
        method = methods.get(request["method"])
        if method is None:
            reply = {"error": f"there is no method {request['method']!r}; the methods are {', '.join(sorted(methods))}"}
        else:
            reply = _answer(method, _unpack(request["params"], folder))


def _answer(function: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    try:
        result = function(**params)
        if not isinstance(result, dict):
            return {"error": f"it returned {type(result).__name__}, but a dict is needed"}
        json.dumps(result, default=_json_stand_in)
    except ModuleNotFoundError as error:  # any other ImportError means installed but broken: a failure, not an absence
        own = (error.name or "").partition(".")[0] == "deepthin"
        return {"error" if own else "missing": _one_line(error)}
    except Exception as error:
        return {"error": _one_line(error)}
    return {"result": result}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_MESSAGE_CHARS]


def _json_stand_in(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return None
    raise TypeError(f"a {type(value).__name__} in the result is neither JSON nor an array of numbers")


def _pack(value: Any, folder: Path, stem: str) -> Any:
    """``value`` with each array saved to ``folder`` and replaced by a JSON object that names the file."""
    if isinstance(value, np.ndarray):
        name = f"{stem}.npy"
        np.save(folder / name, value, allow_pickle=False)
        return {_ARRAY_KEY: name}
    if isinstance(value, dict):
        return {key: _pack(item, folder, f"{stem}-{index}") for index, (key, item) in enumerate(value.items())}
    if isinstance(value, (list, tuple)):
        return [_pack(item, folder, f"{stem}-{index}") for index, item in enumerate(value)]
    return value


def _unpack(value: Any, folder: Path) -> Any:
    """The inverse of :func:`_pack`; each array's file is removed."""
    if isinstance(value, dict):
        if set(value) == {_ARRAY_KEY}:
            path = folder / Path(value[_ARRAY_KEY]).name  # whatever it says, only files of this folder are read
            array = np.load(path, allow_pickle=False)
            path.unlink()
            return array
        return {key: _unpack(item, folder) for key, item in value.items()}
    return [_unpack(item, folder) for item in value] if isinstance(value, list) else value


def _read_requests(pipe: IO[bytes], requests: queue.SimpleQueue[bytes]) -> None:
    for line in pipe:
        requests.put(line)
    os._exit(0)  # the parent closed the pipe or died; nothing here is worth a destructor


def _read_replies(pipe: IO[bytes], replies: queue.SimpleQueue[bytes | None]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in pipe:
            if line.endswith(b"\n"):  # a line without its end was cut off by death
                replies.put(line)
    replies.put(None)


def _read_tail(pipe: IO[bytes], tail: bytearray) -> None:
    with contextlib.suppress(ValueError, OSError):
        while piece := os.read(pipe.fileno(), 65536):
            tail += piece
            del tail[:-TAIL_BYTES]


def _finish(process: subprocess.Popen[bytes], threads: list[threading.Thread], folder: Path, patience_s: float) -> None:
    """Close the child's input, wait ``patience_s`` for it to leave, else kill it; reap it, and remove its folder."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(timeout=patience_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()
    for thread in threads:
        if thread.ident is not None:
            thread.join(timeout=1.0)
    for pipe, thread in zip((process.stdout, process.stderr), threads, strict=True):
        if pipe is not None and not thread.is_alive():
            pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        else:
            process.kill()


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its pipe but would not end"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}" if code < 256 else f"exit code {code:#x}"


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Our environment, plus what lets the child find the same deepthin when it is run from a checkout."""
    env = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONIOENCODING": "utf-8", **extra}
    root = Path(__file__).parents[2]  # holds the deepthin folder
    if root.name not in ("site-packages", "dist-packages"):  # those are found anyway, after the standard library
        env["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [env.get("PYTHONPATH")])])
    return env


def _forbid_core_files() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
