from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.accounting import bytes_read_per_token, count_bytes
from deepthin.engine.errors import UnsupportedError, UsageError
from deepthin.engine.shape import Shape
from deepthin.profiles.block_costs import (
    MIN_STREAMED_BLOCKS,
    STREAMED_CACHES,
    UNKNOWN_CACHE_BYTES,
    BlockCosts,
    engine_digest,
    working_set,
)
from tests.support.step_timers import FakeMachine

SMALL = Shape.parse("L=6,d=128,heads=4,kv=2,ff=256,vocab=512,tied")
LARGE = Shape.parse("L=24,d=1024,heads=16,kv=4,ff=4096,vocab=32000,tied")
CACHE = 16 << 20
MACHINE = {
    "cpu_model": "Example",
    "usable_cpus": 2,
    "caches": [{"level": 3, "type": "unified", "bytes": CACHE, "instances": 1}],
}


def costs(path: Path, fake: FakeMachine, **changes: Any) -> BlockCosts:
    options: dict[str, Any] = {
        "threads": 2,
        "context": 64,
        "make_timer": fake.timer,
        "make_whole": fake.whole,
        "machine": MACHINE,
        "instruments": fake.instruments,
    }
    return BlockCosts(path / "m.jsonl", **(options | changes))


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_0"])
def test_parts_and_their_sum_follow_the_machine(tmp_path: Path, shape: Shape, quant: str) -> None:
    fake = FakeMachine()
    cost = costs(tmp_path, fake).measure(shape, quant)
    block, head = fake.block_s(shape, quant), fake.head_s(shape, quant)
    assert cost.block_s.median == pytest.approx(block)
    assert cost.head_s.median == pytest.approx(head)
    assert cost.overhead_s.median == pytest.approx(1e-5)
    assert cost.seconds_per_token.median == pytest.approx(shape.num_layers * block + head + 1.1e-5)
    assert cost.bytes_per_token == bytes_read_per_token(shape, quant)
    assert (cost.threads, cost.context, cost.quant, cost.flags, cost.measured_now) == (2, 64, quant, (), True)
    assert fake.open_timers == 0


def test_a_second_run_measures_nothing_and_finds_the_same_cost(tmp_path: Path) -> None:
    first = costs(tmp_path, FakeMachine(noise=0.02)).measure(SMALL, "q4_0")
    slower = FakeMachine(bandwidth=1e9)
    again = costs(tmp_path, slower)
    second = again.measure(SMALL, "q4_0")
    assert slower.made == []
    assert again.num_measured == 0
    assert not second.measured_now
    assert second.to_json() | {"measured_now": True} == first.to_json()


def test_a_streamed_block_is_timed_once_for_every_depth(tmp_path: Path) -> None:
    fake = FakeMachine()
    store = costs(tmp_path, fake)
    store.measure(LARGE, "q8_0")
    deeper = store.measure(LARGE.replace(num_layers=40), "q8_0")
    assert len(fake.made) == 1
    assert deeper.seconds_per_token.median == pytest.approx(
        40 * fake.block_s(LARGE, "q8_0") + fake.head_s(LARGE, "q8_0") + 1.1e-5
    )


def test_a_new_vocabulary_reuses_the_block_and_keeps_its_stored_time(tmp_path: Path) -> None:
    block = costs(tmp_path, FakeMachine()).measure(LARGE, "q8_0").block_s
    slower = FakeMachine(bandwidth=1e10)
    cost = costs(tmp_path, slower).measure(LARGE.replace(vocab_size=64000), "q8_0")
    assert cost.block_s == block
    assert cost.head_s.median == pytest.approx(slower.head_s(LARGE.replace(vocab_size=64000), "q8_0"))
    assert cost.measured_now


