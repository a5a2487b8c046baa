"""What depth costs: shapes of equal bytes from 4 to 96 layers, time per token on each runtime, and the fitted cost of a layer.

    python benchmarks/depth.py --budget-s 600      measure for so long, append, print what there is; repeat to continue
    python benchmarks/depth.py --report            measure nothing; write docs/depth.md and its figures from what is stored

Three sizes: the bytes that 30M, 135M and 350M parameters take in Q4_0 with a Q8_0 head. At each depth the width follows and the
MLP takes up what rounding leaves, so that every shape of a size reads the same bytes within 1.5 %. Random weights, an
empty cache. One line per shape, runtime and thread count in ``results/<machine>/depth.jsonl``; what is there is not measured
again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from charts import chart
from placement import append_line, in_turn
from prediction import RESULTS, table
from prediction_measuring import open_decoder, read_lines

from deepthin.engine.accounting import analytic_latency, bytes_read_per_token
from deepthin.engine.errors import DeepthinError, UsageError
from deepthin.engine.shape import Shape
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.runtimes import ENGINE, LLAMA_CPP, ONNXRUNTIME, RUNTIMES
from deepthin.profiles.machine import machine_name, machine_record
from deepthin.profiles.probe_shapes import ProbeModel

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "depth.md"
SCHEMA = "deepthin/depth-benchmark/2"
QUANT = "q4_0"
DEPTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
SIZES = {"30M": (16.9e6 + 3e6, 8192), "135M": (89.8e6, 49152), "350M": (230e6, 49152)}  # bytes read a token, vocabulary
HEAD_DIM, KV_GROUP, MLP_RATIO, STEP = 32, 2, 2.7, 32
MAX_OFF = 0.015  # of the bytes
_ABOUT = f"""Written by `python benchmarks/depth.py --report`; do not edit. Shapes of equal bytes at every depth: the width
follows from the depth, so each token reads the same {QUANT} weights (head q8_0) and only the number of layers differs. Random
weights, an empty cache, real decoders. The cost of a layer is the median slope over all pairs of depths; analytic is
T = bytes / bandwidth + L x that cost, with the read bandwidth measured beside the shapes. `*` marks a time that the
measuring protocol flagged.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=600.0, help="stop measuring after so many seconds (%(default)s)")
    parser.add_argument("--data", type=Path, help="JSON lines to add to (default: results/<machine>/depth.jsonl)")
    parser.add_argument("--report", action="store_true", help="measure nothing; write docs/depth.md and its figures")
    options = parser.parse_args(argv)
    machine = machine_record()
    path = options.data or RESULTS / machine_name(machine) / "depth.jsonl"
    try:
        if not options.report:
            measure(path, machine, options.budget_s)
        lines = read_lines(path)
        print(report(lines))
        if options.report:
            DOCUMENT.parent.mkdir(exist_ok=True)
            DOCUMENT.write_text(document(lines), encoding="utf-8")
            for size in SIZES:
                if any(line["size"] == size for line in lines):
                    (DOCUMENT.parent / f"depth-{size}.svg").write_text(figure(lines, size), encoding="utf-8")
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def iso_byte_shape(layers: int, num_bytes: float, vocab: int) -> Shape:
    """The shape with ``layers`` layers that reads ``num_bytes`` a token: the width whose MLP ratio is nearest to usual.

    Raises:
        UsageError: no width reads so many bytes within 1.5 %.
    """
    best: tuple[float, Shape] | None = None
    for heads in range(KV_GROUP, 128, KV_GROUP):
        width = heads * HEAD_DIM
        shape = Shape(
            num_layers=layers,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=heads // KV_GROUP,
            intermediate_size=STEP,
            vocab_size=vocab,
        )
        base = bytes_read_per_token(shape, QUANT)
        step = bytes_read_per_token(shape.replace(intermediate_size=2 * STEP), QUANT) - base
        inner = STEP * (1 + max(0, round((num_bytes - base) / step)))
        shape = shape.replace(intermediate_size=inner)
        if abs(bytes_read_per_token(shape, QUANT) / num_bytes - 1) > MAX_OFF:
            continue
        gap = abs(np.log(inner / width / MLP_RATIO))
        if best is None or gap < best[0]:
            best = gap, shape
    if best is None:
        raise UsageError(f"depth: no shape of {layers} layers reads {num_bytes:,.0f} bytes within {MAX_OFF:.1%}")
    return best[1]


def measure(path: Path, machine: Mapping[str, Any], budget_s: float) -> None:
    """Measure what is not in ``path`` yet, shallow and deep in turn, until the time is up."""
    from deepthin.cli.bench import write_onnx_for_timing
    from deepthin.export.gguf_writer import write_gguf
    from deepthin.profiles.host import host_bench
    from deepthin.profiles.probing import time_model
    from deepthin.profiles.protocol import Rule

    writers = {LLAMA_CPP: write_gguf, ONNXRUNTIME: write_onnx_for_timing}
    with host_bench(machine, tuple(RUNTIMES), writers) as bench:
        lines = [line for line in read_lines(path) if line["engine"] == bench.engine_digest] if path.exists() else []
        done = {line["key"] for line in lines}
        wanted = {
            f"{size} {layers} {runtime} {threads}": (size, layers, runtime, threads)
            for size in SIZES
            for layers in (*DEPTHS[::2], *DEPTHS[1::2])
            for runtime in bench.open_runtimes
            for threads in bench.threads
        }
        left = {key: job for key, job in wanted.items() if key not in done}
        for key, (size, layers, runtime, threads) in in_turn(left, budget_s, partial(_placement, lines=lines)):
            num_bytes, vocab = SIZES[size]
            model = ProbeModel(iso_byte_shape(layers, num_bytes, vocab), QUANT)
            opener = open_decoder if runtime == ENGINE else bench.open_runtimes[runtime]
            rule = Rule(rounds=9, budget_s=1.5, patience=2.0, settle_s=0.0 if runtime == ENGINE else 0.02)
            rate = float(np.median(bench.read_bandwidth(threads, int(num_bytes), 5)))
            probes, failed = [], ""
            try:
                probes = [probe.to_json() for probe in time_model(runtime, opener, model, threads, rule)]
            except DeepthinError as error:
                failed = str(error)
            lines.append(
                {
                    "schema": SCHEMA,
                    "key": key,
                    "engine": bench.engine_digest,
                    "machine": dict(machine),
                    "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                    "size": size,
                    "layers": layers,
                    "runtime": runtime,
                    "threads": threads,
                    "version": bench.versions(runtime),
                    "bytes_per_s": rate,
                    "probes": probes,
                    "failed": failed,
                }
            )
            append_line(path, lines[-1])


