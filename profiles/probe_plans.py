"""Which models a profile times: enough of each kind to tell the terms of the latency model apart, in order of importance.

Weights and layers are told apart by equal bytes at different depths, caches and memory by size, the head by vocabulary,
attention by context, formats by one cache-resident and one memory-sized model each. When time runs out the rest is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepthin.engine.accounting import count_bytes, count_params
from deepthin.engine.shape import Shape
from deepthin.profiles.latency.runtimes import ENGINE, LLAMA_CPP, ONNXRUNTIME
from deepthin.profiles.probe_shapes import ProbeModel, random_shape

_SEED = 20_26
_ENGINE_FORMATS = ("q4_0", "q8_0", "f16", "q4_1", "q5_0", "f32", "q5_1", "bf16")
_PARAMS = (  # one model of each format from each; unlike shapes tell more of the terms than the same ones timed for longer
    (2e6, 8e6), (60e6, 160e6), (8e6, 25e6), (25e6, 60e6), (160e6, 320e6), (4e6, 16e6), (15e6, 40e6), (40e6, 100e6),
    (90e6, 300e6),
)  # fmt: skip
_LAYERS = ((24, 80), (2, 12), (2, 8), (12, 40), (16, 64))
_CONTEXTS = (2048, 512, 4096, 256, 1024)
_PROMPT_PRODUCTS = 1.5e9  # of a prompt, so that it takes some 50 ms in one thread
_PROMPT = (19, 256)  # tokens at least and at most; 19 is a few alone beyond a unit of four
_PROMPT_TURNS = (0, 1, 2, 3, 6)  # and half of the largest, for time
_MAX_MODEL_BYTES = 700_000_000

# shape, its format on llama.cpp and on onnxruntime, contexts, prompts. Every format at least once, heads of 32, 64 and 128, one
# to four query heads to a cached one, few wide layers and many narrow ones, from the caches and from memory
_PEER = (
    ("L=24,d=384,heads=6,kv=2,ff=1024,vocab=16384,tied", "q4_0", "q4_0", (0, 512), (48,)),
    ("L=4,d=256,heads=4,kv=2,ff=768,vocab=4096,tied", "q5_0", "q4_0", (0, 1024), (64, 256)),
    ("L=48,d=128,heads=4,kv=2,ff=384,vocab=2048,tied", "q8_0", "q8_0", (0, 512), (48, 160)),
    ("L=4,d=1024,heads=8,kv=2,ff=2816,vocab=32000,tied", "q4_1", "f32", (0, 512), (32,)),
    ("L=12,d=640,heads=10,kv=5,ff=1792,vocab=8192,tied", "q5_1", "q4_1", (0, 256), (32,)),
    ("L=8,d=256,heads=8,kv=8,ff=1024,vocab=8192,tied", "f32", "f32", (0, 512), (96,)),
    ("L=10,d=512,heads=4,kv=4,ff=1536,vocab=16384,tied", "f16", "q8_0", (0, 256), (48,)),
    ("L=32,d=320,heads=5,kv=5,ff=864,vocab=4096,tied", "bf16", "q4_1", (0, 256), (48,)),
    ("L=2,d=768,heads=12,kv=4,ff=2048,vocab=65536,tied", "q4_0", "q4_0", (0,), (32,)),
    ("L=20,d=768,heads=12,kv=4,ff=2048,vocab=32000,tied", "q8_0", "q8_0", (0, 256), (24,)),
)
_KIT = {LLAMA_CPP: (0, 1, 2, 9, 4, 6), ONNXRUNTIME: (1, 2, 5, 9)}  # rows of _PEER; ten files in all


def engine_plan() -> list[ProbeModel]:
    """Models for our own engine, every format in each round of sizes."""
    generator = np.random.Generator(np.random.PCG64(_SEED))
    found = []
    for turn, params in enumerate(_PARAMS):
        for index, quant in enumerate(_ENGINE_FORMATS):
            layers = _LAYERS[(turn + index) % len(_LAYERS)]
            shape = random_shape(generator, params, layers)
            while count_bytes(shape, quant).total > _MAX_MODEL_BYTES:
                shape = random_shape(generator, params, layers)
            context = _CONTEXTS[(turn + 2 * index) % len(_CONTEXTS)]
            tokens = round(min(max(_PROMPT_PRODUCTS / count_params(shape).block_matrices, _PROMPT[0]), _PROMPT[1]))
            found.append(
                ProbeModel(
                    shape, quant, (0, context), (tokens,) if turn in _PROMPT_TURNS or (turn == 4 and index % 2 == 0) else ()
                )
            )
    return found


def peer_plan(runtime: str) -> list[ProbeModel]:
    """At most ten models for a peer, which needs each as a file."""
    column = {LLAMA_CPP: 1, ONNXRUNTIME: 2}[runtime]
    return [ProbeModel(Shape.parse(str(row[0])), str(row[column]), row[3], row[4]) for row in _PEER]


KIT_PLAN = {runtime: [peer_plan(runtime)[row] for row in rows] for runtime, rows in _KIT.items()}


def plan_of(runtime: str) -> Sequence[ProbeModel]:
    """What is timed on ``runtime``."""
    return engine_plan() if runtime == ENGINE else peer_plan(runtime)