def test_a_cached_model_is_timed_with_exactly_its_own_blocks(tmp_path: Path) -> None:
    fake = FakeMachine()
    store = costs(tmp_path, fake)
    store.measure(SMALL, "q8_0")
    store.measure(SMALL.replace(num_layers=7), "q8_0")
    assert [made[-1] for made in fake.made] == [6, 7]
    assert fake.made[0][2:4] == (2, 65)  # room for the cached tokens and the one being decoded


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 1},
        {"context": 128},
        {"machine": MACHINE | {"cpu_model": "Other"}},
        {"machine": MACHINE | {"usable_cpus": 4}},
    ],
)
def test_other_conditions_are_other_measurements(tmp_path: Path, change: dict[str, Any]) -> None:
    costs(tmp_path, FakeMachine()).measure(LARGE, "q8_0")
    fake = FakeMachine()
    assert costs(tmp_path, fake, **change).measure(LARGE, "q8_0").measured_now


@pytest.mark.parametrize("quant", ["f16", "q4_0"])
def test_another_format_is_another_measurement(tmp_path: Path, quant: str) -> None:
    fake = FakeMachine()
    store = costs(tmp_path, fake)
    store.measure(LARGE, "q8_0")
    assert store.measure(LARGE, quant).measured_now


def test_an_edited_engine_is_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs(tmp_path, FakeMachine()).measure(LARGE, "q8_0")
    monkeypatch.setattr("deepthin.profiles.block_costs.engine_digest", lambda: "edited")
    assert costs(tmp_path, FakeMachine()).measure(LARGE, "q8_0").measured_now


def test_engine_digest_reads_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "decoder.py").write_text("a = 1\n")
    (tmp_path / "kernels" / "matvec.py").write_text("b = 1\n")
    monkeypatch.setattr("deepthin.profiles.block_costs.engine_package.__path__", [str(tmp_path)])
    before = engine_digest()
    (tmp_path / "kernels" / "matvec.py").write_bytes(b"b = 1\r\n")
    assert engine_digest() == before
    (tmp_path / "kernels" / "matvec.py").write_text("b = 2\n")
    assert engine_digest() != before


def test_a_disturbed_time_is_flagged_reused_and_retried_only_on_request(tmp_path: Path) -> None:
    disturbed = costs(tmp_path, FakeMachine(others_s=5.0)).measure(LARGE, "q8_0")
    assert disturbed.flags == ("other-processes",)
    quiet = FakeMachine()
    assert costs(tmp_path, quiet).measure(LARGE, "q8_0").flags == ("other-processes",)
    assert quiet.made == []
    retried = costs(tmp_path, quiet, retry_disturbed=True).measure(LARGE, "q8_0")
    assert (retried.flags, retried.measured_now) == ((), True)
    assert costs(tmp_path, quiet).measure(LARGE, "q8_0").flags == ()


def test_noise_beyond_the_budget_is_flagged(tmp_path: Path) -> None:
    cost = costs(tmp_path, FakeMachine(noise=0.8), budget_s=0.3).measure(SMALL, "q8_0")
    assert "wide-interval" in cost.flags


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.8])
def test_a_new_shape_keeps_to_its_budget(tmp_path: Path, noise: float) -> None:
    fake = FakeMachine(noise=noise)
    costs(tmp_path, fake, budget_s=1.0).measure(SMALL, "q8_0")
    assert fake.now < 1.3


def test_residual_compares_the_sum_with_the_whole(tmp_path: Path) -> None:
    fake = FakeMachine(whole_extra_s=0.0)
    whole_s = 6 * fake.block_s(SMALL, "q8_0") + fake.head_s(SMALL, "q8_0") + 1.1e-5
    fake.whole_extra_s = 0.25 * whole_s
    store = costs(tmp_path, fake)
    rows = store.check_residual([(SMALL, "q8_0")])
    assert rows[0]["residual"]["median"] == pytest.approx(1 / 1.25 - 1)
    assert rows[0]["composed_over_whole"] == pytest.approx(1 / 1.25 - 1)
    assert rows[0]["whole_s"]["median"] == pytest.approx(1.25 * whole_s)
    assert (rows[0]["shape"], rows[0]["quant"], rows[0]["flags"]) == (SMALL.text, "q8_0", [])
    before = len(fake.made)
    assert costs(tmp_path, fake).check_residual([(SMALL, "q8_0")]) == rows
    assert len(fake.made) == before
    assert fake.open_timers == 0


