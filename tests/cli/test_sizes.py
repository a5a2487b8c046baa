import pytest

from deepthin.cli.sizes import bytes_text, count_text, parse_bandwidth, parse_bytes, parse_count, parse_counts, seconds_text
from deepthin.engine.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30M", 30_000_000),
        ("100k", 100_000),
        ("1.5B", 1_500_000_000),
        ("49152", 49152),
        ("1_000", 1000),
        ("3e6", 3_000_000),
        (" 2 m ", 2_000_000),
    ],
)
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("90MB", 90_000_000), ("64MiB", 64 << 20), ("1gib", 1 << 30), ("512", 512), ("512B", 512), ("1.5kB", 1500)],
)
def test_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


def test_bandwidth_and_lists() -> None:
    assert parse_bandwidth("15.1TB/s") == 15_100_000_000_000
    assert parse_counts("32k,49152") == [32000, 49152]


@pytest.mark.parametrize("text", ["", "M", "-3M", "3X", "1,5M", "0", "0.2", "nan", "inf", "30MB"])
def test_nonsense_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"write a count such as 30M"):
        parse_count(text)


@pytest.mark.parametrize("text", ["1e400", "1e19", "9e9T"])
def test_more_than_anything_holds_is_refused(text: str) -> None:
    for parse, unit in ((parse_count, ""), (parse_bytes, "B"), (parse_bandwidth, "B/s")):
        with pytest.raises(UsageError, match=r"above 2\^63"):
            parse(text + unit)


@pytest.mark.parametrize("text", ["90M", "MB", "3 apples"])
def test_nonsense_bytes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"write bytes such as 90MB"):
        parse_bytes(text)


def test_bandwidth_needs_a_rate() -> None:
    with pytest.raises(UsageError, match="no bandwidth"):
        parse_bandwidth("50GB")


@pytest.mark.parametrize(("value", "text"), [(134_515_008, "134.5M"), (999, "999"), (999_960, "1M"), (7.25e9, "7.25B")])
def test_counts_as_text(value: float, text: str) -> None:
    assert count_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(90_000_000, "90.0 MB"), (4096, "4.1 kB"), (12, "12 B")])
def test_bytes_as_text(value: float, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(2.56e-3, "2.56 ms"), (40e-6, "40 us"), (3.0, "3 s"), (5e-9, "5 ns"), (0.0, "0 ns")]
)
def test_seconds_as_text(value: float, text: str) -> None:
    assert seconds_text(value) == text
