"""Candidates with chosen losses and times, for rules that look at nothing else."""

from __future__ import annotations

from deepthin.engine.shape import Shape
from deepthin.search.laws import tokens_per_char
from deepthin.search.objectives import Scored
from deepthin.search.quality import Quality, Term
from deepthin.search.space import Candidate
from tests.support.fake_costs import timed_cost

VOCAB = 32768


def scored(name: int, loss: float, kchar_ms: float, vocab_nats: float = 0.0) -> Scored:
    """A candidate told apart by its MLP width, with a chosen loss (vocabulary term included) and time."""
    shape = Shape(num_layers=4, hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=32 * name, vocab_size=VOCAB)
    terms = (Term("F4", loss - vocab_nats, "own fit", ""), Term("dL_vocab", vocab_nats, "own fit", ""))
    quality = Quality(terms, {"F4": loss - vocab_nats, "F2": loss, "gem4": loss}, ())
    return Scored(name, Candidate(shape, "q4_0"), quality, timed_cost(kchar_ms / 1e6 / tokens_per_char(VOCAB), "q4_0"))
