"""Which kind of file system a path lies on, where the platform tells; network ones tear journals and forget locks."""

from __future__ import annotations

from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
# Source of the trouble: optuna issues #5138 (corrupt journals on NFS), #5921 and #6361 (locks).
_FUSE = ("sshfs", "glusterfs", "ceph", "s3fs", "gcsfuse", "rclone", "juicefs")
_KERNEL = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "orangefs", "pvfs2")
NETWORK = frozenset((*_KERNEL, *(f"fuse.{name}" for name in _FUSE)))


def network_filesystem(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the network file system that ``path`` lies on, or an empty string.

    Args:
        path: need not exist; the nearest mount above it decides.
        mounts: the kernel's list (Linux); where there is none, nothing is known and nothing is said.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    wanted, best, found = path.absolute().resolve(), -1, ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        parts, kind = fields.split(" "), rest.split(" ")[0]
        if len(parts) < 5 or not kind:
            continue
        point = Path(_unescaped(parts[4]))
        if (point == wanted or point in wanted.parents) and len(point.parts) >= best:
            best, found = len(point.parts), kind
    return found if found in NETWORK else ""


def _unescaped(text: str) -> str:
    """Blanks and backslashes of mount points are written in octal."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
