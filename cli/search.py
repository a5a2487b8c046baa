"""``deepthin search``: the main job. Search within a budget, print the front, export the pick, verify it."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy loads: its threads stay busy for a while after each product,
# which would be the first moments of a measurement; what a search computes is small

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepthin.cli.arguments import (
    MAX_CONTEXT,
    argument,
    context,
    one_of,
    parse_path,
    parse_threads,
    real,
    require_out,
    whole,
)
from deepthin.cli.export import manifest_text
from deepthin.cli.fleet import add_storage, device_tag, open_queue, study_name
from deepthin.cli.front_text import devices_text, front_text, summary
from deepthin.cli.outcome import Outcome
from deepthin.cli.progress import Progress
from deepthin.cli.search_axes import add_axes, axes
from deepthin.cli.search_devices import (
    ACROSS,
    CollectProfiles,
    device_folder,
    predicted_cost,
    profile_names,
    search_devices,
    write_whole,
)
from deepthin.cli.sizes import parse_bytes, parse_count, parse_counts
from deepthin.cli.verify import verdict_text
from deepthin.engine.errors import InfeasibleError, UsageError
from deepthin.engine.formats import BODY_QUANTS
from deepthin.engine.shape import Shape

if TYPE_CHECKING:
    from deepthin.profiles.schema import TokenCost
    from deepthin.search.config import SearchConfig

RUNTIME_NAMES = ("deepthin", "llama.cpp", "onnxruntime")
TARGETS = ("hf", "onnx", "gguf", "gguf-k-quants", "transformersjs")  # as in search/targets.py, which loads more
PRICED = ("gguf", "gguf-k-quants", "onnx")
SAMPLERS = ("exhaustive", "guided", "tpe", "nsga2", "random")
PICKS = ("best_quality", "fastest_tied", "knee", "smallest_kv", "no_slower_than_baseline")
SHAPE_S, ALL_SHAPES_S, LEAST_SHAPE_S = 1.0, 160.0, 0.25  # seconds for timing one shape; 300 and their repeats in five minutes
MOST_PATIENCE = 3.0  # times as long for one shape, and at most so for all, while other programs use the machine
LARGE_RESIDUAL = 0.1  # sums of parts this far from the whole model can reorder a front
EXPORT_FOLDER, SUMMARY = "export", "summary.md"
EXAMPLES = """examples:
  deepthin search                                   30M parameters, on this machine, into ./run
  deepthin search --params 150M --vocab 49152 --out run150
  deepthin search --bytes 90MB --quant q4_0,q8_0 --max-kv-mb 20 --context 2048
  deepthin search --params 150M --profile pixel-9   for a device that is not here; times are predicted
  deepthin search --params 150M --profile pixel-9 --profile laptop.json --across worst
  deepthin search --bytes 60MB --head-quant q4_0,q8_0 --query-ratio 0.5,1 --layers 8-40
  deepthin search --config run.toml --json
  deepthin search --storage postgresql://me@db/deepthin --device pi5    timed by deepthin search worker on other machines

