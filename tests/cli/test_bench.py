import json

import pytest

from deepthin.cli.main import main

TINY = "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"
QUICK = ["--repetitions", "2", "--prompt", "4", "--gen", "3", "--threads", "1", "--budget-s", "0", "--quiet"]


def test_rows_of_engine_and_peers_on_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TINY, "--against", "llama.cpp,onnxruntime", *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "deepthin/bench/1"
    assert found["quant"] == "q4_0"
    rows = {(row["runtime"], row["test"]): row for row in found["results"]}
    assert set(rows) == {(name, test) for name in ("deepthin", "llama.cpp", "onnxruntime") for test in ("pp4", "tg3")}
    for row in rows.values():
        assert row["status"] == "ran"
        assert row["tok_s"]["unit"] == "tok/s"
        assert row["tok_s"]["n"] == len(row["tok_s"]["samples"]) >= 2
    assert rows["deepthin", "tg3"]["bytes_per_token"] > 0
    assert rows["deepthin", "tg3"]["ratio_to_engine"] is None
    assert rows["llama.cpp", "tg3"]["ratio_to_engine"]["median"] > 0


def test_a_table_names_who_could_not_take_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TINY, "--quant", "f16", "--against", "onnxruntime", *QUICK]) == 0
    text = capsys.readouterr().out
    assert f"{TINY}, f16" in text
    assert "onnxruntime failed (tg3, 1 threads): our ONNX files hold f16 weights as f32" in text
    assert "read bandwidth with 1 threads" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "vllm"], "'vllm' is unknown; use one or more of llama.cpp, onnxruntime"),
        (["--prompt", "0", "--gen", "0"], "nothing to time"),
        (["--threads", "0"], "argument --threads: 0 is outside 1 to"),
        (["--depth", "1048576", "--prompt", "1048576", "--threads", "100000000000"], "is outside 1 to"),
    ],
)
def test_requests_that_make_no_sense(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", TINY, *arguments]) == 2
    assert says in capsys.readouterr().err
