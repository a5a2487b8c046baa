"""Results of ``speed.py``: where they are stored, and the tables that README.md and docs/speed.md show."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runs import stored_at, write_lines

from deepthin.engine.errors import FormatError

SCHEMA = "deepthin/speed-benchmark/2"
ENGINE, PEER = "deepthin", "llama.cpp"
HEADERS = (
    "model",
    "file",
    "test",
    "deepthin tok/s",
    "llama.cpp tok/s",
    "deepthin / llama.cpp",
    "target",
    "share of read bandwidth",
)
Line = Mapping[str, Any]

# (kind of test, file) -> how often llama.cpp's speed we mean to reach, on one and on more threads
_TARGETS = {
    ("tg", "q4_0"): (1.6, 2.0),
    ("tg", "q8_0"): (1.5, 2.0),
    ("tg", "q4_1"): (2.5, 2.5),
    ("tg", "q4_k_m"): (2.5, 2.5),
    ("tg", "f16"): (1.0, 1.4),
    ("tg", "bf16"): (1.0, 1.4),
    ("pp", "q4_0"): (2.0, 2.0),
    ("pp", "q8_0"): (2.0, 2.0),
    ("pp", "f16"): (1.2, 1.2),
}
_SMALL = "15m"  # the cache-resident model has a target of its own
_SMALL_TARGET = 3.0


def target(model: str, test: str, file: str, threads: int) -> float | None:
    """The ratio to llama.cpp aimed at, None where there is none."""
    if "@" in test:
        return None
    if model == _SMALL:
        return _SMALL_TARGET if test.startswith("tg") else None
    goals = _TARGETS.get((test[:2], file))
    return goals[min(threads, 2) - 1] if goals else None


def case(line: Line) -> tuple[Any, ...]:
    """What identifies a line within one run."""
    return line["model"], line["file"], line["test"], line["threads"], line["runtime"]


def save(lines: Sequence[Line], results: Path) -> Path:
    """Add ``lines`` to the file of their run; a case that was there is replaced. The file is written whole."""
    path = stored_at(lines[0], results)
    new = {case(line): line for line in lines}
    old = {case(line): line for line in (read(path) if path.exists() else [])}
    return write_lines(path, {**old, **new}.values())


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of one file; none when it is another benchmark's.

    Raises:
        FormatError: a line is no JSON object with a schema.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        ours = bool(lines) and all(line["schema"] == SCHEMA for line in lines)
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path.name}: a line is no JSON object with a schema ({error}); measure again") from error
    return lines if ours else []


def newest(results: Path) -> list[list[dict[str, Any]]]:
    """The run whose first line is the latest, for each machine, the latest machine first.

    Raises:
        FormatError: there are no results, or a line is none of this benchmark's.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("*/*.jsonl")):
        lines = read(path)
        kept = runs.get(path.parent.name)
        if lines and (kept is None or lines[0]["created_utc"] > kept[0]["created_utc"]):
            runs[path.parent.name] = lines
    if not runs:
        raise FormatError("benchmarks/results holds no speed results yet; run benchmarks/speed.py without --no-measure first")
    return sorted(runs.values(), key=lambda lines: str(lines[0]["created_utc"]), reverse=True)


def render(lines: Sequence[Line], *, models: Iterable[str] | None = None) -> str:
    """The Markdown table of one run, thread counts side by side in each cell; machine, commit and commands below."""
    wanted = list(models) if models is not None else None
    chosen = [line for line in lines if wanted is None or line["model"] in wanted]
    rows: dict[tuple[str, ...], list[tuple[Line, Line]]] = {}
    for ours, theirs in pairs(chosen):
        rows.setdefault((ours["model"], ours["file"], ours["test"]), []).append((ours, theirs))
    marks: dict[str, str] = {}  # what speaks against a cell -> its mark
    table = ["| " + " | ".join(HEADERS) + " |", "|---|---|---" + "|--:" * (len(HEADERS) - 3) + "|"]
    for (model, file, test), cells in rows.items():
        goals = [target(model, test, file, ours["threads"]) for ours, _ in cells]
        columns = [
            model,
            file.upper(),
            test,
            " / ".join(_rate(ours) for ours, _ in cells),
            " / ".join(_rate(theirs) for _, theirs in cells),
            " / ".join(_ratio(ours, theirs, marks) for ours, theirs in cells),
            " / ".join(f"{goal:.1f}" for goal in goals if goal is not None),
            " / ".join(_share(ours) for ours, _ in cells if ours["roofline_share"] is not None),
        ]
        table.append("| " + " | ".join(columns) + " |")
    return "\n".join([*table, "", *_caption(chosen, marks)])


def render_depth(lines: Sequence[Line]) -> str:
    """How much slower a token is at a depth than in an empty cache, ours beside llama.cpp's; empty where none was measured."""
    flat = {(ours["model"], ours["file"], ours["threads"]): (ours, theirs) for ours, theirs in pairs(lines) if _is_flat(ours)}
    table = []
    for ours, theirs in pairs(lines):
        base = flat.get((ours["model"], ours["file"], ours["threads"]))
        if base is None or not ours["test"].startswith("tg") or "@" not in ours["test"] or theirs["status"] != "ran":
            continue
        mine, other = (_slower(one, before) for one, before in zip((ours, theirs), base, strict=True))
        added = (mine - 1) * _s(base[0]) / ((other - 1) * _s(base[1]))
        table.append(
            f"| {ours['model']} | {ours['file'].upper()} | {ours['test'].partition('@d')[2]} | {ours['threads']} "
            f"| {mine:.2f}x | {other:.2f}x | {added:.0%} |"
        )
    if not table:
        return ""
    head = "| model | file | depth | threads | deepthin slower by | llama.cpp slower by | added time of llama.cpp's |"
    return "\n".join([head, "|---|---|--:|--:|--:|--:|--:|", *table])


