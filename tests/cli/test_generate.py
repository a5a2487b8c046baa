import io
import json
from pathlib import Path

import pytest

from deepthin.cli.main import main
from deepthin.engine.targets import Verdict

TINY = "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"


def test_text_streams_to_standard_output_and_times_to_standard_error(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(smollm2_path), "-p", "The capital of France is", "-n", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(" Paris")
    assert captured.out.endswith("\n")
    assert "5 prompt tokens at" in captured.err
    assert "8 generated at" in captured.err


def test_json_holds_the_same_text(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("The capital of France is"))
    assert main(["generate", str(smollm2_path), "-p", "-", "-n", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "deepthin/generate/1"
    assert found["text"].startswith(" Paris")
    assert len(found["token_ids"]) == 8
    assert len(found["prompt_token_ids"]) == 5
    for name in ("prefill_tok_s", "decode_tok_s"):
        assert set(found[name]) == {"median", "ci_low", "ci_high", "n", "unit", "samples"}
        assert found[name]["median"] > 0


def test_a_bare_shape_continues_ids_the_same_way_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", TINY, "--ids", "1,2,3", "-n", "5", "--temperature", "0.9", "--seed", "4"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main([*arguments, "--threads", "1"]) == 0
    assert capsys.readouterr().out == first
    assert [0 <= int(word) < 96 for word in first.split()] == [True] * 5


@pytest.mark.parametrize("name", ["f32", "f16", "q8_0"])
def test_the_cache_format_is_chosen_and_told(name: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(smollm2_path), "-p", "The capital of France is", "-n", "4", "--kv", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_format"] == name
    assert found["text"].startswith(" Paris")


def test_an_unknown_cache_format_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", TINY, "--ids", "1", "--kv", "q4_0"]) == 2
    assert "argument --kv: invalid choice: 'q4_0'" in capsys.readouterr().err


def test_one_token_has_no_decode_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", TINY, "--ids", "1", "-n", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decode_tok_s"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "a prompt is needed: -p TEXT"),
        (["-p", "hello"], 2, "has no tokenizer, so it takes no text"),
        (["--ids", "1,x"], 2, "'1,x' is no list of token ids"),
        (["--ids=-1"], 2, "holds a negative token id"),
        (["--ids", "1,99999999999999999999999999"], 2, "token id 99999999999999999999999999 is outside the vocabulary of 96"),
        (["--ids", "1,2", "-n", "4194304"], 2, "the most this engine caches; ask for fewer with -n"),
        (["--ids", "1", "--context", "4194305"], 2, "4194305 is outside 1 to 4194304; try 2048"),
        (["--ids", "96"], 2, "token id 96 is outside the vocabulary of 96"),
        (["--ids", "1", "-n", "9", "--context", "4"], 2, "do not fit a context of 4"),
        (["--ids", "1", "-p", "x"], 2, "not allowed with argument"),
        (["--ids", "1", "--top-p", "0"], 2, "0 is outside"),
        (["--ids", "1", "-n", "0"], 2, "0 is outside 1 to"),
    ],
)
def test_prompts_that_do_not_fit(arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", TINY, *arguments]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", TINY, "--ids", "1"], ["bench", TINY]])
def test_a_shape_the_engine_lacks_is_refused_before_weights_are_made(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(*_: object, **__: object) -> None:
        pytest.fail("weights were made")

    monkeypatch.setattr("deepthin.engine.targets.target_verdicts", lambda _: {"engine": Verdict(False, "the rule")})
    monkeypatch.setattr("deepthin.engine.model.random_model", made)
    assert main(command) == 1
    assert "this engine does not run it (the rule)" in capsys.readouterr().err


def test_progress_says_that_weights_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("deepthin.cli.progress.Progress.__call__", lambda _, message, *__: said.append(message))
    assert main(["generate", TINY, "--ids", "1", "-n", "1", "--threads", "1"]) == 0
    assert said[0] == "making random weights"


def test_a_shape_that_is_no_published_architecture_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = TINY + ",mlp=gelu,qk_norm,qkv_bias,share=2,nope=2,rope=yarn_4_32"
    assert main(["generate", text, "--ids", "1", "-n", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 2


def test_the_choice_of_threads_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepthin.engine import decoder
    from deepthin.engine.cores import Cores

    monkeypatch.setattr(decoder, "user_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(decoder, "usable_cores", lambda: Cores((0, 1), 2))
    command = ["generate", TINY, "--ids", "1,2", "-n", "2"]
    assert main([*command, "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)
    choice = chosen["thread_choice"]
    assert choice["basis"] == "measured"
    assert set(choice["ms_per_token"]) == {"1", "2"}
    assert choice["threads"] == chosen["threads"] in (1, 2)
    assert main(command) == 0
    assert " (measured" in capsys.readouterr().err
    assert main([*command, "--threads", "2", "--json"]) == 0
    given = json.loads(capsys.readouterr().out)["thread_choice"]
    assert given == {"threads": 2, "basis": "given", "disturbed": False, "ms_per_token": {}}
