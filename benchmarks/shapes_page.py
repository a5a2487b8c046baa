"""The page docs/shapes.md and its figure, from the lines that ``shapes.py`` stores. Every figure in the text is computed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from front_chart import Mark, front_chart

from deepthin.engine.shape import Shape
from deepthin.search.quality.model import TIE_BAND

Line = Mapping[str, Any]
_PICKS = {
    "best_quality": "best quality",
    "fastest_tied": "fastest tied with it (recommended)",
    "knee": "knee",
    "smallest_kv": "smallest cache tied",
}
_PLOTTED = "q4_0"


def page(lines: Sequence[Line]) -> str:
    """The whole page in Markdown; parts whose lines are missing are left out."""
    found = by_kind(lines)
    if not found.get("search"):
        return "Nothing is stored yet."
    some = next(iter(found["search"].values()))
    parts = [
        _head(some),
        *_fronts(found),
        *_depths(found),
        *_published(found),
        *_measured(found),
        _limits(),
    ]
    return "\n\n".join(parts) + "\n"


def by_kind(lines: Sequence[Line]) -> dict[str, dict[str, Line]]:
    """Lines by kind and name; the profile that was used last counts, measured searches of any."""
    found: dict[str, dict[str, Line]] = {}
    last = next((line["profile"] for line in reversed(lines) if line["kind"] != "measured"), None)
    for line in lines:
        if line["profile"] == last or line["kind"] == "measured":
            found.setdefault(line["kind"], {})[line["name"]] = line
    return found


def figure(lines: Sequence[Line]) -> str:
    """The fronts of the sizes with depths, and the published shapes, as an SVG document."""
    found = by_kind(lines)
    fronts = {
        name: [
            Mark(_value(one["ms_per_kchar"]), one["predicted_loss"]["value"], str(_layers(one["shape"])))
            for one in line["front"]
        ]
        for name, line in _sizes(found).items()
    }
    named = [
        Mark(
            _value(line["quants"][_PLOTTED]["ms_per_kchar"]),
            line["quants"][_PLOTTED]["loss"],
            f"{name} ({line['layers']})",
            hollow=bool(line["stand_in"]),
        )
        for name, line in found.get("published", {}).items()
    ]
    return front_chart(
        "Fronts at four sizes, and published shapes in Q4_0; numbers are depths",
        "predicted milliseconds per 1,000 characters",
        "predicted loss, nats a token",
        fronts,
        named,
    )


def _head(some: Line) -> str:
    return f"""# What we learned about shapes

Written by `python benchmarks/shapes.py --report` from stored results; every figure below is computed from them.

**What stands here.** Searches within 60, 125, 350 and 900 million parameters, embedding included, on one machine: {some["device"]},
profiled {some["profiled"]}. Times are predicted from that profile for one token at 512 cached ones and given per 1,000 characters
of text; quality is the law of [quality.md](quality.md) at 1e11 training tokens, no benchmark score. Losses within {TIE_BAND} nats are
tied: seeds differ by as much. What holds here need not hold on another device; `deepthin search --profile` asks it.

![Fronts at four sizes](shapes.svg)

