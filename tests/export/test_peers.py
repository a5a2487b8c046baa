from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from deepthin.engine.child import Child
from deepthin.engine.errors import PeerError
from deepthin.engine.formats import format_named
from deepthin.engine.model import Model
from deepthin.engine.reference import Reference
from deepthin.export.gguf_writer import write_gguf
from deepthin.export.onnx_model import write_onnx
from deepthin.export.schedule import PHASES, best_token, phase_schedule, pieces
from tests.support.tiny_models import PROMPT, lively_model, tiny_shape

IDS = list(PROMPT)


@pytest.fixture(scope="module")
def model() -> Model:
    return lively_model(tiny_shape("plain"))


@pytest.fixture(scope="module")
def reference(model: Model) -> Any:
    return Reference(model.shape, model.dequantized()).logits(IDS)


@pytest.fixture(scope="module")
def folder(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("peers")
    write_gguf(model, out / "m.gguf", file_format=format_named("f32"))
    write_onnx(model, out / "m.onnx")
    (out / "text.gguf").write_text("no model\n")
    (out / "text.onnx").write_text("no model\n")
    return out


@pytest.fixture(scope="module", params=["llama_cpp", "onnxruntime"])
def peer(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Child, str]]:
    with Child(f"deepthin.export.peer_{request.param}", deadline_s=120.0) as child:
        yield child, str(folder / ("m.gguf" if request.param == "llama_cpp" else "m.onnx"))


def test_version(peer: tuple[Child, str]) -> None:
    assert peer[0].call("version")["version"][0].isdigit()


def test_nothing_is_loaded_yet(peer: tuple[Child, str]) -> None:
    child, path = peer
    child.call("unload")
    with pytest.raises(PeerError, match="no model is loaded yet; call load first"):
        child.call("logits", ids=IDS)
    assert child.call("load", path=path)["vocab_size"] == 96


def test_a_bad_file_is_an_error_and_the_child_lives(peer: tuple[Child, str]) -> None:
    child, path = peer
    with pytest.raises(PeerError, match="load failed"):
        child.call("load", path=path.replace("m.", "text."))
    with pytest.raises(PeerError, match="load failed"):
        child.call("load", path=path + ".absent")
    assert child.call("load", path=path)["num_layers"] == 2


@pytest.mark.parametrize("phase", PHASES)
def test_logits_at_every_position(peer: tuple[Child, str], reference: Any, phase: str) -> None:
    child, path = peer
    child.call("load", path=path)
    for _ in range(2):  # the second starts from an empty cache again
        found = child.call("logits", ids=IDS, schedule=phase_schedule(phase, len(IDS)))["logits"]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, reference, atol=2e-5 * np.abs(reference).max())


def test_logits_of_a_schedule_that_does_not_fit(peer: tuple[Child, str]) -> None:
    child, path = peer
    child.call("load", path=path)
    with pytest.raises(PeerError, match="does not hand over the 12 tokens"):
        child.call("logits", ids=IDS, schedule=[5, 5])


def test_greedy_tokens_and_margins(peer: tuple[Child, str], model: Model) -> None:
    child, path = peer
    child.call("load", path=path)
    found = child.call("greedy", ids=IDS, count=10)
    reference = Reference(model.shape, model.dequantized())
    row = reference.logits(IDS)[-1]
    for token, margin in zip(found["ids"], found["margins"], strict=True):
        best, by = best_token(row)
        assert token == best and margin == pytest.approx(by, abs=1e-3)
        row = reference.logits([token])[-1]


def test_measure_counts_what_it_ran(peer: tuple[Child, str]) -> None:
    child, path = peer
    child.call("load", path=path, threads=2)
    found = child.call("measure", prompt=8, gen=5, depth=3)
    assert found["prompt_s"] > 0 and len(found["token_s"]) == 5 and min(found["token_s"]) > 0
    assert child.call("measure", gen=2)["token_s"] != []


def test_llama_cpp_default_mode_is_looser(folder: Path, reference: Any) -> None:
    with Child("deepthin.export.peer_llama_cpp") as child:
        errors = []
        for strict in (True, False):
            child.call("load", path=str(folder / "m.gguf"), strict=strict, context=64, batch=5)  # batches within one call
            errors.append(float(np.abs(child.call("logits", ids=IDS)["logits"] - reference).max()))
        assert errors[0] < 1e-4 < errors[1] < 1.0  # an f16 cache was really in use
        with pytest.raises(PeerError, match=r"llama_decode returned -1 for 1 tokens at position 0: .*invalid token"):
            child.call("logits", ids=[96])
        child.call("load", path=str(folder / "m.gguf"), context=4)
        with pytest.raises(PeerError, match="llama_decode returned 1 "):
            child.call("logits", ids=[1] * 400)


def test_llama_cpp_tokenizes_without_weights(smollm2_path: Path) -> None:
    with Child("deepthin.export.peer_llama_cpp") as child:
        child.call("load", path=str(smollm2_path), vocab_only=True)
        assert child.call("tokenize", texts=["Hello world", "", "<|im_start|>"])["ids"] == [[19556, 905], [], [1]]
        with pytest.raises(PeerError, match="only the vocabulary is loaded"):
            child.call("logits", ids=[1])


def test_onnxruntime_refuses_other_graphs(folder: Path) -> None:
    proto = onnx.load(folder / "m.onnx")
    for item in proto.graph.input:
        if item.name == "attention_mask":
            item.name = "mask"
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            if name == "attention_mask":
                node.input[index] = "mask"
    onnx.save(proto, folder / "other.onnx")
    with Child("deepthin.export.peer_onnxruntime") as child, pytest.raises(PeerError, match="input or output 'attention_mask'"):
        child.call("load", path=str(folder / "other.onnx"))


def test_schedules() -> None:
    assert phase_schedule("prefill", 9) == [9] and phase_schedule("decode", 3) == [1, 1, 1]
    assert sum(phase_schedule("chunks", 40)) == 40 and 1 < len(phase_schedule("chunks", 40)) < 40
    assert list(pieces([1, 2, 3], [2, 1])) == [[1, 2], [3]] and list(pieces([1, 2], None)) == [[1, 2]]
    with pytest.raises(ValueError, match="does not hand over"):
        list(pieces([1, 2, 3], [3, 0]))
    assert best_token(np.array([1.0, 5.0, 3.0, 5.0], np.float32)) == (1, 0.0)
