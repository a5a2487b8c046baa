"""A profile of another device from llama-bench results: rows become probes where the model's shape is known.

A shape is known from a probe kit's file name, from what the caller says about a file, or from the exact parameter count of a
public model. Nothing else is guessed: other rows are left out, with a note.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from deepthin.engine.accounting import count_bytes, count_params
from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.formats import FORMATS
from deepthin.engine.known_shapes import known_shapes
from deepthin.engine.shape import Shape
from deepthin.profiles.kit import parse_probe_name
from deepthin.profiles.latency.curve import BandwidthCurve, flat_curve
from deepthin.profiles.latency.model import LatencyModel, fit_model
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.runtimes import RUNTIMES
from deepthin.profiles.latency.terms import Conditions
from deepthin.profiles.latency.workload import DECODE, PREFILL, TESTS, Workload
from deepthin.profiles.llama_bench_rows import BenchRow
from deepthin.profiles.profile import IMPORTED, Profile
from deepthin.profiles.protocol import reading_flags
from deepthin.profiles.statistics import measured

UNKNOWN_BANDWIDTH = 15e9  # bytes/s; where rows say nothing of the memory, the share of this is fitted over a factor of 4
UNKNOWN_SD = math.log(4.0)
CACHE_SD = math.log(2.0)  # how much faster or slower than memory each working set may be read
SAME_PARAMS = 0.002  # relative; llama.cpp counts rotary factors and pads some vocabularies
SAME_BYTES = 0.15  # relative; files keep the embedding in other formats than ours
_QUANTS = {"all f32": "f32", "f16": "f16", "bf16": "bf16"} | {
    name: name for name in FORMATS if name not in ("f32", "f16", "bf16")
}


def import_profile(
    rows: Sequence[BenchRow], name: str, *, shapes: Mapping[str, Shape] | None = None, title: str | None = None
) -> Profile:
    """A profile called ``name`` from the rows of one device.

    Args:
        rows: checked ones, of one device and one build a runtime.
        name: to find it by; letters, digits, dots and dashes.
        shapes: file name pattern (``*smol*.gguf``) -> shape of the model in it, for files that are no probes.
        title: for people; the CPU that the rows name when None.

    Raises:
        UsageError: the name cannot be a file's.
        FormatError: no row's shape is known.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError(f"profile name {name!r}: letters, digits, dots and dashes are needed, such as my-phone")
    probes: list[Probe] = []
    notes: list[str] = []
    for row in rows:
        found = _shape_of(row, shapes or {})
        if isinstance(found, str):
            notes.append(found)
        else:
            probes.append(_probe(row, *found))
    notes = list(dict.fromkeys(notes))
    if not probes:
        raise FormatError(
            f"llama-bench results: of {len(rows)} rows not one has a known shape ({notes[0]}); say which shape a file has with "
            f"--model '*.gguf=L=..,d=..,heads=..,ff=..,vocab=..'"
        )
    curve = flat_curve(UNKNOWN_BANDWIDTH)
    runtimes = tuple(dict.fromkeys(row.runtime for row in rows))
    return Profile(
        name=name,
        title=title or rows[0].cpu or name,
        basis=IMPORTED,
        created_utc=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine={"cpu_model": rows[0].cpu},
        curve=curve,
        models=imported_models(probes, curve),
        versions={runtime: next(row.build for row in rows if row.runtime == runtime) for runtime in runtimes},
        probes=tuple(probes),
        notes=tuple(notes),
    )


def imported_models(probes: Sequence[Probe], curve: BandwidthCurve) -> tuple[LatencyModel, ...]:
    """Models of every runtime, thread count and test; the memory's rate is fitted along."""
    found = []
    for runtime, threads in dict.fromkeys((probe.runtime, probe.threads) for probe in probes):
        mine = [probe for probe in probes if (probe.runtime, probe.threads) == (runtime, threads)]
        conditions = Conditions(RUNTIMES[runtime], threads, curve, 1.0, UNKNOWN_SD, 1.0, CACHE_SD)
        found += [fit_model(mine, conditions, test) for test in TESTS if any(probe.work.test == test for probe in mine)]
    return tuple(found)


def _shape_of(row: BenchRow, shapes: Mapping[str, Shape]) -> tuple[Shape, str] | str:
    """Shape and format of a row's model, or why they are not known."""
    name = re.split(r"[/\\]", row.filename)[-1]
    probe = parse_probe_name(name)
    if probe is not None:
        return probe
    quant = _quant_of(row, name)
    if quant is None:
        return f"{name}: its format ({row.model_type}) is none of ours"
    for pattern, shape in shapes.items():
        if fnmatch.fnmatchcase(name, pattern):
            return _checked(row, name, shape, quant)
    near = [
        known.shape
        for known in known_shapes().values()
        if not known.accounting_only and abs(row.params / known.params - 1) <= SAME_PARAMS
    ]
    if len(near) != 1:
        return f"{name}: {row.params:,} parameters are those of no public shape known here, or of several"
    return _checked(row, name, near[0], quant)


def _checked(row: BenchRow, name: str, shape: Shape, quant: str) -> tuple[Shape, str] | str:
    params, size = count_params(shape).total, count_bytes(shape, quant).total
    if row.params and abs(row.params / params - 1) > 0.05:
        return f"{name}: holds {row.params:,} parameters, but {shape.text} has {params:,}"
    if row.model_bytes and abs(row.model_bytes / size - 1) > SAME_BYTES:
        return f"{name}: holds {row.model_bytes:,} bytes, but {shape.text} in {quant} has {size:,}"
    return shape, quant


def _quant_of(row: BenchRow, name: str) -> str | None:
    text = row.model_type.lower()
    for words, quant in sorted(_QUANTS.items(), key=lambda item: -len(item[0])):
        if re.search(rf"(^|[\s_]){re.escape(words)}($|[\s_])", text):
            return quant
    match = re.search(r"(?<![a-z0-9])(" + "|".join(sorted(FORMATS, key=len, reverse=True)) + r")", name.lower())
    return match[1] if match else None


def _probe(row: BenchRow, shape: Shape, quant: str) -> Probe:
    if row.gen:
        work = Workload(shape, quant, DECODE, 1, row.depth + row.gen // 2)
        values = [seconds / row.gen for seconds in row.seconds]
    else:
        work = Workload(shape, quant, PREFILL, row.prompt, row.depth)
        values = list(row.seconds)
    return Probe(row.runtime, row.threads, work, measured(values, "s"), reading_flags(values))
