"""What each model of a bundle holds, whatever its format: facts, and f32 weights under canonical names. Compares facts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from deepthin.engine.arrays import F32
from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.formats import BODY_QUANTS, FORMATS, STORED, scheme_named
from deepthin.engine.load import load_model
from deepthin.engine.model import Model, TokenizerSpec
from deepthin.engine.rope import rope_magnitude, rope_rates
from deepthin.engine.rope_scaling import RopeScaling
from deepthin.engine.shape import Shape
from deepthin.export.manifest import Manifest

_SHAPE_FACTS = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "layer_sharing",
    "max_seq_len",
    "rms_norm_eps",
    "rope_theta",
    "mlp",
    "qk_norm",
    "qkv_bias",
    "nope_every",
    "rope_scaling",
)
_TOKEN_UNUSED = 5  # GGUF's token type
_TOKENIZER_FACTS = ("pre", "tokens", "merges", "bos_id", "eos_id", "add_bos")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One model of a bundle.

    Attributes:
        path: below the bundle; for ``hf`` the folder.
        kind: ``hf``, ``onnx`` or ``gguf``.
        quant: what its matrices are stored as.
        target: the part of the bundle it belongs to: hf, genai, transformersjs or gguf.
        sha256: of the file as the manifest has it; empty for a folder.
    """

    path: str
    kind: str
    quant: str
    target: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Contents:
    """A model as read: ``facts`` to compare, weights on demand, and the Model unless it is ONNX."""

    file: ModelFile
    facts: Mapping[str, Any]
    model: Model | None
    graph: Any = None

    def weights(self) -> dict[str, F32]:
        """Every weight as f32 by canonical name, in canonical row order."""
        if self.model is not None:
            return self.model.dequantized()
        from deepthin.export.onnx_contents import onnx_weights  # loads `onnx`

        return onnx_weights(self.graph)

    def rounds_activations(self) -> bool:
        """Whether an ONNX graph lets the runtime round activations to int8; what others do is known from their format."""
        if self.model is not None:
            return False
        from deepthin.export.onnx_contents import rounds_activations  # loads `onnx`

        return rounds_activations(self.graph)


@dataclass(frozen=True, slots=True)
class FactDifference:
    """A fact on which ``file`` and ``base``, the model taken for the truth, disagree."""

    file: str
    name: str
    found: Any
    base: str
    wanted: Any

    @property
    def text(self) -> str:
        """One clause for people."""
        return f"{self.file}: {self.name} is {self.found}, but {self.wanted} in {self.base}"

    def to_json(self) -> dict[str, Any]:
        """As an entry of ``facts``."""
        return {"file": self.file, "name": self.name, "found": self.found, "base": self.base, "wanted": self.wanted}


def model_files(manifest: Manifest) -> list[ModelFile]:
    """The models that ``manifest`` lists, most exact first; among equals Hugging Face folders, then GGUF, then ONNX.

    Raises:
        FormatError: one is stored in a format that this version does not know.
    """
    folders = [
        ModelFile(PurePosixPath(file.path).parent.as_posix(), "hf", file.quant, "hf")
        for file in manifest.select(target="hf", format="safetensors")
    ]
    files = [
        ModelFile(file.path, kind, file.quant, file.target, file.sha256)
        for kind in ("gguf", "onnx")
        for file in manifest.select(format=kind)
    ]
    models = list(dict.fromkeys(folders)) + files
    for model in models:
        try:
            _ = model.quant == STORED or scheme_named(model.quant, to_make=True)
        except UsageError:
            known = ", ".join((*BODY_QUANTS, STORED))
            raise FormatError(f"manifest: {model.path} is said to hold {model.quant!r}; known are {known}") from None
    return sorted(models, key=lambda model: (-_exactness(model.quant), model.quant))


def _exactness(quant: str) -> float:
    """Bits of the coarsest values; what is as its source stored it comes right after f32, since nothing has rounded it."""
    return FORMATS["f32"].bits_per_weight - 1 if quant == STORED else scheme_named(quant).coarsest.bits_per_weight


def read_contents(root: Path, file: ModelFile, shape: Shape) -> Contents:
    """Read ``file`` of the bundle at ``root``; ``shape`` is what it should be, for facts that only make sense beside it.

    Raises:
        FormatError: it is damaged, contradicts itself or is not what its name says.
        UnsupportedError: it is a model that this version cannot read.
    """
    if file.kind != "onnx":
        model = load_model(root / file.path)
        return Contents(file, _shape_facts(model.shape), model)
    from deepthin.export.onnx_contents import onnx_facts, read_onnx  # loads `onnx`

    graph = read_onnx(root / file.path)
    try:
        facts = onnx_facts(graph, shape)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:  # a hostile graph
        why = " ".join(f"{type(error).__name__} {error}".split())[:120]
        raise FormatError(f"{root / file.path}: its operators and constants do not fit together ({why})") from None
    return Contents(file, facts, None, graph)


