"""Writes a bundle: one set of weights as folders for four kinds of runtime, and a manifest, whole or not at all.

Each quantisation is made once and its integers go into the GGUF and the ONNX file alike. Every folder loads as it is. Layout:

    hf/config.json, model.safetensors, generation_config.json
    genai/<quant>/genai_config.json, model.onnx
    transformersjs/config.json, generation_config.json, onnx/model.onnx (f32), model_fp16.onnx (f16), model_q4.onnx (q4_0), \
        model_quantized.onnx (q8_0)
    gguf/model-<quant>.gguf
    manifest.json

All but gguf have tokenizer.json and tokenizer_config.json beside their configuration if the model has a tokenizer. An ONNX file
has the same bytes in both places.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepthin._version import VERSION
from deepthin.engine.accounting import count_params
from deepthin.engine.errors import DeepthinError, FormatError, UnsupportedError, UsageError
from deepthin.engine.formats import STORED, scheme_named
from deepthin.engine.model import Model
from deepthin.export.bundle_files import BundleWriter
from deepthin.export.feasibility import ONNX_TARGETS, TARGETS, expand_targets, refusals, require_targets
from deepthin.export.file_sizes import stored_as
from deepthin.export.gguf_writer import body_format
from deepthin.export.manifest import FILE_NAME, SCHEMA, read_manifest, unlisted_files, write_manifest
from deepthin.export.onnx_profiles import profile_named
from deepthin.export.target_profiles import TARGET_PROFILES

DEFAULT_QUANTS = ("f32", "f16", "q8_0", "q4_0")


def export_bundle(
    model: Model,
    out: Path,
    *,
    targets: Sequence[str] = TARGETS,
    quants: Sequence[str] = DEFAULT_QUANTS,
    hf_dtype: str = "f32",
    onnx_profile: str = "contrib",
    accuracy_level: int = 4,
    skip_infeasible: bool = False,
    seed: int | None = None,
    created_utc: str | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Write ``model`` to the folder ``out`` and return the manifest.

    Matrices already stored as a wanted quantisation are copied bit for bit; all others are dequantised and quantised
    anew, so ``q4_0`` of a q4_1 model is a second rounding, while its ``q4_1`` keeps every integer.

    Args:
        model: any stored formats.
        out: absent, empty, or (with ``overwrite``) an older bundle without foreign files.
        targets: of hf, genai, transformersjs and gguf; onnx is short for the two in the middle.
        quants: of the GGUF files, by format or with another one for embedding and head (``q4_0-head_f16``); ONNX gets
            those whose body it has operators for (f32, f16, q8_0, q4_0, q4_1). ``stored`` keeps every tensor as the model
            stores it, a K-quant mixture included.
        hf_dtype: f32, f16 or bf16.
        onnx_profile: which operators ONNX files use; a name out of :data:`deepthin.export.onnx_profiles.PROFILES`.
        accuracy_level: of 4 and 8 bit ONNX weights. At 0 onnxruntime dequantises in each product, which is slower than f32
            weights are; see :func:`deepthin.export.onnx_model.write_onnx`.
        skip_infeasible: leave out targets that cannot express the shape and say so in the manifest.
        seed: of random weights, for the manifest.
        created_utc: time for the manifest; without one the whole bundle depends on the model alone.
        overwrite: replace an older bundle.
        progress: told the path of each file before it is written.

    Raises:
        UsageError: an unknown target or quantisation, or nothing to write.
        UnsupportedError: a target cannot express the shape (all of them, with ``skip_infeasible``).
        FormatError: ``out`` is in use, or a value fits no wanted format.
        DeepthinError: the file system refuses.
    """
    targets, quants = expand_targets(targets), tuple(dict.fromkeys(_quant_name(quant) for quant in quants))
    profile = profile_named(onnx_profile)
    refused = refusals(targets, model.shape)
    if not skip_infeasible:
        require_targets(targets, model.shape)
    feasible = [target for target in targets if target not in refused]
    if refused and not feasible:
        require_targets(targets, model.shape)
    onnx = [target for target in feasible if target in ONNX_TARGETS]
    no_operator = [quant for quant in quants if not profile.writes(quant)] if onnx else []
    nothing_fits = bool(onnx) and onnx == feasible and len(no_operator) == len(quants)
    if not feasible or not (quants or feasible == ["hf"]) or nothing_fits:
        raise UsageError(
            f"nothing to export: targets {list(targets)} with quants {list(quants)}; targets are {', '.join(TARGETS)}, "
            f"and ONNX files come in {', '.join(profile.quants)}"
        )
    left_out = _too_large(model, onnx, [quant for quant in quants if profile.writes(quant)], profile.name, accuracy_level)
    for target, reasons in left_out.items():
        if not skip_infeasible and len(reasons) == len(quants) - len(no_operator):
            why = next(iter(reasons.values()))
            raise UnsupportedError(
                f"cannot export {model.shape.text} ({target}: {why}); add a smaller format to --quant, or leave the target out"
            )
    partial = out.parent / f".{out.name}.partial-{secrets.token_hex(4)}"
    writer = BundleWriter(partial, hf_dtype, profile, accuracy_level, progress or (lambda path: None), left_out)
    made = [folder for folder in out.parents if not folder.exists()]  # the innermost first
    done = False
    try:
        _require_free(out, overwrite)
        partial.mkdir(parents=True)
        writer.write(model, feasible, quants)
        document = {
            "schema": SCHEMA,
            "version": VERSION,
            "created_utc": created_utc,
            "name": model.name,
            "shape": model.shape.to_json(),
            "params": count_params(model.shape).total,
            "seed": seed,
            "source_quant": body_format(model).name,
            "targets": feasible,
            "quants": list(quants),
            "refused": refused,
            "left_out": left_out,
            "not_in_onnx": no_operator,
            "onnx": profile.record(model.shape, quants) if onnx else None,
            "onnx_accuracy_level": accuracy_level if onnx else None,
            "files": [asdict(file) for file in writer.files],
            "memory": writer.memory,
            "versions": {"deepthin": VERSION, **{name: version(name) for name in ("numpy", "onnx")}},
            "verification": None,  # until `deepthin verify` has run
        }
        write_manifest(partial, document)
        _move_into_place(partial, out)
        done = True
    except OSError as error:
        reason = error.strerror or str(error)
        raise DeepthinError(f"{out}: the bundle cannot be written ({reason}); is there space and permission?") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in () if done else made:
            with contextlib.suppress(OSError):  # it holds something of another's by now
                folder.rmdir()
    return document


