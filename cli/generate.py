"""``deepthin generate SOURCE``: continue a prompt, printing text as it appears."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deepthin.cli.arguments import MAX_CONTEXT, add_source, argument, context, parse_threads, real, whole
from deepthin.cli.outcome import Outcome
from deepthin.cli.output import write_error, write_out
from deepthin.cli.progress import Progress
from deepthin.cli.source import QUANT_HELP, open_source, parse_scheme, require_runnable
from deepthin.engine.errors import UsageError
from deepthin.engine.kv_cache import CACHE_FORMATS

if TYPE_CHECKING:
    from deepthin.engine.model import Model
    from deepthin.engine.tokenizer import Tokenizer

EXAMPLES = """examples:
  deepthin generate model.gguf -p "The capital of France is" -n 32
  deepthin generate model.gguf -p "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 7
  echo "A prompt" | deepthin generate export/ -p - --json
  deepthin generate L=4,d=256,heads=4,kv=2,ff=512,vocab=4096,tied --ids 1,2,3 -n 8     (random weights, ids only)

The text goes to standard output, the times to standard error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    add_source(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue; - reads it from standard input")
    prompt.add_argument(
        "--ids", type=argument(_parse_ids), metavar="1,2,..", help="token ids to continue, for models without text"
    )
    parser.add_argument(
        "-n",
        "--num-tokens",
        type=whole(1, MAX_CONTEXT),
        default=64,
        metavar="N",
        help="new tokens at most (default: %(default)s)",
    )
    parser.add_argument("--temperature", type=real(0, 100), default=0.0, metavar="T", help="0 picks the likeliest (default)")
    parser.add_argument("--top-k", type=whole(0), default=0, metavar="K", help="keep the K likeliest; 0 keeps all (default)")
    parser.add_argument(
        "--top-p", type=real(1e-9, 1), default=1.0, metavar="P", help="keep the likeliest that sum to P (default: 1)"
    )
    parser.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="of the sampling, and of random weights (default: 0)"
    )
    parser.add_argument(
        "--threads",
        type=argument(parse_threads),
        metavar="N",
        help="threads for every token (default: as many as are fastest, measured once; fewer while another process is busy)",
    )
    parser.add_argument("--context", type=context(1), metavar="N", help="cached positions (default: just enough)")
    parser.add_argument(
        "--quant",
        type=argument(parse_scheme),
        metavar="Q",
        help=f"convert the weights first: {QUANT_HELP} (default: as stored, else q4_0)",
    )
    parser.add_argument(
        "--kv", choices=list(CACHE_FORMATS), default="f16", help="how keys and values are cached (default: %(default)s)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Generate from SOURCE.

    Raises:
        DeepthinError: SOURCE cannot be read or run, or prompt and options do not fit it.
    """
    source = open_source(options.source)
    require_runnable(source.shape)
    _require_in_vocabulary(options.ids or (), source.shape.vocab_size)
    progress("making random weights" if source.model is None else "reading weights")
    model = source.weights(seed=options.seed, quant=options.quant)
    tokenizer, ids = _prompt_ids(model, options)
    progress("loading kernels")
    from deepthin.engine.decoder import Decoder
    from deepthin.engine.generate import generate
    from deepthin.engine.jit import compilations
    from deepthin.engine.sample import Sampling
    from deepthin.profiles.statistics import measured

    room = options.context or len(ids) + options.num_tokens
    if room > MAX_CONTEXT:
        raise UsageError(
            f"a prompt of {len(ids)} tokens and {options.num_tokens} new ones are over {MAX_CONTEXT}, the most this engine "
            f"caches; ask for fewer with -n"
        )
    spec = model.tokenizer
    stop = () if options.ignore_eos or spec is None or spec.eos_id is None else (spec.eos_id,)
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    with contextlib.ExitStack() as stack:
        with compilations(lambda count: progress(f"compiling kernels for this machine, once: {count} done")):
            decoder = stack.enter_context(Decoder(model, threads=options.threads, context=room, kv_format=options.kv))
            decoder.prefill(ids[:1])  # compiles what is not cached yet, so that no time below holds it
        printer = None if options.json else _Printer(tokenizer, progress)
        done = generate(decoder, ids, options.num_tokens, sampling=sampling, seed=options.seed, stop=stop, on_token=printer)
        choice, simd = decoder.thread_choice, decoder.simd
    text = None if tokenizer is None else tokenizer.decode(done.token_ids)
    rate = done.decode_tok_s
    body: dict[str, Any] = {
        "source": options.source,
        "shape": model.shape.to_json(),
        "prompt_token_ids": list(ids),
        "token_ids": list(done.token_ids),
        "text": text,
        "threads": choice.threads,
        "thread_choice": choice.to_json(),
        "simd": simd,
        "kv_format": options.kv,
        "prefill_tok_s": measured([done.prefill_tok_s], "tok/s").to_json(),
        "decode_tok_s": None if rate is None else measured([rate], "tok/s").to_json(),
    }
    if printer is not None:
        printer.finish()
        speed = "" if rate is None else f", {len(done.token_ids)} generated at {rate:.1f} tok/s"
        write_error(f"{len(ids)} prompt tokens at {done.prefill_tok_s:.1f} tok/s{speed}, {choice.text}, {simd}")
    return Outcome("generate", body, "")


def _prompt_ids(model: Model, options: argparse.Namespace) -> tuple[Tokenizer | None, list[int]]:
    """The tokenizer, if the model has one, and the prompt as ids.

    Raises:
        UsageError: no prompt, an empty one, or a text for a model without a tokenizer.
    """
    tokenizer = None
    if model.tokenizer is not None:
        from deepthin.engine.tokenizer import Tokenizer

        tokenizer = Tokenizer(model.tokenizer)
    if options.ids is not None:
        return tokenizer, options.ids
    if options.prompt is None:
        raise UsageError("a prompt is needed: -p TEXT, -p - to read standard input, or --ids 1,2,3")
    if tokenizer is None:
        raise UsageError(f"{options.source} has no tokenizer, so it takes no text; give token ids with --ids 1,2,3")
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    ids = tokenizer.encode(text)
    if not ids:
        raise UsageError("the prompt is empty; a model continues at least one token")
    return tokenizer, ids


class _Printer:
    """Writes new text to standard output as soon as it is whole characters; ids where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, progress: Progress) -> None:
        self._decode: Callable[[Sequence[int]], str] = tokenizer.decode if tokenizer else lambda ids: " ".join(map(str, ids))
        self._progress = progress
        self._ids: list[int] = []
        self._shown = ""

    def __call__(self, token: int) -> None:
        if not self._ids:
            self._progress.close()  # its line must not mix with the text
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character: the next token brings the rest
            self._show(text)

    def finish(self) -> None:
        """Write what was held back, and end the line."""
        self._show(self._decode(self._ids))
        write_out("")

    def _show(self, text: str) -> None:
        if text.startswith(self._shown):
            write_out(text[len(self._shown) :], end="")
            self._shown = text


def _require_in_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    wrong = [token for token in ids if token >= vocab_size]
    if wrong:
        raise UsageError(f"token id {wrong[0]} is outside the vocabulary of {vocab_size}; use 0 to {vocab_size - 1}")


def _parse_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is no list of token ids; write 1,2,3") from None
    if min(ids) < 0:
        raise UsageError(f"{text!r} holds a negative token id")
    return ids
