"""``manifest.json`` of a bundle: which files it has, their sizes and checksums, and what they were made from.

The reader trusts nothing: a bundle may come from anywhere, so names stay inside the folder, links are refused, and sizes are
compared before anything is hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepthin.engine.errors import FormatError, ShapeError
from deepthin.engine.shape import Shape

SCHEMA = "deepthin/manifest/1"
FILE_NAME = "manifest.json"
_MAX_BYTES = 1 << 24
_MAX_DEPTH = 4
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class BundleFile:
    """One file of a bundle.

    Attributes:
        path: relative to the manifest, with forward slashes.
        bytes: size of the file.
        sha256: of its content, 64 lower-case hexadecimal digits.
        target: hf, onnx or gguf.
        format: safetensors, onnx, onnx_data, gguf or json.
        quant: what the weights are stored as; the target's default for files without weights.
        tensor_bytes: weights alone, without headers, alignment and position tables; 0 for files without weights.
    """

    path: str
    bytes: int
    sha256: str
    target: str
    format: str
    quant: str
    tensor_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checked manifest: ``shape`` and ``files`` as objects, ``document`` as it was read."""

    shape: Shape
    files: tuple[BundleFile, ...]
    document: Mapping[str, Any]

    def select(self, *, target: str | None = None, format: str | None = None, quant: str | None = None) -> list[BundleFile]:
        """The files that match every given attribute."""
        wanted = {"target": target, "format": format, "quant": quant}
        return [f for f in self.files if all(value is None or getattr(f, key) == value for key, value in wanted.items())]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Whether one file is what the manifest says; ``why`` is empty when it is."""

    path: str
    ok: bool
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def sha256_of(path: Path) -> str:
    """Checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` as the manifest of ``folder``, which has none yet."""
    with (folder / FILE_NAME).open("x", encoding="utf-8", newline="\n") as file:
        file.write(_text_of(document))


def _text_of(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def record_verdict(folder: Path, result: Mapping[str, Any]) -> str:
    """Note in the manifest of ``folder`` what verifying it found: the verdict, and which versions of which runtimes gave it.

    Args:
        folder: a bundle.
        result: what :func:`deepthin.export.verify.verify_bundle` returned for it.

    Returns:
        Why it could not be noted (a folder may be read-only), empty when it was. The old manifest stays whole then.
    """
    ran = {item["name"]: item["version"] for item in result["runtimes"] if item["status"] == "ran"}
    why = "" if result["verdict"] == "pass" else result["summary"][0]  # distances stay out: they are this machine's
    record = {"verdict": result["verdict"], "why": why, "tokens": len(result["tokens"]), "runtimes": ran}
    partial = folder / f".{FILE_NAME}.partial-{secrets.token_hex(4)}"
    try:
        document = {**read_manifest(folder).document, "verification": record}
        partial.write_text(_text_of(document), encoding="utf-8", newline="\n")
        partial.replace(folder / FILE_NAME)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return ""


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of ``folder``; the files themselves are :func:`check_files`'s business.

    Raises:
        FormatError: there is none, or any part of it is not as :func:`write_manifest` would have it.
    """
    path = folder / FILE_NAME
    document = _load(path)
    schema = document.get("schema")
    if schema != SCHEMA:
        raise FormatError(f"{path}: schema is {schema!r}, but this version reads {SCHEMA!r}; export the model again")
    try:
        shape = Shape.from_json(_typed(path, document, "shape", dict))
    except ShapeError as error:
        raise FormatError(f"{path}: {error}") from error
    entries = _typed(path, document, "files", list)
    files = tuple(_entry(path, index, entry) for index, entry in enumerate(entries))
    seen: dict[str, str] = {}
    for file in files:
        other = seen.setdefault(file.path.lower(), file.path)
        if other is not file.path:
            raise FormatError(f"{path}: '{file.path}' is listed twice (also as '{other}'); export the model again")
    return Manifest(shape, files, document)


def check_files(folder: Path, manifest: Manifest) -> list[FileCheck]:
    """Compare every listed file with its size and checksum, in the manifest's order."""
    return [_check(folder, file) for file in manifest.files]


def unlisted_files(folder: Path, listed: Iterable[str]) -> list[str]:
    """Files (and links) under ``folder`` that are neither ``listed`` nor the manifest itself, sorted."""
    known = {*listed, FILE_NAME}
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(folder).as_posix() for path in found} - known)


def _check(folder: Path, file: BundleFile) -> FileCheck:
    path = folder
    for part in file.path.split("/"):
        path = path / part
        if path.is_symlink():
            return FileCheck(file.path, False, f"'{path.relative_to(folder).as_posix()}' is a link; a bundle holds plain files")
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return FileCheck(file.path, False, "not a plain file")
        if status.st_size != file.bytes:
            return FileCheck(file.path, False, f"has {status.st_size} bytes, but the manifest says {file.bytes}")
        digest = sha256_of(path)
    except OSError as error:
        return FileCheck(file.path, False, f"cannot be read: {error.strerror or error}")
    if digest != file.sha256:
        return FileCheck(file.path, False, f"sha256 is {digest}, but the manifest says {file.sha256}; the content has changed")
    return FileCheck(file.path, True)


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.is_symlink() or not path.is_file():
            raise FormatError(f"{path.parent} is no bundle: it has no plain file {FILE_NAME}; make one with `deepthin export`")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise FormatError(f"{path}: {size} bytes are too many for a manifest (at most {_MAX_BYTES})")
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is no valid JSON document ({error}); was the file cut short?") from error
    if not isinstance(document, dict):
        raise FormatError(f"{path}: holds a JSON {type(document).__name__}, but an object is needed")
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return document


def _entry(path: Path, index: int, entry: object) -> BundleFile:
    where = f"files[{index}]"
    if not isinstance(entry, dict):
        raise FormatError(f"{path}: {where} is {entry!r}, but an object is needed")
    texts = {key: _typed(path, entry, key, str, where) for key in ("path", "sha256", "target", "format", "quant")}
    sizes = {key: _typed(path, entry, key, int, where) for key in ("bytes", "tensor_bytes")}
    parts = texts["path"].split("/")
    if len(parts) > _MAX_DEPTH or not all(_PLAIN_NAME.fullmatch(part) for part in parts):
        raise FormatError(
            f"{path}: {where} has the path {texts['path']!r}, but plain names (letters, digits, '.', '_', '-') joined by '/' "
            f"are needed, so that no file outside the folder is meant"
        )
    if not _SHA256.fullmatch(texts["sha256"]):
        raise FormatError(f"{path}: {where} has sha256 {texts['sha256']!r}, but 64 lower-case hexadecimal digits are needed")
    if min(sizes.values()) < 0 or sizes["tensor_bytes"] > sizes["bytes"]:
        raise FormatError(f"{path}: {where} has sizes {sizes}, but 0 <= tensor_bytes <= bytes is needed")
    return BundleFile(**texts, **sizes)


def _typed(path: Path, document: Mapping[str, Any], key: str, kind: type, where: str = "the document") -> Any:
    value = document.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        found = "nothing" if key not in document else repr(value)[:80]
        raise FormatError(f"{path}: {where} has {found} under '{key}', but {kind.__name__} is needed")
    return value
