"""The page docs/shapes.md and its figure from the lines that ``shapes.py`` stores; all figures are computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from front_chart import Mark, front_chart

from deepthin.engine.arrays import F64
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

**What stands here.** Searches within 60, 125, 350 and 900 million parameters, embedding included, on one machine:
{some["device"]}, profiled {some["profiled"]}. Times are predicted from that profile for one token at 512 cached ones and given
per 1,000 characters of text; quality is the law of [quality.md](quality.md) at 1e11 training tokens, no benchmark score. Losses
within {TIE_BAND} nats are tied: seeds differ by as much. What holds here need not hold on another device;
`deepthin search --profile` asks it.

![Fronts at four sizes](shapes.svg)

Lines are the fronts of the four searches, numbers their depths; squares are published shapes in Q4_0, rings stand-ins for
models that this engine cannot run as they are."""


def _sizes(found: Mapping[str, Mapping[str, Line]]) -> dict[str, Line]:
    """The searches that are named by a size, smallest first."""
    searches = {name: line for name, line in found.get("search", {}).items() if name not in found.get("published", {})}
    return dict(sorted(searches.items(), key=lambda item: item[1]["params"]))


def _fronts(found: Mapping[str, Mapping[str, Line]]) -> Iterator[str]:
    yield "## The fronts"
    rows = []
    for name, line in _sizes(found).items():
        front = line["front"]
        depths = [_layers(one["shape"]) for one in front]
        band = [one for one in front if one["tied_with_best"]]
        tied = [_layers(one["shape"]) for one in band]
        times = [_value(one["ms_per_kchar"]) for one in band]
        best = min(row[2] for row in line["evaluated"])
        tried = [_layers(row[0]) for row in line["evaluated"] if row[2] <= best + TIE_BAND]
        rows.append(
            [
                *(name, str(line["trials"]), str(len(front)), f"{min(depths)} to {max(depths)}"),
                *(f"{min(tied)} to {max(tied)}", f"{min(tried)} to {max(tried)} ({len(tried)})"),
                *(f"{max(times) / min(times):.2f} x", _formats({"front": band})),
                f"{sum(one['shape_extrapolated'] for one in front)} / {sum(map(_beyond, front))}",
            ]
        )
    yield _table(
        [
            *("budget", "shapes tried", "on the front", "their depths", "depths on the front tied with the best"),
            *("depths of all tied that were tried", "slowest of the tied on the front / fastest", "formats of the tied"),
            "loss / time extrapolated",
        ],
        rows,
    )
    yield from _thirds(found)
    widths = [
        np.log(one["ms_per_kchar"]["high"] / one["ms_per_kchar"]["low"]) / 2
        for line in _sizes(found).values()
        for one in line["front"]
    ]
    flags = next((line["flags"] for line in found["search"].values() if line.get("flags")), [])
    yield (
        f"The 90 % interval of a predicted time is {np.expm1(np.median(widths)):.0%} wide to each side in the median"
        + (f"; the profile is flagged {', '.join(flags)}" if flags else "")
        + "."
    )
    yield (
        "A front runs from the best predicted loss, its slow end, to the least time. Loss is called extrapolated outside the\n"
        "table that the law was fitted to, time outside the range of the profile's probes."
    )
    thirds = [_ends(line["front"]) for line in _sizes(found).values()]
    few_bits = [[sum(one["quant"].startswith("q4") for one in part) for part in parts] for parts in zip(*thirds, strict=True)]
    slow, fast = few_bits
    sizes = [sum(len(part) for part in parts) for parts in zip(*thirds, strict=True)]
    why = (
        f"**Why so.** Of the members in the slow thirds {sum(slow)} of {sizes[0]} are 4-bit, in the fast thirds {sum(fast)} of "
        f"{sizes[1]}."
    )
    gaps = [one["quants"]["q4_0"]["loss"] - one["quants"]["q8_0"]["loss"] for one in found.get("published", {}).values()]
    if gaps:
        why += (
            f" The law charges Q4_0 {min(gaps):.3f} to\n{max(gaps):.3f} nats more than Q8_0 for the published shapes below, "
            "against a "
            f"tie band of {TIE_BAND}: where parameters are limited and not\nbytes, bits decide the best end (how much 4 bits "
            "cost is judgement, [quality.md](quality.md); `--bytes` makes them pay)."
        )
    yield why + (
        "\nTowards the fast end layers go too, since each takes time whatever its size, and the parameters they free make MLPs "
        "and\nvocabularies wider: both are read once a token, and a larger vocabulary says the same text in fewer tokens."
    )
    yield "### Picks"
    for name, line in _sizes(found).items():
        yield f"**{name}**\n\n{_pick_list(line)}"