def pairs(lines: Iterable[Line]) -> list[tuple[Line, Line]]:
    """(engine, llama.cpp) lines of each case that both have, in the order measured."""
    cases: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        cases.setdefault(case(line)[:-1], {})[line["runtime"]] = line
    return [(one[ENGINE], one[PEER]) for one in cases.values() if {ENGINE, PEER} <= set(one)]


def ratios(lines: Iterable[Line]) -> dict[str, float]:
    """Engine over llama.cpp by case, for scripts: ``{"smollm2-135m q4_0 tg128 2": 2.1}``."""
    return {
        " ".join(map(str, case(ours)[:-1])): _inverse(theirs["ratio_to_engine"])["median"]
        for ours, theirs in pairs(lines)
        if theirs["status"] == "ran"
    }


def rewrite(document: Path, name: str, text: str) -> None:
    """Put ``text`` between the lines ``<!-- name -->`` and ``<!-- /name -->`` of ``document``.

    Raises:
        FormatError: the markers are not there, once each and in order.
    """
    before, _, after = _split(document, name)
    unfinished = document.with_suffix(".partial")
    unfinished.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->{after}", encoding="utf-8")
    os.replace(unfinished, document)


def text_in(document: Path, name: str) -> str:
    """What stands between the markers ``name`` of ``document``, without surrounding blank lines.

    Raises:
        FormatError: the markers are not there, once each and in order.
    """
    return _split(document, name)[1].strip()


def _split(document: Path, name: str) -> tuple[str, str, str]:
    found = re.split(f"<!-- /?{re.escape(name)} -->", text := document.read_text(encoding="utf-8"))
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    if len(found) != 3 or text.count(first) != 1 or text.index(first) > text.index(last):
        raise FormatError(f"{document.name}: needs one line {first} and below it one line {last}")
    return found[0], found[1], found[2]


def _caption(lines: Sequence[Line], marks: Mapping[str, str]) -> list[str]:
    first = lines[0]
    machine, versions = first["machine"], first["machine"]["versions"]
    threads = " / ".join(str(count) for count in sorted({line["threads"] for line in lines}))
    text = [
        f"Threads: {threads}. Medians, ratios with 95 % intervals; runtimes take turns within each round and load the same "
        f"file; read bandwidth is measured in the same rounds, over as many bytes as a token reads, for decode only. "
        f"Measured {first['created_utc'][:10]} on {machine.get('cpu_model', machine['arch'])} ({machine['usable_cpus']} CPUs, "
        f"{machine['simd']}, {machine['os']}), commit {first['commit']}{' with local changes' if first['dirty'] else ''}, "
        f"llama-cpp-python {versions.get('llama-cpp-python', 'unknown')}, {_commands(lines)}."
    ]
    if marks:
        listed = "; ".join(f"[{mark}] {flags}" for flags, mark in marks.items())
        text.append(f"Flagged by the measuring protocol, so trust the cell less: {listed}.")
    return text


def _commands(lines: Sequence[Line]) -> str:
    """The command, or how many of them there were and how many rounds they took."""
    calls = {line["command"] for line in lines}
    if len(calls) == 1:
        return f"`{calls.pop()}`"
    rounds = sorted({line["config"]["repetitions"] for line in lines})
    return f"{len(calls)} calls of `python benchmarks/speed.py` with {' or '.join(map(str, rounds))} rounds a batch"


def _rate(line: Line) -> str:
    return f"{line['tok_s']['median']:.0f}" if line["status"] == "ran" else f"{line['status']}: {line['why']}"


def _ratio(ours: Line, theirs: Line, marks: dict[str, str]) -> str:
    if theirs["status"] != "ran":
        return ""
    value = _inverse(theirs["ratio_to_engine"])
    flags = ", ".join(sorted({*ours["flags"], *theirs["flags"]}))
    mark = f" [{marks.setdefault(flags, _letters(len(marks)))}]" if flags else ""
    return f"{value['median']:.2f} ({value['ci_low']:.2f}..{value['ci_high']:.2f}){mark}"


def _share(line: Line) -> str:
    return f"{line['roofline_share']['median']:.0%} of {line['bandwidth'][0]['bytes_per_s']['median'] / 1e9:.0f} GB/s"


def _letters(number: int) -> str:
    """a, b ... z, aa, ab ..."""
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def _is_flat(line: Line) -> bool:
    return line["test"].startswith("tg") and "@" not in line["test"] and line["status"] == "ran"


def _s(line: Line) -> float:
    """Seconds a token."""
    return 1 / float(line["tok_s"]["median"])


def _slower(line: Line, before: Line) -> float:
    return _s(line) / _s(before)


def _inverse(ratio: Mapping[str, Any]) -> dict[str, float]:
    return {"median": 1 / ratio["median"], "ci_low": 1 / ratio["ci_high"], "ci_high": 1 / ratio["ci_low"]}
