"""The ``deepthin`` command: finds the subcommand, imports only that one, prints its outcome, turns errors into exit codes.

0 done · 1 failed · 2 usage · 3 nothing feasible · 4 verification failed · 130 interrupted
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from deepthin import __version__
from deepthin.cli.arguments import Parser, add_common, parse_path
from deepthin.cli.config import apply_config
from deepthin.cli.outcome import Outcome
from deepthin.cli.output import discard, prepare_streams, write_error, write_out
from deepthin.cli.progress import Progress
from deepthin.engine.errors import DeepthinError, UsageError

COMMANDS = {  # name -> one line of help; the module is deepthin.cli.<name>, a blank in the name an underscore there
    "inspect": "what a shape costs on paper: parameters, bytes, cache, warnings, which runtimes take it",
    "generate": "continue a text or token ids with a model",
    "bench": "time this machine on a model or shape, alone or against llama.cpp, onnxruntime and genai",
    "profile": "measure this machine, predict speeds here and on other devices, make kits for those",
    "search": "find the shapes that trade quality for speed best within a budget, on this machine",
    "search worker": "measure on this machine for searches that share a database with it",
    "export": "write a model as a Hugging Face folder, ONNX and GGUF files with a manifest",
    "verify": "prove that the files of an export give equal logits in every runtime",
}
EXIT_CODES = """exit codes:
  0  done
  1  failed: a file, folder (such as an --out in use), machine or runtime is not as it should be
  2  usage: the arguments make no sense
  3  nothing feasible: no shape meets the budget; the message names the limit that binds
  4  verification failed: two runtimes disagree, or a file is damaged
  130  interrupted
"""
_EPILOG = f"""{EXIT_CODES}
first steps:
  deepthin inspect smollm2-135m          what a known shape costs on paper
  deepthin search --params 30M --out run find, export and verify the best shapes for this machine
  deepthin COMMAND --help                options and examples of one command

common options, after the command:
  --json               print exactly one JSON document on standard output
  --config FILE.toml   take options from a TOML file; flags on the command line win
  --quiet              no progress on standard error
  --debug              show a traceback when something fails
"""
INTERRUPTED = 130


@dataclass(slots=True)
class _Switches:
    """How to report a failure: guessed from the command line until the options are parsed."""

    json: bool
    debug: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    try:
        return _guarded(arguments)
    except BrokenPipeError:  # whoever read our output has seen enough
        discard(sys.stdout)
        return 1


def _guarded(arguments: list[str]) -> int:
    """Run one command; whatever escapes becomes a line and an exit code."""
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    switches = _Switches(json="--json" in flags, debug="--debug" in flags)
    try:
        return _run(arguments, switches)
    except KeyboardInterrupt:
        write_error("deepthin: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except DeepthinError as error:
        return _fail(error, switches)
    except (MemoryError, OSError) as error:
        reason = "out of memory" if isinstance(error, MemoryError) else _os_reason(error)
        return _fail(DeepthinError(reason), switches, cause=error)
    except Exception as error:
        reason = f"Bug: {type(error).__name__}: {error}; please report it with what --debug prints"
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            reason = "the system starts no more threads; try a smaller --threads, or a higher limit (ulimit -u)"
        return _fail(DeepthinError(reason), switches, cause=error)


def _run(arguments: list[str], switches: _Switches) -> int:
    arguments = _joined(arguments)
    command = next((item for item in arguments if not item.startswith("-")), None)
    parser = Parser(
        prog="deepthin", description="Pick the shape of a small language model by measured latency.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"deepthin {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    module: ModuleType | None = None
    for name, summary in COMMANDS.items():
        sub = subparsers.add_parser(name, help=summary)
        if name != command:
            continue
        module = import_module(f"deepthin.cli.{name.replace(' ', '_')}")
        sub.description = summary[0].upper() + summary[1:] + "."
        sub.epilog = module.EXAMPLES
        module.add_arguments(sub)
        add_common(sub)
        config = _config_path(arguments)
        if config is not None:
            apply_config(parse_path(config), name, sub, set(COMMANDS))
            switches.json |= sub.get_default("json")
            switches.debug |= sub.get_default("debug")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    if module is None:
        write_error(parser.format_help())
        raise UsageError(f"a command is needed: {', '.join(COMMANDS)}")
    switches.json, switches.debug = options.json, options.debug
    with Progress(enabled=not options.quiet) as progress:
        outcome: Outcome = module.run(options, progress)
    _print(outcome, as_json=options.json)
    return outcome.exit_code


def _joined(arguments: list[str]) -> list[str]:
    """``arguments`` with a command of two words made one; the first that is no option names the command."""
    at = next((index for index, item in enumerate(arguments) if not item.startswith("-")), 0)
    words = " ".join(arguments[at : at + 2])
    return [*arguments[:at], words, *arguments[at + 2 :]] if " " in words and words in COMMANDS else arguments


def _config_path(arguments: Sequence[str]) -> str | None:
    """The value of ``--config``, read ahead because it changes the defaults of the real parse."""
    parser = Parser(add_help=False)
    parser.add_argument("--config", nargs="?")
    found: str | None = parser.parse_known_args(arguments)[0].config
    return found


def _print(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        from deepthin.cli.document import document, to_text

        write_out(to_text(document(outcome.kind, outcome.body)))
    elif outcome.text:
        write_out(outcome.text)


def _os_reason(error: OSError) -> str:
    """Where the system refused and why, with what to try."""
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{error.strerror or error}; check that it exists, that you may read or write it, and that there is space"


def _fail(error: DeepthinError, switches: _Switches, cause: BaseException | None = None) -> int:
    """Say what failed in one line on standard error, and as a document on standard output with ``--json``."""
    if switches.debug:
        write_error("".join(traceback.format_exception(cause or error)).rstrip())
    write_error(f"deepthin: error: {' '.join(str(error).split())}")
    if switches.json:
        from deepthin.cli.document import error_document, to_text

        with contextlib.suppress(DeepthinError):  # standard output cannot be written; that has been said, or comes second
            write_out(to_text(error_document(error)))
    return error.exit_code
