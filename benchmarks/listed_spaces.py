"""Search spaces written out in full: every shape scored, so that the true front is known and a search costs only its sampler.

A listing looks up what a search would compute (decoding, loss, time), nothing else: proposals, their order and results are
those of ``deepthin search`` with the same settings.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import deepthin.engine
import deepthin.search
from deepthin.engine.shape import Shape
from deepthin.profiles.schema import TokenCost
from deepthin.search.config import SearchConfig
from deepthin.search.cost import Cost
from deepthin.search.hypervolume import Pair, corner_of, hypervolume, staircase
from deepthin.search.objectives import Scored
from deepthin.search.quality.model import Quality, QualityModel
from deepthin.search.space import Candidate, Space

CostOf = Callable[[Shape, str], TokenCost | Cost]
_DECODING = {
    f"{name}.py" for name in ("space", "budget", "file_sizes", "targets", "memory", "accounting", "tensors", "formats")
}
_PLACES = 9  # digits of losses and times that a listing's digest looks at


@dataclass(frozen=True)
class SpaceSettings:
    """A space to list.

    Attributes:
        about: which choices it leaves open, in words.
        config: fields of :class:`SearchConfig`.
        roughness: relative standard deviation of a fixed error by shape on top of the times; sums of few terms are smooth,
            from which a sampler could profit, while measured times are not.
    """

    about: str
    config: Mapping[str, Any]
    roughness: float = 0.0


class Listing:
    """Every distinct candidate of a space, scored.

    Args:
        name: of the space.
        settings: what it holds.
        cost: what a shape takes.
        folder: where decoded points are kept for the next time, which takes a minute otherwise; None keeps nothing.
    """

    def __init__(self, name: str, settings: SpaceSettings, cost: CostOf, folder: Path | None = None) -> None:
        self.name, self.settings = name, settings
        self._cost = cost
        plain = SearchConfig(**settings.config)
        space, quality = plain.space, plain.quality
        self.decoded = _decoded(space, plain, folder)
        candidates = {candidate.key: candidate for candidate in self.decoded.values()}
        self.qualities = {key: quality.predict(one.shape, one.quant) for key, one in candidates.items()}
        self.costs = {key: self.cost(one.shape, one.quant) for key, one in candidates.items()}
        scored = [Scored(0, one, self.qualities[key], self.costs[key]) for key, one in candidates.items()]
        self.pairs = {one.candidate.key: pair_of(one) for one in scored}
        self.front = staircase(list(self.pairs.values()))
        self.corner = corner_of(self.front)
        self.volume = hypervolume(self.front, self.corner)

    @property
    def digest(self) -> str:
        """Of all candidates with their losses and times: equal listings, comparable results."""
        rows = sorted((key, round(loss, _PLACES), round(time, _PLACES)) for key, (loss, time) in self.pairs.items())
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]

    def cost(self, shape: Shape, quant: str) -> Cost:
        """What ``shape`` takes, roughness included; shapes outside the space (public ones) are costed alike."""
        found = Cost.of(self._cost(shape, quant))
        if not self.settings.roughness:
            return found
        share = (zlib.crc32(f"{shape.text} {quant}".encode()) + 0.5) / 2**32
        factor = math.exp(self.settings.roughness * NormalDist().inv_cdf(share))
        return replace(found, decode=found.decode.scaled(factor, "s"))

    def config(self, **changes: Any) -> SearchConfig:
        """Settings of a search in this space that looks everything up."""
        config = _ListedConfig(**self.settings.config, **changes)
        space = _ListedSpace(**{one.name: getattr(config.space, one.name) for one in fields(Space)})
        quality = _ListedQuality(**{one.name: getattr(config.quality, one.name) for one in fields(QualityModel)})
        for owner, name, value in (
            (space, "decoded", self.decoded),
            (quality, "known", {(one.shape, one.quant): self.qualities[one.key] for one in self.decoded.values()}),
            (config, "listed", (space, quality)),
        ):
            object.__setattr__(owner, name, value)  # they are frozen
        return config

    def share(self, pairs: Iterable[Pair]) -> float:
        """Share of the true hypervolume that the front of ``pairs`` has."""
        return hypervolume(list(pairs), self.corner) / self.volume


def _decoded(space: Space, config: SearchConfig, folder: Path | None) -> dict[tuple[int, ...], Candidate]:
    """Every point of ``space`` with its candidate, from a file of equal settings and equal source code if there is one."""
    points = [tuple(point.values()) for point in space.points()]
    names = [dimension.name for dimension in space.dimensions]
    path = None if folder is None else folder / f"{_source_digest(config)}.json"
    if path is not None and path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
        candidates = [Candidate(Shape.parse(shape), quant) for shape, quant in document["candidates"]]
        return dict(zip(points, (candidates[index] for index in document["points"]), strict=True))
    decoded = {values: space.decode(dict(zip(names, values, strict=True))) for values in points}
    if path is not None:
        places: dict[Candidate, int] = {}
        indices = [places.setdefault(decoded[values], len(places)) for values in points]
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"candidates": [[one.shape.text, one.quant] for one in places], "points": indices})
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    return decoded


def _source_digest(config: SearchConfig) -> str:
    """Of the settings, and of the code that decodes."""
    digest = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode())
    for package in (deepthin.engine, deepthin.search):
        for path in sorted(Path(package.__path__[0]).glob("*.py")):
            if path.name in _DECODING:
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def pair_of(scored: Scored) -> Pair:
    """Loss, and log of the milliseconds per 1,000 characters."""
    return scored.loss, math.log(scored.time)


class _ListedSpace(Space):
    """Decodes by looking up."""

    decoded: Mapping[tuple[int, ...], Candidate]

    def decode(self, point: Mapping[str, int]) -> Candidate:
        """The candidate of ``point``."""
        return self.decoded[tuple(point[dimension.name] for dimension in self.dimensions)]


class _ListedQuality(QualityModel):
    """Predicts by looking up; shapes that are not listed as ever."""

    known: Mapping[tuple[Shape, str], Quality] = {}

    def predict(self, shape: Shape, quant: str) -> Quality:
        """The prediction for ``shape``."""
        found = self.known.get((shape, quant))
        return super().predict(shape, quant) if found is None else found


class _ListedConfig(SearchConfig):
    """Hands out a listing's space and quality model."""

    listed: tuple[Space, QualityModel] | None = None

    @property
    def space(self) -> Space:
        """The listed space, once there is one."""
        return super().space if self.listed is None else self.listed[0]

    @property
    def quality(self) -> QualityModel:
        """The listed predictions, once there are some."""
        return super().quality if self.listed is None else self.listed[1]
