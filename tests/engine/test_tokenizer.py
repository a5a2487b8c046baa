import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from deepthin.engine.errors import FormatError, UnsupportedError, UsageError
from deepthin.engine.load import load_model
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.pretokenizers import PRE_TOKENIZERS, pre_tokenizer_named
from deepthin.engine.tokenizer import BYTE_SPELLING, Tokenizer
from tests.support.gguf_files import write_vocabulary
from tests.support.llama_cpp_vocab import LlamaCppVocab
from tests.support.nasty_texts import NASTY_TEXTS, is_settled, random_texts


@pytest.fixture(scope="module")
def spec(smollm2_path: Path) -> TokenizerSpec:
    held = load_model(smollm2_path).tokenizer
    assert held is not None
    return held


@pytest.fixture(scope="module")
def smollm2(spec: TokenizerSpec) -> Tokenizer:
    return Tokenizer(spec)


@pytest.fixture(scope="module")
def smollm2_in_llama_cpp(smollm2_path: Path) -> Iterator[LlamaCppVocab]:
    vocab = LlamaCppVocab(smollm2_path)
    yield vocab
    vocab.close()


@pytest.mark.parametrize("name", NASTY_TEXTS)
@pytest.mark.parametrize("parse_special", [True, False])
def test_ids_of_smollm2_equal_llama_cpp_s(
    name: str, parse_special: bool, smollm2: Tokenizer, smollm2_in_llama_cpp: LlamaCppVocab
) -> None:
    text = NASTY_TEXTS[name]
    assert smollm2.encode(text, parse_special=parse_special) == smollm2_in_llama_cpp.encode(text, parse_special=parse_special)


def test_the_texts_tell_pre_tokenizers_apart(spec: TokenizerSpec, smollm2: Tokenizer) -> None:
    for pre in PRE_TOKENIZERS:
        other = Tokenizer(dataclasses.replace(spec, pre=pre))
        differ = [name for name, text in NASTY_TEXTS.items() if other.encode(text) != smollm2.encode(text)]
        assert bool(differ) == (pre != "smollm"), pre


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_equal_llama_cpp_s_with_every_pre_tokenizer(pre: str, spec: TokenizerSpec, tmp_path: Path) -> None:
    changed = dataclasses.replace(spec, pre=pre)
    mine, theirs = Tokenizer(changed), LlamaCppVocab(write_vocabulary(tmp_path / "vocab.gguf", changed))
    for text in [*NASTY_TEXTS.values(), *random_texts(400, seed=len(pre))]:
        for parse_special in (True, False):
            found = mine.encode(text, parse_special=parse_special)
            assert found == theirs.encode(text, parse_special=parse_special), ascii(text)
    theirs.close()


def test_every_settled_character_equals_llama_cpp_s(smollm2: Tokenizer, smollm2_in_llama_cpp: LlamaCppVocab) -> None:
    settled = [char for char in map(chr, [*range(0xD800), *range(0xE000, 0x30000)]) if is_settled(char)]
    assert len(settled) > 90_000
    for start in range(0, len(settled), 97):
        text = "".join(f"a{char}'s{char}!={char}12 {char}the" for char in settled[start : start + 97])
        assert smollm2.encode(text) == smollm2_in_llama_cpp.encode(text), ascii(settled[start])


def test_user_defined_and_unknown_tokens_and_overlaps_equal_llama_cpp_s(spec: TokenizerSpec, tmp_path: Path) -> None:
    types = list(spec.token_types)
    for text, kind in {"<repo_name>": 4, "<file_sep>": 2, "Ġthe": 4, "abc": 4}.items():
        types[spec.tokens.index(text)] = kind
    tokens = list(spec.tokens)
    tokens[3000:3004], types[3000:3004] = ["qzjqz", "zqzj", "qzj", "  "], [3, 3, 4, 4]
    held = set(tokens)
    kept = tuple(merge for merge in spec.merges if {*merge.split(" "), merge.replace(" ", "")} <= held)
    changed = dataclasses.replace(spec, tokens=tuple(tokens), token_types=tuple(types), merges=kept)
    mine, theirs = Tokenizer(changed), LlamaCppVocab(write_vocabulary(tmp_path / "vocab.gguf", changed))
    texts = [
        "xyzxyzxyz",
        "zxyzxy",
        "a  b   c",
        "the Ġthe abc<repo_name>abc<file_sep>",
        "qzjq<file_sep>  <repo_name>",
        *NASTY_TEXTS.values(),
    ]
    for text in texts:
        for parse_special in (True, False):
            found = mine.encode(text, parse_special=parse_special)
            assert found == theirs.encode(text, parse_special=parse_special), ascii(text)
    theirs.close()


