"""Reads what ``llama-bench -o json`` or ``-o jsonl`` printed (and ``deepthin bench --format llama-bench``), and checks it.

A file may hold one array, one object a line, or several of either. Every problem is one sentence that names the file and row.
Source of the fields: ``tools/llama-bench/llama-bench.cpp`` (test::get_fields) at ggml-org/llama.cpp@0104b15.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepthin.engine.errors import FormatError
from deepthin.profiles.latency.runtimes import LLAMA_CPP, RUNTIMES

MAX_ROWS = 100_000
MAX_FILE_BYTES = 64 << 20
_COUNTS = ("n_prompt", "n_gen", "n_threads", "model_n_params", "model_size")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One line of llama-bench.

    Attributes:
        runtime: llama.cpp, or what our own bench wrote into ``build_commit``.
        build: commit and number.
        cpu: as llama.cpp names it.
        filename: of the model.
        model_type: architecture, size and format in llama-bench's words.
        params: of the model.
        model_bytes: of its tensors.
        threads: used.
        prompt: tokens of the prompt test, or 0.
        gen: tokens decoded, or 0.
        depth: tokens cached before.
        seconds: of each repetition.
    """

    runtime: str
    build: str
    cpu: str
    filename: str
    model_type: str
    params: int
    model_bytes: int
    threads: int
    prompt: int
    gen: int
    depth: int
    seconds: tuple[float, ...]


def parse_rows(text: str, where: str) -> list[BenchRow]:
    """All rows of a file's text.

    Raises:
        FormatError: it is no JSON, a field is missing or wrong, builds or CPUs are mixed, or the times cannot be real.
    """
    objects = _objects(text, where)
    if not objects:
        raise FormatError(f"{where}: holds no rows; run llama-bench with -o json or -o jsonl")
    if len(objects) > MAX_ROWS:
        raise FormatError(f"{where}: {len(objects)} rows, over {MAX_ROWS}; is this the right file?")
    rows = [_row(item, f"{where}: row {number}") for number, item in enumerate(objects, 1)]
    for runtime in dict.fromkeys(row.runtime for row in rows):
        mine = [row for row in rows if row.runtime == runtime]
        _require_one(where, f"{runtime} builds", [row.build for row in mine], "import the rows of one build at a time")
    _require_one(where, "CPUs", [row.cpu for row in rows], "a profile is of one device")
    return rows


def _objects(text: str, where: str) -> list[Any]:
    """Every JSON object in ``text``: arrays are flattened, values may follow one another."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    at = 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text):
            return found
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, at) + 1
            raise FormatError(
                f"{where}: line {line} is no JSON ({error}); keep llama-bench's standard output only, of -o json or -o jsonl"
            ) from error
        found += value if isinstance(value, list) else [value]


def _row(item: Any, where: str) -> BenchRow:
    if not isinstance(item, Mapping):
        raise FormatError(f"{where}: is {type(item).__name__}, but an object as llama-bench prints it is needed")
    counts = {name: _count(item, name, where) for name in _COUNTS}
    depth = _count(item, "n_depth", where) if "n_depth" in item else 0
    if counts["n_threads"] < 1 or counts["n_prompt"] + counts["n_gen"] < 1:
        raise FormatError(f"{where}: {counts['n_threads']} threads and no tokens; is this a row of llama-bench?")
    if counts["n_prompt"] and counts["n_gen"]:
        raise FormatError(f"{where}: a prompt and decoding timed together (-pg) cannot be told apart; use -p and -n")
    backends = str(item.get("backends", "CPU"))
    if item.get("gpu_info") and item.get("n_gpu_layers", 0) and any(part.strip() not in _CPU for part in backends.split(",")):
        raise FormatError(
            f"{where}: ran on {backends} ({item['gpu_info']}), but profiles are of CPUs; run llama-bench with -ngl 0"
        )
    build = f"{item.get('build_commit', 'unknown')} ({item.get('build_number', 0)})"
    return BenchRow(
        runtime=next((name for name in RUNTIMES if str(item.get("build_commit", "")).startswith(f"{name} ")), LLAMA_CPP),
        build=build,
        cpu=str(item.get("cpu_info", "")),
        filename=str(item.get("model_filename", "")),
        model_type=str(item.get("model_type", "")),
        params=counts["model_n_params"],
        model_bytes=counts["model_size"],
        threads=counts["n_threads"],
        prompt=counts["n_prompt"],
        gen=counts["n_gen"],
        depth=depth,
        seconds=_seconds(item, where),
    )


_CPU = ("CPU", "BLAS", "")


def _seconds(item: Mapping[str, Any], where: str) -> tuple[float, ...]:
    samples = item.get("samples_ns")
    if samples is None:
        return _from_mean(item, where)
    if not isinstance(samples, list) or not samples:
        raise FormatError(f"{where}: samples_ns is {samples!r}, but a list of nanoseconds is needed")
    if any(isinstance(ns, bool) or not isinstance(ns, int | float) or not 0 < ns < 1e15 for ns in samples):
        raise FormatError(f"{where}: samples_ns holds something that is no time above 0; the file is damaged")
    if len(samples) > 1 and len(set(samples)) == 1:
        raise FormatError(
            f"{where}: all {len(samples)} repetitions took exactly {samples[0]} ns, which no clock shows; was the file edited?"
        )
    return tuple(ns * 1e-9 for ns in samples)


def _from_mean(item: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """Three values with the stated mean and deviation, for files without samples."""
    mean, deviation = item.get("avg_ns"), item.get("stddev_ns")
    if isinstance(mean, bool) or not isinstance(mean, int | float) or not 0 < mean < 1e15:
        raise FormatError(f"{where}: neither samples_ns nor avg_ns is there; run llama-bench with -o json or -o jsonl")
    if isinstance(deviation, bool) or not isinstance(deviation, int | float) or not 0 < deviation < mean:
        raise FormatError(
            f"{where}: stddev_ns is {deviation!r}, so nothing is known of the noise; run at least 3 repetitions (-r 3)"
        )
    return tuple((mean + sign * deviation) * 1e-9 for sign in (-1, 0, 1))


def _count(item: Mapping[str, Any], name: str, where: str) -> int:
    value = item.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FormatError(f"{where}: {name} is {value!r}, but a whole number is needed; is this a row of llama-bench?")
    return value


def _require_one(where: str, what: str, values: Sequence[str], advice: str) -> None:
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise FormatError(f"{where}: rows of {len(different)} {what} are mixed ({different[0]}, {different[1]}); {advice}")
