"""Export targets as data: what loads each folder and from which version on, whose shape rules hold, which files it cannot take.

The shape rules stand in ``engine/targets.py``, one function each; the operators of ONNX files in
:mod:`deepthin.export.onnx_profiles`. What a runtime keeps in memory was measured on the versions named (``docs/exports.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class TargetProfile:
    """One kind of folder.

    Attributes:
        name: as in ``--to``.
        profile: the runtime profile it stands for.
        runtime: what loads the folder as it is.
        version: the first version that was seen to.
        rule: whose verdict in ``engine/targets.py`` decides on a shape.
        onnx: whether it holds ONNX decoders.
        max_bytes: of all files of one decoder, or None.
        why_limit: what sets ``max_bytes``.
    """

    name: str
    profile: str
    runtime: str
    version: str
    rule: str
    onnx: bool = False
    max_bytes: int | None = None
    why_limit: str = ""


TARGET_PROFILES = {
    target.name: target
    for target in (
        TargetProfile("hf", "transformers", "transformers", "5.24", "hf"),
        TargetProfile("genai", "genai", "onnxruntime-genai", "0.18", "onnx", onnx=True),
        TargetProfile(
            "transformersjs", "web", "transformers.js", "4.3", "onnx", onnx=True,
            max_bytes=2 * GIB, why_limit="browsers keep a file in one ArrayBuffer, which ends there",
        ),
        TargetProfile("gguf", "llama.cpp", "llama.cpp", "0c1e570", "gguf-f16"),
    )
}  # fmt: skip
