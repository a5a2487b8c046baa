"""Letting go of the parts of a mapped file that have been read.

A page of a mapped file counts as this process's memory from its first touch on. Letting it go ends only that: it stays in the
system's cache and in the map, so whoever reads it again gets the same bytes, a little later.

A file that another program cuts short while it is mapped ends this process with SIGBUS when a lost page is touched, as with
every mapped file. Replacing the file by renaming another over it does no harm.
"""

from __future__ import annotations

import mmap

import numpy as np

from deepthin.engine.arrays import U8

# how much a touch may map with the page, where the system's cache holds it in one piece: a huge page on x86-64 and most arm64
_AROUND = 1 << 21


def let_go(view: U8) -> None:
    """Drop the pages of ``view``, contiguous, where it is part of a file mapped read-only; else do nothing.

    What was mapped with its first pages goes too. What was mapped with its last ones goes with what follows, so whoever reads
    from front to back leaves nothing behind. Windows has no such call; there the pages stay until memory is short.
    """
    mapped = _map_behind(view)
    if mapped is None or not view.nbytes or not hasattr(mapped, "madvise"):
        return
    offset = view.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = max(0, offset - _AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, first, offset + view.nbytes - first)


def _map_behind(view: U8) -> mmap.mmap | None:
    """The read-only map that owns the bytes of ``view``. Of any other memory, letting go would lose what was written."""
    base: object = view
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview) and base.readonly and isinstance(base.obj, mmap.mmap):
        return base.obj
    return None
