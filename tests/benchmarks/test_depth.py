"""The depth benchmark: shapes of equal bytes, a slope that one bad point does not bend, and the page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.accounting import bytes_read_per_token
from deepthin.engine.errors import UsageError
from deepthin.engine.targets import target_verdicts
from deepthin.profiles.latency.runtimes import COLD_MIB
from deepthin.profiles.latency.workload import Workload
from tests.support.benchmark_scripts import load_script
from tests.support.probed import TRUTH, Device, conditions

depth = load_script("depth")


@pytest.mark.parametrize("size", depth.SIZES)
def test_shapes_of_a_size_read_equal_bytes_at_every_depth_and_run_everywhere(size: str) -> None:
    num_bytes, vocab = depth.SIZES[size]
    for layers in depth.DEPTHS:
        shape = depth.iso_byte_shape(layers, num_bytes, vocab)
        assert shape.num_layers == layers
        assert bytes_read_per_token(shape, depth.QUANT) == pytest.approx(num_bytes, rel=depth.MAX_OFF)
        assert 1.2 <= shape.intermediate_size / shape.hidden_size <= 5
        verdicts = target_verdicts(shape)
        assert all(verdicts[name].ok for name in ("engine", "onnx", "gguf-q4_0"))


def test_bytes_that_no_width_meets_are_refused() -> None:
    with pytest.raises(UsageError, match="no shape of 96 layers reads"):
        depth.iso_byte_shape(96, 1e5, 49152)


def test_the_cost_of_a_layer_is_the_slope_and_one_bad_point_does_not_bend_it() -> None:
    points = [(n, 2e-3 + 3e-5 * n) for n in depth.DEPTHS]
    assert depth.layer_cost(points) == pytest.approx((2e-3, 3e-5))
    points[4] = (points[4][0], 9e-3)
    assert depth.layer_cost(points) == pytest.approx((2e-3, 3e-5), rel=0.05)
    with pytest.raises(UsageError, match="at least two depths"):
        depth.layer_cost(points[:1])


FLAT = TRUTH | {f"{name}_{knot}": 1.0 for name in ("cold_at", "row_cold_at") for knot in COLD_MIB}


def fake_lines() -> list[dict[str, Any]]:
    machine = {"arch": "x86_64", "cpu_model": "Example 9000", "usable_cpus": 2, "simd": "avx2", "os": "Linux 6.1"}
    found = []
    for size, (num_bytes, vocab) in list(depth.SIZES.items())[:2]:
        for layers in (4, 16, 64):
            for runtime in ("deepthin", "llama.cpp"):
                shape = depth.iso_byte_shape(layers, num_bytes, vocab)
                for threads, rate in ((1, 2e10), (2, 3e10)):
                    probe = Device(conditions(runtime, threads), FLAT).probe(Workload(shape, depth.QUANT))
                    found.append(
                        {
                            "schema": depth.SCHEMA, "key": f"{size} {layers} {runtime} {threads}", "engine": "d",
                            "machine": machine, "created_utc": "2026-11-29T00:00:00Z", "size": size, "layers": layers,
                            "runtime": runtime, "threads": threads, "version": "1.0", "bytes_per_s": rate,
                            "probes": [probe.to_json()], "failed": "",
                        }
                    )  # fmt: skip
    return found


def test_the_page_gives_times_slopes_and_the_analytic_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(depth, "DOCUMENT", tmp_path / "docs" / "depth.md")
    data = tmp_path / "depth.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in fake_lines()))
    assert depth.main(["--data", str(data), "--report"]) == 0
    capsys.readouterr()
    text = (tmp_path / "docs" / "depth.md").read_text()
    assert "### 30M: 20 MB read per token" in text
    assert "4 layers | 16 layers | 64 layers | us per layer | analytic, 4 to 96 layers" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| llama.cpp | 1 |")][:1]
    slope = float(row.split("|")[-3])
    assert slope == pytest.approx(TRUTH["layer"] * 1e6, rel=0.6)
    assert "ms at 20 GB/s" in row
    assert "Example 9000, 2 CPUs, avx2" in text
    for size in ("30M", "135M"):
        figure = ElementTree.parse(tmp_path / "docs" / f"depth-{size}.svg").getroot()
        assert sum(element.tag.endswith("path") for element in figure.iter()) > 6
    assert not (tmp_path / "docs" / "depth-350M.svg").exists()
