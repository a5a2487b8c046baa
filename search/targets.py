"""Which targets every shape of a search must suit (``--targets``), and which ones only have their price (``--price-targets``).

The rules themselves stand in ``engine/targets.py``. A hard target's rules are met by construction: choices it refuses leave
the space. A priced target counts against the byte budget with what its file really weighs: fallbacks of K-quants, shared
blocks written out in GGUF, scales and floats in ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from deepthin.engine.architectures import LLAMA, QWEN3
from deepthin.engine.errors import UsageError
from deepthin.engine.shape import Shape
from deepthin.engine.targets import K_QUANT_BLOCK, target_verdicts
from deepthin.search.file_sizes import gguf_bytes
from deepthin.search.k_quants import k_quant_size
from deepthin.search.onnx_size import onnx_bytes

K_QUANTS = "gguf-k-quants"
_RULES: dict[str, tuple[str, ...]] = {  # target -> keys of engine/targets.py that must agree
    "hf": ("hf",),
    "onnx": ("onnx",),
    "gguf": ("gguf-f16",),
    K_QUANTS: ("gguf-k-quants",),
    "transformersjs": ("hf", "onnx"),  # it takes the class from the Hugging Face configuration and runs the ONNX file
}
TARGETS = tuple(_RULES)
DEFAULT_TARGETS = ("hf", "onnx", "gguf")  # what a search exports
_WRITTEN_OUT = ("hf", "gguf", K_QUANTS)  # files that know no shared blocks


def _gguf_price(shape: Shape, quant: str, name: str) -> int:
    return gguf_bytes(shape.unrolled, quant, name)


def _onnx_price(shape: Shape, quant: str, name: str) -> int:
    """A format that ONNX has no operators for is exported as f32."""
    return onnx_bytes(shape, quant) or onnx_bytes(shape, "f32") or 0


def _k_quants_price(shape: Shape, quant: str, name: str) -> int:
    return k_quant_size(shape.unrolled).bytes


_PRICES: dict[str, Callable[[Shape, str, str], int]] = {"gguf": _gguf_price, K_QUANTS: _k_quants_price, "onnx": _onnx_price}
PRICED = tuple(_PRICES)


@dataclass(frozen=True, slots=True)
class Targets:
    """What shapes are for.

    Attributes:
        hard: targets that must take every shape.
        priced: targets whose file must meet the byte budget too.

    Raises:
        UsageError: a target is unknown, or has no price.
    """

    hard: tuple[str, ...] = DEFAULT_TARGETS
    priced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check names."""
        for name in (*self.hard, *self.priced):
            if name not in _RULES:
                raise UsageError(f"target {name!r} is unknown; use one of {', '.join(TARGETS)}")
        for name in self.priced:
            if name not in _PRICES:
                raise UsageError(
                    f"target {name!r} has no price: it takes a shape or refuses it, at the same size; "
                    f"name it with --targets. Priced can be {', '.join(PRICED)}"
                )

    @property
    def width_multiple(self) -> int:
        """What every row must be a multiple of, for K-quants beyond the usual 32."""
        return K_QUANT_BLOCK if K_QUANTS in self.hard else 1

    def takes_heads(self, width: int, heads: int, qk_norm: bool) -> bool:
        """Whether so many heads suit a stream of ``width`` where all heads together need not be as wide."""
        needs_hf = any("hf" in _RULES[name] for name in self.hard)
        architecture = QWEN3 if qk_norm else LLAMA
        return not (needs_hf and architecture.whole_heads) or width % heads == 0

    def refusal(self, shape: Shape) -> str:
        """Which hard target refuses ``shape`` and why, or an empty string."""
        verdicts = target_verdicts(shape)
        for name in self.hard:
            if shape.layer_sharing > 1 and name in _WRITTEN_OUT and name not in self.priced:
                hint = f"; --price-targets {name} counts what is written" if name in _PRICES else ""
                return (
                    f"{name}: share={shape.layer_sharing} is written out as {shape.num_executed_layers} blocks, "
                    f"while the budget counts a shared block once{hint}"
                )
            for rule in _RULES[name]:
                if not verdicts[rule].ok:
                    return f"{name}: {verdicts[rule].why}"
        return ""

    def priced_bytes(self, shape: Shape, quant: str, name: str) -> int:
        """The largest file of the priced targets, of a model called ``name``; 0 when there is none.

        GGUF to the byte, K-quants without file headers, ONNX within 0.5 %.
        """
        return max((_PRICES[target](shape, quant, name) for target in self.priced), default=0)

    def to_json(self) -> dict[str, Any]:
        """Both lists by name."""
        return {"hard": list(self.hard), "priced": list(self.priced)}


def kept(name: str, values: Iterable[Any], targets: Targets, probe: Callable[[Any], Shape]) -> tuple[Any, ...]:
    """The ``values`` of one choice that no hard target refuses.

    Args:
        name: what is chosen, for the message.
        values: at least one.
        targets: the rules.
        probe: makes a shape with one of the values, otherwise plain.

    Raises:
        UsageError: nothing is left; the message names the target and its rule.
    """
    reasons = {value: targets.refusal(probe(value)) for value in values}
    left = tuple(value for value, why in reasons.items() if not why)
    if not left:
        value, why = next(iter(reasons.items()))
        raise UsageError(f"search space: no {name} is left for --targets {','.join(targets.hard)} ({value!r} by {why})")
    return left
