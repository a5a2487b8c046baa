"""The ``deepthin`` command: finds the subcommand, imports only that one, prints its outcome, turns errors into exit codes.

0 done · 1 failed · 2 usage · 3 nothing feasible · 4 verification failed · 130 interrupted
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from deepthin import __version__
from deepthin.cli.arguments import Parser, add_common
from deepthin.cli.config import apply_config
from deepthin.cli.outcome import Outcome
from deepthin.cli.progress import Progress
from deepthin.engine.errors import DeepthinError, UsageError

COMMANDS = {  # name -> one line of help; the module is deepthin.cli.<name>
    "inspect": "what a shape costs on paper: parameters, bytes, cache, warnings, which runtimes take it",
    "generate": "continue a text or token ids with a model",
    "bench": "time this machine on a model or shape, alone or against llama.cpp and onnxruntime",
    "search": "find the shapes that trade quality for speed best within a budget, on this machine",
    "export": "write a model as a Hugging Face folder, ONNX and GGUF files with a manifest",
    "verify": "prove that the files of an export give equal logits in every runtime",
}
EXIT_CODES = """exit codes:
  0  done
  1  failed: a file, machine or runtime is not as it should be
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
"""
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with contextlib.suppress(AttributeError, ValueError, io.UnsupportedOperation):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        return _run(arguments)
    except SystemExit as stop:  # --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("deepthin: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except DeepthinError as error:
        return _fail(error, arguments)
    except (MemoryError, OSError) as error:
        reason = "out of memory" if isinstance(error, MemoryError) else str(error)
        return _fail(DeepthinError(reason), arguments, cause=error)
    except Exception as error:
        reason = f"Bug: {type(error).__name__}: {error}; please report it with what --debug prints"
        return _fail(DeepthinError(reason), arguments, cause=error)


def _run(arguments: list[str]) -> int:
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
        module = import_module(f"deepthin.cli.{name}")
        sub.description = summary[0].upper() + summary[1:] + "."
        sub.epilog = module.EXAMPLES
        module.add_arguments(sub)
        add_common(sub)
        config = _config_path(arguments)
        if config is not None:
            apply_config(Path(config), name, sub, set(COMMANDS))
    options = parser.parse_args(arguments)
    if module is None:
        parser.print_help(sys.stderr)
        raise UsageError(f"a command is needed: {', '.join(COMMANDS)}")
    with Progress(enabled=not options.quiet) as progress:
        outcome: Outcome = module.run(options, progress)
    _print(outcome, as_json=options.json)
    return outcome.exit_code


def _config_path(arguments: Sequence[str]) -> str | None:
    """The value of ``--config``, read ahead because it changes the defaults of the real parse."""
    parser = Parser(add_help=False)
    parser.add_argument("--config", nargs="?")
    found: str | None = parser.parse_known_args(arguments)[0].config
    return found


def _print(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        from deepthin.cli.document import document, to_text

        print(to_text(document(outcome.kind, outcome.body)))
    elif outcome.text:
        print(outcome.text)
    sys.stdout.flush()


def _fail(error: DeepthinError, arguments: Sequence[str], cause: BaseException | None = None) -> int:
    """Say what failed in one line on standard error, and as a document on standard output with ``--json``."""
    if "--debug" in arguments:
        traceback.print_exception(cause or error)
    print(f"deepthin: error: {' '.join(str(error).split())}", file=sys.stderr)
    if "--json" in arguments:
        from deepthin.cli.document import error_document, to_text

        print(to_text(error_document(error)))
    return error.exit_code
