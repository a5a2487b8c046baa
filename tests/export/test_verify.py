"""verify_bundle on bundles that are right, and on machines where a runtime is missing, broken or slow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import FormatError, UnsupportedError, UsageError
from deepthin.engine.formats import BODY_QUANTS
from deepthin.engine.load import load_model
from deepthin.engine.model import Model, random_model
from deepthin.engine.shape import Shape
from deepthin.export import verify
from deepthin.export.bundle import export_bundle
from deepthin.export.feasibility import TARGETS, refusals
from deepthin.export.runs import RUNTIMES, PeerRuntime, Runtime, make_runtime
from deepthin.export.verify import verify_bundle
from tests.support.bundles import exchanged, put, reshaped, with_values
from tests.support.tiny_models import TINY_SHAPES, VARIANT_SHAPES, lively_model, tiny_shape

ONNX = "transformersjs/onnx/model.onnx"
FAKE_PEER = """
import os, time
import numpy as np
def version():
    if {missing}: import package_that_nobody_has
    return {{"version": "1.0"}}
def load(**_): return {{}}
def logits(ids, **_):
    if "{how}" == "abort":
        os.write(2, b"fake.cpp:12: GGML_ASSERT(n_head > 0) failed" + bytes([10]))
        os.abort()
    if "{how}" == "hang": time.sleep(600)
    if "{how}" == "shape": return {{"logits": np.zeros((1, 3), np.float32)}}
    raise ValueError("no such thing")
def unload(): return {{}}
METHODS = {{f.__name__: f for f in (version, load, logits, unload)}}
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verify") / "tiny"
    export_bundle(lively_model(tiny_shape("plain")), out, quants=("f32", "q8_0"))
    return out


@pytest.fixture
def fake_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a peer that dies in a chosen way in llama.cpp's place."""

    def install(how: str) -> None:
        (tmp_path / "peer_fake.py").write_text(FAKE_PEER.format(how=how, missing=how == "missing"))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

        def make(name: str, *, deadline_s: float) -> Runtime:
            if name != "llama.cpp":
                return make_runtime(name, deadline_s=deadline_s)
            fake = PeerRuntime(name, "peer_fake", ("gguf",), deadline_s=deadline_s)
            return fake

        monkeypatch.setattr(verify, "make_runtime", make)

    return install


def status(result: dict[str, Any], name: str) -> tuple[str, str]:
    (state,) = [runtime for runtime in result["runtimes"] if runtime["name"] == name]
    return state["status"], state["why"]


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_every_tiny_shape_passes(tmp_path: Path, name: str) -> None:
    quants = BODY_QUANTS if name in ("smollm_like", "rotary_apart") else ("f32", "q4_0")
    export_bundle(lively_model(tiny_shape(name), seed=3), tmp_path / "b", quants=quants)
    result = verify_bundle(tmp_path / "b")
    assert result["verdict"] == "pass", result["summary"]
    left = {line["file"] for line in result["weights"]} - {pair["file"] for pair in result["pairs"]}
    assert all(file.startswith("transformersjs/") for file in left)  # onnxruntime ran the same bytes in genai's folder
    assert len(result["tokens"]) >= 32
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("name", VARIANT_SHAPES)
def test_every_architecture_passes_wherever_it_fits(tmp_path: Path, name: str) -> None:
    shape = tiny_shape(name)
    feasible = set(TARGETS) - set(refusals(TARGETS, shape))
    if feasible < {"hf", "genai", "transformersjs"}:  # nothing, or ONNX alone, which has no folder to be judged by
        with pytest.raises(UnsupportedError, match=r"cannot export"):
            export_bundle(lively_model(shape, seed=3), tmp_path / "b")
        return
    export_bundle(lively_model(shape, seed=3), tmp_path / "b", quants=("f32", "q8_0"), skip_infeasible=True)
    result = verify_bundle(tmp_path / "b", runtimes=RUNTIMES[:3])
    assert result["verdict"] == "pass", result["summary"]
    peers = {"llama.cpp"} if "gguf" in feasible else set()
    assert {pair["b"] for pair in result["pairs"]} == {"engine", "onnxruntime"} | peers


