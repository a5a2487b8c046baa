"""``deepthin export SOURCE --out DIR``: one set of weights as folders for transformers, genai, transformers.js, llama.cpp."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepthin.cli.arguments import add_source, argument, listed, one_of, parse_path, require_out, whole
from deepthin.cli.outcome import Outcome
from deepthin.cli.progress import Progress
from deepthin.cli.sizes import bytes_text, count_text
from deepthin.cli.source import open_source, parse_scheme
from deepthin.cli.table import table
from deepthin.engine.formats import BODY_QUANTS, STORED

TARGETS = ("hf", "genai", "transformersjs", "gguf", "onnx")
EXAMPLES = """examples:
  deepthin export model.gguf --out bundle
  deepthin export model.gguf --out bundle --to hf,gguf --quant f16,q8_0
  deepthin export hf-folder/ --out bundle --to genai,transformersjs --quant f32,q4_0
  deepthin export q4_k_m.gguf --out bundle --to onnx --quant stored    (the same integers)
  deepthin export smollm2-135m --out twin --seed 7      (random weights in the shape of a known model)

Then: deepthin verify bundle
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    add_source(parser)
    parser.add_argument(
        "--out", type=argument(parse_path), required=True, metavar="DIR", help="folder to write; must be absent or empty"
    )
    parser.add_argument(
        "--to",
        type=one_of(*TARGETS),
        default=list(TARGETS[:-1]),
        metavar="T,T,..",
        help="of hf,genai,transformersjs,gguf (default: all); onnx is short for genai,transformersjs",
    )
    default = ["f32", "f16", "q8_0", "q4_0"]
    parser.add_argument(
        "--quant",
        type=listed(lambda text: STORED if text.strip() == STORED else parse_scheme(text)),
        default=default,
        metavar="Q,Q,..",
        help=f"of {','.join((*BODY_QUANTS, STORED))} (default: {','.join(default)}); stored keeps SOURCE's own formats, "
        "q4_0-head_f16 gives embedding and head another one; "
        "ONNX files are written for f32, f16 (weights only; activations and caches are f32), q8_0, q4_0, q4_1 and stored",
    )
    parser.add_argument(
        "--onnx-profile",
        choices=("contrib", "standard"),
        default="contrib",
        help="operators of ONNX files: onnxruntime's own, fastest there (default), or those of the ONNX standard only",
    )
    parser.add_argument(
        "--onnx-accuracy-level",
        type=int,
        choices=(0, 4),
        default=4,
        help="of quantised ONNX products: 4 (default) rounds activations to int8, as llama.cpp does; 0 computes in f32, slowly",
    )
    parser.add_argument(
        "--hf-dtype", choices=("f32", "f16", "bf16"), default="f32", help="of the Hugging Face weights (default: f32)"
    )
    parser.add_argument(
        "--init", choices=("scaled",), default="scaled", help="random weights, where SOURCE has none: residual outputs scaled"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of random weights (default: 0)")
    parser.add_argument(
        "--force",
        "--overwrite",
        dest="overwrite",
        action="store_true",
        help="replace an earlier export in DIR, as a whole; it stays if the new one fails",
    )


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Export SOURCE.

    Raises:
        DeepthinError: SOURCE cannot be read, a target cannot express it, or DIR cannot be written.
    """
    from deepthin.export.bundle import export_bundle
    from deepthin.export.manifest import FILE_NAME

    require_out(options.out, FILE_NAME, "bundle")
    source = open_source(options.source)
    progress("making random weights" if source.model is None else "reading weights")
    model = source.weights(seed=options.seed, quant=None if source.model is not None else "f32")
    manifest = export_bundle(
        model,
        options.out,
        targets=options.to,
        quants=options.quant,
        hf_dtype=options.hf_dtype,
        onnx_profile=options.onnx_profile,
        accuracy_level=options.onnx_accuracy_level,
        seed=options.seed if source.model is None else None,
        overwrite=options.overwrite,
        progress=lambda path: progress(f"writing {path}"),
    )
    return Outcome("manifest", manifest, manifest_text(manifest, options.out))


def manifest_text(manifest: Mapping[str, Any], out: Path) -> str:
    """The files of a bundle as a table, and what was left out and why."""
    rows = [
        (item["path"], item["format"], item["quant"], bytes_text(item["bytes"]), item["sha256"][:12])
        for item in manifest["files"]
    ]
    lines = [f"{out}: {manifest['shape']['text']}, {count_text(manifest['params'])} parameters"]
    lines.append(table(("file", "format", "quant", "bytes", "sha256"), rows, left=3))
    lines += [f"left out {target}: {why}" for target, why in manifest["refused"].items()]
    dtype = next((item["quant"] for item in manifest["files"] if item["format"] == "safetensors"), None)
    if dtype is not None:
        lines.append(f"hf holds {dtype} weights, as --hf-dtype says; --quant applies to gguf and onnx")
    if manifest["not_in_onnx"]:
        kind = "operators" if manifest["onnx"]["profile"] == "contrib" else "standard operators"
        lines.append(f"onnx has no files for {', '.join(manifest['not_in_onnx'])}, since it has no {kind} for them")
    lines += [
        f"left out {target} {quant}: {why}" for target, some in manifest["left_out"].items() for quant, why in some.items()
    ]
    if manifest["onnx"]:
        lines += _onnx_lines(manifest["onnx"])
    lines += _memory_lines(manifest["memory"])
    return "\n".join(lines)


def _onnx_lines(record: Mapping[str, Any]) -> list[str]:
    """What the ONNX files need, which rung of the attention ladder they are on and why."""
    versions: dict[str, list[str]] = {}
    for quant, version in record["onnxruntime_by_quant"].items():
        versions.setdefault(version, []).append(quant)
    needs = ", ".join(f"onnxruntime {version} for {' '.join(quants)}" for version, quants in versions.items())
    return [f"onnx: opset {record['opset']}, {needs}; {record['attention']}", *(f"onnx: {note}" for note in record["notes"])]


def _memory_lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What weights take once they are loaded; targets that hold the same stand together."""
    held: dict[tuple[str, int, str], list[str]] = {}
    for entry in entries:
        held.setdefault((entry["quant"], entry["bytes"], entry["holds"]), []).append(entry["runtime"])
    return [
        f"in memory: {bytes_text(size)} of {quant} in {', '.join(names)} ({holds})"
        for (quant, size, holds), names in held.items()
    ]