def compare_facts(base: str, shape: Shape, contents: Contents) -> list[FactDifference]:
    """Facts of ``contents`` that are not as ``shape``, read from ``base``, has them; in the order they were read."""
    wanted = _shape_facts(shape)
    wanted |= {
        "rope_interleaved": 0,
        "attention_causal": 1,
        "attention_window": -1,
        "attention_softcap": 0.0,
        "attention_scale": 0.0,
    }
    found = dict(contents.facts)
    if _is_same(found.get("attention_scale"), 1 / math.sqrt(shape.head_dim)):
        found["attention_scale"] = 0.0  # the default, spelled out
    return [
        FactDifference(contents.file.path, name, value, base, wanted[name])
        for name, value in found.items()
        if not _is_same(value, wanted[name]) and not (name == "rope_scaling" and _is_same_scaling(value, wanted[name], shape))
    ]


def _shape_facts(shape: Shape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    return {name: getattr(shape, name) for name in _SHAPE_FACTS} | {"rope_scaling": scaling.text if scaling else "none"}


def _is_same_scaling(found: str, wanted: str, shape: Shape) -> bool:
    """Whether two texts turn heads of ``shape`` alike, whatever their numbers: GGUF keeps what follows from llama3's."""
    both = [None if text == "none" else RopeScaling.parse(text) for text in (found, wanted)]
    a, b = (rope_rates(shape.head_dim, shape.rope_theta, scaling) for scaling in both)
    same_size = math.isclose(rope_magnitude(both[0]), rope_magnitude(both[1]), rel_tol=1e-6)
    return bool(same_size and np.allclose(a, b, rtol=1e-5, atol=0))


def compare_tokenizers(base: str, wanted: TokenizerSpec | None, contents: Contents) -> list[FactDifference]:
    """Where the tokenizer of ``contents`` is not that of ``base``; files without a Model (ONNX) carry none."""
    if contents.model is None:
        return []
    found, path = contents.model.tokenizer, contents.file.path
    if wanted is None or found is None:
        present = [FactDifference(path, "tokenizer", _presence(found), base, _presence(wanted))]
        return present if (wanted is None) != (found is None) else []
    found, wanted = _without_padding(found, wanted), _without_padding(wanted, found)
    differences = []
    for name in _TOKENIZER_FACTS:
        a, b = getattr(found, name), getattr(wanted, name)
        if a == b:
            continue
        if isinstance(a, tuple):  # of thousands of texts; the first different one says enough
            at = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            a, b = (f"{side[at]!r} at {at}" if at < len(side) else f"over at {at}" for side in (a, b))
        differences.append(FactDifference(path, f"tokenizer.{name}", a, base, b))
    return differences


def _without_padding(tokenizer: TokenizerSpec, other: TokenizerSpec) -> TokenizerSpec:
    """``tokenizer`` without the unused tokens that it has at the end beyond ``other``'s, as GGUF needs one for every row."""
    count = len(other.tokens)
    padded = set(tokenizer.token_types[count:]) == {_TOKEN_UNUSED}
    return (
        replace(tokenizer, tokens=tokenizer.tokens[:count], token_types=tokenizer.token_types[:count]) if padded else tokenizer
    )


def _presence(tokenizer: TokenizerSpec | None) -> str:
    return "absent" if tokenizer is None else "present"


def manifest_facts(base: str, listed: Shape, read: Shape) -> list[FactDifference]:
    """Where the shape in the manifest is not the one read from ``base``, which is what runtimes see.

    Folders of Hugging Face and GGUF files have shared blocks written out, and so they are compared.
    """
    listed, read = listed.unrolled, read.unrolled
    found, wanted = _shape_facts(listed), _shape_facts(read)
    if _is_same_scaling(found["rope_scaling"], wanted["rope_scaling"], read):
        found["rope_scaling"] = wanted["rope_scaling"]
    pairs = {name: (found[name], wanted[name]) for name in _SHAPE_FACTS}
    return [FactDifference("manifest.json", name, a, base, b) for name, (a, b) in pairs.items() if not _is_same(a, b)]


def _is_same(found: Any, wanted: Any) -> bool:
    """Equal, or equal as the f32 that GGUF and ONNX keep."""
    if isinstance(found, (int, float)) and isinstance(wanted, float):
        return bool(np.float32(found) == np.float32(wanted))
    return bool(found == wanted)
