"""How byte-level BPE models cut text into words before merging, as data: GGUF name, regular expressions, flags.

Expressions are applied one after the other, each to the pieces the ones before it left; matches and the gaps between them
become pieces. Knows nothing of files or of the ``tokenizers`` package.

Source: llama.cpp ``src/llama-vocab.cpp``, ``llm_tokenizer_bpe`` and ``load``, at ggml-org/llama.cpp@00ad355.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepthin.engine.errors import UnsupportedError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_AFTER_DIGITS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting.

    Attributes:
        name: the GGUF name that files of ours carry.
        aliases: other GGUF names of the same thing.
        patterns: regular expressions, first applied first.
        ignore_merges: a piece that is a token as it stands is not taken through the merges.
        add_bos: whether a file that does not say so wants a beginning-of-sequence token.
    """

    name: str
    aliases: tuple[str, ...]
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_ALL = (
    PreTokenizer("default", (), (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    PreTokenizer("gpt-2", ("phi-2", "mpt", "olmo", "jais"), (_GPT2,)),
    PreTokenizer("smollm", ("starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    PreTokenizer(
        "llama-bpe",
        ("llama3", "llama-v3", "falcon3", "pixtral"),
        (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_AFTER_DIGITS}",),
        ignore_merges=True,
        add_bos=True,
    ),
    PreTokenizer("qwen2", ("deepseek-r1-qwen", "megrez"), (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_AFTER_DIGITS}",)),
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {pre.name: pre for pre in _ALL}
_BY_ANY_NAME = {name: pre for pre in _ALL for name in (pre.name, *pre.aliases)}


def pre_tokenizer_named(name: str, source: str) -> PreTokenizer:
    """The pre-tokenizer that GGUF files call ``name``; ``source`` begins the message if there is none.

    Raises:
        UnsupportedError: the name is not known.
    """
    try:
        return _BY_ANY_NAME[name]
    except KeyError:
        raise UnsupportedError(
            f"{source}: the pre-tokenizer is {name[:40]!r}, which is not known; known are {', '.join(PRE_TOKENIZERS)}"
        ) from None
