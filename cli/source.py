"""SOURCE on the command line: a shape text, a public shape's name, a shape JSON, a GGUF, an HF folder or one of our bundles."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepthin.engine.errors import FormatError, ShapeError, UnsupportedError, UsageError
from deepthin.engine.formats import BODY_QUANTS, scheme_named
from deepthin.engine.known_shapes import KnownShape, known_shapes
from deepthin.engine.shape import Shape

if TYPE_CHECKING:
    from deepthin.engine.model import Model

MAX_JSON_BYTES = 4 << 20
QUANT_HELP = f"{','.join(BODY_QUANTS)}, or with another for embedding and head (q4_0-head_f16)"


@dataclass(frozen=True, slots=True)
class Source:
    """What SOURCE names.

    Attributes:
        text: as given.
        kind: ``shape``, ``known``, ``json`` or ``model`` (a file or folder with weights).
        shape: the shape it names or holds.
        known: the public model, when named.
        model: its weights, when it has any.
    """

    text: str
    kind: str
    shape: Shape
    known: KnownShape | None = None
    model: Model | None = None

    def weights(self, *, seed: int, quant: str | None) -> Model:
        """The model to run: the weights of SOURCE, or seeded random ones; converted when ``quant`` is given.

        A bare shape without ``quant`` becomes a Q4_0 model.
        """
        if self.model is not None:
            return self.model if quant is None else self.model.quantized(quant)
        from deepthin.engine.model import random_model

        return random_model(self.shape, seed=seed, quant=quant or "q4_0")


def open_source(text: str) -> Source:
    """Find out what ``text`` names and read it.

    Raises:
        ShapeError: it reads like a shape text but is none.
        FormatError: a file or folder that does not hold what it should, or is not there.
        UsageError: it is none of the kinds.
    """
    if not text.strip():
        raise UsageError("SOURCE is empty; name a file, a folder, a shape text or a public shape such as smollm2-135m")
    path = Path(text)
    if _exists(path):
        if path.suffix.lower() == ".json":
            return Source(text, "json", _shape_in(path))
        from deepthin.engine.load import load_model

        model = load_model(path)
        return Source(text, "model", model.shape, model=model)
    known = known_shapes().get(text.lower())
    if known is not None:
        return Source(text, "known", known.shape, known=known)
    if "=" in text:
        return Source(text, "shape", Shape.parse(text))
    if "/" in text or "\\" in text or path.suffix:
        raise FormatError(f"{text}: there is no such file or folder; public shapes and shape texts need no file")
    raise UsageError(
        f"{text!r} is no file, no folder, no shape text (L=..,d=..,heads=..,ff=..,vocab=..) and no public shape; "
        f"known are {', '.join(known_shapes())}"
    )


def require_runnable(shape: Shape) -> None:
    """Refuse a shape that the engine cannot run, before weights are made for it.

    Raises:
        UnsupportedError: the rule that it breaks.
    """
    from deepthin.engine.targets import target_verdicts

    verdict = target_verdicts(shape)["engine"]
    if not verdict.ok:
        raise UnsupportedError(f"shape {shape.text}: this engine does not run it ({verdict.why}); inspect takes any shape")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a name, or in a folder we may not read
        return False


def _shape_in(path: Path) -> Shape:
    """The shape in a JSON file: its fields or ``text`` at the top, or under ``shape`` as in our own documents."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise FormatError(f"{path}: over {MAX_JSON_BYTES} bytes, which no shape needs; is this the right file?")
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is no JSON ({error})") from error
    if isinstance(document, dict) and "shape" in document:
        document = document["shape"]
    try:
        if isinstance(document, str):
            return Shape.parse(document)
        if isinstance(document, dict) and set(document) == {"text"}:
            return Shape.parse(str(document["text"]))
        if isinstance(document, dict):
            return Shape.from_json(document)
    except ShapeError as error:
        raise FormatError(f"{path}: {error}") from error
    raise FormatError(f"{path}: holds no shape; needed are its fields or its text form, at the top or under 'shape'")


def parse_scheme(text: str) -> str:
    """How weights are to be stored: the canonical name of a format, or of one with another for embedding and head.

    Raises:
        UsageError: no format that weights can be converted to.
    """
    return scheme_named(text.strip(), to_make=True).name