def _too_large(
    model: Model, targets: Sequence[str], quants: Sequence[str], profile: str, accuracy_level: int
) -> dict[str, dict[str, str]]:
    """By target and format, why a decoder is too large there; targets that take all are left out."""
    found: dict[str, dict[str, str]] = {}
    for target in targets:
        limit = TARGET_PROFILES[target].max_bytes
        for quant in quants if limit is not None else ():
            from deepthin.export.onnx_model import onnx_file_bytes  # loads `onnx`

            size = sum(onnx_file_bytes(stored_as(model, quant), profile=profile, accuracy_level=accuracy_level))
            if limit is not None and size > limit:
                why = f"{quant} takes {size} bytes, but at most {limit} are possible: {TARGET_PROFILES[target].why_limit}"
                found.setdefault(target, {})[quant] = why
    return found


def _quant_name(quant: str) -> str:
    return STORED if quant == STORED else scheme_named(quant, to_make=True).name


def _require_free(out: Path, overwrite: bool) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FormatError(f"{out}: is {'a link' if out.is_symlink() else 'a file'}; name a folder that does not exist yet")
    if not out.exists() or not any(out.iterdir()):
        return
    if not (out / FILE_NAME).is_file():
        raise FormatError(f"{out}: is not empty and no bundle (it has no {FILE_NAME}); name another folder")
    if not overwrite:
        raise FormatError(f"{out}: holds a bundle already; name another folder, or replace it with --force")
    foreign = unlisted_files(out, (file.path for file in read_manifest(out).files))
    if foreign:
        raise FormatError(
            f"{out}: holds '{foreign[0]}', which is no part of the bundle there, so it is not overwritten; move it away"
        )


def _move_into_place(partial: Path, out: Path) -> None:
    """Put ``partial`` at ``out``; an older bundle there is set aside first and comes back if that fails."""
    if not out.exists():
        partial.rename(out)
        return
    aside = out.parent / f".{out.name}.replaced-{secrets.token_hex(4)}"
    out.rename(aside)
    try:
        partial.rename(out)
    except BaseException:  # Ctrl-C too
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
