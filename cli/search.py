"""``deepthin search``: the main job. Search within a budget, print the front, export the pick, verify it."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy loads: its threads stay busy for a while after each product,
# which would be the first moments of a measurement; what a search computes is small

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepthin.cli.arguments import (
    MAX_CONTEXT,
    argument,
    context,
    listed,
    one_of,
    parse_path,
    parse_threads,
    real,
    require_out,
    whole,
)
from deepthin.cli.export import manifest_text
from deepthin.cli.outcome import Outcome
from deepthin.cli.progress import Progress
from deepthin.cli.sizes import bytes_text, count_text, parse_bytes, parse_count, parse_counts
from deepthin.cli.table import table
from deepthin.cli.verify import verdict_text
from deepthin.engine.errors import InfeasibleError, UsageError
from deepthin.engine.formats import BODY_QUANTS
from deepthin.engine.shape import Shape

if TYPE_CHECKING:
    from deepthin.profiles.schema import TokenCost
    from deepthin.search.config import SearchConfig

RUNTIME_NAMES = ("deepthin", "llama.cpp", "onnxruntime")
TARGETS = ("hf", "onnx", "gguf", "gguf-k-quants", "transformersjs")  # as in search/targets.py, which loads more
PRICED = ("gguf-k-quants",)
SAMPLERS = ("exhaustive", "guided", "tpe", "nsga2", "random")
QK_NORM_CHOICES = {"no": (False,), "yes": (True,), "either": (False, True)}
PICKS = ("best_quality", "fastest_tied", "knee", "smallest_kv", "no_slower_than_baseline")
SHAPE_S, ALL_SHAPES_S, LEAST_SHAPE_S = 1.0, 160.0, 0.25  # seconds for timing one shape; 300 and their repeats in five minutes
MOST_PATIENCE = 3.0  # times as long for one shape, and at most so for all, while other programs use the machine
LARGE_RESIDUAL = 0.1  # sums of parts this far from the whole model can reorder a front
EXPORT_FOLDER = "export"
EXAMPLES = """examples:
  deepthin search                                   30M parameters, on this machine, into ./run
  deepthin search --params 150M --vocab 49152 --out run150
  deepthin search --bytes 90MB --quant q4_0,q8_0 --max-kv-mb 20 --context 2048
  deepthin search --params 150M --profile pixel-9   for a device that is not here; times are predicted
  deepthin search --config run.toml --json