def _placement(key: str, lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of a barrier when this thread count was timed first; all of it belongs to that placement of the cores."""
    threads = int(key.rpartition(" ")[2])
    known = (probe["barrier_s"] for line in lines if line["threads"] == threads for probe in line["probes"])
    return next((seconds for seconds in known if seconds), None)


def layer_cost(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds at no depth and per layer: the line through (layers, seconds) that most pairs agree on.

    The median of the slopes of all pairs (Theil 1950, Sen 1968), so that a disturbed point does not bend it.

    Raises:
        UsageError: there are fewer than two depths.
    """
    slopes = [(b - a) / (m - n) for n, a in points for m, b in points if m > n]
    if not slopes:
        raise UsageError("depth: a cost per layer needs at least two depths")
    slope = float(np.median(slopes))
    return float(np.median([seconds - slope * layers for layers, seconds in points])), slope


def points_of(lines: Sequence[Mapping[str, Any]], size: str) -> dict[tuple[str, int], list[tuple[int, Probe]]]:
    """(runtime, threads) -> depth and measurement, by depth."""
    found: dict[tuple[str, int], list[tuple[int, Probe]]] = {}
    for line in sorted(lines, key=lambda line: int(line["layers"])):
        if line["size"] == size:
            for item in line["probes"]:
                probe = Probe.from_json(item)
                found.setdefault((probe.runtime, probe.threads), []).append((int(line["layers"]), probe))
    return found


def bandwidth(lines: Sequence[Mapping[str, Any]], size: str, threads: int) -> float:
    """Read bandwidth over as many bytes as a token of ``size`` reads, median of all lines."""
    return float(np.median([line["bytes_per_s"] for line in lines if (line["size"], line["threads"]) == (size, threads)]))


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """Tables of every size that has been measured."""
    parts = []
    for size, (num_bytes, _) in SIZES.items():
        found = points_of(lines, size)
        if not found:
            continue
        depths = sorted({layers for points in found.values() for layers, _ in points})
        headers = ("runtime", "threads", *(f"{layers} layers" for layers in depths), "us per layer", "analytic, 4 to 96 layers")
        rows = []
        for (runtime, threads), points in found.items():
            seconds = {layers: probe.seconds.median for layers, probe in points}
            marked = {layers for layers, probe in points if probe.flags}
            cells = [f"{1e3 * seconds[n]:.2f}{'*' if n in marked else ''}" if n in seconds else "" for n in depths]
            rows.append([runtime, str(threads), *cells, *_costs(lines, size, num_bytes, threads, list(seconds.items()))])
        parts += [
            f"### {size}: {num_bytes / 1e6:.0f} MB read per token",
            "",
            "Milliseconds per token.",
            "",
            table(headers, rows),
            "",
        ]
    return "\n".join(parts)


def _costs(
    lines: Sequence[Mapping[str, Any]], size: str, num_bytes: float, threads: int, points: Sequence[tuple[int, float]]
) -> list[str]:
    if len(points) < 2:
        return ["", ""]
    _, slope = layer_cost(points)
    rate = bandwidth(lines, size, threads)
    ends = [1e3 * analytic_latency(num_bytes, rate, layers, max(slope, 0.0)).total_s for layers in (DEPTHS[0], DEPTHS[-1])]
    return [f"{1e6 * slope:.1f}", f"{ends[0]:.2f} to {ends[1]:.2f} ms at {rate / 1e9:.0f} GB/s"]


def document(lines: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    first = lines[0]
    machine = first["machine"]
    versions = sorted({f"{line['runtime']} {line['version']}" for line in lines})
    figures = [f"![{size}](depth-{size}.svg)" for size in SIZES if any(line["size"] == size for line in lines)]
    return "\n".join(
        [
            "# What depth costs",
            "",
            *_ABOUT.splitlines(),
            "",
            f"{machine.get('cpu_model', machine['arch'])}, {machine['usable_cpus']} CPUs, {machine['simd']}, {machine['os']}; "
            f"{', '.join(versions)}; from {first['created_utc'][:10]}.",
            "",
            report(lines),
            *figures,
            "",
        ]
    )


def figure(lines: Sequence[Mapping[str, Any]], size: str) -> str:
    """Milliseconds per token over depth, as SVG."""
    series = {
        f"{runtime}, {threads} thr.": [(float(layers), 1e3 * probe.seconds.median) for layers, probe in points]
        for (runtime, threads), points in points_of(lines, size).items()
    }
    return chart(f"Time per token at equal bytes, {size}", "layers", "ms per token", series, lines=True)


if __name__ == "__main__":
    sys.exit(main())