Lines are the fronts of the four searches, numbers their depths; squares are published shapes in Q4_0, rings stand-ins for models
that this engine cannot run as they are."""


def _sizes(found: Mapping[str, Mapping[str, Line]]) -> dict[str, Line]:
    """The searches that are named by a size, smallest first."""
    searches = {name: line for name, line in found.get("search", {}).items() if name not in found.get("published", {})}
    return dict(sorted(searches.items(), key=lambda item: item[1]["params"]))


def _fronts(found: Mapping[str, Mapping[str, Line]]) -> Iterator[str]:
    yield "## The fronts"
    rows = []
    for name, line in _sizes(found).items():
        depths = [_layers(one["shape"]) for one in line["front"]]
        band = [one for one in line["front"] if one["tied_with_best"]]
        times = [_value(one["ms_per_kchar"]) for one in band]
        evaluated = [row for row in line["evaluated"] if row[2] <= min(row[2] for row in line["evaluated"]) + TIE_BAND]
        wide = [_layers(row[0]) for row in evaluated]
        beyond = sum("extrapolated" in one["measurement_flags"] for one in line["front"])
        rows.append(
            f"| {name} | {line['trials']} | {len(depths)} | {min(depths)} to {max(depths)} | {min(map(_layers, _texts(band)))} to "
            f"{max(map(_layers, _texts(band)))} | {min(wide)} to {max(wide)} ({len(wide)}) | {max(times) / min(times):.2f} x | "
            f"{sum(one['shape_extrapolated'] for one in line['front'])} / {beyond} |"
        )
    yield (
        "| budget | shapes tried | on the front | depths on the front | of those tied with the best | of all tried that are tied | "
        "slowest tied / fastest tied | loss / time extrapolated |\n|---|--:|--:|--:|--:|--:|--:|--:|\n" + "\n".join(rows)
    )
    yield (
        "A front's slow end is the best predicted loss; towards the fast end it first gives up depth, then bits a weight and "
        "width. Which choices lead, by body format: "
        + "; ".join(f"{name}: {_formats(line)}" for name, line in _sizes(found).items())
        + ".\n\nLoss is called extrapolated outside the table that the law was fitted to, time outside the range of the probes."
    )
    yield "### Picks"
    for name, line in _sizes(found).items():
        yield f"**{name}**\n\n" + "\n".join(
            f"- *{_PICKS[pick]}*: {_plain(one['shape'])} {one['quant']}: {one['reason']}."
            for pick, one in line["picks"].items()
            if pick in _PICKS
        )


def _depths(found: Mapping[str, Mapping[str, Line]]) -> Iterator[str]:
    if "depths" not in found:
        return
    yield "## Depth: flat in loss, not in time"
    yield (
        "For each depth the best of the same choices in Q4_0 (vocabularies 16k to 64k, 3 or 1 query heads a key/value head, six MLP "
        f"ratios), all at the same number of parameters. *Tied* depths have a shape within {TIE_BAND} nats of the best of all."
    )
    rows, factors = [], []
    for name, line in sorted(found["depths"].items(), key=lambda item: item[1]["params"]):
        best = min(line["rows"], key=lambda row: row["loss"])
        tied = [row for row in line["rows"] if row["fastest_tied_ms"] is not None]
        times = {row["layers"]: row["fastest_tied_ms"] for row in tied}
        low, high = min(times), max(times)
        quickest = min(times, key=lambda depth: times[depth])
        factors.append((high / low, times[high] / min(times.values())))
        rows.append(
            f"| {name} | {best['layers']} x {best['width']} | {low} to {high} | {times[low]:.1f} | {times[high]:.1f} | {quickest} | "
            f"{times[quickest]:.1f} |"
        )
    yield (
        "| parameters | best loss at | tied depths | ms per 1,000 characters at the shallowest | at the deepest | fastest tied depth | its "
        "time |\n|---|--:|--:|--:|--:|--:|--:|\n" + "\n".join(rows)
    )
    spans, costs = [factor for factor, _ in factors], [cost for _, cost in factors]
    yield (
        f"Tied depths span a factor of {min(spans):.1f} to {max(spans):.1f}; the deepest tied shape takes {min(costs):.2f} to "
        f"{max(costs):.2f} times as long as the fastest tied one. The law cannot choose among them, the clock can: that is why the "
        f"recommended pick is the fastest of the tied and not the best loss. Depths were tried at {len(line['rows'])} values, so "
        f"the ends of a range are known to the next value only."
    )


def _published(found: Mapping[str, Mapping[str, Line]]) -> Iterator[str]:
    if "published" not in found:
        return
    yield "## Published shapes"
    yield (
        "Each shape as it was published, costed and judged like any candidate: same law, same 1e11 tokens, same formats. This says "
        "what the *shape* is predicted to be worth, not how good the model is, whose data and tokens are its own. Beside it a search "
        "within exactly its parameters."
    )
    rows, gains = [], []
    for name, line in found["published"].items():
        for quant, one in line["quants"].items():
            time, loss = _value(one["ms_per_kchar"]), one["loss"]
            better = faster = ""
            search = found.get("search", {}).get(name)
            if search:
                mates = [row for row in search["evaluated"] if row[3] <= time]
                alike = [row for row in search["evaluated"] if row[2] <= loss]
                if mates:
                    pick = min(mates, key=lambda row: row[2])
                    better = f"{pick[2] - loss:+.3f} ({_layers(pick[0])} layers, {pick[1]})"
                if alike:
                    pick = min(alike, key=lambda row: row[3])
                    faster = f"{pick[3] / time:.2f} x ({_layers(pick[0])} layers, {pick[1]})"
                    gains.append((name, quant, pick[3] / time))
            rows.append(
                f"| {name} | {line['layers']} | {line['params'] / 1e6:.0f}M | {quant} | {loss:.3f} | {time:.1f} | {better} | {faster} |"
            )
    yield (
        "| shape | layers | parameters | format | predicted loss | ms per 1,000 characters | best loss found that is no slower | least "
        "time found at no more loss |\n|---|--:|--:|---|--:|--:|--:|--:|\n" + "\n".join(rows)
    )
    if gains:
        best = {name: min(gain for other, _, gain in gains if other == name) for name, _, _ in gains}
        yield (
            "Differences below the tie band mean nothing by themselves. At no more predicted loss the searches found shapes that "
            "take "
            + ", ".join(f"{gain:.2f} ({name})" for name, gain in best.items())
            + " of the published shape's time in the format that gains most; part of that is a smaller vocabulary or another "
            "format, which a publisher may have had reasons not to choose."
        )
    yield (
        "Sources: "
        + "; ".join(
            f"{name}: {line['source']}" + (f" ({line['stand_in']})" if line["stand_in"] else "")
            for name, line in found["published"].items()
        )
        + "."
    )


def _measured(found: Mapping[str, Mapping[str, Line]]) -> Iterator[str]:
    for name, line in found.get("measured", {}).items():
        errors = np.abs(line["prediction_errors"])
        depths = [_layers(one["shape"]) for one in line["front"]]
        noisy = sum(bool(one["measurement_flags"]) for one in line["front"])
        sure = sum(one["front_probability"] >= 0.95 for one in line["front"])
        predicted = found.get("search", {}).get(name)
        machine = line["machine"]
        yield "## The same with a stopwatch"
        yield (
            f"`{line['command']}` on {machine['machine']}, {machine['threads']} threads, timed {line['trials']} shapes and {line['repeats']} "
            f"leaders again in {line['search_s']:.0f} s altogether ({line['created_utc'][:10]}, commit {line['commit']}). The front has "
            f"{len(depths)} members with {min(depths)} to {max(depths)} layers; {sure} of them lead with a chance of 95 % or more, {noisy} "
            f"carry a flag of a disturbed measurement. The profile's predictions for these {len(errors)} shapes are "
            f"{np.median(errors):.1%} off in the median and {np.quantile(errors, 0.9):.1%} at the 90th percentile."
        )
        yield "\n".join(
            f"- *{_PICKS[pick]}*: {_plain(one['shape'])} {one['quant']}: {one['reason']}."
            for pick, one in line["picks"].items()
            if pick in _PICKS
        )
        if predicted:
            ours = [_layers(predicted["picks"][pick]["shape"]) for pick in ("fastest_tied", "knee")]
            theirs = [_layers(line["picks"][pick]["shape"]) for pick in ("fastest_tied", "knee")]
            yield (
                f"With predicted times the recommended pick had {ours[0]} layers and the knee {ours[1]}; with measured ones "
                f"{theirs[0]} and {theirs[1]}."
            )


def _limits() -> str:
    return """## What this does not show

