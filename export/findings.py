"""What verification finds out about a bundle, as records; no judgement beyond "all of it is fine" and no words for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepthin.export.contents import FactDifference, ModelFile
from deepthin.export.manifest import FileCheck
from deepthin.export.parity import ParityReport
from deepthin.export.weight_parity import WeightDifference


@dataclass(slots=True)
class RuntimeState:
    """What is known of one runtime; ``status`` is ran, skipped or failed."""

    name: str
    version: str = ""
    status: str = "ran"
    why: str = ""
    num_runs: int = 0

    def to_json(self) -> dict[str, Any]:
        """As an entry of ``runtimes``."""
        return {"name": self.name, "version": self.version, "status": self.status, "why": self.why}


@dataclass(frozen=True, slots=True)
class Pair:
    """The reference against one runtime on one file in one phase; ``report`` is None when the run failed for ``why``."""

    runtime: str
    file: str
    phase: str
    report: ParityReport | None
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether the runtime ran and stayed within its budget."""
        return self.report is not None and self.report.ok

    def to_json(self) -> dict[str, Any]:
        """As an entry of ``pairs``."""
        head = {"a": "reference", "b": self.runtime, "file": self.file, "phase": self.phase}
        return {**head, **self.report.to_json()} if self.report is not None else {**head, "ok": False, "why": self.why}


@dataclass(slots=True)
class Findings:
    """Everything that the passes found out; :mod:`deepthin.export.summary` puts it into words.

    Attributes:
        base: the most exact model that could be read; its weights and facts are the truth.
        no_reference: why there are no logits to compare with, if there are none.
        weights: the first difference of each readable model, by path.
    """

    checks: list[FileCheck] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    models: list[ModelFile] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    base: str = ""
    no_reference: str = ""
    facts: list[FactDifference] = field(default_factory=list)
    weights: dict[str, WeightDifference | None] = field(default_factory=dict)
    runtimes: list[RuntimeState] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing failed and at least one runtime was compared."""
        return (
            all(check.ok for check in self.checks)
            and not self.unreadable
            and not self.no_reference
            and not self.facts
            and not any(self.weights.values())
            and not any(state.status == "failed" for state in self.runtimes)
            and bool(self.pairs)
            and all(pair.ok for pair in self.pairs)
        )
