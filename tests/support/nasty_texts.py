"""Strings on which tokenizers disagree."""
# ruff: noqa: RUF001 (look-alike characters are the point)

from __future__ import annotations

import random
import unicodedata

NASTY_TEXTS: dict[str, str] = {
    "empty": "",
    "space": " ",
    "spaces": "     ",
    "leading": "  two leading",
    "trailing": "two trailing  ",
    "both": " \n both \t ",
    "inner_runs": "a  b   c    d",
    "tabs": "\tone\t\ttwo\t\t\tthree \t four\t ",
    "newlines": "\n\n\none\n\ntwo\n three \n\n",
    "carriage": "a\r\nb\r\rc\n\r\nd \r\n",
    "space_newline": "end. \n \n  next",
    "vertical": "a\x0bb\x0cc\x1cd\x1de\x85f",
    "contractions": "I'm you're he's we've they'll she'd don't",
    "contractions_upper": "I'M YOU'RE HE'S WE'VE THEY'LL SHE'D DON'T It'S 'Tis 'sup",
    "contractions_odd": "rock'n'roll ''s '' 's's ’s 'ſ o'clock l'homme d'",
    "digits": "1 12 123 1234 12345 123456 1,234.56 0x1F 3rd 2nd",
    "digits_glued": "a1b22c333d4444 v1.2.3 2024-11-29T15:45",
    "digits_other": "٣٤٥ १२३ ３４５ ½ ² Ⅷ ①② 𝟘𝟙",
    "punctuation": "!?.,;: ...!!! (a)[b]{c} <d> \"e\" 'f' a_b-c+d=e/f\\g|h~i^j`k@l#m$n%o&p*q",
    "punctuation_runs": "!!!??? ---- ==== **** ,,,, .... $$$ +++ <=> ~~~ ^^^ ||| ```",
    "punctuation_other": "。、！？「」（）…—–‘’“”«»¿¡·§¶†‡‰€£¥©®™",
    "code": "def f(x):\n    if x > 0:\n\t\treturn {'a': [1, 2]}  # done\n",
    "url": "https://example.org/a?b=c&d=%20e#f user@host.tld",
    "cjk": "我喜欢吃苹果。東京は日本の首都です。한국어 조선말 ㄱㄴㄷ",
    "cjk_mixed": "中文English混合123文字，test。",
    "cjk_rare": "𠀀𠮷𪚥 㐀 豈 々〆ヶ",
    "emoji": "😀 😃😄 👍🏽 ❤️ ☃ ♻️",
    "emoji_zwj": "👩‍👩‍👧‍👦 🏳️‍🌈 👨🏿‍🚀 🧑‍💻x",
    "flags": "🇩🇪🇫🇷 🇺🇳1",
    "rtl": "שלום עולם مرحبا بالعالم\u200f (abc) 123",
    "rtl_marks": "اَلْعَرَبِيَّةُ שָׁלוֹם \u202eabc\u202c",
    "combining": "e\u0301 n\u0303 a\u0300\u0301\u0302\u0303 Z\u0351\u036b\u0343 \u0301alone",
    "composed": "é ñ ü ß ẞ ﬁ ǅ İ ı ſ Å Ω Ω K",
    "indic": "नमस्ते दुनिया বাংলা தமிழ் ไทยภาษา ກຂ မြန်မာ ខ្មែរ",
    "scripts": "Ελληνικά Русский Հայերեն ქართული አማርኛ ᏣᎳᎩ",
    "zero_width": "a\u200bb\u200cc\u200dd\u2060e\ufefff\u00adg",
    "wide_spaces": "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u202fg\u180eh",
    "nul": "a\0b \0\0 \0",
    "controls": "\x01\x02\x03\x04\x05\x06\x07\x08\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x1b\x7f\x80\x9f",
    "byte_without_token": "!\x04= a\x06b <\x13> \x14\x16",  # SmolLM2 has no token for these bytes
    "replacement": "\ufffd \ufffd\ufffda",
    "noncharacters": "\ufffe\uffff\ufdd0\U0001fffe\U0010ffff",
    "private": "\ue000\uf8ff\U000f0000\U00100000",
    "unassigned": "\u0378\u0380\U000e0080\U0003fffd",  # in every version so far
    "tags": "\U000e0001\U000e0061 \U0001f3f4\U000e0067\U000e0062\U000e007f",
    "long_word": "a" * 3000,
    "long_mixed": "Donaudampfschifffahrtsgesellschaft" * 40,
    "long_digits": "1234567890" * 60,
    "long_spaces": "x" + " " * 500 + "y" + "\n" * 200 + "z",
    "long_punctuation": "=" * 777 + "-" * 333,
    "special_alone": "<|im_start|>",
    "special_inside": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "special_glued": "a<|endoftext|>b<|endoftext|><|endoftext|> c",
    "special_spaced": " <|im_end|> x <|im_end|>  \n<|im_end|>",
    "special_broken": "<|im_start| > <im_start> <|im_start <|IM_START|> |im_start|>",
    "special_nested": "<|im_<|im_end|>start|> <<|im_start|>>",
    "special_other": "<repo_name>x<reponame>y<file_sep><filename><gh_stars>5<jupyter_code>",
    "prose": "The quick brown fox jumps over the lazy dog. It's 5 o'clock – don't be late!",
}

_PIECES = [
    *(
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        "\u00a0",
        "\u3000",
        "'s",
        "'S",
        "'ll",
        "'ſ",
        "don't",
        "a",
        "Hello",
        "é",
        "e\u0301",
        "1",
        "12",
    ),
    *(
        "123",
        "1234",
        "٣",
        "½",
        "²",
        "Ⅷ",
        "中文",
        "日本",
        "한국",
        "עברית",
        "العربية",
        "👩‍👩‍👧",
        "🏳️‍🌈",
        "\0",
        "\x04",
        "\x1c",
        "\x7f",
        "\x85",
    ),
    *("\u200b", "\u2028", "\ufeff", "\ufffd", "\ufffe", "\U0010ffff", "!", "!!!", "$", "+", "<=>", "~|^", "_", "-", "`", "·"),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<im_start|",
        "<repo_name>",
        "ǅ",
        "ß",
        "İ",
        "\U0001d7d8",
        "\u094d",
        "\ue000",
    ),
]


def is_settled(char: str) -> bool:
    """Whether every Unicode version since 3.2 assigns ``char``; versions differ between programs, and newer ones only add."""
    return unicodedata.ucd_3_2_0.category(char) != "Cn"


def random_texts(count: int, seed: int) -> list[str]:
    """Random joins of nasty pieces and of random settled characters."""
    generator = random.Random(seed)

    def character() -> str:
        while True:
            top = generator.choice([0x80, 0x800, 0x3000, 0xD800, 0x20000])
            char = chr(generator.randrange(top))
            if is_settled(char) and not 0xD800 <= ord(char) < 0xE000:
                return char

    def text() -> str:
        length = generator.randrange(1, 14)
        return "".join(generator.choice(_PIECES) if generator.random() < 0.8 else character() for _ in range(length))

    return [text() for _ in range(count)]
