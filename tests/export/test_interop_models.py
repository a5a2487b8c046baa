"""A new shape of 20M parameters and SmolLM2-135M, exported by the command to all four targets and run in every runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepthin.cli.main import main
from deepthin.engine.decoder import Decoder
from deepthin.engine.load import load_model
from deepthin.engine.model import Model
from deepthin.engine.tensors import tensor_specs
from deepthin.engine.tokenizer import Tokenizer
from deepthin.export.contents import model_files, read_contents
from deepthin.export.manifest import read_manifest
from deepthin.export.schedule import best_token
from deepthin.export.tolerances import budget_named, gate
from tests.support.runtimes import RUNTIMES, Runtimes, file_for, nmse

pytestmark = [pytest.mark.interop, pytest.mark.slow]
SHAPE = "L=11,d=384,heads=6,kv=2,ff=1024,vocab=8192,tied,ctx=256"  # 20.4M parameters, head_dim 64
PROMPT = "The capital of France is"
COUNT = 16
_STRICT = {"llama.cpp": {"context": 64, "strict": True}}


def greedy_of_engine(model: Model, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    chosen, margins = [], []
    with Decoder(model, threads=2, context=len(ids) + count) as decoder:
        row = np.array(decoder.logits(ids))[-1]
        for _ in range(count):
            best, margin = best_token(row)
            chosen.append(best)
            margins.append(margin)
            row = np.array(decoder.logits([best]))[-1]
    return chosen, margins


def differs(found: list[int], wanted: list[int], margins: list[float], near_tie: float) -> str:
    """Where ``found`` leaves ``wanted`` other than at a near-tie; after one the texts may go separate ways."""
    for at, (token, best, margin) in enumerate(zip(found, wanted, margins, strict=True)):
        if token != best:
            return "" if margin < near_tie else f"token {at} is {token} instead of {best}, which leads by {margin:.3f}"
    return ""


@pytest.fixture(scope="module")
def random_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("random20m") / "bundle"
    assert main(["export", SHAPE, "--out", str(out), "--quant", "f32,q4_0", "--seed", "11", "--quiet"]) == 0
    return out


def test_a_random_shape_runs_everywhere_on_token_ids(
    random_bundle: Path, runtimes: Runtimes, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in RUNTIMES:
        assert runtimes[name].peer == name
    assert not list(random_bundle.rglob("tokenizer*"))
    capsys.readouterr()
    code = main(["verify", str(random_bundle), "--json", "--quiet"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["verdict"]) == (0, "pass"), found["summary"]
    ran = {item["name"] for item in found["runtimes"] if item["status"] == "ran"}
    assert ran >= {"engine", "onnxruntime", "llama.cpp", "genai", "transformers.js"}

    ids = [int(token) for token in np.random.default_rng(3).integers(0, 8192, 24)]
    judge = runtimes["onnxruntime"]  # which agrees with the float64 reference, as has just been verified
    judge.call("load", path=str(file_for("onnxruntime", random_bundle, "f32")))
    want = judge.call("logits", ids=ids)["logits"]
    transformers, page = runtimes["transformers"], runtimes["chromium"]
    loaded = transformers.call("load", path=str(random_bundle / "hf"))
    assert (loaded["class"], loaded["missing"], loaded["unexpected"]) == ("LlamaForCausalLM", [], [])
    assert nmse(transformers.call("logits", ids=ids)["logits"], want) < gate("transformers")["nmse"]
    for quant, budget in (("f32", "onnxruntime.f32"), ("q4_0", "onnxruntime_int8.q4_0")):
        judge.call("load", path=str(file_for("onnxruntime", random_bundle, quant)))
        page.call("load", path=str(file_for("chromium", random_bundle, quant)), threads=2)
        error = nmse(page.call("logits", ids=ids)["logits"], judge.call("logits", ids=ids)["logits"])
        assert error < budget_named(budget).nmse, quant


@pytest.fixture(scope="module")
def smollm2_bundle(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "bundle"
    assert main(["export", str(smollm2_path), "--out", str(out), "--quant", "f32,q8_0,stored", "--quiet"]) == 0
    return out


@pytest.fixture(scope="module")
def prompt_ids(smollm2_path: Path) -> list[int]:
    spec = load_model(smollm2_path).tokenizer
    assert spec is not None
    return Tokenizer(spec).encode(PROMPT)


def greedy(runtimes: Runtimes, name: str, bundle: Path, quant: str, ids: list[int]) -> dict[str, Any]:
    runtimes[name].call("load", path=str(file_for(name, bundle, quant)), **_STRICT.get(name, {}))
    found = runtimes[name].call("greedy", ids=ids, count=COUNT)
    if name != "transformers":  # which keeps what it has until the next one
        runtimes[name].call("unload")
    return found


def test_smollm2_says_the_same_everywhere(smollm2_bundle: Path, prompt_ids: list[int], runtimes: Runtimes) -> None:
    """In f32 the runtimes differ by rounding only, so the tokens must be equal, and the leads of each too."""
    model = load_model(smollm2_bundle / "gguf" / "model-f32.gguf")
    wanted, margins = greedy_of_engine(model, prompt_ids, COUNT)
    assert model.tokenizer is not None
    assert Tokenizer(model.tokenizer).decode(wanted).startswith(" Paris")
    for name in ("onnxruntime", "llama.cpp", "genai", "transformers.js", "transformers"):
        found = greedy(runtimes, name, smollm2_bundle, "f32", prompt_ids)
        assert found["ids"] == wanted, name
        np.testing.assert_allclose(found["margins"], margins, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("quant", ["q8_0", "stored"])
def test_smollm2_quantised_says_the_same_everywhere(
    quant: str, smollm2_bundle: Path, prompt_ids: list[int], runtimes: Runtimes
) -> None:
    model = load_model(smollm2_bundle / "gguf" / f"model-{quant}.gguf")
    wanted, margins = greedy_of_engine(model, prompt_ids, COUNT)
    near_tie = gate("greedy")["near_tie"]
    browser = ["chromium"] if quant == "q8_0" else []  # what a page takes unless told otherwise
    for name in ("onnxruntime", "llama.cpp", "genai", "transformers.js", *browser):
        found = greedy(runtimes, name, smollm2_bundle, quant, prompt_ids)
        assert found["ids"][0] == wanted[0]
        assert not (why := differs(found["ids"], wanted, margins, near_tie)), f"{name}: {why}"


def test_smollm2_to_onnx_and_back(smollm2_bundle: Path, smollm2_path: Path, prompt_ids: list[int]) -> None:
    """What the ONNX file holds, read back by our reader, is what the source held, and the engine says the same with it."""
    source = load_model(smollm2_path)
    manifest = read_manifest(smollm2_bundle)
    (file,) = (item for item in model_files(manifest) if item.target == "genai" and item.quant == "f32")
    weights = read_contents(smollm2_bundle, file, manifest.shape).weights()
    for spec in tensor_specs(source.shape):
        np.testing.assert_array_equal(weights[spec.name], source.tensors[spec.name].dequantize(), err_msg=spec.name)
