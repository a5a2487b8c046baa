"""Several devices in one search: the time that speaks for all of them, and what one shape for all costs each.

Milliseconds of a phone and of a laptop do not add up, so each time is first divided by what a public shape takes on the same
device. One shape for all then minimises either the largest of these ratios (``worst``, the rule unless another is asked for:
no device pays for another one's gain) or their geometric mean (``mean``: a device twice as slow here may be outweighed by one
twice as fast there). Both are expressed in seconds, times the geometric mean of the devices' reference times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepthin.engine.errors import InfeasibleError, UnsupportedError, UsageError
from deepthin.engine.shape import Shape
from deepthin.search.cost import MEASURED, PREDICTED, Cost, CostOf, DeviceTime, Timing
from deepthin.search.objectives import Limits, Scored, unmet
from deepthin.search.picks import RECOMMENDED, choose, missing, named, reason
from deepthin.search.quality.model import TIE_BAND, QualityModel
from deepthin.search.space import Candidate

SCHEMA = "deepthin/devices/1"
WORST, MEAN, EACH = "worst", "mean", "each"
ACROSS = {
    WORST: "one shape for all, for the device that it suits worst: the largest time relative to the reference decides",
    MEAN: "one shape for all, on average: the geometric mean of times relative to the reference decides",
    EACH: "a shape for each device; the one for all is found too, to say what it would cost",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a search.

    Attributes:
        name: of its profile; no two of a search share it.
        cost: what a shape takes there.
        reference_s: seconds per token of the reference shape there.
        about: what else is known, for the document.
    """

    name: str
    cost: Callable[[Shape, str], Cost]
    reference_s: float
    about: Mapping[str, Any]


def joint_cost(devices: Sequence[Device], across: str) -> CostOf:
    """A costing callable for all ``devices`` together, by ``worst`` or ``mean`` (for ``each``: worst).

    Raises:
        UsageError: fewer than two devices, two of one name, or an unknown rule.
    """
    names = [device.name for device in devices]
    twice = [name for name in names if names.count(name) > 1]
    if twice or len(names) < 2:
        raise UsageError(f"devices: {twice[0]} is named twice" if twice else "devices: at least two are needed")
    if across not in ACROSS:
        raise UsageError(f"rule {across!r} for several devices is unknown; use one of {', '.join(ACROSS)}")
    combine = _mean if across == MEAN else max
    scale = _mean([device.reference_s for device in devices])

    def cost(shape: Shape, quant: str) -> Cost:
        found = [device.cost(shape, quant) for device in devices]
        pairs = list(zip(found, devices, strict=True))

        def joint(part: Callable[[Timing], float]) -> float:
            return scale * combine([part(one.decode) / device.reference_s for one, device in pairs])

        bases = {one.decode.basis for one in found}
        basis = bases.pop() if len(bases) == 1 else PREDICTED
        prompts = [one.first_token for one in found if one.first_token is not None]
        return Cost(
            decode=Timing(
                joint(lambda time: time.value),
                joint(lambda time: time.low),
                joint(lambda time: time.high),
                basis=PREDICTED if basis == MEASURED else basis,  # it is composed, whatever its parts are
            ),
            threads=max(one.threads for one in found),
            context=found[0].context,
            bytes_per_token=found[0].bytes_per_token,
            first_token=max(prompts, key=lambda time: time.value) if len(prompts) == len(found) else None,
            prompt=found[0].prompt,
            flags=tuple(sorted({flag for one in found for flag in one.flags})),
            devices=tuple(DeviceTime(device.name, one.decode, one.first_token, one.flags) for one, device in pairs),
        )

    return cost


