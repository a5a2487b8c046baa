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
from deepthin.engine.model import Model

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
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise FormatError(f"{path}: it cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _load_file(path: Path) -> Model:
    with path.open("rb") as handle:
        start = handle.read(64)
    if start.startswith(MAGIC) or not start:
        return model_from_gguf(read_gguf(path))
    for beginning, advice in _LOOKALIKES:
        if start.lstrip().lower().startswith(beginning.lower()):
            raise FormatError(f"{path}: {advice}")
    what = "it is a text file" if _is_text(start) else "it does not begin with 'GGUF'"
    raise FormatError(f"{path}: {what}; a GGUF file, a Hugging Face folder or a bundle is needed")


def _is_text(start: bytes) -> bool:
    return all(byte >= 32 or byte in b"\t\n\r" for byte in start)


def _load_folder(path: Path) -> Model:
    raise FormatError(f"{path}: folders are read in the next step")
