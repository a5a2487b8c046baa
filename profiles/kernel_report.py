"""Which kernel and SIMD target run for each tensor, and what it takes packed: the rows of ``deepthin bench --kernels``.

Sizes come from ``engine/pack.py`` and names from the kernels' own modules; nothing is packed or run for it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from deepthin.engine.cpu import simd_target
from deepthin.engine.formats import BlockFormat
from deepthin.engine.kernels import matmul, matvec, rows
from deepthin.engine.model import Model
from deepthin.engine.pack import Packed, place
from deepthin.engine.plan import block_products
from deepthin.engine.simd import W

_EMBEDDING = "token_embd"


def packed_tensors(model: Model) -> dict[str, Packed]:
    """Every tensor that a product reads, by canonical name, with its packed sizes; offsets are meaningless."""
    shape = model.shape
    names = [f"blk.{i}.{name}" for i in range(shape.num_layers) for name in block_products(shape) if name]
    names += [_EMBEDDING] if shape.tie_word_embeddings else [_EMBEDDING, "output"]
    found = {}
    for name in names:
        tensor = model.tensors[name]
        found[name] = place(tensor.format, tensor.dims[0], tensor.dims[1], W, 0)
    return found


def kernel_names(fmt: BlockFormat) -> tuple[str, str]:
    """Module and name of the kernels that run a product of ``fmt``: for one token, and for several."""
    return _name(matvec, f"matvec_{fmt.name}"), _name(matmul, f"tiles_{fmt.name}")


def kernel_report(model: Model) -> dict[str, Any]:
    """The ``kernels`` object of the ``bench`` document.

    Returns:
        ``simd``, ``lanes`` (rows of a tile), ``packed_bytes`` and ``stored_bytes`` of all matrices together, and ``groups``
        of tensors that are alike: ``role``, ``product``, ``format``, ``rows``, ``cols``, ``decode_kernel``,
        ``prefill_kernel``, ``count``, ``tensors`` (names), ``packed_bytes`` (of all of them), ``bits_per_weight`` (packed,
        padding included) and ``stored_bits_per_weight``. A tied embedding appears as embedding and as head, and is counted
        once in ``packed_bytes``.
    """
    packed = packed_tensors(model)
    entries = [("attention" if name.split(".")[-1].startswith("attn") else "mlp", name) for name in packed if "." in name]
    entries += [("embedding", _EMBEDDING), ("head", _EMBEDDING if model.shape.tie_word_embeddings else "output")]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for role, name in entries:
        one, product = packed[name], name.split(".")[-1]
        decode, prefill = kernel_names(one.format)
        if role == "embedding":
            decode = prefill = _name(rows, "read_row")
        label = {"role": role, "product": product, "format": one.format.name, "rows": one.rows, "cols": one.cols}
        group = groups.setdefault(
            tuple(label.values()),
            {
                **label,
                "decode_kernel": decode,
                "prefill_kernel": prefill,
                "count": 0,
                "tensors": [],
                "packed_bytes": 0,
                "bits_per_weight": 8 * one.num_bytes / (one.rows * one.cols),
                "stored_bits_per_weight": one.format.bits_per_weight,
            },
        )
        group["count"] += 1
        group["tensors"].append(name)
        group["packed_bytes"] += one.num_bytes
    order = ("attention", "mlp", "embedding", "head")
    return {
        "simd": simd_target(),
        "lanes": W,
        "packed_bytes": sum(one.num_bytes for one in packed.values()),
        "stored_bytes": sum(model.tensors[name].num_bytes for name in packed),
        "groups": sorted(groups.values(), key=lambda group: order.index(group["role"])),
    }


def _name(module: ModuleType, name: str) -> str:
    """Where the function that ``module`` knows as ``name`` is defined; the best one for this CPU may come from elsewhere."""
    function = getattr(module, name)
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
