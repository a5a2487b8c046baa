"""Access to the files of a model folder that keeps hands inside it: plain names, regular files, no links out."""

from __future__ import annotations

from pathlib import Path

from deepthin.engine.errors import FormatError


def member(folder: Path, name: str) -> Path | None:
    """The path of file ``name`` in ``folder``, or None when it is not there.

    A link may stay inside the folder. A snapshot of the Hugging Face cache (``models--x/snapshots/<commit>``) may also
    link into its own ``models--x/blobs``, which is how that cache stores every file.

    Raises:
        FormatError: ``name`` is no plain file name, or it leads out of the folder or to something that is no file.
    """
    plain = name not in ("", ".", "..") and name.isprintable() and not set(name) & set('/\\:*?"<>|')
    if not plain or len(name) > 255:
        raise FormatError(f"{folder}: {name[:80]!a} is no plain file name; files of a model must lie in its folder")
    path = folder / name
    if not path.exists() and not path.is_symlink():
        return None
    target, home = path.resolve(), folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if target.parent not in allowed:
        raise FormatError(f"{path}: it is a link out of the folder, which is not followed; copy the file itself")
    if not target.is_file():
        raise FormatError(f"{path}: a regular file is needed")
    return path