@pytest.mark.parametrize("name", NASTY_TEXTS)
def test_decoding_gives_the_text_back(name: str, smollm2: Tokenizer) -> None:
    text = NASTY_TEXTS[name]
    lost = {BYTE_SPELLING[byte] for byte in range(256)} - set(smollm2.spec.tokens)
    if any(BYTE_SPELLING[byte] in lost for byte in text.encode()):
        kept = bytes(byte for byte in text.encode() if BYTE_SPELLING[byte] not in lost).decode("utf-8", "replace")
        assert smollm2.decode(smollm2.encode(text), skip_special=False) == kept
    else:
        assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


def test_control_tokens_are_left_out_unless_wanted(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
    assert smollm2.decode(ids) == "user\nHi" and smollm2.decode(ids, skip_special=False) == "<|im_start|>user\nHi<|im_end|>"


def test_a_character_cut_in_two_decodes_to_a_replacement(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("\U0001f9d1")
    assert len(ids) > 1 and smollm2.decode(ids[:1]) == "\ufffd"
    assert b"".join(map(smollm2.token_bytes, ids)) == "\U0001f9d1".encode()


def test_rows_without_a_token_decode_to_nothing_and_negative_ids_are_refused(smollm2: Tokenizer) -> None:
    assert smollm2.decode([19556, 60000]) == "Hello"
    with pytest.raises(UsageError, match="token id -1 is negative"):
        smollm2.decode([-1])


def test_bos_is_added_exactly_once(spec: TokenizerSpec, tmp_path: Path) -> None:
    changed = dataclasses.replace(spec, pre="llama-bpe", bos_id=1, add_bos=True)
    mine, theirs = Tokenizer(changed), LlamaCppVocab(write_vocabulary(tmp_path / "vocab.gguf", changed))
    assert mine.encode("Hello") == theirs.encode("Hello") == [1, 19556]
    assert mine.encode("") == theirs.encode("") == [1]
    assert mine.encode("Hello", add_special=False) == theirs.encode("Hello", add_special=False) == [19556]
    assert mine.encode("<|im_start|>Hello") == [1, 19556]
    assert theirs.encode("<|im_start|>Hello") == [1, 1, 19556]  # llama.cpp warns of the doubling and does it
    assert mine.encode("<|im_start|>", parse_special=False)[0] == 1
    theirs.close()


def test_bos_is_not_added_where_the_model_does_not_want_it(smollm2: Tokenizer) -> None:
    assert smollm2.encode("Hello") == [19556]


def test_half_a_surrogate_pair_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"character 2 is U\+DC80, half of a surrogate pair"):
        smollm2.encode("ab\udc80")


def test_byte_spelling_is_gpt2_s() -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert set(BYTE_SPELLING.values()) == set(alphabet) and len(BYTE_SPELLING) == 256
    assert BYTE_SPELLING[0x20] == "Ġ" and BYTE_SPELLING[0x0A] == "Ċ" and BYTE_SPELLING[0x41] == "A"


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"pre": "tekken"},
            UnsupportedError,
            "pre-tokenizer is 'tekken', which is not known; known are default, gpt-2, smollm",
        ),
        ({"token_types": (1, 1)}, FormatError, "every token needs a type"),
        ({"tokens": ("a", "b", "a")}, FormatError, "a text of its own"),
        ({"merges": ("a c",)}, FormatError, "merge 0, 'a c', does not join"),
        ({"merges": ("a b", "b a")}, FormatError, "merge 1, 'b a', does not join"),
        ({"merges": ("ab",)}, FormatError, "merge 0, 'ab', does not join"),
        ({"merges": ("a\nb" * 100,)}, FormatError, "merge 0, "),
    ],
)
def test_contradictory_specs_are_refused(changes: dict[str, object], error: type[Exception], match: str) -> None:
    good = TokenizerSpec("gpt-2", ("a", "b", "ab"), (1, 1, 1), ("a b",))
    assert Tokenizer(good).encode("abba") == [2, 1, 0]
    with pytest.raises(error, match=match) as caught:
        Tokenizer(dataclasses.replace(good, **changes))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_aliases_name_the_same_pre_tokenizer() -> None:
    assert pre_tokenizer_named("llama3", "x") is PRE_TOKENIZERS["llama-bpe"]
    assert pre_tokenizer_named("phi-2", "x") is PRE_TOKENIZERS["gpt-2"]
    assert pre_tokenizer_named("starcoder", "x") is PRE_TOKENIZERS["smollm"]