def _ends(front: Sequence[Line]) -> tuple[Sequence[Line], Sequence[Line]]:
    """The slow and the fast third of a front."""
    cuts = np.linspace(0, len(front), 4).round().astype(int)
    return front[: cuts[1]], front[cuts[2] :]


def _thirds(found: Mapping[str, Mapping[str, Line]]) -> Iterator[str]:
    """What changes along each front, by thirds of its members from the best loss to the least time."""
    rows = []
    for name, line in _sizes(found).items():
        cuts = np.linspace(0, len(line["front"]), 4).round().astype(int)
        for part, (start, end) in zip(("slow", "middle", "fast"), itertools.pairwise(cuts), strict=True):
            members = line["front"][start:end]
            if not members:
                continue
            shapes = [Shape.parse(one["shape"]) for one in members]
            rows.append(
                [
                    *(name, part, f"{np.median([shape.num_layers for shape in shapes]):.0f}"),
                    f"{np.median([shape.num_heads / shape.num_kv_heads for shape in shapes]):.0f}",
                    f"{np.median([shape.intermediate_size / shape.hidden_size for shape in shapes]):.1f}",
                    f"{np.median([shape.vocab_size for shape in shapes]):,.0f}",
                    _formats({"front": members}),
                    f"{members[0]['predicted_loss']['value']:.3f} to {members[-1]['predicted_loss']['value']:.3f}",
                    f"{_value(members[0]['ms_per_kchar']):.0f} to {_value(members[-1]['ms_per_kchar']):.0f}",
                ]
            )
    yield "What is given up along a front, by thirds of its members (medians):"
    yield _table(
        [
            *("budget", "third", "layers", "query heads a key/value head", "MLP / width", "vocabulary", "formats"),
            *("loss", "ms per 1,000 characters"),
        ],
        rows,
    )


def _depths(found: Mapping[str, Mapping[str, Line]]) -> Iterator[str]:
    if "depths" not in found:
        return
    yield "## Depth: flat in loss, not in time"
    yield (
        "For each depth the best of the same choices in Q4_0 (vocabularies of 16,384 to 65,536, 1 or 3 query "
        "heads a key/value\n"
        "head, six MLP ratios), all filling the same number of parameters. *Tied* depths have a shape within "
        f"{TIE_BAND} nats of the best\nof all."
    )
    rows, factors = [], []
    for name, line in sorted(found["depths"].items(), key=lambda item: item[1]["params"]):
        best = min(line["rows"], key=lambda row: row["loss"])
        times = {row["layers"]: row["fastest_tied_ms"] for row in line["rows"] if row["fastest_tied_ms"] is not None}
        low, high = min(times), max(times)
        quickest = min(times, key=lambda depth: times[depth])
        factors.append((high / low, times[high] / times[quickest]))
        rows.append(
            [
                *(name, f"{best['layers']} x {best['width']}", f"{low} to {high}", f"{times[low]:.1f}", f"{times[high]:.1f}"),
                *(str(quickest), f"{times[quickest]:.1f}"),
            ]
        )
    yield _table(
        [
            *("parameters", "best loss at", "tied depths", "ms per 1,000 characters at the shallowest", "at the deepest"),
            *("fastest tied depth", "its time"),
        ],
        rows,
    )
    spans, costs = [span for span, _ in factors], [cost for _, cost in factors]
    yield (
        f"Tied depths span factors of {min(spans):.1f} to {max(spans):.1f}, and the deepest tied shape takes "
        f"{min(costs):.2f} to "
        f"{max(costs):.2f}\ntimes as long as the fastest tied one. The law cannot choose among them, the "
        f"clock can: that is why "
        "the recommended pick is\nthe fastest of the tied and not the best loss. Depths were tried at "
        f"{len(next(iter(found['depths'].values()))['rows'])} values, so a range is known to the next value only."
    )


