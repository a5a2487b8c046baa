"""Refits the quality law's own coefficients from the public tables and checks how well it ranks shapes nobody fitted it to.

    python benchmarks/refit_quality.py --data FOLDER     refit, compare with the committed coefficients, print the rank checks
    python benchmarks/refit_quality.py --data FOLDER --docs     the same, then rewrite the tables of docs/quality.md

FOLDER holds gemstones_loss.csv, gemstones_bench.csv, morph_shape_loss.csv, mobilellm_depth_width.csv and
quantization_ppl.csv; without --data it is ../shared/data beside the repository, if that is there. Every table names its
source in its first lines. The last line printed is one JSON object; the exit code is 1 when a coefficient is not reproduced.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.formats import FORMATS
from deepthin.engine.model import Tensor
from deepthin.search.quality import accuracy, quantisation, shape_laws

ROOT = Path(__file__).resolve().parents[1]
SIBLING = ROOT.parent / "shared" / "data"
PAGE = ROOT / "docs" / "quality.md"
HUBER = 1e-3
COEFFICIENT_TOLERANCE = 2e-3  # relative; F4 is flat along one direction, so its coefficients move more than its values
NATS_TOLERANCE = 1e-4
BANDS = {"50M": 5.5e7, "105M": 1.03e8, "500M": 5e8, "1B": 1.03e9, "2B": 1.95e9}  # total parameters

Row = dict[str, str]
Array = np.ndarray[Any, np.dtype[np.float64]]
Law = Callable[..., Array]


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SIBLING, help="folder with the tables")
    parser.add_argument("--docs", action="store_true", help="rewrite the tables of docs/quality.md")
    options = parser.parse_args(argv)
    if not options.data.is_dir():
        print(f"error: {options.data}: no such folder; name the one with the public tables with --data", file=sys.stderr)
        return 2
    fits = refit(options.data)
    sections = {
        "fits": fits_table(fits),
        "ranks": ranks_table(rank_checks(options.data)),
        "held-out": held_out_table(held_out_band(options.data, "105M")),
        "quantisation": quantisation_table(options.data),
    }
    for name, text in sections.items():
        print(f"\n{name}\n{text}")
    if options.docs:
        rewrite(PAGE, sections)
    print(json.dumps({"schema": "deepthin/quality-refit/1", "fits": [fit.to_json() for fit in fits]}))
    return 0 if all(fit.reproduced for fit in fits) else 1


# --- the tables


def table(folder: Path, name: str) -> list[Row]:
    """Rows of one CSV file without its comment lines."""
    with (folder / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def columns(rows: Iterable[Row], names: Sequence[str]) -> list[Array]:
    """One f64 array per column."""
    kept = list(rows)
    return [np.array([float(row[name]) for row in kept]) for name in names]


def gemstones(folder: Path, schedule: str) -> list[Row]:
    """Rows of one learning-rate schedule: ``cooldown`` or ``hot``."""
    return [row for row in table(folder, "gemstones_loss.csv") if row["schedule"] == schedule]


# --- fitting


def f4(p: Array, layers: Array, width: Array, body: Array, tokens: Array) -> Array:
    """F4 as an array formula; independent of ``search/quality`` on purpose."""
    parts = np.exp(p[1]) * layers ** -p[2] + np.exp(p[5]) * width ** -p[6]
    return np.asarray(np.exp(p[0]) + parts + np.exp(p[3]) * tokens ** -p[4] + np.exp(p[7]) * body ** -p[8])


def f2(p: Array, layers: Array, width: Array, body: Array, tokens: Array) -> Array:
    """F2 as an array formula."""
    off = np.log(width / layers) - p[6] - p[7] * np.log(body / 1e8)
    return np.asarray(np.exp(p[0]) + np.exp(p[1]) * body ** -p[2] * (1 + p[5] ** 2 * off**2) + np.exp(p[3]) * tokens ** -p[4])


def read_out(p: Array, loss: Array) -> Array:
    """Error rate 1 - accuracy as a function of loss."""
    return np.asarray(p[0] - p[1] * np.exp(-p[2] * loss))


F4_START = (0.5, 0.0, 0.3, 11.0, 0.5, 2.0, 0.5, 3.0, 0.2)  # round numbers near nothing in particular
F2_START = (0.5, 3.0, 0.15, 11.0, 0.5, 0.1, 3.5, 0.0)
READ_OUT_START = (0.7, 10.0, 1.7)


def least_huber(residuals: Callable[[Array], Array], start: Sequence[float], delta: float, rounds: int = 2000) -> Array:
    """Parameters at the minimum of the Huber sum of ``residuals``: Levenberg-Marquardt with reweighting."""
    p, damping = np.array(start, float), 1e-3
    current = residuals(p)
    best = _huber(current, delta)
    for _ in range(rounds):
        jacobian = np.stack([_slope(residuals, p, k) for k in range(len(p))], axis=1)
        weights = np.minimum(1.0, delta / np.maximum(np.abs(current), 1e-300))
        curvature, gradient = jacobian.T @ (weights[:, None] * jacobian), jacobian.T @ (weights * current)
        gained = 0.0
        while gained == 0.0 and damping < 1e12:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature) + 1e-12), -gradient)
            with np.errstate(all="ignore"):
                tried = residuals(p + step)
                value = _huber(tried, delta)
            if math.isfinite(value) and value < best:
                gained, p, current, best, damping = best - value, p + step, tried, value, max(damping / 3, 1e-12)
            else:
                damping *= 4
        if gained < 1e-16:
            break
    return p


def _huber(residuals: Array, delta: float) -> float:
    size = np.abs(residuals)
    return float(np.where(size <= delta, 0.5 * residuals**2, delta * (size - 0.5 * delta)).sum())


def _slope(residuals: Callable[[Array], Array], p: Array, k: int) -> Array:
    step = np.zeros_like(p)
    step[k] = 1e-6 * max(1.0, abs(p[k]))
    return np.asarray((residuals(p + step) - residuals(p - step)) / (2 * step[k]))


def fit_losses(law: Law, start: Sequence[float], rows: Sequence[Row]) -> Array:
    """Fit ``law`` to the validation losses of ``rows``, in log space."""
    *inputs, loss = columns(rows, ("depth", "width", "params_nonemb", "tokens", "val_loss"))
    return least_huber(lambda p: np.asarray(np.log(law(p, *inputs)) - np.log(loss)), start, HUBER)


@dataclass(frozen=True)
class Fit:
    """One own fit beside what is committed; ``furthest`` is the largest difference of the two in predicted units."""

    name: str
    rows: int
    rmse: float
    committed: tuple[float, ...]
    refit: tuple[float, ...]
    furthest: float

    @property
    def worst(self) -> float:
        """Largest relative difference of a coefficient."""
        return max(abs(b - a) / max(abs(a), 1e-9) for a, b in zip(self.committed, self.refit, strict=True))

    @property
    def reproduced(self) -> bool:
        """Whether the committed coefficients are what comes out."""
        return self.worst <= COEFFICIENT_TOLERANCE and self.furthest <= NATS_TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        kept = {"committed": list(self.committed), "refit": list(self.refit), "reproduced": self.reproduced}
        return {"name": self.name, "rows": self.rows, "rmse": self.rmse, "furthest": self.furthest, **kept}


def committed_f4(law: shape_laws.AdditiveLaw) -> tuple[float, ...]:
    """Coefficients of ``search/quality`` in the order of :func:`f4`."""
    order = ("base", "depth", "a_depth", "tokens", "a_tokens", "width", "a_width", "params", "a_params")
    return tuple(getattr(law, name) for name in order)


def refit(folder: Path) -> list[Fit]:
    """Every own fit of ``search/quality`` whose table may be kept."""
    cooldown, hot = gemstones(folder, "cooldown"), gemstones(folder, "hot")
    second = shape_laws.F2_COOLDOWN
    cases: list[tuple[str, Law, Sequence[float], list[Row], tuple[float, ...]]] = [
        ("F4 cooldown", f4, F4_START, cooldown, committed_f4(shape_laws.F4_COOLDOWN)),
        ("F2 cooldown", f2, F2_START, cooldown, tuple(getattr(second, field.name) for field in fields(second))),
        ("F4 hot", f4, F4_START, hot, committed_f4(accuracy.F4_HOT)),
    ]
    fits = []
    for name, law, start, rows, committed in cases:
        *inputs, loss = columns(rows, ("depth", "width", "params_nonemb", "tokens", "val_loss"))
        found = fit_losses(law, start, rows)
        values = law(found, *inputs)
        furthest = float(np.abs(values - law(np.array(committed), *inputs)).max())
        fits.append(Fit(name, len(rows), _rmse(values - loss), committed, tuple(map(float, found)), furthest))
    return [*fits, fit_read_out(folder, hot), *fit_rounding()]


def fit_read_out(folder: Path, hot: Sequence[Row]) -> Fit:
    """The accuracy read-out: mean of nine benchmarks against the hot loss of the nearest checkpoint of the same model."""
    losses: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in hot:
        losses[row["width"], row["depth"]].append((float(row["tokens"]), float(row["val_loss"])))
    pairs = []
    for row in table(folder, "gemstones_bench.csv"):
        near = min(losses[row["width"], row["depth"]], key=lambda item: abs(item[0] - float(row["tokens"])))
        pairs.append((near[1], 1 - float(row["avg9"])))
    loss, error = (np.array(column) for column in zip(*pairs, strict=True))
    committed = accuracy.READ_OUT
    found = least_huber(lambda p: read_out(p, loss) - error, READ_OUT_START, 1.0)
    furthest = float(np.abs(read_out(found, loss) - read_out(np.array(committed), loss)).max())
    rmse = _rmse(read_out(found, loss) - error)
    return Fit("accuracy read-out", len(pairs), rmse, committed, tuple(map(float, found)), furthest)


def _rmse(errors: Array) -> float:
    return float(np.sqrt((errors**2).mean()))


# --- rounding errors of block formats


def fit_rounding() -> list[Fit]:
    """Squared rounding error of each block format on normal weights; left out where llama.cpp is not installed."""
    if find_spec("llama_cpp") is None:
        return []
    weights = np.random.Generator(np.random.PCG64(0)).standard_normal((1024, 2048), np.float32)
    names = tuple(quantisation.ROUNDING_ERROR)
    found = tuple(rounding_error(weights, name) for name in names)
    committed = tuple(quantisation.ROUNDING_ERROR.values())
    rounded = tuple(float(f"{value:.3g}") for value in found)
    gap = max(abs(a - b) for a, b in zip(rounded, committed, strict=True))
    return [Fit(f"rounding error of {', '.join(names)}", weights.size, 0.0, committed, rounded, gap)]


def rounding_error(weights: np.ndarray[Any, np.dtype[np.float32]], name: str) -> float:
    """Mean squared error over mean square after llama.cpp's own rounding."""
    import llama_cpp

    (path,) = (Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so")
    quantize = ctypes.CDLL(str(path)).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    rows, cols = weights.shape
    fmt = FORMATS[name]
    blocks = np.empty((rows, fmt.row_bytes(cols)), np.uint8)
    quantize(fmt.gguf_type, weights.ctypes.data, blocks.ctypes.data, 0, rows, cols, None)
    error = Tensor(fmt, (rows, cols), blocks).dequantize() - weights
    return float((error**2).mean() / (weights**2).mean())


# --- rank checks


@dataclass(frozen=True)
class Shape:
    """A published shape with its outcome, lower being better."""

    group: str
    layers: float
    width: float
    body: float
    total: float
    outcome: float


def f4_guarded(shape: Shape) -> float:
    """F4 of the equivalent shape, as the product uses it."""
    return shape_laws.f4_loss(*shape_laws.equivalent_shape(shape.layers, shape.width, shape.body), shape.body)


LAWS: dict[str, Callable[[Shape], float]] = {
    "F4 (used)": f4_guarded,
    "F2": lambda s: shape_laws.f2_loss(s.layers, s.width, s.body),
    "gem4 (published)": lambda s: shape_laws.gem4_loss(s.layers, s.width, s.body),
    "body parameters only": lambda s: -s.body,
    "depth only": lambda s: -s.layers,
    "total parameters only": lambda s: -s.total,
}


def morph_shapes(folder: Path) -> list[Shape]:
    """Training losses of 80M to 1B shapes, grouped by size and tokens."""
    return [
        Shape(
            f"{row['model'].split('_')[0]} {row['tokens_mult']}",
            *(float(row[name]) for name in ("depth", "width", "params_nonemb", "params_total", "train_loss")),
        )
        for row in table(folder, "morph_shape_loss.csv")
    ]


def mobilellm_shapes(folder: Path) -> list[Shape]:
    """Accuracy of the depth sweep in points below 100; gated MLP of 8/3 the width, two tables of 32,000 rows."""
    shapes = []
    for row in table(folder, "mobilellm_depth_width.csv"):
        layers, width = int(row["n_layer"]), int(row["d_model"])
        body = layers * (4 * width**2 + 3 * width * round(8 * width / 3 / 64) * 64)
        shapes.append(Shape(row["budget"], layers, width, body, body + 2 * 32_000 * width, 100 - float(row["acc_cr8"])))
    return shapes


def gemstones_shapes(folder: Path) -> list[Shape]:
    """Validation losses at a constant rate up to 100B tokens, grouped by size band and tokens."""
    rows = [row for row in gemstones(folder, "hot") if float(row["tokens"]) <= 1.05e11]
    return [
        Shape(
            f"{band_of(row)} {round(float(row['tokens']) / 1e10)}",
            *(float(row[name]) for name in ("depth", "width", "params_nonemb", "params_total", "val_loss")),
        )
        for row in rows
    ]


def band_of(row: Row) -> str:
    """The size band nearest to a Gemstones row, by ratio of total parameters."""
    return min(BANDS, key=lambda name: abs(math.log(float(row["params_total"]) / BANDS[name])))


@dataclass(frozen=True)
class Ranks:
    """How well scores rank outcomes inside groups of at least three shapes."""

    groups: int
    pairs: int
    spearman: float
    pair_accuracy: float
    regret: float


def ranks(shapes: Sequence[Shape], score: Callable[[Shape], float]) -> Ranks:
    """Mean Spearman, share of ordered pairs, and mean regret of the first pick; equal outcomes are no pair."""
    groups: dict[str, list[Shape]] = defaultdict(list)
    for shape in shapes:
        groups[shape.group].append(shape)
    usable = [group for group in groups.values() if len(group) >= 3]
    right = [
        (score(a) < score(b)) == (a.outcome < b.outcome)
        for group in usable
        for a, b in combinations(group, 2)
        if a.outcome != b.outcome
    ]
    correlations = [spearman([score(s) for s in group], [s.outcome for s in group]) for group in usable]
    regrets = [min(group, key=score).outcome - min(s.outcome for s in group) for group in usable]
    return Ranks(len(usable), len(right), float(np.mean(correlations)), sum(right) / len(right), float(np.mean(regrets)))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation with mean ranks for ties; 0 where one side is constant."""
    x, y = _mean_ranks(a), _mean_ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / norm if norm else 0.0


def _mean_ranks(values: Sequence[float]) -> Array:
    array = np.asarray(values, float)
    return np.asarray([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array], float)


def rank_checks(folder: Path) -> dict[str, dict[str, Ranks]]:
    """By data set, by law."""
    sets = {
        "Morph": morph_shapes(folder),
        "MobileLLM": mobilellm_shapes(folder),
        "Gemstones": gemstones_shapes(folder),
    }
    return {name: {law: ranks(shapes, score) for law, score in LAWS.items()} for name, shapes in sets.items()}


def held_out_band(folder: Path, band: str) -> dict[str, dict[str, Ranks]]:
    """Ranks inside ``band`` by fits that never saw it, beside the baselines; by schedule, by law."""
    found = {}
    for schedule in ("cooldown", "hot"):
        rows = gemstones(folder, schedule)
        fits = [row for row in rows if band_of(row) != band]
        inside = [row for row in rows if band_of(row) == band and float(row["tokens"]) <= 1.05e11]
        p4, p2 = fit_losses(f4, F4_START, fits), fit_losses(f2, F2_START, fits)
        shapes = [
            Shape(
                str(round(float(row["tokens"]) / 1.1e10)),
                *(float(row[name]) for name in ("depth", "width", "params_nonemb", "params_total", "val_loss")),
            )
            for row in inside
        ]
        found[schedule] = {
            "F4 refit without the band": ranks(shapes, _scored_by(f4, p4)),
            "F2 refit without the band": ranks(shapes, _scored_by(f2, p2)),
            "body parameters only": ranks(shapes, LAWS["body parameters only"]),
            "total parameters only": ranks(shapes, LAWS["total parameters only"]),
        }
    return found


def _scored_by(law: Law, p: Array) -> Callable[[Shape], float]:
    return lambda s: float(law(p, *(np.float64(x) for x in (s.layers, s.width, s.body, shape_laws.REFERENCE_TOKENS))))


# --- printing


def fits_table(fits: Sequence[Fit]) -> str:
    """Markdown: what was refit and how far it is from what is committed."""
    lines = [
        "| fit | rows | rmse | largest relative difference of a coefficient | largest difference of a value |",
        "|---|--:|--:|--:|--:|",
    ]
    for fit in fits:
        rmse = f"{fit.rmse:.4f}" if fit.rmse else ""
        lines.append(f"| {fit.name} | {fit.rows} | {rmse} | {fit.worst:.1e} | {fit.furthest:.1e} |")
    return "\n".join(lines)


def ranks_table(checks: Mapping[str, Mapping[str, Ranks]]) -> str:
    """Markdown: Spearman / pair accuracy / regret by law and data set."""
    head = []
    for name, laws in checks.items():
        one = laws["F4 (used)"]
        head.append(f"{name} ({one.groups} groups, {one.pairs} pairs)")
    lines = [f"| law | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    for law in LAWS:
        cells = [_cell(laws[law]) for laws in checks.values()]
        lines.append(f"| {law} | {' | '.join(cells)} |")
    return "\n".join(lines)


def held_out_table(checks: Mapping[str, Mapping[str, Ranks]]) -> str:
    """Markdown: the same for a band the fits never saw."""
    head = [f"{name} ({laws['body parameters only'].groups} groups)" for name, laws in checks.items()]
    lines = [f"| law | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    names = next(iter(checks.values()))
    lines += [f"| {law} | {' | '.join(_cell(laws[law]) for laws in checks.values())} |" for law in names]
    return "\n".join(lines)


def _cell(found: Ranks) -> str:
    return f"{found.spearman:.3f} / {found.pair_accuracy:.3f} / {found.regret:.4f}"


def quantisation_table(folder: Path) -> str:
    """Markdown: predicted against published damage, per-row law on OPT and the format rule on Salamandra-2B."""
    lines = ["| model | format | published nats | predicted nats | predicted / published |", "|---|---|--:|--:|--:|"]
    for row in table(folder, "quantization_ppl.csv"):
        published = float(row["delta_nats"])
        if row["method"] == "GPTQ per-row" and row["bits"] == "4":
            guess = quantisation.int4_penalty(float(row["params"]), float(row["train_tokens"]), quantisation.PER_ROW)
        elif row["study"] == "salamandra" and row["method"] in SALAMANDRA:
            body, tokens = SALAMANDRA_BODY, 1.8e11
            guess = quantisation.quantisation_term(SALAMANDRA[row["method"]], body, tokens, quantisation.GROUP_WISE).nats
        else:
            continue
        ratio = guess / published
        lines.append(f"| {row['model']} | {row['method']} {row['bits']} | {published:.4f} | {guess:.4f} | {ratio:.2f} |")
    return "\n".join(lines)


SALAMANDRA = {"Q8_0": "q8_0", "Q6_K": "q6_k", "Q5_K_S": "q5_k", "Q4_K_S": "q4_k"}
SALAMANDRA_BODY = 1_730_000_000  # 2.25B less an embedding of 256,000 rows of 2,048


def rewrite(page: Path, sections: Mapping[str, str]) -> None:
    """Put each section between its markers in ``page``."""
    text = page.read_text(encoding="utf-8")
    for name, body in sections.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"error: {page}: holds no {start} ... {end}")
        text = f"{before}{start}\n{body}\n{end}{after}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