- Nothing was trained. Every loss is predicted by a law fitted to one family of 22 shapes; [quality.md](quality.md) says what it was
  checked on and where it is extrapolated.
- Depth ranges are those of the law's tie band. They say that the law cannot tell these shapes apart, not that training could not.
- The vocabulary term rests on 4 to 37 tokens a parameter; picks that hang on it say so in their search (`without_vocab_term`).
- One device, one runtime, one thread count, decoding only. Prompts, other contexts and other devices move the picks.
- LFM2 and MobileLLM-Flash are placed by stand-ins, so their squares show where such a depth and width lies, not those models."""


def _formats(line: Line) -> str:
    counts: dict[str, int] = {}
    for one in line["front"]:
        counts[one["quant"]] = counts.get(one["quant"], 0) + 1
    return ", ".join(f"{count} {quant}" for quant, count in sorted(counts.items()))


def _texts(members: Sequence[Line]) -> list[str]:
    return [one["shape"] for one in members]


def _layers(text: str) -> int:
    return Shape.parse(text).num_layers


def _plain(text: str) -> str:
    shape = Shape.parse(text)
    tied = "" if shape.tie_word_embeddings else ", untied"
    return (
        f"{shape.num_layers} x {shape.hidden_size}, {shape.num_heads}/{shape.num_kv_heads} heads, MLP {shape.intermediate_size}, "
        f"vocabulary {shape.vocab_size:,}{tied},"
    )


def _value(timing: Mapping[str, Any]) -> float:
    return float(timing["median"] if "median" in timing else timing["value"])
