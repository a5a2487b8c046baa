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

Exit code 0 ("pass") says that all files are whole and every runtime that is installed gave the logits of the NumPy
reference within the named budget, llama.cpp in strict and default mode, onnxruntime at accuracy levels 0 and 4. Exit code 4
says where they first part, down to the block ("fail"), or that only near ties or the rounding of activations part them, so
that nothing is known to be wrong and nothing proven ("ambiguous"). A runtime that is not installed is named as skipped.
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
        tops = ["-" if pair.get(key) is None else f"{pair[key]:.1%}" for key in ("top1", "top10")]
        told = {"pass": "ok", "ambiguous": "ambiguous", "fail": "FAIL"}[pair["verdict"]]
        runtime = f"{pair['b']}, {pair['mode']}" if pair["mode"] else pair["b"]
        rows.append((runtime, pair["file"], pair["phase"], *figures, *tops, told))
    lines = list(result["summary"])
    if rows:
        heads = ("runtime", "file", "phase", "max abs", "nmse", "kl", "top-1", "top-10", "")
        lines = [table(heads, rows, left=3), "", *lines]
    return "\n".join(lines)
