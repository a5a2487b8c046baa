"""The errors deepthin raises on purpose. Anything else that escapes is a bug."""

from __future__ import annotations

from typing import ClassVar


class DeepthinError(Exception):
    """A failure the user can act on: one sentence saying where, what was found, what was needed, what to try.

    ``exit_code`` is what the command line returns for it (0 done, 1 failed, 2 usage, 3 nothing feasible,
    4 verification failed).
    """

    exit_code: ClassVar[int] = 1


class FormatError(DeepthinError):
    """A model file or folder does not hold what its format promises."""


class UnsupportedError(DeepthinError):
    """A valid model or shape asks for something this engine or exporter cannot run."""


class ShapeError(DeepthinError, ValueError):
    """A shape text, name or combination of numbers describes no decoder."""

    exit_code: ClassVar[int] = 2


class UsageError(DeepthinError, ValueError):
    """Command-line arguments that cannot be acted on."""

    exit_code: ClassVar[int] = 2


class InfeasibleError(DeepthinError):
    """No shape meets the budget; the message names the binding constraint and the nearest way out."""

    exit_code: ClassVar[int] = 3


class VerificationError(DeepthinError):
    """Two runtimes disagree beyond their budget."""

    exit_code: ClassVar[int] = 4


class PeerError(DeepthinError):
    """A peer runtime (llama.cpp, onnxruntime) failed, aborted or missed its deadline."""


class PeerMissingError(PeerError):
    """A peer runtime is not installed; callers report it as skipped, never as passed."""