@pytest.mark.parametrize(
    ("name", "file", "changes", "words"),
    [
        ("yarn", "gguf/model-f32.gguf", {"rope_scaling": None}, "rope_scaling is none, but yarn_4_32 in hf"),
        ("llama3", "gguf/model-f32.gguf", {"rope_scaling": None}, "rope_scaling is none, but llama3_8_32 in hf"),
        ("yarn", ONNX, {"rope_scaling": None}, "rope_theta is 10000.0 without scaling, but 10000.0 in hf"),
        ("linear", "hf", {"rope_scaling": None}, "rope_scaling is linear_4"),
        ("smollm3", ONNX, {"nope_every": 0}, "nope_every is no positions in layers [], but 4 in hf"),
    ],
)
def test_a_forgotten_position_rule_is_named(tmp_path: Path, name: str, file: str, changes: dict[str, Any], words: str) -> None:
    model = lively_model(tiny_shape(name))
    export_bundle(model, tmp_path / "b", quants=("f32",))
    put(tmp_path / "b", file, reshaped(model, **changes))
    result = verify_bundle(tmp_path / "b", runtimes=["engine"])
    assert result["verdict"] == "fail"
    assert any(words in line for line in result["summary"]), result["summary"]


@pytest.mark.parametrize("file", ["gguf/model-f32.gguf", ONNX])
def test_a_forgotten_bias_is_named(tmp_path: Path, file: str) -> None:
    model = lively_model(tiny_shape("qwen2"))
    export_bundle(model, tmp_path / "b", quants=("f32",))
    put(tmp_path / "b", file, with_values(model, blk_1_attn_k_bias=lambda values: values * 0))
    result = verify_bundle(tmp_path / "b", runtimes=["engine"])
    assert result["verdict"] == "fail"
    assert any("blk.1.attn_k.bias: it is all zeros" in line for line in result["summary"]), result["summary"]


