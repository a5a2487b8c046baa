"""The result of a search as a document and as table rows. Nothing in it depends on when or how often the run was started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepthin._version import VERSION
from deepthin.engine.accounting import aspect_ratio, count_bytes, count_params, kv_bytes_per_token, shape_flags
from deepthin.search.config import SearchConfig
from deepthin.search.cost import DeviceTime
from deepthin.search.file_sizes import gguf_bytes, random_weights_name, without_fallback_bytes
from deepthin.search.k_quants import k_quant_size
from deepthin.search.membership import front_probabilities
from deepthin.search.memory import memory
from deepthin.search.objectives import Scored, pareto_front, unmet
from deepthin.search.picks import RECOMMENDED, RULES, choose, indistinguishable, missing, named, reason, tied
from deepthin.search.quality.accuracy import points_lost
from deepthin.search.quality.characters import tokens_per_char
from deepthin.search.quality.model import SHAPE_TERMS, TIE_BAND, Quality, judged_terms
from deepthin.search.quality.vocabulary import VOCAB_DOUBT, VOCAB_SUPPORT
from deepthin.search.sensitivity import outcome, scenarios
from deepthin.search.targets import K_QUANTS

SCHEMA = "deepthin/front/3"
PREDICTION_FLAGS = ("predicted", "extrapolated")  # of a time that was predicted; nothing disturbed it
_MOST_TIES = 8
_CONTENDER = 0.05  # chance of leading from which a candidate beside the front is listed


def feasible(config: SearchConfig, scored: Sequence[Scored]) -> list[Scored]:
    """The measured candidates that meet the optional limits.

    Raises:
        InfeasibleError: none does; the message names the limit that binds, the shortfall and the nearest shape.
    """
    met = [one for one in scored if config.limits.met(one)]
    if scored and not met:
        raise unmet(config.limits, scored)
    return met


def front_document(
    config: SearchConfig,
    scored: Sequence[Scored],
    failures: Sequence[Mapping[str, str]],
    comparisons: Mapping[str, Mapping[str, Any]],
    stopped: str = "trials",
    baseline: tuple[str, Scored] | None = None,
) -> dict[str, Any]:
    """The document of ``front.json``.

    Args:
        config: the settings of the run.
        scored: every measured candidate; at least one meets the limits.
        failures: ``shape``, ``quant`` and ``why`` of candidates that could not be measured.
        baseline: name and cost of the public shape that one pick is chosen against.
        stopped: why the search ended: ``trials``, ``plateau`` or ``space``.
        comparisons: by pick, what :func:`comparison` made of the nearest public shape.
    """
    usable = feasible(config, scored)
    front = pareto_front(usable)
    against = None if baseline is None else baseline[1]
    picks = choose(usable, baseline=against)
    best = picks["best_quality"]
    sensitivity = {one.name: outcome(one, usable, picks, against) for one in scenarios(config, usable)}
    moved = bool(sensitivity.get("without_vocab_term", {}).get("changes"))
    doubt = VOCAB_DOUBT if moved else 0.0
    band = {one.candidate.key for one in tied(usable)}
    keys = {one.candidate.key for one in front}
    on_front = front_probabilities(usable)
    names: dict[str, list[str]] = {}
    for name, pick in picks.items():
        names.setdefault(pick.candidate.key, []).append(name)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "config": config.to_json(),
        "budget": config.budget.to_json(),
        "limits": config.limits.to_json(),
        "measured_on": {"machine": config.machine, "threads": scored[0].cost.threads, "context": scored[0].cost.context},
        "sampler": config.choice.to_json(),
        "time_basis": scored[0].cost.decode.basis,
        "trials": len(scored) + len(failures),
        "stopped": stopped,
        "measurements": len({one.candidate.key for one in scored}),
        "front": [
            {
                **entry(one, best.quality, doubt, config.seed),
                "tied_with_best": one.candidate.key in band,
                "front_probability": on_front[one.candidate.key],
                "picks": names.get(one.candidate.key, []),
            }
            for one in front
        ],
        "contenders": [
            {**named(one), "front_probability": on_front[one.candidate.key]}
            for one in usable
            if one.candidate.key not in keys and on_front[one.candidate.key] >= _CONTENDER
        ],
        "picks": {
            name: {
                **_pick(name, pick, best, doubt, comparisons.get(name)),
                "reason": reason(name, pick, usable, baseline),
                **_ties(pick, indistinguishable(pick, usable)),
            }
            for name, pick in picks.items()
        },
        "picks_missing": missing(usable, picks, baseline),
        "baseline": None if baseline is None else {"name": baseline[0], **named(baseline[1]), "ms_per_kchar": baseline[1].time},
        "sensitivity": sensitivity,
        "recommended": RECOMMENDED,
        "quality_model": {
            "law": "F4 of the equivalent shape, x m_attn, + dL terms",
            "tokens": config.tokens,
            "tie_band": TIE_BAND,
            "vocab_term": config.vocab_term,
            "judgement_terms": judged_terms(one.quality for one in front),
        },
        "evaluated": [
            {**named(one), "step": one.step, "loss": one.loss, "ms_per_kchar": one.time, "on_front": one.candidate.key in keys}
            for one in scored
        ],
        "failures": [dict(failure) for failure in failures],
        "notes": _notes(config, front, moved, failures),
    }


def entry(one: Scored, reference: Quality, doubt: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """Everything about one measured candidate; predictions are compared at ``reference``, files are of weights by ``seed``."""
    shape, quant, quality = one.candidate.shape, one.candidate.quant, one.quality
    gguf = gguf_bytes(shape, quant, random_weights_name(shape, seed))
    return {
        "shape": shape.to_json(),
        "quant": quant,
        "params": count_params(shape).total,
        "bytes": gguf,
        "file_bytes": {"gguf": gguf},
        "weight_bytes": count_bytes(shape, quant).total,
        "fallback_bytes": {"gguf": without_fallback_bytes(shape, quant), K_QUANTS: k_quant_size(shape).fallback},
        "memory": memory(shape, quant, one.cost.context).to_json(),
        "kv_bytes_per_token": kv_bytes_per_token(shape),
        "aspect_ratio": aspect_ratio(shape),
        "flags": [flag["flag"] for flag in shape_flags(shape)],
        "predicted_loss": quality.to_json(reference, doubt),
        "difference_to_best": quality.difference(reference),
        "loss_terms": [term.to_json() for term in quality.terms],
        "opinions": dict(quality.terms[0].readings),
        "extrapolated": {name: list(reasons) for name, reasons in quality.extrapolated.items()},
        "shape_extrapolated": quality.shape_extrapolated,
        "ms_per_token": one.ms_per_token.to_json(),
        "ms_per_kchar": one.ms_per_kchar.to_json(),
        "ms_to_first_token": None if one.cost.first_token is None else one.cost.first_token.scaled(1e3, "ms").to_json(),
        "devices": {device.name: _on_device(one, device) for device in one.cost.devices},
        "bytes_per_token": one.cost.bytes_per_token,
        "measurement_flags": list(one.cost.flags),
    }


def comparison(pick: Scored, known: Scored, name: str) -> dict[str, Any]:
    """``pick`` against the public shape ``name``, measured and predicted in the same format.

    ``time_ratio`` below 1 means the pick is faster per text; ``loss_difference`` below 0 means it is predicted better.
    """
    return {
        "name": name,
        **entry(known, known.quality),
        "params_ratio": count_params(pick.candidate.shape).total / count_params(known.candidate.shape).total,
        "time_ratio": pick.time / known.time,
        "loss_difference": pick.quality.difference(known.quality),
    }


HEADERS = (
    *("picks", "L", "d", "heads/kv", "ff", "vocab", "quant", "params", "MB"),
    *("loss", "vs best", "ms/token", "ms/1k chars", "notes"),
)


def front_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """One row of cells per member of the front, under :data:`HEADERS`, best predicted loss first."""
    return [_row(member, ", ".join(member["picks"])) for member in document["front"]]


def comparison_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """One row per public shape that picks are compared with, under :data:`HEADERS`."""
    rows = {}
    for pick in document["picks"].values():
        other = pick["compared_with"]
        if other and "ms_per_token" in other:
            rows[other["name"], other["quant"]] = _row(other, other["name"])
    return list(rows.values())


def _row(member: Mapping[str, Any], label: str) -> list[str]:
    shape, gap = member["shape"], member["difference_to_best"]
    notes = [
        *(["tied"] if member.get("tied_with_best") else []),
        *(["extrapolated"] if member["shape_extrapolated"] else []),
        *(["noisy"] if {*member["measurement_flags"]} - {*PREDICTION_FLAGS} else []),
        *(["predicted"] if "basis" in member["ms_per_token"] else []),
        *(["time extrapolated"] if "extrapolated" in member["measurement_flags"] else []),
    ]
    return [
        label,
        str(shape["num_layers"]),
        str(shape["hidden_size"]),
        f"{shape['num_heads']}/{shape['num_kv_heads']}",
        str(shape["intermediate_size"]),
        f"{shape['vocab_size']}{'' if shape['tie_word_embeddings'] else ' untied'}",
        member["quant"],
        f"{member['params'] / 1e6:.2f}M",
        f"{member['bytes'] / 1e6:.1f}",
        f"{member['predicted_loss']['value']:.3f}",
        "" if "picks" not in member else f"{gap['low']:+.3f}..{gap['high']:+.3f}",
        f"{_value(member['ms_per_token']):.3f}",
        f"{_value(member['ms_per_kchar']):.1f}",
        ", ".join(notes),
    ]


def _value(timing: Mapping[str, Any]) -> float:
    """What a measured or predicted object says."""
    return float(timing["median"] if "median" in timing else timing["value"])


def _pick(name: str, one: Scored, best: Scored, doubt: float, compared_with: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "rule": RULES[name],
        **named(one),
        "predicted_loss": one.quality.to_json(best.quality, doubt),
        "ms_per_kchar": one.ms_per_kchar.to_json(),
        "compared_with": None if compared_with is None else dict(compared_with),
    }


def _ties(pick: Scored, others: Sequence[Scored]) -> dict[str, Any]:
    """The nearest candidates that cannot be told from ``pick``, and how many there are in all."""
    nearest = [{**named(one), "nats": one.loss - pick.loss, "time_ratio": one.time / pick.time} for one in others[:_MOST_TIES]]
    return {"tied_with": nearest, "num_tied": len(others)}


def _on_device(one: Scored, device: DeviceTime) -> dict[str, Any]:
    kchar = 1e6 * tokens_per_char(one.candidate.shape.vocab_size)
    return {
        "ms_per_token": device.decode.scaled(1e3, "ms").to_json(),
        "ms_per_kchar": device.decode.scaled(kchar, "ms").to_json(),
        "ms_to_first_token": None if device.first_token is None else device.first_token.scaled(1e3, "ms").to_json(),
        "flags": list(device.flags),
    }


def _tie_note(config: SearchConfig, best: Scored) -> str:
    shape = best.candidate.shape
    body = count_params(shape).non_embedding
    points = points_lost(shape.num_layers, shape.hidden_size, body, config.tokens, TIE_BAND)
    return (
        f"Predicted losses within {TIE_BAND} nats are tied (about {points:.1f} points of mean benchmark accuracy, less than "
        f"benchmarks can tell); inside a tie the {'predicted' if config.profile else 'measured'} time decides."
    )


def _notes(config: SearchConfig, front: Sequence[Scored], moved: bool, failures: Sequence[object]) -> list[str]:
    judged = judged_terms(one.quality for one in front)
    notes = [_tie_note(config, front[0])]
    names = [device.name for device in front[0].cost.devices]
    if names:
        notes.append(
            f"Times speak for {', '.join(names)} together, in milliseconds of their mean on the reference shape; "
            f"what each takes stands under 'devices'."
        )
    if judged:
        notes.append(f"Resting on judgement, not on a law: {', '.join(judged)}.")
    outside = sum(one.quality.shape_extrapolated for one in front)
    if outside:
        notes.append(f"{outside} of {len(front)} shapes lie outside the fitted data: extrapolated, reasons in front.json.")
    stretched = dict.fromkeys(name for one in front for name in one.quality.extrapolated if name not in SHAPE_TERMS)
    if stretched:
        notes.append(f"Used beyond what they were fitted to: {', '.join(stretched)}; reasons in front.json.")
    if moved:
        notes.append(f"The vocabulary term decides a pick: intervals are {VOCAB_DOUBT} nats wider each way ({VOCAB_SUPPORT}).")
    flags = sorted({flag for one in front for flag in one.cost.flags} - {*PREDICTION_FLAGS})
    if config.profile:
        beyond = sum("extrapolated" in one.cost.flags for one in front)
        notes.append(
            f"Times are predicted, not measured, from {config.profile}; {beyond} of {len(front)} lie beyond its probes."
        )
    if flags:
        notes.append(f"Times marked noisy were disturbed ({', '.join(flags)}); a quiet machine gives better ones.")
    never = [f"{vocab:,}" for vocab in config.space.vocabs_without_room()]
    if never:
        notes.append(f"No shape of this search has room for a vocabulary of {' or '.join(never)} within the budget.")
    if failures:
        notes.append(f"{len(failures)} shapes could not be measured; see 'failures'.")
    return notes
