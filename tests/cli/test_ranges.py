import pytest

from deepthin.cli.ranges import parse_pairs, parse_ranges
from deepthin.engine.errors import UsageError


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("512", (512,)),
        ("128, 256,128", (128, 256, 128)),
        ("1-4", (1, 2, 3, 4)),
        ("0-4096+2048,7", (0, 2048, 4096, 7)),
        ("128-1000*2", (128, 256, 512)),
        ("3-3", (3,)),
    ],
)
def test_lists_and_ranges_expand_as_in_llama_bench(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_ranges(text, low=0, high=1 << 20) == numbers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not understood"),
        ("1,", "'' is not understood"),
        ("-3", "'-3' is not understood"),
        ("1-4/2", "'1-4/2' is not understood"),
        ("1-4+0", "never ends"),
        ("0-4*2", "'0-4*2' is below 1"),
        ("2-8*1", "never ends"),
        ("8-4", "holds no number"),
        ("0", "'0' is below 1"),
        ("2000000", "'2000000' is above 1048576"),
        ("1-5000", "more than 1000 numbers"),
    ],
)
def test_what_is_no_list_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("*", r"\*").replace("+", r"\+")):
        parse_ranges(text, low=1, high=1 << 20)


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("512,128", ((512, 128),)),
        ("512,128, 64,0", ((512, 128), (64, 0))),
        ("256-1024*2,16-32+16", ((256, 16), (256, 32), (512, 16), (512, 32), (1024, 16), (1024, 32))),
    ],
)
def test_pairs_of_numbers_or_ranges(text: str, pairs: tuple[tuple[int, int], ...]) -> None:
    assert parse_pairs(text, low=0, high=1 << 20) == pairs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("512", "'512' is no list of pairs"),
        ("1,2,3", "is no list of pairs"),
        ("512,", "'' is not understood"),
        ("1-100,1-100", "more than 1000 pairs"),
    ],
)
def test_what_is_no_pair_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_pairs(text, low=0, high=1 << 20)
