"""Runs one model file in one runtime and returns its logits, phase by phase. Peers run in child processes, the engine here.

A runtime may have several modes, which are all run: llama.cpp as strict as it gets and as it is by default, onnxruntime at
accuracy levels 0 and 4 of quantised products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deepthin._version import VERSION
from deepthin.engine.arrays import F32
from deepthin.engine.child import Child
from deepthin.engine.errors import DeepthinError, PeerError
from deepthin.engine.formats import STORED, scheme_named
from deepthin.export.contents import Contents, ModelFile
from deepthin.export.noise import BF16, F16, FLOAT, INT8
from deepthin.export.schedule import PHASES, phase_schedule, pieces

_ENGINE_THREADS = 4  # at most; the engine's output does not depend on it


@dataclass(frozen=True, slots=True)
class Mode:
    """One way in which a runtime runs a file.

    Attributes:
        name: as shown, such as ``strict`` or ``level 4``; empty where there is one way only.
        key: its table in tolerances.toml; the file's format is added.
        rounding: what it does to activations, one of :data:`deepthin.export.noise.ROUNDINGS`.
        options: of the peer's ``load``.
    """

    name: str
    key: str
    rounding: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Runtime(Protocol):
    """One implementation of the decoder.

    Attributes:
        name: as shown and as taken by ``--runtimes``.
        kinds: what it reads: kinds of file, or parts of a bundle.
    """

    name: str
    kinds: tuple[str, ...]

    def version(self) -> str:
        """Its version; raises PeerMissingError when it is not installed and PeerError when it is broken."""
        ...

    def modes(self, contents: Contents) -> tuple[Mode, ...]:
        """The ways in which it runs ``contents``."""
        ...

    def logits(self, root: Path, contents: Contents, ids: Sequence[int], mode: Mode) -> Iterator[tuple[str, F32]]:
        """(phase, logits f32 [S, V]) for each phase, from an empty cache each time."""
        ...

    def streams(self, root: Path, contents: Contents, ids: Sequence[int], mode: Mode, phase: str) -> Mapping[str, F32]:
        """The residual stream [S, D] by point (see ``Reference.watch``), rows of any length; empty if it gives none."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class EngineRuntime:
    """This package's own decoder."""

    name = "engine"
    kinds: tuple[str, ...] = ("hf", "gguf")

    def version(self) -> str:
        """Version of this package."""
        return VERSION

    def modes(self, contents: Contents) -> tuple[Mode, ...]:
        """One: activations are rounded in front of block formats only."""
        return (Mode("", "engine", INT8 if _is_quantized(contents.file) else FLOAT),)

    def logits(self, root: Path, contents: Contents, ids: Sequence[int], mode: Mode) -> Iterator[tuple[str, F32]]:
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

    def streams(self, root: Path, contents: Contents, ids: Sequence[int], mode: Mode, phase: str) -> Mapping[str, F32]:
        """Streams at unit root mean square, each read from a decoder that ends there."""
        from deepthin.export.engine_streams import EngineStreams  # loads `numba`

        return {} if contents.model is None else EngineStreams(contents.model, ids, phase_schedule(phase, len(ids)))

    def close(self) -> None:
        """Nothing is held between runs."""