The budget counts the embedding and is never exceeded. Every shape that is proposed is timed here, about a second each (less
where there are more than 160), up to three times that while other programs use the machine (less where there are more than
50); their work spoils the times, and is flagged. DIR holds everything: config.json, journal, measurements, front.json and
export/. The same command again resumes or repeats a run without measuring anything twice; a new DIR measures anew, unless
--store names the timings of an earlier run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    group = parser.add_argument_group("budget (default: --params 30M)")
    group.add_argument(
        "--params", type=argument(parse_count), metavar="N", help="parameters at most, embedding included: 30M, 1.5B"
    )
    group.add_argument("--bytes", type=argument(parse_bytes), metavar="N", help="bytes of the GGUF file at most: 90MB, 64MiB")
    group.add_argument(
        "--ram", type=argument(parse_bytes), metavar="N", help="bytes of weights, cache at --context tokens and scratch at most"
    )
    group = parser.add_argument_group("what may be chosen")
    group.add_argument("--vocab", type=argument(parse_counts), metavar="V,V,..", help="vocabulary sizes; one fixes it")
    group.add_argument(
        "--quant", type=one_of(*BODY_QUANTS), metavar="Q,Q,..", help=f"formats of the matrices, of {','.join(BODY_QUANTS)}"
    )
    group.add_argument(
        "--targets",
        type=one_of(*TARGETS, "none"),
        metavar="T,T,..",
        help=f"must take every shape, of {','.join(TARGETS)}; none asks nothing (default: hf,onnx,gguf)",
    )
    group.add_argument(
        "--price-targets",
        type=one_of(*PRICED),
        metavar="T,T,..",
        help=f"count against --bytes as they would be stored, fallbacks included, of {','.join(PRICED)}",
    )
    group.add_argument("--share", type=listed(whole(1, 16)), metavar="N,N,..", help="runs of each block (default: 1)")
    group.add_argument("--qk-norm", choices=tuple(QK_NORM_CHOICES), help="normalise queries and keys (default: no)")
    group = parser.add_argument_group("limits that steer the search and filter the front")
    group.add_argument("--max-ms-per-token", type=real(1e-6, 1e9), metavar="MS", help="decode time at --context tokens")
    group.add_argument(
        "--max-ttft-ms",
        type=real(1e-6, 1e9),
        metavar="MS",
        help="time to the first token of a prompt of --context tokens; needs --profile",
    )
    group.add_argument("--max-kv-mb", type=real(1e-6, 1e9), metavar="MB", help="F16 cache at --context tokens")
    group = parser.add_argument_group("the run")
    group.add_argument("--trials", type=whole(1, 10_000), metavar="N", help="shapes to try (default: 48)")
    group.add_argument(
        "--context", type=context(0, MAX_CONTEXT - 1), metavar="N", help="cached tokens while timing (default: 512)"
    )
    group.add_argument(
        "--threads",
        type=argument(parse_threads),
        metavar="N",
        help="default: one per physical core, fast ones where they differ",
    )
    group.add_argument(
        "--plateau", type=whole(0, 10_000), metavar="N", help="stop after N shapes without progress (default: 40)"
    )
    group.add_argument("--sampler", choices=SAMPLERS, help="how shapes are proposed (default: by a rule, named in the result)")
    group.add_argument("--tokens", type=real(1e9, 1e14), metavar="T", help="training tokens to predict for (default: 1e11)")
    group.add_argument("--baseline", metavar="NAME", help="public shape to compare with (default: the nearest in parameters)")
    group.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of every random choice (default: 0)")
    group.add_argument(
        "--out", type=argument(parse_path), default=Path("run"), metavar="DIR", help="run folder (default: ./run)"
    )
    group.add_argument(
        "--store", type=argument(parse_path), metavar="FILE", help="timings to reuse and add to (default: DIR/timings.jsonl)"
    )
    group.add_argument(
        "--profile", metavar="P", help="predict times from a profile (a name, a device or a file) instead of measuring here"
    )
    group.add_argument(
        "--runtime", choices=RUNTIME_NAMES, help="of that profile's runtimes, the one to predict (default: its first)"
    )
    group.add_argument("--no-vocab-term", action="store_true", help="predict without charging oversized vocabularies")
    group = parser.add_argument_group("afterwards")
    group.add_argument("--pick", choices=PICKS, help="which one to export (default: the recommended one, fastest_tied)")
    group.add_argument("--no-export", action="store_true", help="stop at the front")


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Search, then export and verify the pick.

    Raises:
        InfeasibleError: no shape meets the budget or the limits.
        DeepthinError: the run folder belongs to another search, or exporting failed.
    """
    from deepthin.search.folder import CONFIG, LOCK

    require_out(options.out, CONFIG, "run folder", ignored=(LOCK, f"{CONFIG}.tmp"))
    if options.profile is None and options.runtime is not None:
        raise UsageError("--runtime says which of a profile's runtimes to predict; give --profile too")
    from deepthin.export.feasibility import TARGETS as EXPORT_TARGETS
    from deepthin.export.feasibility import refusals

    config, document, residuals, fresh = _predicted(options, progress) if options.profile else _timed(options, progress)
    body: dict[str, Any] = {**document, "run": str(options.out), "measured_now": fresh, "residuals": residuals}
    text = [front_text(document), *map(_residual_text, residuals)]
    done = f"times predicted from {config.profile}" if config.profile else f"{fresh} shapes timed now"
    text += [f"{done}, front in {options.out / 'front.json'}"]
    exit_code = 0
    body |= {"export": None, "verification": None}
    pick = options.pick or document["recommended"]
    if pick not in document["picks"]:
        raise InfeasibleError(
            f"--pick {pick}: every shape found is slower per text than the public shape it is compared with; "
            f"choose another pick, or a smaller --params"
        )
    chosen = document["picks"][pick]
    refused = refusals(EXPORT_TARGETS, Shape.parse(chosen["shape"]))
    if len(refused) == len(EXPORT_TARGETS):
        reasons = "; ".join(f"{target}: {why}" for target, why in refused.items())
        text += ["", f"{pick} is not exported, since no kind of file can hold it ({reasons})"]
    elif not options.no_export:
        folder = options.out / EXPORT_FOLDER
        body["export"] = manifest = _export(chosen, folder, options.seed, progress)
        from deepthin.export.verify import verify_bundle

        body["verification"] = verdict = verify_bundle(folder, progress=progress)
        exit_code = 0 if verdict["verdict"] == "pass" else 4
        text += ["", f"exported {pick}:", manifest_text(manifest, folder), "", verdict_text(verdict)]
    return Outcome("search", body, "\n".join(text), exit_code)


_Found = tuple["SearchConfig", dict[str, Any], list[dict[str, Any]], int]


def _timed(options: argparse.Namespace, progress: Progress) -> _Found:
    """Settings, front, residuals and shapes timed now of a search that measures on this machine."""
    config = _config(options)
    config.space.require_feasible()  # before anything slow
    progress("loading kernels (compiled once per machine)")
    from deepthin.engine.cores import default_threads
    from deepthin.profiles.block_costs import BlockCosts
    from deepthin.search.run import run_search

    store = options.store or options.out / "timings.jsonl"
    budget_s, patience = shape_seconds(config.trials)
    costs = BlockCosts(store, options.threads or default_threads(), config.context, budget_s, patience=patience)
    again: dict[int, BlockCosts] = {}  # each repeat has a store of its own, so that nothing is found but everything is kept

    def remeasure(shape: Shape, quant: str, number: int) -> TokenCost:
        path = store.with_name(f"{store.stem}-repeat{number}.jsonl")
        if number not in again:
            again[number] = BlockCosts(path, costs.threads, config.context, budget_s, patience=patience)
        return again[number].measure(shape, quant)

    document = run_search(config, measure=costs.measure, out=options.out, progress=progress, remeasure=remeasure)
    fresh = costs.num_measured
    picks = dict.fromkeys((pick["shape"], pick["quant"]) for pick in document["picks"].values())
    progress("timing whole models against the sums of their parts")
    return config, document, costs.check_residual([(Shape.parse(shape), quant) for shape, quant in picks]), fresh


def shape_seconds(trials: int) -> tuple[float, float]:
    """Seconds that timing one shape may take, undisturbed, and how many times that while other programs disturb it.

    Both are less where there are many shapes: leaders are timed again, and a search should end whatever else runs.
    """
    budget_s = max(LEAST_SHAPE_S, min(SHAPE_S, ALL_SHAPES_S / trials))
    return budget_s, max(1.0, min(MOST_PATIENCE, ALL_SHAPES_S / (trials * budget_s)))


def _predicted(options: argparse.Namespace, progress: Progress) -> _Found:
    """The same of a search that predicts from a profile; nothing is timed."""
    from deepthin.cli.predictions import open_profile
    from deepthin.profiles.predicted_costs import PredictedCosts
    from deepthin.search.config import DEFAULT_CONTEXT
    from deepthin.search.cost import Cost, Timing
    from deepthin.search.run import run_search

    if options.store is not None:
        raise UsageError("--store keeps timings, but with --profile nothing is timed; leave one of them out")
    cached = DEFAULT_CONTEXT if options.context is None else options.context
    costs = PredictedCosts(open_profile(options.profile), cached, runtime=options.runtime, threads=options.threads)
    config = _config(options, costs.identity)
    config.space.require_feasible()
    prompt = max(1, cached)

    def cost(shape: Shape, quant: str) -> Cost:
        first = costs.first_token(shape, quant, prompt)
        return replace(
            Cost.of(costs.measure(shape, quant)),
            first_token=None if first is None else Timing.of(first),
            prompt=0 if first is None else prompt,
        )

    return config, run_search(config, measure=cost, out=options.out, progress=progress), [], 0


def _config(options: argparse.Namespace, profile: str = "") -> SearchConfig:
    from deepthin.profiles.machine import fingerprint, machine_name, machine_record
    from deepthin.search.config import SearchConfig

    record = machine_record()
    given: dict[str, Any] = {
        "vocabs": options.vocab and tuple(options.vocab),
        "quants": options.quant and tuple(options.quant),
        "targets": options.targets and tuple(name for name in options.targets if name != "none"),
        "price_targets": options.price_targets and tuple(options.price_targets),
        "sharings": options.share and tuple(options.share),
        "qk_norms": options.qk_norm and QK_NORM_CHOICES[options.qk_norm],
        "trials": options.trials,
        "plateau": options.plateau,
        "sampler": options.sampler,
        "tokens": options.tokens,
        "baseline": options.baseline,
        "context": options.context,
        "max_kv_bytes": options.max_kv_mb and round(options.max_kv_mb * 1e6),
    }
    return SearchConfig(
        params=options.params,
        bytes=options.bytes,
        ram=options.ram,
        seed=options.seed,
        threads=options.threads,
        max_ms_per_token=options.max_ms_per_token,
        max_ttft_ms=options.max_ttft_ms,
        vocab_term=not options.no_vocab_term,
        machine="" if profile else f"{machine_name(record)} {fingerprint(record)}",
        profile=profile,
        **{name: value for name, value in given.items() if value is not None},
    )


def _export(chosen: Mapping[str, Any], folder: Path, seed: int, progress: Progress) -> dict[str, Any]:
    """Random weights in the chosen shape, in full precision and in the format that was chosen with it."""
    from deepthin.engine.model import random_model
    from deepthin.export.bundle import export_bundle

    progress("making random weights")
    model = random_model(Shape.parse(chosen["shape"]), seed=seed)
    quants = list(dict.fromkeys(("f32", chosen["quant"])))
    return export_bundle(
        model,
        folder,
        quants=quants,
        seed=seed,
        skip_infeasible=True,
        overwrite=True,
        progress=lambda path: progress(f"writing {path}"),
    )


def _residual_text(row: Mapping[str, Any]) -> str:
    """How well the sum of timed parts, which the search uses, agrees with running the whole model."""
    gap = row["residual"]
    noisy = " (noisy)" if row["flags"] else ""
    large = "; treat times closer than that as equal" if abs(gap["median"]) > LARGE_RESIDUAL else ""
    return (
        f"Parts against the whole of {row['shape']} {row['quant']}: sum of parts {gap['median']:+.1%} "
        f"({gap['ci_low']:+.1%} to {gap['ci_high']:+.1%}) off{noisy}{large}."
    )


def front_text(document: Mapping[str, Any]) -> str:
    """The front, its picks beside public shapes, and the notes that qualify them."""
    from deepthin.search.front import HEADERS, comparison_rows, front_rows

    budget, on = document["budget"], document["measured_on"]
    limits = [f"{count_text(budget['params'])} parameters"] if budget["params"] else []
    limits += [bytes_text(budget["bytes"])] if budget["bytes"] else []
    limits += [f"{bytes_text(budget['ram'])} of memory"] if budget["ram"] else []
    verb = "measured" if document["time_basis"] == "measured" else "predicted"
    tried = f"{document['trials']} shapes tried, {document['measurements']} {verb}"
    profile = document["config"].get("profile")
    where = f"times predicted for {profile}" if profile else f"timed on {on['machine']}, {on['threads']} threads"
    lines = [
        f"budget {' and '.join(limits)}, embedding included; {tried}",
        f"{where}, {on['context']} cached tokens",
        "",
        table(HEADERS, front_rows(document)),
    ]
    known = comparison_rows(document)
    if known:
        lines += ["", "public shapes of the nearest size, in the same format on the same machine", table(HEADERS, known)]
    lines += [""]
    for name, pick in document["picks"].items():
        mark = " (recommended)" if name == document["recommended"] else ""
        ties = f"; tied with {len(pick['tied_with'])} more in loss and time" if pick["tied_with"] else ""
        lines.append(f"{name}{mark}: {pick['reason']}{ties}")
        lines.append(f"  {pick['shape']} {pick['quant']}{_against(pick['compared_with'])}")
    lines += ["", *document["notes"]]
    return "\n".join(lines)


def _against(other: Mapping[str, Any] | None) -> str:
    if not other:
        return ""
    if "why_not" in other:
        return f"\n  not compared with {other['name']}: {other['why_not']}"
    time, size = other["time_ratio"], other["params_ratio"]
    gap = other["loss_difference"]
    return (
        f"\n  against {other['name']}: {size:.2f} x its parameters, {time:.2f} x its time per text, "
        f"predicted loss {gap['low']:+.3f} to {gap['high']:+.3f} nats apart"
    )
