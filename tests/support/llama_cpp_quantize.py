"""GGUF files quantised by llama.cpp itself, with the script that the benchmarks use."""

from __future__ import annotations

from pathlib import Path

from tests.support.benchmark_scripts import load_script


def llama_cpp_quantize(source: Path, out: Path, file_type: str) -> Path:
    """Convert the f32 or f16 file ``source`` to the mix that llama.cpp calls ``file_type``."""
    made: Path = load_script("llama_cpp_quantize").llama_cpp_quantize(source, out, file_type)
    return made
