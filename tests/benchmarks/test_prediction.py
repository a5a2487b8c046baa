"""The prediction benchmark: what is held out, what the report says, and the committed sample that no change may worsen."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.accounting import count_params
from deepthin.engine.errors import FormatError
from deepthin.engine.shape import Shape
from deepthin.profiles.latency.curve import BandwidthCurve
from deepthin.profiles.latency.evaluation import compare, summary
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.runtimes import RUNTIMES
from deepthin.profiles.latency.workload import Workload
from deepthin.profiles.measuring import fit_models, measure_profile
from deepthin.profiles.probe_plans import plan_of
from deepthin.profiles.probe_shapes import ProbeModel
from deepthin.profiles.protocol import Rule
from deepthin.profiles.statistics import measured
from tests.support.benchmark_scripts import load_script
from tests.support.fake_runtimes import FakeHost, small_plan
from tests.support.probed import Device, conditions, decode_works

prediction = load_script("prediction")
measuring = load_script("prediction_measuring")
placement = load_script("placement")
SAMPLE = Path(__file__).parents[1] / "profiles" / "latency" / "sample.json"
WORSE = 1.1  # how much the median error of a group may grow
SMALL_ERROR = 0.005  # below it, changes are rounding


def test_sixty_shapes_are_held_out_and_none_is_a_probe() -> None:
    items = measuring.held_out()
    texts = {item["shape"].text for item in items}
    assert len(texts) >= 60
    assert items == measuring.held_out()
    for peer in RUNTIMES:
        assert not texts & {model.shape.text for model in plan_of(peer)}
    params = [count_params(item["shape"]).total for item in items]
    depths = [item["shape"].num_layers for item in items]
    assert min(params) < 8e6
    assert max(params) > 4e8
    assert min(depths) <= 3
    assert max(depths) > 70
    for name, runtime in RUNTIMES.items():
        assert {item["quants"][name] for item in items} == set(runtime.formats)
    assert {item["context"] for item in items} == set(measuring.CONTEXTS)


def test_peers_get_no_prompt_that_takes_minutes() -> None:
    for item in measuring.held_out():
        model = measuring.probe_model(item, "llama.cpp")
        assert model.room * count_params(model.shape).total <= 1.1 * max(
            measuring.PEER_PRODUCTS, measuring.PROMPT_PRODUCTS
        ) or (model.room <= 8)


def fake_lines(noise: float = 0.01) -> list[dict[str, Any]]:
    """A stored run of the benchmark on a machine made of arithmetic."""
    host = FakeHost(noise=noise)
    runtimes = ("deepthin", "llama.cpp")
    profile = measure_profile(host.bench(runtimes, {name: small_plan() for name in runtimes}), budget_s=200)
    base = {"schema": measuring.SCHEMA, "engine": "digest", "machine": "fake", "created_utc": "2100-01-01T00:00:00Z"}
    lines: list[dict[str, Any]] = [{**base, "key": "profile", "profile": profile.to_json()}]
    for turn, count in ((1, 12), (2, 6)):
        for index, item in enumerate(measuring.held_out()[:count]):
            for runtime in runtimes:
                model = measuring.probe_model(item, runtime)
                for threads in (1, 2):
                    device = Device(conditions(runtime, threads), noise=noise, seed=turn)
                    probes = [device.probe(prediction_work(model, "decode", 1, context)) for context in model.contexts]
                    probes.append(device.probe(prediction_work(model, "prefill", model.prompts[0], 0)))
                    key = f"held-out {turn} {index} {runtime} {threads}"
                    lines.append({**base, "key": key, "probes": [probe.to_json() for probe in probes], "failed": ""})
    return lines


def prediction_work(model: Any, test: str, tokens: int, context: int) -> Any:
    return Workload(model.shape, model.quant, test, tokens, context)


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return fake_lines()


def test_the_report_has_every_runtime_test_and_thread_count_with_its_floor(lines: list[dict[str, Any]]) -> None:
    text = prediction.report(lines)
    for runtime in ("deepthin", "llama.cpp"):
        for test in ("token", "prompt"):
            for threads in (1, 2):
                rows = [line for line in text.splitlines() if line.startswith(f"| {runtime} | {test} | {threads} |")]
                assert len(rows) in (1, 2)  # within the probes' range, and perhaps beyond it
                assert all(row.count("%") >= 6 for row in rows)
    assert "Held out: 12 shapes" in text
    assert "| deepthin | memory |" in text


def test_the_truth_is_pooled_over_undisturbed_visits() -> None:
    work = decode_works(1)[0]
    visits = [
        Probe("deepthin", 1, work, measured([seconds], "s"), flags)
        for seconds, flags in ((1.0, ()), (1.2, ("drift",)), (1.1, ()), (9.0, ("preempted",)))
    ]
    (one,) = measuring.pooled(visits)
    assert one.seconds.median == 1.1
    assert one.flags == ("drift",)
    (spoilt,) = measuring.pooled(visits[3:])
    assert spoilt.flags == ("preempted",)


def test_a_second_turn_of_a_peer_counts_for_the_context_of_the_first() -> None:
    works = [Workload(decode_works(1)[0].shape, "q8_0", context=context) for context in (6, 7)]
    lines = [
        {"key": f"held-out {turn} 3 llama.cpp 1", "probes": [Probe("llama.cpp", 1, work, measured([1.0], "s")).to_json()]}
        for turn, work in enumerate(works, 1)
    ]
    assert [probe.work for turn in (1, 2) for probe in measuring.held_out_probes(lines, turn)] == [works[0]] * 2
    assert len(prediction.truths(lines)) == 1


def test_models_are_visited_in_turns() -> None:
    """Of two models at two thread counts, one visit after the other, whatever a session closes meanwhile."""
    models = [
        ProbeModel(Shape.parse(f"L={layers},d=64,heads=2,ff=128,vocab=256,tied"), "q8_0", (0, 8), (8,)) for layers in (1, 2)
    ]
    found = measuring.visited(models, (1, 2), Rule(rounds=1, budget_s=0.01))
    assert len(found) == measuring.VISITS * 2 * 2 * 3
    order = [(probe.work.shape.num_layers, probe.threads) for probe in found[::3]]
    assert order == [(1, 1), (1, 2), (2, 1), (2, 2)] * measuring.VISITS
    assert len(measuring.pooled(found)) == 12


def test_page_and_figure_are_written_from_stored_lines(
    lines: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DOCUMENT", "SAMPLE"):
        monkeypatch.setattr(prediction, name, tmp_path / "out" / name.lower())
    monkeypatch.setattr(prediction, "FIGURES", tmp_path / "out")
    data = tmp_path / "prediction.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert prediction.main(["--data", str(data), "--sample"]) == 0
    assert "Spearman" in capsys.readouterr().out
    page = (tmp_path / "out" / "document").read_text()
    (drawn,) = (tmp_path / "out").glob("prediction-*.svg")
    assert f"## {drawn.stem.removeprefix('prediction-')}\n" in page
    assert f"({drawn.name})" in page
    figure = ElementTree.parse(drawn).getroot()
    assert len([element for element in figure.iter() if element.tag.endswith("circle")]) > 40
    sample = json.loads((tmp_path / "out" / "sample").read_text())
    assert_no_worse(sample)


def test_the_report_says_how_much_older_than_the_profile_times_are(lines: list[dict[str, Any]]) -> None:
    profile = prediction.profile_of(lines)
    assert prediction._taken_before(lines, profile) == ""
    hour, made = "2020-01-01T10:30:00Z", replace(profile, created_utc="2020-01-01T12:00:00Z")
    older = [{**line, "created_utc": hour} if line["key"].startswith("held-out 1 ") else line for line in lines]
    count = sum(line["created_utc"] == hour for line in older)
    assert f" {count} sessions of other runtimes are 1.5 to 1.5 hours older" in prediction._taken_before(older, made)


def test_lines_of_another_engine_are_passed_over(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    data = tmp_path / "p.jsonl"
    old = {**lines[0], "engine": "older"}
    data.write_text("".join(json.dumps(line) + "\n" for line in [old, *lines]))
    assert len(measuring.read_lines(data)) == len(lines)


def test_what_was_held_out_on_other_runtimes_holds_for_every_engine_and_the_newest_line_counts(tmp_path: Path) -> None:
    keys = (
        "profile",
        "kit llama.cpp 1",
        "held-out 1 group 0 deepthin 2",
        "held-out 1 3 llama.cpp 2",
        "held-out 2 3 onnxruntime 1",
    )
    old = [{"key": key, "engine": "older"} for key in keys]
    new = [{"key": "profile", "engine": "new"}, {"key": keys[3], "engine": "new"}]
    data = tmp_path / "p.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in [*old, *new]))
    found = {line["key"]: line["engine"] for line in measuring.read_lines(data)}
    assert found == {keys[3]: "new", keys[4]: "older", "profile": "new"}


def profile_line(barrier_s: float) -> dict[str, Any]:
    return {"profile": {"noise": {"placements": [{"runtime": "deepthin", "threads": 2, "barrier_s": barrier_s}]}}}


def test_several_threads_are_timed_only_where_the_profile_was(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {f"held-out 1 0 {runtime} {threads}": None for runtime in ("deepthin", "llama.cpp") for threads in (2, 1)}
    monkeypatch.setattr(placement.BarrierSentinel, "__call__", lambda self: 7e-8 if self._threads > 1 else None)
    monkeypatch.setattr(placement.BarrierSentinel, "reference_s", {})
    monkeypatch.setattr(placement, "PATIENCE_S", 0.05)
    monkeypatch.setattr(placement, "AWAY_S", 0.01)

    def first(keys: Iterable[str], profile: Any) -> Any:
        return placement.next_key(keys, lambda key: measuring._placement(key, profile))

    assert first(jobs, None) == "held-out 1 0 deepthin 2"
    assert first(jobs, profile_line(8e-8)) == "held-out 1 0 deepthin 2"
    assert placement.BarrierSentinel.reference_s == {2: 8e-8}
    assert first(jobs, profile_line(2.8e-7)) == "held-out 1 0 deepthin 1"
    assert first(["held-out 1 0 deepthin 2"], profile_line(2.8e-7)) == "held-out 1 0 deepthin 2"


def test_without_measurements_the_script_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prediction.main(["--data", str(tmp_path / "none"), "--report"]) == 1
    assert "nothing was measured yet" in capsys.readouterr().err
    with pytest.raises(FormatError, match="no profile was measured yet"):
        prediction.profile_of([])


def median_errors(sample: dict[str, Any]) -> dict[str, float]:
    """Errors of models fitted now to the sample's probes, on what the sample holds out."""
    curve = BandwidthCurve.from_json(sample["bandwidth"])
    models = fit_models([Probe.from_json(probe) for probe in sample["probes"]], curve)
    held = [Probe.from_json(probe) for probe in sample["held_out"]]
    found = {}
    for model in models:
        compared = compare(model, held)
        if compared:
            where = model.conditions
            found[f"{where.runtime.name} {model.test} {where.threads}"] = summary(compared)["median"]
    return found


def assert_no_worse(sample: dict[str, Any]) -> None:
    now = median_errors(sample)
    assert set(now) == set(sample["median_errors"])
    worse = {
        name: (before, now[name])
        for name, before in sample["median_errors"].items()
        if now[name] > WORSE * before + SMALL_ERROR
    }
    assert not worse, f"held-out median errors grew by more than a tenth (before, now): {worse}"


def test_the_committed_sample_is_predicted_no_worse_than_when_it_was_taken() -> None:
    sample = json.loads(SAMPLE.read_text(encoding="utf-8"))
    assert sample["schema"] == "deepthin/prediction-sample/1"
    assert sample["machine"]["cpu_model"]
    assert_no_worse(sample)


def test_a_worse_model_would_be_noticed() -> None:
    sample = json.loads(SAMPLE.read_text(encoding="utf-8"))
    spoilt = {**sample, "median_errors": {name: error / 1.5 for name, error in sample["median_errors"].items()}}
    with pytest.raises(AssertionError, match="grew by more than a tenth"):
        assert_no_worse(spoilt)