@pytest.mark.parametrize(("width", "heads", "kv_heads", "head_dim"), [(320, 8, 1, 40), (896, 3, 3, 80), (320, 4, 4, 36)])
def test_each_rung_of_the_attention_ladder(tmp_path: Path, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """In every runtime that is installed; test_parity_shapes.py has all widths in the first three."""
    shape = Shape.parse(f"L=1,d={width},heads={heads},kv={kv_heads},head_dim={head_dim},ff=96,vocab=96,tied,ctx=64,qk_norm")
    export_bundle(lively_model(shape, seed=2), tmp_path / "b", quants=("f32", "q4_0"))
    result = verify_bundle(tmp_path / "b")
    assert result["verdict"] == "pass", result["summary"]


@pytest.mark.parametrize("name", ["plain", "narrow_heads", "shared", "qwen3_odd"])
def test_standard_operators_pass(tmp_path: Path, name: str) -> None:
    export_bundle(
        lively_model(tiny_shape(name), seed=3),
        tmp_path / "b",
        quants=("f32", "q4_0"),
        onnx_profile="standard",
        skip_infeasible=True,
    )
    result = verify_bundle(tmp_path / "b", runtimes=RUNTIMES[:3])
    assert result["verdict"] == "pass", result["summary"]
    assert {line["file"] for line in result["weights"]} >= {"genai/f32/model.onnx", "genai/q4_0/model.onnx"}


def test_accuracy_levels_are_both_run_and_told_apart(tmp_path: Path) -> None:
    """Whatever level the file asks for; 0 computes in f32, 4 rounds activations, which shows by far."""
    model = random_model(Shape.parse("L=4,d=64,heads=4,kv=2,ff=160,vocab=500,untied"), seed=1)
    quants = ("f32", "q8_0", "q4_0")
    export_bundle(model, tmp_path / "b", targets=["hf", "onnx"], quants=quants, accuracy_level=4)
    result = verify_bundle(tmp_path / "b", runtimes=["onnxruntime"])
    assert result["verdict"] == "pass", result["summary"]
    found = {(pair["mode"], pair["budget"]["name"]) for pair in result["pairs"]}
    levels = {("level 0", f"onnxruntime.{quant}") for quant in quants[1:]}
    assert found == {("", "onnxruntime.f32")} | levels | {("level 4", f"onnxruntime_int8.{quant}") for quant in quants[1:]}
    exact = max(pair["nmse"] for pair in result["pairs"] if pair["mode"] == "level 0")
    rounded = min(pair["nmse"] for pair in result["pairs"] if pair["mode"] == "level 4")
    assert exact < 1e-10 < 1e-7 < rounded


@pytest.mark.parametrize(
    ("hf_dtype", "quants", "base"),
    [("f16", ("f32", "q4_0"), "gguf/model-f32.gguf"), ("bf16", ("q8_0", "q4_0"), "hf"), ("f16", ("q4_1",), "hf")],
)
def test_bundles_whose_folder_is_rounded(tmp_path: Path, hf_dtype: str, quants: tuple[str, ...], base: str) -> None:
    """Quantised files come from the weights before that rounding, so they differ from what the folder would quantise to."""
    model = lively_model(tiny_shape("plain"))
    export_bundle(model, tmp_path / "b", quants=quants, hf_dtype=hf_dtype)
    result = verify_bundle(tmp_path / "b", runtimes=["onnxruntime", "engine"])
    assert result["base"] == base and result["verdict"] == "pass", result["summary"]
    file = f"gguf/model-{quants[-1]}.gguf"
    put(tmp_path / "b", file, exchanged(model, "blk.1.ffn_up", "blk.1.ffn_gate"), quants[-1])
    result = verify_bundle(tmp_path / "b", runtimes=["engine"])
    assert result["verdict"] == "fail"
    assert any(line.startswith(f"differs: {file}: blk.1.ffn_gate: ") for line in result["summary"])


def test_kept_integers_pass(tmp_path: Path) -> None:
    """A q4_1 model exports its own blocks; rounding their values again need not give the same ones, and need not."""
    model = lively_model(tiny_shape("smollm_like"), quant="q4_1")
    export_bundle(model, tmp_path / "b", quants=("f32", "q4_1", "q8_0"))
    result = verify_bundle(tmp_path / "b", runtimes=["onnxruntime"])
    assert result["verdict"] == "pass", result["summary"]


@pytest.mark.parametrize(("targets", "ran"), [(["hf"], "engine"), (["onnx"], "onnxruntime"), (["gguf"], "engine llama.cpp")])
def test_bundles_of_one_kind(tmp_path: Path, targets: list[str], ran: str) -> None:
    export_bundle(lively_model(tiny_shape("plain")), tmp_path / "b", targets=targets, quants=("q4_0",))
    result = verify_bundle(tmp_path / "b")
    assert result["verdict"] == "pass", result["summary"]
    for name in ("engine", "onnxruntime", "llama.cpp"):
        state, why = status(result, name)
        assert state == ("ran" if name in ran.split() else "skipped")
        assert (why == "") == (state == "ran") and (why == "" or "the bundle holds no" in why)


def test_what_is_not_asked_for_is_skipped_and_said(exported: Path) -> None:
    result = verify_bundle(exported, runtimes=["onnxruntime"])
    assert result["verdict"] == "pass"
    assert {pair["b"] for pair in result["pairs"]} == {"onnxruntime"}
    assert status(result, "llama.cpp") == ("skipped", "not asked for")
    assert any(line.startswith("skipped: engine") for line in result["summary"])


def test_nothing_compared_is_no_pass(exported: Path) -> None:
    result = verify_bundle(exported, runtimes=[])
    assert result["verdict"] == "fail" and result["summary"][0] == "fail: nothing could be compared"


def test_a_missing_package_is_skipped_never_passed(exported: Path, fake_llama: Callable[[str], None]) -> None:
    fake_llama("missing")
    result = verify_bundle(exported, runtimes=["llama.cpp", "engine"])
    assert result["verdict"] == "pass"
    state, why = status(result, "llama.cpp")
    assert state == "skipped" and "not installed" in why and "package_that_nobody_has" in why
    assert not [pair for pair in result["pairs"] if pair["b"] == "llama.cpp"]
    assert any(line.startswith("skipped: llama.cpp: llama.cpp is not installed") for line in result["summary"])
    assert "llama.cpp" not in result["summary"][0]
    assert verify_bundle(exported, runtimes=["llama.cpp"])["verdict"] == "fail"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("abort", "killed by SIGABRT; it last said: fake.cpp:12: GGML_ASSERT(n_head > 0) failed"),
        ("raise", "logits failed: ValueError: no such thing"),
    ],
)
def test_a_crash_is_a_line_of_the_result(exported: Path, fake_llama: Callable[[str], None], how: str, words: str) -> None:
    fake_llama(how)
    result = verify_bundle(exported, runtimes=["llama.cpp", "onnxruntime"])
    assert result["verdict"] == "fail"
    state, why = status(result, "llama.cpp")
    assert state == "failed" and words in why and "\n" not in why
    broken = [pair for pair in result["pairs"] if not pair["ok"]]
    assert [pair["file"] for pair in broken] == ["gguf/model-f32.gguf", "gguf/model-q8_0.gguf"]  # a new child for the second
    assert all(pair["b"] == "llama.cpp" and words in pair["why"] for pair in broken)
    assert any(line.startswith("failed: llama.cpp: gguf/model-f32.gguf: ") for line in result["summary"])
    assert status(result, "onnxruntime")[0] == "ran"


