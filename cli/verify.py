"""``deepthin verify DIR``: checksums, then equal logits in every runtime, prefill and cached decode."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepthin.cli.arguments import one_of
from deepthin.cli.outcome import Outcome
from deepthin.cli.progress import Progress
from deepthin.cli.table import table

EXAMPLES = """examples:
  deepthin verify bundle
  deepthin verify run/export --runtimes engine,onnxruntime
  deepthin verify bundle --json > verdict.json

Exit code 0 says that all files are whole and every runtime that is installed gave the logits of the NumPy reference
within the named budget; 4 says where they first part. A runtime that is not installed is named as skipped.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder written by deepthin export")
    parser.add_argument(
        "--runtimes", type=one_of("engine", "onnxruntime", "llama.cpp"), metavar="R,R,..", help="default: every one installed"
    )


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Verify DIR.

    Raises:
        DeepthinError: DIR is no bundle, or a named runtime is unknown.
    """
    from deepthin.export.verify import verify_bundle

    result = verify_bundle(options.folder, runtimes=options.runtimes, progress=progress)
    return Outcome("verification", result, verdict_text(result), 0 if result["verdict"] == "pass" else 4)


def verdict_text(result: Mapping[str, Any]) -> str:
    """Runtimes, damaged files, and one row per compared pair."""
    lines = []
    for runtime in result["runtimes"]:
        why = f": {runtime['why']}" if runtime.get("why") else ""
        lines.append(f"{runtime['name']} {runtime.get('version') or ''} {runtime['status']}{why}".replace("  ", " "))
    rows = []
    for pair in result["pairs"]:
        parted = pair["first_divergence"]
        cells = [f"{pair[key]:.2e}" if pair[key] is not None else "-" for key in ("max_abs", "nmse", "kl")]
        rows.append(
            (pair["a"], pair["b"], pair["file"], pair["phase"], *cells, f"{pair['top1']:.1%}", "ok" if pair["ok"] else "FAIL")
        )
        if parted:
            lines.append(
                f"{pair['a']} and {pair['b']} part at position {parted['position']} of {pair['phase']}: {parted['why']}"
            )
    lines.append(table(("a", "b", "file", "phase", "max abs", "nmse", "kl", "top-1", ""), rows, left=4))
    lines.append(f"verification: {result['verdict']}")
    return "\n".join(lines)
