"""Runs one model file in one runtime and returns its logits, phase by phase. Peers run in child processes, the engine here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from deepthin._version import VERSION
from deepthin.engine.arrays import F32
from deepthin.engine.child import Child
from deepthin.engine.errors import PeerError
from deepthin.export.contents import Contents, ModelFile
from deepthin.export.schedule import PHASES, phase_schedule, pieces

_ENGINE_THREADS = 4  # at most; the engine's output does not depend on it


class Runtime(Protocol):
    """One implementation of the decoder.

    Attributes:
        name: as shown and as taken by ``--runtimes``.
        key: its table in tolerances.toml.
        kinds: what it reads: kinds of file, or parts of a bundle.
    """

    name: str
    key: str
    kinds: tuple[str, ...]

    def version(self) -> str:
        """Its version; raises PeerMissingError when it is not installed and PeerError when it is broken."""
        ...

    def logits(self, root: Path, contents: Contents, ids: Sequence[int]) -> Iterator[tuple[str, F32]]:
        """(phase, logits f32 [S, V]) for each phase, from an empty cache each time."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class EngineRuntime:
    """This package's own decoder."""

    name = key = "engine"
    kinds: tuple[str, ...] = ("hf", "gguf")

    def version(self) -> str:
        """Version of this package."""
        return VERSION

    def logits(self, root: Path, contents: Contents, ids: Sequence[int]) -> Iterator[tuple[str, F32]]:
        """Logits of ``contents.model``; ``root`` is not read again."""
        from deepthin.engine.cores import default_threads
        from deepthin.engine.decoder import Decoder  # loads `numba`

        if contents.model is None:
            raise AssertionError(f"Bug: the engine was asked for {contents.file.path}")
        with Decoder(contents.model, threads=min(_ENGINE_THREADS, default_threads()), context=len(ids)) as decoder:
            for phase in PHASES:
                decoder.reset()
                parts = [np.array(decoder.logits(part)) for part in pieces(ids, phase_schedule(phase, len(ids)))]
                yield phase, np.concatenate(parts)

    def close(self) -> None:
        """Nothing is held between runs."""


class PeerRuntime:
    """A runtime behind :class:`~deepthin.engine.child.Child`; a new child replaces one that died."""

    def __init__(self, name: str, module: str, kinds: tuple[str, ...], *, deadline_s: float) -> None:
        """Remember how to start it; nothing runs yet."""
        self.name, self.key, self.kinds = name, module.rpartition(".peer_")[2], kinds
        self._module, self._deadline_s = module, deadline_s
        self._child: Child | None = None

    def version(self) -> str:
        """What the child says of the installed package."""
        return str(self._running().call("version")["version"])

    def logits(self, root: Path, contents: Contents, ids: Sequence[int]) -> Iterator[tuple[str, F32]]:
        """Logits of the file that ``contents`` was read from, one thread, strictest arithmetic."""
        child = self._running()
        try:
            child.call("load", path=str((root / contents.file.path).resolve()), threads=1, **self._options(len(ids)))
            for phase in PHASES:
                yield phase, child.call("logits", ids=list(ids), schedule=phase_schedule(phase, len(ids)))["logits"]
            child.call("unload")
        except PeerError:
            self.close()
            raise

    def close(self) -> None:
        """End the child, if one runs."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _options(self, num_tokens: int) -> dict[str, int | bool]:
        return {"context": num_tokens, "strict": True} if self.name == "llama.cpp" else {}

    def _running(self) -> Child:
        if self._child is None:
            self._child = Child(self._module, peer=self.name, deadline_s=self._deadline_s)
        return self._child


_PEERS = {  # name -> module of the child, what it reads
    "onnxruntime": ("deepthin.export.peer_onnxruntime", ("onnx",)),
    "llama.cpp": ("deepthin.export.peer_llama_cpp", ("gguf",)),
    "genai": ("deepthin.export.peer_genai", ("genai",)),
    "transformers.js": ("deepthin.export.peer_transformersjs", ("transformersjs",)),
}
RUNTIMES = ("engine", *_PEERS)


def reads(runtime: Runtime, file: ModelFile) -> bool:
    """Whether ``runtime`` runs ``file``."""
    return bool({file.kind, file.target} & set(runtime.kinds))


def make_runtime(name: str, *, deadline_s: float) -> Runtime:
    """The runtime called ``name``, one of :data:`RUNTIMES`."""
    if name == "engine":
        return EngineRuntime()
    module, kinds = _PEERS[name]
    return PeerRuntime(name, module, kinds, deadline_s=deadline_s)
