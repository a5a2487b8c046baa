"""The probe kit: a few small models with random weights, a script that times them on another device, and how to read the names.

Each file name holds its shape and format, so that results can be read without anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from deepthin.engine.errors import FormatError, ShapeError
from deepthin.engine.formats import FORMATS
from deepthin.engine.model import Model, random_model
from deepthin.engine.shape import Shape
from deepthin.profiles.latency.runtimes import LLAMA_CPP, ONNXRUNTIME
from deepthin.profiles.probe_plans import KIT_PLAN

SUFFIXES = {LLAMA_CPP: ".gguf", ONNXRUNTIME: ".onnx"}
SCRIPTS = ("run.sh", "run_onnx.py")
MARKER = "kit.txt"
_ITEM = re.compile("^(L|d|heads|kv|head_dim|ff|vocab|share|ctx|mlp(?=[a-z]))([a-z0-9]+)$")
_NAME = re.compile(r"probe-(?P<shape>[a-z0-9_.-]+?)-(?P<quant>" + "|".join(FORMATS) + r")\.(gguf|onnx)", re.IGNORECASE)

WriteModel = Callable[[Model, Path], object]


def probe_name(shape: Shape, quant: str, suffix: str) -> str:
    """File name of a probe; no commas, which llama-bench takes for lists, and no equals signs."""
    return f"probe-{shape.text.replace(',', '-').replace('=', '')}-{quant}{suffix}"


def parse_probe_name(filename: str) -> tuple[Shape, str] | None:
    """Shape and format in a probe's file name; None for any other name."""
    match = _NAME.fullmatch(re.split(r"[/\\]", filename)[-1])
    if match is None:
        return None
    items = [_ITEM.sub(r"\1=\2", item) for item in match["shape"].split("-")]
    try:
        return Shape.parse(",".join(items)), match["quant"].lower()
    except ShapeError:
        return None


def write_kit(
    folder: Path, writers: Mapping[str, WriteModel], *, progress: Callable[[str, int | None, int | None], None] | None = None
) -> list[dict[str, Any]]:
    """Write the models and the scripts into ``folder``.

    Args:
        folder: created if absent.
        writers: how each runtime's files are written, by name.
        progress: told which model is written.

    Returns:
        One object a model: ``file``, ``runtime``, ``shape``, ``quant``, ``bytes``.

    Raises:
        FormatError: the folder holds something else.
    """
    strangers = [item.name for item in folder.iterdir()] if folder.is_dir() else []
    if strangers and MARKER not in strangers:
        raise FormatError(f"{folder}: is not empty and no kit of ours (it holds {strangers[0]!r}); name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    plan = [(runtime, model) for runtime, models in KIT_PLAN.items() for model in models if runtime in writers]
    for done, (runtime, model) in enumerate(plan):
        name = probe_name(model.shape, model.quant, SUFFIXES[runtime])
        if progress is not None:
            progress(f"writing {name}", done + 1, len(plan))
        path = folder / name
        for old in folder.glob(f"{name}*"):
            old.unlink()
        writers[runtime](random_model(model.shape, quant=model.quant), path)
        size = sum(item.stat().st_size for item in folder.glob(f"{path.name}*"))
        rows.append({"file": name, "runtime": runtime, "shape": model.shape.text, "quant": model.quant, "bytes": size})
    for name in SCRIPTS:
        text = files("deepthin.profiles.kit_scripts").joinpath(f"{name}.txt").read_text(encoding="utf-8")
        path = folder / name
        path.write_text(text, encoding="utf-8", newline="\n")
        path.chmod(0o755)
    lines = [f"{row['file']}  {row['bytes']} bytes" for row in rows]
    (folder / MARKER).write_text(
        "probe kit of deepthin; run.sh says how to use it\n" + "\n".join(lines) + "\n", encoding="utf-8"
    )
    return rows
