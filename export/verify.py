"""``verify_bundle``: do all files of a bundle hold the same model, and do all runtimes compute it?

Four passes, each of which can fail the bundle:
1. checksums: every file against the manifest;
2. facts: heads, epsilon, rotary base and the like, file against file;
3. weights: every tensor against what its format can hold of the truth, bit for bit;
4. logits: every runtime in every mode against the float64 reference over a fixed token list, whole, token by token, in pieces.

Where logits part, the hidden states are compared to say in which block. Where only logits part, and near ties or the rounding
of activations explain it, the verdict is "ambiguous" (:mod:`deepthin.export.ambiguity`): nothing is known to be wrong, and
nothing is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deepthin._version import VERSION
from deepthin.engine.errors import DeepthinError, PeerError, PeerMissingError, UsageError
from deepthin.engine.formats import F32, STORED, scheme_named
from deepthin.engine.shape import Shape
from deepthin.export.ambiguity import excuse
from deepthin.export.contents import (
    Contents,
    ModelFile,
    compare_facts,
    compare_tokenizers,
    manifest_facts,
    model_files,
    read_contents,
)
from deepthin.export.findings import Findings, Pair, RuntimeState
from deepthin.export.layers import LayerParting, first_parting_point
from deepthin.export.manifest import Manifest, check_files, read_manifest, unlisted_files
from deepthin.export.parity import ParityReport, compare_logits
from deepthin.export.runs import RUNTIMES, Mode, Runtime, make_runtime, reads
from deepthin.export.summary import summarize
from deepthin.export.tolerances import budget_named
from deepthin.export.truth import Truth
from deepthin.export.weight_parity import first_weight_difference

NUM_TOKENS = 32
_SEED = 20
_DEADLINE_S = 300.0
_ONNX_BODIES = ("f32", "f16", "q8_0", "q4_0", "q4_1")
_ONNX_ROUNDING = {
    "q4_1": 1e-6,
    STORED: 1e-6,
}  # what is added to a block is rounded: 7e-8 of the largest value, ten times that allowed


def verify_bundle(
    path: Path,
    *,
    runtimes: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    deadline_s: float = _DEADLINE_S,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Verify the bundle in folder ``path``; whatever is wrong with it is in the result, never raised.

    Args:
        path: a folder written by ``export_bundle``.
        runtimes: names out of :data:`deepthin.export.runs.RUNTIMES`; all of them when absent.
        tokens: token ids to compare logits over; a fixed random list of 32 when absent.
        deadline_s: seconds for each call to a peer.
        progress: told what comes next, in a few words.

    Returns:
        ``verdict`` ("pass", "ambiguous" or "fail"), ``summary`` (lines for people), ``first_parting``, ``tokens``, and the
        details under ``runtimes``, ``files``, ``facts``, ``weights``, ``pairs`` and ``layers``.

    Raises:
        FormatError: ``path`` has no readable manifest.
        UsageError: an unknown runtime, or token ids outside the vocabulary or beyond the context.
    """
    wanted = tuple(runtimes) if runtimes is not None else RUNTIMES
    for name in wanted:
        if name not in RUNTIMES:
            raise UsageError(f"runtime {name!r} is unknown; use one of {', '.join(RUNTIMES)}")
    say = progress or (lambda _: None)
    root = Path(path)
    manifest = read_manifest(root)
    ids = _token_list(manifest.shape, tokens)
    found = Findings(models=model_files(manifest), num_tokens=len(ids))
    say("checksums")
    found.checks = list(check_files(root, manifest))
    found.unlisted = unlisted_files(root, [file.path for file in manifest.files])
    pool = {name: make_runtime(name, deadline_s=deadline_s) for name in wanted}
    try:
        found.runtimes = [_probe(name, pool, found.models) for name in RUNTIMES]
        _check_models(root, manifest, ids, found, pool, say)
    finally:
        for runtime in pool.values():
            runtime.close()
    for state in found.runtimes:
        if state.status == "ran" and not state.num_runs:
            state.status, state.why = "failed", "no file that it reads could be compared"
    return _document(found, ids)


