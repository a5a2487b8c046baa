"""Predicted speeds of shapes on a profile's device, as rows and as a table; for ``profile show`` and ``inspect --profile``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepthin.cli.sizes import seconds_text
from deepthin.cli.table import table
from deepthin.engine.errors import UsageError
from deepthin.engine.shape import Shape

if TYPE_CHECKING:
    from deepthin.profiles.profile import Profile

SHOWN_SHAPES = ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "llama-3.2-1b")
SHOWN_QUANTS = ("q4_0", "q8_0")
PROMPT = 256  # tokens of the prompt whose time is given
_PARTS = ("weights", "layers", "attention", "head", "overhead")


def open_profile(name: str) -> Profile:
    """The profile called ``name``, as ``--profile`` takes it.

    Raises:
        UsageError: there is none.
        FormatError: it is damaged, or asked for as this host's and of another machine.
    """
    from deepthin.profiles.library import find_profile
    from deepthin.profiles.machine import machine_record

    return find_profile(name, machine_record())


def predictions(profile: Profile, shapes: Mapping[str, Shape], quants: Sequence[str], *, context: int) -> list[dict[str, Any]]:
    """One row per runtime, thread count, shape and format: time per token with its terms, tokens per second, time of a prompt.

    Args:
        profile: of the device.
        shapes: by the name to show.
        quants: body formats.
        context: cached tokens while decoding.
    """
    from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload

    rows = []
    for runtime in profile.runtimes:
        for threads in profile.threads_of(runtime):
            for name, shape in shapes.items():
                for quant in quants:
                    work = Workload(shape, quant, DECODE, 1, context)
                    try:
                        token = profile.predict(runtime, threads, work)
                    except UsageError:  # only prompts were measured at this thread count
                        continue
                    try:
                        prompt = profile.predict(runtime, threads, Workload(shape, quant, PREFILL, PROMPT, 0))
                    except UsageError:
                        prompt = None
                    rows.append(
                        {
                            "runtime": runtime,
                            "threads": threads,
                            "name": name,
                            "shape": shape.text,
                            "quant": quant,
                            "context": context,
                            "seconds_per_token": token.seconds.to_json(),
                            "tok_s": token.seconds.rate(1.0, "tok/s").to_json(),
                            "terms_s": token.terms,
                            "ttft": None if prompt is None else {"prompt": PROMPT, **prompt.seconds.to_json()},
                            "extrapolated": list(token.extrapolated),
                        }
                    )
    return rows


def predictions_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as a table, with what qualifies them."""
    rows = list(rows)
    headers = ("runtime", "shape", "quant", "threads", "tok/s", "90 %", "ms/token", *_PARTS, f"prompt of {PROMPT}", "")
    cells = []
    for row in rows:
        speed, ttft = row["tok_s"], row["ttft"]
        milliseconds = {part: 1e3 * row["terms_s"].get(part, 0.0) for part in _PARTS}
        cells.append(
            (
                row["runtime"],
                row["name"],
                row["quant"],
                row["threads"],
                f"{speed['value']:.4g}",
                f"{speed['low']:.3g}..{speed['high']:.3g}",
                f"{1e3 * row['seconds_per_token']['value']:.3g}",
                *(f"{milliseconds[part]:.3g}" for part in _PARTS),
                "" if ttft is None else seconds_text(ttft["value"]),
                "extrapolated" if row["extrapolated"] else "",
            )
        )
    if not cells:
        return "this profile predicts no decoding"
    basis = rows[0]["tok_s"]["basis"]
    lines = [
        f"predicted at {rows[0]['context']} cached tokens (basis: {basis}); terms in ms per token",
        table(headers, cells, left=3),
    ]
    reasons = dict.fromkeys(
        f"{row['name']} {row['quant']}: {'; '.join(row['extrapolated'])}" for row in rows if row["extrapolated"]
    )
    return "\n".join([*lines, *(f"extrapolated, {reason}" for reason in reasons)])
