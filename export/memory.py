"""What a runtime holds in memory for the weights of one file, once it is loaded: every copy that it makes is counted.

Seen on x86-64 (``docs/exports.md``). onnxruntime 1.32: matrices are laid out anew for products, and the file's form of them
is let go unless something else reads it, which a tied table's lookup does. Beside the packed integers of a block matrix stay
its scales and a sum for each block. llama.cpp (AVX2) maps the file and lays q4_0 matrices out anew beside it. The cache,
activations and the runtime itself come on top.
"""

from __future__ import annotations

from typing import Any

from deepthin.engine.formats import F16, Q4_0
from deepthin.engine.model import Model
from deepthin.engine.tensors import tensor_specs
from deepthin.export.onnx_weights import block_matrix, can_be_gathered, is_block_matrix, weight_bytes

ONCE = "one copy"
_TIED_TWICE = "the tied table twice: as products want it and as it is looked up"
_WIDENED = "matrices widened to f32"
_MAPPED = "the mapped file"
_REPACKED = "the mapped file, whose pages the system may drop, and q4_0 matrices laid out anew"
_SUMS = "scales and sums of blocks beside the packed integers"


def onnx_memory(model: Model) -> dict[str, Any]:
    """``bytes`` and ``holds`` (in words) of the weights of an ONNX file of ``model``, profile contrib, accuracy level 4."""
    tied, total, notes = model.shape.tie_word_embeddings, 0, set()
    for spec in tensor_specs(model.shape):
        tensor, is_table = model.tensors[spec.name], spec.role == "embedding"
        is_product = len(spec.dims) == 2 and (tied or not is_table)
        in_blocks = is_block_matrix(tensor) and (is_product if not is_table else can_be_gathered(tensor))
        if in_blocks:
            size = weight_bytes(spec.num_elements, tensor.format)
        else:
            narrow = tensor.format is F16 and is_table and not tied
            size = spec.num_elements * (2 if narrow else 4)
            notes |= {_WIDENED} if tensor.format is F16 and is_product else set()
        total += size
        if is_table and tied:
            total += size
            notes.add(_TIED_TWICE)
        if in_blocks and is_product:
            total += 8 * spec.num_elements // block_matrix(spec.name, tensor).block
            notes.add(_SUMS)
    return {"bytes": total, "holds": "; ".join(text for text in (_WIDENED, _TIED_TWICE, _SUMS) if text in notes) or ONCE}


def gguf_memory(model: Model) -> dict[str, Any]:
    """The same of the GGUF file of ``model``, shared blocks written out, in llama.cpp."""
    again = [tensor.num_bytes for tensor in model.tensors.values() if tensor.format is Q4_0]
    return {"bytes": model.num_bytes + sum(again), "holds": _REPACKED if again else _MAPPED}