def _published(found: Mapping[str, Mapping[str, Line]]) -> Iterator[str]:
    if "published" not in found:
        return
    yield "## Published shapes"
    yield (
        "Each shape is costed and judged like any candidate: same law, same 1e11 tokens, same formats. This "
        "says what the *shape*\n"
        "is predicted to be worth, not how good the model is, whose data and tokens are its own. Beside it "
        "what a search within\n"
        "exactly its parameters found."
    )
    rows: list[list[str]] = []
    least: dict[str, float] = {}
    for name, line in found["published"].items():
        tried = found.get("search", {}).get(name, {}).get("evaluated", [])
        for quant, one in line["quants"].items():
            time, loss = _value(one["ms_per_kchar"]), one["loss"]
            better = min((row for row in tried if row[3] <= time), key=lambda row: row[2], default=None)
            faster = min((row for row in tried if row[2] <= loss), key=lambda row: row[3], default=None)
            if faster:
                least[name] = min(least.get(name, 1e9), faster[3] / time)
            rows.append(
                [
                    *(name, str(line["layers"]), f"{line['params'] / 1e6:.0f}M", quant, f"{loss:.3f}", f"{time:.1f}"),
                    "" if better is None else f"{better[2] - loss:+.3f} ({_short(better)})",
                    "" if faster is None else f"{faster[3] / time:.2f} x ({_short(faster)})",
                ]
            )
    yield _table(
        [
            *("shape", "layers", "parameters", "format", "predicted loss", "ms per 1,000 characters"),
            *("best loss found that is no slower", "least time found at no more loss"),
        ],
        rows,
    )
    if least:
        yield (
            "The last two columns name depth, vocabulary and format of what was found. Differences below the tie "
            "band mean nothing\n"
            "by themselves. At no more predicted loss the searches found shapes that take "
            + ", ".join(f"{factor:.2f} ({name})" for name, factor in least.items())
            + " of the published shape's time, in the format that gains most. Part of that is the vocabulary, "
            "which a publisher may "
            "have\nhad reasons to choose that no law here knows."
        )
    sources = [
        f"- {name}: {line['source']}." + (f" Stand-in: {line['stand_in']}." if line["stand_in"] else "")
        for name, line in found["published"].items()
    ]
    yield "Sources:\n\n" + "\n".join(sources)


