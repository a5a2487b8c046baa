"""Everything that decides what a search does; two runs with equal configurations and measurements give equal fronts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepthin._version import VERSION
from deepthin.engine.errors import UsageError
from deepthin.engine.known_shapes import known_shape
from deepthin.search.budget import Budget
from deepthin.search.objectives import Limits
from deepthin.search.quality.model import QualityModel, check_tokens
from deepthin.search.quality.quantisation import GROUP_WISE
from deepthin.search.quality.shape_laws import REFERENCE_TOKENS
from deepthin.search.sampler import CHOICES, SamplerChoice, choose_sampler
from deepthin.search.space import (
    HEAD_DIMS,
    HEAD_QUANTS,
    KV_GROUPS,
    LAYERS,
    MLP_RATIOS,
    QK_NORMS,
    QUANTS,
    QUERY_RATIOS,
    SHARINGS,
    TYINGS,
    VOCABS,
    Space,
)
from deepthin.search.targets import DEFAULT_TARGETS, Targets

DEFAULT_PARAMS = 30_000_000  # used when no budget is given
DEFAULT_TRIALS = 48  # about a second for each new shape, up to three while other processes disturb every measurement
DEFAULT_CONTEXT = 512
DEFAULT_PLATEAU = 40
_MAX_TRIALS = 10_000
_MIN_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Settings of a search.

    Attributes:
        params: most parameters, embedding included; :data:`DEFAULT_PARAMS` when no limit is given.
        bytes: most bytes of the GGUF file.
        ram: most bytes of weights, cache at ``context`` tokens, and scratch.
        targets: what every shape must suit.
        price_targets: targets whose file counts against ``bytes`` as it would be, fallbacks included.
        layers: smallest and largest L.
        mlp_ratios: MLP width over D to choose from, before what is left of the budget is added.
        tyings: whether the head may be, or must be, the embedding.
        sharings: how often each block may run in a row.
        qk_norms: whether queries and keys may be, or must be, normalised.
        vocabs: vocabulary sizes to choose from; one fixes it.
        head_dims: head dims to choose from.
        query_ratios: width of all query heads over D, to choose from.
        kv_groups: most query heads per key/value head, to choose from.
        quants: body formats to choose from.
        head_quants: formats of embedding and head to choose from; none takes what goes with the body.
        trials: candidates to propose, measured or failed.
        seed: start of every random choice.
        plateau: steps without progress of the front after which the search stops early; 0 never does.
        sampler: how points are proposed (``search/sampler.py``); empty for its rule.
        context: cached tokens at which a token is timed.
        threads: threads the measurement uses, or None where the caller lets it choose; recorded, not acted on here.
        tokens: training tokens the prediction is made for.
        vocab_term: whether the prediction charges a vocabulary that does not fit the body.
        int4_multiplier: 4-bit damage relative to per-row GPTQ.
        max_ms_per_token: optional limit on the time per token.
        max_ttft_ms: optional limit on the time to the first token of a prompt, where costs have one.
        max_kv_bytes: optional limit on the F16 cache at ``context`` tokens.
        baseline: public shape that picks are compared with; empty for the nearest in parameters.
        start: shapes with formats ("SHAPE QUANT") whose likes are tried first; ``search/warm_start.py`` finds them.
        machine: what the times were taken on; a run folder belongs to one machine.
        profile: where times are predicted: which profile, runtime and threads; empty where they are measured.

    Raises:
        UsageError: a value is out of range.
    """

    params: int | None = None
    bytes: int | None = None
    ram: int | None = None
    targets: tuple[str, ...] = DEFAULT_TARGETS
    price_targets: tuple[str, ...] = ()
    layers: tuple[int, int] = LAYERS
    mlp_ratios: tuple[float, ...] = MLP_RATIOS
    tyings: tuple[bool, ...] = TYINGS
    sharings: tuple[int, ...] = SHARINGS
    qk_norms: tuple[bool, ...] = QK_NORMS
    vocabs: tuple[int, ...] = VOCABS
    head_dims: tuple[int, ...] = HEAD_DIMS
    query_ratios: tuple[float, ...] = QUERY_RATIOS
    kv_groups: tuple[int, ...] = KV_GROUPS
    quants: tuple[str, ...] = QUANTS
    head_quants: tuple[str, ...] = HEAD_QUANTS
    trials: int = DEFAULT_TRIALS
    seed: int = 0
    plateau: int = DEFAULT_PLATEAU
    sampler: str = ""
    context: int = DEFAULT_CONTEXT
    threads: int | None = None
    tokens: float = REFERENCE_TOKENS
    vocab_term: bool = True
    int4_multiplier: float = GROUP_WISE
    max_ms_per_token: float | None = None
    max_ttft_ms: float | None = None
    max_kv_bytes: int | None = None
    baseline: str = ""
    start: tuple[str, ...] = ()
    machine: str = ""
    profile: str = ""

    def __post_init__(self) -> None:
        """Fill in the default budget and check every field by building what it is used for."""
        if self.params is None and self.bytes is None and self.ram is None:
            object.__setattr__(self, "params", DEFAULT_PARAMS)
        for name, low, high in (
            ("trials", 1, _MAX_TRIALS),
            ("plateau", 0, _MAX_TRIALS),
            ("seed", 0, 2**63 - 1),
            ("context", 0, 1 << 24),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"--{name} is {value!r}, but a whole number from {low} to {high} is needed")
        if self.sampler and self.sampler not in CHOICES:
            raise UsageError(f"sampler {self.sampler!r} is unknown; use one of {', '.join(CHOICES)}")
        if self.baseline:
            known_shape(self.baseline)
        check_tokens(self.tokens)
        if not 0 <= self.int4_multiplier <= 10:
            raise UsageError(f"4-bit multiplier {self.int4_multiplier!r}: a number from 0 to 10 is needed, for example 0.5")
        _ = self.space, self.limits

    @property
    def budget(self) -> Budget:
        """The hard limits."""
        targets = Targets(self.targets, self.price_targets)
        return Budget(self.params, self.bytes, self.ram, self.context, targets, self.seed)

    @property
    def space(self) -> Space:
        """The shapes that may be proposed."""
        return Space(
            self.budget,
            layers=self.layers,
            mlp_ratios=self.mlp_ratios,
            tyings=self.tyings,
            query_ratios=self.query_ratios,
            head_quants=self.head_quants,
            vocabs=self.vocabs,
            head_dims=self.head_dims,
            kv_groups=self.kv_groups,
            sharings=self.sharings,
            qk_norms=self.qk_norms,
            quants=self.quants,
            max_seq_len=max(_MIN_SEQ_LEN, self.context),
        )

    @property
    def choice(self) -> SamplerChoice:
        """How points are proposed, and why."""
        if self.sampler:
            return SamplerChoice(self.sampler, "as asked")
        return choose_sampler(self.space.num_points, self.trials)

    @property
    def limits(self) -> Limits:
        """The limits that steer rather than bind."""
        return Limits(self.max_ms_per_token, self.max_ttft_ms, self.max_kv_bytes, self.context)

    @property
    def quality(self) -> QualityModel:
        """The prediction."""
        return QualityModel(self.tokens, self.vocab_term, self.int4_multiplier)

    def to_json(self) -> dict[str, Any]:
        """All fields by name, with the version that gives them their meaning."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {"schema": "deepthin/search-config/3", "version": VERSION, **fields}
