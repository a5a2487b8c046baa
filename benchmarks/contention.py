"""What one busy process costs a decoding model: every thread choice of the engine, and llama.cpp, alone and beside it.

    python benchmarks/contention.py                  about a minute, most of it llama.cpp waiting
    python benchmarks/contention.py --json           the same, one JSON document

In each round all contestants decode in turns, first alone, then beside a process that does nothing but run. ``automatic`` is
what a Decoder does unless told how many threads to use: the fastest number, and fewer while a core is taken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.errors import DeepthinError, PeerMissingError

SCHEMA = "deepthin/contention-benchmark/1"
STATES = ("alone", "busy")
BUSY = "while True: pass"
PIECE, LONGEST_S = (
    8,
    5.0,
)  # llama.cpp decodes so many at a time, and no more once so much time is spent: a token may take seconds
SETTLE_S = 0.3  # for the busy process to start, and for idle threads to park

Decode = Callable[[Sequence[int]], list[float]]  # token ids to the seconds of each


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        body = measure(options)
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(body, indent=2) if options.json else render(body))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF (default: SmolLM2)")
    parser.add_argument("--quant", default="q4_0", help="format of its blocks (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="decoded by each contestant in a row (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every token, by contestant and state.

    Raises:
        DeepthinError: the model cannot be read or run.
    """
    from runs import commit
    from speed_models import smollm2_path

    from deepthin.engine.load import load_model
    from deepthin.profiles.machine import machine_record

    model = load_model(options.model or smollm2_path()).quantized(options.quant)
    ids = np.random.default_rng(0).integers(0, model.shape.vocab_size, options.tokens).tolist()
    with ExitStack() as stack:
        contestants = dict(_engines(model, options.tokens, stack))
        try:
            contestants["llama.cpp, 2 threads"] = _llama_cpp(model, options.tokens, stack)
        except PeerMissingError as error:
            print(f"llama.cpp left out: {error}", file=sys.stderr)
        for decode in contestants.values():
            decode(ids)
        samples = {name: {state: [] for state in STATES} for name in contestants}
        for _ in range(options.rounds):
            for state in STATES:
                with busy_process() if state == "busy" else ExitStack():
                    for name, decode in contestants.items():
                        time.sleep(SETTLE_S)
                        samples[name][state] += decode(ids)
    return {
        "schema": SCHEMA,
        **commit(),
        "machine": machine_record(),
        "shape": model.shape.text,
        "quant": options.quant,
        "ms_per_token": {name: {state: summary(times) for state, times in states.items()} for name, states in samples.items()},
    }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile and mean in milliseconds."""
    times = np.asarray(seconds) * 1e3
    return {"median": float(np.median(times)), "p90": float(np.quantile(times, 0.9)), "mean": float(times.mean())}


def render(body: Mapping[str, Any]) -> str:
    """A Markdown table, milliseconds a token."""
    lines = [
        "| | alone: median | p90 | mean | busy: median | p90 | mean |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, states in body["ms_per_token"].items():
        cells = [f"{states[state][key]:.1f}" for state in STATES for key in ("median", "p90", "mean")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@contextmanager
def busy_process() -> Iterator[int]:
    """A process of its own that keeps one CPU busy meanwhile; its id."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _engines(model: Any, context: int, stack: ExitStack) -> Iterator[tuple[str, Decode]]:
    from deepthin.engine.decoder import Decoder

    for threads in (1, 2, None):
        decoder = stack.enter_context(Decoder(model, threads=threads, context=context, kv_format="f16"))
        name = f"automatic: {decoder.thread_choice.text}" if threads is None else f"{threads} thread{'s' * (threads > 1)}"
        yield name, _steps(decoder)


def _steps(decoder: Any) -> Decode:
    def decode(ids: Sequence[int]) -> list[float]:
        decoder.reset()
        ends = [time.perf_counter()]
        for token in ids:
            decoder.step(token)
            ends.append(time.perf_counter())
        return np.diff(ends).tolist()

    return decode


def _llama_cpp(model: Any, context: int, stack: ExitStack) -> Decode:
    from deepthin.engine.child import Child
    from deepthin.export.gguf_writer import write_gguf

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepthin-contention-")))
    write_gguf(model, folder / "model.gguf")
    child = stack.enter_context(closing(Child("deepthin.profiles.peer_llama_bench", peer="llama.cpp", deadline_s=300.0)))
    child.call("load", path=str(folder / "model.gguf"), threads=2, context=context)

    def decode(ids: Sequence[int]) -> list[float]:
        each: list[float] = []
        for start in range(0, len(ids), PIECE):
            each += child.call("decode", ids=list(ids[start : start + PIECE]), before=[])["each"]
            if sum(each) > LONGEST_S:
                break
        return each

    return decode


if __name__ == "__main__":
    raise SystemExit(main())
