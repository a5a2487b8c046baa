"""The real model: SmolLM2-135M-Instruct from its Q4_1 GGUF, against llama.cpp and against the NumPy decoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deepthin.engine.child import Child
from deepthin.engine.decoder import Decoder
from deepthin.engine.generate import generate
from deepthin.engine.load import load_model
from deepthin.engine.model import Model
from deepthin.engine.reference import Reference
from deepthin.engine.tokenizer import Tokenizer
from deepthin.export.tolerances import budget_named, gate

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea, there lived",
    "1, 1, 2, 3, 5, 8, 13,",
    "Die Hauptstadt von Österreich heißt",
)
NUM_TOKENS = 64
NEAR_TIE, MAX_NEAR_TIES = gate("greedy")["near_tie"], gate("greedy")["most_ties"]  # logits, and of 64 tokens


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Model:
    return load_model(smollm2_path)


@pytest.fixture(scope="module")
def decoder(model: Model) -> Iterator[Decoder]:
    with Decoder(model, threads=2, context=256) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Tokenizer:
    assert model.tokenizer is not None
    return Tokenizer(model.tokenizer)


@pytest.fixture(scope="module")
def llama_cpp(smollm2_path: Path) -> Iterator[Child]:
    with Child("deepthin.export.peer_llama_cpp", peer="llama.cpp") as child:
        child.call("load", path=str(smollm2_path), threads=1, context=256)  # two collapse on a busy machine
        yield child


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: p[:20].strip())
def test_greedy_tokens_equal_llama_cpp_except_at_near_ties(
    prompt: str, decoder: Decoder, tokenizer: Tokenizer, llama_cpp: Child
) -> None:
    """Every token llama.cpp chose, given the same tokens before it, is ours too or a near-tie with ours."""
    ids = tokenizer.encode(prompt)
    answer = llama_cpp.call("greedy", ids=ids, count=NUM_TOKENS)
    chosen = answer["ids"]
    decoder.reset()
    logits = decoder.logits([*ids, *chosen[:-1]])[len(ids) - 1 :]
    ours = logits.argmax(axis=1)
    ties = [at for at in range(NUM_TOKENS) if ours[at] != chosen[at]]
    for at in ties:
        gap = float(logits[at, ours[at]] - logits[at, chosen[at]])
        assert gap < NEAR_TIE, f"token {at}: we choose {ours[at]} by {gap:.3f} over llama.cpp's {chosen[at]}"
    assert len(ties) <= MAX_NEAR_TIES, f"{len(ties)} near-ties at {ties}"
    same = ties[0] if ties else NUM_TOKENS
    assert generate(decoder, ids, NUM_TOKENS).token_ids[:same] == tuple(chosen[:same])


def test_logits_equal_the_reference_on_dequantised_weights(model: Model, decoder: Decoder, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS[3] + PROMPTS[2])
    expected = Reference(model.shape, model.dequantized(), np.float32).logits(ids)
    decoder.reset()
    found = decoder.logits(ids)
    nmse = float(((found - expected) ** 2).sum() / (expected**2).sum())
    assert nmse < budget_named("engine.q4_1").nmse
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.9


def test_same_bits_at_one_and_two_threads(model: Model, decoder: Decoder, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS[0] + PROMPTS[2])
    decoder.reset()
    with Decoder(model, threads=1, context=256) as one:
        np.testing.assert_array_equal(one.logits(ids), decoder.logits(ids))


def test_it_knows_the_capital_of_france(decoder: Decoder, tokenizer: Tokenizer) -> None:
    assert "Paris" in tokenizer.decode(list(generate(decoder, tokenizer.encode(PROMPTS[0]), 8).token_ids))
