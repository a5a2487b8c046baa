"""``deepthin inspect SOURCE``: everything about a shape that can be known without running it."""

from __future__ import annotations

import argparse
from typing import Any

from deepthin.cli.arguments import add_source, argument, context, listed, real, whole
from deepthin.cli.outcome import Outcome
from deepthin.cli.predictions import SHOWN_QUANTS, open_profile, predictions, predictions_text
from deepthin.cli.progress import Progress
from deepthin.cli.sizes import bytes_text, count_text, parse_bandwidth, parse_count, parse_counts, seconds_text
from deepthin.cli.source import QUANT_HELP, Source, open_source, parse_scheme
from deepthin.cli.table import table
from deepthin.engine.accounting import (
    EXAMPLE_VOCABULARIES,
    BlockRecipe,
    LatencyTerms,
    Parts,
    analytic_latency,
    aspect_ratio,
    bytes_read_per_token,
    count_bytes,
    count_params,
    flops_per_token,
    iso_parameter_curve,
    kv_bytes_per_token,
    shape_flags,
    vocabulary_table,
)
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import BODY_QUANTS, scheme_named
from deepthin.engine.shape import Shape
from deepthin.engine.targets import target_verdicts
from deepthin.engine.tensors import tensor_specs

EXAMPLES = """examples:
  deepthin inspect smollm2-135m
  deepthin inspect model.gguf --json
  deepthin inspect smollm2-135m --params 125M           what vocabularies leave for layers at 125M in all
  deepthin inspect smollm2-135m --quant q4_0 --bandwidth 50GB/s --layer-us 40
  deepthin inspect smollm2-135m --profile pixel-9       tokens per second it should reach there
  deepthin inspect L=64,d=3072,heads=24,kv=8,ff=8192,vocab=32000,tied --layers 16,36,64

Nothing here is measured, and speeds are predicted from a profile only; use "deepthin bench" and "deepthin search" for that.
"""
PARTS = ("embedding", "attention", "mlp", "norm", "head")
LATENCY_KEYS = ("weight_read_s", "layers_s", "total_s")
LADDER = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # depths of the iso-parameter curve, relative to the shape's own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    add_source(parser)
    parser.add_argument(
        "--quant",
        type=argument(parse_scheme),
        metavar="Q",
        help=f"format of the weights: {QUANT_HELP} (default: as stored, else q4_0)",
    )
    parser.add_argument("--context", type=context(0), default=1024, metavar="N", help="cached tokens (default: %(default)s)")
    group = parser.add_argument_group("curves")
    group.add_argument("--layers", type=listed(whole(1, 4096)), metavar="L,L,..", help="depths of the iso-parameter curve")
    group.add_argument(
        "--params", type=argument(parse_count), metavar="N", help="total of the vocabulary table (default: the shape's)"
    )
    group.add_argument("--vocab", type=argument(parse_counts), metavar="V,V,..", help="vocabularies of that table")
    group = parser.add_argument_group("analytic latency, T = bytes / bandwidth + L * t_layer (both options together)")
    group.add_argument("--bandwidth", type=argument(parse_bandwidth), metavar="50GB/s", help="sustained read bandwidth")
    group.add_argument("--layer-us", type=real(0, 1e9), metavar="US", help="serial microseconds per layer")

    group = parser.add_argument_group("predicted speed")
    group.add_argument("--profile", metavar="P", help="of a device: a name that deepthin profile list shows, or a file")


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Account for SOURCE.

    Raises:
        DeepthinError: SOURCE cannot be read or an option makes no sense.
    """
    if (options.bandwidth is None) != (options.layer_us is None):
        raise UsageError("--bandwidth and --layer-us belong together; give both or neither")
    source = open_source(options.source)
    shape = source.shape
    quant = options.quant or ("as stored" if source.model is not None else "q4_0")
    stored = _stored_bytes(source) if quant == "as stored" else count_bytes(shape, quant)
    kv = kv_bytes_per_token(shape)
    read = _bytes_read(source, quant, options.context)
    body: dict[str, Any] = {
        "source": options.source,
        "shape": shape.to_json(),
        "known": _known(source),
        "params": count_params(shape).to_json(),
        "bytes": {
            "quant": quant,
            **stored.to_json(),
            "by_quant": {name: count_bytes(shape, name).total for name in BODY_QUANTS},
        },
        "context": options.context,
        "kv_bytes_per_token": kv,
        "kv_bytes": kv * options.context,
        "bytes_read_per_token": read,
        "flops_per_token": flops_per_token(shape, context=options.context),
        "aspect_ratio": aspect_ratio(shape),
        "flags": shape_flags(shape),
        "targets": {name: verdict.to_json() for name, verdict in target_verdicts(shape).items()},
        "latency": _latency(shape, read, options),
        "predicted": _predicted(shape, quant, options),
        "iso_parameter_curve": _curve(shape, quant, options),
        "vocabularies": {
            "total_params": options.params or count_params(shape).total,
            "rows": [
                row.to_json()
                for row in vocabulary_table(
                    shape, options.params or count_params(shape).total, options.vocab or EXAMPLE_VOCABULARIES
                )
            ],
        },
    }
    return Outcome("inspect", body, _text(body))


def _stored_bytes(source: Source) -> Parts:
    assert source.model is not None, "Bug: only models are stored"
    sums = dict.fromkeys(PARTS, 0)
    for spec in tensor_specs(source.shape):
        sums[spec.role] += source.model.tensors[spec.name].num_bytes
    return Parts(**sums)


def _bytes_read(source: Source, quant: str, context: int) -> int:
    shape = source.shape
    if quant != "as stored":
        return bytes_read_per_token(shape, quant, context=context)
    parts = _stored_bytes(source)
    row = parts.embedding // shape.vocab_size
    blocks = parts.non_embedding + (shape.layer_sharing - 1) * (parts.non_embedding - 4 * shape.hidden_size)
    head = parts.embedding if shape.tie_word_embeddings else parts.head
    return blocks + head + row + context * kv_bytes_per_token(shape)


def _known(source: Source) -> dict[str, Any] | None:
    known = source.known
    if known is None:
        return None
    return {
        "name": known.name,
        "published_params": known.published_params,
        "source": known.source,
        "verified": known.verified,
        "accounting_only": known.accounting_only,
    }


def _latency(shape: Shape, read: int, options: argparse.Namespace) -> dict[str, Any] | None:
    if options.bandwidth is None:
        return None
    terms = analytic_latency(read, options.bandwidth, shape.num_executed_layers, options.layer_us * 1e-6)
    given = {"bandwidth_bytes_per_s": options.bandwidth, "layer_s": options.layer_us * 1e-6}
    return {**_terms(terms), **given, "basis": "analytic"}


def _predicted(shape: Shape, quant: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Speeds on the profile's device, in the format of the weights, or in all of ours when they are stored in a mix."""
    if options.profile is None:
        return None
    profile = open_profile(options.profile)
    quants = list(SHOWN_QUANTS) if quant == "as stored" else [quant]
    return {"profile": profile.name, "rows": predictions(profile, {options.source: shape}, quants, context=options.context)}