def test_residual_leaves_out_what_changed_since_the_parts_were_stored(tmp_path: Path) -> None:
    costs(tmp_path, FakeMachine()).measure(SMALL, "q8_0")
    slower = FakeMachine(bandwidth=1e10, layer_s=4e-5, overhead_s=2e-5)
    row = costs(tmp_path, slower).check_residual([(SMALL, "q8_0")])[0]
    assert row["residual"]["median"] == pytest.approx(0.0, abs=1e-9)
    assert row["composed_over_whole"] == pytest.approx(-0.5, abs=0.01)


def test_a_shape_the_engine_refuses_stores_nothing(tmp_path: Path) -> None:
    def refusing(*_: Any, **__: Any) -> Any:
        raise UnsupportedError("the engine does not share layers")

    store = costs(tmp_path, FakeMachine(), make_timer=refusing)
    with pytest.raises(UnsupportedError):
        store.measure(SMALL, "q8_0")
    assert len(store.store) == 0


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(1, 120),
    st.sampled_from([64, 256, 768, 2048]),
    st.sampled_from([512, 32000, 151936]),
    st.sampled_from([0, 512]),
    st.sampled_from(["f32", "q8_0", "q4_0"]),
)
def test_working_set_is_the_whole_model_or_streams(layers: int, width: int, vocab: int, context: int, quant: str) -> None:
    shape = Shape(num_layers=layers, hidden_size=width, num_heads=width // 32, intermediate_size=3 * width, vocab_size=vocab)
    chosen = working_set(shape, quant, context, CACHE)
    parts = count_bytes(shape, quant)
    kv = 2 * width * context * 2  # f16, as accounting has it
    block = (parts.attention + parts.mlp) / layers + kv
    assert 1 <= chosen.num_blocks <= layers
    if chosen.name == "streamed":
        assert chosen.num_blocks * block + parts.embedding >= STREAMED_CACHES * CACHE * 0.99
        assert chosen.num_blocks >= min(MIN_STREAMED_BLOCKS, layers)
    else:
        assert chosen.num_blocks == layers
        assert layers * block + parts.embedding < STREAMED_CACHES * CACHE


def test_cache_formats_are_measured_apart(tmp_path: Path) -> None:
    keys = {name: costs(tmp_path, FakeMachine(), kv_format=name).keys(SMALL, "q4_0") for name in ("f32", "f16", "q8_0")}
    assert len({str(key["block"]) for key in keys.values()}) == 3
    assert {key["head"]["kv_format"] for key in keys.values()} == {"f32", "f16", "q8_0"}
    sizes = [int(key["block"]["working_set"].split("x")[1].split("+")[0]) for key in keys.values()]
    assert sizes[0] > sizes[1] > sizes[2]
    with pytest.raises(UsageError, match="'f8' is no format of the key/value cache"):
        costs(tmp_path, FakeMachine(), kv_format="f8")


def test_an_unknown_cache_is_assumed_large(tmp_path: Path) -> None:
    assert costs(tmp_path, FakeMachine(), machine={"cpu_model": "Example"}).cache_bytes == UNKNOWN_CACHE_BYTES


@pytest.mark.parametrize("change", [{"threads": 0}, {"context": -1}, {"budget_s": 0.0}])
def test_impossible_conditions_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="at least one thread"):
        costs(tmp_path, FakeMachine(), **change)


def test_an_unknown_format_is_refused_before_any_timing(tmp_path: Path) -> None:
    fake = FakeMachine()
    with pytest.raises(UsageError, match="unknown"):
        costs(tmp_path, fake).measure(SMALL, "q9_9")
    assert fake.made == []


def test_importing_costs_loads_no_kernels() -> None:
    code = "import sys, deepthin.profiles.block_costs; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_real_engine_is_timed_and_its_whole_model_too(tmp_path: Path) -> None:
    store = BlockCosts(tmp_path / "m.jsonl", threads=2, context=8, budget_s=0.2)
    row = store.check_residual([(SMALL, "q4_0")])[0]
    cost = store.measure(SMALL, "q4_0")
    assert not cost.measured_now
    assert cost.seconds_per_token.median > 6 * cost.block_s.median > 0
    assert row["whole_s"]["median"] > 0
    assert store.num_measured == 1
