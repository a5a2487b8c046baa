"""Between ``tokenizer.json`` of byte-level BPE tokenizers and :class:`TokenizerSpec`, both ways.

A file's own regular expressions are compared with the known ones and never run. Whatever is not one of the known forms
gives no tokenizer and a sentence saying why; the model can still be used with token ids.
Source of the layout: huggingface/tokenizers ``tokenizers/src/{models/bpe,pre_tokenizers,processors}`` at v0.21.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepthin.engine.errors import FormatError
from deepthin.engine.model import TokenizerSpec
from deepthin.engine.pretokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_IDS = ("bos", "eos", "unk", "pad")
_MAX_ADDED = 1 << 16
_MODEL_OFF = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
_UNUSED_TEXT = re.compile(r"\[PAD(\d+)\]")  # what llama.cpp's converter calls ids that no token has
# The same words as our patterns for these, as their authors wrote them.
_AUTHORS_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OUR_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"


def tokenizer_document(spec: TokenizerSpec) -> dict[str, Any]:
    """The content of ``tokenizer.json`` for ``spec``.

    Control and user-defined tokens become added tokens (special or not); everything else is only in the vocabulary.
    """
    pre = PRE_TOKENIZERS[spec.pre]
    added = [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for token, (text, kind) in enumerate(zip(spec.tokens, spec.token_types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer_document(pre),
        "post_processor": _bos_template(spec) if spec.add_bos else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": {text: token for token, text in enumerate(spec.tokens)},
            "merges": list(spec.merges),
        },
    }


def spec_from_document(
    document: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int, where: str
) -> TokenizerSpec | str:
    """The tokenizer in ``document``, or a sentence saying why there is none.

    Args:
        document: content of ``tokenizer.json``.
        settings: content of ``tokenizer_config.json``; names the special tokens. May be empty.
        config: content of ``config.json``; gives their ids where ``settings`` does not name them.
        vocab_size: rows of the embedding.
        where: begins every message.

    Raises:
        FormatError: the document contradicts itself or the model.
    """
    model = document.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return f"it is no BPE tokenizer but {_shown(model.get('type') if isinstance(model, dict) else model)}"
    pre = _known_pre_tokenizer(document.get("pre_tokenizer"))
    if pre is None:
        return f"its pre-tokenizer is none of {', '.join(PRE_TOKENIZERS)}"
    if document.get("normalizer") not in (None, {"type": "NFC"} if pre.name == "qwen2" else None):
        return "it normalises text"
    odd = [
        key
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
        if model.get(key)
    ]
    if odd or (model.get("ignore_merges") and not pre.ignore_merges):
        return f"its model uses {odd[0] if odd else 'ignore_merges'}"
    tokens, types = _tokens(document, model, vocab_size, where)
    if isinstance(tokens, str):
        return tokens
    adds_bos = _adds_bos(document.get("post_processor"))
    if adds_bos is None:
        return "its post-processor adds tokens behind the text"
    index = {text: token for token, text in enumerate(tokens)}
    ids = {name: _special_id(name, index, settings, config, where) for name in _IDS}
    if ids["unk"] is not None and types[ids["unk"]] == CONTROL and tokens[ids["unk"]] == "<unk>":
        types[ids["unk"]] = UNKNOWN
    if (adds_bos or settings.get("add_bos_token") is True) and ids["bos"] is None:
        raise FormatError(f"{where}: a beginning-of-sequence token is to be added, but none is named")
    return TokenizerSpec(
        pre=pre.name,
        tokens=tuple(tokens),
        token_types=tuple(types),
        merges=_merges(model, index, where),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unk_id=ids["unk"],
        pad_id=ids["pad"],
        add_bos=adds_bos or settings.get("add_bos_token") is True,
    )


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _pre_tokenizer_document(pre: PreTokenizer) -> dict[str, Any]:
    """The form that a pre-tokenizer's authors publish where there is one; ByteLevel(use_regex) is GPT-2's expression."""
    if pre.name == "gpt-2":
        return _byte_level(True)
    if pre.name == "smollm":
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)]}
    return {"type": "Sequence", "pretokenizers": [*map(_split, pre.patterns), _byte_level(False)]}


def _known_pre_tokenizer(document: Any) -> PreTokenizer | None:
    steps = _steps(document, "pretokenizers")
    found = [_plain(step) for step in steps]
    for pre in PRE_TOKENIZERS.values():
        if found == [_plain(step) for step in _steps(_pre_tokenizer_document(pre), "pretokenizers")]:
            return pre
    return None


def _steps(document: Any, key: str) -> list[Any]:
    if isinstance(document, dict) and document.get("type") == "Sequence" and isinstance(document.get(key), list):
        return list(document[key])
    return [] if document is None else [document]


def _plain(step: Any) -> Any:
    """A step without what changes no token: offsets, defaults left out, and the spelling of contractions."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "ByteLevel":
        return ("ByteLevel", bool(step.get("add_prefix_space", True)), bool(step.get("use_regex", True)))
    if step.get("type") == "Split" and isinstance(step.get("pattern"), dict):
        pattern = str(step["pattern"].get("Regex")).replace(_AUTHORS_CONTRACTIONS, _OUR_CONTRACTIONS)
        return ("Split", pattern, str(step.get("behavior")), bool(step.get("invert")))
    return step


