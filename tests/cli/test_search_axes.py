"""Every axis of the space can be opened, narrowed or fixed from the command line, and what is asked for is what is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepthin.cli.arguments import Parser
from deepthin.cli.main import main
from deepthin.cli.search import _config, add_arguments
from deepthin.engine.shape import Shape

BASE = ["search", "--params", "20M", "--profile", "pixel-9", "--sampler", "random", "--no-export", "--quiet", "--trials", "5"]
Check = Callable[[Shape, str], bool]
AXES: list[tuple[list[str], Check]] = [
    (["--layers", "7"], lambda shape, quant: shape.num_layers == 7),
    (["--layers", "9-14"], lambda shape, quant: 9 <= shape.num_layers <= 14),
    (["--head-dim", "48"], lambda shape, quant: shape.head_dim == 48),
    (["--query-ratio", "2"], lambda shape, quant: shape.q_size == 2 * shape.hidden_size),
    (["--kv-group", "1"], lambda shape, quant: shape.num_kv_heads == shape.num_heads),
    (["--mlp-ratio", "5.5"], lambda shape, quant: shape.intermediate_size > 5 * shape.hidden_size),
    (["--tying", "untied"], lambda shape, quant: not shape.tie_word_embeddings),
    (["--qk-norm", "yes"], lambda shape, quant: shape.qk_norm),
    (["--vocab", "9000"], lambda shape, quant: shape.vocab_size == 9000),
    (["--quant", "q5_1", "--head-quant", "q4_0"], lambda shape, quant: quant == "q5_1-head_q4_0"),
    (["--share", "2", "--targets", "onnx"], lambda shape, quant: shape.layer_sharing == 2),
]


@pytest.mark.parametrize(("arguments", "holds"), AXES, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_an_axis_can_be_fixed(arguments: list[str], holds: Check) -> None:
    parser = Parser()
    add_arguments(parser)
    space = _config(parser.parse_args(["--params", "20M", *arguments]), "a profile").space
    generator = np.random.default_rng(1)
    found = [space.decode(space.sample(generator)) for _ in range(20)]
    assert all(holds(one.shape, one.quant) for one in found)
    assert len({one.key for one in found}) > 1  # nothing else is fixed


def test_lists_open_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*BASE[:-1], "16", "--query-ratio", "0.5,1,2", "--head-quant", "q4_0,q8_0,f16"]
    assert main([*arguments, "--quant", "q4_0", "--out", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    quants = {one["quant"] for one in found["evaluated"]}
    assert len(quants) > 1
    assert quants <= {"q4_0-head_q4_0", "q4_0", "q4_0-head_f16"}
    shapes = [Shape.parse(one["shape"]) for one in found["evaluated"]]
    assert len({round(shape.q_size / shape.hidden_size, 1) for shape in shapes}) > 1
    heads = [member for member in found["front"] if member["quant"] == "q4_0-head_q4_0"]
    assert heads  # fewest bytes to read, so one of them leads somewhere
    for member in heads:
        term = next(term for term in member["loss_terms"] if term["name"] == "dL_head")
        assert term["status"] == "judgement"
        assert term["low"] < term["nats"] < term["high"]
        assert "dL_head" in member["extrapolated"]
    assert any("Resting on judgement" in note and "dL_head" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layers", "9-4"], "'9-4' holds no number of layers, since the second number is the last; write 12 or 6-40"),
        (["--layers", "x"], "'x' is no whole number; write layers as 12 or 6-40"),
        (["--layers", "0-4"], "0 is outside 1 to 512; write layers as 12 or 6-40"),
        (["--head-dim", "40"], "head dim 40 is no multiple of 16, which ONNX exports need"),
        (["--query-ratio", "9"], "9 is outside 0.125 to 8.0"),
        (["--mlp-ratio", "0"], "0 is outside 0.125 to 6.0"),
        (["--kv-group", "0"], "0 is outside 1 to 64"),
        (["--tying", "maybe"], "invalid choice: 'maybe'"),
        (["--head-quant", "q6_k"], "'q6_k' is unknown; use one or more of f32"),
        (["--baseline", "gpt-9"], "shape name 'gpt-9' is unknown; known are"),
        (["--targets", "coreml"], "'coreml' is unknown; use one or more of hf"),
        (["--price-targets", "hf"], "'hf' is unknown; use one or more of gguf, gguf-k-quants, onnx"),
    ],
)
def test_values_that_make_no_sense_are_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, *arguments, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--params", "600k", "--vocab", "8192", "--layers", "70-80"], " at this budget"),
        (
            ["--max-kv-mb", "0.0001", "--vocab", "8192", "--head-dim", "64"],
            "--max-kv-mb: no shape of this search has so small a cache: the nearest (L=3,",
        ),
        (["--max-ms-per-token", "0.001"], "none of 5 shapes meets --max-ms-per-token: the nearest (L="),
        (["--max-ttft-ms", "0.001"], "none of 5 shapes meets --max-ttft-ms: the nearest (L="),
        (["--params", "900M", "--pick", "no_slower_than_baseline", "--baseline", "monad"], "slower per text than monad in"),
    ],
)
def test_nothing_feasible_is_exit_3_with_what_binds_and_the_way_out(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, *arguments, "--out", str(tmp_path / "run"), "--json"]) == 3
    streams = capsys.readouterr()
    assert says in streams.err
    assert any(way in streams.err for way in ("Smallest relaxation: --", "Nearest feasible: --", "a smaller --params"))
    assert json.loads(streams.out)["error"]["exit_code"] == 3


def test_fewer_layers_are_offered_where_they_are_what_binds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_most = [*BASE[:-1], "1", "--params", "600k", "--vocab", "8192", "--out", str(tmp_path / "run")]
    assert main([*with_most, "--layers", "70-80"]) == 3
    error = capsys.readouterr().err
    layers = int(error.partition("--layers ")[2].partition(" at this budget")[0])
    assert main([*with_most, "--layers", str(layers + 1)]) == 3
    assert main([*with_most, "--layers", str(layers)]) == 0


def test_prompts_are_not_timed_here_so_their_limit_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", "--max-ttft-ms", "100", "--out", str(tmp_path / "run")]) == 2
    assert "--max-ttft-ms: prompts are timed neither while searching on this machine" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
