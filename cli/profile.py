"""``deepthin profile``: measure this machine, look at profiles, and get one of a device that is not here."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deepthin.cli.arguments import MAX_CONTEXT, argument, context, one_of, parse_path, parse_threads, real
from deepthin.cli.bench import write_onnx_for_timing
from deepthin.cli.outcome import Outcome
from deepthin.cli.predictions import SHOWN_QUANTS, SHOWN_SHAPES, open_profile, predictions, predictions_text
from deepthin.cli.profile_text import entries_text, profile_text
from deepthin.cli.progress import Progress
from deepthin.cli.ranges import parse_ranges
from deepthin.cli.sizes import bytes_text
from deepthin.cli.source import open_source
from deepthin.cli.table import table
from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.formats import BODY_QUANTS
from deepthin.engine.shape import Shape

if TYPE_CHECKING:
    from deepthin.engine.model import Model

ACTIONS = ("measure", "list", "show", "kit", "import")
RUNTIME_NAMES = ("deepthin", "llama.cpp", "onnxruntime")
_USES = {  # option -> actions that heed it
    "runtimes": ("measure",),
    "threads": ("measure",),
    "budget_s": ("measure",),
    "out": ("measure", "kit", "import"),
    "name": ("import",),
    "title": ("import",),
    "model": ("import",),
    "shape": ("show",),
    "quant": ("show",),
    "context": ("show",),
}
EXAMPLES = """actions:
  measure           time this machine: bandwidth, and probe models on every runtime that is installed; under 3 minutes
  list              profiles that can be named: those saved here, and the devices that ship as published facts
  show NAME         what a profile holds, and tokens per second it predicts; NAME is host, a saved name, a device or a file
  kit               write small probe models and a script that times them on another device with llama-bench
  import FILE..     make a profile from results of the kit, or of any llama-bench -o json or jsonl

examples:
  deepthin profile measure
  deepthin profile show host
  deepthin profile show pixel-9 --shape smollm2-360m,L=15,d=768,heads=12,kv=4,ff=2048,vocab=49152,tied --quant q4_0,q8_0
  deepthin profile kit --out kit
  deepthin profile import kit/results.json --name my-phone
  deepthin profile import bench.jsonl --name my-box --model "*135M*=smollm2-135m"
  deepthin search --profile my-phone --params 150M
  deepthin inspect smollm2-135m --profile my-phone

