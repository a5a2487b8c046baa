"""What the picks rest on: the same rules over the same shapes with one assumption of the prediction changed.

Nothing is searched or measured again. A pick that stays under an assumption is safe from it; one that changes comes with what
the change would be, and whether the two are tied under that assumption anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepthin.search.config import SearchConfig
from deepthin.search.objectives import Scored
from deepthin.search.picks import Loss, choose, named
from deepthin.search.quality.model import MAX_TOKENS, MIN_TOKENS, TIE_BAND, QualityModel
from deepthin.search.quality.vocabulary import TERM as VOCAB_TERM
from deepthin.search.quality.vocabulary import VOCAB_SUPPORT
from deepthin.search.space import Candidate

TOKEN_FACTORS = (0.25, 4.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One changed assumption.

    Attributes:
        name: key in ``front.json``.
        text: for people, to stand after "if".
        loss: predicted nats under it.
        facts: what else the document says about it.
    """

    name: str
    text: str
    loss: Loss
    facts: Mapping[str, Any]


def scenarios(config: SearchConfig, usable: Sequence[Scored]) -> list[Scenario]:
    """The other setting of the vocabulary term, then a quarter and four times the training tokens (inside 1e9 to 1e14)."""
    found = []
    if config.vocab_term:
        text = "vocabularies are not charged (without dL_vocab)"
        found.append(Scenario("without_vocab_term", text, _without_vocabulary, {"support": VOCAB_SUPPORT}))
    else:
        loss = _losses(replace(config.quality, vocab_term=True), usable)
        found.append(Scenario("with_vocab_term", "vocabularies are charged (with dL_vocab)", loss, {"support": VOCAB_SUPPORT}))
    for factor in TOKEN_FACTORS:
        tokens = config.tokens * factor
        if MIN_TOKENS <= tokens <= MAX_TOKENS:
            text = f"it is trained on {tokens:.3g} tokens instead of {config.tokens:.3g}"
            loss = _losses(replace(config.quality, tokens=tokens), usable)
            found.append(Scenario(f"tokens_x{factor:g}", text, loss, {"tokens": tokens}))
    return found


def outcome(
    scenario: Scenario, usable: Sequence[Scored], picks: Mapping[str, Scored], baseline: Scored | None = None
) -> dict[str, Any]:
    """What becomes of ``picks`` under ``scenario``: ``text``, its facts, ``picks``, and ``changes`` of those that move."""
    others = choose(usable, scenario.loss, baseline)
    return {
        "text": scenario.text,
        **scenario.facts,
        "picks": {name: named(one) for name, one in others.items()},
        "changes": {
            name: _change(picks[name], one, scenario.loss)
            for name, one in others.items()
            if name in picks and one.candidate != picks[name].candidate
        },
    }


def sensitivity_lines(document: Mapping[str, Any]) -> list[str]:
    """One line an assumption and one a changed pick, of a ``front.json``."""
    lines = []
    total = len(document["picks"])
    for found in document["sensitivity"].values():
        changes = found["changes"]
        says = f"{len(changes)} of {total} picks change" if changes else "no pick changes"
        lines.append(f"if {found['text']}: {says}")
        lines += [f"  {name}: {change['how']}" for name, change in changes.items()]
    return lines


def difference(old: Candidate, new: Candidate) -> str:
    """What tells two candidates apart, in the letters of the text form."""
    a, b = old.shape, new.shape
    parts = [
        ("L", a.num_layers, b.num_layers),
        ("d", a.hidden_size, b.hidden_size),
        ("heads", a.num_heads, b.num_heads),
        ("kv", a.num_kv_heads, b.num_kv_heads),
        ("head_dim", a.head_dim, b.head_dim),
        ("ff", a.intermediate_size, b.intermediate_size),
        ("vocab", a.vocab_size, b.vocab_size),
        ("share", a.layer_sharing, b.layer_sharing),
        ("head", "tied" if a.tie_word_embeddings else "untied", "tied" if b.tie_word_embeddings else "untied"),
        ("qk_norm", "yes" if a.qk_norm else "no", "yes" if b.qk_norm else "no"),
        ("quant", old.quant, new.quant),
    ]
    return ", ".join(f"{name} {before} -> {after}" for name, before, after in parts if before != after)


def _change(old: Scored, new: Scored, loss: Loss) -> dict[str, Any]:
    nats, time = loss(new) - loss(old), new.time / old.time
    tied = abs(nats) <= TIE_BAND
    verdict = "tied in loss there" if tied else f"{abs(nats):.3f} nats {'better' if nats < 0 else 'worse'} there"
    how = f"{difference(old.candidate, new.candidate)}; {verdict}, {time:.2f} x the time"
    return {**named(new), "nats": nats, "time_ratio": time, "tied": tied, "how": how}


def _losses(model: QualityModel, usable: Sequence[Scored]) -> Loss:
    found = {one.candidate.key: model.predict(one.candidate.shape, one.candidate.quant).loss for one in usable}
    return lambda one: found[one.candidate.key]


def _without_vocabulary(one: Scored) -> float:
    return one.quality.without(VOCAB_TERM)
