from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepthin.engine.accounting import bytes_read_per_token
from deepthin.engine.arrays import F32, F64
from deepthin.engine.errors import PeerError, PeerMissingError, UnsupportedError, UsageError, VerificationError
from deepthin.engine.model import Model
from deepthin.export.gguf_writer import write_gguf
from deepthin.export.onnx_model import write_onnx
from deepthin.profiles import bench as module
from deepthin.profiles.bench import BenchConfig, WriteModel, bench, body_quant, stored_bytes_per_token
from deepthin.profiles.contestants import PEERS, agreement
from deepthin.profiles.schema import Measured
from tests.support.tiny_models import lively_model, tiny_shape

WRITERS: dict[str, WriteModel] = {"llama.cpp": write_gguf, "onnxruntime": write_onnx}


class FakeRuntime:
    """Takes ``token_s`` per token by its own word; what it is asked for is kept."""

    pid = None
    simd = "portable"
    bytes_per_token = 1000
    version = "9.9"

    def __init__(self, token_s: float, *, wrong: bool = False, dies_after: int = 10**9) -> None:
        self.token_s, self.wrong, self.left = token_s, wrong, dies_after
        self.asked: list[tuple[str, int, int]] = []
        self.closed = False

    def greedy(self, first: int, count: int) -> list[int]:
        return [first] * count

    def logits(self, ids: Sequence[int], before: Sequence[int]) -> F32:
        row = np.linspace(-1, 1, 7, dtype=np.float32)
        return np.stack([row[::-1] if self.wrong else row for _ in ids])

    def prompt(self, ids: Sequence[int], before: Sequence[int]) -> float:
        return self._take("prompt", ids, before)

    def decode(self, ids: Sequence[int], before: Sequence[int]) -> float:
        return self._take("decode", ids, before)

    def answer(self, prompt: Sequence[int], ids: Sequence[int], before: Sequence[int]) -> float:
        return self._take("answer", [*prompt, *ids], before)

    def _take(self, method: str, ids: Sequence[int], before: Sequence[int]) -> float:
        self.left -= 1
        if self.left < 0:
            raise PeerError("llama.cpp: decode ended its process: killed by SIGABRT")
        self.asked.append((method, len(ids), len(before)))
        return self.token_s * len(ids)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def model() -> Model:
    return lively_model(tiny_shape("smollm_like"), quant="q8_0")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Contestants by name: the engine at 1 ms a token, llama.cpp at 2, and a ceiling of 2 MB/s."""
    runtimes: dict[str, Any] = {"deepthin": FakeRuntime(1e-3), "llama.cpp": FakeRuntime(2e-3), "onnxruntime": FakeRuntime(4e-3)}

    def peer(name: str, path: Path, threads: int, context: int) -> FakeRuntime:
        if isinstance(runtimes[name], Exception):
            raise runtimes[name]
        runtime: FakeRuntime = runtimes[name]
        return runtime

    def ceiling(threads: int, num_bytes: int, repetitions: int) -> F64:
        return np.full(repetitions, 2e6)

    monkeypatch.setattr(module, "Engine", lambda *_: runtimes["deepthin"])
    monkeypatch.setattr(module, "Peer", peer)
    monkeypatch.setattr(module, "read_bandwidth", ceiling)
    monkeypatch.setattr(module, "_SETTLE_S", 0.0)
    yield runtimes
    assert all(runtime.closed for runtime in runtimes.values() if isinstance(runtime, FakeRuntime) and runtime.asked)


def config(**changes: Any) -> BenchConfig:
    options: dict[str, Any] = {
        "threads": (2,),
        "prompt": (8,),
        "gen": (4,),
        "against": ("llama.cpp",),
        "repetitions": 6,
        "budget_s": 0.0,
    }
    return BenchConfig(**(options | changes))


def rows(document: dict[str, Any], runtime: str) -> list[dict[str, Any]]:
    return [row for row in document["results"] if row["runtime"] == runtime]


def test_rates_ratios_and_shares_by_hand(model: Model, fakes: dict[str, Any]) -> None:
    document = bench(model, config(), files={"llama.cpp": Path("any.gguf")})
    prompt, decode = rows(document, "deepthin")
    assert (prompt["test"], decode["test"], decode["threads"], decode["quant"]) == ("pp8", "tg4", 2, "q8_0")
    assert decode["tok_s"]["median"] == pytest.approx(1000.0)
    assert decode["tok_s"]["unit"] == "tok/s"
    assert decode["roofline_share"]["median"] == pytest.approx(1000 * 1000.0 / 2e6)
    assert (decode["ratio_to_engine"], prompt["roofline_share"]) == (None, None)
    peer = rows(document, "llama.cpp")[1]
    assert peer["tok_s"]["median"] == pytest.approx(500.0)
    assert peer["ratio_to_engine"]["median"] == pytest.approx(0.5)
    assert peer["bytes_per_token"] == stored_bytes_per_token(model)
    assert (peer["status"], peer["runtime_version"]) == ("ran", "9.9")
    assert document["bandwidth"][0]["bytes_per_s"]["median"] == 2e6
    assert document["agreement"] == [
        {"runtime": "llama.cpp", "threads": 2, "nmse": 0.0, "top1": 1.0, "positions": 16, "ok": True}
    ]
    json.dumps(document, allow_nan=False)


def test_both_sides_are_asked_for_the_same_work_at_depth(model: Model, fakes: dict[str, Any]) -> None:
    document = bench(model, config(depth=(5,)), files={"llama.cpp": Path("any.gguf")})
    assert set(fakes["deepthin"].asked) == set(fakes["llama.cpp"].asked) == {("prompt", 8, 5), ("decode", 4, 5)}
    assert [row["test"] for row in rows(document, "deepthin")] == ["pp8@d5", "tg4@d5"]


def test_lists_give_every_combination_in_llama_bench_order(model: Model, fakes: dict[str, Any]) -> None:
    document = bench(model, config(against=(), prompt=(8, 0, 16), gen=(4, 4), depth=(0, 5)))
    found = [(row["test"], row["n_prompt"], row["n_gen"], row["n_depth"]) for row in document["results"]]
    assert found == [
        ("pp8", 8, 0, 0),
        ("pp16", 16, 0, 0),
        ("tg4", 0, 4, 0),
        ("pp8@d5", 8, 0, 5),
        ("pp16@d5", 16, 0, 5),
        ("tg4@d5", 0, 4, 5),
    ]
    assert [entry["test"] for entry in document["bandwidth"]] == ["tg4", "tg4@d5"]
    assert config(prompt=(8, 16), depth=(0, 5)).context == 21


def test_a_prompt_and_its_answer_are_timed_together(model: Model, fakes: dict[str, Any]) -> None:
    wanted = config(prompt=(8,), gen=(0,), prompt_gen=((6, 4), (0, 3), (8, 0), (0, 0), (6, 4)), depth=(0, 5))
    document = bench(model, wanted, files={"llama.cpp": Path("any.gguf")})
    found = [(row["test"], row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows(document, "llama.cpp")]
    assert found[:3] == [("pp8", 8, 0, 0), ("pp6+tg4", 6, 4, 0), ("tg3", 0, 3, 0)]
    assert found[3:] == [("pp8@d5", 8, 0, 5), ("pp6+tg4@d5", 6, 4, 5), ("tg3@d5", 0, 3, 5)]
    together = rows(document, "deepthin")[1]
    assert together["tok_s"]["median"] == pytest.approx(1000.0)
    assert together["roofline_share"] is None
    assert {("prompt", 8, 0), ("answer", 10, 0), ("decode", 3, 5)} < set(fakes["llama.cpp"].asked)
    assert document["config"]["prompt_gen"] == [[6, 4], [0, 3], [8, 0], [0, 0], [6, 4]]
    assert config(prompt_gen=((30, 12),), depth=(5,)).context == 47


def test_kernels_alone_load_and_time_nothing(model: Model, fakes: dict[str, Any]) -> None:
    document = bench(model, config(prompt=(0,), gen=(0,), kernels=True))
    assert (document["results"], document["sessions"]) == ([], [])
    assert document["kernels"]["groups"]
    assert fakes["deepthin"].asked == []


def test_each_thread_count_is_a_bench_of_its_own(model: Model, fakes: dict[str, Any]) -> None:
    document = bench(model, config(threads=(1, 2), prompt=(0,)), files={"llama.cpp": Path("any.gguf")})
    assert [(row["runtime"], row["test"], row["threads"]) for row in document["results"]] == [
        ("deepthin", "tg4", 1),
        ("llama.cpp", "tg4", 1),
        ("deepthin", "tg4", 2),
        ("llama.cpp", "tg4", 2),
    ]


def test_a_missing_peer_is_skipped_by_name_and_the_rest_is_timed(model: Model, fakes: dict[str, Any]) -> None:
    fakes["onnxruntime"] = PeerMissingError("onnxruntime is not installed: No module named 'onnxruntime'")
    files = dict.fromkeys(PEERS, Path("any"))
    document = bench(model, config(against=("onnxruntime", "llama.cpp")), files=files)
    assert {row["status"] for row in rows(document, "onnxruntime")} == {"skipped"}
    assert "not installed" in rows(document, "onnxruntime")[0]["why"]
    assert [row["status"] for row in rows(document, "llama.cpp")] == ["ran", "ran"]


def test_a_peer_that_refuses_the_file_is_a_failed_row(model: Model, fakes: dict[str, Any]) -> None:
    fakes["llama.cpp"] = PeerError("llama.cpp: load ended its process: killed by SIGABRT")
    document = bench(model, config(), files={"llama.cpp": Path("any.gguf")})
    assert [(row["status"], row["test"]) for row in rows(document, "llama.cpp")] == [("failed", "pp8"), ("failed", "tg4")]
    assert "SIGABRT" in rows(document, "llama.cpp")[0]["why"]


def test_a_peer_that_dies_midway_fails_that_test_and_leaves(model: Model, fakes: dict[str, Any]) -> None:
    fakes["llama.cpp"] = FakeRuntime(2e-3, dies_after=5)
    document = bench(model, config(), files={"llama.cpp": Path("any.gguf")})
    assert [(row["test"], row["status"]) for row in rows(document, "llama.cpp")] == [("pp8", "failed")]
    assert [row["status"] for row in rows(document, "deepthin")] == ["ran", "ran"]


def test_another_model_is_never_timed(model: Model, fakes: dict[str, Any]) -> None:
    fakes["llama.cpp"] = FakeRuntime(1e-9, wrong=True)
    document = bench(model, config(), files={"llama.cpp": Path("any.gguf")})
    assert "another model" in rows(document, "llama.cpp")[0]["why"]
    assert fakes["llama.cpp"].asked == []
    assert not document["agreement"][0]["ok"]
    with pytest.raises(VerificationError, match="another model"):
        bench(model, config(), files={"llama.cpp": Path("any.gguf")}, strict=True)


def test_a_format_that_cannot_hold_the_model_is_a_failed_row(model: Model, fakes: dict[str, Any]) -> None:
    def refuse(_: Model, path: Path) -> None:
        raise UnsupportedError("gguf: the Llama architecture runs each layer once")

    document = bench(model, config(), writers={"llama.cpp": refuse})
    assert rows(document, "llama.cpp")[0]["why"] == "gguf: the Llama architecture runs each layer once"


def test_a_peer_without_file_or_writer_is_a_usage_error(model: Model, fakes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no model file to read"):
        bench(model, config())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": ()}, "threads"),
        ({"threads": (0,)}, "threads"),
        ({"prompt": (8, -1)}, "prompt is -1"),
        ({"prompt_gen": ((8, -2),)}, "prompt_gen is -2"),
        ({"depth": ()}, "depth is empty"),
        ({"repetitions": 0}, "repetitions is 0"),
        ({"prompt": (0,), "gen": ()}, "nothing to time"),
        ({"against": ("vllm",)}, "'vllm' is unknown; bench against llama.cpp or onnxruntime"),
    ],
)
def test_impossible_benches_are_refused_before_anything_is_loaded(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config(**change)


@pytest.mark.parametrize("name", ["smollm_like", "wide_heads"])
@pytest.mark.parametrize("quant", ["f32", "q4_0"])
def test_stored_bytes_are_what_accounting_says(name: str, quant: str) -> None:
    model = lively_model(tiny_shape(name), quant=quant)
    assert stored_bytes_per_token(model) == bytes_read_per_token(model.shape, quant)
    assert body_quant(model) == quant


def test_agreement_tells_rounding_from_another_model() -> None:
    rng = np.random.Generator(np.random.PCG64(2))
    ours = rng.standard_normal((16, 500)).astype(np.float32)
    rounded = agreement(ours, ours + np.float32(0.01) * rng.standard_normal(ours.shape).astype(np.float32))
    assert rounded.ok
    assert rounded.nmse == pytest.approx(1e-4, rel=0.1)
    assert not agreement(ours, rng.standard_normal(ours.shape).astype(np.float32)).ok
    flipped = ours.copy()
    flipped[3, ours[3].argmin()] = 5.0
    assert agreement(ours, flipped).top1 == pytest.approx(15 / 16)
    with pytest.raises(PeerError, match="not finite"):
        agreement(ours, np.full_like(ours, math.nan))
    with pytest.raises(PeerError, match="vocabulary"):
        agreement(ours, ours[:, :-1])


@pytest.mark.parametrize("quant", ["f16", "q4_0"])
def test_real_runtimes_agree_and_are_timed(quant: str) -> None:
    model = lively_model(tiny_shape("smollm_like"), quant=quant)
    document = bench(
        model,
        config(against=("llama.cpp", "onnxruntime"), prompt=(20,), gen=(3,), prompt_gen=((9, 2),), depth=(6,), repetitions=2),
        writers=WRITERS,
        strict=True,
    )
    assert [(row["runtime"], row["test"], row["status"]) for row in document["results"]] == [
        (runtime, test, "ran")
        for test in ("pp20@d6", "tg3@d6", "pp9+tg2@d6")
        for runtime in ("deepthin", "llama.cpp", "onnxruntime")
    ]
    for row in document["results"]:
        assert Measured.from_json(row["tok_s"]).median > 0
    assert [one["ok"] for one in document["agreement"]] == [True, True]
    share = next(row["roofline_share"] for row in rows(document, "deepthin") if row["test"] == "tg3@d6")
    assert share["median"] > 0
