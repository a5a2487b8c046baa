"""``deepthin verify DIR``: checksums, then equal logits in every runtime, prefill and cached decode."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from deepthin.cli.arguments import argument, one_of, parse_path
from deepthin.cli.outcome import Outcome
from deepthin.cli.progress import Progress
from deepthin.cli.table import table

RUNTIMES = ("engine", "onnxruntime", "llama.cpp", "genai", "transformers.js")
EXAMPLES = """examples:
  deepthin verify bundle
  deepthin verify run/export --runtimes engine,onnxruntime
  deepthin verify bundle --json > verdict.json

Exit code 0 says that all files are whole and every runtime that is installed gave the logits of the NumPy reference
within the named budget; 4 says where they first part. A runtime that is not installed is named as skipped.
The verdict, and which versions gave it, are noted in manifest.json.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("folder", type=argument(parse_path), metavar="DIR", help="a folder written by deepthin export")
    parser.add_argument("--runtimes", type=one_of(*RUNTIMES), metavar="R,R,..", help="default: every one installed")
    parser.add_argument("--no-record", action="store_true", help="leave the verdict out of the bundle's manifest.json")


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Verify DIR.

    Raises:
        DeepthinError: DIR is no bundle, or a named runtime is unknown.
    """
    from deepthin.export.manifest import record_verdict
    from deepthin.export.verify import verify_bundle

    result = verify_bundle(options.folder, runtimes=options.runtimes, progress=progress)
    text = verdict_text(result)
    if not options.no_record and (why := record_verdict(options.folder, result)):
        text += f"\nnote: the manifest does not say so, since it cannot be written ({why})"
    return Outcome("verification", result, text, 0 if result["verdict"] == "pass" else 4)


def verdict_text(result: Mapping[str, Any]) -> str:
    """What was found out in words, then one row per compared pair."""
    rows = []
    for pair in result["pairs"]:
        figures = ["-" if pair.get(key) is None else f"{pair[key]:.1e}" for key in ("max_abs", "nmse", "kl")]
        top1 = "-" if pair.get("top1") is None else f"{pair['top1']:.1%}"
        rows.append((pair["b"], pair["file"], pair["phase"], *figures, top1, "ok" if pair["ok"] else "FAIL"))
    lines = list(result["summary"])
    if rows:
        lines = [table(("runtime", "file", "phase", "max abs", "nmse", "kl", "top-1", ""), rows, left=3), "", *lines]
    return "\n".join(lines)
