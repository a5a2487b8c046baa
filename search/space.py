"""The search space as data, and the decoding of a point of it into a shape that meets the budget by construction.

A point gives every dimension but two an index. The width D is then solved: the largest that meets every limit. What is
still left goes into the MLP, 32 columns at a time, and once that is as wide as the quality law can judge, into layers. No
point is ever rejected: one that leaves no width is moved to cheaper choices, in a fixed order, until one is left.

Every decoded shape suits every hard target: D is a multiple of the head dim and of 32 (256 where K-quants are a target), the
width of all heads and of the MLP likewise, head dims are multiples of 16 (rotary GroupQueryAttention needs that), key/value
heads divide the heads, heads divide D where transformers wants that, and choices that a target refuses are not in the space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

import numpy as np

from deepthin.engine.errors import InfeasibleError, UsageError
from deepthin.engine.formats import Scheme, head_format, quant_named
from deepthin.engine.shape import Shape
from deepthin.search.budget import Budget
from deepthin.search.targets import kept

WIDTH_MULTIPLE = 32  # elements of a quantised block: widths between are stored as f16
HEAD_DIM_MULTIPLE = 16
LAYERS = (3, 80)  # depths the quality law was fitted on
VOCABS = (4096, 8192, 16384, 32768, 49152, 65536, 98304, 131072)
HEAD_DIMS = (32, 64, 96, 128)
KV_GROUPS = (1, 2, 3, 4, 8)
MLP_RATIOS = (1.0, 1.5, 2.0, 8 / 3, 3.5, 4.5)
MAX_MLP_RATIO = 6.0  # the widest MLP the quality law was checked at; a coarse width step could leave room for far more
TYINGS = (True, False)
QUERY_RATIOS = (1.0,)  # others are allowed; no law tells what they are worth beyond the parameters they take
MAX_QUERY_RATIO = 8.0
SHARINGS = (1,)  # more is allowed, but no law credits repeats and they take time, so none would ever lead
QK_NORMS = (False,)  # likewise
QUANTS = ("q4_0", "q8_0", "f16")  # q4_1 is allowed, but is predicted no better than q4_0 and takes more bytes
HEAD_QUANTS: tuple[str, ...] = ()  # what goes with the body; nothing published says what another costs

_REPAIR_ORDER = (
    *("vocab", "tying", "sharing", "layers", "mlp_ratio", "query_ratio", "kv_group", "qk_norm", "head_dim"),
    *("head_quant", "quant"),
)

Point = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Dimension:
    """One free number of a point: a whole number from ``low`` to ``high``, or an index into a list of choices.

    ``low`` is always the cheapest value, so moving towards it never needs a larger budget.
    """

    name: str
    low: int
    high: int
    log: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape and how it is stored (``formats.Scheme`` by name), as the search scores, measures and stores it."""

    shape: Shape
    quant: str

    @property
    def key(self) -> str:
        """Text that identifies it within a run."""
        return f"{self.shape.text} {self.quant}"


