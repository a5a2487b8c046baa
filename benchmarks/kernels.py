"""Speed of each product kernel alone, per format: decode from cache and from memory, and prefill; beside the measured ceiling.

    python benchmarks/kernels.py                       every format, one thread
    python benchmarks/kernels.py --threads 2 --formats q4_0,q8_0

Weights are random bytes in the packed layout. Decode is one token over a matrix that stays in the last cache and over one that
does not; GB/s counts packed bytes. Prefill is 32 tokens over a matrix of the first size; GMAC/s counts multiply-adds. All cases
take turns; medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from deepthin.cli.table import table
from deepthin.engine.bandwidth import read_bandwidth
from deepthin.engine.errors import DeepthinError
from deepthin.engine.formats import format_named
from deepthin.engine.kernels.decode import ROWS
from deepthin.engine.kernels.matmul import matmul
from deepthin.engine.pack import KERNEL_FORMATS, packed_sizes, place
from deepthin.engine.plan import aligned_bytes
from deepthin.engine.simd import W

COLS = 768  # a multiple of every block
HEADERS = ("format", "decode, cache GB/s", "decode, memory GB/s", "of reading", "prefill GMAC/s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(KERNEL_FORMATS), help="comma-separated (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="threads that share the rows (default: %(default)s)")
    parser.add_argument("--cache-mb", type=float, default=6, help="MB that stay in the last cache (default: %(default)s)")
    parser.add_argument("--memory-mb", type=float, default=128, help="MB that do not (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print every sample as one JSON document")
    options = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    try:
        found = measure(options.formats.split(","), options.threads, options.cache_mb, options.memory_mb, options.rounds)
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found) if options.json else report(found))
    return 0


def measure(names: Sequence[str], threads: int, cache_mb: float, memory_mb: float, rounds: int) -> dict[str, list[float]]:
    """Samples by case: ``read``, and ``<format> cache|memory|prefill``; bytes or multiply-adds per second.

    Raises:
        FormatError: a name is no format.
    """
    cases: dict[str, Callable[[], float]] = {
        "read": lambda: float(read_bandwidth(threads, int(memory_mb * 1e6), 1)[0]),
    }
    for name in names:
        for case, megabytes, tokens in (("cache", cache_mb, 1), ("memory", memory_mb, 1), ("prefill", cache_mb, ROWS)):
            cases[f"{name} {case}"] = _case(name, megabytes, tokens, threads)
    samples: dict[str, list[float]] = {case: [] for case in cases}
    for round_ in range(rounds + 1):
        for case, run in cases.items():
            rate = run()
            if round_:  # the first compiles and warms up
                samples[case].append(rate)
    return samples


def report(found: dict[str, list[float]]) -> str:
    """The medians as a table."""
    at = {case: float(np.median(samples)) / 1e9 for case, samples in found.items()}
    names = [case.removesuffix(" cache") for case in found if case.endswith(" cache")]
    rows = [
        (
            name,
            f"{at[f'{name} cache']:.1f}",
            f"{at[f'{name} memory']:.1f}",
            f"{at[f'{name} memory'] / at['read']:.2f}",
            f"{at[f'{name} prefill']:.1f}",
        )
        for name in names
    ]
    return table(HEADERS, rows) + f"\nreading alone: {at['read']:.1f} GB/s"


def _case(name: str, megabytes: float, tokens: int, threads: int) -> Callable[[], float]:
    """A function that multiplies for some milliseconds and returns bytes (one token) or multiply-adds per second."""
    fmt = format_named(name)
    tiles = max(4 * threads, int(megabytes * 1e6 / sum(packed_sizes(fmt, W, COLS, W))) // (4 * threads) * 4 * threads)
    packed = place(fmt, tiles * W, COLS, W, 0)
    end = packed.scale_at + packed.scale_bytes
    arena = aligned_bytes(end)
    arena[:] = np.resize(np.random.default_rng(0).integers(0, 256, 99991, np.uint8), end)
    if fmt.is_quantized:
        arena[packed.scale_at :] = 0x2A  # as f16 0.05
    else:
        arena[1::2] = 0x2A
    ops = np.array([packed.op], np.int64)
    x = np.ones(tokens * COLS, np.float32)
    xq = np.random.default_rng(1).integers(-127, 128, tokens * COLS).astype(np.int8)
    xs, xn = np.ones(tokens * COLS // 32, np.float32), xq.reshape(-1, 32).sum(axis=1, dtype=np.int32)
    out = np.zeros(tokens * tiles * W, np.float32)
    work = packed.num_bytes if tokens == 1 else tiles * W * COLS * tokens
    repeats = max(1, int(60e6 / packed.num_bytes) if tokens == 1 else 1)

    def multiply(t0: int, t1: int) -> None:
        matmul(out, 0, tiles * W, arena, ops, 0, x, 0, COLS, xq, 0, COLS, xs, xn, 0, COLS // 32, tokens, t0, t1)

    def part(start: threading.Barrier, tid: int, spans: list[tuple[float, float]]) -> None:
        t0, t1 = tiles * tid // threads, tiles * (tid + 1) // threads
        multiply(t0, t1)  # brings into the cache what stays there
        start.wait()
        began = time.perf_counter()
        for _ in range(repeats):
            multiply(t0, t1)
        spans.append((began, time.perf_counter()))

    def run() -> float:
        start = threading.Barrier(threads)
        spans: list[tuple[float, float]] = []
        workers = [threading.Thread(target=part, args=(start, tid, spans)) for tid in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return work * repeats / (max(end for _, end in spans) - min(began for began, _ in spans))

    return run


if __name__ == "__main__":
    sys.exit(main())
