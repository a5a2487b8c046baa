"""How well latency is predicted: a profile of this machine against shapes that were never used in fitting it.

    python benchmarks/prediction.py --budget-s 600      measure for so long, append, print what there is; repeat to continue
    python benchmarks/prediction.py --report            print the tables of what is stored, write docs/prediction.md
    python benchmarks/prediction.py --sample            also rewrite the committed sample that a test holds the model to

Measured in this order, each into one line of ``results/<machine>/prediction.jsonl``: the profile (as ``deepthin profile
measure`` makes it), the probe kit on llama.cpp and onnxruntime as if they were a foreign device, then 64 held-out models on
every runtime and thread count, and some of them a second time, which gives the noise floor. A line's key says what it is;
what is there is not measured again, so a run may be stopped at any point. Profile and measurements belong together only if
the engine is the same: lines of another engine are passed over. The truth is the ordinary decoder with real packed weights,
not the synthetic one that probes use.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from charts import chart

from deepthin.engine.accounting import count_params
from deepthin.engine.errors import DeepthinError, FormatError
from deepthin.engine.model import Model, random_model
from deepthin.engine.shape import Shape
from deepthin.profiles.importing import import_profile
from deepthin.profiles.kit import SUFFIXES, probe_name
from deepthin.profiles.latency.curve import BandwidthCurve
from deepthin.profiles.latency.evaluation import REGIMES, Comparison, compare, noise_floor, regime, summary
from deepthin.profiles.latency.model import is_disturbed
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.runtimes import ENGINE, LLAMA_CPP, ONNXRUNTIME, RUNTIMES
from deepthin.profiles.latency.workload import DECODE, PREFILL
from deepthin.profiles.llama_bench_rows import parse_rows
from deepthin.profiles.machine import last_level_cache_bytes, machine_name, machine_record
from deepthin.profiles.measuring import fit_models
from deepthin.profiles.probe_plans import KIT_PLAN
from deepthin.profiles.probe_shapes import ProbeModel, random_shape
from deepthin.profiles.profile import Profile

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT, FIGURE = ROOT / "docs" / "prediction.md", ROOT / "docs" / "prediction.svg"
SAMPLE = ROOT / "tests" / "profiles" / "latency" / "sample.json"
SCHEMA = "deepthin/prediction-benchmark/1"
SEED = 7_2026
NUM_HELD_OUT, NUM_REPEATED = 64, 20
PARAMS, LAYERS = (5e6, 6e8), (2, 80)
CONTEXTS, PROMPTS = (0, 64, 256, 1024, 2048, 4096), (32, 64, 128, 256)
FORMATS = RUNTIMES[ENGINE].formats
PEER_PRODUCTS = 2e10  # of the tokens a peer must take in before each round; larger models get shorter contexts
ENGINE_PRODUCTS = 2e11  # our decoder takes them in once
PROMPT_PRODUCTS = 1e10
TARGETS = {ENGINE: (0.023, 0.99), LLAMA_CPP: (0.10, 0.97), ONNXRUNTIME: (0.10, 0.97)}  # median error, Spearman
TARGET_TTFT = 0.05
KIT_TESTS = ((32, 0, 0), (32, 0, 512), (0, 128, 0))  # decoded, prompt, cached before; as run.sh asks llama-bench


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    options = _parser().parse_args(argv)
    machine = machine_record()
    path = options.data or RESULTS / machine_name(machine) / "prediction.jsonl"
    try:
        if not options.report and not options.sample:
            measure(path, machine, options.budget_s, options.profile_s)
        lines = read_lines(path)
        print(report(lines))
        if options.report or options.sample:
            write_documents(lines)
        if options.sample:
            SAMPLE.write_text(json.dumps(sample(lines), indent=1) + "\n", encoding="utf-8")
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=600.0, help="stop measuring after so many seconds (%(default)s)")
    parser.add_argument("--profile-s", type=float, default=170.0, help="seconds for the profile itself (%(default)s)")
    parser.add_argument("--data", type=Path, help="JSON lines to add to (default: results/<machine>/prediction.jsonl)")
    parser.add_argument("--report", action="store_true", help="measure nothing; write docs/prediction.md")
    parser.add_argument("--sample", action="store_true", help="measure nothing; write the committed sample too")
    return parser


def held_out() -> list[dict[str, Any]]:
    """The held-out models: shape, a format for each runtime, context and prompt; always the same ones, none of them a probe."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    found = []
    for index in range(NUM_HELD_OUT):
        shape = random_shape(generator, PARAMS, LAYERS)
        quants = {name: runtime.formats[index % len(runtime.formats)] for name, runtime in RUNTIMES.items()}
        found.append(
            {
                "shape": shape,
                "quants": quants,
                "context": int(generator.choice(CONTEXTS)),
                "prompt": int(generator.choice(PROMPTS)),
            }
        )
    return found