def compromise(
    devices: Sequence[Device],
    across: str,
    joint: Mapping[str, Any],
    candidates: Sequence[Candidate],
    quality: QualityModel,
    limits: Limits,
    reference: tuple[str, Candidate],
) -> dict[str, Any]:
    """What one shape for all costs each device against the shape that suits it best.

    Args:
        devices: the devices.
        across: the rule of the joint search.
        joint: its ``front.json``.
        candidates: every shape that any of the searches tried; each device chooses among all that meet the limits there.
        quality: predicts losses.
        limits: of each device by itself.
        reference: the public shape that ``reference_s`` belongs to, with its name.

    Raises:
        InfeasibleError: on some device no candidate meets the limits.
    """
    shared = {name: Candidate(Shape.parse(pick["shape"]), pick["quant"]) for name, pick in joint["picks"].items()}
    every = {one.key: one for one in (*candidates, *shared.values())}
    own: dict[str, Any] = {}
    absent: dict[str, Any] = {}
    costs: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for device in devices:
        scored = {}
        for step, (key, one) in enumerate(sorted(every.items())):
            with contextlib.suppress(UnsupportedError):  # another device's runtime may know more formats
                scored[key] = Scored(step, one, quality.predict(one.shape, one.quant), device.cost(one.shape, one.quant))
        usable = [one for one in scored.values() if limits.met(one)]
        if not usable:
            raise InfeasibleError(f"{device.name}: {unmet(limits, list(scored.values()))}")
        known = Scored(
            -1,
            reference[1],
            quality.predict(reference[1].shape, reference[1].quant),
            device.cost(reference[1].shape, reference[1].quant),
        )
        picks = choose(usable, baseline=known)
        absent[device.name] = missing(usable, picks, (reference[0], known))
        own[device.name] = {
            name: {
                **named(one),
                "loss": one.loss,
                "ms_per_token": one.ms_per_token.to_json(),
                "ms_per_kchar": one.ms_per_kchar.to_json(),
                "relative_time": one.cost.decode.value / device.reference_s,
                "reason": reason(name, one, usable, (reference[0], known)),
            }
            for name, one in picks.items()
        }
        rows[device.name] = {name: _on(device, scored[one.key]) for name, one in shared.items()}
        costs[device.name] = _lost(device, scored[shared[RECOMMENDED].key], picks[RECOMMENDED])
    return {
        "schema": SCHEMA,
        "across": across,
        "rule": ACROSS[across],
        "reference": f"{reference[0]} in {reference[1].quant}",
        "devices": [
            {"name": device.name, **device.about, "reference_ms_per_token": 1e3 * device.reference_s} for device in devices
        ],
        "shapes": len(every),
        "recommended": RECOMMENDED,
        "one_for_all": {
            name: {"shape": one.shape.text, "quant": one.quant, "on": {device: found[name] for device, found in rows.items()}}
            for name, one in shared.items()
        },
        "own": own,
        "own_missing": absent,
        "cost_of_one_for_all": costs,
    }


def _on(device: Device, one: Scored) -> dict[str, Any]:
    return {
        "ms_per_token": one.ms_per_token.to_json(),
        "ms_per_kchar": one.ms_per_kchar.to_json(),
        "relative_time": one.cost.decode.value / device.reference_s,
    }


def _lost(device: Device, shared: Scored, own: Scored) -> dict[str, Any]:
    """The recommended shape for all against the device's own: nats and time lost; below 0 it gains."""
    nats, time = shared.loss - own.loss, shared.time / own.time - 1
    if shared.candidate == own.candidate:
        text = "the shape for all is this device's own best"
    else:
        loss = "the same" if abs(nats) < 5e-4 else f"{abs(nats):.3f} nats {'worse' if nats > 0 else 'better'}"
        tied = ", a tie" if abs(nats) <= TIE_BAND else ""
        pace = f"{abs(time):.1%} {'slower' if time > 0 else 'faster'} per text"
        text = f"the shape for all is predicted {loss}{tied}, and {pace}, than this device's own"
    return {
        "nats": nats,
        "tied": abs(nats) <= TIE_BAND,
        "time": time,
        "shared_ms_per_kchar": shared.time,
        "own_ms_per_kchar": own.time,
        "text": text,
    }


def _mean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))
