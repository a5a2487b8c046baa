"""transformers.js as a peer: Node with ``peer_transformersjs.mjs``, behind the same calls as the other peers.

``Child("deepthin.export.peer_transformersjs", peer="transformers.js")`` serves METHODS. Node and the npm package
``@huggingface/transformers`` are the user's; the package is looked for in ``node_modules`` of the folder that the environment
variable ``DEEPTHIN_NODE`` names, else of the working folder and those above it. The network is never used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.export.schedule import best_token, pieces
from deepthin.export.transformersjs_folder import DTYPES, FILE_NAMES

FOLDER_VARIABLE = "DEEPTHIN_NODE"
PACKAGE = "@huggingface/transformers"
_SCRIPT = Path(__file__).with_name("peer_transformersjs.mjs")

_node: subprocess.Popen[bytes] | None = None


def version() -> dict[str, Any]:
    """Versions of the npm package and of Node."""
    answer = _ask("version")
    return {"version": str(answer["version"]), "node": str(answer["node"])}


def load(path: str, *, threads: int = 1) -> dict[str, Any]:
    """Load ``<folder>/onnx/<file>``, ``path`` being that file, replacing the one loaded before."""
    file = Path(path)
    quant = next((quant for quant, name in FILE_NAMES.items() if name == file.name), None)
    how = {"dtype": "fp32", "model_file_name": file.stem} if quant is None else {"dtype": DTYPES[quant]}
    _ask("load", folder=str(file.parent.parent), threads=threads, **how)
    return {"threads": threads}


def unload() -> dict[str, Any]:
    """Free the loaded model, if there is one."""
    _ask("unload")
    return {}


def tokenize(texts: list[str]) -> dict[str, Any]:
    """Token ids of each text; the folder of the loaded model must hold a tokenizer."""
    return {"ids": _ask("tokenize", texts=texts)["ids"]}


def logits(ids: list[int], *, schedule: list[int] | None = None) -> dict[str, Any]:
    """Logits f32 [S, V] at every position of ``ids``, from an empty cache.

    Args:
        ids: S token ids.
        schedule: how many tokens go in together, in order; ``[S]`` (a whole prefill) when absent.
    """
    _ask("clear")
    return {"logits": np.concatenate([_run(piece) for piece in pieces(ids, schedule)])}


def greedy(ids: list[int], count: int) -> dict[str, Any]:
    """``count`` greedy tokens after ``ids``, and the margin of each over the runner-up."""
    _ask("clear")
    row = _run(ids)[-1]
    chosen, margins = [], []
    for _ in range(count):
        best, margin = best_token(row)
        chosen.append(best)
        margins.append(margin)
        row = _run([best])[-1]
    return {"ids": chosen, "margins": margins}


def _run(ids: Sequence[int]) -> F32:
    """Append ``ids`` to the cache; logits [len(ids), V]."""
    answer = _ask("run", ids=list(ids))
    rows: F32 = np.frombuffer(_exactly(4 * int(answer["count"])), "<f4").reshape(len(ids), -1)
    return rows


def _ask(method: str, **params: Any) -> dict[str, Any]:
    """One line to Node and one line back; numbers follow an answer as raw bytes."""
    node = _running()
    assert node.stdin is not None and node.stdout is not None, "Bug: Popen was asked for pipes"
    node.stdin.write(json.dumps({"method": method, **params}).encode() + b"\n")
    node.stdin.flush()
    line = node.stdout.readline()
    if not line:
        raise RuntimeError(f"Node ended during {method}, exit code {node.wait()}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise RuntimeError(str(answer["error"]))
    return answer


def _exactly(count: int) -> bytes:
    stdout = _running().stdout
    assert stdout is not None, "Bug: Popen was asked for pipes"
    data = stdout.read(count)
    if len(data) != count:
        raise RuntimeError("Node ended in the middle of an answer")
    return data


def _running() -> subprocess.Popen[bytes]:
    global _node
    if _node is None:
        program, folder = shutil.which("node"), _package_folder()
        if program is None or folder is None:
            what = "Node" if program is None else f"the npm package {PACKAGE} (npm install it, or set {FOLDER_VARIABLE})"
            raise ModuleNotFoundError(f"{what} was not found", name=PACKAGE)
        pipe = subprocess.PIPE
        _node = subprocess.Popen([program, str(_SCRIPT), str(folder)], stdin=pipe, stdout=pipe)
    return _node


def _package_folder() -> Path | None:
    """The folder whose ``node_modules`` holds the package."""
    named = os.environ.get(FOLDER_VARIABLE)
    here = Path.cwd()
    folders = [Path(named)] if named else [here, *here.parents]
    return next((folder.resolve() for folder in folders if (folder / "node_modules" / PACKAGE).is_dir()), None)


METHODS = {f.__name__: f for f in (version, load, unload, tokenize, logits, greedy)}
