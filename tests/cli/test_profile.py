"""``deepthin profile`` and ``--profile``: what is printed, exit codes, and that a prediction never passes for a measurement."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepthin.cli.main import main
from deepthin.cli.profile import ACTIONS
from deepthin.profiles.library import host_path
from deepthin.profiles.machine import fingerprint, machine_record
from tests.profiles.test_importing import kit_rows
from tests.profiles.test_llama_bench_rows import row
from tests.profiles.test_profile import made

SMOL = "smollm2-135m"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPTHIN_PROFILE_DIR", str(tmp_path / "profiles"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "profiles"


def document(arguments: list[str], capsys: pytest.CaptureFixture[str], exit_code: int = 0) -> dict[str, Any]:
    assert main([*arguments, "--json", "--quiet"]) == exit_code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: ACTION"),
        (["dance"], "invalid choice: 'dance'"),
        (["show"], "profile show takes one NAME, see deepthin profile list, but 0 were given"),
        (["list", "x"], "profile list takes no NAME, but 1 were given"),
        (["import", "--name", "x"], "profile import takes at least one FILE, but 0 were given"),
        (["import", "x.json"], "profile import needs --name"),
        (["list", "--out", "x"], "--out is no option of profile list, but of measure, kit, import"),
        (["show", "pixel-9", "--threads", "1"], "--threads is no option of profile show, but of measure"),
        (["show", "pixel9"], "did you mean pixel-9"),
        (["show", "host"], "this machine has no profile yet"),
        (["show", "pixel-9", "--shape", "nonsense"], "'nonsense' is no file"),
        (["measure", "--budget-s", "1"], "argument --budget-s: 1 is outside 10 to"),
        (["measure", "--runtimes", "torch"], "'torch' is unknown"),
        (["import", "x.json", "--name", "n", "--model", "x"], "a file name pattern, '=' and a shape are needed"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([row()]))
    assert main(["profile", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err.strip().splitlines()[-1]


def test_help_names_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--help"]) == 0
    text = capsys.readouterr().out
    for action in ACTIONS:
        assert f"\n  {action} " in text


def test_list_has_saved_profiles_and_devices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(name="box").save(folder / "box.json")
    found = document(["profile", "list"], capsys)
    assert found["schema"] == "deepthin/profile-list/1"
    names = [entry["name"] for entry in found["profiles"]]
    assert names[0] == "box"
    assert {"pixel-9", "raspberry-pi-5"} <= set(names)
    assert main(["profile", "list"]) == 0
    assert "Google Pixel 9" in capsys.readouterr().out


def test_a_device_of_published_facts_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(["profile", "show", "pixel-9", "--shape", SMOL, "--quant", "q4_0"], capsys)
    (line,) = found["predictions"]
    assert line["tok_s"]["basis"] == "published"
    assert line["tok_s"]["low"] < line["tok_s"]["value"] < line["tok_s"]["high"]
    assert sum(line["terms_s"].values()) == pytest.approx(line["seconds_per_token"]["value"])
    assert main(["profile", "show", "pixel-9"]) == 0
    text = capsys.readouterr().out
    assert "nothing was measured on this device" in text
    assert "basis: published" in text
    assert SMOL in text


def test_a_measured_profile_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(name="box").save(folder / "box.json")
    assert (
        main(["profile", "show", "box", "--shape", f"{SMOL},L=4,d=512,heads=8,ff=1536,vocab=8192,tied", "--quant", "q4_0,q5_1"])
        == 0
    )
    text = capsys.readouterr().out
    for part in (
        "read bandwidth, GB/s",
        "us/layer",
        "left out",
        "flagged: steal",
        "repeated minutes later: 1.0%",
        "warning: t",
    ):
        assert part in text
    assert text.count("L=4,d=512") >= 2  # once per thread count
    assert "q5_1 was not probed" in text


def test_this_hosts_profile_is_only_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    machine = machine_record()
    made(fingerprint=fingerprint(machine)).save(host_path(machine))
    assert document(["profile", "show", "host", "--shape", SMOL], capsys)["profile"]["name"] == "here"
    made(fingerprint="another").save(host_path(machine))
    found = document(["profile", "show", "host"], capsys, exit_code=1)
    assert "not of this host" in found["error"]["message"]


def results(path: Path) -> Path:
    objects = [
        row(
            model_filename=one.filename,
            n_threads=one.threads,
            n_prompt=one.prompt,
            n_gen=one.gen,
            n_depth=one.depth,
            samples_ns=[round(s * 1e9) for s in one.seconds],
        )
        for one in kit_rows()
    ]
    path.write_text(json.dumps(objects))
    return path


def test_import_show_inspect_and_search_on_the_imported_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results(tmp_path / "results.json")
    found = document(["profile", "import", str(path), "--name", "my-phone", "--title", "My phone"], capsys)
    assert found["profile"]["basis"] == "imported"
    assert Path(found["path"]).is_file()

    shown = document(["profile", "show", "my-phone", "--shape", SMOL], capsys)
    assert {line["tok_s"]["basis"] for line in shown["predictions"]} == {"predicted"}

    inspected = document(["inspect", SMOL, "--profile", "my-phone", "--context", "64"], capsys)["predicted"]
    assert inspected["profile"] == "my-phone"
    assert [line["threads"] for line in inspected["rows"]] == [1, 2]
    assert main(["inspect", SMOL, "--profile", "my-phone"]) == 0
    assert "on my-phone: predicted" in capsys.readouterr().out

    arguments = ["search", "--params", "4M", "--vocab", "512", "--trials", "6", "--profile", "my-phone", "--no-export"]
    first = document([*arguments, "--out", "run"], capsys)
    assert first["time_basis"] == "predicted"
    assert first["measured_now"] == 0
    assert first["residuals"] == []
    assert all(member["ms_per_token"]["basis"] == "predicted" for member in first["front"])
    assert first["config"]["profile"].startswith("my-phone (imported), llama.cpp, 2 threads")
    again = document([*arguments, "--out", "run"], capsys)
    assert again["front"] == first["front"]
    assert main([*arguments, "--out", "run"]) == 0
    text = capsys.readouterr().out
    assert "Times are predicted, not measured" in text
    assert "noisy" not in text
    assert "timed" not in text.replace("timed are", "")


def test_a_run_folder_of_measured_times_is_not_continued_with_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["search", "--params", "4M", "--vocab", "512", "--trials", "2", "--no-export", "--out", "run"]
    assert main([*base, "--profile", "pixel-9", "--quiet"]) == 0
    capsys.readouterr()
    assert main([*base, "--profile", "pixel-8", "--quiet"]) == 2
    assert "holds a search with other settings: profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--runtime", "llama.cpp"], "give --profile too"),
        (["--profile", "pixel-9", "--store", "x"], "with --profile nothing is timed"),
        (["--profile", "pixel-9", "--runtime", "deepthin"], "deepthin was not measured"),
        (["--profile", "pixel-9", "--threads", "3"], "not measured at 3 threads"),
        (["--profile", "nothing"], "profile 'nothing' is unknown"),
    ],
)
def test_search_refuses_profiles_that_do_not_fit(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON"),
        (json.dumps([row(), row(build_commit="zzz")]), "builds are mixed"),
        (json.dumps([row(samples_ns=[7, 7, 7])]), "which no clock shows"),
    ],
)
def test_bad_results_are_one_line_and_exit_1(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert main(["profile", "import", str(path), "--name", "x"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err.strip().splitlines()[-1]


def test_a_missing_or_binary_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "import", "none.json", "--name", "x"]) == 1
    assert "none.json: No such file" in capsys.readouterr().err
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    assert main(["profile", "import", "b.json", "--name", "x"]) == 1
    assert "b.json: is no text" in capsys.readouterr().err


def test_showing_a_profile_loads_no_kernels() -> None:
    code = (
        "import sys; from deepthin.cli.main import main; main(['profile', 'show', 'pixel-9']); sys.exit('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_measuring_this_machine_gives_a_profile_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(
        ["profile", "measure", "--runtimes", "deepthin", "--threads", "1", "--budget-s", "10", "--out", "host.json"], capsys
    )
    assert found["profile"]["fingerprint"] == fingerprint(machine_record())
    assert found["profile"]["models"]
    assert found["profile"]["wall_s"] < 60
    shown = document(["profile", "show", "host.json", "--shape", SMOL], capsys)
    assert shown["predictions"][0]["tok_s"]["value"] > 1


@pytest.mark.slow
def test_a_profile_measured_beside_a_busy_process_is_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            found = document(
                ["profile", "measure", "--runtimes", "deepthin", "--threads", "1", "--budget-s", "10", "--out", "busy.json"],
                capsys,
            )
        finally:
            busy.kill()
    assert "other-processes" in found["profile"]["flags"]
    assert main(["profile", "show", "busy.json"]) == 0
    assert "other-processes" in capsys.readouterr().out