def _bos_template(spec: TokenizerSpec) -> dict[str, Any]:
    text = spec.tokens[spec.bos_id or 0]
    bos = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, {"SpecialToken": {"id": text, "type_id": 1}}, second],
        "special_tokens": {text: {"id": text, "ids": [spec.bos_id], "tokens": [text]}},
    }


def _adds_bos(document: Any) -> bool | None:
    """Whether the post-processor puts one token in front; None when it does something else."""
    adds = False
    for step in _steps(document, "processors"):
        kind = step.get("type") if isinstance(step, dict) else None
        if kind == "ByteLevel":
            continue  # offsets only
        if kind != "TemplateProcessing" or not isinstance(step.get("single"), list):
            return None
        form = ["Sequence" if isinstance(item, dict) and "Sequence" in item else "SpecialToken" for item in step["single"]]
        if form not in (["Sequence"], ["SpecialToken", "Sequence"]):
            return None
        adds = adds or form[0] == "SpecialToken"
    return adds


def _tokens(
    document: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int, where: str
) -> tuple[list[str] | str, list[int]]:
    vocab, added = model.get("vocab"), document.get("added_tokens", [])
    if not isinstance(vocab, dict) or not isinstance(added, list) or len(added) > _MAX_ADDED:
        raise FormatError(f"{where}: an object 'vocab' and a list 'added_tokens' of at most {_MAX_ADDED} are needed")
    by_id: dict[int, str] = {}
    kinds: dict[int, int] = {}

    def place(token: Any, text: Any) -> int:
        if type(token) is not int or not 0 <= token < vocab_size or not isinstance(text, str) or not text:
            raise FormatError(f"{where}: token {_shown(text)} has id {_shown(token)}; ids must be 0 to {vocab_size - 1}")
        if by_id.setdefault(token, text) != text:
            raise FormatError(f"{where}: id {token} is given to {_shown(text)} and to {_shown(by_id[token])}")
        return token

    for text, token in vocab.items():
        place(token, text)
    for entry in added:
        if not isinstance(entry, dict):
            raise FormatError(f"{where}: 'added_tokens' must hold objects")
        if entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"):
            return f"its token {_shown(entry.get('content'))} swallows the spaces around it", []
        kinds[place(entry.get("id"), entry.get("content"))] = CONTROL if entry.get("special") else USER_DEFINED
    if len(set(by_id.values())) < len(by_id):
        raise FormatError(f"{where}: two ids have the same token text")
    if not by_id:
        raise FormatError(f"{where}: the vocabulary is empty")
    texts = [by_id.get(token, f"[PAD{token}]") for token in range(max(by_id) + 1)]
    types = []
    for token, text in enumerate(texts):
        unused = _UNUSED_TEXT.fullmatch(text)
        types.append(kinds.get(token, UNUSED if unused and unused[1] == str(token) else NORMAL))
    return texts, types


def _merges(model: Mapping[str, Any], index: Mapping[str, int], where: str) -> tuple[str, ...]:
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise FormatError(f"{where}: a list 'merges' is needed")
    out = []
    for number, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        known = isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) and part in index for part in pair)
        if not known or pair[0] + pair[1] not in index:
            raise FormatError(f"{where}: merge {number}, {_shown(merge)}, does not join two tokens into a third")
        out.append(f"{pair[0]} {pair[1]}")
    return tuple(out)


def _special_id(
    name: str, index: Mapping[str, int], settings: Mapping[str, Any], config: Mapping[str, Any], where: str
) -> int | None:
    named = settings.get(f"{name}_token")
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str) and text in index:
        return index[text]
    token = config.get(f"{name}_token_id")
    if isinstance(token, list):  # several tokens may end a text; the first is the main one
        token = token[0] if token else None
    if token is None:
        return None
    if type(token) is not int or not 0 <= token < len(index):
        raise FormatError(f"{where}: '{name}_token_id' is {_shown(token)}, but the tokenizer has ids 0 to {len(index) - 1}")
    return token


def _shown(value: Any) -> str:
    return ascii(value)[:60]
