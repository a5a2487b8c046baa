"""The residual stream inside the engine's decoder, read from outside: decoders that end where one wants to look.

A decoder of the first blocks whose head is the unit matrix gives the stream itself as its logits, divided by its root mean
square, which is what the final norm does; a last block whose MLP gives nothing ends behind its attention. The kernels are
the ones that are to be looked into, and nothing in them knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.engine.decoder import Decoder
from deepthin.engine.formats import F32 as F32_FORMAT
from deepthin.engine.model import Model, Tensor
from deepthin.engine.tensors import tensor_specs
from deepthin.export.schedule import pieces


class EngineStreams(Mapping[str, F32]):
    """The stream f32 [S, D] by point (see ``Reference.watch``), each row at unit root mean square; made when it is asked for.

    Args:
        model: as it is stored; its weights are not copied.
        ids: S token ids.
        schedule: how many go in together, in order.
    """

    def __init__(self, model: Model, ids: Sequence[int], schedule: Sequence[int]) -> None:
        self._model, self._ids, self._schedule = model.unrolled(), list(ids), list(schedule)

    def __getitem__(self, point: str) -> F32:
        """Run the decoder that ends at ``point``."""
        if point not in list(self):
            raise KeyError(point)
        _, block, part = point.split(".")
        ending, renamed = _ending(self._model, int(block), part, self._ids)
        with Decoder(ending, threads=1, context=len(renamed)) as decoder:
            rows = [np.array(decoder.logits(piece)) for piece in pieces(renamed, self._schedule)]
        return np.concatenate(rows)[:, : ending.shape.hidden_size]

    def __contains__(self, point: object) -> bool:
        """Whether there is such a point; runs nothing."""
        return point in list(self)

    def __iter__(self) -> Iterator[str]:
        """Points behind the parts of each block; the embedding alone makes no decoder."""
        return (f"blk.{block}.{part}" for block in range(self._model.shape.num_layers) for part in ("attn", "ffn"))

    def __len__(self) -> int:
        """Number of points."""
        return 2 * self._model.shape.num_layers


def _ending(model: Model, block: int, part: str, ids: Sequence[int]) -> tuple[Model, list[int]]:
    """``model`` up to ``part`` of ``block``, with only the tokens of ``ids`` in its vocabulary, and ``ids`` in that."""
    used = sorted(set(ids))
    width = model.shape.hidden_size
    rows = max(width, len(used))
    shape = model.shape.replace(num_layers=block + 1, vocab_size=rows, tie_word_embeddings=False)
    table = model.tensors["token_embd"]
    kept = np.zeros((rows, table.data.shape[1]), np.uint8)
    kept[: len(used)] = table.data[used]
    made = {
        "token_embd": Tensor(table.format, (rows, width), kept),
        "output_norm": Tensor.from_values(np.ones(width, np.float32), F32_FORMAT),
        "output": Tensor.from_values(np.eye(rows, width, dtype=np.float32), F32_FORMAT),
    }
    if part == "attn":
        silent = np.zeros((width, shape.intermediate_size), np.float32)
        made[f"blk.{block}.ffn_down"] = Tensor.from_values(silent, F32_FORMAT)
    tensors = {spec.name: made.get(spec.name) or model.tensors[spec.name] for spec in tensor_specs(shape)}
    place = {token: index for index, token in enumerate(used)}
    return Model(shape, tensors), [place[token] for token in ids]
