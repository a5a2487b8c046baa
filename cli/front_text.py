"""What a search found, as lines for a terminal and as Markdown; both say the same things from the same document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepthin.cli.sizes import bytes_text, count_text
from deepthin.cli.table import markdown, table

_MOST_TIES = 3
_DEVICE_HEADERS = ("device", "for all, ms/1k chars", "own, ms/1k chars", "time lost", "nats lost", "own shape")


def heading(document: Mapping[str, Any]) -> list[str]:
    """Budget, what was tried, and where times come from."""
    budget, on = document["budget"], document["measured_on"]
    limits = [f"{count_text(budget['params'])} parameters"] if budget["params"] else []
    limits += [bytes_text(budget["bytes"])] if budget["bytes"] else []
    limits += [f"{bytes_text(budget['ram'])} of memory"] if budget["ram"] else []
    verb = "measured" if document["time_basis"] == "measured" else "predicted"
    tried = f"{document['trials']} shapes tried, {document['measurements']} {verb}"
    profile = document["config"].get("profile")
    where = f"times predicted for {profile}" if profile else f"timed on {on['machine']}, {on['threads']} threads"
    return [
        f"budget {' and '.join(limits)}, embedding included; {tried}",
        f"{where}, {on['context']} cached tokens",
    ]


def pick_lines(document: Mapping[str, Any]) -> Iterator[tuple[list[str], list[str]]]:
    """Of each shape that was picked: its picks with their reasons; then lines on its ties and a public shape beside it."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, pick in document["picks"].items():
        groups.setdefault((pick["shape"], pick["quant"]), []).append(name)
    for (shape, quant), names in groups.items():
        picks = [document["picks"][name] for name in names]
        marks = [" (recommended)" if name == document["recommended"] else "" for name in names]
        titles = [f"{name}{mark}: {pick['reason']}" for name, mark, pick in zip(names, marks, picks, strict=True)]
        ties = picks[0]["tied_with"][:_MOST_TIES]
        lines = [f"{shape} {quant}", *(f"tied in loss and time: {_tie_text(tie)}" for tie in ties)]
        if picks[0]["num_tied"] > len(ties):
            lines.append(f"and {picks[0]['num_tied'] - len(ties)} more ties, in front.json")
        yield titles, lines + _against(picks[0]["compared_with"])
    for name, why in document["picks_missing"].items():
        yield [f"no {name}: {why}"], []


def front_text(document: Mapping[str, Any]) -> str:
    """The front, its picks beside public shapes, what they rest on, and the notes that qualify them."""
    from deepthin.search.front import HEADERS, comparison_rows, front_rows
    from deepthin.search.sensitivity import sensitivity_lines

    lines = [*heading(document), "", table(HEADERS, front_rows(document))]
    known = comparison_rows(document)
    if known:
        lines += ["", "public shapes of the nearest size, in the same format on the same machine", table(HEADERS, known)]
    lines += [""]
    for titles, rest in pick_lines(document):
        lines += [*titles, *(f"  {line}" for line in rest)]
    lines += ["", "what the picks rest on, among the shapes tried", *(f"  {line}" for line in sensitivity_lines(document))]
    return "\n".join([*lines, "", *document["notes"]])


def summary(document: Mapping[str, Any], devices: Mapping[str, Any] | None = None) -> str:
    """The same as Markdown, for a pull request or a wiki; ends in a newline. Depends on the documents alone."""
    from deepthin.search.front import HEADERS, comparison_rows, front_rows
    from deepthin.search.sensitivity import sensitivity_lines

    budget, where = heading(document)
    lines = ["# Shapes within a budget", "", f"{_sentence(budget)} {_sentence(where)}", ""]
    lines += ["## Front", "", markdown(HEADERS, front_rows(document)), ""]
    lines += ["## Picks", ""]
    for titles, rest in pick_lines(document):
        lines += [f"- **{name}**: {why}" for name, _, why in (title.partition(": ") for title in titles)]
        lines += [f"  - {line}" for line in rest]
    known = comparison_rows(document)
    if known:
        lines += ["", "## Public shapes of the nearest size", "", markdown(HEADERS, known)]
    if devices is not None:
        lines += ["", "## Devices", "", _sentence(f"{devices['across']}: {devices['rule']}")]
        lines += [f"Times are relative to {devices['reference']}.", ""]
        lines += [markdown(_DEVICE_HEADERS, _device_rows(devices)), ""]
        lines += [f"- **{name}**: {lost['text']}" for name, lost in devices["cost_of_one_for_all"].items()]
    lines += ["", "## What the picks rest on", ""]
    lines += [f"  - {line.strip()}" if line.startswith("  ") else f"- {line}" for line in sensitivity_lines(document)]
    lines += ["", "## Read it with this", "", *(f"- {note}" for note in document["notes"])]
    return "\n".join(lines) + "\n"


def devices_text(devices: Mapping[str, Any]) -> str:
    """What one shape for all costs each device, and each device's own."""
    lines = [f"{devices['across']}: {devices['rule']} ({devices['reference']})"]
    lines += [table(_DEVICE_HEADERS, _device_rows(devices))]
    lines += [f"{name}: {lost['text']}" for name, lost in devices["cost_of_one_for_all"].items()]
    return "\n".join(lines)


def _device_rows(devices: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, lost in devices["cost_of_one_for_all"].items():
        own = devices["own"][name][devices["recommended"]]
        rows.append(
            [
                name,
                f"{lost['shared_ms_per_kchar']:.1f}",
                f"{lost['own_ms_per_kchar']:.1f}",
                f"{lost['time']:+.1%}",
                f"{lost['nats']:+.3f}{' (tied)' if lost['tied'] else ''}",
                f"{own['shape']} {own['quant']}",
            ]
        )
    return rows


def _tie_text(tie: Mapping[str, Any]) -> str:
    return f"{tie['shape']} {tie['quant']} ({tie['nats']:+.3f} nats, {tie['time_ratio']:.2f} x the time)"


def _against(other: Mapping[str, Any] | None) -> list[str]:
    if not other:
        return []
    if "why_not" in other:
        return [f"not compared with {other['name']}: {other['why_not']}"]
    time, size = other["time_ratio"], other["params_ratio"]
    gap = other["loss_difference"]
    return [
        f"against {other['name']}: {size:.2f} x its parameters, {time:.2f} x its time per text, "
        f"predicted loss {gap['low']:+.3f} to {gap['high']:+.3f} nats apart"
    ]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
