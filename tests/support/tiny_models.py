"""Small models with weights large enough that every mistake moves the logits."""

from __future__ import annotations

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.engine.formats import format_named
from deepthin.engine.model import Model, Tensor
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import stored_format, tensor_specs

# Each covers something the others do not; widths are multiples of 32 so that every format fits.
TINY_SHAPES = {
    "plain": "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied,ctx=64",  # head_dim 16
    "wide_heads": "L=2,d=96,heads=4,kv=1,head_dim=32,ff=160,vocab=101,untied,ctx=64,theta=500000.0",  # heads * head_dim > d
    "one_group": "L=3,d=128,heads=2,kv=2,ff=96,vocab=128,tied,ctx=64,eps=1e-06",  # head_dim 64, no GQA
    "odd_width": "L=2,d=160,heads=5,kv=5,head_dim=48,ff=224,vocab=67,untied,ctx=64",  # nothing divides 64
    "rotary_apart": "L=2,d=96,heads=4,kv=2,ff=128,vocab=80,tied,ctx=64",  # head_dim 24: rung 2 of the ONNX attention ladder
    "narrow_heads": "L=2,d=80,heads=4,kv=2,head_dim=20,ff=96,vocab=70,tied,ctx=64",  # head_dim 20: rung 3
    "smollm_like": "L=2,d=192,heads=3,kv=1,ff=512,vocab=257,tied,ctx=64,theta=100000.0",  # head_dim 64, 3:1
}
# What other architectures have; the last three are no published one's. Widths are no multiples of 32 where biases are odd.
VARIANT_SHAPES = {
    "qwen3": "L=2,d=64,heads=4,kv=2,head_dim=32,ff=96,vocab=96,tied,ctx=64,eps=1e-06,theta=1000000.0,qk_norm",
    "qwen3_odd": "L=2,d=96,heads=4,kv=2,head_dim=24,ff=128,vocab=80,untied,ctx=64,qk_norm",  # no whole vectors in a head
    "qwen2": "L=2,d=96,heads=6,kv=2,ff=160,vocab=96,tied,ctx=64,eps=1e-06,qkv_bias",
    "qwen2_odd": "L=2,d=72,heads=3,kv=1,ff=96,vocab=67,untied,ctx=64,qkv_bias",  # bias 72 and 24 wide
    "arcee": "L=2,d=64,heads=4,kv=2,ff=160,vocab=96,untied,ctx=64,mlp=relu2",
    "smollm3": "L=9,d=64,heads=4,kv=2,ff=96,vocab=96,tied,ctx=64,nope=4",
    "linear": "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied,ctx=64,rope=linear_4",
    "llama3": "L=2,d=64,heads=2,kv=1,head_dim=64,ff=96,vocab=96,tied,ctx=128,theta=500000.0,rope=llama3_8_32",
    "yarn": "L=2,d=64,heads=2,kv=1,head_dim=64,ff=96,vocab=96,tied,ctx=128,rope=yarn_4_32",
    "yarn_tuned": "L=2,d=64,heads=2,kv=1,head_dim=64,ff=96,vocab=96,tied,ctx=128,rope=yarn_4_32_1.25_2_16",
    "qwen2_yarn": "L=2,d=64,heads=2,kv=1,head_dim=64,ff=96,vocab=96,tied,ctx=128,qkv_bias,rope=yarn_4_32",
    "smollm3_yarn": "L=5,d=64,heads=2,kv=1,ff=96,vocab=96,tied,ctx=128,rope=yarn_4_32,nope=4",
    "arcee_llama3": "L=2,d=64,heads=2,kv=1,head_dim=64,ff=96,vocab=96,tied,ctx=128,mlp=relu2,rope=llama3_8_32",
    "gelu": "L=2,d=64,heads=4,kv=2,ff=160,vocab=96,tied,ctx=64,mlp=gelu",
    "shared": "L=3,d=64,heads=4,kv=2,ff=96,vocab=96,tied,share=2,ctx=64",
    "everything": "L=5,d=72,heads=3,kv=1,ff=160,vocab=67,untied,mlp=relu2,qk_norm,qkv_bias,share=2,rope=yarn_4_32,nope=4",
}
PROMPT = (3, 17, 44, 9, 61, 2, 30, 58, 5, 5, 21, 40)


def tiny_shape(name: str) -> Shape:
    """One of ``TINY_SHAPES`` or ``VARIANT_SHAPES``."""
    return Shape.parse({**TINY_SHAPES, **VARIANT_SHAPES}[name])


def long_prompt(shape: Shape, count: int = 60) -> list[int]:
    """``count`` token ids, past the original context of every scaling here."""
    return [(5 + 37 * i + i * i) % shape.vocab_size for i in range(count)]


def lively_model(shape: Shape, *, seed: int = 0, quant: str = "f32") -> Model:
    """Random weights of unit gain and norms spread around 1, so that activations, attention and norms all matter."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for spec in tensor_specs(shape):
        values: F32 = generator.standard_normal(spec.dims, np.float32)
        if spec.role == "norm":
            values = 1 + np.float32(0.2) * values
        elif spec.role == "bias":
            values = np.float32(0.5) * values
        elif spec.role == "attention" and spec.rope_heads:
            values = values * np.float32(1.5 / np.sqrt(spec.dims[-1]))
        elif spec.role in ("attention", "mlp"):
            values = values / np.float32(np.sqrt(spec.dims[-1]))
        tensors[spec.name] = Tensor.from_values(values, stored_format(spec, format_named(quant)))
    return Model(shape, tensors, name="tiny", source=f"lively(seed={seed})")
