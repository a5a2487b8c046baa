"""How near the engine's logits are to llama.cpp's on the same GGUF file, over real text, for every format.

    python benchmarks/agreement.py                             all formats of SmolLM2-135M, 512 tokens; store, print the table
    python benchmarks/agreement.py --formats q8_0,Q4_K_M --no-truth --no-save      a quick look

The text is ``tests/support/prose.txt``. Both sides cache keys and values as f32 and take all tokens in at once. Per format the
table has KL(llama.cpp || engine) in nats, the share of positions with the same most likely token, that share with near-ties
counted as equal, and both perplexities. What these numbers can be at best, the columns beside them say: how far llama.cpp is
from itself when it takes the same tokens one by one, and how far either side is from float arithmetic on the same weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from runs import RESULTS, ROOT, commit, stored_at, write_lines
from speed_models import smollm2_path

from deepthin.engine.arrays import F32, F64
from deepthin.engine.errors import DeepthinError, UsageError

TEXT = ROOT / "tests" / "support" / "prose.txt"
SCHEMA = "deepthin/agreement-benchmark/1"
ENDING = "-agreement"  # of the files of results
OWN = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")  # written by our exporter
PEERS = ("Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K")  # by llama.cpp's own quantiser, which mixes formats where rows are short
FORMATS = (*OWN, *PEERS)
NEAR_TIE = 0.5  # nats that a token may be less likely than the first and still count as equal to it
_ROWS = 32  # positions compared at once, so that their f64 logits stay in the cache


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        lines = measure(options, sys.argv[1:] if argv is None else list(argv))
        if options.save:
            print(f"stored in {write_lines(stored_at(lines[0], RESULTS, ENDING), lines).relative_to(ROOT)}", file=sys.stderr)
    except DeepthinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(render(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF whose weights are stored in each format (default: SmolLM2)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of the text (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of both sides (default: %(default)s)")
    parser.add_argument(
        "--no-truth", dest="truth", action="store_false", help="do not compute the weights' logits in f32 NumPy"
    )
    parser.add_argument("--no-save", dest="save", action="store_false", help="do not store the results")
    return parser


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """One record per format.

    Raises:
        UsageError: the model has no tokenizer, the text is too short, or a format is unknown.
        PeerError: llama.cpp is not installed or refuses a file.
    """
    from deepthin.engine.child import Child
    from deepthin.engine.load import load_model
    from deepthin.engine.reference import Reference
    from deepthin.profiles.machine import machine_record

    path = options.model or smollm2_path()
    source = load_model(path)
    ids = text_ids(source, options.tokens)
    head = {
        "schema": SCHEMA,
        "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python benchmarks/agreement.py", *(Path(part).name for part in arguments)]),
        **commit(),
        "machine": machine_record(),
        "model": path.stem,
        "shape": source.shape.text,
        "tokens": len(ids),
        "near_tie": NEAR_TIE,
    }
    lines = []
    with tempfile.TemporaryDirectory(prefix="deepthin-agreement-") as folder:
        files = Files(source, Path(folder))
        with Child("deepthin.export.peer_llama_cpp", peer="llama.cpp", deadline_s=600) as llama_cpp:
            for name in options.formats.split(","):
                print(f"{name}: comparing", file=sys.stderr, flush=True)
                file = files.path(name)
                model = load_model(file)
                ours, theirs = both_logits(model, file, llama_cpp, ids, options.threads)
                line = {**head, "format": name, "formats": stored_as(model), "engine": compare(theirs, ours, ids)}
                one_by_one = llama_cpp.call("logits", ids=ids, schedule=[1] * len(ids))["logits"]
                line["llama_cpp_itself"] = compare(theirs, one_by_one, ids)
                if options.truth:
                    truth = Reference(model.shape, model.dequantized(), np.float32).logits(ids)
                    line["engine_to_truth"] = compare(truth, ours, ids)
                    line["llama_cpp_to_truth"] = compare(truth, theirs, ids)
                lines.append(line)
                if name != "f32":  # from which others are made
                    file.unlink()
    return lines


def text_ids(model: Any, count: int) -> list[int]:
    """The first ``count`` tokens of the text.

    Raises:
        UsageError: the model has no tokenizer, or the text is too short.
    """
    from deepthin.engine.tokenizer import Tokenizer

    if model.tokenizer is None:
        raise UsageError(f"{model.source}: has no tokenizer, so no text can be given to it; take another --model")
    ids = Tokenizer(model.tokenizer).encode(TEXT.read_text(encoding="utf-8"))
    if not 2 <= count <= len(ids):
        raise UsageError(f"--tokens {count}: the text has {len(ids)} tokens; ask for 2 to so many")
    return ids[:count]


class Files:
    """Files of one model's weights in every format, made when asked for.

    Args:
        source: the weights.
        folder: where files go.
    """

    def __init__(self, source: Any, folder: Path) -> None:
        self._source, self._folder = source, folder

    def path(self, name: str) -> Path:
        """The file of format ``name``, one of :data:`FORMATS`.

        Raises:
            UsageError: no such format.
        """
        from deepthin.export.gguf_writer import write_gguf

        if name not in FORMATS:
            raise UsageError(f"format {name!r} is unknown; take some of {', '.join(FORMATS)}")
        path = self._folder / f"{name}.gguf"
        if not path.exists():
            if name in OWN:
                write_gguf(self._source.quantized(name), path)
            else:
                from llama_cpp_quantize import llama_cpp_quantize

                llama_cpp_quantize(self.path("f32"), path, name)
        return path


def both_logits(model: Any, file: Path, llama_cpp: Any, ids: Sequence[int], threads: int) -> tuple[F32, F32]:
    """Logits f32 [S, V] of the engine and of llama.cpp behind every token."""
    from deepthin.engine.decoder import Decoder

    with Decoder(model, threads=threads, context=len(ids), kv_format="f32") as decoder:
        ours = decoder.logits(ids)
    llama_cpp.call("load", path=str(file), threads=threads, context=len(ids))
    return ours, llama_cpp.call("logits", ids=list(ids))["logits"]


def stored_as(model: Any) -> dict[str, int]:
    """How many matrices the file holds in each format."""
    return dict(Counter(tensor.format.name for tensor in model.tensors.values() if len(tensor.dims) == 2))


def compare(base: F32, other: F32, ids: Sequence[int]) -> dict[str, float]:
    """What ``other`` [S, V] is to ``base`` [S, V], logits behind each of ``ids`` [S].

    Returns:
        KL(base || other) over positions in nats (``kl_mean``, ``kl_median``, ``kl_max``), ``top1`` (share of positions with the
        same largest logit), ``near_top1`` (or with one that base finds at most NEAR_TIE nats less likely), ``worst_gap`` (the
        largest such difference), and the perplexities ``base_ppl`` and ``other_ppl`` of the text.
    """
    kl, gaps, surprise = [], [], []
    for start in range(0, len(ids), _ROWS):
        p, q = (_log_softmax(rows[start : start + _ROWS]) for rows in (base, other))
        at = np.arange(len(p))
        kl.append((np.exp(p) * (p - q)).sum(axis=1))
        gaps.append(p.max(axis=1) - p[at, q.argmax(axis=1)])
        following = np.asarray(ids[start + 1 : start + 1 + len(p)])
        surprise.append(np.stack([-row[at[: len(following)], following] for row in (p, q)]))
    divergence, gap = np.maximum(np.concatenate(kl), 0), np.concatenate(gaps)
    base_ppl, other_ppl = np.exp(np.concatenate(surprise, axis=1).mean(axis=1))
    return {
        "kl_mean": float(divergence.mean()),
        "kl_median": float(np.median(divergence)),
        "kl_max": float(divergence.max()),
        "top1": float((gap == 0).mean()),
        "near_top1": float((gap <= NEAR_TIE).mean()),
        "worst_gap": float(gap.max()),
        "base_ppl": float(base_ppl),
        "other_ppl": float(other_ppl),
    }


def _log_softmax(rows: F32) -> F64:
    shifted = rows - rows.max(axis=1, keepdims=True).astype(np.float64)
    result: F64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


HEADERS = (
    "file",
    "mean KL",
    "median",
    "max",
    "same top token",
    "or near-tie",
    "perplexity deepthin",
    "llama.cpp",
    "llama.cpp to itself, mean KL",
    "same top token",
    "to float: deepthin, mean KL",
    "llama.cpp",
)


def render(lines: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown table, one row per file, and a line saying what was measured."""
    table = ["| " + " | ".join(HEADERS) + " |", "|---" + "|--:" * (len(HEADERS) - 1) + "|"]
    for line in lines:
        ours, itself = line["engine"], line["llama_cpp_itself"]
        held = ", ".join(f"{count} {name}" for name, count in line["formats"].items())
        cells = [f"{line['format']} ({held})"]
        cells += [f"{ours[key]:.1e}" for key in ("kl_mean", "kl_median", "kl_max")]
        cells += [f"{ours[key]:.1%}" for key in ("top1", "near_top1")]
        cells += [f"{ours[key]:.3f}" for key in ("other_ppl", "base_ppl")]
        cells += [f"{itself['kl_mean']:.1e}", f"{itself['top1']:.1%}"]
        cells += [f"{line[key]['kl_mean']:.1e}" if key in line else "" for key in ("engine_to_truth", "llama_cpp_to_truth")]
        table.append("| " + " | ".join(cells) + " |")
    first = lines[0]
    versions = first["machine"]["versions"]
    return "\n".join(
        [
            *table,
            "",
            f"{first['model']} over {first['tokens']} tokens of English prose, {first['created_utc'][:10]}, "
            f"{first['machine']['simd']}, commit {first['commit']}{' with local changes' if first['dirty'] else ''}, "
            f"llama-cpp-python {versions.get('llama-cpp-python', 'unknown')}; near-tie: {first['near_tie']} nats.",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
