"""Error budgets by name, and the gates of the tests, read from ``tolerances.toml``, which must give a reason for each."""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepthin.engine.errors import FormatError

_FILE = Path(__file__).with_name("tolerances.toml")
_GATES = "gate"  # the table whose tables are gates
_REASON_CHARS = 20  # less explains nothing


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for one pair of runtimes; :mod:`deepthin.export.parity` defines the measures.

    Attributes:
        name: its table in the file, for example ``llama_cpp.q4_0``.
        nmse: over all positions.
        position_nmse: at any single position.
        kl: mean over positions, in nats.
        position_kl: at any single position, in nats.
        near_tie: shortfall of the other's top token, in standard deviations of the reference's row.
        reason: why these numbers and not others.
    """

    name: str
    nmse: float
    position_nmse: float
    kl: float
    position_kl: float
    near_tie: float
    reason: str

    def to_json(self) -> dict[str, Any]:
        """All fields except the reason."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "reason"}


def budget_named(name: str) -> Budget:
    """The budget called ``name``, ``runtime.quant``.

    Raises:
        FormatError: there is no such budget; the message lists the known ones.
    """
    known = all_budgets()
    try:
        return known[name]
    except KeyError:
        raise FormatError(f"{_FILE.name}: there is no budget {name!r}; the budgets are {', '.join(known)}") from None


def gate(name: str) -> dict[str, float]:
    """Limits of the table ``[gate.NAME]`` by measure; what they mean, its reason says and the test that reads it.

    Raises:
        FormatError: there is no such gate; the message lists the known ones.
    """
    gates = parse_gates(_FILE.read_text(encoding="utf-8"), _FILE.name)
    if name not in gates:
        raise FormatError(f"{_FILE.name}: there is no gate {name!r}; the gates are {', '.join(gates)}")
    return gates[name]


@functools.cache
def all_budgets() -> dict[str, Budget]:
    """Every budget of the shipped file by name."""
    return parse_budgets(_FILE.read_text(encoding="utf-8"), _FILE.name)


def parse_budgets(text: str, source: str) -> dict[str, Budget]:
    """Read the TOML form: tables ``[runtime.quant]`` with every limit and a ``reason``; gates are passed over.

    Raises:
        FormatError: not TOML, or a limit or the reason is missing, unknown or out of range.
    """
    budgets = {}
    for runtime, tables in _document(text, source).items():
        if runtime == _GATES:
            continue
        for quant, table in tables.items() if isinstance(tables, dict) else [("", tables)]:
            name = f"{runtime}.{quant}"
            budgets[name] = _budget(name, table, source)
    return budgets


def parse_gates(text: str, source: str) -> dict[str, dict[str, float]]:
    """Read the tables ``[gate.NAME]``: any measures with their limits, and a ``reason``; budgets are passed over.

    Raises:
        FormatError: not TOML, or a gate without a reason, without a limit, or with one that is no positive number.
    """
    gates: dict[str, dict[str, float]] = {}
    tables = _document(text, source).get(_GATES, {})
    for name, table in tables.items() if isinstance(tables, Mapping) else [("", tables)]:
        where = f"{source}: [{_GATES}.{name}]"
        if not isinstance(table, Mapping) or len(table) < 2 or "reason" not in table:
            raise FormatError(f"{where} needs a reason and at least one limit")
        for key, value in table.items():
            _check(where, key, value)
        gates[name] = {key: float(value) for key, value in table.items() if key != "reason"}
    return gates


def _document(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{source}: not TOML: {error}") from error


def _budget(name: str, table: Any, source: str) -> Budget:
    wanted = [field.name for field in dataclasses.fields(Budget) if field.name != "name"]
    if not isinstance(table, Mapping) or set(table) != set(wanted):
        found = ", ".join(table) if isinstance(table, Mapping) else repr(table)
        raise FormatError(f"{source}: [{name}] holds {found or 'nothing'}, but exactly {', '.join(wanted)} are needed")
    for key in wanted:
        _check(f"{source}: [{name}]", key, table[key])
    return Budget(name=name, **table)


def _check(where: str, key: str, value: Any) -> None:
    if key == "reason":
        if not isinstance(value, str) or len(value.strip()) < _REASON_CHARS:
            raise FormatError(f"{where} reason is {value!r}; say in a sentence why these limits hold")
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not (value > 0 and math.isfinite(value)):
        raise FormatError(f"{where} {key} is {value!r}, but a positive number is needed")
