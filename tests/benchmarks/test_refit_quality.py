"""The checks of docs/quality.md as thresholds, on the public tables where they are there."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.shared_tables import shared_folder

ROOT = Path(__file__).parents[2]


def load_script() -> Any:
    """Scripts are no package: they are loaded from their file."""
    spec = spec_from_file_location("benchmarks_refit_quality", ROOT / "benchmarks" / "refit_quality.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = load_script()


def test_own_fits_come_out_of_the_tables_again() -> None:
    fits = {fit.name: fit for fit in script.refit(shared_folder())}
    assert {"F4 cooldown", "F2 cooldown", "F4 hot", "accuracy read-out"} <= set(fits)
    for fit in fits.values():
        assert fit.reproduced, fit
        assert fit.furthest < 1e-4
    assert fits["F4 cooldown"].rows == 199
    assert fits["F4 cooldown"].rmse == pytest.approx(0.0235, abs=5e-5)
    assert fits["accuracy read-out"].rmse == pytest.approx(0.0034, abs=5e-5)


def test_a_changed_coefficient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = script.accuracy.READ_OUT[0] + 0.002, *script.accuracy.READ_OUT[1:]
    monkeypatch.setattr(script.accuracy, "READ_OUT", wrong)
    fits = {fit.name: fit for fit in script.refit(shared_folder())}
    assert not fits["accuracy read-out"].reproduced


def test_ranks_on_tables_the_law_was_not_fitted_to() -> None:
    checks = script.rank_checks(shared_folder())
    morph, mobile = checks["Morph"], checks["MobileLLM"]
    assert (morph["F4 (used)"].groups, morph["F4 (used)"].pairs, mobile["F4 (used)"].pairs) == (14, 104, 29)
    for law in ("F4 (used)", "F2", "gem4 (published)"):
        assert morph[law].spearman >= 0.9
        assert morph[law].regret <= 0.01
        assert mobile[law].pair_accuracy >= 0.85
        assert mobile[law].regret <= 0.2
    # What the page says of the baselines.
    assert morph["body parameters only"].pair_accuracy > 0.85
    assert morph["total parameters only"].spearman < 0
    assert mobile["total parameters only"].spearman < 0


def test_clear_mobilellm_pairs_are_ordered() -> None:
    shapes = script.mobilellm_shapes(shared_folder())
    clear = [
        (a, b)
        for i, a in enumerate(shapes)
        for b in shapes[i + 1 :]
        if a.group == b.group and abs(a.outcome - b.outcome) >= 0.3 - 1e-9
    ]
    right = [(script.f4_guarded(a) < script.f4_guarded(b)) == (a.outcome < b.outcome) for a, b in clear]
    assert len(right) == 24
    assert sum(right) >= 22


def test_held_out_morph_rows() -> None:
    held = {
        (row["model"].split("_")[0], row["tokens_mult"], row["depth"])
        for row in script.table(shared_folder(), "morph_shape_loss.csv")
        if row["in_paper_fit"] == "0"
    }
    shapes = [s for s in script.morph_shapes(shared_folder()) if (*s.group.split(), str(int(s.layers))) in held]
    found = script.ranks(shapes, script.f4_guarded)
    assert found.groups >= 5
    assert found.spearman >= 0.9
    assert found.regret <= 0.01


def test_a_band_left_out_of_the_fit_is_ranked_and_body_size_alone_does_not_rank_it() -> None:
    for laws in script.held_out_band(shared_folder(), "105M").values():
        assert laws["F4 refit without the band"].spearman >= 0.85
        assert laws["F4 refit without the band"].regret <= 0.01
        assert laws["body parameters only"].spearman < 0.8
        assert laws["body parameters only"].regret > 0.03


def test_guarded_and_raw_f4_rank_alike() -> None:
    def raw(shape: Any) -> float:
        return float(script.shape_laws.f4_loss(shape.layers, shape.width, shape.body))

    for shapes in (script.morph_shapes, script.mobilellm_shapes, script.gemstones_shapes):
        rows = shapes(shared_folder())
        assert script.ranks(rows, raw) == script.ranks(rows, script.f4_guarded)


def test_the_page_shows_what_the_script_prints() -> None:
    page = (ROOT / "docs" / "quality.md").read_text()
    folder = shared_folder()
    for text in (
        script.ranks_table(script.rank_checks(folder)),
        script.held_out_table(script.held_out_band(folder, "105M")),
        script.quantisation_table(folder),
    ):
        assert text in page


def test_ranks_of_a_hand_made_group() -> None:
    shapes = [script.Shape("a", 1, 1, body, 1, outcome) for body, outcome in ((3, 1.0), (2, 1.5), (1, 1.2))]
    found = script.ranks([*shapes, script.Shape("alone", 1, 1, 1, 1, 9.0)], lambda s: -s.body)
    assert (found.groups, found.pairs) == (1, 3)
    assert found.pair_accuracy == pytest.approx(2 / 3)
    assert found.spearman == pytest.approx(0.5)
    assert found.regret == 0
    assert script.ranks(shapes, lambda s: s.body).regret == pytest.approx(0.2)
    assert script.spearman([1, 1, 1], [1, 2, 3]) == 0


def test_fitting_finds_known_parameters_despite_outliers() -> None:
    x = np.linspace(1, 4, 40)
    y = 0.7 - 2.0 * np.exp(-1.5 * x)
    y[[3, 20]] += 0.2
    found = script.least_huber(lambda p: script.read_out(p, x) - y, (0.5, 1.0, 1.0), 1e-4)
    assert found == pytest.approx([0.7, 2.0, 1.5], abs=2e-3)


def test_a_missing_folder_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert script.main(["--data", str(tmp_path / "none")]) == 2
    assert "no such folder; name the one with the public tables with --data" in capsys.readouterr().err


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text")
    with pytest.raises(SystemExit, match="holds no <!-- fits -->"):
        script.rewrite(page, {"fits": "x"})
    page.write_text("a <!-- fits -->old<!-- /fits --> b")
    script.rewrite(page, {"fits": "new"})
    assert page.read_text() == "a <!-- fits -->\nnew\n<!-- /fits --> b"
