"""A ``bench`` document as llama-bench prints it: the same JSON fields, in its order and with its types.

``avg_ns``, ``stddev_ns`` and the samples follow llama-bench: whole nanoseconds, rates from them, mean and sample standard
deviation (of one sample: 0). Fields about GPUs, files and masks hold what llama-bench prints on a CPU when nobody sets them.
Where it looks a model's size class up by depth, ``model_type`` says the parameters counted. The runtime, for which
llama-bench has no field, stands in ``build_commit``.
Source: ``tools/llama-bench/llama-bench.cpp`` (test::get_fields, get_field_type) at ggml-org/llama.cpp@0104b15.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepthin.engine.architectures import gguf_architecture
from deepthin.engine.errors import UnsupportedError
from deepthin.engine.kernels.decode import ROWS
from deepthin.engine.shape import Shape

# tokens that go in together: (n_batch, n_ubatch), llama.cpp's defaults; onnxruntime takes a prompt whole, as one batch
_BATCHES = {"deepthin": (ROWS, ROWS), "llama.cpp": (2048, 512)}
_PEER_CACHES = {"llama.cpp": "f16", "onnxruntime": "f32", "genai": "f32"}  # what each keeps keys and values in


def llama_bench_rows(body: Mapping[str, Any], machine: Mapping[str, Any], filename: str) -> list[dict[str, Any]]:
    """One object per result that ran.

    Args:
        body: of the ``bench`` document.
        machine: its machine record.
        filename: what was timed, as given.
    """
    return [_row(body, result, machine, filename) for result in body["results"] if result["status"] == "ran"]


def _row(body: Mapping[str, Any], result: Mapping[str, Any], machine: Mapping[str, Any], filename: str) -> dict[str, Any]:
    runtime, tokens = result["runtime"], result["n_prompt"] + result["n_gen"]
    cache = _PEER_CACHES.get(runtime, body["config"]["kv_format"])
    batch, ubatch = _BATCHES.get(runtime, (max(result["n_prompt"] or tokens, 1),) * 2)
    samples_ns = [max(1, round(1e9 * tokens / rate)) for rate in result["tok_s"]["samples"]]
    samples_ts = [1e9 * tokens / ns for ns in samples_ns]
    return {
        "build_commit": f"{runtime} {result['runtime_version']}",
        "build_number": 0,
        "cpu_info": str(machine.get("cpu_model", machine.get("arch", ""))),
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": filename,
        "model_type": model_type(Shape.from_json(body["shape"]), body["model_params"], result.get("quant", body["quant"])),
        "model_size": result.get("model_bytes", body["model_bytes"]),  # of its own format, in an export folder
        "model_n_params": body["model_params"],
        "n_batch": batch,
        "n_ubatch": ubatch,
        "n_threads": result["threads"],
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 50,
        "type_k": cache,
        "type_v": cache,
        "n_gpu_layers": 0,
        "n_cpu_moe": 0,
        "split_mode": "layer",
        "main_gpu": 0,
        "no_kv_offload": False,
        "flash_attn": -1,
        "devices": "auto",
        "tensor_split": "0.00",
        "tensor_buft_overrides": "none",
        "load_mode": "mmap",
        "embeddings": False,
        "no_op_offload": 0,
        "no_host": False,
        "fit_target": 0,
        "fit_min_ctx": 0,
        "n_prompt": result["n_prompt"],
        "n_gen": result["n_gen"],
        "n_depth": result["n_depth"],
        "test_time": result["test_time"],
        "avg_ns": sum(samples_ns) // len(samples_ns),
        "stddev_ns": int(_deviation(samples_ns)),
        "avg_ts": round(sum(samples_ts) / len(samples_ts), 6),
        "stddev_ts": round(_deviation(samples_ts), 6),
        "samples_ns": samples_ns,
        "samples_ts": samples_ts,
    }


def model_type(shape: Shape, params: int, quant: str) -> str:
    """Architecture, parameters and format as llama-bench words them: ``llama 134.52M Q4_1``."""
    try:
        architecture = gguf_architecture(shape).name
    except UnsupportedError:
        architecture = "unpublished"
    size = f"{params / 1e9:.2f}B" if params >= 1e9 else f"{params / 1e6:.2f}M"
    return f"{architecture} {size} {'all F32' if quant == 'f32' else quant.upper()}"


def _deviation(samples: Sequence[float]) -> float:
    """Sample standard deviation; 0 of fewer than two."""
    if len(samples) < 2:
        return 0.0
    mean = sum(samples) / len(samples)
    return math.sqrt(sum((x - mean) ** 2 for x in samples) / (len(samples) - 1))
