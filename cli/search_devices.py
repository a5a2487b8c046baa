"""Several profiles in one ``deepthin search``: a run for all devices together, one for each, and what a compromise costs.

DIR/                   the run for all: front.json is of the joint time
DIR/devices/NAME/      the run for one device, as a search with that profile alone would make it
DIR/devices.json       the shape for all beside each device's own
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepthin.cli.document import to_text
from deepthin.cli.progress import Progress
from deepthin.engine.errors import InfeasibleError, UsageError
from deepthin.engine.known_shapes import KnownShape, known_shape, nearest_known
from deepthin.engine.shape import Shape

if TYPE_CHECKING:
    from deepthin.profiles.predicted_costs import PredictedCosts
    from deepthin.search.config import SearchConfig
    from deepthin.search.cost import Cost

ACROSS = ("worst", "mean", "each")  # as in search/devices.py, which loads more
FOLDER, FILE = "devices", "devices.json"
_BITS_PER_PARAMETER = 4.5  # to guess a size where only bytes are limited


class CollectProfiles(argparse.Action):
    """Appends each value; the first on the command line replaces what a configuration file gave."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Add ``values``."""
        found = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(found if isinstance(found, list) else []), values])


def profile_names(given: list[str] | str | None) -> list[str]:
    """The profiles asked for: a list from the command line, or names separated by commas from a configuration file."""
    if given is None:
        return []
    return given if isinstance(given, list) else [name.strip() for name in given.split(",")]


def predicted_cost(costs: PredictedCosts, prompt: int) -> Callable[[Shape, str], Cost]:
    """Costs of a profile as the search wants them, with the time of a prompt where the profile knows it."""
    from deepthin.search.cost import Cost, Timing

    def cost(shape: Shape, quant: str) -> Cost:
        first = costs.first_token(shape, quant, prompt)
        return replace(
            Cost.of(costs.measure(shape, quant)),
            first_token=None if first is None else Timing.of(first),
            prompt=0 if first is None else prompt,
        )

    return cost


def search_devices(
    options: argparse.Namespace, names: Sequence[str], progress: Progress, make_config: Callable[[argparse.Namespace, str], Any]
) -> tuple[SearchConfig, dict[str, Any], dict[str, Any]]:
    """Settings and front of the joint search, and the document of ``devices.json``.

    Args:
        options: of the command.
        names: at least two profiles.
        progress: told what is going on.
        make_config: settings out of ``options`` and the identity of the prediction.

    Raises:
        UsageError: a profile is unknown, lacks the runtime or threads asked for, or names a device twice.
        InfeasibleError: no shape meets the budget, or the limits on some device, which the message names.
    """
    from deepthin.cli.predictions import open_profile
    from deepthin.profiles.predicted_costs import PredictedCosts
    from deepthin.search.config import DEFAULT_CONTEXT
    from deepthin.search.devices import EACH, WORST, Device, compromise, joint_cost
    from deepthin.search.run import run_search
    from deepthin.search.space import Candidate

    if options.store is not None:
        raise UsageError("--store keeps timings, but with --profile nothing is timed; leave one of them out")
    across = options.across or WORST
    rule = WORST if across == EACH else across
    cached = DEFAULT_CONTEXT if options.context is None else options.context
    predictors = [
        PredictedCosts(open_profile(name), cached, runtime=options.runtime, threads=options.threads) for name in names
    ]
    known = _reference(options)
    settings = make_config(options, f"{' + '.join(one.identity for one in predictors)}; {rule}, relative to {known.name}")
    settings.space.require_feasible()
    reference = Candidate(known.shape, settings.space.quants[0])
    devices = []
    for one in predictors:
        cost = predicted_cost(one, max(1, cached))
        seconds = cost(reference.shape, reference.quant).decode.value
        about = {"basis": one.profile.basis, "runtime": one.runtime, "threads": one.threads, "identity": one.identity}
        devices.append(Device(one.profile.name, cost, seconds, about))
    joint = run_search(settings, measure=joint_cost(devices, rule), out=options.out, progress=progress)
    tried = _tried(joint)
    for device, one in zip(devices, predictors, strict=True):
        progress(f"searching for {device.name} alone")
        try:
            alone = run_search(
                make_config(options, one.identity),
                measure=device.cost,
                out=device_folder(options.out, device.name),
                progress=progress,
            )
        except InfeasibleError as error:
            raise InfeasibleError(f"{device.name}: {error}") from error
        tried += _tried(alone)
    candidates = [Candidate(Shape.parse(shape), quant) for shape, quant in dict.fromkeys(tried)]
    found = compromise(devices, across, joint, candidates, settings.quality, settings.limits, (known.name, reference))
    write_whole(options.out / FILE, to_text(found) + "\n")
    return settings, joint, found


def device_folder(out: Path, name: str) -> Path:
    """Where the run for one device lies."""
    return out / FOLDER / (re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip(".-") or "device")


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` under a temporary name, then rename it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _reference(options: argparse.Namespace) -> KnownShape:
    """The public shape whose time is 1 on every device: of ``--baseline``, or the nearest to the budget in size."""
    if options.baseline:
        return known_shape(options.baseline)
    from deepthin.search.config import DEFAULT_PARAMS

    stored = options.bytes or options.ram
    guess = round(stored * 8 / _BITS_PER_PARAMETER) if stored else DEFAULT_PARAMS
    return nearest_known(options.params or guess)


def _tried(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["shape"], one["quant"]) for one in document["evaluated"]]