def _token_list(shape: Shape, tokens: Sequence[int] | None) -> list[int]:
    if tokens is None:
        count = min(NUM_TOKENS, shape.max_seq_len)
        return [int(token) for token in np.random.default_rng(_SEED).integers(0, shape.vocab_size, count)]
    ids = [int(token) for token in tokens]
    if not 1 <= len(ids) <= shape.max_seq_len or not all(0 <= token < shape.vocab_size for token in ids):
        raise UsageError(
            f"verify: the tokens must be 1 to {shape.max_seq_len} ids from 0 to {shape.vocab_size - 1}; {len(ids)} were given"
        )
    return ids


def _probe(name: str, pool: dict[str, Runtime], models: Sequence[ModelFile]) -> RuntimeState:
    """Whether runtime ``name`` can run at all; one that cannot leaves the pool."""
    state = RuntimeState(name)
    if name not in pool:
        state.status, state.why = "skipped", "not asked for"
        return state
    runtime = pool[name]
    try:
        state.version = runtime.version()
        if not any(reads(runtime, file) for file in models):
            state.status, state.why = "skipped", f"the bundle holds no {' or '.join(runtime.kinds)} model"
    except PeerMissingError as error:
        state.status, state.why = "skipped", str(error)
    except PeerError as error:
        state.status, state.why = "failed", str(error)
    if state.status != "ran":
        pool.pop(name).close()
    return state


def _check_models(
    root: Path, manifest: Manifest, ids: list[int], found: Findings, pool: dict[str, Runtime], say: Callable[[str], None]
) -> None:
    truth: Truth | None = None
    shape, has_text, tokenizer = manifest.shape.unrolled, False, None
    whole = {check.path for check in found.checks if check.ok}
    last: Contents | None = None
    for file in found.models:  # the most exact one comes first and is the base
        say(f"reading {file.path}")
        if truth and last and file.sha256 and file.sha256 == last.file.sha256 and {file.path, last.file.path} <= whole:
            found.weights[file.path] = found.weights[last.file.path]  # the same bytes for another runtime
            _run(root, replace(last, file=file), truth, ids, found, pool, say, again=True)
            continue
        try:
            contents = last = read_contents(root, file, shape)
            weights = contents.weights()
        except DeepthinError as error:
            found.unreadable[file.path], last = str(error), None
            continue
        if truth is None:
            found.base = file.path
            has_text = contents.model is not None
            if contents.model is not None:
                tokenizer, shape = contents.model.tokenizer, contents.model.shape
                found.facts += manifest_facts(found.base, manifest.shape, shape)
            truth = Truth(shape, dict(weights), file.quant, ids)
        else:
            found.facts += compare_facts(found.base, shape, contents)
            if has_text:
                found.facts += compare_tokenizers(found.base, tokenizer, contents)
        say(f"comparing the weights of {file.path}")
        rounding = _onnx_rounding(file.quant) if file.kind == "onnx" else 0.0
        wanted = truth.weights(file, weights)
        found.weights[file.path] = first_weight_difference(truth.shape, wanted, weights, rounding=rounding)
        weights.clear()
        _run(root, contents, truth, ids, found, pool, say)


