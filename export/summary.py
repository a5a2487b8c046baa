"""A verification in words: where the runtimes first part, what differs between files, and what was not looked at."""

from __future__ import annotations

from typing import Any

from deepthin.export.findings import AMBIGUOUS, PASS, Findings, Pair
from deepthin.export.layers import HEAD, describe

_MAX_LINES = 12  # of one kind; the document has them all


def summarize(found: Findings) -> tuple[list[str], dict[str, Any] | None]:
    """Lines for people, the verdict first; and the first parting as JSON, None when there is none."""
    parting = _first_parting(found)
    lines = [_verdict(found, parting), *_suspicion(found)]
    lines += _limited([f"checksum: {check.path}: {check.why}" for check in found.checks if not check.ok])
    lines += _limited([f"unreadable: {why}" for why in found.unreadable.values()])
    lines += _limited([f"differs: {difference.text}" for difference in found.facts])
    lines += _limited([f"differs: {file}: {item.tensor}: {item.why}" for file, item in found.weights.items() if item])
    lines += [f"failed: reference: {found.no_reference}"] if found.no_reference else []
    lines += _limited([f"failed: {state.name}: {state.why}" for state in found.runtimes if state.status == "failed"])
    lines += _limited([f"logits: {text}" for text in _broken_pairs(found)])
    lines += _limited([f"layer: {text}" for text in _layers(found)])
    lines += [f"skipped: {state.name}: {state.why}" for state in found.runtimes if state.status == "skipped"]
    if found.unlisted:
        lines.append(
            f"note: {found.unlisted[0]!r} is not in the manifest ({len(found.unlisted)} such files); nobody vouches for it"
        )
    return lines, parting


def _first_parting(found: Findings) -> dict[str, Any] | None:
    """The earliest position where a runtime leaves the reference; without one, the first difference inside a file."""
    parted = [pair for pair in found.pairs if pair.report is not None and pair.report.first_divergence is not None]
    if parted:
        pair = min(parted, key=_position)  # the first one listed among equals
        report = pair.report
        if report is not None and report.first_divergence is not None:
            return _parting(found, pair, f"{report.first_divergence.why}; {report.why}")
    for pair in found.pairs:
        if not pair.ok:
            return _parting(found, pair, pair.why or (pair.report.why if pair.report else ""))
    static = [(file, f"{item.tensor}: {item.why}") for file, item in found.weights.items() if item is not None]
    static += [(fact.file, f"{fact.name} is {fact.found}, but {fact.wanted} in {fact.base}") for fact in found.facts]
    static += [*found.unreadable.items(), *((check.path, check.why) for check in found.checks if not check.ok)]
    for file, why in static:
        nowhere = dict.fromkeys(("runtime", "mode", "file", "phase", "position", "layer"))
        return {**nowhere, "file": file, "why": why}
    return None


def _parting(found: Findings, pair: Pair, why: str) -> dict[str, Any]:
    same = [at.point for at in found.layers if (at.runtime, at.mode, at.file) == (pair.runtime, pair.mode, pair.file)]
    return {
        "runtime": pair.runtime,
        "mode": pair.mode,
        "file": pair.file,
        "phase": pair.phase,
        "position": _position(pair) if _position(pair) >= 0 else None,
        "layer": next(filter(None, same), None),
        "why": why,
    }


def _layers(found: Findings) -> list[str]:
    """One line for each runtime and file; modes of one runtime that part at the same point share it."""
    texts: dict[tuple[str, str, str], str] = {}
    for at in found.layers:
        where = f"parts in {describe(at.point)}" if at.point else "cannot say where"
        told = f"{at.runtime} on {at.file} {where} ({at.point}): {at.why}" if at.point not in ("", HEAD) else ""
        texts.setdefault((at.runtime, at.file, at.point), told or f"{at.runtime} on {at.file} {where}: {at.why}")
    return list(texts.values())


def _position(pair: Pair) -> int:
    return pair.report.first_divergence.position if pair.report and pair.report.first_divergence else -1


