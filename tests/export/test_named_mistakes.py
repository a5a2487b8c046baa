"""The mistakes that exporters are known to make, each made in each kind of file that can hold it, all rejected.

Wherever the file still runs, three things must be said: what is wrong (tensor, fact or measure), which file, and in which part
of which block the hidden states part.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepthin.engine.model import Model, TokenizerSpec
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import canonical_row_order
from deepthin.export.bundle import export_bundle
from deepthin.export.verify import verify_bundle
from tests.support import graph_edits
from tests.support.bundles import (
    GGUF,
    GGUF_Q4,
    ONNX,
    ONNX_Q4,
    READERS,
    edit_gguf,
    edit_onnx,
    exchanged,
    flip_bits,
    put,
    quiet_model,
    reshaped,
    rows_taken,
    with_values,
)

_UP, _O = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight"
_TEXT = TokenizerSpec("gpt-2", (*"abcdefgh", "ab"), (1,) * 9, ("a b",), add_bos=False)
Break = Callable[[Path, str, Model], None]


@dataclass(frozen=True)
class Mistake:
    """``breaks`` makes it in the file; ``says`` must be in a line of the summary beside the file's name.

    ``point`` is where hidden states part, None where nothing runs or nothing computed is wrong.
    """

    kind: str
    file: str
    breaks: Break
    says: str
    point: str | None


def model(change: Callable[[Model], Model]) -> Break:
    return lambda bundle, file, right: put(bundle, file, change(right), "q4_0" if file in (GGUF_Q4, ONNX_Q4) else "f32")


def graph(change: graph_edits.Edit) -> Break:
    return lambda bundle, file, _: edit_onnx(bundle, file, change)


def constant(name: str, change: Callable[[Any], Any]) -> Break:
    return graph(graph_edits.set_constant(name, change))


def blocks(tensor: str, change: Callable[[Any], Any]) -> Break:
    return lambda bundle, file, _: edit_gguf(bundle, file, tensor, change)


def one_scale_on(held: Any) -> Any:
    return _with(held, d=np.roll(held["d"], 1))


def _with(held: Any, **fields: Any) -> Any:
    changed = held.copy()
    for name, values in fields.items():
        changed[name] = values
    return changed


def _other_kv_heads(bundle: Path, file: str, _: Model) -> None:
    data = (bundle / file).read_bytes()
    key = b"llama.attention.head_count_kv"
    value = data.index(key) + len(key) + 4  # after the value's type
    assert data[value] == 2
    flip_bits(bundle, file, value, 2 ^ 4, blessed=True)


def _no_bias(right: Model) -> Model:
    return with_values(right, blk_1_attn_k_bias=lambda values: values * 0)


def _untied(right: Model) -> Model:
    table = right.tensors["token_embd"]
    head = with_values(right, token_embd=lambda values: values[::-1]).tensors["token_embd"]
    return Model(right.shape.replace(tie_word_embeddings=False), {**right.tensors, "token_embd": table, "output": head})


def _kv_heads_turned(right: Model) -> Model:
    """Each query head reads the other key head: as if groups were laid out across instead of along."""
    width = right.shape.head_dim
    return with_values(
        right, blk_0_attn_k=lambda v: np.roll(v, width, axis=0), blk_0_attn_v=lambda v: np.roll(v, width, axis=0)
    )


MISTAKES = (
    Mistake(
        "permutation missing",
        GGUF,
        model(lambda m: rows_taken(m, canonical_row_order)),
        "blk.0.attn_q: its rows are in",
        "blk.0.attn",
    ),
    Mistake(
        "rope base", GGUF, model(lambda m: reshaped(m, rope_theta=5e5)), "rope_theta is 500000.0, but 10000.0", "blk.0.attn"
    ),
    Mistake(
        "rope base", ONNX, model(lambda m: reshaped(m, rope_theta=5e5)), "rope_theta is 500000.0, but 10000.0", "blk.0.attn"
    ),
    Mistake("eps", GGUF, model(lambda m: reshaped(m, rms_norm_eps=1e-6)), "rms_norm_eps is 1e-06, but 1e-05", "blk.0.attn"),
    Mistake("eps", ONNX, model(lambda m: reshaped(m, rms_norm_eps=1e-6)), "rms_norm_eps is 1e-06, but 1e-05", "blk.0.attn"),
    Mistake(
        "gate and up",
        GGUF,
        model(lambda m: exchanged(m, "blk.1.ffn_gate", "blk.1.ffn_up")),
        "blk.1.ffn_gate: it equals",
        "blk.1.ffn",
    ),
    Mistake(
        "gate and up",
        ONNX_Q4,
        model(lambda m: exchanged(m, "blk.1.ffn_gate", "blk.1.ffn_up")),
        "gate and up look swapped",
        "blk.1.ffn",
    ),
    Mistake("kv head count", GGUF, _other_kv_heads, "attn_k", None),
    Mistake(
        "kv head count",
        ONNX,
        graph(graph_edits.set_attribute("GroupQueryAttention", "kv_num_heads", 4)),
        "num_kv_heads is 4, but 2",
        None,
    ),
    Mistake("kv heads turned", ONNX, model(_kv_heads_turned), "blk.0.attn_k: ", "blk.0.attn"),
    Mistake(
        "seqlens off by one", ONNX, graph(graph_edits.shift_seqlens(-1)), "parts in the attention of block 0", "blk.0.attn"
    ),
    Mistake(
        "layer zeroed",
        GGUF,
        model(lambda m: with_values(m, blk_1_ffn_down=lambda v: v * 0)),
        "blk.1.ffn_down: it is all zeros",
        "blk.1.ffn",
    ),
    Mistake(
        "layer zeroed",
        ONNX_Q4,
        model(lambda m: with_values(m, blk_1_ffn_down=lambda v: v * 0)),
        "blk.1.ffn_down: it is all zeros",
        "blk.1.ffn",
    ),
    Mistake("head untied", GGUF, model(_untied), "tie_word_embeddings is False, but True", "output"),
    Mistake("head untied", ONNX, graph(graph_edits.untie), "tie_word_embeddings is False, but True", "output"),
    Mistake("scale off by one block", GGUF_Q4, blocks("blk.0.ffn_up.weight", one_scale_on), "blk.0.ffn_up: ", "blk.0.ffn"),
    Mistake(
        "scale off by one block",
        ONNX_Q4,
        constant(_UP + "_scales", lambda v: np.roll(v, 1)),
        "as by the scale of another block",
        "blk.0.ffn",
    ),
    Mistake(
        "nibble order",
        GGUF_Q4,
        blocks("blk.0.ffn_up.weight", lambda b: _with(b, qs=b["qs"] << 4 | b["qs"] >> 4)),
        "blk.0.ffn_up: ",
        "blk.0.ffn",
    ),
    Mistake(
        "nibble order",
        ONNX_Q4,
        constant(_UP + "_quant", lambda v: v << 4 | v >> 4),
        "blk.0.ffn_up: its values are swapped in pairs",
        "blk.0.ffn",
    ),
    Mistake("nibble order", ONNX_Q4, constant(_UP + "_quant", graph_edits.gguf_nibbles), "in GGUF's nibble order", "blk.0.ffn"),
    Mistake("zero point", ONNX_Q4, graph(graph_edits.zero_point(_UP, 7)), "as by a wrong zero point", "blk.0.ffn"),
    Mistake(
        "o_proj transposed",
        GGUF,
        model(lambda m: with_values(m, blk_1_attn_output=np.transpose)),
        "blk.1.attn_output: it is stored transposed",
        "blk.1.attn",
    ),
    Mistake("o_proj transposed", ONNX, constant(_O, np.transpose), "blk.1.attn_output: it is stored transposed", "blk.1.attn"),
    Mistake("bias dropped", GGUF, model(_no_bias), "blk.1.attn_k.bias: it is all zeros", "blk.1.attn"),
    Mistake(
        "bias dropped",
        ONNX,
        graph(graph_edits.drop_node("blk.1.attn_k.biased")),
        "blk.1.attn_k.bias: it is missing",
        "blk.1.attn",
    ),
    Mistake(
        "pre-tokenizer",
        GGUF,
        model(lambda m: replace(m, tokenizer=replace(_TEXT, pre="llama-bpe"))),
        "tokenizer.pre is llama-bpe, but gpt-2",
        None,
    ),
    Mistake("stale cache row", ONNX, graph(graph_edits.keep_stale_row(1)), "parts in the attention of block 1", "blk.1.attn"),
    Mistake("caches exchanged", ONNX, graph(graph_edits.exchange_caches), "parts in the attention of block 0", "blk.0.attn"),
)
WITH_BIAS, WITH_TEXT = ("bias dropped",), ("pre-tokenizer",)


def test_all_kinds_are_here() -> None:
    assert len({mistake.kind for mistake in MISTAKES}) >= 15


@pytest.fixture(scope="module")
def other_bundles(quiet: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Model]]:
    """One of a model with biases, one of a model with a tokenizer."""
    out = tmp_path_factory.mktemp("others")
    models = {
        "biased": quiet_model(Shape.parse("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied,ctx=64,qkv_bias")),
        "text": replace(quiet, tokenizer=_TEXT),
    }
    for name, made in models.items():
        export_bundle(made, out / name, targets=("hf", "transformersjs", "gguf"), quants=("f32",), accuracy_level=0)
    return {name: (out / name, made) for name, made in models.items()}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda at: f"{at.kind}-{at.file.split('/')[-1]}".replace(" ", "_"))
def test_it_is_rejected_and_placed(
    mistake: Mistake, bundle: Path, quiet: Model, other_bundles: dict[str, tuple[Path, Model]], tmp_path: Path
) -> None:
    right = quiet
    if mistake.kind in WITH_BIAS + WITH_TEXT:
        source, right = other_bundles["biased" if mistake.kind in WITH_BIAS else "text"]
        bundle = shutil.copytree(source, tmp_path / "other")
    mistake.breaks(bundle, mistake.file, right)
    runtimes = READERS[mistake.file].split()
    result = verify_bundle(bundle, runtimes=runtimes)
    assert result["verdict"] == "fail", result["summary"]
    assert all(check["ok"] for check in result["files"])  # it is not the checksum that tells
    told = [line for line in result["summary"] if mistake.file in line]
    assert any(mistake.says in line for line in told), result["summary"]
    assert result["first_parting"]["file"] == mistake.file
    assert all(pair["ok"] for pair in result["pairs"] if pair["file"] != mistake.file)
    if mistake.point is None:
        assert not result["layers"]
        return
    placed = {(at["runtime"], at["file"], at["point"]) for at in result["layers"]}
    assert placed == {(runtime, mistake.file, mistake.point) for runtime in runtimes}, result["layers"]
    assert result["first_parting"]["layer"] == mistake.point
