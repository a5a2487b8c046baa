"""What the costs of parts are measured with: anything that runs decode steps and says where their time went."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from deepthin.engine.arrays import F64
from deepthin.engine.shape import Shape


class StepTimes(Protocol):
    """Seconds of each step, f64 [steps] each, as in ``engine.synthetic.StepTimes``."""

    @property
    def total_s(self) -> F64:
        """Wall time of the whole step."""

    @property
    def embed_s(self) -> F64:
        """Fetching the embedding row."""

    @property
    def blocks_s(self) -> F64:
        """All blocks together."""

    @property
    def head_s(self) -> F64:
        """Final norm and output head."""


class StepTimer(Protocol):
    """Runs decode steps; a context manager, since it holds threads."""

    def run(self, steps: int, *, position: int = 0) -> StepTimes:
        """Decode ``steps`` tokens, each at cache position ``position``."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class MakeTimer(Protocol):
    """Makes a timer for a shape with ``num_blocks`` distinct blocks; ``engine.synthetic.SyntheticDecoder`` is one."""

    def __call__(self, shape: Shape, quant: str, *, threads: int, context: int, num_blocks: int) -> StepTimer:
        """Lay out the blocks and start the threads."""


class MakeWhole(Protocol):
    """Makes a timer for a whole model; ``profiles.whole_model.WholeModel`` is one."""

    def __call__(self, shape: Shape, quant: str, threads: int, context: int) -> StepTimer:
        """Make the weights, start the threads, and fill ``context`` cached positions."""
