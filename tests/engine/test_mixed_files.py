"""Files whose matrices llama.cpp stored in several formats: read, run, and compared with llama.cpp on the same bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from deepthin.engine.decoder import Decoder
from deepthin.engine.load import load_model
from deepthin.engine.model import Model
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import canonical_row_order, tensor_specs
from deepthin.export.tolerances import gate
from tests.support.float64_decoder import float64_logits
from tests.support.gguf_files import write_gguf
from tests.support.llama_cpp_logits import llama_cpp_logits
from tests.support.llama_cpp_quantize import llama_cpp_quantize
from tests.support.tiny_models import PROMPT, lively_model

WIDE = Shape.parse("L=8,d=256,heads=4,kv=2,ff=512,vocab=300,tied,ctx=64")
NARROW = Shape.parse("L=2,d=96,heads=4,kv=2,ff=256,vocab=80,untied,ctx=64")  # only rows of ffn_down take super-blocks


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


def formats(model: Model) -> Counter[str]:
    return Counter(tensor.format.name for tensor in model.tensors.values() if len(tensor.dims) == 2)


@pytest.mark.parametrize(
    ("shape", "file_type", "wanted"),
    [
        (WIDE, "Q4_K_M", {"q4_k", "q6_k"}),
        (WIDE, "Q5_K_M", {"q5_k", "q6_k"}),
        (WIDE, "Q6_K", {"q6_k"}),
        (WIDE, "Q5_1", {"q5_1", "q6_k"}),
        (NARROW, "Q4_K_M", {"q4_k", "q5_0", "q6_k", "q8_0"}),
        (NARROW, "Q5_K_M", {"q5_k", "q5_1", "q6_k", "q8_0"}),
        (NARROW, "Q5_0", {"q5_0", "q8_0"}),
    ],
)
def test_what_llama_cpp_quantised_runs_as_in_llama_cpp(
    shape: Shape, file_type: str, wanted: set[str], tmp_path: Path
) -> None:  # fmt: skip
    plain = write_gguf(tmp_path / "plain.gguf", lively_model(shape))
    path = llama_cpp_quantize(plain, tmp_path / "quantised.gguf", file_type)
    model = load_model(path)
    assert set(formats(model)) == wanted

    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for spec in tensor_specs(shape):
        values = gguf.dequantize(theirs[spec.gguf_name].data, theirs[spec.gguf_name].tensor_type).reshape(spec.dims)
        if spec.rope_heads:
            values = values[canonical_row_order(spec.dims[0], spec.rope_heads)]
        np.testing.assert_array_equal(model.tensors[spec.name].dequantize(), values, err_msg=spec.name)

    exact = float64_logits(shape, model.dequantized(), PROMPT)
    peer = llama_cpp_logits(path, [PROMPT])
    with Decoder(model, threads=2, context=32) as decoder:
        found = decoder.logits(PROMPT)
        decoder.reset()
        np.testing.assert_array_equal(found[-1], decoder.prefill(PROMPT))
    assert nmse(found, exact) < gate("mixed_files")["nmse"]
    assert nmse(found, peer) < gate("mixed_files")["peer_nmse"]