class PeerRuntime:
    """A runtime behind :class:`~deepthin.engine.child.Child`; a new child replaces one that died."""

    def __init__(self, name: str, module: str, kinds: tuple[str, ...], *, deadline_s: float) -> None:
        """Remember how to start it; nothing runs yet."""
        self.name, self.kinds = name, kinds
        self._module, self._deadline_s = module, deadline_s
        self._child: Child | None = None

    def version(self) -> str:
        """What the child says of the installed package."""
        return str(self._running().call("version")["version"])

    def modes(self, contents: Contents) -> tuple[Mode, ...]:
        """See :data:`_PEERS`; an ONNX file runs elsewhere at the level that it asks for."""
        file = contents.file
        if self.name == "llama.cpp":
            rounding = INT8 if _is_quantized(file) else {"f16": F16, "bf16": BF16}.get(file.quant, FLOAT)
            return (
                Mode("strict", "llama_cpp", rounding, {"strict": True, "repack": False}),
                Mode("default", "llama_cpp_default", rounding, {"strict": False}),
            )
        if self.name == "onnxruntime" and _is_quantized(file):
            return (
                Mode("level 0", "onnxruntime", FLOAT, {"level": 0}),
                Mode("level 4", "onnxruntime_int8", INT8, {"level": 4}),
            )
        rounds = contents.rounds_activations()
        return (Mode("", "onnxruntime_int8" if rounds else "onnxruntime", INT8 if rounds else FLOAT),)

    def logits(self, root: Path, contents: Contents, ids: Sequence[int], mode: Mode) -> Iterator[tuple[str, F32]]:
        """Logits of the file that ``contents`` was read from, on one thread."""
        child = self._running()
        try:
            self._load(child, root, contents, ids, mode)
            for phase in PHASES:
                yield phase, child.call("logits", ids=list(ids), schedule=phase_schedule(phase, len(ids)))["logits"]
            child.call("unload")
        except PeerError:
            self.close()
            raise

    def streams(self, root: Path, contents: Contents, ids: Sequence[int], mode: Mode, phase: str) -> Mapping[str, F32]:
        """What the runtime says of its values in between, under our names of points."""
        names = stream_names(self.name, contents)
        if not names:
            return {}
        child = self._running()
        try:
            self._load(child, root, contents, ids, mode, watch=list(names))
            found = child.call("streams", ids=list(ids), schedule=phase_schedule(phase, len(ids)))
            child.call("unload")
        except DeepthinError:
            self.close()
            return {}
        return {point: found[name] for name, point in names.items() if name in found}

    def close(self) -> None:
        """End the child, if one runs."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _load(self, child: Child, root: Path, contents: Contents, ids: Sequence[int], mode: Mode, **more: Any) -> None:
        room = {"context": len(ids)} if self.name == "llama.cpp" else {}
        path = str((root / contents.file.path).resolve())
        child.call("load", path=path, threads=1, **room, **mode.options, **more)

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


def stream_names(runtime: str, contents: Contents) -> dict[str, str]:
    """What ``runtime`` calls the points of the residual stream; empty for a runtime that shows nothing of its inside.

    llama.cpp's names are those that its graphs pass to ``cb`` (``src/models/llama.cpp`` at ggml-org/llama.cpp@0c1e570); ONNX
    values have :mod:`deepthin.export.onnx_model`'s.
    """
    count = int(contents.facts["num_layers"] or 0)
    if runtime == "llama.cpp":
        pairs = [(f"ffn_inp-{run}", f"blk.{run}.attn") for run in range(count)]
        return dict(pairs + [(f"l_out-{run}", f"blk.{run}.ffn") for run in range(count)])
    if runtime != "onnxruntime":
        return {}
    ends = [f"blk.{run}.attn_norm.sum" for run in range(1, count)] + ["output_norm.sum"]
    names = {"token_embd.out": "token_embd"}
    for run, end in zip(range(count), ends, strict=True):
        names |= {f"blk.{run}.ffn_norm.sum": f"blk.{run}.attn", end: f"blk.{run}.ffn"}
    return names


def reads(runtime: Runtime, file: ModelFile) -> bool:
    """Whether ``runtime`` runs ``file``."""
    return bool({file.kind, file.target} & set(runtime.kinds))


def make_runtime(name: str, *, deadline_s: float) -> Runtime:
    """The runtime called ``name``, one of :data:`RUNTIMES`."""
    if name == "engine":
        return EngineRuntime()
    module, kinds = _PEERS[name]
    return PeerRuntime(name, module, kinds, deadline_s=deadline_s)


def _is_quantized(file: ModelFile) -> bool:
    return file.quant == STORED or scheme_named(file.quant).coarsest.is_quantized
