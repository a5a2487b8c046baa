"""Choosing tokens, and the loop around it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepthin.engine.decoder import Decoder
from deepthin.engine.errors import FormatError
from deepthin.engine.generate import generate
from deepthin.engine.model import Model, TokenizerSpec
from deepthin.engine.sample import Sampling, sample
from tests.support.tiny_models import lively_model, tiny_shape

GREEDY, WARM = Sampling(), Sampling(temperature=5.0)


def padded_model(tokens: int) -> Model:
    """A model whose embedding has more rows than its tokenizer has tokens; the rows beyond would win everywhere."""
    model = lively_model(tiny_shape("wide_heads"))
    head = model.tensors["output"]
    values = head.dequantize()
    values[tokens:] = 4 * values[tokens:] + 1e-3
    spec = TokenizerSpec("gpt-2", tuple(f"t{i}" for i in range(tokens)), (1,) * tokens, ())
    return replace(model, tensors={**model.tensors, "output": type(head).from_values(values, head.format)}, tokenizer=spec)


@pytest.mark.parametrize("sampling", [GREEDY, WARM, Sampling(temperature=2.0, top_k=5), Sampling(temperature=2.0, top_p=0.7)])
def test_rows_beyond_the_tokenizer_are_never_chosen(sampling: Sampling) -> None:
    model, prompt = padded_model(40), [1, 2, 3]
    with Decoder(model, threads=1, context=40) as decoder:
        found = generate(decoder, prompt, 30, sampling=sampling).token_ids
        assert max(decoder.prefill(prompt)[40:]) > max(decoder.prefill(prompt)[:40]), "the padding is not tempting enough"
    assert max(found) < 40
    with Decoder(replace(model, tokenizer=None), threads=1, context=40) as decoder:
        assert max(generate(decoder, prompt, 30, sampling=sampling).token_ids) >= 40  # every row is a token then


def test_the_loop_stops_where_it_is_told() -> None:
    with Decoder(padded_model(40), threads=1, context=40) as decoder:
        free = generate(decoder, [1, 2, 3], 10, sampling=WARM, seed=3).token_ids
        seen: list[int] = []
        again = generate(decoder, [1, 2, 3], 10, sampling=WARM, seed=3, stop={free[4]}, on_token=seen.append)
    assert again.token_ids == free[: free.index(free[4]) + 1] == tuple(seen)
    assert again.num_prompt_tokens == 3


class Highest:
    """A generator whose numbers are the largest it can give."""

    def random(self) -> float:
        return float(np.nextafter(1, 0))


def test_a_draw_beyond_the_rounded_sum_takes_the_last_token() -> None:
    found = set()
    for seed in range(30):
        logits = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
        found.add(sample(logits, WARM, Highest()) == int(logits.argmin()))  # type: ignore[arg-type]
    assert found == {True}


def test_filters_keep_the_likeliest() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    generator = np.random.default_rng(0)

    def drawn(**filters: float) -> set[int]:
        return {sample(logits, Sampling(temperature=1.0, **filters), generator) for _ in range(300)}  # type: ignore[arg-type]

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_p=0.65) == {1, 3}
    assert drawn(top_p=0.75) == {1, 2, 3}
    assert drawn(top_k=1, top_p=0.1) == {1}
    assert sample(np.array([1, 3, 3], np.float32), GREEDY, generator) == 1


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_said(sampling: Sampling, bad: float) -> None:
    logits = np.array([0, 1, bad, 2], np.float32)
    with pytest.raises(FormatError, match=r"logit 2 is (nan|inf), so no token can be chosen"):
        sample(logits, sampling, np.random.default_rng(0))
    logits[2] = -np.inf  # merely impossible
    assert sample(logits, sampling, np.random.default_rng(0)) != 2


def test_a_model_with_a_broken_weight_says_so() -> None:
    model = lively_model(tiny_shape("plain"), quant="q8_0")
    held = model.tensors["blk.1.ffn_up"]
    data = held.data.copy()
    data.reshape(-1).view(held.format.dtype)["d"][7] = np.nan
    with Decoder(
        replace(model, tensors={**model.tensors, "blk.1.ffn_up": replace(held, stored=data, order=None)}), threads=2
    ) as decoder:
        assert np.isnan(decoder.logits([1, 2, 3])).all()
        with pytest.raises(FormatError, match="the weights hold numbers that are not finite"):
            generate(decoder, [1, 2, 3], 4)
