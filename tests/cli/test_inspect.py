import json
from pathlib import Path
from typing import Any

import pytest

from deepthin.cli.main import main
from deepthin.engine.accounting import bytes_read_per_token, count_bytes
from deepthin.engine.known_shapes import known_shape
from deepthin.engine.shape import Shape

SMOLLM2 = known_shape("smollm2-135m").shape


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["inspect", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 0
    return capsys.readouterr().out


def test_document_has_envelope_and_all_essentials(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, "smollm2-135m", "--quant", "q8_0", "--context", "512")
    assert found["schema"] == "deepthin/inspect/1"
    assert set(found) >= {"version", "created_utc", "machine", "source", "shape", "params", "bytes", "flags", "targets"}
    assert found["machine"]["usable_cpus"] >= 1
    assert Shape.from_json(found["shape"]) == SMOLLM2
    assert (
        found["params"]["total"]
        == 134_515_008
        == sum(found["params"][k] for k in ("embedding", "attention", "mlp", "norm", "head"))
    )
    assert found["bytes"]["total"] == count_bytes(SMOLLM2, "q8_0").total == found["bytes"]["by_quant"]["q8_0"]
    assert found["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert found["kv_bytes"] == 512 * found["kv_bytes_per_token"]
    assert found["bytes_read_per_token"] == bytes_read_per_token(SMOLLM2, "q8_0", context=512)
    assert found["aspect_ratio"] == 576 / 30
    assert [flag["flag"] for flag in found["flags"]] == ["aspect_low"]
    assert found["targets"]["gguf-q4_0"] == {"ok": True, "why": "architecture llama"}
    assert found["known"]["published_params"] == 134_500_000
    assert found["latency"] is None


def test_analytic_latency_of_the_64_layer_example(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "L=64,d=3072,heads=24,ff=12288,vocab=2,mlp=gelu"
    found = inspected(
        capsys, shape, "--quant", "f16", "--context", "0", "--bandwidth", "15.1TB/s", "--layer-us", "40", "--layers", "16,64"
    )
    assert found["latency"]["layers_s"] == pytest.approx(2.56e-3)
    assert found["latency"]["weight_read_s"] == pytest.approx(0.96e-3, rel=2e-3)
    shallow, deep = found["iso_parameter_curve"]
    assert (shallow["num_layers"], shallow["hidden_size"]) == (16, 6144)
    assert deep["total_s"] / shallow["total_s"] == pytest.approx(2.2, abs=0.01)
    assert deep["total_s"] == pytest.approx(found["latency"]["total_s"], rel=1e-3)


def test_vocabularies_at_125_million(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "smollm2-135m", "--params", "125M")
    assert "what a vocabulary leaves of 125M parameters at d=576" in text
    rows = {tuple(line.split()[:2]): line for line in text.splitlines()}
    assert rows["49,152", "tied"].split()[2:] == ["28,311,552", "23%", "96,687,872", "27"]
    assert "nothing: over by 25,995,520" in rows["262,144", "tied"]


def test_tables_for_people_name_flags_targets_and_known_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "gemma-3-270m")
    assert "published as 268.1M parameters" in text
    assert "for accounting only, since this engine does not run its GeGLU gate, four norms a block" in text
    assert "warning: d/L = 35.6" in text
    assert "Qwen3ForCausalLM" in text


def test_a_shape_too_small_for_a_curve_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no other depth has a width of 32 or more" in printed(capsys, "L=1,d=2,heads=1,ff=1,vocab=1")


def test_a_model_file_is_accounted_as_stored(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, str(smollm2_path), "--context", "0")
    stored = found["bytes"]
    assert stored["quant"] == "as stored"
    assert stored["embedding"] > 0
    assert stored["total"] == sum(stored[key] for key in ("embedding", "attention", "mlp", "norm", "head"))
    assert 0.97 < stored["total"] / smollm2_path.stat().st_size < 1.0
    assert found["bytes_read_per_token"] == stored["total"] + stored["embedding"] // 49152
    converted = inspected(capsys, str(smollm2_path), "--quant", "q8_0")
    assert converted["bytes"]["total"] == count_bytes(SMOLLM2, "q8_0").total


@pytest.mark.parametrize("wrap", [lambda shape: shape, lambda shape: {"shape": shape}, lambda shape: {"shape": shape["text"]}])
def test_shape_json_in_any_of_our_forms(wrap: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(wrap(SMOLLM2.to_json())))
    assert inspected(capsys, str(path))["shape"]["text"] == SMOLLM2.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "holds no shape"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ('{"shape": {"layers": 3}}', "unknown key 'layers'"),
        ('{"num_layers": 3}', "needed are num_layers"),
        ('{"shape": "L=3"}', "missing"),
    ],
)
def test_other_json_exits_1(content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shape.json"
    path.write_text(content)
    assert main(["inspect", str(path)]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert str(path) in error
