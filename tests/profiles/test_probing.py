"""Timing probe models: sessions on fakes, and once on the real engine, llama.cpp and onnxruntime."""

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from deepthin.cli.bench import write_onnx_for_timing
from deepthin.engine.accounting import count_params
from deepthin.engine.errors import UsageError
from deepthin.engine.model import Model, random_model
from deepthin.engine.shape import Shape
from deepthin.engine.synthetic import SyntheticDecoder
from deepthin.export.gguf_writer import write_gguf
from deepthin.profiles.contestants import Peer, peer_kind
from deepthin.profiles.latency.runtimes import RUNTIMES
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload
from deepthin.profiles.probe_plans import KIT_PLAN, engine_plan, peer_plan
from deepthin.profiles.probe_shapes import ProbeModel, random_shape
from deepthin.profiles.probing import PeerFiles, open_engine, time_model
from deepthin.profiles.protocol import Rule, Subject
from tests.support.fake_runtimes import FakeHost, FakeTimed, small_plan

TINY = ProbeModel(Shape.parse("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"), "q8_0", (0, 9), (5,))
QUICK = Rule(rounds=2, budget_s=0.0)


def test_one_session_times_every_context_and_prompt() -> None:
    host = FakeHost()
    bench = host.bench(("llama.cpp",), {})
    model = small_plan()[0]
    found = time_model("llama.cpp", bench.open_runtimes["llama.cpp"], model, 2, QUICK, make_instruments=bench.instruments)
    assert [(p.work.test, p.work.context, p.work.tokens) for p in found] == [
        (DECODE, 0, 1), (DECODE, 512, 1), (PREFILL, 0, 32)
    ]  # fmt: skip
    assert all(p.threads == 2 and p.runtime == "llama.cpp" for p in found)
    assert host.open_count == 0


def test_the_engine_is_timed_without_weights() -> None:
    found = time_model("deepthin", open_engine, TINY, 2, QUICK)
    assert len(found) == 3
    assert all(1e-7 < p.seconds.median < 1 for p in found)


@pytest.mark.parametrize(("runtime", "write"), [("llama.cpp", write_gguf), ("onnxruntime", write_onnx_for_timing)])
def test_a_peer_is_timed_from_a_file_written_once(runtime: str, write: Callable[[Model, Path], object]) -> None:
    pytest.importorskip({"llama.cpp": "llama_cpp", "onnxruntime": "onnxruntime"}[runtime])
    written: list[Path] = []

    def counted(model: Model, path: Path) -> object:
        written.append(path)
        return write(model, path)

    with PeerFiles(runtime, counted) as files:
        for threads in (1, 2):
            found = time_model(runtime, files, TINY, threads, QUICK)
            assert [p.work.test for p in found] == [DECODE, PREFILL, DECODE]
            assert found[2].work.context >= 9
        assert files.version
    assert len(written) == 1
    assert not written[0].parent.exists()


def test_a_synthetic_prompt_takes_longer_with_more_tokens_and_refuses_what_does_not_fit() -> None:
    with SyntheticDecoder(TINY.shape, "q4_0", threads=1, context=128, num_blocks=2) as decoder:
        assert min(decoder.prompt(120) for _ in range(5)) > min(decoder.prompt(2) for _ in range(5))
        for tokens, position in ((0, 0), (129, 0), (1, 128), (1, -1)):
            with pytest.raises(UsageError, match="a prompt of"):
                decoder.prompt(tokens, position=position)


def test_random_shapes_keep_to_their_ranges_and_differ() -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    shapes = [random_shape(generator, (5e6, 6e8), (2, 80)) for _ in range(200)]
    sizes = [count_params(shape).total for shape in shapes]
    assert 3e6 < min(sizes) < 2e7
    assert 3e8 < max(sizes) < 9e8
    depths = [shape.num_layers for shape in shapes]
    assert min(depths) <= 3
    assert 60 < max(depths) <= 80
    assert len({shape.text for shape in shapes}) > 190


def test_plans_cover_every_format_of_the_engine_and_at_most_ten_models_of_a_peer() -> None:
    assert {model.quant for model in engine_plan()[:8]} == set(RUNTIMES["deepthin"].formats)
    for runtime in ("llama.cpp", "onnxruntime"):
        plan = peer_plan(runtime)
        assert len(plan) <= 10
        assert {model.quant for model in plan} <= set(RUNTIMES[runtime].formats)
    assert sum(len(models) for models in KIT_PLAN.values()) <= 10
    assert engine_plan() == engine_plan()


@pytest.mark.parametrize(("runtime", "write"), [("llama.cpp", write_gguf), ("onnxruntime", write_onnx_for_timing)])
def test_a_context_that_is_cached_already_is_not_taken_in_again_and_gives_the_same_logits(
    runtime: str, write: Callable[[Model, Path], object], tmp_path: Path
) -> None:
    pytest.importorskip({"llama.cpp": "llama_cpp", "onnxruntime": "onnxruntime"}[runtime])
    path = tmp_path / f"m{peer_kind(runtime).suffix}"
    write(random_model(TINY.shape, quant="q8_0"), path)
    before, ids = [5, 6, 7, 8], [1, 2, 3]
    with closing(Peer(runtime, path, 1, 64)) as peer:
        first = peer.logits(ids, before)
        peer.decode([9, 9, 9, 9], before)
        np.testing.assert_array_equal(peer.logits(ids, before), first)
        other = peer.logits(ids, [8, 7, 6, 5])
        assert not np.array_equal(other, first)
        np.testing.assert_array_equal(peer.logits(ids, before), first)
        peer.prompt(ids, ())
        np.testing.assert_array_equal(peer.logits(ids, before), first)


def test_a_peer_keeps_its_process_between_models_and_comes_back_after_a_death() -> None:
    pytest.importorskip("onnxruntime")
    with PeerFiles("onnxruntime", write_onnx_for_timing) as files:
        first = files(TINY, 1).pids
        other = ProbeModel(TINY.shape.replace(num_layers=3), "q8_0")
        assert files(other, 2).pids == first
        os.kill(first[0], signal.SIGKILL)
        assert files(TINY, 1).pids != first
        assert time_model("onnxruntime", files, TINY, 1, QUICK)


def test_contexts_of_a_peer_have_sessions_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTimed, "contexts_apart", True)
    host = FakeHost()
    bench = host.bench(("llama.cpp",), {})
    order: list[str] = []
    real = FakeTimed._subject

    def noted(self: FakeTimed, work: Workload, steps: int) -> Subject:
        run = real(self, work, steps)
        return lambda: order.append(f"{work.test}@{work.context}") or run()  # type: ignore[func-returns-value]

    monkeypatch.setattr(FakeTimed, "_subject", noted)
    found = time_model(
        "llama.cpp", bench.open_runtimes["llama.cpp"], small_plan()[0], 1, QUICK, make_instruments=bench.instruments
    )
    assert len(found) == 3
    first_deep = order.index("decode@512")
    assert set(order[first_deep:]) == {"decode@512"}
    assert set(order[:first_deep]) == {"decode@0", "prefill@0"}
