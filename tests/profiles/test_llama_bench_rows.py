"""What llama-bench prints is read; what cannot be a result of one build on one CPU is refused in one sentence."""

import json
from typing import Any

import pytest

from deepthin.engine.errors import FormatError
from deepthin.profiles.llama_bench_rows import parse_rows


def row(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "build_commit": "abc1234",
        "build_number": 6000,
        "cpu_info": "Some CPU",
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": "/sdcard/kit/probe-L4-d256-heads4-kv2-ff768-vocab4096-tied-q4_0.gguf",
        "model_type": "llama 4.46M Q4_0",
        "model_size": 3_000_000,
        "model_n_params": 4_460_000,
        "n_threads": 4,
        "n_gpu_layers": 99,
        "n_prompt": 0,
        "n_gen": 32,
        "n_depth": 0,
        "avg_ns": 32_000_000,
        "stddev_ns": 1_000_000,
        "samples_ns": [31_000_000, 32_000_000, 33_000_000],
    }
    return {**fields, **changes}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([row(), row(n_prompt=128, n_gen=0)]),
        json.dumps(row()) + "\n" + json.dumps(row(n_prompt=128, n_gen=0)) + "\n",
        json.dumps([row()]) + "\n" + json.dumps([row(n_prompt=128, n_gen=0)]),
    ],
)
def test_arrays_lines_and_several_arrays_are_read(text: str) -> None:
    decode, prompt = parse_rows(text, "r.json")
    assert (decode.gen, decode.threads, decode.runtime, decode.build) == (32, 4, "llama.cpp", "abc1234 (6000)")
    assert decode.seconds == pytest.approx((0.031, 0.032, 0.033))
    assert (prompt.prompt, prompt.gen) == (128, 0)


def test_our_own_bench_says_the_runtime_in_the_build() -> None:
    (found,) = parse_rows(json.dumps([row(build_commit="onnxruntime 1.27.0")]), "r.json")
    assert found.runtime == "onnxruntime"


def test_runtimes_of_one_file_may_have_builds_of_their_own() -> None:
    text = json.dumps([row(build_commit="onnxruntime 1.27.0"), row(build_commit="deepthin 0.2.0")])
    assert [one.runtime for one in parse_rows(text, "r.json")] == ["onnxruntime", "deepthin"]


def test_a_file_without_samples_keeps_its_mean_and_deviation() -> None:
    (found,) = parse_rows(json.dumps([row(samples_ns=None)]), "r.json")
    assert found.seconds == pytest.approx((0.031, 0.032, 0.033))


def test_a_gpu_build_that_used_no_gpu_is_read() -> None:
    assert parse_rows(json.dumps([row(backends="Metal,BLAS", gpu_info="Apple M4", n_gpu_layers=0)]), "r.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "r.json: holds no rows; run llama-bench with -o json"),
        ("[]", "r.json: holds no rows"),
        ("| model | size |\n", "r.json: line 1 is no JSON"),
        (json.dumps([row()])[:-30], "r.json: line 1 is no JSON"),
        ("[1]", "r.json: row 1: is int, but an object"),
        (json.dumps([row(), row(build_commit="def5678")]), "rows of 2 llama.cpp builds are mixed"),
        (json.dumps([row(), row(build_number=6001)]), r"builds are mixed \(abc1234 \(6000\), abc1234 \(6001\)\)"),
        (json.dumps([row(), row(cpu_info="Another")]), "rows of 2 CPUs are mixed"),
        (json.dumps([row(samples_ns=[5, 5, 5])]), "row 1: all 3 repetitions took exactly 5 ns, which no clock shows"),
        (json.dumps([row(samples_ns=None, stddev_ns=0)]), "stddev_ns is 0, so nothing is known of the noise"),
        (json.dumps([row(samples_ns=None, avg_ns=None)]), "neither samples_ns nor avg_ns is there"),
        (json.dumps([row(samples_ns=[])]), r"samples_ns is \[\]"),
        (json.dumps([row(samples_ns=[1, -1])]), "no time above 0"),
        (json.dumps([row(samples_ns=[1, "2"])]), "no time above 0"),
        (json.dumps([row(n_gen=None)]), "row 1: n_gen is None, but a whole number"),
        (json.dumps([row(n_threads=True)]), "n_threads is True"),
        (json.dumps([row(n_gen=0)]), "no tokens"),
        (json.dumps([row(n_prompt=64)]), r"timed together \(-pg\)"),
        (json.dumps([row(backends="CUDA", gpu_info="RTX")]), "ran on CUDA"),
    ],
)
def test_what_cannot_be_results_is_refused(text: str, says: str) -> None:
    with pytest.raises(FormatError, match=says) as caught:
        parse_rows(text, "r.json")
    assert "\n" not in str(caught.value)