def test_a_peer_that_hangs_is_ended(tmp_path: Path, fake_llama: Callable[[str], None]) -> None:
    export_bundle(lively_model(tiny_shape("plain")), tmp_path / "b", targets=["gguf"], quants=["f32"])
    fake_llama("hang")
    result = verify_bundle(tmp_path / "b", runtimes=["llama.cpp"], deadline_s=3.0)
    assert result["verdict"] == "fail"
    assert "did not finish before its deadline and was killed" in status(result, "llama.cpp")[1]


def test_logits_of_another_shape(exported: Path, fake_llama: Callable[[str], None]) -> None:
    fake_llama("shape")
    result = verify_bundle(exported, runtimes=["llama.cpp"])
    assert result["verdict"] == "fail"
    assert result["pairs"][0]["why"] == "its logits are [1, 3], but [32, 96] are needed"


def test_own_tokens_and_their_limits(exported: Path) -> None:
    result = verify_bundle(exported, runtimes=["onnxruntime"], tokens=range(64))
    assert result["verdict"] == "pass" and result["tokens"] == list(range(64))
    for tokens in ([], [96], [-1], range(65)):
        with pytest.raises(UsageError, match="the tokens must be 1 to 64 ids from 0 to 95"):
            verify_bundle(exported, tokens=list(tokens))
    with pytest.raises(
        UsageError, match=r"runtime 'torch' is unknown; use one of engine, onnxruntime, llama\.cpp, genai, transformers\.js"
    ):
        verify_bundle(exported, runtimes=["torch"])


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"manifest\.json"):
        verify_bundle(tmp_path)


def test_missing_and_unlisted_files(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "b")
    (tmp_path / "b" / "notes.txt").write_text("mine")
    result = verify_bundle(tmp_path / "b", runtimes=["onnxruntime"])
    assert result["verdict"] == "pass" and result["unlisted_files"] == ["notes.txt"]
    assert any("notes.txt" in line for line in result["summary"])
    (tmp_path / "b" / "hf" / "model.safetensors").unlink()
    result = verify_bundle(tmp_path / "b", runtimes=["onnxruntime"])
    assert result["verdict"] == "fail" and result["base"] == "gguf/model-f32.gguf"
    assert any(line.startswith("checksum: hf/model.safetensors") for line in result["summary"])
    assert any(line.startswith("unreadable: ") for line in result["summary"])


def test_progress_is_told(exported: Path) -> None:
    said: list[str] = []
    verify_bundle(exported, runtimes=["onnxruntime"], progress=said.append)
    assert said[0] == "checksums" and "genai/f32/model.onnx in onnxruntime" in said


@pytest.mark.slow
def test_smollm2_passes_and_its_mutants_fail(smollm2_path: Path, tmp_path: Path) -> None:
    model = load_model(smollm2_path)
    bundle = tmp_path / "b"
    export_bundle(model, bundle, targets=("hf", "transformersjs", "gguf"), quants=("f32", "q4_0"))
    result = verify_bundle(bundle, runtimes=["engine", "onnxruntime", "llama.cpp"])  # the others: test_interop_models.py
    assert result["verdict"] == "pass", result["summary"]
    assert [runtime["status"] for runtime in result["runtimes"]] == ["ran"] * 4 + ["skipped"] * 2
    plain = model.quantized("f32")
    mutants = {
        "gguf/model-f32.gguf": (
            exchanged(plain, "blk.7.ffn_gate", "blk.7.ffn_up"),
            "blk.7.ffn_gate: it equals what blk.7.ffn_up",
        ),
        ONNX: (Model(plain.shape.replace(rms_norm_eps=1e-6), plain.tensors), "rms_norm_eps is 1e-06, but 1e-05"),
    }
    for file, (wrong, _) in mutants.items():
        put(bundle, file, wrong)
    result = verify_bundle(bundle, runtimes=["onnxruntime", "llama.cpp"], tokens=range(100, 104))
    assert result["verdict"] == "fail"
    assert {pair["file"] for pair in result["pairs"] if not pair["ok"]} == set(mutants)
    assert result["first_parting"]["position"] == 0
    for file, (_, says) in mutants.items():
        assert any(file in line and says in line for line in result["summary"]), result["summary"]
