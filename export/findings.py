"""What verification finds out about a bundle, as records; no judgement beyond "all of it is fine" and no words for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepthin.export.contents import FactDifference, ModelFile
from deepthin.export.layers import LayerParting
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


PASS, AMBIGUOUS, FAIL = "pass", "ambiguous", "fail"


@dataclass(frozen=True, slots=True)
class Pair:
    """The reference against one runtime on one file in one phase; ``report`` is None when the run failed for ``why``.

    Attributes:
        mode: of the runtime; empty where it has one only.
        excuse: what explains that ``report`` is beyond its budget (:mod:`deepthin.export.ambiguity`), empty if nothing does.
    """

    runtime: str
    file: str
    phase: str
    report: ParityReport | None
    why: str = ""
    mode: str = ""
    excuse: str = ""

    @property
    def ok(self) -> bool:
        """Whether the runtime ran and stayed within its budget."""
        return self.report is not None and self.report.ok

    @property
    def verdict(self) -> str:
        """``pass``, ``ambiguous`` or ``fail``."""
        return PASS if self.ok else AMBIGUOUS if self.excuse else FAIL

    @property
    def label(self) -> str:
        """The runtime and its mode, for people."""
        return f"{self.runtime} ({self.mode})" if self.mode else self.runtime

    def to_json(self) -> dict[str, Any]:
        """As an entry of ``pairs``."""
        head = {"a": "reference", "b": self.runtime, "mode": self.mode, "file": self.file, "phase": self.phase}
        told = {"verdict": self.verdict, "excuse": self.excuse}
        return {**head, **self.report.to_json(), **told} if self.report else {**head, "ok": False, "why": self.why, **told}


@dataclass(slots=True)
class Findings:
    """Everything that the passes found out; :mod:`deepthin.export.summary` puts it into words.

    Attributes:
        base: the most exact model that could be read; its weights and facts are the truth.
        no_reference: why there are no logits to compare with, if there are none.
        weights: the first difference of each readable model, by path.
        layers: where inside the decoder each runtime that parts on a file does so, in the first mode in which it does.
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
    layers: list[LayerParting] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def verdict(self) -> str:
        """``pass`` if nothing failed and something was compared; ``ambiguous`` if what is beyond its budget is explained."""
        right = (
            all(check.ok for check in self.checks)
            and not self.unreadable
            and not self.no_reference
            and not self.facts
            and not any(self.weights.values())
            and not any(state.status == "failed" for state in self.runtimes)
            and bool(self.pairs)
        )
        verdicts = {pair.verdict for pair in self.pairs}
        if not right or FAIL in verdicts:
            return FAIL
        return AMBIGUOUS if AMBIGUOUS in verdicts else PASS
