"""Formats of cached keys and values: what a tile takes, and what a token does.

The kernels' side (codes and layout) is in ``engine/kernels/attention.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepthin.engine.errors import UsageError


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """One format.

    Attributes:
        name: as users write it.
        element_bytes: bytes of one component.
        block: components that share an f16 scale, 0 where there is none.
    """

    name: str
    element_bytes: int
    block: int = 0

    def key_tile_bytes(self, head_dim: int, lanes: int) -> int:
        """Bytes of one head's keys of ``lanes`` positions; codes come in groups of four components."""
        components = -(-head_dim // 4) * 4 if self.block else head_dim
        return lanes * (components * self.element_bytes + self._scale_bytes(head_dim))

    def value_tile_bytes(self, head_dim: int, lanes: int) -> int:
        """Bytes of one head's values of ``lanes`` positions, each row padded to whole vectors."""
        return lanes * (-(-head_dim // lanes) * lanes * self.element_bytes + self._scale_bytes(head_dim))

    def bytes_per_position(self, head_dim: int) -> int:
        """Bytes that one head's key, or its value, takes per position, without any padding of rows."""
        return head_dim * self.element_bytes + self._scale_bytes(head_dim)

    def _scale_bytes(self, head_dim: int) -> int:
        return 2 * -(-head_dim // self.block) if self.block else 0


CACHE_FORMATS = {f.name: f for f in (CacheFormat("f32", 4), CacheFormat("f16", 2), CacheFormat("q8_0", 1, 32))}


def cache_format_named(name: str) -> CacheFormat:
    """The format called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in CACHE_FORMATS:
        raise UsageError(f"{name!r} is no format of the key/value cache; use one of {', '.join(CACHE_FORMATS)}")
    return CACHE_FORMATS[name]
