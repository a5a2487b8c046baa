"""A machine made of arithmetic: step timers whose seconds follow a formula, on a clock that only they move."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from deepthin.engine.accounting import count_bytes
from deepthin.engine.arrays import F64
from deepthin.engine.shape import Shape
from deepthin.profiles.contention import Counters
from deepthin.profiles.protocol import Instruments


@dataclass(frozen=True)
class FakeStepTimes:
    total_s: F64
    embed_s: F64
    blocks_s: F64
    head_s: F64


@dataclass
class FakeMachine:
    """Reads ``bandwidth`` bytes per second, spends ``layer_s`` per block on top; ``noise`` is a relative sigma."""

    bandwidth: float = 2e10
    layer_s: float = 2e-5
    overhead_s: float = 1e-5
    whole_extra_s: float = 0.0  # what a whole model takes that no part shows
    noise: float = 0.0
    others_s: float = 0.0  # CPU seconds other processes take during each run
    now: float = 0.0
    stolen: float = 0.0
    made: list[tuple[str, str, int, int, int]] = field(default_factory=list)
    open_timers: int = 0

    def timer(self, shape: Shape, quant: str, *, threads: int, context: int, num_blocks: int) -> FakeTimer:
        self.made.append((shape.text, quant, threads, context, num_blocks))
        return FakeTimer(self, shape, quant, num_blocks, 0.0)

    def whole(self, shape: Shape, quant: str, threads: int, context: int) -> FakeTimer:
        self.made.append((shape.text, quant, threads, context, 0))
        return FakeTimer(self, shape, quant, shape.num_layers, self.whole_extra_s)

    def block_s(self, shape: Shape, quant: str) -> float:
        parts = count_bytes(shape, quant)
        return (parts.attention + parts.mlp) / shape.num_layers / self.bandwidth + self.layer_s

    def head_s(self, shape: Shape, quant: str) -> float:
        parts = count_bytes(shape, quant)
        return (parts.embedding if shape.tie_word_embeddings else parts.head) / self.bandwidth

    @property
    def instruments(self) -> Instruments:
        return Instruments(
            clock=lambda: self.now,
            sleep=lambda _: None,
            counters=lambda: Counters(self.now, busy_s=self.now + self.stolen, own_s=self.now, steal_s=0.0, switches=0),
            sentinel=lambda: 1e-4,
            fastest_sentinel=lambda: 1e-4,
        )


@dataclass
class FakeTimer:
    machine: FakeMachine
    shape: Shape
    quant: str
    num_blocks: int
    extra_s: float

    def __post_init__(self) -> None:
        self.machine.open_timers += 1
        self.random = np.random.Generator(np.random.PCG64(5))

    def run(self, steps: int, *, position: int = 0) -> FakeStepTimes:
        machine = self.machine
        blocks = (
            self.num_blocks
            * machine.block_s(self.shape, self.quant)
            * np.exp(machine.noise * self.random.standard_normal(steps))
        )
        head = np.full(steps, machine.head_s(self.shape, self.quant))
        embed = np.full(steps, 1e-6)
        total = blocks + head + embed + machine.overhead_s + self.extra_s
        machine.now += float(total.sum())
        machine.stolen += machine.others_s
        return FakeStepTimes(total, embed, blocks, head)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.machine.open_timers -= 1