def _verdict(found: Findings, parting: dict[str, Any] | None) -> str:
    if found.verdict == PASS:
        names = list(dict.fromkeys(pair.runtime for pair in found.pairs))
        gives = f"{names[0]} gives" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} give"
        run = len({pair.file for pair in found.pairs})
        total = len(found.weights)
        models = "1 model holds" if total == 1 else f"{total} models hold"
        which = (
            "it" if total == run == 1 else "each of them" if total == run else f"{run} of them, the others being compared only,"
        )
        reports = [(pair.report.nmse, pair) for pair in found.pairs if pair.report is not None]
        nmse, worst = max(reports, key=lambda item: item[0])
        return (
            f"pass: {models} the weights of {found.base}, and {gives} the logits of the reference when run on {which} "
            f"over {found.num_tokens} tokens (largest NMSE {nmse:.1e}: {worst.label} on {worst.file})"
        )
    if parting is None:
        return "fail: nothing could be compared"
    if found.verdict == AMBIGUOUS:
        excused = [pair for pair in found.pairs if pair.verdict == AMBIGUOUS]
        first = excused[0]
        return (
            f"ambiguous: all files hold the same model, but {len(excused)} of {len(found.pairs)} comparisons are beyond their "
            f"budget, the first {first.label} on {first.file} in {first.phase} ({first.report.why if first.report else ''}); "
            f"{first.excuse}, so this proves neither that it is right nor that it is wrong; try other tokens or more bits"
        )
    if parting["position"] is not None:
        mode = f" ({parting['mode']})" if parting["mode"] else ""
        layer = f", in {describe(parting['layer'])}" if parting["layer"] else ""
        return (
            f"fail: the runtimes first part at position {parting['position']} of {parting['phase']}: "
            f"{parting['runtime']}{mode} on {parting['file']}{layer} ({parting['why']})"
        )
    if parting["runtime"] is not None:
        return f"fail: {parting['runtime']} does not run {parting['file']} ({parting['why']})"
    told = "no runtime left its budget" if found.pairs and all(pair.ok for pair in found.pairs) else "no logits were compared"
    return f"fail: {parting['file']}: {parting['why']} ({told})"


def _suspicion(found: Findings) -> list[str]:
    """When every other model differs from the base in the same way, the base is the odd one out."""
    others = [item for file, item in found.weights.items() if file != found.base]
    tensors = {None if item is None else item.tensor for item in others}
    if len(others) > 1 and len(tensors) == 1 and None not in tensors:
        return [f"suspect: all others agree on {tensors.pop()} against {found.base}, so {found.base} itself looks changed"]
    for name in dict.fromkeys(fact.name for fact in found.facts):
        same = [fact for fact in found.facts if fact.name == name]
        files = {fact.file for fact in same} >= {file for file in found.weights if file != found.base}
        if len(others) > 1 and files and len({str(fact.found) for fact in same}) == 1:
            return [f"suspect: all others have {name} {same[0].found}, so {found.base} itself looks changed"]
    return []


def _broken_pairs(found: Findings) -> list[str]:
    """One line for each runtime and file, of the first mode and phase that part; levels and modes that do not are named."""
    texts: dict[tuple[str, str], str] = {}
    for pair in found.pairs:
        if not pair.ok and pair.report is not None:
            parted = pair.report.first_divergence
            start = f"from position {parted.position} of {pair.phase} on" if parted else f"in {pair.phase}"
            whole = [other for other in found.pairs if (other.runtime, other.file) == (pair.runtime, pair.file)]
            others = {other.mode for other in whole} - {other.mode for other in whole if not other.ok}
            fine = f"; {', '.join(sorted(others))} does not" if others else ""
            texts.setdefault((pair.runtime, pair.file), f"{pair.label} on {pair.file} parts {start}: {pair.report.why}{fine}")
    return list(texts.values())


def _limited(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"… and {more} more like this"]
