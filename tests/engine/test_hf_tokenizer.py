import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import DeepthinError, FormatError
from deepthin.engine.hf_tokenizer import spec_from_document, tokenizer_document
from deepthin.engine.load import load_model
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.pretokenizers import PRE_TOKENIZERS
from deepthin.engine.tokenizer import Tokenizer
from tests.support.nasty_texts import NASTY_TEXTS
from tests.support.refusal import assert_one_line

SMALL = TokenizerSpec(
    "smollm", ("<unk>", "<s>", "a", "b", "ab", " x ", "[PAD6]"), (2, 3, 1, 1, 1, 4, 5), ("a b",), 1, 1, 0, None
)
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "<s>"}, "unk_token": "<unk>"}


def read(
    document: dict[str, Any], settings: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> TokenizerSpec | str:
    return spec_from_document(document, SETTINGS if settings is None else settings, config or {}, 10, "tokenizer.json")


def changed(path: str, value: Any, spec: TokenizerSpec = SMALL) -> dict[str, Any]:
    document = tokenizer_document(spec)
    *parents, last = path.split(".")
    held: Any = document
    for parent in parents:
        held = held[parent]
    held[last] = value
    return document


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.parametrize("add_bos", [False, True])
def test_documents_of_ours_read_back_equal(pre: str, add_bos: bool) -> None:
    spec = dataclasses.replace(SMALL, pre=pre, add_bos=add_bos)
    assert read(json.loads(json.dumps(tokenizer_document(spec)))) == spec


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_the_tokenizers_package_gives_the_same_ids(pre: str, smollm2_path: Path) -> None:
    held = load_model(smollm2_path).tokenizer
    assert held is not None
    spec = dataclasses.replace(held, pre=pre)
    mine = Tokenizer(spec)
    theirs = tokenizers.Tokenizer.from_str(mine.to_tokenizer_json())
    for name, text in NASTY_TEXTS.items():
        if name in ("byte_without_token", "special_nested"):
            continue  # `tokenizers` merges across a byte it has no token for, and takes special tokens leftmost first
        assert theirs.encode(text).ids == mine.encode(text), name
        assert theirs.decode(mine.encode(text)) == mine.decode(mine.encode(text)), name


def test_the_tokenizers_package_adds_the_same_bos(smollm2_path: Path) -> None:
    held = load_model(smollm2_path).tokenizer
    assert held is not None
    mine = Tokenizer(dataclasses.replace(held, add_bos=True))
    theirs = tokenizers.Tokenizer.from_str(mine.to_tokenizer_json())
    assert theirs.encode("Hello").ids == mine.encode("Hello") == [1, 19556]
    assert theirs.encode("Hello", add_special_tokens=False).ids == [19556]


def test_ids_come_from_the_config_where_the_settings_name_none() -> None:
    spec = read(tokenizer_document(SMALL), {}, {"bos_token_id": 3, "eos_token_id": [2, 4], "pad_token_id": None})
    assert isinstance(spec, TokenizerSpec)
    assert (spec.bos_id, spec.eos_id, spec.pad_id, spec.unk_id) == (3, 2, None, None)


def test_forms_that_authors_publish_are_known() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    llama3 = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    found = read(changed("pre_tokenizer", llama3))
    assert isinstance(found, TokenizerSpec) and found.pre == "llama-bpe"
    qwen2 = json.loads(json.dumps(llama3).replace("{1,3}", ""))
    found = read({**changed("pre_tokenizer", qwen2), "normalizer": {"type": "NFC"}})
    assert isinstance(found, TokenizerSpec) and found.pre == "qwen2"
    found = read(changed("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False}))
    assert isinstance(found, TokenizerSpec) and found.pre == "gpt-2"


def test_merges_may_be_pairs() -> None:
    assert read(changed("model.merges", [["a", "b"]])) == SMALL


@pytest.mark.parametrize(
    ("path", "value", "note"),
    [
        ("model", None, "no BPE tokenizer but None"),
        ("model.type", "Unigram", "no BPE tokenizer but 'Unigram'"),
        ("model.type", "WordPiece", "no BPE tokenizer but 'WordPiece'"),
        ("pre_tokenizer", None, "pre-tokenizer is none of default, gpt-2, smollm"),
        ("pre_tokenizer", {"type": "Metaspace"}, "pre-tokenizer is none of"),
        ("pre_tokenizer", {"type": "ByteLevel"}, "pre-tokenizer is none of"),  # add_prefix_space is true by default
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [7]}, "pre-tokenizer is none of"),
        ("normalizer", {"type": "NFC"}, "it normalises text"),
        ("normalizer", {"type": "Lowercase"}, "it normalises text"),
        ("model.byte_fallback", True, "its model uses byte_fallback"),
        ("model.ignore_merges", True, "its model uses ignore_merges"),
        ("model.end_of_word_suffix", "</w>", "its model uses end_of_word_suffix"),
        ("model.dropout", 0.1, "its model uses dropout"),
        ("post_processor", {"type": "BertProcessing"}, "post-processor adds tokens"),
        (
            "post_processor",
            {"type": "TemplateProcessing", "single": [{"Sequence": {}}, {"SpecialToken": {}}]},
            "post-processor adds",
        ),
        ("added_tokens", [{"id": 2, "content": "a", "special": True, "lstrip": True}], "token 'a' swallows the spaces"),
    ],
)
def test_other_kinds_give_no_tokenizer_and_say_why(path: str, value: Any, note: str) -> None:
    found = read(changed(path, value))
    assert isinstance(found, str) and note in found
    assert_one_line(found)


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("model.vocab", [], "an object 'vocab' and a list 'added_tokens'"),
        ("model.vocab", {}, "'added_tokens'|does not join|merge 0"),
        ("model.vocab", {"a": 10}, "token 'a' has id 10; ids must be 0 to 9"),
        ("model.vocab", {"a": -1}, "token 'a' has id -1"),
        ("model.vocab", {"a": 1 << 60}, "token 'a' has id 1152921504606846976"),
        ("model.vocab", {"a": True}, "token 'a' has id True"),
        ("model.vocab", {"a": "1"}, "token 'a' has id '1'"),
        ("model.vocab", {"": 1}, "token '' has id 1"),
        ("model.vocab", {"a": 2, "b": 2}, "id 2 is given to 'b' and to 'a'"),
        ("model.merges", None, "a list 'merges' is needed"),
        ("model.merges", ["a c"], "merge 0, 'a c', does not join two tokens into a third"),
        ("model.merges", ["a b", "ab a"], "merge 1, 'ab a', does not join"),
        ("model.merges", [["a"]], r"merge 0, \['a'\], does not join"),
        ("model.merges", [3], "merge 0, 3, does not join"),
        ("added_tokens", {}, "a list 'added_tokens'"),
        ("added_tokens", [3], "'added_tokens' must hold objects"),
        ("added_tokens", [{"id": 2, "content": "other"}], "id 2 is given to 'other' and to 'a'"),
        ("added_tokens", [{"id": 9, "content": "a"}], "two ids have the same token text"),
        ("added_tokens", [{"id": 99, "content": "z"}], "token 'z' has id 99"),
        ("added_tokens", [{}] * 70000, "at most 65536"),
    ],
)
def test_contradictions_are_refused(path: str, value: Any, match: str) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        read(changed(path, value))
    assert_one_line(str(caught.value))


def test_a_missing_bos_and_a_bad_id_are_refused() -> None:
    with pytest.raises(FormatError, match="beginning-of-sequence token is to be added, but none is named"):
        read(tokenizer_document(SMALL), {"add_bos_token": True})
    with pytest.raises(FormatError, match="'eos_token_id' is 7, but the tokenizer has ids 0 to 6"):
        read(tokenizer_document(SMALL), {}, {"eos_token_id": 7})


PATHS = ["model", "model.vocab", "model.merges", "model.type", "added_tokens", "pre_tokenizer", "normalizer", "post_processor"]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 12) | st.text(st.sampled_from("ab \n"), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "a", "id", "content", "single"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(path=st.sampled_from(PATHS), value=JUNK, config=st.dictionaries(st.sampled_from(["bos_token_id", "eos_token_id"]), JUNK))
def test_any_document_gives_a_tokenizer_a_note_or_one_clear_line(path: str, value: Any, config: dict[str, Any]) -> None:
    try:
        found = read(changed(path, value), {}, config)
        if isinstance(found, TokenizerSpec):
            Tokenizer(found).encode("ab a\n")
    except DeepthinError as error:
        assert_one_line(str(error))