def _run(
    root: Path,
    contents: Contents,
    truth: Truth,
    ids: list[int],
    found: Findings,
    pool: dict[str, Runtime],
    say: Callable[[str], None],
    *,
    again: bool = False,
) -> None:
    """Logits of one file in every runtime that reads it; ``again`` for bytes that those for the kind of file have run."""
    file = contents.file
    say(f"reference logits for {file.path}")
    try:
        reference = truth.logits()
    except DeepthinError as error:
        found.no_reference = str(error)
        return
    static_ok = not found.weights.get(file.path) and not any(fact.file == file.path for fact in found.facts)
    for state in found.runtimes:
        runtime = pool.get(state.name)
        if runtime is None or not reads(runtime, file) or (again and file.kind in runtime.kinds):
            continue
        state.num_runs += 1
        for mode in runtime.modes(contents):
            say(f"{file.path} in {state.name}{f', {mode.name}' if mode.name else ''}")
            budget = budget_named(f"{mode.key}.{_budget_quant(file.quant, file.kind)}")
            parted, runs = "", True
            try:
                for phase, logits in runtime.logits(root, contents, ids, mode):
                    if logits.shape != reference.shape:
                        why = f"its logits are {list(logits.shape)}, but {list(reference.shape)} are needed"
                        found.pairs.append(Pair(state.name, file.path, phase, None, why, mode.name))
                        continue
                    report = compare_logits(reference, logits, budget)
                    why = "" if report.ok or not static_ok else _excuse(truth, contents, mode, report)
                    found.pairs.append(Pair(state.name, file.path, phase, report, "", mode.name, why))
                    parted = parted or ("" if report.ok else phase)
            except DeepthinError as error:
                state.status, state.why, runs = "failed", state.why or f"{file.path}: {error}", False
                found.pairs.append(Pair(state.name, file.path, "run", None, str(error), mode.name))
            if parted and not any((at.runtime, at.file) == (state.name, file.path) for at in found.layers):
                say(f"hidden states of {file.path} in {state.name}")
                found.layers.append(_layer(root, contents, truth, ids, runtime, mode, parted))
            if not runs:
                break  # the other modes would fail in the same way


def _excuse(truth: Truth, contents: Contents, mode: Mode, report: ParityReport) -> str:
    made = truth.noise(contents, mode.rounding)
    return excuse(report, [compare_logits(truth.logits(), item.logits, report.budget) for item in made])


def _layer(
    root: Path, contents: Contents, truth: Truth, ids: list[int], runtime: Runtime, mode: Mode, phase: str
) -> LayerParting:
    """Where inside the decoder ``runtime`` leaves the reference in ``phase``."""
    file = contents.file
    budget = budget_named(f"{mode.key}.{_budget_quant(file.quant, file.kind)}")
    try:
        streams = runtime.streams(root, contents, ids, mode, phase)
        noise = [item.streams for item in truth.noise(contents, mode.rounding)] if streams else []
        point, why = first_parting_point(truth.streams(), streams, noise, budget)
    except DeepthinError as error:
        point, why = "", f"its hidden states cannot be had: {error}"
    return LayerParting(runtime.name, mode.name, file.path, phase, point, why)


def _budget_quant(quant: str, kind: str) -> str:
    """The format whose tolerances a file is held to: the coarser one where its head has a format of its own.

    In ONNX, floats are f32, and what only heads have is held to the tolerances of mixtures.
    """
    if quant == STORED:
        return quant
    coarsest = scheme_named(quant).coarsest
    if kind != "onnx" or coarsest.name in _ONNX_BODIES:
        return coarsest.name
    return STORED if coarsest.is_quantized else F32.name


def _onnx_rounding(quant: str) -> float:
    names = (quant,) if quant == STORED else (scheme_named(quant).body.name, scheme_named(quant).head.name)
    return max(_ONNX_ROUNDING.get(name, 0.0) for name in names)


def _document(found: Findings, ids: list[int]) -> dict[str, Any]:
    lines, parting = summarize(found)
    reference = {"name": "reference", "version": VERSION, "status": "ran", "why": ""}
    if found.no_reference or not found.base:
        reference |= {"status": "failed", "why": found.no_reference or "no model of the bundle can be read"}
    return {
        "verdict": found.verdict,
        "summary": lines,
        "first_parting": parting,
        "base": found.base,
        "tokens": ids,
        "runtimes": [reference, *(state.to_json() for state in found.runtimes)],
        "files": [check.to_json() for check in found.checks],
        "unlisted_files": found.unlisted,
        "unreadable": [{"file": file, "why": why} for file, why in found.unreadable.items()],
        "facts": [difference.to_json() for difference in found.facts],
        "weights": [
            {"file": file, "ok": difference is None, "first_difference": difference and difference.to_json()}
            for file, difference in found.weights.items()
        ],
        "pairs": [pair.to_json() for pair in found.pairs],
        "layers": [parting.to_json() for parting in found.layers],
    }
