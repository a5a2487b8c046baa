"""The fleet through the front door: what it refuses, what it never shows, and one real measurement through SQLite."""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path

import pytest

from deepthin.cli.main import main
from deepthin.search.fleet import url as url_module
from tests.support.postgres import free_port

SMALL = ["search", "--params", "400k", "--vocab", "512", "--trials", "2", "--context", "16", "--quant", "q4_0"]
WORKER = ["search", "worker"]


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert "s3cret" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("deepthin: error:")]
    return line


def test_help_of_the_worker_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORKER, "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: deepthin search worker" in text
    assert "--idle-exit" in text
    assert "--trials" not in text
    assert main(["search", "--help"]) == 0
    assert "--warm-start" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (WORKER, 2, "search worker needs --storage URL and --device TAG"),
        ([*WORKER, "--storage", "sqlite:///x.db", "--device", "a b"], 2, "'a b' is no device tag"),
        ([*WORKER, "--storage", "fleet.db", "--device", "pi5"], 2, "--storage is no database URL"),
        ([*WORKER, "--storage", "redis://:s3cret@db", "--device", "pi5"], 2, "--storage names 'redis'"),
        ([*WORKER, "--lease", "0"], 2, "0 is outside 1 to 86400"),
        ([*SMALL, "--storage", "sqlite:///x.db"], 2, "--storage URL and --device TAG go together"),
        ([*SMALL, "--device", "pi5"], 2, "--storage URL and --device TAG go together"),
        (
            [*SMALL, "--device", "pi5", "--storage", "sqlite:///x.db", "--profile", "host"],
            2,
            "--profile does not go with --storage",
        ),
        ([*SMALL, "--device", "pi5", "--storage", "sqlite:///x.db", "--store", "t"], 2, "--store does not go with --storage"),
        ([*SMALL, "--study", "mine"], 2, "--study belongs to a search with --storage"),
        ([*SMALL, "--study", "a/b"], 2, "'a/b' is no name of a study"),
        ([*SMALL, "--warm-start", "nowhere"], 2, "--warm-start nowhere: holds no finished run"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert says in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_database_out_of_reach_is_named_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deepthin.search.fleet.database.FIRST_PATIENCE_S", 0.2)
    port = free_port()
    url = f"postgresql://me:s3cret@127.0.0.1:{port}/fleet"
    assert main([*WORKER, "--storage", url, "--device", "pi5", "--debug"]) == 1
    line = error_of(capsys)
    assert f"database postgresql://me@127.0.0.1:{port}/fleet cannot be reached" in line
    assert "Connection refused" in line
    assert main([*SMALL, "--storage", url, "--device", "pi5", "--out", str(tmp_path / "run")]) == 1
    assert "start this command again: nothing is lost" in error_of(capsys)


def test_a_missing_driver_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(url_module, "find_spec", lambda name: None)
    assert main([*WORKER, "--storage", "postgresql://me:s3cret@db/fleet", "--device", "pi5"]) == 1
    assert "pip install 'deepthin[fleet]'" in error_of(capsys)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.db").write_text("no database, but a text that is long enough to be taken for one by its size" * 10)
    assert main([*WORKER, "--storage", f"sqlite:///{tmp_path}/fleet.db", "--device", "pi5"]) == 1
    assert "refuses (file is not a database)" in error_of(capsys)


def test_a_search_measured_by_a_worker_and_the_same_again_by_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = ["--storage", f"sqlite:///{tmp_path}/fleet.db", "--device", "here"]
    search = [*SMALL, *storage, "--no-export", "--json"]
    # In threads, since a process of its own would load every kernel again; signals are for the main thread only.
    codes: list[int] = []
    worker = threading.Thread(
        target=lambda: codes.append(main([*WORKER, *storage, "--idle-exit", "7", "--quiet", "--store", str(tmp_path / "t")]))
    )
    worker.start()
    assert main([*search, "--out", str(tmp_path / "run")]) == 0
    worker.join(timeout=120)
    out = capsys.readouterr().out
    assert codes == [0]
    text, _, report = out.rpartition("device here: ")
    document = json.loads(text)
    assert document["measured_now"] >= 2
    assert report.startswith(f"{document['measured_now']} measured, 0 not measurable; ended, since no job came")
    assert "here" not in document["config"]["machine"]
    storage_file = json.loads((tmp_path / "run" / "storage.json").read_text())
    assert storage_file["storage"] == f"sqlite:///{tmp_path}/fleet.db"
    assert main([*search, "--out", str(tmp_path / "other")]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["measured_now"] == 0
    assert (tmp_path / "other" / "front.json").read_bytes() == (tmp_path / "run" / "front.json").read_bytes()
    with sqlite3.connect(tmp_path / "fleet.db") as database:
        assert database.execute("SELECT DISTINCT state FROM deepthin_job").fetchall() == [("done",)]
    database.close()
