"""What the benchmark scripts share: where results are stored, and kernels compiled before anything is timed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def stored_at(line: Mapping[str, Any], results: Path, ending: str = "") -> Path:
    """The file of the run that ``line`` belongs to: machine, date, commit and ``ending``."""
    from deepthin.profiles.machine import machine_name

    name = f"{line['created_utc'][:10]}-{line['commit']}{'-dirty' if line['dirty'] else ''}{ending}.jsonl"
    return results / machine_name(line["machine"]) / name


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON lines to ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".partial")
    unfinished.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
    os.replace(unfinished, path)
    return path


def commit() -> dict[str, Any]:
    """Short commit hash of this checkout and whether files differ from it; ``unknown`` outside git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return {"commit": git("rev-parse", "--short=10", "HEAD") or "unknown", "dirty": bool(changed)}


def warm_kernels() -> None:
    """Compile or load every kernel, so that its seconds are known and no timing holds them."""
    from deepthin.engine.bandwidth import read_bandwidth
    from deepthin.engine.shape import Shape
    from deepthin.engine.synthetic import SyntheticDecoder

    tiny = Shape.parse("L=1,d=64,heads=1,ff=64,vocab=64")
    with SyntheticDecoder(tiny, "q8_0", threads=1, context=1, num_blocks=1) as decoder:
        decoder.run(1)
    read_bandwidth(1, 1 << 16, 1)
