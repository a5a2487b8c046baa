from __future__ import annotations

from pathlib import Path

import pytest

from deepthin.engine.errors import UsageError
from deepthin.engine.gguf_file import read_gguf
from deepthin.engine.model import random_model
from deepthin.engine.shape import Shape
from deepthin.export.gguf_writer import write_gguf
from deepthin.search.file_sizes import gguf_bytes
from deepthin.search.k_quants import k_quant_size
from deepthin.search.onnx_size import onnx_bytes
from deepthin.search.targets import Targets

PLAIN = Shape.parse("L=4,d=256,heads=4,kv=2,ff=512,vocab=300,tied")


@pytest.mark.parametrize(
    "text",
    [
        "L=9,d=256,heads=4,kv=2,ff=512,vocab=300,tied",
        "L=17,d=256,heads=4,kv=2,ff=512,vocab=300,untied",
        "L=3,d=192,heads=3,kv=1,ff=544,vocab=300,tied",  # everything falls back to Q5_0 and Q8_0
        "L=8,d=256,heads=8,kv=2,ff=288,vocab=300,untied",
    ],
)
def test_k_quant_size_is_what_llama_cpp_makes(text: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from tests.support.llama_cpp_quantize import llama_cpp_quantize

    shape = Shape.parse(text)
    plain = tmp_path / "plain.gguf"
    write_gguf(random_model(shape), plain)
    path = llama_cpp_quantize(plain, tmp_path / "k.gguf", "Q4_K_M")
    real = sum(info.num_bytes for info in read_gguf(path).tensors.values())
    assert k_quant_size(shape).bytes == real


def test_fallbacks_cost_nothing_where_rows_are_whole_and_a_fifth_to_a_third_elsewhere() -> None:
    assert k_quant_size(PLAIN).fallback == 0
    size = k_quant_size(PLAIN.replace(hidden_size=192, num_heads=3, num_kv_heads=1, intermediate_size=544))
    assert 0.15 < size.fallback / (size.bytes - size.fallback) < 0.4


def test_refusals_name_target_and_rule() -> None:
    assert Targets(("hf", "onnx", "gguf", "transformersjs")).refusal(PLAIN) == ""
    assert (
        Targets(("hf", "gguf-k-quants")).refusal(PLAIN.replace(intermediate_size=288)).startswith("gguf-k-quants: ff=288 not")
    )
    for name in ("hf", "gguf", "gguf-k-quants"):
        refusal = Targets((name,)).refusal(PLAIN.replace(layer_sharing=2))
        assert refusal.startswith(f"{name}: share=2 is written out as 8 blocks")
    assert Targets(("onnx", "transformersjs")).refusal(PLAIN.replace(layer_sharing=2)) == ""
    assert Targets(()).refusal(PLAIN.replace(layer_sharing=2)) == ""


def test_priced_targets_weigh_what_they_would() -> None:
    assert Targets().priced_bytes(PLAIN, "q4_0", "m") == 0
    assert Targets(priced=("gguf-k-quants",)).priced_bytes(PLAIN, "q4_0", "m") == k_quant_size(PLAIN).bytes
    shared = PLAIN.replace(layer_sharing=3)
    assert Targets(priced=("gguf",)).priced_bytes(shared, "q4_0", "m") == gguf_bytes(PLAIN.replace(num_layers=12), "q4_0", "m")
    assert Targets(priced=("onnx", "gguf")).priced_bytes(PLAIN, "q8_0", "m") == onnx_bytes(PLAIN, "q8_0")
    assert Targets(priced=("onnx",)).priced_bytes(PLAIN, "q5_0", "m") == onnx_bytes(PLAIN, "f32")  # what is written for it


def test_a_priced_target_counts_what_it_writes_out_and_so_takes_shared_blocks() -> None:
    shared = PLAIN.replace(layer_sharing=2)
    assert (
        Targets(("gguf",)).refusal(shared).endswith("counts a shared block once; --price-targets gguf counts what is written")
    )
    assert Targets(("gguf", "onnx"), ("gguf",)).refusal(shared) == ""
    assert Targets(("hf",), ("gguf",)).refusal(shared).startswith("hf: share=2")


def test_heads_need_to_divide_the_width_only_where_transformers_says_so() -> None:
    assert Targets(("hf",)).takes_heads(192, 3, qk_norm=False)
    assert not Targets(("transformersjs",)).takes_heads(192, 5, qk_norm=False)
    assert Targets(("hf",)).takes_heads(192, 5, qk_norm=True)  # Qwen3's configuration does not ask
    assert Targets(("onnx", "gguf")).takes_heads(192, 5, qk_norm=False)


@pytest.mark.parametrize(
    ("hard", "priced", "message"),
    [
        (("hf", "coreml"), (), "target 'coreml' is unknown; use one of hf, onnx, gguf"),
        (("hf",), ("transformersjs",), "'transformersjs' has no price: .* Priced can be gguf, gguf-k-quants, onnx"),
    ],
)
def test_unknown_and_priceless_targets(hard: tuple[str, ...], priced: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Targets(hard, priced)
