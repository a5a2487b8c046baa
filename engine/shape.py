"""The shape of a decoder-only language model: a frozen record, its text form, and checks. No arithmetic on sizes here.

L layers   D hidden size   H query heads   K key/value heads   E head dim   F MLP width   V vocabulary   S context limit
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from deepthin.engine.errors import ShapeError
from deepthin.engine.rope_scaling import RopeScaling

MLP_KINDS = ("swiglu", "gelu", "relu2")  # swiglu has three matrices, the others two
_TEXT_KEYS = {
    "L": "num_layers",
    "d": "hidden_size",
    "heads": "num_heads",
    "kv": "num_kv_heads",
    "head_dim": "head_dim",
    "ff": "intermediate_size",
    "vocab": "vocab_size",
    "mlp": "mlp",
    "share": "layer_sharing",
    "ctx": "max_seq_len",
    "eps": "rms_norm_eps",
    "theta": "rope_theta",
    "rope": "rope_scaling",
    "nope": "nope_every",
}
_FLAGS = {
    "tied": ("tie_word_embeddings", True),
    "untied": ("tie_word_embeddings", False),
    "qk_norm": ("qk_norm", True),
    "qkv_bias": ("qkv_bias", True),
}
_LATER_FIELDS = ("qkv_bias", "nope_every", "rope_scaling")  # in JSON only where they say something, so that old readers cope
_REQUIRED = ("L", "d", "heads", "ff", "vocab")
_LIMITS = {  # generous ceilings that keep every product far inside 64 bits
    "num_layers": 4096,
    "hidden_size": 1 << 20,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "layer_sharing": 64,
    "max_seq_len": 1 << 24,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything that fixes a model's tensors and their use, and nothing about how they are stored.

    ``num_layers`` counts blocks with weights of their own; each runs ``layer_sharing`` times in a row.
    ``num_kv_heads`` defaults to ``num_heads`` and ``head_dim`` to ``hidden_size // num_heads``.
    ``qkv_bias`` adds a bias to queries, keys and values. With ``nope_every`` = n > 0, blocks n - 1, 2n - 1, ... have no
    rotary embedding. ``rope_scaling`` stretches it over more positions.

    Raises:
        ShapeError: a number is out of range or two of them contradict each other.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    num_kv_heads: int = 0
    head_dim: int = 0
    tie_word_embeddings: bool = True
    mlp: str = "swiglu"
    qk_norm: bool = False
    layer_sharing: int = 1
    max_seq_len: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    nope_every: int = 0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        """Fill the two derived defaults, then check every field."""
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim == 0 and self.num_heads > 0:
            if self.hidden_size % self.num_heads:
                raise ShapeError(
                    f"shape: d={self.hidden_size} is no multiple of heads={self.num_heads}, so head_dim has no default; "
                    f"write head_dim= or change heads"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise ShapeError(f"shape: {name} is {value!r}, but a whole number from 1 to {limit} is needed")
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"shape: kv={self.num_kv_heads} does not divide heads={self.num_heads}; grouped-query attention needs whole "
                f"groups, so try one of {[k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]}"
            )
        if self.head_dim % 2:
            raise ShapeError(f"shape: head_dim={self.head_dim} is odd, but rotary embeddings turn pairs; use an even number")
        if self.mlp not in MLP_KINDS:
            raise ShapeError(f"shape: mlp={self.mlp!r} is unknown; use one of {', '.join(MLP_KINDS)}")
        if not 0.0 <= self.rms_norm_eps < 1.0:
            raise ShapeError(f"shape: eps={self.rms_norm_eps} is outside [0, 1)")
        if not 1.0 <= self.rope_theta < 1e12:
            raise ShapeError(f"shape: theta={self.rope_theta} is outside [1, 1e12)")
        if type(self.nope_every) is not int or self.nope_every == 1 or not 0 <= self.nope_every <= _LIMITS["num_layers"]:
            raise ShapeError(f"shape: nope={self.nope_every!r}, but 0 (every block has positions) or a number from 2 is needed")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ShapeError(f"shape: rope_scaling is {self.rope_scaling!r}; a RopeScaling is needed")

    @property
    def q_size(self) -> int:
        """Width of all query heads together, H·E."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (values likewise), K·E."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_executed_layers(self) -> int:
        """Blocks run per token: unique blocks times their sharing."""
        return self.num_layers * self.layer_sharing

    def has_rope(self, block: int) -> bool:
        """Whether queries and keys of ``block`` are turned by their position."""
        return not self.nope_every or (block + 1) % self.nope_every != 0

    @property
    def unrolled(self) -> Self:
        """The shape that runs each block once and computes the same: shared blocks are written out one after another.

        With layers that have no positions there is none, since those are counted in blocks with weights of their own.
        """
        if self.layer_sharing == 1 or self.nope_every:
            return self
        return self.replace(num_layers=self.num_executed_layers, layer_sharing=1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, for example ``L=30,d=576,heads=9,kv=3,ff=1536,vocab=49152,tied``.

        Raises:
            ShapeError: an unknown, repeated, missing or non-numeric item; the message lists the known ones.
        """
        fields: dict[str, Any] = {}
        for raw in text.split(","):
            item = raw.strip()
            key, has_value, value = item.partition("=")
            if not has_value and item in _FLAGS:
                name, setting = _FLAGS[item]
            elif has_value and key in _TEXT_KEYS:
                name, setting = _TEXT_KEYS[key], _number(key, value)
            else:
                known = ", ".join([*(k + "=" for k in _TEXT_KEYS), *_FLAGS])
                raise ShapeError(f"shape {text!r}: {item!r} is not understood; the items are {known}")
            if name in fields:
                raise ShapeError(f"shape {text!r}: {item!r} sets {name} a second time")
            fields[name] = setting
        missing = [key for key in _REQUIRED if _TEXT_KEYS[key] not in fields]
        if missing:
            raise ShapeError(f"shape {text!r}: {', '.join(missing)} missing; needed are {', '.join(_REQUIRED)}")
        return cls(**fields)

    @property
    def text(self) -> str:
        """The canonical text form: sizes always, everything else only where it differs from its default."""
        parts = [
            f"L={self.num_layers}",
            f"d={self.hidden_size}",
            f"heads={self.num_heads}",
            f"kv={self.num_kv_heads}",
        ]
        if self.head_dim * self.num_heads != self.hidden_size:
            parts.append(f"head_dim={self.head_dim}")
        parts += [f"ff={self.intermediate_size}", f"vocab={self.vocab_size}"]
        parts.append("tied" if self.tie_word_embeddings else "untied")
        if self.mlp != "swiglu":
            parts.append(f"mlp={self.mlp}")
        parts += [name for name in ("qk_norm", "qkv_bias") if getattr(self, name)]
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for key, name in (
            ("share", "layer_sharing"),
            ("ctx", "max_seq_len"),
            ("eps", "rms_norm_eps"),
            ("theta", "rope_theta"),
        ):
            if getattr(self, name) != defaults[name]:
                parts.append(f"{key}={getattr(self, name)!r}")
        if self.rope_scaling is not None:
            parts.append(f"rope={self.rope_scaling.text}")
        if self.nope_every:
            parts.append(f"nope={self.nope_every}")
        return ",".join(parts)

    def to_json(self) -> dict[str, Any]:
        """All fields by name, plus ``text``; what came after the first version only where it is not off."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name not in _LATER_FIELDS or value}
        return {**fields, "text": self.text}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_json`; unknown keys are refused.

        Raises:
            ShapeError: a key is unknown or a value has the wrong type.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        fields = {k: v for k, v in document.items() if k != "text"}
        unknown = sorted(set(fields) - names)
        if unknown:
            raise ShapeError(f"shape JSON: unknown key {unknown[0]!r}; the keys are {', '.join(sorted(names))}")
        if isinstance(fields.get("rope_scaling"), Mapping):
            fields["rope_scaling"] = RopeScaling.from_json(fields["rope_scaling"])
        try:
            return cls(**fields)
        except TypeError as error:
            raise ShapeError(
                f"shape JSON: {error}; needed are num_layers, hidden_size, num_heads, intermediate_size, vocab_size"
            ) from error

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed and all checks run again."""
        return dataclasses.replace(self, **changes)


def _number(key: str, value: str) -> Any:
    if key == "mlp":
        return value
    if key == "rope":
        return RopeScaling.parse(value)
    try:
        return float(value) if key in ("eps", "theta") else int(value)
    except ValueError:
        raise ShapeError(f"shape: {key}={value!r} is no number") from None
