import io
import time

import pytest

from deepthin.cli import progress as module
from deepthin.cli.progress import Progress
from deepthin.cli.table import table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FIRST_LINE_S", 0.02), ("LINE_EVERY_S", 0.02), ("REDRAW_EVERY_S", 0.02)):
        monkeypatch.setattr(module, name, value)


def wait_for(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 5
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert text in stream.getvalue()


def test_short_work_off_a_terminal_says_nothing() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress("measuring", 1, 3)
    assert stream.getvalue() == ""


def test_long_work_off_a_terminal_gets_whole_lines(hurried: None) -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress("measuring", 1, 3)
        wait_for(stream, "measuring 1/3\n")
        progress("exporting")
        wait_for(stream, "exporting\n")
    assert "\r" not in stream.getvalue()


def test_a_terminal_line_is_rewritten_and_cleared() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress("measuring something long", 2)
        progress("short")
    text = stream.getvalue()
    assert "measuring something long 2" in text
    assert text.endswith(" \r")
    assert "\n" not in text
    assert "\033" not in text


def test_a_terminal_shows_time_passing_during_one_long_step(hurried: None) -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress("compiling")
        deadline = time.monotonic() + 5
        while stream.getvalue().count("compiling") < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert stream.getvalue().count("compiling") >= 3


def test_quiet_is_silent() -> None:
    stream = Terminal()
    with Progress(stream, enabled=False) as progress:
        progress("measuring")
    assert stream.getvalue() == ""


def test_a_closed_stream_stops_nothing() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        stream.close()
        progress("measuring")


def test_table_aligns_words_left_and_numbers_right() -> None:
    assert table(("name", "n"), [("a", 5), ("long one", 12345)]) == (
        "name          n\n--------  -----\na             5\nlong one  12345"
    )
