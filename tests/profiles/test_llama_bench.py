from __future__ import annotations

import ctypes
import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import llama_cpp
import pytest

from deepthin.engine.shape import Shape
from deepthin.export.gguf_writer import write_gguf
from deepthin.profiles.llama_bench import llama_bench_rows, model_type
from tests.support.tiny_models import lively_model, tiny_shape

# Names, order and JSON types as llama-bench has them (test::get_fields and get_field_type), then what only JSON adds
TEXTS = (
    "build_commit cpu_info gpu_info backends model_filename model_type cpu_mask type_k type_v split_mode devices tensor_split"
)
TEXTS += " tensor_buft_overrides load_mode test_time"
SWITCHES = "cpu_strict no_kv_offload embeddings no_host"
RATES = "avg_ts stddev_ts"
ORDER = """
build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch
n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu no_kv_offload flash_attn
devices tensor_split tensor_buft_overrides load_mode embeddings no_op_offload no_host fit_target fit_min_ctx n_prompt n_gen
n_depth test_time avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts"""


def body(**changes: Any) -> dict[str, Any]:
    """A bench document with an engine that took 10, 12 and 11 ms for 4 tokens, and a peer that is not installed."""
    rates = [4 / seconds for seconds in (0.010, 0.012, 0.011)]
    row = {
        "runtime": "deepthin",
        "runtime_version": "1.2",
        "test": "tg4@d5",
        "threads": 2,
        "status": "ran",
        "n_prompt": 0,
        "n_gen": 4,
        "n_depth": 5,
        "test_time": "2026-01-02T03:04:05Z",
        "tok_s": {"samples": rates},
    }
    return {
        "shape": tiny_shape("plain").to_json(),
        "quant": "q4_0",
        "model_bytes": 1000,
        "model_params": 2_500_000,
        "config": {"kv_format": "q8_0"},
        "results": [{**row, **changes}, {"runtime": "llama.cpp", "status": "skipped", "why": "not installed"}],
    }


def test_fields_order_and_types_are_those_of_llama_bench() -> None:
    (row,) = llama_bench_rows(body(), {"cpu_model": "A CPU"}, "dir/model.gguf")
    assert list(row) == ORDER.split()
    for name, value in json.loads(json.dumps(row)).items():
        if name.startswith("samples_"):
            kind: type = list
        else:
            kind = (
                str if name in TEXTS.split() else bool if name in SWITCHES.split() else float if name in RATES.split() else int
            )
        assert type(value) is kind, name


def test_samples_mean_and_deviation_by_hand() -> None:
    (row,) = llama_bench_rows(body(), {"cpu_model": "A CPU"}, "dir/model.gguf")
    assert row["samples_ns"] == [10_000_000, 12_000_000, 11_000_000]
    assert (row["avg_ns"], row["stddev_ns"]) == (11_000_000, 1_000_000)
    rates = [400.0, 4 / 0.012, 4 / 0.011]
    assert row["samples_ts"] == pytest.approx(rates)
    assert row["avg_ts"] == pytest.approx(mean(rates), abs=1e-6)
    assert row["stddev_ts"] == pytest.approx(stdev(rates), abs=1e-6)
    assert (row["n_prompt"], row["n_gen"], row["n_depth"], row["n_threads"]) == (0, 4, 5, 2)
    assert (row["type_k"], row["type_v"], row["cpu_info"], row["model_filename"]) == ("q8_0", "q8_0", "A CPU", "dir/model.gguf")
    assert row["model_type"] == "llama 2.50M Q4_0"


def test_a_prompt_with_its_answer_fills_both_fields() -> None:
    row = {"runtime": "onnxruntime", "test": "pp6+tg4", "n_prompt": 6, "n_gen": 4, "n_depth": 0}
    (found,) = llama_bench_rows(body(**row, tok_s={"samples": [100.0]}), {}, "x")
    assert (found["n_prompt"], found["n_gen"], found["avg_ns"], found["n_batch"]) == (6, 4, 100_000_000, 6)


def test_one_sample_has_no_deviation() -> None:
    (row,) = llama_bench_rows(body(tok_s={"samples": [100.0]}), {}, "x")
    assert (row["avg_ns"], row["stddev_ns"], row["stddev_ts"]) == (40_000_000, 0, 0.0)


@pytest.mark.parametrize(
    ("runtime", "batch", "cache"),
    [("llama.cpp", (2048, 512), "f16"), ("onnxruntime", (4, 4), "f32"), ("deepthin", (32, 32), "q8_0")],
)
def test_each_runtime_says_its_batches_and_cache(runtime: str, batch: tuple[int, int], cache: str) -> None:
    (row,) = llama_bench_rows(body(runtime=runtime), {}, "x")
    assert ((row["n_batch"], row["n_ubatch"]), row["type_k"]) == (batch, cache)
    assert row["build_commit"] == f"{runtime} 1.2"


@pytest.mark.parametrize(
    ("shape", "params", "quant", "text"),
    [
        ("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,qk_norm", 1_234_000_000, "f32", "qwen3 1.23B all F32"),
        ("L=2,d=64,heads=4,kv=2,ff=96,vocab=96,mlp=gelu", 90_000, "q6_k", "unpublished 0.09M Q6_K"),
    ],
)
def test_model_type(shape: str, params: int, quant: str, text: str) -> None:
    assert model_type(Shape.parse(shape), params, quant) == text


@pytest.mark.parametrize("name", ["plain", "wide_heads"])
def test_size_and_parameters_are_what_llama_cpp_counts(name: str, tmp_path: Path) -> None:
    model = lively_model(tiny_shape(name), quant="q4_0")
    path = tmp_path / "model.gguf"
    write_gguf(model, path)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert ctypes.cast(loaded, ctypes.c_void_p).value
    try:
        counted = llama_cpp.llama_model_size(loaded), llama_cpp.llama_model_n_params(loaded)
    finally:
        llama_cpp.llama_model_free(loaded)
    assert counted == (model.num_bytes, sum(math.prod(tensor.dims) for tensor in model.tensors.values()))