def _terms(terms: LatencyTerms) -> dict[str, float]:
    return {"weight_read_s": terms.weight_read_s, "layers_s": terms.layers_s, "total_s": terms.total_s}


def _curve(shape: Shape, quant: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Other depths with the same block matrices and the same vocabulary, heads taken in proportion to the width."""
    depths = options.layers or sorted({max(1, round(shape.num_layers * step)) for step in LADDER})
    body_params = count_params(shape).block_matrices
    scheme = scheme_named("q4_0" if quant == "as stored" else quant)
    kv_per_width = 4 * shape.layer_sharing * shape.kv_size / shape.hidden_size
    points = []
    for point in iso_parameter_curve(body_params, BlockRecipe.of(shape), depths):
        layers, width = point.num_layers, point.hidden_size
        kv = round(layers * width * kv_per_width)
        row: dict[str, Any] = {
            "num_layers": layers,
            "hidden_size": width,
            "params": point.params,
            "params_ratio": point.params / body_params,
            "aspect_ratio": point.aspect_ratio,
            "kv_bytes_per_token": kv,
        }
        if options.bandwidth is not None:
            bits = point.params * shape.layer_sharing * scheme.body.bits_per_weight
            bits += shape.vocab_size * width * scheme.head.bits_per_weight
            read = bits / 8 + kv * options.context
            row |= _terms(analytic_latency(read, options.bandwidth, layers * shape.layer_sharing, options.layer_us * 1e-6))
        points.append(row)
    return points


def _text(body: dict[str, Any]) -> str:
    sections = [
        _heading(body),
        _parts_table(body),
        _facts(body),
        _predicted_text(body),
        _flags(body),
        _targets(body),
        _curve_table(body),
        _vocabularies(body),
    ]
    return "\n\n".join(section for section in sections if section)


def _heading(body: dict[str, Any]) -> str:
    lines = [body["shape"]["text"]]
    known = body["known"]
    if known is not None:
        published = count_text(known["published_params"])
        lines.append(f"{known['name']}: published as {published} parameters ({known['source']}, {known['verified']})")
        if known["accounting_only"]:
            lines.append(f"for accounting only, since this engine does not run its {known['accounting_only']}")
    return "\n".join(lines)


def _parts_table(body: dict[str, Any]) -> str:
    params, stored = body["params"], body["bytes"]
    rows = [
        (name, f"{params[name]:,}", f"{params[name] / params['total']:.1%}", bytes_text(stored[name]))
        for name in (*PARTS, "total", "non_embedding")
    ]
    return table(("part", "parameters", "share", f"bytes, {stored['quant']}"), rows)


def _facts(body: dict[str, Any]) -> str:
    at = f"at {body['context']} tokens"
    sizes = ", ".join(f"{name} {bytes_text(size)}" for name, size in body["bytes"]["by_quant"].items())
    read, operations = bytes_text(body["bytes_read_per_token"]), count_text(body["flops_per_token"])
    lines = [
        f"weights by format  {sizes}",
        f"KV cache, F16      {body['kv_bytes_per_token']:,} bytes per token, {bytes_text(body['kv_bytes'])} {at}",
        f"per decoded token  {read} read, {operations} operations, {at}",
        f"aspect ratio d/L   {body['aspect_ratio']:.1f}",
    ]
    if body["latency"] is not None:
        reading, layers, total = (seconds_text(body["latency"][key]) for key in LATENCY_KEYS)
        lines.append(f"analytic latency   {reading} reading + {layers} in layers = {total} per token, {at}")
    return "\n".join(lines)


def _predicted_text(body: dict[str, Any]) -> str:
    predicted = body["predicted"]
    return "" if predicted is None else f"on {predicted['profile']}: {predictions_text(predicted['rows'])}"


def _flags(body: dict[str, Any]) -> str:
    return "\n".join(f"warning: {item['text']}" for item in body["flags"])


def _targets(body: dict[str, Any]) -> str:
    rows = [(name, "yes" if verdict["ok"] else "no", verdict["why"]) for name, verdict in body["targets"].items()]
    return table(("target", "takes it", "why"), rows, left=3)


def _curve_table(body: dict[str, Any]) -> str:
    headers = ["L", "d", "d/L", "block parameters", "off by", "KV bytes/token"]
    timed = body["latency"] is not None
    headers += ["reading", "layers", "T per token"] if timed else []
    rows = []
    for point in body["iso_parameter_curve"]:
        row = [point["num_layers"], point["hidden_size"], f"{point['aspect_ratio']:.1f}", f"{point['params']:,}"]
        row += [f"{point['params_ratio'] - 1:+.1%}", f"{point['kv_bytes_per_token']:,}"]
        row += [seconds_text(point[key]) for key in LATENCY_KEYS] if timed else []
        rows.append(row)
    if not rows:
        return "no other depth has a width of 32 or more with as many block parameters"
    return "the same block parameters at other depths (d to the nearest 32)\n" + table(headers, rows, left=0)


def _vocabularies(body: dict[str, Any]) -> str:
    total = body["vocabularies"]["total_params"]
    rows = []
    for row in body["vocabularies"]["rows"]:
        left = row["left_params"]
        rest = f"{left:,}" if left > 0 else f"nothing: over by {-left:,}"
        tied = "tied" if row["tied"] else "untied"
        rows.append(
            (
                f"{row['vocab_size']:,}",
                tied,
                f"{row['table_params']:,}",
                f"{row['table_params'] / total:.0%}",
                rest,
                row["num_layers"],
            )
        )
    headers = ("vocabulary", "head", "tables", "share", "left for layers", "layers")
    width = body["shape"]["hidden_size"]
    return f"what a vocabulary leaves of {count_text(total)} parameters at d={width}\n" + table(headers, rows, left=2)