def probe_model(item: Mapping[str, Any], runtime: str) -> ProbeModel:
    """What is timed of a held-out model on ``runtime``: an empty cache, its context, its prompt, within reason."""
    shape = item["shape"]
    params = count_params(shape).total
    limit = ENGINE_PRODUCTS if runtime == ENGINE else PEER_PRODUCTS
    context = min(item["context"], int(limit / params))
    prompt = min(item["prompt"], max(8, int(PROMPT_PRODUCTS / params)))
    return ProbeModel(shape, item["quants"][runtime], tuple(dict.fromkeys((0, context))), (prompt,))


# measuring


def measure(path: Path, machine: Mapping[str, Any], budget_s: float, profile_s: float) -> None:
    """Measure what is not in ``path`` yet, until the time is up."""
    from deepthin.cli.bench import write_onnx_for_timing
    from deepthin.export.gguf_writer import write_gguf
    from deepthin.profiles.host import host_bench

    writers = {LLAMA_CPP: write_gguf, ONNXRUNTIME: write_onnx_for_timing}
    with host_bench(machine, tuple(RUNTIMES), writers) as bench:
        start = time.perf_counter()
        lines = [line for line in read_lines(path) if line["engine"] == bench.engine_digest] if path.exists() else []
        done = {line["key"] for line in lines}
        jobs = _jobs(bench, profile_s)
        for key, job in jobs:
            if key in done:
                continue
            if time.perf_counter() - start > budget_s:
                print("time is up; run again to continue", file=sys.stderr)
                return
            print(f"[{time.perf_counter() - start:4.0f} s] {key}", file=sys.stderr)
            line = {"schema": SCHEMA, "key": key, "engine": bench.engine_digest, "machine": machine_name(machine), **job()}
            line["created_utc"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")


def _jobs(bench: Any, profile_s: float) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Everything to measure, in order, by key."""
    from deepthin.profiles.measuring import measure_profile
    from deepthin.profiles.probing import time_model
    from deepthin.profiles.protocol import Rule

    def profile() -> dict[str, Any]:
        return {"profile": measure_profile(bench, budget_s=profile_s).to_json()}

    def kit(runtime: str) -> dict[str, Any]:
        return {"rows": kit_rows(bench, runtime)}

    def held(index: int, runtime: str) -> dict[str, Any]:
        model = probe_model(items[index], runtime)
        opener = open_decoder if runtime == ENGINE else bench.open_runtimes[runtime]
        probes, failed = [], ""
        for threads in bench.threads:
            try:
                rule = Rule(rounds=7, budget_s=1.5, patience=3.0, settle_s=0.0 if runtime == ENGINE else 0.02)
                probes += [probe.to_json() for probe in time_model(runtime, opener, model, threads, rule)]
            except DeepthinError as error:
                failed = str(error)
        return {"probes": probes, "failed": failed}

    items = held_out()
    yield "profile", profile
    for runtime in KIT_PLAN:
        if runtime in bench.open_runtimes:
            yield f"kit {runtime}", lambda runtime=runtime: kit(runtime)
    order = np.random.Generator(np.random.PCG64(SEED + 1)).permutation(NUM_HELD_OUT)
    for turn, count in ((1, NUM_HELD_OUT), (2, NUM_REPEATED)):
        for index in order[:count].tolist():
            for runtime in bench.open_runtimes:
                yield f"held-out {turn} {index} {runtime}", lambda i=index, r=runtime: held(i, r)


@lru_cache(maxsize=1)
def _weights(shape: Shape, quant: str) -> Model:
    """Random weights, kept for the next thread count."""
    return random_model(shape, quant=quant)


class DecoderTimed:
    """The ordinary decoder with packed random weights; see ``profiles.probing.Timed``."""

    pids: Sequence[int] = ()
    contexts_apart = False

    def __init__(self, model: ProbeModel, threads: int) -> None:
        from deepthin.profiles.whole_model import WholeModel

        weights = _weights(model.shape, model.quant)
        self._whole = WholeModel(model.shape, model.quant, threads, model.room, "f16", model=weights)

    def decode(self, context: int) -> tuple[Callable[[], Mapping[str, float]], int]:
        """Steps at one position."""
        first = float(self._whole.run(3, position=context).total_s.min())
        steps = int(min(max(0.05 / first, 4), 64))
        return lambda: {"seconds": float(np.median(self._whole.run(steps, position=context).total_s))}, context

    def prompt(self, tokens: int) -> Callable[[], Mapping[str, float]]:
        """A prompt from the first position on."""
        return lambda: {"seconds": self._whole.prompt(tokens)}

    def close(self) -> None:
        """Stop the threads."""
        self._whole.close()


def open_decoder(model: ProbeModel, threads: int) -> DecoderTimed:
    """The truth for our own engine."""
    return DecoderTimed(model, threads)


def kit_rows(bench: Any, runtime: str) -> list[dict[str, Any]]:
    """What run.sh would bring back from this machine, in llama-bench's words, for one runtime."""
    rows = []
    for model in KIT_PLAN[runtime]:
        asked = ProbeModel(model.shape, model.quant, (512,), (128,))
        for threads in bench.threads:
            timed = bench.open_runtimes[runtime](asked, threads)
            try:
                for gen, prompt, depth in KIT_TESTS:
                    samples = [timed.row_seconds(gen, prompt, depth) for _ in range(6)][1:]
                    rows.append(_kit_row(bench, runtime, model, threads, gen, prompt, depth, samples))
            finally:
                timed.close()
    return rows


def _kit_row(
    bench: Any, runtime: str, model: ProbeModel, threads: int, gen: int, prompt: int, depth: int, samples: Sequence[float]
) -> dict[str, Any]:
    return {
        "build_commit": f"{runtime} {bench.versions(runtime)}",
        "build_number": 0,
        "cpu_info": str(bench.machine.get("cpu_model", "")),
        "backends": "CPU",
        "model_filename": probe_name(model.shape, model.quant, SUFFIXES[runtime]),
        "model_type": "probe",
        "model_size": 0,
        "model_n_params": 0,
        "n_threads": threads,
        "n_prompt": prompt,
        "n_gen": gen,
        "n_depth": depth,
        "samples_ns": [round(1e9 * seconds) for seconds in samples],
    }


# judging


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The stored lines.

    Raises:
        FormatError: there are none.
    """
    if not path.is_file():
        raise FormatError(f"{path}: nothing was measured yet; run without --report first")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    newest = lines[-1]["engine"]
    return [line for line in lines if line["engine"] == newest]


def profile_of(lines: Sequence[Mapping[str, Any]]) -> Profile:
    """The stored profile, its models fitted anew by this version of the code.

    Raises:
        FormatError: there is none yet.
    """
    for line in lines:
        if line["key"] == "profile":
            document = line["profile"]
            curve = BandwidthCurve.from_json(document["bandwidth"])
            probes = [Probe.from_json(probe) for probe in document["probes"]]
            return refitted(document, curve, probes)
    raise FormatError("prediction: no profile was measured yet; run without --report first")


def refitted(document: Mapping[str, Any], curve: BandwidthCurve, probes: Sequence[Probe]) -> Profile:
    """A profile with models fitted to ``probes`` now."""
    return Profile(
        name=document["name"],
        title=document["title"],
        basis="measured",
        created_utc=document["created_utc"],
        machine=document["machine"],
        curve=curve,
        models=fit_models(probes, curve),
        probes=tuple(probes),
        flags=tuple(document["flags"]),
        noise=document["noise"],
        wall_s=document["wall_s"],
    )


def held_out_probes(lines: Sequence[Mapping[str, Any]], turn: int) -> list[Probe]:
    """What was measured of held-out models in one of the two turns."""
    prefix = f"held-out {turn} "
    return [Probe.from_json(probe) for line in lines if line["key"].startswith(prefix) for probe in line["probes"]]


def comparisons(profile: Profile, held: Sequence[Probe]) -> list[Comparison]:
    """Every held-out measurement that the profile has a model for."""
    return [one for model in profile.models for one in compare(model, held)]


def foreign_profile(lines: Sequence[Mapping[str, Any]], runtime: str) -> Profile | None:
    """The kit's rows of ``runtime`` as the profile of a device that is not here."""
    for line in lines:
        if line["key"] == f"kit {runtime}":
            return import_profile(parse_rows(json.dumps(line["rows"]), "kit"), "foreign")
    return None


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """The tables of what is stored, as Markdown."""
    profile = profile_of(lines)
    first, second = held_out_probes(lines, 1), held_out_probes(lines, 2)
    found = comparisons(profile, first)
    disturbed = sum(is_disturbed(probe) for probe in first)
    cache = last_level_cache_bytes(profile.machine) or 32 << 20
    flags = f"; flagged {', '.join(profile.flags)}" if profile.flags else ""
    shapes = len({probe.work.shape.text for probe in first})
    text = [
        f"Machine: {profile.title} ({machine_name(profile.machine)}). "
        f"Profile: {len(profile.probes)} probes in {profile.wall_s:.0f} s{flags}. "
        f"Held out: {shapes} shapes, {len(first)} times, {disturbed} of them taken while others used the machine.",
        "",
        table(HEADERS, _rows_by_runtime(found, first, second)),
    ]
    by_regime = _rows_by_regime(found, cache)
    if by_regime:
        text += ["", "Decoding, by where the model lies against the last-level cache:", "", table(REGIME_HEADERS, by_regime)]
    foreign = _rows_foreign(lines, first)
    if foreign:
        text += ["", "The same shapes from the probe kit alone, as for a device that is not here:", "", table(HEADERS, foreign)]
    return "\n".join(text)


HEADERS = (
    "runtime",
    "test",
    "threads",
    "n",
    "median",
    "p90",
    "max",
    "within 15 %",
    "Spearman",
    "90 % intervals hold",
    "noise floor",
    "target",
)
REGIME_HEADERS = ("runtime", "regime", "n", "median", "p90", "max", "bias")


def _rows_by_runtime(found: Sequence[Comparison], first: Sequence[Probe], second: Sequence[Probe]) -> list[list[str]]:
    rows = []
    for runtime, test, threads in _groups(found):
        mine = [one for one in found if _group(one) == (runtime, test, threads)]
        floor = noise_floor(
            [p for p in first if (p.runtime, p.work.test, p.threads) == (runtime, test, threads)],
            [p for p in second if (p.runtime, p.work.test, p.threads) == (runtime, test, threads)],
        )
        rows.append(_row(runtime, test, threads, summary(mine), floor))
    return rows


def _row(runtime: str, test: str, threads: int, figures: Mapping[str, Any], floor: Mapping[str, float] | None) -> list[str]:
    wanted, rank = TARGETS[runtime]
    target = f"median {wanted:.1%}, rank {rank}" if test == DECODE else f"median {TARGET_TTFT:.0%}" if runtime == ENGINE else ""
    correlation = figures["spearman"]
    return [
        runtime,
        {DECODE: "token", PREFILL: "prompt"}[test],
        str(threads),
        str(figures["n"]),
        *(f"{figures[name]:.1%}" for name in ("median", "p90", "max", "within_15")),
        "" if correlation is None else f"{correlation:.3f}",
        f"{figures['coverage']:.0%}",
        "" if floor is None else f"{floor['median']:.1%} (p90 {floor['p90']:.1%})",
        target,
    ]


def _rows_by_regime(found: Sequence[Comparison], cache: int) -> list[list[str]]:
    rows = []
    for runtime in dict.fromkeys(one.probe.runtime for one in found):
        for name in REGIMES:
            mine = [
                one
                for one in found
                if one.probe.runtime == runtime and one.probe.work.test == DECODE and regime(one.probe.work, cache) == name
            ]
            if mine:
                figures = summary(mine)
                rows.append(
                    [
                        runtime,
                        name,
                        str(figures["n"]),
                        *(f"{figures[k]:.1%}" for k in ("median", "p90", "max")),
                        f"{figures['bias']:+.1%}",
                    ]
                )
    return rows


def _rows_foreign(lines: Sequence[Mapping[str, Any]], held: Sequence[Probe]) -> list[list[str]]:
    rows = []
    for runtime in KIT_PLAN:
        profile = foreign_profile(lines, runtime)
        if profile is None:
            continue
        found = comparisons(profile, held)
        for _, test, threads in _groups(found):
            mine = [one for one in found if _group(one) == (runtime, test, threads)]
            rows.append(_row(runtime, test, threads, summary(mine), None))
    return rows


def _group(one: Comparison) -> tuple[str, str, int]:
    return one.probe.runtime, one.probe.work.test, one.probe.threads


def _groups(found: Sequence[Comparison]) -> list[tuple[str, str, int]]:
    return list(dict.fromkeys(_group(one) for one in found))


def write_documents(lines: Sequence[Mapping[str, Any]]) -> None:
    """Write docs/prediction.md and its figure."""
    DOCUMENT.parent.mkdir(exist_ok=True)
    FIGURE.write_text(figure(lines), encoding="utf-8")
    DOCUMENT.write_text(document(lines), encoding="utf-8")


def document(lines: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    return "\n".join(
        [
            "# How well latency is predicted",
            "",
            "Written by `python benchmarks/prediction.py --report`; do not edit. Errors are |predicted / measured - 1| over",
            "shapes that no fit has seen: random widths, depths, vocabularies, formats and contexts. The noise floor is how",
            "far the same measurement moves when it is taken again later in the run; no prediction can be judged more finely.",
            "",
            report(lines),
            "",
            "![predicted against measured](prediction.svg)",
            "",
        ]
    )


def figure(lines: Sequence[Mapping[str, Any]]) -> str:
    """Predicted against measured milliseconds per token, as SVG."""
    found = [one for one in comparisons(profile_of(lines), held_out_probes(lines, 1)) if one.probe.work.test == DECODE]
    series = {
        f"{runtime}, {threads} threads": [
            (1e3 * one.probe.seconds.median, 1e3 * one.predicted.value)
            for one in found
            if _group(one) == (runtime, test, threads)
        ]
        for runtime, test, threads in _groups(found)
    }
    return chart(
        "Time per token of held-out shapes", "measured, ms", "predicted, ms", series, log_x=True, log_y=True, diagonal=True
    )


def sample(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The committed sample: bandwidth, probes and held-out times, thinned, with the errors they give now."""
    profile = profile_of(lines)
    held = [probe for probe in held_out_probes(lines, 1) if not is_disturbed(probe)]
    found = {}
    for runtime, test, threads in _groups(comparisons(profile, held)):
        mine = [one for one in comparisons(profile, held) if _group(one) == (runtime, test, threads)]
        found[f"{runtime} {test} {threads}"] = summary(mine)["median"]
    return {
        "schema": "deepthin/prediction-sample/1",
        "machine": dict(profile.machine),
        "created_utc": profile.created_utc,
        "bandwidth": profile.curve.to_json(),
        "probes": [_thin(probe) for probe in profile.probes],
        "held_out": [_thin(probe) for probe in held],
        "median_errors": found,
    }


def _thin(probe: Probe) -> dict[str, Any]:
    """A probe with its interval but at most three samples."""
    document = probe.to_json()
    seconds = document["seconds"]
    kept = [seconds["ci_low"], seconds["median"], seconds["ci_high"]]
    return {**document, "seconds": {**seconds, "n": 3, "samples": kept}}


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [headers, ["---"] * 2 + ["--:"] * (len(headers) - 2), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
