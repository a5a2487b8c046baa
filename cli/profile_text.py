"""A profile explained to a person, and the list of profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepthin.cli.sizes import bytes_text, seconds_text
from deepthin.cli.table import table

if TYPE_CHECKING:
    from deepthin.profiles.latency.model import LatencyModel
    from deepthin.profiles.library import Entry
    from deepthin.profiles.profile import Profile

BASIS_TEXT = {
    "measured": "measured on the device",
    "imported": "fitted to llama-bench results from the device",
    "published": "published facts only; nothing was measured on this device",
}
_MAX_FINDINGS = 12


def entries_text(entries: Sequence[Entry], folder: Path) -> str:
    """The list as a table."""
    rows = [
        (entry.name, entry.problem or entry.title, entry.basis, entry.created_utc[:10], "this host" if entry.is_host else "")
        for entry in entries
    ]
    return f"saved profiles are in {folder}\n\n" + table(("name", "device", "basis", "date", ""), rows, left=5)


def profile_text(profile: Profile) -> str:
    """Everything a person needs to judge the profile."""
    sections = [_heading(profile), _bandwidth(profile), _models(profile), _noise(profile), _findings(profile), _facts(profile)]
    return "\n\n".join(section for section in sections if section)


def _heading(profile: Profile) -> str:
    lines = [f"{profile.name}: {profile.title}", f"basis: {profile.basis}, {BASIS_TEXT[profile.basis]}; {profile.created_utc}"]
    if profile.versions:
        lines.append("runtimes: " + ", ".join(f"{name} {version}" for name, version in profile.versions.items()))
    if profile.flags:
        lines.append(f"flagged: {', '.join(profile.flags)}; others used the machine, or it does not repeat, so measure again")
    return "\n".join([*lines, *(f"note: {note}" for note in profile.notes)])


def _bandwidth(profile: Profile) -> str:
    """Read bandwidth by working set, one column a thread count; nothing for a flat curve."""
    curve = profile.curve
    sizes = sorted({point.num_bytes for point in curve.points})
    if len(sizes) < 2:
        return ""
    rows = []
    for size in sizes:
        rates = {p.threads: p.bytes_per_s for p in curve.points if p.num_bytes == size}
        rows.append((_binary(size), *(f"{rates[t] / 1e9:.1f}" if t in rates else "" for t in curve.threads)))
    return "read bandwidth, GB/s by working set\n" + table(("", *(f"{t} threads" for t in curve.threads)), rows)


def _models(profile: Profile) -> str:
    rows = [_model_row(model) for model in profile.models if model.fitted.residuals]
    if not rows:
        return ""
    headers = (
        "runtime",
        "test",
        "threads",
        "probes",
        "off, left out",
        "p90",
        "us/layer",
        "90 %",
        "share of bandwidth",
        "us/call",
    )
    text = table(headers, rows, left=2)
    return f"what the probes say (off: median error of probes left out of the fit)\n{text}"


def _model_row(model: LatencyModel) -> tuple[object, ...]:
    summary, fitted = model.residual_summary(), model.fitted
    layer, low, high = fitted.value("layer")
    return (
        model.conditions.runtime.name,
        model.test,
        model.conditions.threads,
        summary["probes"],
        f"{summary['left_out_median']:.1%}",
        f"{summary['left_out_p90']:.1%}",
        f"{layer * 1e6:.1f}",
        f"{low * 1e6:.1f}..{high * 1e6:.1f}",
        f"{fitted.value('share')[0]:.0%}",
        f"{fitted.value('overhead')[0] * 1e6:.0f}",
    )


def _noise(profile: Profile) -> str:
    lines = []
    if aa := profile.noise.get("aa"):
        lines.append(
            f"noise floor: a model timed against itself gives {aa['median']:.3f} ({aa['ci_low']:.3f}..{aa['ci_high']:.3f})"
        )
    lines += [
        f"cores at {place['threads']} threads of {place['runtime']}: a barrier took {1e9 * place['barrier_s']:.0f} ns; "
        "times are others where the host moves them farther apart or closer"
        for place in profile.noise.get("placements", ())
    ]
    if repeat := profile.noise.get("repeat"):
        lines.append(f"repeated minutes later: {repeat['median']:.1%} off in the median, {repeat['max']:.1%} at most")
    if (lasting := profile.sustained) is not None:
        factor: Mapping[str, Any] = lasting["factor"]
        floor = lasting["time_to_floor_s"]
        slow = f", slower from {seconds_text(floor)} on" if floor is not None else ""
        lines.append(f"sustained over {lasting['wall_s']:.0f} s: {factor['median']:.1%} of the first seconds' speed{slow}")
    return "\n".join(lines)


def _findings(profile: Profile) -> str:
    if not profile.findings:
        return "no alignment cliff and no kernel far below its roofline was found" if profile.basis == "measured" else ""
    shown = [f"warning: {row['text']}" for row in profile.findings[:_MAX_FINDINGS]]
    more = len(profile.findings) - len(shown)
    return "\n".join([*shown, *([f"and {more} more, see --json"] if more else [])])


def _facts(profile: Profile) -> str:
    facts = profile.machine.get("facts")
    if not isinstance(facts, list):
        return ""
    rows = [
        (fact["field"], _value(fact), fact["status"], fact["date"], fact["conditions"], fact["source"])
        for fact in facts
        if fact["field"] not in ("isa",)
    ]
    return table(("fact", "value", "status", "date", "conditions", "source"), rows, left=6)


def _value(fact: Mapping[str, Any]) -> str:
    value, unit = fact["value"], fact["unit"]
    if unit == "bytes/s" and isinstance(value, int | float):
        return f"{bytes_text(value)}/s"
    return str(value) if unit == "text" else f"{value} {unit}"


def _binary(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
