"""``load_model``: a GGUF file, a Hugging Face folder or one of our bundles becomes a checked Model.

What a path holds is decided by its content, never by its name.
"""

from __future__ import annotations

import stat
from pathlib import Path

from deepthin.engine.errors import FormatError
from deepthin.engine.gguf_file import read_gguf
from deepthin.engine.gguf_header import MAGIC
from deepthin.engine.gguf_llama import model_from_gguf
from deepthin.engine.hf_llama import model_from_hf_folder
from deepthin.engine.json_text import read_json_object
from deepthin.engine.model import Model
from deepthin.engine.model_folder import member

_MANIFEST_SCHEMA = "deepthin/manifest/1"
_MAX_MANIFEST_BYTES = 1 << 23
_LOOKALIKES = (  # how files begin that people take for models, and what to do about it
    (b"version https://git-lfs", "it is a Git LFS pointer, not the model; run 'git lfs pull' in its folder"),
    (
        b"PK\x03\x04",
        "it is a zip archive, as PyTorch checkpoints are; those can run code and are never read, so export safetensors or GGUF",
    ),
    (b"\x80\x02", "it is a Python pickle; those can run code and are never read, so export safetensors or GGUF"),
    (b"ggjt", "it is a GGML file from before GGUF; convert the model again"),
    (b"tjgg", "it is a GGML file from before GGUF; convert the model again"),
    (b"lmgg", "it is a GGML file from before GGUF; convert the model again"),
    (b"<!DOCTYPE", "it is a web page; was a download page saved instead of the model?"),
    (b"<html", "it is a web page; was a download page saved instead of the model?"),
)


def load_model(path: str | Path) -> Model:
    """Read the model at ``path``; weights stay mapped from disk where the file's layout allows.

    Raises:
        FormatError: nothing is there, or what is there is damaged, contradicts itself, or is no model.
        UnsupportedError: it is a model that this version does not run.
    """
    path = Path(path)
    if "\0" in str(path):
        raise FormatError(f"{str(path)!a}: no file can have that name")
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _load_folder(path)
        if not stat.S_ISREG(mode):
            raise FormatError(
                f"{path}: it is neither a file nor a folder; a GGUF file, a Hugging Face folder or a bundle is needed"
            )
        return _load_file(path)
    except FileNotFoundError as error:
        raise FormatError(f"{error.filename or path}: there is no such file or folder; check the path") from None
    except OSError as error:
        raise FormatError(f"{error.filename or path}: it cannot be read ({error.strerror or error})") from None


def _load_file(path: Path) -> Model:
    with path.open("rb") as handle:
        start = handle.read(64)
    if start.startswith(MAGIC) or not start:
        return model_from_gguf(read_gguf(path))
    for beginning, advice in _LOOKALIKES:
        if start.lstrip().lower().startswith(beginning.lower()):
            raise FormatError(f"{path}: {advice}")
    if start.startswith(b"{") or start[8:9] == b"{":
        kind = "JSON" if start.startswith(b"{") else "safetensors"
        raise FormatError(f"{path}: it is a {kind} file; give the folder that holds it together with config.json")
    what = "it is a text file" if _is_text(start) else "it does not begin with 'GGUF'"
    raise FormatError(f"{path}: {what}; a GGUF file, a Hugging Face folder or a bundle is needed")


def _is_text(start: bytes) -> bool:
    return all(byte >= 32 or byte in b"\t\n\r" for byte in start)


def _load_folder(path: Path) -> Model:
    if member(path, "config.json") is not None:
        return model_from_hf_folder(path)
    manifest = member(path, "manifest.json")
    if manifest is not None:
        return _load_bundle(path, manifest)
    inside = sorted(item.name for item in path.iterdir() if item.suffix == ".gguf")
    advice = f"; did you mean {path / inside[0]}?" if inside else ""
    raise FormatError(
        f"{path}: the folder holds neither config.json (a Hugging Face folder) nor manifest.json (a bundle){advice}"
    )


def _load_bundle(path: Path, manifest: Path) -> Model:
    """A bundle's Hugging Face part, or its most exact GGUF file when it has none."""
    schema = read_json_object(manifest, _MAX_MANIFEST_BYTES).get("schema")
    if schema != _MANIFEST_SCHEMA:
        raise FormatError(f"{manifest}: its schema is {ascii(schema)[:60]}, but a bundle of {_MANIFEST_SCHEMA!r} is needed")
    if (path / "hf").is_dir():
        return model_from_hf_folder(path / "hf")
    for fmt in ("f32", "stored", "bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"):
        file = path / "gguf" / f"model-{fmt}.gguf"
        if file.is_file():
            return _load_file(file)
    raise FormatError(f"{path}: the bundle has neither an hf folder nor a gguf/model-*.gguf, so there are no weights to read")