The budget counts the embedding and is never exceeded. Every shape that is proposed is timed here, about a second each (less
where there are more than 160), up to three times that while other programs use the machine (less where there are more than
50); their work spoils the times, and is flagged. DIR holds everything: config.json, journal, measurements, front.json,
summary.md and export/. The same command again resumes or repeats a run without measuring anything twice; a new DIR measures
anew, unless --store names the timings of an earlier run.
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
        help=f"count against --bytes as they would be stored, of {','.join(PRICED)}: fallbacks, written-out blocks, scales",
    )
    add_axes(group)
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
    group.add_argument(
        "--warm-start",
        type=argument(parse_path),
        metavar="DIR",
        help="try the best shapes of an earlier run first, of this device or another",
    )
    group.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of every random choice (default: 0)")
    group.add_argument(
        "--out", type=argument(parse_path), default=Path("run"), metavar="DIR", help="run folder (default: ./run)"
    )
    group.add_argument(
        "--store", type=argument(parse_path), metavar="FILE", help="timings to reuse and add to (default: DIR/timings.jsonl)"
    )
    group.add_argument(
        "--profile",
        action=CollectProfiles,
        metavar="P",
        help="predict times from a profile (a name, a device or a file) instead of measuring here; several: see --across",
    )
    group.add_argument(
        "--across",
        choices=ACROSS,
        help="of several profiles: one shape for the device it suits worst (default), on average, or a shape for each",
    )
    group.add_argument(
        "--runtime", choices=RUNTIME_NAMES, help="of that profile's runtimes, the one to predict (default: its first)"
    )
    group.add_argument("--no-vocab-term", action="store_true", help="predict without charging oversized vocabularies")
    group = parser.add_argument_group("a fleet of measuring machines (deepthin search worker --help)")
    add_storage(group)
    group.add_argument("--device", type=device_tag, metavar="TAG", help="whose times count; its workers measure")
    group.add_argument("--study", type=study_name, metavar="NAME", help="name of the study there (default: by the settings)")
    group.add_argument(
        "--patience", type=real(0, 1e9), metavar="S", help="seconds to wait for a measurement (default: for ever)"
    )
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
    profiles = profile_names(options.profile)
    options.profile = profiles[0] if profiles else None
    if options.profile is None and options.runtime is not None:
        raise UsageError("--runtime says which of a profile's runtimes to predict; give --profile too")
    if options.across is not None and len(profiles) < 2:
        raise UsageError("--across says how several devices share a search; give --profile once for each of them")
    if options.max_ttft_ms is not None and not profiles:
        from deepthin.search.objectives import NO_PROMPTS

        raise UsageError(NO_PROMPTS)
    from deepthin.export.feasibility import TARGETS as EXPORT_TARGETS
    from deepthin.export.feasibility import refusals

    how = _how(options)
    devices: dict[str, Any] | None = None
    residuals: list[dict[str, Any]] = []
    fresh = 0
    if len(profiles) > 1:
        config, document, devices = search_devices(options, profiles, progress, _config)
    else:
        config, document, residuals, fresh = how(options, progress)
    write_whole(options.out / SUMMARY, summary(document, devices))
    body: dict[str, Any] = {**document, "run": str(options.out), "measured_now": fresh, "residuals": residuals}
    body["devices"] = devices
    text = [
        front_text(document),
        *([] if devices is None else ["", devices_text(devices), ""]),
        *map(_residual_text, residuals),
    ]
    done = f"times predicted from {config.profile}" if config.profile else f"{fresh} shapes timed now"
    done = f"{fresh} shapes timed now by device {options.device}" if options.device else done
    text += [f"{done}, front in {options.out / 'front.json'}, for people in {options.out / SUMMARY}"]
    exit_code = 0
    body |= {"export": None, "verification": None}
    pick = options.pick or document["recommended"]
    for folder, chosen in _chosen(options.out, pick, document, devices).items():
        refused = refusals(EXPORT_TARGETS, Shape.parse(chosen["shape"]))
        if len(refused) == len(EXPORT_TARGETS):
            reasons = "; ".join(f"{target}: {why}" for target, why in refused.items())
            text += ["", f"{pick} is not exported, since no kind of file can hold it ({reasons})"]
        elif not options.no_export:
            manifest = _export(chosen, folder, options.seed, progress)
            from deepthin.export.manifest import record_verdict
            from deepthin.export.verify import verify_bundle

            verdict = verify_bundle(folder, progress=progress)
            record_verdict(folder, verdict)
            exit_code = exit_code if verdict["verdict"] == "pass" else 4
            text += ["", f"exported {pick}:", manifest_text(manifest, folder), "", verdict_text(verdict)]
            body |= {"export": manifest, "verification": verdict} if body["export"] is None else {}
            body["exports"] = {**body.get("exports", {}), str(folder): verdict["verdict"]}
    return Outcome("search", body, "\n".join(text), exit_code)


def _chosen(out: Path, pick: str, document: Mapping[str, Any], devices: Mapping[str, Any] | None) -> dict[Path, Any]:
    """What to export, by folder: the pick, or each device's own where each has one; the same shape only once.

    Raises:
        InfeasibleError: there is no such pick; the message says why.
    """
    asked = {out: (document["picks"], document["picks_missing"], "")}
    if devices is not None and devices["across"] == "each":
        asked = {
            device_folder(out, name): (picks, devices["own_missing"][name], f" on {name}")
            for name, picks in devices["own"].items()
        }
    found: dict[Path, Any] = {}
    for folder, (picks, absent, where) in asked.items():
        if pick not in picks:
            raise InfeasibleError(f"--pick {pick}{where}: {absent[pick]}, and --pick another choice")
        if not any((one["shape"], one["quant"]) == (picks[pick]["shape"], picks[pick]["quant"]) for one in found.values()):
            found[folder / EXPORT_FOLDER] = picks[pick]
    return found


_Found = tuple["SearchConfig", dict[str, Any], list[dict[str, Any]], int]


