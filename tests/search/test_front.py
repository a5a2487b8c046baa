from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.accounting import count_bytes, count_params, kv_bytes_per_token
from deepthin.engine.known_shapes import known_shape
from deepthin.engine.shape import Shape
from deepthin.search.file_sizes import gguf_bytes
from deepthin.search.front import HEADERS, comparison_rows, front_document, front_rows
from deepthin.search.k_quants import k_quant_size
from deepthin.search.memory import memory
from deepthin.search.quality.model import QualityModel
from deepthin.search.run import SearchConfig, run_search
from tests.support.fake_costs import FakeMeasure, fake_cost
from tests.support.scored_candidates import scored

MEASURED = {"median", "ci_low", "ci_high", "n", "unit", "samples"}
PREDICTED = {"value", "low", "high", "unit", "basis"}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The front of a search near SmolLM2-135M, read back from its file."""
    out = tmp_path_factory.mktemp("front") / "run"
    run_search(SearchConfig(params=135_000_000, trials=24, machine="a test"), measure=FakeMeasure(), out=out)
    loaded: dict[str, Any] = json.loads((out / "front.json").read_text())
    return loaded


def test_document_holds_what_the_contract_lists(document: dict[str, Any]) -> None:
    assert document["schema"] == "deepthin/front/3"
    assert document["budget"] == {"params": 135_000_000, "bytes": None, "ram": None}
    assert (document["trials"], document["measurements"]) == (24, 24)
    assert document["measured_on"] == {"machine": "a test", "threads": 2, "context": 512}
    for member in document["front"]:
        shape = Shape.from_json(member["shape"])
        assert member["params"] == count_params(shape).total
        assert member["weight_bytes"] == count_bytes(shape, member["quant"]).total < member["bytes"]
        assert (
            member["bytes"] == member["file_bytes"]["gguf"] == gguf_bytes(shape, member["quant"], f"random-{shape.text}-seed0")
        )
        assert member["memory"]["total"] == memory(shape, member["quant"], 512).total
        assert member["fallback_bytes"] == {"gguf": 0, "gguf-k-quants": k_quant_size(shape).fallback}
        assert member["devices"] == {}
        assert member["kv_bytes_per_token"] == kv_bytes_per_token(shape)
        assert set(member["predicted_loss"]) == PREDICTED
        assert set(member["ms_per_token"]) == set(member["ms_per_kchar"]) == MEASURED
        assert member["ms_per_token"]["median"] == fake_cost(shape, member["quant"]).seconds_per_token.median * 1e3
        assert member["predicted_loss"]["value"] == QualityModel().predict(shape, member["quant"]).loss
        assert member["predicted_loss"]["low"] < member["predicted_loss"]["value"] < member["predicted_loss"]["high"]
        assert all(
            {"name", "nats", "low", "high", "status", "source", "extrapolated"} == set(term) for term in member["loss_terms"]
        )


def nameplate(pick: dict[str, Any]) -> dict[str, str]:
    return {"shape": pick["shape"], "quant": pick["quant"]}


def test_nothing_in_it_depends_on_the_clock_or_the_place(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    assert not [word for word in ("utc", "date", "timestamp", "/tmp", "host", "measured_now") if word in text]


def test_front_is_ordered_and_nothing_evaluated_beats_it(document: dict[str, Any]) -> None:
    front = [(m["predicted_loss"]["value"], m["ms_per_kchar"]["median"]) for m in document["front"]]
    assert front == sorted(front)
    assert [time for _, time in front] == sorted((time for _, time in front), reverse=True)
    for one in document["evaluated"]:
        beaten = any(loss <= one["loss"] and time <= one["ms_per_kchar"] for loss, time in front)
        assert beaten, one
        assert one["on_front"] == ((one["loss"], one["ms_per_kchar"]) in front)


def test_picks_are_members_of_the_front_and_obey_their_rules(document: dict[str, Any]) -> None:
    members = {(m["shape"]["text"], m["quant"]): m for m in document["front"]}
    evaluated = {(one["shape"], one["quant"]) for one in document["evaluated"]}
    for name, pick in document["picks"].items():
        if name == "smallest_kv":  # chosen for its cache, so it may be beaten in loss and time
            assert (pick["shape"], pick["quant"]) in evaluated
            continue
        assert name in members[pick["shape"], pick["quant"]]["picks"]
    best, fastest = (
        members[document["picks"][n]["shape"], document["picks"][n]["quant"]] for n in ("best_quality", "fastest_tied")
    )
    limit = best["predicted_loss"]["value"] + 0.02
    tied = [one for one in document["evaluated"] if one["loss"] <= limit]
    assert fastest["ms_per_kchar"]["median"] == min(one["ms_per_kchar"] for one in tied)
    assert [m["tied_with_best"] for m in document["front"]] == [
        m["predicted_loss"]["value"] <= limit for m in document["front"]
    ]
    assert document["recommended"] == "fastest_tied"


def test_differences_are_to_the_best_pick(document: dict[str, Any]) -> None:
    best = document["picks"]["best_quality"]
    for member in document["front"]:
        gap = member["difference_to_best"]
        if (member["shape"]["text"], member["quant"]) == (best["shape"], best["quant"]):
            assert gap == {"value": 0.0, "low": -0.02, "high": 0.02}
        assert gap["low"] <= gap["value"] - 0.02 + 1e-12
        assert gap["high"] >= gap["value"] + 0.02 - 1e-12


def test_every_pick_stands_beside_smollm2_in_the_same_format(document: dict[str, Any]) -> None:
    shape = known_shape("smollm2-135m").shape
    for pick in document["picks"].values():
        other = pick["compared_with"]
        cost = fake_cost(shape, pick["quant"])
        assert (other["name"], other["quant"], other["shape"]["text"]) == ("smollm2-135m", pick["quant"], shape.text)
        assert other["ms_per_token"]["median"] == cost.seconds_per_token.median * 1e3
        assert other["predicted_loss"]["value"] == QualityModel().predict(shape, pick["quant"]).loss
        assert other["time_ratio"] == pytest.approx(pick["ms_per_kchar"]["median"] / other["ms_per_kchar"]["median"])
        assert other["loss_difference"]["value"] == pytest.approx(
            pick["predicted_loss"]["value"] - other["predicted_loss"]["value"]
        )


def test_picks_say_why_with_ties_and_what_training_length_changes(document: dict[str, Any]) -> None:
    assert document["baseline"]["name"] == "smollm2-135m"
    assert set(document["sensitivity"]) == {"without_vocab_term", "tokens_x0.25", "tokens_x4"}
    for other in document["sensitivity"].values():
        assert set(other["picks"]) == set(document["picks"])
        moved = {name for name, pick in document["picks"].items() if other["picks"][name] != nameplate(pick)}
        assert set(other["changes"]) == moved
        assert all(change["how"] and nameplate(change) == other["picks"][name] for name, change in other["changes"].items())
    for pick in document["picks"].values():
        assert pick["reason"]
        assert nameplate(pick) not in [nameplate(tie) for tie in pick["tied_with"]]
        assert len(pick["tied_with"]) <= min(8, pick["num_tied"])
        assert all(abs(tie["nats"]) <= 0.02 for tie in pick["tied_with"])
    assert document["picks_missing"] == {}
    assert all(0 < member["front_probability"] <= 1 for member in document["front"])
    assert document["front"][0]["front_probability"] == 1
    members = {(member["shape"]["text"], member["quant"]) for member in document["front"]}
    assert all(one["front_probability"] >= 0.05 for one in document["contenders"])
    assert not members & {(one["shape"], one["quant"]) for one in document["contenders"]}
    assert document["stopped"] == "trials"
    assert document["sampler"]["name"] == "guided"
    assert document["time_basis"] == "measured"


def test_judgement_and_extrapolation_are_named(document: dict[str, Any]) -> None:
    assert "m_attn" in document["quality_model"]["judgement_terms"]
    assert any("Resting on judgement" in note and "m_attn" in note for note in document["notes"])
    assert any("Used beyond what they were fitted to: dL_vocab" in note for note in document["notes"])
    assert "about 0.2 points of mean benchmark accuracy" in document["notes"][0]


@pytest.mark.parametrize(("vocab_nats", "moved"), [(0.35, True), (0.01, False)])
def test_vocabulary_doubt_widens_intervals_only_when_it_moves_a_pick(vocab_nats: float, moved: bool) -> None:
    candidates = [scored(1, 3.0, 1000), scored(2, 3.3, 500, vocab_nats=vocab_nats), scored(3, 3.1, 600)]
    document = front_document(SearchConfig(), candidates, [], {})
    without = document["sensitivity"]["without_vocab_term"]
    same = {name: nameplate(pick) for name, pick in document["picks"].items()}
    assert bool(without["changes"]) == moved == (without["picks"] != same)
    best = document["picks"]["best_quality"]["predicted_loss"]
    assert best["high"] - best["value"] == pytest.approx(0.05 if moved else 0.02)
    assert any("vocabulary term decides" in note and "4-37" in note for note in document["notes"]) == moved


def test_small_budgets_are_marked_extrapolated(tmp_path: Path) -> None:
    document = run_search(SearchConfig(params=5_000_000, trials=6), measure=FakeMeasure(), out=tmp_path / "run")
    assert all(member["extrapolated"] for member in document["front"])
    assert any("outside the fitted data" in note for note in document["notes"])
    assert all("extrapolated" in row[-1] for row in front_rows(document))


def test_disturbed_times_and_vocabularies_without_room_are_noted() -> None:
    one = scored(1, 3.0, 1000)
    noisy = replace(one, cost=replace(one.cost, flags=("steal", "drift")))
    document = front_document(SearchConfig(params=3_000_000, vocabs=(8192, 131_072)), [noisy], [], {})
    assert document["front"][0]["measurement_flags"] == ["steal", "drift"]
    assert front_rows(document)[0][-1].endswith("noisy")
    assert any("disturbed (drift, steal)" in note for note in document["notes"])
    assert any("has room for a vocabulary of 131,072 within" in note for note in document["notes"])
    quiet = front_document(SearchConfig(), [one], [], {})
    assert not any("disturbed" in note or "has room" in note for note in quiet["notes"])


def test_rows_have_a_cell_per_header(document: dict[str, Any]) -> None:
    rows = front_rows(document)
    assert len(rows) == len(document["front"])
    assert all(len(row) == len(HEADERS) for row in [*rows, *comparison_rows(document)])
    first = dict(zip(HEADERS, rows[0], strict=True))
    assert first["loss"] == f"{document['front'][0]['predicted_loss']['value']:.3f}"
    assert "best_quality" in first["picks"]
    assert "tied" in first["notes"]
    others = {(row[0], row[6]) for row in comparison_rows(document)}
    assert others == {("smollm2-135m", pick["quant"]) for pick in document["picks"].values()}