Measure while nothing else runs: a profile taken on a busy machine is flagged. Intervals are for 90 %; a shape outside what was
probed is marked as extrapolated. A profile of another machine is never taken for this host's.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=f"one of {', '.join(ACTIONS)}")
    parser.add_argument("operands", nargs="*", metavar="NAME", help="of a profile to show, or files to import")
    parser.add_argument("--out", type=argument(parse_path), metavar="PATH", help="file of the profile, or folder of the kit")
    group = parser.add_argument_group("measure")
    group.add_argument(
        "--runtimes", type=one_of(*RUNTIME_NAMES), metavar="R,R", help=f"of {','.join(RUNTIME_NAMES)} (default: all installed)"
    )
    group.add_argument(
        "-t", "--threads", type=argument(_thread_counts), metavar="N,N,..", help="default: 1 and every usable CPU"
    )
    group.add_argument("--budget-s", type=real(10, 36_000), metavar="S", help="seconds for all of it (default: 176)")
    group = parser.add_argument_group("show")
    group.add_argument(
        "--shape", metavar="SOURCE,..", help="shapes to predict, SOURCEs as elsewhere (default: some public ones)"
    )
    group.add_argument("--quant", type=one_of(*BODY_QUANTS), metavar="Q,Q,..", help="formats to predict (default: q4_0,q8_0)")
    group.add_argument("--context", type=context(0, MAX_CONTEXT - 1), metavar="N", help="cached tokens (default: 256)")
    group = parser.add_argument_group("import")
    group.add_argument("--name", metavar="NAME", help="of the profile: letters, digits, dots and dashes")
    group.add_argument("--title", metavar="TEXT", help="of the device, for people")
    group.add_argument(
        "--model", action="append", metavar="PATTERN=SHAPE", help="shape of the models whose file name matches; may be repeated"
    )


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Do what the action says.

    Raises:
        UsageError: an option or name that the action does not take.
        DeepthinError: a file is damaged, or nothing could be measured.
    """
    for name, users in _USES.items():
        if getattr(options, name) is not None and options.action not in users:
            raise UsageError(f"--{name.replace('_', '-')} is no option of profile {options.action}, but of {', '.join(users)}")
    given = len(options.operands)
    if options.action == "import":
        fits, needs = given >= 1, "at least one FILE"
    elif options.action == "show":
        fits, needs = given == 1, "one NAME, see deepthin profile list"
    else:
        fits, needs = given == 0, "no NAME"
    if not fits:
        raise UsageError(f"profile {options.action} takes {needs}, but {given} were given")
    actions: dict[str, Callable[[argparse.Namespace, Progress], Outcome]] = {
        "measure": _measure,
        "list": _list,
        "show": _show,
        "kit": _kit,
        "import": _import,
    }
    return actions[options.action](options, progress)


def _measure(options: argparse.Namespace, progress: Progress) -> Outcome:
    from deepthin.profiles.library import host_path
    from deepthin.profiles.machine import machine_record

    machine = machine_record()
    out = options.out or host_path(machine)
    if out.is_dir():
        raise FormatError(f"--out {out}: is a folder; name a file such as {out}/host.json")
    progress("loading kernels (compiled once per machine)")
    begin = time.perf_counter()
    from deepthin.profiles.host import host_bench
    from deepthin.profiles.measuring import DEFAULT_BUDGET_S, measure_profile

    writers: dict[str, Callable[[Model, Path], object]] = {"onnxruntime": write_onnx_for_timing}
    from deepthin.export.gguf_writer import write_gguf

    writers["llama.cpp"] = write_gguf
    runtimes = tuple(options.runtimes or RUNTIME_NAMES)
    with host_bench(machine, runtimes, writers, options.threads) as bench:
        loaded_s = time.perf_counter() - begin
        profile = measure_profile(bench, budget_s=options.budget_s or DEFAULT_BUDGET_S, progress=progress)
    profile.save(out)
    body = {"path": str(out), "kernel_load_s": loaded_s, "profile": profile.to_json()}
    text = f"{profile_text(profile)}\n\nwritten to {out}, in {profile.wall_s:.0f} s"
    return Outcome("profile-measured", body, text)


def _list(_options: argparse.Namespace, _progress: Progress) -> Outcome:
    from deepthin.profiles.library import entries, profile_folder
    from deepthin.profiles.machine import machine_record

    found = entries(machine_record())
    body = {"folder": str(profile_folder()), "profiles": [entry.to_json() for entry in found]}
    return Outcome("profile-list", body, entries_text(found, profile_folder()))


def _show(options: argparse.Namespace, _progress: Progress) -> Outcome:
    profile = open_profile(options.operands[0])
    names = SHOWN_SHAPES if options.shape is None else _split_sources(options.shape)
    shapes = {name: open_source(name).shape for name in names}
    rows = predictions(
        profile, shapes, options.quant or list(SHOWN_QUANTS), context=256 if options.context is None else options.context
    )
    body = {"profile": profile.to_json(), "predictions": rows}
    return Outcome("profile-shown", body, f"{profile_text(profile)}\n\n{predictions_text(rows)}")


def _kit(options: argparse.Namespace, progress: Progress) -> Outcome:
    from deepthin.export.gguf_writer import write_gguf
    from deepthin.profiles.kit import write_kit

    folder = options.out or Path("kit")
    rows = write_kit(folder, {"llama.cpp": write_gguf, "onnxruntime": write_onnx_for_timing}, progress=progress)
    total = sum(row["bytes"] for row in rows)
    text = [table(("file", "size"), [(row["file"], bytes_text(row["bytes"])) for row in rows]), ""]
    text += [
        f"{len(rows)} models, {bytes_text(total)}, and run.sh in {folder}",
        f"on the device: sh run.sh (from here over adb: sh {folder}/run.sh --adb path/to/llama-bench)",
        f"then: deepthin profile import {folder}/results.json --name my-device",
    ]
    return Outcome("profile-kit", {"folder": str(folder), "models": rows}, "\n".join(text))


def _import(options: argparse.Namespace, _progress: Progress) -> Outcome:
    from deepthin.profiles.importing import import_profile
    from deepthin.profiles.library import profile_folder
    from deepthin.profiles.llama_bench_rows import MAX_FILE_BYTES, parse_rows

    if options.name is None:
        raise UsageError("profile import needs --name, under which the profile is found again, for example my-phone")
    rows = []
    for item in options.operands:
        path = Path(item)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise FormatError(
                    f"{path}: over {MAX_FILE_BYTES} bytes, which no llama-bench run prints; is this the right file?"
                )
            rows += parse_rows(path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: is no text ({error}); keep what llama-bench -o json prints") from error
    profile = import_profile(rows, options.name, shapes=_named_shapes(options.model or []), title=options.title)
    out = options.out or profile_folder() / f"{profile.name}.json"
    profile.save(out)
    return Outcome(
        "profile-imported", {"path": str(out), "profile": profile.to_json()}, f"{profile_text(profile)}\n\nwritten to {out}"
    )


def _named_shapes(items: list[str]) -> dict[str, Shape]:
    found = {}
    for item in items:
        pattern, has_shape, source = item.partition("=")
        if not has_shape or not pattern:
            raise UsageError(
                f"--model {item!r}: a file name pattern, '=' and a shape are needed, such as '*135M*=smollm2-135m'"
            )
        found[pattern] = open_source(source).shape
    return found


def _split_sources(text: str) -> list[str]:
    """SOURCEs separated by commas; a shape text, which holds commas itself, begins at each ``L=``."""
    parts: list[str] = []
    for part in text.split(","):
        continues = bool(parts) and parts[-1].startswith("L=") and ("=" in part or part in _WORDS) and not part.startswith("L=")
        if continues:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


_WORDS = ("tied", "untied", "qk_norm", "qkv_bias")


def _thread_counts(text: str) -> tuple[int, ...]:
    """Thread counts as lists and ranges, ascending."""
    return tuple(sorted({parse_threads(str(count)) for count in parse_ranges(text, low=1, high=1 << 40)}))
