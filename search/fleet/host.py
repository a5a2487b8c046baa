"""What keeps two measurements on one machine apart: a name of the running system that containers on it share, and a lock file.

The name is a digest of the boot's random identifier, so it tells nothing about the machine and changes when it restarts.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from deepthin.engine.errors import DeepthinError
from deepthin.search.lock_file import try_lock

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOCK = "measuring.lock"


def host_name(boot_id: Path = BOOT_ID) -> str:
    """Twelve hex digits that are the same for every process, container and user of this running system."""
    try:
        seed = boot_id.read_text(encoding="ascii").strip()
    except OSError:
        seed = _boot_session() or f"{uuid.getnode():x}"
    return hashlib.sha256(f"deepthin {seed}".encode()).hexdigest()[:12]


def _boot_session() -> str:
    if sys.platform != "darwin":
        return ""
    command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


class HostLock:
    """Held while measuring by one process of this user on this machine; the system frees it if the process dies.

    Args:
        folder: where its file is kept, the same for all workers of the user.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Whether this process may measure now.

        Raises:
            DeepthinError: the file cannot be made.
        """
        if self._descriptor is not None:
            return True
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = try_lock(self._path)
        except OSError as error:
            why = error.strerror or error
            raise DeepthinError(
                f"{self._path}: cannot be locked ({why}); set DEEPTHIN_CACHE_DIR to a folder that can be written"
            ) from error
        return self._descriptor is not None

    def release(self) -> None:
        """Let others measure."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