def _measured(found: Mapping[str, Mapping[str, Line]]) -> Iterator[str]:
    for name, line in found.get("measured", {}).items():
        pairs = np.asarray(line["predicted_and_measured"])
        errors, factor = np.abs(pairs[:, 0] / pairs[:, 1] - 1), float(np.median(pairs[:, 0] / pairs[:, 1]))
        left = np.abs(pairs[:, 0] / factor / pairs[:, 1] - 1)
        depths = [_layers(one["shape"]) for one in line["front"]]
        noisy = sum(bool(one["measurement_flags"]) for one in line["front"])
        sure = sum(one["front_probability"] >= 0.95 for one in line["front"])
        predicted = found.get("search", {}).get(name)
        machine = line["machine"]
        yield "## The same with a stopwatch"
        yield (
            f"`{line['command']}` on {machine['machine']}, {machine['threads']} threads, timed {line['trials']} shapes and "
            f"{line['repeats']} leaders\nagain, in {line['search_s']:.0f} s altogether ({line['created_utc'][:10]}, commit "
            f"{line['commit']}). The front has {len(depths)} members of {min(depths)} to {max(depths)} layers; {sure} of\n"
            f"them lead with a chance of 95 % or more, {noisy} carry a flag of a disturbed measurement."
        )
        yield (
            f"The profile's predictions for these {len(pairs)} shapes are {np.median(errors):.1%} off in the median, "
            f"{np.quantile(errors, 0.9):.1%} at the 90th percentile; with their common\nfactor of {factor:.2f} taken "
            "out "
            f"{np.median(left):.1%} and {np.quantile(left, 0.9):.1%}. Their order agrees with Spearman's rho = "
            f"{_rank_agreement(pairs):.3f}. A common factor moves no front."
        )
        yield _pick_list(line)
        if predicted:
            (ours, knee), (theirs, their_knee) = (
                [_layers(one["picks"][pick]["shape"]) for pick in ("fastest_tied", "knee")] for one in (predicted, line)
            )
            yield (
                f"With predicted times the recommended pick had {ours} layers and the knee {knee}; with measured ones {theirs} "
                f"and {their_knee}."
            )


def _rank_agreement(pairs: F64) -> float:
    """Spearman's rank correlation of two columns."""
    ranks = np.argsort(np.argsort(pairs, axis=0, kind="stable"), axis=0)
    return float(np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1])


def _limits() -> str:
    return """## What this does not show

- Nothing was trained. Every loss is predicted by a law fitted to one family of 22 shapes; [quality.md](quality.md) says what it
  was checked on and where it is extrapolated.
- Depth ranges are those of the law's tie band. They say that the law cannot tell these shapes apart, not that training could
  not.
- The vocabulary term rests on 4 to 37 tokens a parameter; picks that hang on it say so in their search
  (`sensitivity` in `front.json`).
- The interval of a predicted time is wider than most differences between tied shapes; which of them is fastest is the profile's
  best guess, and a measured search (without `--profile`) decides it.
- One device, one runtime, one thread count, decoding only. Prompts, other contexts and other devices move the picks.
- LFM2 and MobileLLM-Flash are placed by stand-ins: their squares show where such a depth and width lies, not those models."""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text."""
    lines = [heads, ["---", *("--:" for _ in heads[1:])], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _pick_list(line: Line) -> str:
    return "\n".join(
        f"- *{_PICKS[name]}*: {_plain(one['shape'])} {one['quant']}: {one['reason']}."
        for name, one in line["picks"].items()
        if name in _PICKS
    )


def _beyond(member: Line) -> bool:
    return "extrapolated" in member["measurement_flags"]


def _short(row: Sequence[Any]) -> str:
    shape = Shape.parse(row[0])
    return f"{shape.num_layers} layers, {shape.vocab_size:,}, {row[1]}"


def _formats(line: Line) -> str:
    counts: dict[str, int] = {}
    for one in line["front"]:
        counts[one["quant"]] = counts.get(one["quant"], 0) + 1
    return ", ".join(f"{count} {quant}" for quant, count in sorted(counts.items()))


def _layers(text: str) -> int:
    return Shape.parse(text).num_layers


def _plain(text: str) -> str:
    shape = Shape.parse(text)
    tied = "" if shape.tie_word_embeddings else ", untied"
    return (
        f"{shape.num_layers} x {shape.hidden_size}, {shape.num_heads}/{shape.num_kv_heads} heads, "
        f"MLP {shape.intermediate_size}, vocabulary {shape.vocab_size:,}{tied},"
    )


def _value(timing: Mapping[str, Any]) -> float:
    return float(timing["median"] if "median" in timing else timing["value"])
