"""Predictions for devices known from published facts, beside what others measured on them: writes docs/devices.md.

    python benchmarks/devices.py             print the table and write the page
    python benchmarks/devices.py --check     say whether the page is what this script would write; writes nothing

Nothing is timed. No prediction uses a published speed of any device, so every row is a test.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deepthin.engine.known_shapes import known_shape
from deepthin.engine.shape import Shape
from deepthin.profiles.device_facts import DeviceFacts, PublishedSpeed, device_facts, device_names
from deepthin.profiles.latency.runtimes import LLAMA_CPP
from deepthin.profiles.latency.workload import Workload
from deepthin.profiles.schema import Predicted

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "devices.md"
CONTEXT = 128  # cached tokens assumed; sources seldom say
_ABOUT = """Written by `python benchmarks/devices.py`; do not edit. Each device ships as a file of published facts in
`profiles/devices/`, every value with unit, source, date and status. From its memory bandwidth and the terms of the latency
model alone, with no measurement on the device, `deepthin profile show NAME` predicts llama.cpp on the fast cores, with 90 %
intervals that are as wide as that ignorance. No published speed enters a prediction. It is no blind test all the same: the
general cost of a multiply-add was halved once after a first look at this table, to what llama.cpp shows on two PCs, and two
rows of the Raspberry Pi 5 were then read again and put under the formats that their files really have. Later all priors were
set again from measurements on a Zen 5 machine, and scaled so that this table stayed as good as it was.
"""
HEADERS = (
    *("device", "model", "format", "runtime", "threads", "published tok/s", "predicted tok/s"),
    *("error", "inside", "status", "source"),
)
SHOWN = ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b")


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args(argv)
    text = document()
    if options.check:
        same = DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == text
        print("docs/devices.md is up to date" if same else "docs/devices.md differs; run python benchmarks/devices.py")
        return 0 if same else 1
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(text, encoding="utf-8")
    print(text)
    return 0


def predicted_speed(facts: DeviceFacts, speed: PublishedSpeed) -> Predicted:
    """Tokens per second predicted for what somebody measured."""
    work = Workload(speed.shape, speed.quant, context=CONTEXT)
    return facts.profile(speed.threads).predict(LLAMA_CPP, None, work).seconds.rate(1.0, "tok/s")


def comparisons() -> list[tuple[DeviceFacts, PublishedSpeed, Predicted]]:
    """Every published speed with its prediction, by device."""
    found = []
    for name in device_names():
        facts = device_facts(name)
        found += [(facts, speed, predicted_speed(facts, speed)) for speed in facts.speeds]
    return found


def document() -> str:
    """The page."""
    found = comparisons()
    ratios = np.array([predicted.value / float(speed.fact.value) for _, speed, predicted in found])
    inside = [predicted.low <= float(speed.fact.value) <= predicted.high for _, speed, predicted in found]
    own = np.array([speed.runtime in ("llama.cpp", "ollama") for _, speed, _ in found])
    factor = np.exp(np.abs(np.log(ratios)))
    lines = [
        "# Devices that are not here",
        "",
        *_ABOUT.splitlines(),
        "",
        "## Against published measurements",
        "",
        f"{len(found)} speeds that others published: the prediction is off by a factor of {np.median(factor):.2f} in the",
        f"median and {np.quantile(factor, 0.9):.2f} in nine of ten; {np.mean(inside):.0%} lie inside their interval. Where the",
        f"runtime was llama.cpp or ollama, which runs it: {np.median(factor[own]):.2f} in the median of {int(own.sum())}.",
        "Other runtimes have other kernels, and sources seldom state context and threads (128 cached tokens and all fast",
        "cores are assumed).",
        "",
        _markdown(
            HEADERS,
            [_row(facts, speed, predicted) for facts, speed, predicted in found],
        ),
        "",
        "## Predicted speeds",
        "",
        "Tokens per second in q4_0 at 128 cached tokens (90 % interval). Phones also slow down when warm.",
        "",
        _markdown(
            ("device", "bandwidth, GB/s", "known as", "threads", *SHOWN),
            [_speeds(name, [known_shape(shape).shape for shape in SHOWN]) for name in device_names()],
        ),
        "",
    ]
    return "\n".join(lines)


def _row(facts: DeviceFacts, speed: PublishedSpeed, predicted: Predicted) -> list[str]:
    value = float(speed.fact.value)
    return [
        facts.name,
        speed.model,
        speed.quant,
        speed.runtime,
        "" if speed.threads is None else str(speed.threads),
        f"{value:g}",
        f"{predicted.value:.1f} ({predicted.low:.1f}..{predicted.high:.1f})",
        f"{predicted.value / value - 1:+.0%}",
        "yes" if predicted.low <= value <= predicted.high else "no",
        speed.fact.status,
        f"{speed.fact.source}: {speed.fact.conditions}",
    ]


def _speeds(name: str, shapes: Sequence[Shape]) -> list[str]:
    facts = device_facts(name)
    profile = facts.profile()
    cells = []
    for shape in shapes:
        speed = profile.predict(LLAMA_CPP, None, Workload(shape, "q4_0", context=CONTEXT)).seconds.rate(1.0, "tok/s")
        cells.append(f"{speed.value:.0f} ({speed.low:.0f}..{speed.high:.0f})")
    known = f"{facts.bandwidth_kind}, {facts.bandwidth.status}"
    return [name, f"{float(facts.bandwidth.value) / 1e9:.1f}", known, str(int(facts.cores.value)), *cells]


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
