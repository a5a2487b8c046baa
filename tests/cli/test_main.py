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
from deepthin.cli.arguments import usable_cpus
from deepthin.cli.main import COMMANDS, main
from deepthin.engine import errors
from deepthin.engine.cpu import TARGETS, usable_targets

TINY = "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"


def run_python(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def test_a_target_this_cpu_lacks_is_one_line_and_exit_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command that compiles; nothing is compiled before the refusal."""
    absent = next(name for name in reversed(TARGETS) if name not in usable_targets())
    monkeypatch.setenv("DEEPTHIN_SIMD", absent)
    for arguments in (["bench", TINY], ["generate", TINY, "--ids", "1,2"], ["search", "--params", "10M", "--out", "nowhere"]):
        result = run_python("-m", "deepthin", *arguments)
        assert result.returncode == 2
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith(f"deepthin: error: DEEPTHIN_SIMD={absent} needs ") and "lacks; use one of" in last
        assert "Traceback" not in result.stderr and not result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], f"a command is needed: {', '.join(COMMANDS)}"),
        (["inspct"], "invalid choice: 'inspct'"),
        (["inspect"], "required: SOURCE; see deepthin inspect --help"),
        (["inspect", "nothing"], "'nothing' is no file, no folder, no shape text"),
        (["inspect", "L=2,d=64"], "heads, ff, vocab missing"),
        (["inspect", "L=2," + "d=64," * 200], "sets hidden_size a second time"),
        (["inspect", TINY, "--quant", "q9"], "argument --quant: format 'q9' is unknown; use one of f32, f16"),
        (["inspect", TINY, "--params", "many"], "'many' is not understood; write a count such as 30M"),
        (["inspect", TINY, "--context", "x"], "argument --context: 'x' is no whole number"),
        (["inspect", TINY, "--context", "-1"], "argument --context: -1 is outside 0 to 4194304; try 2048"),
        (["inspect", TINY, "--context", "4194305"], "4194305 is outside 0 to 4194304; try 2048, since this engine caches"),
        (["inspect", TINY, "--layers", "2,0"], "argument --layers: 0 is outside 1 to 4096"),
        (["inspect", TINY, "--params", "1e400"], "'1e400' is above 2^63"),
        (["inspect", ""], "SOURCE is empty"),
        (["inspect", TINY, "--config", ""], "'' names no file or folder"),
        (["verify", ""], "argument DIR: '' names no file or folder"),
        (["export", TINY, "--out", ""], "argument --out: '' names no file or folder"),
        (["search", "--out", " "], "argument --out: ' ' names no file or folder"),
        (["search", "--store", ""], "argument --store: '' names no file or folder"),
        (["search", "--context", "4194304"], "4194304 is outside 0 to 4194303"),
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


def test_a_file_the_system_refuses_is_named_with_what_to_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr(inspect_command, "run", fail)
    assert main(["inspect", TINY]) == 1
    assert "error: some/file: Permission denied; check that it exists" in capsys.readouterr().err


def test_too_many_threads_for_the_system_is_no_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(inspect_command, "run", fail)
    assert main(["inspect", TINY]) == 1
    assert "the system starts no more threads; try a smaller --threads" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", TINY, "--ids", "1"], ["bench", TINY], ["search"]])
@pytest.mark.parametrize(("count", "says"), [("0", "0 is outside 1 to 12"), ("13", "13 is outside 1 to 12")])
def test_every_command_has_the_same_limit_of_threads(
    command: list[str], count: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deepthin.cli.arguments.usable_cpus", lambda: 3)
    assert main([*command, "--threads", count]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.endswith("; 3 CPUs are usable here, so try --threads 3; see deepthin " + command[0] + " --help\n")


def test_the_engine_takes_no_more_threads_than_the_limit_counts_cpus() -> None:
    from deepthin.engine.cores import usable_cores

    cores = usable_cores()
    assert 1 <= cores.most <= len(cores.cpus) <= usable_cpus()


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
    after = text.partition("common options, after the command:")[2]
    for option in ("--json", "--config", "--quiet", "--debug"):
        assert option in after


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
    others = [name.replace(" ", "_") for name in COMMANDS if name != "inspect"]
    assert not any(f"deepthin.cli.{name}'" in modules for name in others)
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
@pytest.mark.parametrize("arguments", [["smollm2-135m"], ["nonesuch", "--json"], ["--help"]])
def test_a_reader_that_leaves_early_gets_no_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "deepthin", "inspect", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", TINY],
        ["inspect", TINY, "--json"],
        ["--help"],
        ["generate", TINY, "--ids", "1", "-n", "2", "--threads", "1", "--quiet"],
    ],
)
def test_a_full_disk_is_told_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "deepthin", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    wanted = "deepthin: error: standard output cannot be written (No space left on device); make room there"
    assert done.stderr.startswith(wanted)
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no shell that closes streams")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", TINY], 0),
        (["inspect", "nonesuch", "--json"], 2),
        (["generate", TINY, "--ids", "1", "-n", "2", "--threads", "1"], 0),
    ],
)
def test_closed_streams_stop_nothing(closed: str, arguments: list[str], code: int) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "deepthin", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "deepthin: error" not in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_standard_error_that_cannot_be_written_keeps_the_exit_code() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "deepthin", "inspect", "nonesuch", "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["exit_code"] == 2


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


@pytest.mark.parametrize("arguments", [["inspect", "nothing"], ["inspect", TINY, "--context", "x"]])
def test_switches_from_a_config_hold_when_the_command_fails(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("json = true\ndebug = true\n")
    assert main([*arguments, "--config", str(path)]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["exit_code"] == 2
    assert "Traceback" in captured.err


def test_a_value_that_looks_like_a_switch_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "'--json' is no file" in captured.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("contxt = 7", "'contxt' is no option of inspect; its options are bandwidth, context,"),
        ("[inspekt]\ncontext = 7", "table [inspekt] is named after no command"),
        ("inspect = 3", "inspect is 3, but a table [inspect]"),
        ("context = 'x'", "context is 'x': 'x' is no whole number"),
        ("quant = 'q9'", "quant is 'q9': format 'q9' is unknown; use one of f32, f16"),
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
        module = import_module(f"deepthin.cli.{name.replace(' ', '_')}")
        assert isinstance(module.EXAMPLES, str)
        assert isinstance(module.add_arguments, types.FunctionType)
        assert isinstance(module.run, types.FunctionType)
