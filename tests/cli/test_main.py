"""The front door: exit codes, one-line errors, exactly one JSON document, and no heavy import on the way to an error."""

import json
import os
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

from deepthin.cli import inspect as inspect_command
from deepthin.cli.main import COMMANDS, main
from deepthin.engine import errors

TINY = "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"


def run_python(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "a command is needed: inspect, generate, bench, search, export, verify"),
        (["inspct"], "invalid choice: 'inspct'"),
        (["inspect"], "required: SOURCE; see deepthin inspect --help"),
        (["inspect", "nothing"], "'nothing' is no file, no folder, no shape text"),
        (["inspect", "L=2,d=64"], "heads, ff, vocab missing"),
        (["inspect", "L=2," + "d=64," * 200], "sets hidden_size a second time"),
        (["inspect", TINY, "--quant", "q9"], "argument --quant: invalid choice: 'q9'"),
        (["inspect", TINY, "--params", "many"], "'many' is not understood; write a count such as 30M"),
        (["inspect", TINY, "--context", "x"], "argument --context: 'x' is no whole number"),
        (["inspect", TINY, "--context", "-1"], "argument --context: -1 is outside 0 to 16777216"),
        (["inspect", TINY, "--layer-us", "nan"], "argument --layer-us: nan is outside 0 to 1000000000.0"),
        (["inspect", TINY, "--bandwidth", "50GB/s"], "--bandwidth and --layer-us belong together"),
        (["inspect", TINY, "--conte", "5"], "unrecognized arguments: --conte 5"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("deepthin: error: ")
    assert says in last
    assert "Traceback" not in captured.err


def test_a_missing_file_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "no/such/model.gguf"]) == 1
    assert "no/such/model.gguf: there is no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.DeepthinError)]
)
def test_every_error_of_the_family_becomes_its_exit_code(
    error: type[errors.DeepthinError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error("where, what,\nneeded")

    monkeypatch.setattr(inspect_command, "run", fail)
    assert main(["inspect", TINY]) == error.exit_code
    assert capsys.readouterr().err == "deepthin: error: where, what, needed\n"


def test_an_error_with_json_is_one_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "nothing", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "deepthin/error/1"
    assert found["error"]["kind"] == "UsageError"
    assert found["error"]["exit_code"] == 2
    assert "'nothing' is no file" in found["error"]["message"]


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "out of memory"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (ZeroDivisionError("x"), 1, "Bug: ZeroDivisionError: x"),
    ],
)
def test_whatever_escapes_ends_in_a_line(
    raised: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(inspect_command, "run", fail)
    assert main(["inspect", TINY]) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "nothing", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_help_names_commands_exit_codes_and_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n    {name}" in text
    for code in {e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.DeepthinError)}:
        assert f"\n  {code}  " in text
    assert "deepthin search --params" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_examples_and_the_common_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"examples:\n  deepthin {name}" in text
    for option in ("--json", "--config", "--quiet", "--debug"):
        assert option in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("deepthin 0.")


def test_only_the_called_command_is_imported() -> None:
    code = (
        "import sys; from deepthin.cli.main import main; main(['inspect', 'smollm2-135m'])\n"
        "print(sorted(m for m in sys.modules if m.startswith('deepthin.cli.')), file=sys.stderr)\n"
        "heavy = {'numba', 'llvmlite', 'onnx', 'onnxruntime', 'optuna', 'llama_cpp', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = run_python("-c", code)
    modules, heavy = done.stderr.strip().splitlines()
    assert "deepthin.cli.inspect" in modules
    assert not any(f"deepthin.cli.{name}'" in modules for name in COMMANDS if name != "inspect")
    assert heavy == "[]"


@pytest.mark.parametrize("content", [b"hello, this is no model\n" * 50, b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, b""])
def test_hostile_files_end_in_one_line_within_a_second(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    code = (
        "import sys, time; start = time.perf_counter()\n"
        f"from deepthin.cli.main import main; code = main(['inspect', {str(path)!r}])\n"
        "print(code, time.perf_counter() - start, 'numba' in sys.modules)"
    )
    done = run_python("-c", code)
    exit_code, seconds, has_numba = done.stdout.split()
    assert (exit_code, has_numba) == ("1", "False")
    assert float(seconds) < 1.0
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(path) in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no pipe that breaks at once")
def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "deepthin", "inspect", "smollm2-135m"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == 1


def test_module_and_script_share_one_main() -> None:
    done = run_python("-m", "deepthin", "inspect", "smollm2-135m", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["params"]["total"] == 134_515_008


def test_config_gives_defaults_and_flags_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('context = 7\n[inspect]\nquant = "f16"\njson = true\nvocab = [100, 200]\n[search]\ntrials = 3\n')
    assert main(["inspect", TINY, "--config", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["context"], found["bytes"]["quant"]) == (7, "f16")
    assert [row["vocab_size"] for row in found["vocabularies"]["rows"]] == [100, 100, 200, 200]
    assert main(["inspect", TINY, "--config", str(path), "--context", "9", "--quant", "q8_0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["context"], found["bytes"]["quant"]) == (9, "q8_0")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("contxt = 7", "'contxt' is no option of inspect; its options are bandwidth, context,"),
        ("[inspekt]\ncontext = 7", "table [inspekt] is named after no command"),
        ("inspect = 3", "inspect is 3, but a table [inspect]"),
        ("context = 'x'", "context is 'x': 'x' is no whole number"),
        ("quant = 'q9'", "quant is 'q9', but one of f32, f16"),
        ("json = 'yes'", "a switch takes true or false"),
        ("context = {a = 1}", "table [context] is named after no command"),
        ("context = ", "is no TOML"),
    ],
)
def test_config_mistakes_are_usage_errors(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert main(["inspect", TINY, "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert str(path) in error


def test_a_missing_config_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", TINY, "--config", "absent.toml"]) == 2
    assert "absent.toml: cannot be read (No such file or directory)" in capsys.readouterr().err


def test_every_command_module_offers_the_same_three_names() -> None:
    for name in COMMANDS:
        module = import_module(f"deepthin.cli.{name}")
        assert isinstance(module.EXAMPLES, str)
        assert isinstance(module.add_arguments, types.FunctionType)
        assert isinstance(module.run, types.FunctionType)
