"""Tokens per character of text by vocabulary, because times per token do not compare between vocabularies."""

from __future__ import annotations

import math

# One corpus; replace by the real tokenizer's once it exists. Source: sail-sg/scaling-with-vocab@6701cc20, arXiv 2407.13623.
_FERTILITY = (0.00639222, -0.15811069, 1.20470122)
_FERTILITY_CAP = 200_000


def tokens_per_char(vocab: float) -> float:
    """f(V): tokens a character of text takes; vocabularies above 200,000 count as 200,000."""
    log = math.log(min(vocab, _FERTILITY_CAP))
    square, linear, constant = _FERTILITY
    return square * log**2 + linear * log + constant


def milliseconds_per_kchar(seconds_per_token: float, vocab_size: int) -> float:
    """Milliseconds per 1,000 characters of text: a larger vocabulary takes fewer tokens for the same text."""
    return seconds_per_token * 1e3 * tokens_per_char(vocab_size) * 1e3