def _how(options: argparse.Namespace) -> Callable[[argparse.Namespace, Progress], _Found]:
    """Where times come from.

    Raises:
        UsageError: two places are named, or half of one.
    """
    if options.storage is not None or options.device is not None:
        if options.storage is None or options.device is None:
            raise UsageError("--storage URL and --device TAG go together: the database, and the machine that measures")
        for other in ("profile", "store"):
            if getattr(options, other) is not None:
                raise UsageError(f"--{other} does not go with --storage, where workers take the times and keep them")
        return _shared
    for name in ("study", "patience"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} belongs to a search with --storage URL and --device TAG")
    return _predicted if options.profile else _timed


def _timed(options: argparse.Namespace, progress: Progress) -> _Found:
    """Settings, front, residuals and shapes timed now of a search that measures on this machine."""
    from deepthin.search.least_cache import require_cache

    config = _config(options)
    config.space.require_feasible()  # before anything slow
    require_cache(config.limits, config.space)
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

    document = run_search(
        config, measure=costs.measure, out=options.out, progress=progress, remeasure=remeasure, sizes=_file_sizes
    )
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


def _shared(options: argparse.Namespace, progress: Progress) -> _Found:
    """The same of a search whose shapes are measured by the workers of a device, through a database."""
    from deepthin.search.config import DEFAULT_CONTEXT
    from deepthin.search.run import run_search

    _config(options, machine="?").space.require_feasible()  # before anything slow
    with open_queue(options.storage, progress) as queue:
        from deepthin.profiles.block_costs import engine_digest
        from deepthin.search.fleet.asker import FleetCosts, wait_for_device
        from deepthin.search.fleet.trials import SharedTrials, study_name_of

        device = wait_for_device(queue, options.device, patience_s=options.patience, say=progress)
        config = _config(options, machine=f"{device.machine} {device.fingerprint}")
        settings = {**config.to_json(), "device": device.tag, "engine": engine_digest()}
        context = DEFAULT_CONTEXT if options.context is None else options.context
        costs = FleetCosts(
            queue,
            device,
            engine=engine_digest(),
            context=context,
            threads=options.threads,
            patience_s=options.patience,
            say=progress,
        )
        with SharedTrials(queue.database, options.study or study_name_of(settings), settings) as log:
            document = run_search(
                config,
                measure=costs.measure,
                out=options.out,
                progress=progress,
                remeasure=costs.remeasure,
                log=log,
                announce=costs.announce,
            )
        return config, document, [], costs.num_asked


def _predicted(options: argparse.Namespace, progress: Progress) -> _Found:
    """The same of a search that predicts from a profile; nothing is timed."""
    from deepthin.cli.predictions import open_profile
    from deepthin.profiles.predicted_costs import PredictedCosts
    from deepthin.search.config import DEFAULT_CONTEXT
    from deepthin.search.run import run_search

    if options.store is not None:
        raise UsageError("--store keeps timings, but with --profile nothing is timed; leave one of them out")
    cached = DEFAULT_CONTEXT if options.context is None else options.context
    costs = PredictedCosts(open_profile(options.profile), cached, runtime=options.runtime, threads=options.threads)
    config = _config(options, costs.identity)
    config.space.require_feasible()
    cost = predicted_cost(costs, max(1, cached))
    return config, run_search(config, measure=cost, out=options.out, progress=progress, sizes=_file_sizes), [], 0


def _file_sizes(shape: Shape, quant: str) -> dict[str, int]:
    """Bytes of the files that exporting would write, of weights that nobody has made yet."""
    from deepthin.export.file_sizes import file_sizes

    return file_sizes(shape, quant)


def _config(options: argparse.Namespace, profile: str = "", machine: str = "") -> SearchConfig:
    from deepthin.profiles.machine import fingerprint, machine_name, machine_record
    from deepthin.search.config import SearchConfig

    record = machine_record()
    start: tuple[str, ...] = ()
    if options.warm_start is not None:
        from deepthin.search.warm_start import best_of_run

        start = best_of_run(options.warm_start)
    given: dict[str, Any] = {
        "vocabs": options.vocab and tuple(options.vocab),
        "quants": options.quant and tuple(options.quant),
        "targets": options.targets and tuple(name for name in options.targets if name != "none"),
        "price_targets": options.price_targets and tuple(options.price_targets),
        **axes(options),
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
        start=start,
        machine=machine or ("" if profile else f"{machine_name(record)} {fingerprint(record)}"),
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