@dataclass(frozen=True, slots=True)
class Space:
    """All shapes a search may propose for one budget.

    Attributes:
        budget: the hard limits.
        layers: smallest and largest L.
        vocabs: vocabulary sizes.
        head_dims: head dims; ``heads`` follows as query ratio x D / head dim.
        kv_groups: at most so many query heads per key/value head; key/value heads are the fewest that divide the heads.
        mlp_ratios: MLP width over D before the rest of the budget is added to it.
        tyings: whether the head may be, or must be, the embedding.
        sharings: how often each block may run in a row.
        qk_norms: whether queries and keys may be, or must be, normalised.
        quants: body formats.
        query_ratios: width of all query heads over D; the fewest heads that reach it and that every target takes.
        head_quants: formats of embedding and head; none takes what goes with each body.
        max_seq_len: context limit of every shape.

    Every list is kept sorted from the cheapest choice up.

    Raises:
        UsageError: a list is empty or holds a value no decoder of this search can have.
    """

    budget: Budget
    layers: tuple[int, int] = LAYERS
    vocabs: Sequence[int] = VOCABS
    head_dims: Sequence[int] = HEAD_DIMS
    kv_groups: Sequence[int] = KV_GROUPS
    mlp_ratios: Sequence[float] = MLP_RATIOS
    tyings: Sequence[bool] = TYINGS
    sharings: Sequence[int] = SHARINGS
    qk_norms: Sequence[bool] = QK_NORMS
    quants: Sequence[str] = QUANTS
    query_ratios: Sequence[float] = QUERY_RATIOS
    head_quants: Sequence[str] = HEAD_QUANTS
    max_seq_len: int = 2048

    def __post_init__(self) -> None:
        """Check the lists and sort them, cheapest first."""
        low, high = self.layers
        if not 1 <= low <= high:
            raise UsageError(f"search space: layers {low} to {high} is no range; the smallest is 1")
        bad = [e for e in self.head_dims if e < 1 or e % HEAD_DIM_MULTIPLE]
        if bad:
            raise UsageError(f"search space: head dim {bad[0]} is no multiple of {HEAD_DIM_MULTIPLE}, which ONNX exports need")
        for name, least, most in (
            ("vocabs", 1, 1 << 24),
            ("kv_groups", 1, 1 << 16),
            ("mlp_ratios", 0.125, MAX_MLP_RATIO),
            ("sharings", 1, 64),
            ("query_ratios", 0.125, MAX_QUERY_RATIO),
        ):
            bad_values = [x for x in getattr(self, name) if not least <= x <= most]
            if bad_values:
                raise UsageError(f"search space: {name} holds {bad_values[0]!r}, but values are from {least} to {most:,}")
        chosen: dict[str, list[Any]] = {
            "vocabs": sorted(self.vocabs),
            "head_dims": sorted(self.head_dims, key=lambda e: (self._width_step(e), e)),
            "kv_groups": sorted(self.kv_groups, reverse=True),
            "mlp_ratios": sorted(self.mlp_ratios),
            "tyings": sorted(self.tyings, reverse=True),
            "sharings": sorted(self.sharings),
            "qk_norms": sorted(self.qk_norms),
            "query_ratios": sorted(self.query_ratios),
            "quants": sorted(self.quants, key=lambda quant: (quant_named(quant).bits_per_weight, quant)),
            "head_quants": sorted(self.head_quants, key=lambda quant: (quant_named(quant).bits_per_weight, quant)),
        }
        for name, values in chosen.items():
            if not values and name != "head_quants":
                raise UsageError(f"search space: {name} is empty, so nothing can be proposed; give at least one value")
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        plain = {dimension.name: 0 for dimension in self.dimensions} | {"layers": low}
        for name, dimension in (("sharings", "sharing"), ("qk_norms", "qk_norm")):
            values = getattr(self, name)
            probes = {value: plain | {dimension: index} for index, value in enumerate(values)}
            shapes = {value: self._shape(point, self._step(point)) for value, point in probes.items()}
            object.__setattr__(self, name, kept(name, values, self.budget.targets, shapes.__getitem__))

    @property
    def width_multiple(self) -> int:
        """What widths of the stream and of the MLP are multiples of."""
        return max(WIDTH_MULTIPLE, self.budget.targets.width_multiple)

    @property
    def num_points(self) -> int:
        """Points of the space; several may stand for the same candidate."""
        return math.prod(dimension.high - dimension.low + 1 for dimension in self.dimensions)

    def points(self) -> Iterator[dict[str, int]]:
        """Every point, in a fixed order."""
        names = [dimension.name for dimension in self.dimensions]
        for values in product(*(range(dimension.low, dimension.high + 1) for dimension in self.dimensions)):
            yield dict(zip(names, values, strict=True))

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The free numbers of a point, always the same ones whatever the lists hold."""
        return (
            Dimension("layers", *self.layers, log=True),
            Dimension("vocab", 0, len(self.vocabs) - 1),
            Dimension("head_dim", 0, len(self.head_dims) - 1),
            Dimension("kv_group", 0, len(self.kv_groups) - 1),
            Dimension("mlp_ratio", 0, len(self.mlp_ratios) - 1),
            Dimension("tying", 0, len(self.tyings) - 1),
            Dimension("sharing", 0, len(self.sharings) - 1),
            Dimension("qk_norm", 0, len(self.qk_norms) - 1),
            Dimension("quant", 0, len(self.quants) - 1),
            Dimension("query_ratio", 0, len(self.query_ratios) - 1),
            Dimension("head_quant", 0, max(0, len(self.head_quants) - 1)),
        )

    @property
    def smallest(self) -> Candidate:
        """The member with the fewest parameters and bytes: every choice its cheapest, the width the narrowest."""
        point = {dimension.name: dimension.low for dimension in self.dimensions}
        return Candidate(self._shape(point, self._step(point)), self._quant(point))

    def require_feasible(self) -> None:
        """Pass when at least the smallest member meets the budget.

        Raises:
            InfeasibleError: it does not; the message names the binding limit, the shortfall and what would be feasible.
        """
        if not self.budget.fits(self.smallest.shape, self.smallest.quant):
            raise infeasible(self)

    def vocabs_without_room(self) -> list[int]:
        """Vocabularies that not even the smallest body leaves room for."""
        shape, quant = self.smallest.shape, self.smallest.quant
        return [vocab for vocab in self.vocabs if not self.budget.fits(shape.replace(vocab_size=vocab), quant)]

    def sample(self, generator: np.random.Generator) -> dict[str, int]:
        """A random point; depths are drawn evenly in log L."""
        point = {}
        for dimension in self.dimensions:
            low, high = dimension.low, dimension.high
            if dimension.log:
                point[dimension.name] = min(high, int(low * ((high + 1) / low) ** generator.random()))
            else:
                point[dimension.name] = int(generator.integers(low, high + 1))
        return point

    def decode(self, point: Point) -> Candidate:
        """The shape ``point`` stands for; every limit of the budget is met.

        Raises:
            InfeasibleError: not even the smallest member meets the budget; the message says what would.
        """
        current = dict(point)
        lows = {dimension.name: dimension.low for dimension in self.dimensions}
        while (width := self._largest_width(current)) is None:
            cheaper = [name for name in _REPAIR_ORDER if current[name] > lows[name]]
            if not cheaper:
                raise infeasible(self)
            current[cheaper[0]] -= 1
        return Candidate(self._filled(self._shape(current, width), self._quant(current)), self._quant(current))

    def _quant(self, point: Point) -> str:
        body = quant_named(self.quants[point["quant"]])
        head = quant_named(self.head_quants[point["head_quant"]]) if self.head_quants else head_format(body)
        return Scheme(body, head).name

    def _step(self, point: Point) -> int:
        return self._width_step(self.head_dims[point["head_dim"]])

    def _width_step(self, head_dim: int) -> int:
        return math.lcm(head_dim, self.width_multiple)

    def _heads(self, point: Point, width: int) -> Iterator[int]:
        """Numbers of heads that reach the query ratio, from the fewest up."""
        return count(
            max(1, math.ceil(self.query_ratios[point["query_ratio"]] * width / self.head_dims[point["head_dim"]] - 1e-9))
        )

    def _fewest_heads(self, point: Point, width: int) -> int:
        """Of those, the first that every target takes; D over the head dim, or a multiple, always is one."""
        head_dim, targets = self.head_dims[point["head_dim"]], self.budget.targets
        qk_norm = self.qk_norms[point["qk_norm"]]
        suiting = (
            heads
            for heads in self._heads(point, width)
            if heads * head_dim % self.width_multiple == 0 and targets.takes_heads(width, heads, qk_norm)
        )
        return next(suiting)

    def _narrowest(self, point: Point, width: int) -> Shape:
        """A shape no larger than the one that ``point`` stands for at ``width``, and growing with it."""
        return self._shape(point, width, kv_heads=1, heads=next(self._heads(point, width)))

    def _shape(self, point: Point, width: int, kv_heads: int | None = None, heads: int | None = None) -> Shape:
        head_dim = self.head_dims[point["head_dim"]]
        heads = heads or self._fewest_heads(point, width)
        multiple = self.width_multiple
        inner = round(self.mlp_ratios[point["mlp_ratio"]] * width / multiple) * multiple
        return Shape(
            num_layers=point["layers"],
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=kv_heads or _fewest_kv_heads(heads, self.kv_groups[point["kv_group"]]),
            head_dim=head_dim,
            intermediate_size=max(multiple, inner),
            vocab_size=self.vocabs[point["vocab"]],
            tie_word_embeddings=self.tyings[point["tying"]],
            layer_sharing=self.sharings[point["sharing"]],
            qk_norm=self.qk_norms[point["qk_norm"]],
            max_seq_len=self.max_seq_len,
        )

    def _largest_width(self, point: Point) -> int | None:
        """The largest width that fits, or None.

        Sizes do not quite grow with the width, because heads may have to divide it and key/value heads the heads. Without
        either rule they do, so bisection over that gives an upper bound, from which every width is tried downwards.
        """
        step, quant = self._step(point), self._quant(point)

        def may_fit(steps: int) -> bool:
            return self.budget.fits(self._narrowest(point, steps * step), quant)

        if not may_fit(1):
            return None
        low, high = 1, 2
        while may_fit(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if may_fit(middle) else (low, middle)
        widths = (steps * step for steps in range(low, 0, -1))
        return next((width for width in widths if self.budget.fits(self._shape(point, width), quant)), None)

    def _filled(self, shape: Shape, quant: str) -> Shape:
        """``shape`` with what the budget still holds: first MLP columns up to MAX_MLP_RATIO, then whole layers."""
        multiple = self.width_multiple

        def wider(steps: int) -> Shape:
            return shape.replace(intermediate_size=shape.intermediate_size + steps * multiple)

        most = max(0, (int(MAX_MLP_RATIO * shape.hidden_size) - shape.intermediate_size) // multiple)
        columns = self._most_steps(wider, most, quant)
        wide = wider(columns)
        if columns < most:
            return wide

        def deeper(steps: int) -> Shape:
            return wide.replace(num_layers=wide.num_layers + steps)

        return deeper(self._most_steps(deeper, self.layers[1] - wide.num_layers, quant))

    def _most_steps(self, larger: Callable[[int], Shape], most: int, quant: str) -> int:
        """How many steps, at most ``most``, meet the budget; sizes grow with steps, but for a digit of a name or two."""
        if most <= 0:
            return 0
        needs = [self.budget.needs(larger(steps), quant) for steps in (0, most)]
        guess = most
        for name, limit in self.budget.limits.items():
            start, end = (need[name] for need in needs)
            if end > limit:
                guess = min(guess, (limit - start) * most // max(1, end - start))
        while guess > 0 and not self.budget.fits(larger(guess), quant):
            guess -= 1
        while guess < most and self.budget.fits(larger(guess + 1), quant):
            guess += 1
        return guess


def infeasible(space: Space) -> InfeasibleError:
    """The error for a budget below the smallest member of ``space``: what binds, by how much, and the nearest way out."""
    shape, quant = space.smallest.shape, space.smallest.quant
    over = space.budget.excesses(shape, quant)
    if not over:
        raise RuntimeError(f"Bug: {shape.text} {quant} meets the budget, yet no point of the space was decoded")
    worst = over[0]
    flag = f"--{worst.name} {worst.limit:,}"
    table = space.budget.table(shape, quant)[worst.name]
    if table > worst.limit:
        found = (
            f"{flag} is too small for a vocabulary of {shape.vocab_size:,}: its embedding alone takes {table:,} {worst.unit} "
            f"at the narrowest width ({shape.vocab_size:,} x {shape.hidden_size}), {table - worst.limit:,} more than the budget"
        )
    else:
        found = (
            f"{flag} is too small: the smallest shape of this search ({shape.text}, {quant}) takes {worst.need:,} "
            f"{worst.unit}, {worst.need - worst.limit:,} more than the budget"
        )
    budgets = " and ".join(f"--{excess.name} {excess.need} ({excess.need / excess.limit - 1:+.1%})" for excess in over)
    vocab, context = _largest_vocab(space), _largest_context(space)
    ways = [f"--vocab {vocab} at this budget"] if vocab else []
    ways += [f"--context {context} at this budget"] if context else []
    layers = _most_layers(space)
    ways += [f"--layers {layers} at this budget"] if layers else []
    ways.append(f"{budgets} with this vocabulary" if vocab else f"{budgets} (no vocabulary fits this budget)")
    return InfeasibleError(f"{found}. Nearest feasible: {', or '.join(ways)}. The nearest shape is {shape.text} in {quant}.")


def _largest_vocab(space: Space) -> int:
    """The largest vocabulary with which the smallest member meets the budget; 0 when there is none."""
    smallest = space.smallest
    low, high = 0, smallest.shape.vocab_size
    while high - low > 1:
        middle = (low + high) // 2
        fits = space.budget.fits(smallest.shape.replace(vocab_size=middle), smallest.quant)
        low, high = (middle, high) if fits else (low, middle)
    return low


def _most_layers(space: Space) -> int:
    """The most layers with which the smallest member meets the budget; 0 when there are none, or few were asked for anyway."""
    smallest, budget = space.smallest, space.budget
    if space.layers[0] <= LAYERS[0]:
        return 0
    depths = range(space.layers[0] - 1, 0, -1)
    fitting = (depth for depth in depths if budget.fits(smallest.shape.replace(num_layers=depth), smallest.quant))
    return next(fitting, 0)


def _largest_context(space: Space) -> int:
    """The most cached tokens with which the smallest member meets the budget; 0 when there are none, or none are limited."""
    smallest = space.smallest
    if space.budget.ram is None:
        return 0
    low, high = 0, space.budget.context
    while high - low > 1:
        middle = (low + high) // 2
        fits = replace(space.budget, context=middle).fits(smallest.shape, smallest.quant)
        low, high = (middle, high) if fits else (low, middle)
    return low


def _fewest_kv_heads(heads: int, group: int) -> int:
    return next(kv for kv in range(1, heads + 1) if heads % kv == 0 and heads // kv <= group)
