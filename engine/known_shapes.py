"""Shapes of public models by name, for comparison and as starting points.

Only what decides tensors and their sizes: rotary base and scaling, epsilon and context are :class:`Shape`'s defaults, so
a random model made from one of these is a size twin, not a checkpoint's configuration. ``accounting_only`` marks
architectures with parts this engine does not run (other norms or gates); their parameters still count right within 0.2 %.

Every row names its source and how sure it is: ``file`` read from the cited repository, ``partly`` some numbers recalled,
``arith`` recalled and confirmed by arithmetic against the published total.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from deepthin.engine.accounting import count_params
from deepthin.engine.errors import UsageError
from deepthin.engine.shape import Shape

_MOBILELLM = "facebookresearch/MobileLLM@8b9769d configs"
_MOBILELLM_R1 = "facebookresearch/MobileLLM-R1@cfc816c README"
_LITGPT = "Lightning-AI/litgpt@2685705 litgpt/config.py"
_QKN = "query and key norms without weights"
_GEMMA = "GeGLU gate, four norms a block"
_NEOX = "LayerNorm, biases, parallel blocks"
_CARD = "published configuration or model card"


@dataclass(frozen=True, slots=True)
class KnownShape:
    """A public model's shape.

    Attributes:
        name: lower-case name used on the command line.
        shape: its numbers.
        published_params: the total its publisher states, rounded as stated.
        source: where the numbers were read.
        verified: ``file``, ``partly`` or ``arith``; see the module text.
        accounting_only: why this engine cannot run it, or empty.
    """

    name: str
    shape: Shape
    published_params: int
    source: str
    verified: str = "file"
    accounting_only: str = ""

    @property
    def params(self) -> int:
        """Exact parameters of ``shape`` by our accounting."""
        return count_params(self.shape).total


_ROWS: tuple[tuple[str, str, float, str, str, str], ...] = (
    ("mobilellm-125m", "L=30,d=576,heads=9,kv=3,ff=1536,vocab=32000,tied", 124.6e6, _MOBILELLM, "file", ""),
    ("mobilellm-350m", "L=32,d=960,heads=15,kv=5,ff=2560,vocab=32000,tied", 345.3e6, _MOBILELLM, "file", ""),
    ("mobilellm-600m", "L=40,d=1152,heads=18,kv=6,ff=3072,vocab=32000,tied", 603e6, _MOBILELLM, "file", ""),
    ("mobilellm-1b", "L=54,d=1280,heads=20,kv=5,ff=3584,vocab=32000,tied", 1005e6, _MOBILELLM, "file", ""),
    ("mobilellm-r1-140m", "L=15,d=576,heads=9,kv=3,ff=2048,vocab=128256,tied", 140e6, _MOBILELLM_R1, "file", _QKN),
    ("mobilellm-r1-360m", "L=15,d=1024,heads=16,kv=4,ff=4096,vocab=128256,tied", 359e6, _MOBILELLM_R1, "file", _QKN),
    ("mobilellm-r1-950m", "L=22,d=1536,heads=24,kv=6,ff=6144,vocab=128256,tied", 949e6, _MOBILELLM_R1, "file", _QKN),
    ("smollm2-135m", "L=30,d=576,heads=9,kv=3,ff=1536,vocab=49152,tied", 134.5e6, _LITGPT, "file", ""),
    ("smollm2-360m", "L=32,d=960,heads=15,kv=5,ff=2560,vocab=49152,tied", 361.8e6, _LITGPT, "file", ""),
    ("smollm2-1.7b", "L=24,d=2048,heads=32,ff=8192,vocab=49152,tied", 1710e6, _LITGPT, "partly", ""),
    ("tinyllama-1.1b", "L=22,d=2048,heads=32,kv=4,ff=5632,vocab=32000,untied", 1100e6, _LITGPT, "file", ""),
    ("llama-3.2-1b", "L=16,d=2048,heads=32,kv=8,ff=8192,vocab=128256,tied", 1235.8e6, _LITGPT, "file", ""),
    ("baguettotron", "L=80,d=576,heads=9,kv=3,ff=1536,vocab=65536,tied", 321e6, _CARD, "arith", ""),
    ("monad", "L=64,d=256,heads=4,ff=768,vocab=8192,tied", 56.7e6, _CARD, "arith", ""),
    ("qwen2.5-0.5b", "L=24,d=896,heads=14,kv=2,ff=4864,vocab=151936,tied,qkv_bias", 494e6, _LITGPT, "file", ""),
    ("qwen3-0.6b", "L=28,d=1024,heads=16,kv=8,head_dim=128,ff=3072,vocab=151936,tied,qk_norm", 596e6, _LITGPT, "file", ""),
    ("gemma-3-270m", "L=18,d=640,heads=4,kv=1,head_dim=256,ff=2048,vocab=262144,tied,qk_norm", 268.1e6, _CARD, "arith", _GEMMA),
    ("gemma-3-1b", "L=26,d=1152,heads=4,kv=1,head_dim=256,ff=6912,vocab=262144,tied,qk_norm", 1000e6, _LITGPT, "file", _GEMMA),
    ("pythia-70m", "L=6,d=512,heads=8,ff=2048,vocab=50304,untied,mlp=gelu", 70.4e6, _LITGPT, "file", _NEOX),
    ("pythia-160m", "L=12,d=768,heads=12,ff=3072,vocab=50304,untied,mlp=gelu", 162.3e6, _LITGPT, "file", _NEOX),
    ("pythia-410m", "L=24,d=1024,heads=16,ff=4096,vocab=50304,untied,mlp=gelu", 405.3e6, _LITGPT, "file", _NEOX),
    ("pythia-1b", "L=16,d=2048,heads=8,ff=8192,vocab=50304,untied,mlp=gelu", 1011.8e6, _LITGPT, "file", _NEOX),
)  # fmt: skip


@cache
def known_shapes() -> dict[str, KnownShape]:
    """All rows by name, in table order."""
    return {
        name: KnownShape(name, Shape.parse(text), int(published), source, verified, note)
        for name, text, published, source, verified, note in _ROWS
    }


def known_shape(name: str) -> KnownShape:
    """The public model called ``name`` (case does not matter).

    Raises:
        UsageError: no such name; the message lists the known ones.
    """
    try:
        return known_shapes()[name.lower()]
    except KeyError:
        raise UsageError(f"shape name {name!r} is unknown; known are {', '.join(known_shapes())}") from None


def nearest_known(params: int) -> KnownShape:
    """The public model of the kind this engine runs whose total parameters are nearest to ``params`` (by ratio)."""
    runnable = [known for known in known_shapes().values() if not known.accounting_only]
    return min(runnable, key=lambda known: max(known.params, params) / max(1, min(known.params, params)))
