"""A wrong model in place of one file of a bundle, its checksum made to fit: verify has to say what is wrong, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepthin.engine.model import Model
from deepthin.engine.tensors import canonical_row_order, gguf_row_order
from deepthin.export.runs import RUNTIMES
from deepthin.export.verify import verify_bundle
from tests.support.bundles import (
    GGUF_Q4,
    HF,
    ONNX_Q4,
    QUANT,
    READERS,
    exchanged,
    put,
    reshaped,
    rows_taken,
    with_values,
)


def test_the_bundle_passes_before_it_is_touched(good_bundle: Path) -> None:
    result = verify_bundle(good_bundle, runtimes=RUNTIMES[:3])
    assert result["verdict"] == "pass" and result["first_parting"] is None
    assert [runtime["status"] for runtime in result["runtimes"]][:4] == ["ran"] * 4
    compared = {(pair["b"], pair["file"], pair["phase"]) for pair in result["pairs"]}
    modes = {(pair["b"], pair["mode"]) for pair in result["pairs"] if pair["file"] in (GGUF_Q4, ONNX_Q4)}
    two = {"llama.cpp": ("strict", "default"), "onnxruntime": ("level 0", "level 4")}
    assert modes == {("engine", ""), *((runtime, mode) for runtime, names in two.items() for mode in names)}
    assert result["layers"] == [] and all(pair["verdict"] == "pass" and pair["top10"] > 0.8 for pair in result["pairs"])
    assert compared == {
        (runtime, file, phase)
        for file, readers in (READERS | {HF: "engine"}).items()
        for runtime in readers.split()
        for phase in ("prefill", "decode", "chunks")
    }


@dataclass(frozen=True)
class Mutation:
    """``change`` makes a wrong model out of a right one; ``says`` must stand beside the file's name in the summary.

    ``position`` is where logits part: 0 for weights, 1 for anything that only turns by position; ``point`` is where hidden
    states do. ``shows_in_q4`` is False where int8 activations hide the change from logits, so that only files can tell.
    """

    name: str
    change: Callable[[Model], Model]
    says: str
    point: str
    position: int = 0
    shows_in_q4: bool = True


MUTATIONS = (
    Mutation(
        "gate and up swapped",
        lambda m: exchanged(m, "blk.0.ffn_gate", "blk.0.ffn_up"),
        "blk.0.ffn_gate: it equals what blk.0.ffn_up",
        "blk.0.ffn",
    ),
    Mutation(
        "k and v swapped",
        lambda m: exchanged(m, "blk.1.attn_k", "blk.1.attn_v"),
        "blk.1.attn_k: it equals",
        "blk.1.attn",
        position=0,
    ),
    Mutation(
        "q/k permutation dropped",
        lambda m: rows_taken(m, canonical_row_order),
        "blk.0.attn_q: its rows are in the",
        "blk.0.attn",
        position=1,
    ),
    Mutation(
        "q/k permutation made twice",
        lambda m: rows_taken(m, gguf_row_order),
        "blk.0.attn_q: its rows are in the",
        "blk.0.attn",
        position=1,
    ),
    Mutation(
        "rope base", lambda m: reshaped(m, rope_theta=500000.0), "rope_theta is 500000.0, but 10000.0", "blk.0.attn", position=1
    ),
    Mutation(
        "eps", lambda m: reshaped(m, rms_norm_eps=1e-6), "rms_norm_eps is 1e-06, but 1e-05", "blk.0.attn", shows_in_q4=False
    ),
    Mutation(
        "zeroed layer",
        lambda m: with_values(m, blk_1_attn_output=lambda v: v * 0, blk_1_ffn_down=lambda v: v * 0),
        "blk.1.attn_output: it is all zeros",
        "blk.1.attn",
    ),
    Mutation(
        "layers swapped",
        lambda m: exchanged(m, "blk.0.ffn_down", "blk.1.ffn_down"),
        "it equals what blk.1.ffn_down should be",
        "blk.0.ffn",
    ),
    Mutation(
        "norms swapped",
        lambda m: exchanged(m, "blk.0.ffn_norm", "output_norm"),
        "it equals what output_norm should be",
        "blk.0.ffn",
    ),
)


CASES = [
    pytest.param(mutation, file, id=f"{mutation.name}-{file}".replace(" ", "_").replace("/", "_"))
    for mutation in MUTATIONS
    for file in READERS
    if QUANT[file] == "f32" or mutation.name in ("q/k permutation dropped", "eps")
]


@pytest.mark.parametrize(("mutation", "file"), CASES)
def test_one_wrong_file_is_named(quiet: Model, bundle: Path, mutation: Mutation, file: str) -> None:
    put(bundle, file, mutation.change(quiet), QUANT[file])
    result = verify_bundle(bundle, runtimes=READERS[file].split())
    assert result["verdict"] == "fail"
    assert all(check["ok"] for check in result["files"])  # it is not the checksum that tells
    assert any(file in line and mutation.says in line for line in result["summary"]), result["summary"]
    assert not any(line.startswith("suspect") for line in result["summary"])
    wrong = {pair["file"] for pair in result["pairs"] if not pair["ok"]}
    parting = result["first_parting"]
    if file == GGUF_Q4 and not mutation.shows_in_q4:
        assert not wrong and parting["runtime"] is None and parting["file"] == file
        assert file in result["summary"][0] and mutation.says in result["summary"][0]
        return
    assert wrong == {file}
    assert {pair["b"] for pair in result["pairs"] if not pair["ok"]} == set(READERS[file].split())
    assert parting["file"] == file and parting["runtime"] in READERS[file] and parting["phase"] == "prefill"
    late = file == GGUF_Q4 and mutation.position > 0  # the first positions hardly turn, and int8 activations hide that
    assert mutation.position <= parting["position"] <= (12 if late else mutation.position)
    mode = f" ({parting['mode']})" if parting["mode"] else ""
    said = f"first part at position {parting['position']} of prefill: {parting['runtime']}{mode} on {file}, in the "
    assert said in result["summary"][0]
    points = {at["point"] for at in result["layers"]}
    assert points == {mutation.point} and parting["layer"] == mutation.point, result["layers"]


@pytest.mark.parametrize("mutation", MUTATIONS[::4], ids=lambda mutation: mutation.name.replace(" ", "_").replace("/", ""))
def test_a_wrong_truth_is_suspected(quiet: Model, bundle: Path, mutation: Mutation) -> None:
    put(bundle, HF, mutation.change(quiet))
    result = verify_bundle(bundle, runtimes=["onnxruntime"])
    assert result["verdict"] == "fail"
    assert result["summary"][1].startswith("suspect: ") and result["summary"][1].endswith("so hf itself looks changed")
