"""transformers with PyTorch as a peer of the tests, on the CPU; runs inside a child process only.

``Child("tests.support.peer_transformers", peer="transformers")`` serves METHODS: those of the peers in ``deepthin.export``, and
``make``, which writes a random model of any architecture with nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.export.schedule import best_token, pieces

_model: Any = None
_tokenizer: Any = None
_folder = ""
_past: Any = None


def version() -> dict[str, Any]:
    """Versions of both packages."""
    import torch
    import transformers

    return {"version": transformers.__version__, "torch": str(torch.__version__)}


def load(path: str, *, dtype: str | None = None) -> dict[str, Any]:
    """Load the folder ``path``, to compute in the type that its configuration names, or in ``dtype``.

    Returns:
        ``class``, ``dtype``, and the names of tensors that were ``missing`` or ``unexpected``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    global _model, _tokenizer, _folder
    kind = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    _model, info = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, output_loading_info=True, **kind)
    _tokenizer, _folder = None, path
    names = {key: sorted(map(str, info[f"{key}_keys"])) for key in ("missing", "unexpected")}
    return {"class": type(_model).__name__, "dtype": str(_model.dtype).removeprefix("torch."), **names}


def make(folder: str, *, config: Mapping[str, Any], dtype: str, shard_size: str, seed: int) -> dict[str, Any]:
    """Save a random model of ``config`` as ``dtype``, in shards of ``shard_size``, and load it again to compute in f32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():  # lively: transformers' own start gives logits near zero
            noise = torch.randn(values.shape, generator=generator)
            if values.ndim == 1:
                noise = 0.5 * noise if name.endswith("bias") else 1 + 0.2 * noise
            elif "embed_tokens" not in name:
                noise = noise * values.shape[-1] ** -0.5
            values.copy_(noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    load(folder, dtype="float32")  # casting the model back would leave its rotary frequencies rounded
    return {"files": sorted(path.name for path in Path(folder).iterdir())}


def tokenize(texts: list[str]) -> dict[str, Any]:
    """Token ids of each text, without tokens that the tokenizer adds."""
    from transformers import AutoTokenizer

    global _tokenizer
    _tokenizer = _tokenizer or AutoTokenizer.from_pretrained(_folder, local_files_only=True)
    return {"ids": [_tokenizer.encode(text, add_special_tokens=False) for text in texts]}


def logits(ids: list[int], *, schedule: list[int] | None = None) -> dict[str, Any]:
    """Logits f32 [S, V] at every position of ``ids``, from an empty cache; ``schedule`` as for the other peers."""
    global _past
    _past = None
    return {"logits": np.concatenate([_run(piece) for piece in pieces(ids, schedule)])}


def greedy(ids: list[int], count: int) -> dict[str, Any]:
    """``count`` greedy tokens after ``ids``, and the margin of each over the runner-up."""
    global _past
    _past = None
    row = _run(ids)[-1]
    chosen, margins = [], []
    for _ in range(count):
        best, margin = best_token(row)
        chosen.append(best)
        margins.append(margin)
        row = _run([best])[-1]
    return {"ids": chosen, "margins": margins}


def _run(ids: Sequence[int]) -> F32:
    """Append ``ids`` to the cache; logits [len(ids), V]."""
    import torch

    global _past
    if _model is None:
        raise RuntimeError("no model is loaded yet; call load first")
    with torch.no_grad():
        out = _model(torch.tensor([list(ids)]), past_key_values=_past, use_cache=True)
    _past = out.past_key_values
    rows: F32 = out.logits[0].float().numpy()
    return rows


METHODS = {f.__name__: f for f in (version, load, make, tokenize, logits, greedy)}
