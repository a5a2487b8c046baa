"""Candidates with chosen losses and times, for rules that look at nothing else."""

from __future__ import annotations

from deepthin.engine.shape import Shape
from deepthin.search.cost import Cost
from deepthin.search.objectives import Scored
from deepthin.search.quality.characters import tokens_per_char
from deepthin.search.quality.model import Quality
from deepthin.search.quality.term import Term
from deepthin.search.space import Candidate
from tests.support.fake_costs import timed_cost

VOCAB = 32768


def scored(name: int, loss: float, kchar_ms: float, vocab_nats: float = 0.0) -> Scored:
    """A candidate told apart by its MLP width, with a chosen loss (vocabulary term included) and time."""
    shape = Shape(num_layers=4, hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=32 * name, vocab_size=VOCAB)
    terms = (Term("F4", {"F4": loss - vocab_nats}, "own fit", ""), Term("dL_vocab", {"drift 0.32": vocab_nats}, "own fit", ""))
    quality = Quality(terms)
    return Scored(name, Candidate(shape, "q4_0"), quality, Cost.of(timed_cost(kchar_ms / 1e6 / tokens_per_char(VOCAB), "q4_0")))
