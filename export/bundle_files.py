"""Writes the files of one bundle and remembers what it wrote; each must be, to the byte, as large as was predicted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepthin.engine.accounting import count_bytes, count_params
from deepthin.engine.formats import STORED, format_named, scheme_named
from deepthin.engine.model import Model
from deepthin.export.file_sizes import stored_as
from deepthin.export.genai_folder import genai_config
from deepthin.export.gguf_writer import gguf_file_bytes, write_gguf
from deepthin.export.hf_folder import hf_folder_bytes, write_hf_folder
from deepthin.export.manifest import BundleFile, sha256_of
from deepthin.export.memory import gguf_memory, onnx_memory
from deepthin.export.onnx_profiles import OnnxProfile
from deepthin.export.target_profiles import TARGET_PROFILES
from deepthin.export.text_files import generation_config, write_json, write_tokenizer_files
from deepthin.export.transformersjs_folder import file_name, transformersjs_config


@dataclass
class BundleWriter:
    """Writes below ``folder``; ``files`` grows with each.

    Attributes:
        folder: absent or empty.
        hf_dtype: of the Hugging Face folder.
        profile: of the ONNX files.
        accuracy_level: of 4 and 8 bit ONNX weights.
        progress: told the path of each file before it is written.
        left_out: by target and format, what is not written there (and why).
        files: what was written.
        memory: what the weights of each decoder take in each runtime.
    """

    folder: Path
    hf_dtype: str
    profile: OnnxProfile
    accuracy_level: int
    progress: Callable[[str], None]
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    files: list[BundleFile] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)

    def write(self, model: Model, targets: Sequence[str], quants: Sequence[str]) -> None:
        """Write ``model`` for all ``targets``; each quantisation is made once."""
        if "hf" in targets:
            self._hf(model)
        decoders = []
        for quant in quants:
            stored = model if quant == STORED else model.quantized(quant)
            if self.profile.writes(quant) and set(targets) & {"genai", "transformersjs"}:
                decoders += self._onnx(stored, quant, targets)
            if "gguf" in targets:
                self._gguf(stored, quant)
        if "transformersjs" in targets:
            here = [path.name for path in decoders if path.parent.name == "onnx"]
            self._transformersjs(
                model, [name for name in here if (self.folder / "transformersjs/onnx" / f"{name}_data").exists()]
            )

    def _hf(self, model: Model) -> None:
        folder = self._made("hf")
        self.progress("hf/model.safetensors")
        model = model.unrolled()
        sizes = hf_folder_bytes(stored_as(model, "f32"), dtype=self.hf_dtype)
        written = write_hf_folder(model, folder, dtype=self.hf_dtype)
        predicted = count_params(model.shape).total * format_named(self.hf_dtype).block_bytes
        _require_size("weights in hf/model.safetensors", written, predicted)
        for name, size in sizes.items():
            _require_size(f"hf/{name}", (folder / name).stat().st_size, size)
        self._add_all(folder, "hf", self.hf_dtype, {"model.safetensors": written})

    def _onnx(self, stored: Model, quant: str, targets: Sequence[str]) -> list[Path]:
        """The decoder in the folders of all that run it; returns its path in each."""
        from deepthin.export.onnx_model import onnx_bytes, onnx_file_bytes, shares_buffer, stored_onnx_bytes, write_onnx

        names = {"genai": f"genai/{quant}/model.onnx", "transformersjs": f"transformersjs/onnx/{file_name(quant)}"}
        options: dict[str, Any] = {"profile": self.profile.name, "accuracy_level": self.accuracy_level}
        made: list[Path] = []
        for target in (target for target in names if target in targets and quant not in self.left_out.get(target, {})):
            name = names[target]
            path = self._made(name.rpartition("/")[0]) / name.rpartition("/")[2]
            self.progress(name)
            written = stored_onnx_bytes(stored) if quant == STORED else onnx_bytes(stored.shape, quant)
            if not made or made[0].with_name(made[0].name + "_data").exists():  # data outside is found by the model's name
                paths, measured = write_onnx(stored, path, **options)
                _require_size(f"weights in {name}", measured, written)
                sizes = onnx_file_bytes(stored_as(stored, quant), path.name, **options)
                _require_size(name, sum(each.stat().st_size for each in paths), sum(sizes))
            else:
                shutil.copyfile(made[0], path)
                paths = [path]
            made.append(path)
            self._hold(target, quant, onnx_memory(stored))
            if target == "genai":
                shares = self.profile.contrib and shares_buffer(stored.shape)
                config = genai_config(stored.shape, stored.tokenizer, filename=path.name, shares_buffer=shares)
                write_json(path.with_name("genai_config.json"), config)
                write_tokenizer_files(stored, path.parent)
                self._add_all(path.parent, target, quant, {paths[-1].name: written})
            else:
                for each in paths:
                    self._add(each, target, quant, written if each is paths[-1] else 0)
        return made

    def _transformersjs(self, model: Model, external: Sequence[str]) -> None:
        folder = self._made("transformersjs")
        write_json(folder / "config.json", transformersjs_config(model.shape, model.tokenizer, external))
        write_json(folder / "generation_config.json", generation_config(model.tokenizer))
        write_tokenizer_files(model, folder)
        self._add_all(folder, "transformersjs", "f32", {})

    def _gguf(self, stored: Model, quant: str) -> None:
        path, stored = self._made("gguf") / f"model-{quant}.gguf", stored.unrolled()
        self.progress(f"gguf/{path.name}")
        as_stored = quant == STORED
        file_format = None if as_stored else scheme_named(quant).body
        written = write_gguf(stored, path, file_format=file_format)
        predicted = stored.num_bytes if as_stored else count_bytes(stored.shape, quant).total
        _require_size(f"weights in gguf/{path.name}", written, predicted)
        size = gguf_file_bytes(stored_as(stored, quant), file_format=file_format)
        _require_size(f"gguf/{path.name}", path.stat().st_size, size)
        self._add(path, "gguf", quant, written)
        self._hold("gguf", quant, gguf_memory(stored))

    def _hold(self, target: str, quant: str, memory: dict[str, Any]) -> None:
        self.memory.append({"target": target, "quant": quant, "runtime": TARGET_PROFILES[target].runtime, **memory})

    def _made(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _add_all(self, folder: Path, target: str, quant: str, tensor_bytes: dict[str, int]) -> None:
        for path in sorted(item for item in folder.iterdir() if item.is_file()):
            self._add(path, target, quant, tensor_bytes.get(path.name, 0))

    def _add(self, path: Path, target: str, quant: str, tensor_bytes: int) -> None:
        name = path.relative_to(self.folder).as_posix()
        size, digest = path.stat().st_size, sha256_of(path)
        self.files.append(BundleFile(name, size, digest, target, path.suffix[1:], quant, tensor_bytes))


def _require_size(name: str, written: int, predicted: int) -> None:
    if written != predicted:
        raise AssertionError(f"Bug: {name} takes {written} bytes, but {predicted} were predicted")
