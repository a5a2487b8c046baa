"""Which models an export folder holds for each runtime, as they lie there: a bundle, or one of its folders, there or moved.

A folder of a bundle is known by the manifest above it. One that was taken out of its bundle is known by what it holds:
``*.gguf``, ``genai_config.json``, or ``onnx/*.onnx`` beside a ``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deepthin.engine.errors import FormatError
from deepthin.engine.formats import BODY_QUANTS, F32, STORED
from deepthin.engine.load import load_model
from deepthin.engine.model import Model, Tensor
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import tensor_specs
from deepthin.export.manifest import FILE_NAME, Manifest, read_manifest
from deepthin.export.transformersjs_folder import file_name

LLAMA_CPP, ONNXRUNTIME, GENAI = "llama.cpp", "onnxruntime", "genai"
_DEPTH = 2  # of a model's folder below its bundle: genai/q4_0
_GENAI_CONFIG = "genai_config.json"
_TARGET_OF = {LLAMA_CPP: "gguf", ONNXRUNTIME: "genai", GENAI: "genai"}  # what --to writes it


@dataclass(slots=True)
class ExportedModel:
    """One stored format of an export folder.

    Attributes:
        quant: what its matrices are stored as.
        files: by runtime: the GGUF file, the ONNX file, the folder for genai.
        weights: reads the same weights for our engine.
    """

    quant: str
    files: dict[str, Path] = field(default_factory=dict)
    weights: Callable[[], Model] | None = None

    def missing(self, runtime: str) -> str:
        """Why ``runtime`` has nothing to run here."""
        return (
            f"the export folder holds nothing for {runtime} in {self.quant}; "
            f"export it with --to {_TARGET_OF[runtime]} --quant {self.quant}"
        )

    def load(self) -> Model:
        """The weights for our engine.

        Raises:
            FormatError: a file is damaged, or holds no shape.
        """
        if self.weights is None:
            raise AssertionError(f"Bug: an exported model in {self.quant} without weights")
        return self.weights()


def exported_models(path: Path) -> list[ExportedModel]:
    """The models in ``path``, in the order of its manifest or of their names; none when it is no export folder.

    Raises:
        FormatError: a manifest is damaged.
    """
    if not path.is_dir():
        return []
    whole = path.absolute()
    for root in (whole, *whole.parents[:_DEPTH]):
        if (root / FILE_NAME).is_file():
            try:
                return _of_bundle(root, whole, read_manifest(root))
            except FormatError:
                if root == whole:
                    raise  # further up it may be anybody's manifest
    return _of_folder(path)


def _of_bundle(root: Path, inside: Path, manifest: Manifest) -> list[ExportedModel]:
    """Models below ``inside``, a folder of the bundle ``root``; other folders may lend their weights to the engine."""
    found: dict[str, ExportedModel] = {}
    for file in manifest.files:
        path = root / file.path
        if file.format in ("gguf", "onnx") and path.is_relative_to(inside):
            _add(found.setdefault(file.quant, ExportedModel(file.quant)), path)
    for quant, model in found.items():
        ggufs = manifest.select(format="gguf", quant=quant)
        if ggufs:
            model.weights = _gguf_weights(root / ggufs[0].path)
    return list(found.values())


def _of_folder(path: Path) -> list[ExportedModel]:
    if any(path.glob("*.safetensors")):  # a Hugging Face folder, which may hold ONNX files of others
        return []
    found: dict[str, ExportedModel] = {}
    for quant in (*BODY_QUANTS, STORED):
        for name in (f"model-{quant}.gguf", f"onnx/{file_name(quant)}"):
            if (path / name).is_file():
                _add(found.setdefault(quant, ExportedModel(quant)), path / name)
    for config in sorted([*path.glob(_GENAI_CONFIG), *path.glob(f"*/{_GENAI_CONFIG}")]):
        named = config.parent.absolute().name
        quant = named if named in BODY_QUANTS else STORED
        if (config.parent / "model.onnx").is_file():
            _add(found.setdefault(quant, ExportedModel(quant)), config.parent / "model.onnx")
    return list(found.values())


def _add(model: ExportedModel, path: Path) -> None:
    """Note ``path`` for the runtimes that read it; of two ONNX files, which are the same, the first."""
    if path.suffix == ".gguf":
        model.files.setdefault(LLAMA_CPP, path)
        model.weights = _gguf_weights(path)
        return
    model.files.setdefault(ONNXRUNTIME, path)
    if (path.parent / _GENAI_CONFIG).is_file():
        model.files.setdefault(GENAI, path.parent)
    if model.weights is None:
        model.weights = lambda: model_of_onnx(path, model.quant)


def _gguf_weights(path: Path) -> Callable[[], Model]:
    return lambda: load_model(path)


def model_of_onnx(path: Path, quant: str) -> Model:
    """The weights of an ONNX file of ours, stored as ``quant`` again where that is a format of its own.

    Blocks of q8_0, q4_0 and the like come out with the integers that went in; of a mixture (``stored``) the values stay f32.

    Raises:
        FormatError: it is no ONNX model, was not written here, or lacks a weight.
    """
    from deepthin.export.onnx_contents import onnx_weights, read_onnx  # loads `onnx`

    contents = read_onnx(path)
    text = contents.properties.get("deepthin.shape")
    if text is None:
        raise FormatError(f"{path}: names no shape, as files of deepthin export do; bench a GGUF file of this model instead")
    shape, weights = Shape.parse(text), onnx_weights(contents)
    specs = tensor_specs(shape)
    lacking = [spec.name for spec in specs if spec.name not in weights]
    if lacking:
        raise FormatError(f"{path}: holds no weight {lacking[0]!r}, which its shape {text} has; export the model again")
    model = Model(shape, {spec.name: Tensor.from_values(weights[spec.name], F32) for spec in specs}, source=str(path))
    return model.quantized(quant) if quant in BODY_QUANTS else model
