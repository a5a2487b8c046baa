"""The engine's logits against llama.cpp's on the same files over 512 tokens of prose, and the script that tabulates them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepthin.engine.child import Child
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import FORMATS
from deepthin.engine.load import load_model
from deepthin.engine.model import Model
from deepthin.export.tolerances import gate
from tests.benchmarks.test_speed import record
from tests.support.benchmark_scripts import load_script

agreement = load_script("agreement")
TOKENS = 512
# Between them these hold every format: rows of 576 take no super-blocks, so llama.cpp's quantiser stores them otherwise.
FILES = {
    "f32": {"f32"},
    "f16": {"f16"},
    "bf16": {"bf16"},
    "q8_0": {"q8_0"},
    "q4_0": {"q4_0", "q8_0"},
    "q4_1": {"q4_1", "q8_0"},
    "Q4_K_M": {"q4_k", "q5_0", "q6_k", "q8_0"},
    "Q5_K_M": {"q5_k", "q5_1", "q6_k", "q8_0"},
}


@pytest.fixture(scope="module")
def source(smollm2_path: Path) -> Model:
    return load_model(smollm2_path)


@pytest.fixture(scope="module")
def files(source: Model, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return agreement.Files(source, tmp_path_factory.mktemp("agreement"))


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[Child]:
    with Child("deepthin.export.peer_llama_cpp", peer="llama.cpp", deadline_s=600) as child:
        yield child


def gate_of(name: str) -> dict[str, float]:
    return gate(f"agreement_{name if name in ('f32', 'f16', 'bf16') else 'k' if '_K' in name else 'int8'}")


def test_the_files_hold_every_format() -> None:
    assert set().union(*FILES.values()) == set(FORMATS)
    assert set(FILES) < set(agreement.FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_format_agrees_with_llama_cpp_over_prose(name: str, source: Model, files: Any, llama_cpp: Child) -> None:
    file = files.path(name)
    model = load_model(file)
    assert set(agreement.stored_as(model)) == FILES[name]
    ids = agreement.text_ids(source, TOKENS)
    # one thread each: two of llama.cpp's collapse on a busy machine
    ours, theirs = agreement.both_logits(model, file, llama_cpp, ids, threads=1)
    found, limit = agreement.compare(theirs, ours, ids), gate_of(name)
    assert found["kl_mean"] <= limit["kl"], found
    assert found["kl_max"] <= limit["position_kl"], found
    assert found["top1"] >= limit["top1"], found
    assert found["near_top1"] >= limit["near_top1"], found
    assert found["other_ppl"] == pytest.approx(found["base_ppl"], rel=0.02)
    if name == "q8_0":  # as far as llama.cpp is from itself
        some = ids[: TOKENS // 2]
        one_by_one = llama_cpp.call("logits", ids=some, schedule=[1] * len(some))["logits"]
        to_itself, to_us = (agreement.compare(theirs[: len(some)], x, some)["kl_mean"] for x in (one_by_one, ours[: len(some)]))
        assert to_us <= gate("agreement_itself")["times"] * to_itself
    if name != "f32":  # from which others are made
        file.unlink()


def test_distances_by_hand() -> None:
    base = np.log(np.array([[1, 1, 2], [1, 1, 2], [6, 1, 1]], np.float32) / 4)
    other = np.log(np.array([[1, 1, 2], [2, 1, 1], [1, 6, 1]], np.float32) / 4) + np.float32(7)  # a shift changes nothing
    found = agreement.compare(base, other, [0, 2, 1])
    kl = [0, 0.25 * math.log(2), 0.625 * math.log(6)]
    assert found["kl_mean"] == pytest.approx(sum(kl) / 3, rel=1e-6)
    assert found["kl_median"] == pytest.approx(kl[1], rel=1e-6)
    assert found["kl_max"] == pytest.approx(kl[2], rel=1e-6)
    assert found["top1"] == found["near_top1"] == pytest.approx(1 / 3)  # log 2 is no near-tie
    assert found["worst_gap"] == pytest.approx(math.log(6), rel=1e-6)
    assert found["base_ppl"] == pytest.approx(math.sqrt(2 * 4), rel=1e-6)  # of tokens 2 and 1, likely 1/2 and 1/4
    assert found["other_ppl"] == pytest.approx(math.sqrt(2 * 4), rel=1e-6)


def test_many_positions_are_compared_as_few_are() -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((100, 50), np.float32)
    other = base + rng.standard_normal((100, 50), np.float32) * np.float32(0.1)
    ids = rng.integers(0, 50, 100).tolist()
    found = agreement.compare(base, other, ids)
    p, q = (rows.astype(np.float64) - np.log(np.exp(rows.astype(np.float64)).sum(1))[:, None] for rows in (base, other))
    assert found["kl_mean"] == pytest.approx((np.exp(p) * (p - q)).sum(1).mean(), rel=1e-9)
    assert found["other_ppl"] == pytest.approx(np.exp(-q[np.arange(99), ids[1:]].mean()), rel=1e-9)
    assert found["top1"] == (base.argmax(1) == other.argmax(1)).mean() < found["near_top1"]


def test_the_text_is_long_enough_and_no_longer(source: Model) -> None:
    ids = agreement.text_ids(source, TOKENS)
    assert len(ids) == TOKENS and max(ids) < source.shape.vocab_size
    with pytest.raises(UsageError, match="the text has 647 tokens"):
        agreement.text_ids(source, 10_000)


def test_an_unknown_format_is_refused(source: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'q3_k' is unknown; take some of f32, f16"):
        agreement.Files(source, tmp_path).path("q3_k")


def test_results_are_stored_apart_and_shown(tmp_path: Path) -> None:
    distances = {"kl_mean": 2e-3, "kl_median": 1e-3, "kl_max": 0.5, "top1": 0.97, "near_top1": 1.0, "worst_gap": 0.2}
    distances |= {"base_ppl": 20.5, "other_ppl": 21.25}
    line = record("deepthin", "q8_0", 1, 1.0) | {
        "schema": agreement.SCHEMA,
        "tokens": 512,
        "near_tie": 0.5,
        "format": "Q4_K_M",
        "formats": {"q5_0": 3, "q4_k": 1},
        "engine": distances,
        "llama_cpp_itself": distances | {"kl_mean": 3e-3},
        "engine_to_truth": distances | {"kl_mean": 4e-3},
    }
    path = agreement.write_lines(agreement.stored_at(line, tmp_path, agreement.ENDING), [line])
    assert path.name == "2026-01-02-abcdef0123-agreement.jsonl"
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line]
    text = agreement.render([line])
    assert "| Q4_K_M (3 q5_0, 1 q4_k) | 2.0e-03 | 1.0e-03 | 5.0e-01 | 97.0% | 100.0% | 21.250 | 20.500 | 3.0e-03 |" in text
    assert text.splitlines()[2].count("|") == text.splitlines()[0].count("|")
    assert "512 tokens of English prose, 2026-01-02, avx2, commit abcdef0123" in text
