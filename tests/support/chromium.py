"""Headless Chromium on a page of ours, served on localhost: for running exported folders as a web page does.

The page gets the headers that shared memory, and so threads, need. Nothing but localhost is ever asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.engine.errors import PeerError, PeerMissingError
from deepthin.export.peer_transformersjs import FOLDER_VARIABLE, PACKAGE
from deepthin.export.schedule import best_token, pieces
from deepthin.export.transformersjs_folder import DTYPES, FILE_NAMES

_PAGE = Path(__file__).with_name("chromium_page.html")
_EXPORT = Path(__file__).parents[2] / "export"
_FLAGS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-default-browser-check"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
_TYPES = {".html": "text/html", ".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm"}


class PageServer:
    """Serves ``folders`` (by first part of the path) and the page ``/`` on a free port of localhost.

    Attributes:
        said: what the page has posted so far, in order.
        commands: what ``/next`` hands out, one JSON object each.
    """

    def __init__(self, page: bytes, folders: Mapping[str, Path]) -> None:
        """Start serving; ``folders`` may be changed later."""
        self.page, self.folders = page, dict(folders)
        self.said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.commands: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.failed: list[str] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._http.block_on_close = False  # a page may be waiting for its next command
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/"

    def found(self, path: str) -> Path | None:
        """The file behind ``path``, or None; never one outside the folders."""
        first, _, rest = path.partition("?")[0].lstrip("/").partition("/")
        if first not in self.folders:
            return None
        root = self.folders[first].resolve()
        file = (root / rest).resolve()
        return file if file.is_relative_to(root) and file.is_file() else None

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _handler(server: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/next":
                self._send(json.dumps(server.commands.get()).encode(), "application/json")
            elif self.path == "/":
                self._send(server.page, "text/html")
            elif (file := server.found(self.path)) is None:
                server.failed.append(self.path)
                self._head(404, 0, "text/plain")
            else:
                self._head(200, file.stat().st_size, _TYPES.get(file.suffix, "application/octet-stream"))
                if self.command == "HEAD":
                    return
                with file.open("rb") as source, contextlib.suppress(ConnectionError):
                    shutil.copyfileobj(source, self.wfile, 1 << 20)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            server.said.put(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(b"{}", "application/json")

        def _send(self, body: bytes, kind: str) -> None:
            self._head(200, len(body), kind)
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def _head(self, status: int, length: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class Chromium:
    """A browser with one page open, in a profile of its own that goes with it."""

    def __init__(self, url: str) -> None:
        """Open ``url``; raises PeerMissingError where there is no browser."""
        program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if program is None:
            raise PeerMissingError("chromium is not installed")
        self._profile = Path(tempfile.mkdtemp(prefix="deepthin-chromium-"))
        self._log = (self._profile / "log").open("wb")
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        flags = [*_FLAGS, *(["--no-sandbox"] if root else []), f"--user-data-dir={self._profile / 'data'}"]
        self._process = subprocess.Popen([program, *flags, url], stdout=self._log, stderr=self._log, start_new_session=True)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it and remove its profile."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._profile, ignore_errors=True)


class ChromiumPeer:
    """transformers.js in a page, called as :class:`deepthin.engine.child.Child` is."""

    peer = "chromium"

    def __init__(self, *, deadline_s: float = 120.0) -> None:
        """Open the page; raises PeerMissingError without Chromium or the npm package."""
        self._deadline_s = deadline_s
        self._server = PageServer(_PAGE.read_bytes(), {"node_modules": node_modules(), "export": _EXPORT})
        try:
            self._browser = Chromium(self._server.url)
        except PeerMissingError:
            self._server.close()
            raise

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One of version, load, unload, tokenize, logits and greedy, with the parameters of the other peers."""
        if method == "load":
            return self._load(Path(params["path"]), int(params.get("threads", 1)))
        if method not in ("logits", "greedy"):
            return self._ask(method, **params)[0]
        self._ask("clear")
        if method == "logits":
            return {"logits": np.concatenate([self._run(part) for part in pieces(params["ids"], params.get("schedule"))])}
        chosen, margins = [], []
        row = self._run(params["ids"])[-1]
        for _ in range(params["count"]):
            best, margin = best_token(row)
            chosen.append(best)
            margins.append(margin)
            row = self._run([best])[-1]
        return {"ids": chosen, "margins": margins}

    def close(self) -> None:
        """End the browser and the server."""
        self._browser.close()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, file: Path, threads: int) -> dict[str, Any]:
        self._server.folders["model"] = file.parent.parent
        quant = next((quant for quant, name in FILE_NAMES.items() if name == file.name), None)
        how = {"dtype": "fp32", "model_file_name": file.stem} if quant is None else {"dtype": DTYPES[quant]}
        return self._ask("load", folder="model", threads=threads, **how)[0]

    def _run(self, ids: Sequence[int]) -> F32:
        values = self._ask("run", ids=list(ids))[1]
        rows: F32 = np.frombuffer(values, "<f4").reshape(len(ids), -1)
        return rows

    def _ask(self, method: str, **params: Any) -> tuple[dict[str, Any], bytes]:
        self._server.commands.put({"method": method, **params})
        try:
            said = self._server.said.get(timeout=self._deadline_s)
        except queue.Empty:
            state = "is still running" if self._browser.alive else "has ended"
            lost = f"; not found: {self._server.failed}" if self._server.failed else ""
            raise PeerError(f"chromium: {method} did not finish; the browser {state}{lost}") from None
        line, _, values = said.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"chromium: {method} failed: {answer['error']}")
        return answer, values


def node_modules() -> Path:
    """``node_modules`` with transformers.js in it, found as the peer in Node finds it."""
    named = os.environ.get(FOLDER_VARIABLE)
    folders = [Path(named)] if named else [Path.cwd(), *Path.cwd().parents]
    for folder in folders:
        if (folder / "node_modules" / PACKAGE).is_dir():
            return folder / "node_modules"
    raise PeerMissingError(f"the npm package {PACKAGE} is not installed (npm install it, or set {FOLDER_VARIABLE})")
