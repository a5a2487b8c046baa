"""Text to token ids and back, for byte-level BPE, with the ids llama.cpp gives.

The words and merges are done by the ``tokenizers`` package, imported when the first Tokenizer is made. Special tokens
are cut out here, longest first over the whole text, as llama.cpp does (``tokenizers`` takes them leftmost first).
Known difference: each program has its own Unicode tables, so text in characters newer than Unicode 15 may be cut differently.
Source: llama.cpp ``src/llama-vocab.cpp``, ``tokenizer_st_partition`` and ``llm_tokenizer_bpe_session``, at
ggml-org/llama.cpp@00ad355.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from deepthin.engine.errors import FormatError, UsageError
from deepthin.engine.hf_tokenizer import CONTROL, UNKNOWN, USER_DEFINED, tokenizer_document
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.pretokenizers import pre_tokenizer_named

_PLAIN_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_SPECIAL = (UNKNOWN, CONTROL, USER_DEFINED)


def _byte_spelling() -> dict[int, str]:
    """GPT-2's printable character for each byte: itself where it is printable, else 256, 257, ... in order.

    Source: ``bytes_to_unicode`` in openai/gpt-2 ``src/encoder.py``.
    """
    others = [byte for byte in range(256) if byte not in _PLAIN_BYTES]
    return {byte: chr(byte) for byte in _PLAIN_BYTES} | {byte: chr(256 + place) for place, byte in enumerate(others)}


BYTE_SPELLING = _byte_spelling()
_BYTE_OF = {spelling: byte for byte, spelling in BYTE_SPELLING.items()}


class Tokenizer:
    """A working tokenizer for ``spec``.

    Raises:
        UnsupportedError: the pre-tokenizer is unknown.
        FormatError: vocabulary and merges contradict each other.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        import tokenizers

        pre = pre_tokenizer_named(spec.pre, "tokenizer")
        self.spec = spec
        merges = self._checked_merges()
        document = tokenizer_document(spec)
        vocab: dict[str, int] = document["model"]["vocab"]
        # A byte that is no token must keep its neighbours apart and then vanish; `tokenizers` would let them merge.
        for spelling in BYTE_SPELLING.values():
            vocab.setdefault(spelling, len(vocab))
        document |= {"added_tokens": [], "post_processor": None, "model": document["model"] | {"vocab": {}, "merges": []}}
        try:
            self._words: Any = tokenizers.Tokenizer.from_str(json.dumps(document))
            self._words.model = tokenizers.models.BPE(vocab, merges, ignore_merges=pre.ignore_merges)  # as JSON it takes longer
        except Exception as error:  # the package raises nothing narrower
            raise FormatError(f"tokenizer: the vocabulary and its merges cannot be used ({str(error)[:200]})") from None
        special = [token for token, kind in enumerate(spec.token_types) if kind in _SPECIAL]
        self._special = sorted(special, key=lambda token: -len(spec.tokens[token].encode()))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any text that UTF-8 can carry.
            add_special: put the beginning-of-sequence token in front if the model wants one and the text has none.
            parse_special: read special tokens written in the text; otherwise only user-defined ones are.

        Raises:
            UsageError: the text holds half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"text: character {error.start} is U+{ord(text[error.start]):04X}, half of a surrogate pair, which is no text; "
                f"is the input UTF-8?"
            ) from None
        ids: list[int] = []
        for fragment in self._fragments(text, parse_special):
            ids += [fragment] if isinstance(fragment, int) else self._encode_words(fragment)
        bos = self.spec.bos_id
        if add_special and self.spec.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: tokens; rows of the embedding that no token has give nothing.
            skip_special: leave control tokens out.

        Raises:
            UsageError: a negative id.
        """
        return b"".join(self.token_bytes(token, skip_special=skip_special) for token in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """Bytes of one token, which may be part of a character.

        Raises:
            UsageError: a negative id.
        """
        if token < 0:
            raise UsageError(f"token id {token} is negative; ids run from 0 to {len(self.spec.tokens) - 1}")
        if token >= len(self.spec.tokens):
            return b""
        text, kind = self.spec.tokens[token], self.spec.token_types[token]
        if kind in (CONTROL, UNKNOWN):
            return b"" if skip_special else text.encode()
        if kind == USER_DEFINED:
            return text.encode()
        return b"".join(bytes([_BYTE_OF[char]]) if char in _BYTE_OF else char.encode() for char in text)

    def to_tokenizer_json(self) -> str:
        """The same tokenizer as the text of a Hugging Face ``tokenizer.json``."""
        return json.dumps(tokenizer_document(self.spec), indent=2, ensure_ascii=False) + "\n"

    def _checked_merges(self) -> list[tuple[str, str]]:
        """Both halves of each merge, once it is known that every token is fit for use."""
        spec = self.spec
        vocab = set(spec.tokens)
        if len(spec.tokens) != len(spec.token_types) or len(vocab) != len(spec.tokens):
            raise FormatError("tokenizer: every token needs a type and a text of its own")
        merges = [(left, right) for left, _, right in [merge.partition(" ") for merge in spec.merges]]
        for number, (left, right) in enumerate(merges):
            if left not in vocab or right not in vocab or left + right not in vocab:
                wrong = ascii(spec.merges[number])[:60]
                raise FormatError(f"tokenizer: merge {number}, {wrong}, does not join two tokens into a third")
        return merges

    def _fragments(self, text: str, parse_special: bool) -> list[str | int]:
        """``text`` cut at special tokens; empty pieces are left out."""
        fragments: list[str | int] = [text] if text else []
        for token in self._special:
            special = self.spec.tokens[token]
            if special not in text or not (parse_special or self.spec.token_types[token] == USER_DEFINED):
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                for number, piece in enumerate(fragment.split(special)):
                    cut += ([token] if number else []) + ([piece] if piece else [])
            fragments = cut
        return fragments

    def _encode_words(self, text: str) -> list[int]:
        ids: list[int] = self._words.encode(text, add_special_tokens=False).ids
        return [token for token in ids if token < len(self.spec.tokens)]
