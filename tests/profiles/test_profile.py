"""Profiles as files: nothing is lost, older ones are upgraded, another machine's is never this host's."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles import profile as profile_module
from deepthin.profiles.latency.model import fit_model
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload
from deepthin.profiles.profile import MEASURED, Profile, read_profile, require_host, upgraded
from tests.support.probed import CURVE, SMALL, Device, conditions, decode_works

WORK = Workload(SMALL, "q4_0", context=64)


def made(**changes: Any) -> Profile:
    probes = [probe for threads in (1, 2) for probe in Device(conditions(threads=threads)).probes(decode_works(6))]
    models = [fit_model([p for p in probes if p.threads == t], conditions(threads=t), DECODE) for t in (1, 2)]
    fields: dict[str, Any] = {
        "name": "here",
        "title": "A CPU",
        "basis": MEASURED,
        "created_utc": "2026-11-29T00:00:00Z",
        "machine": {"cpu_model": "A CPU"},
        "curve": CURVE,
        "models": tuple(models),
        "fingerprint": "abc",
        "engine_digest": "def",
        "versions": {"llama.cpp": "1"},
        "probes": tuple(probes),
        "noise": {"repeat": {"median": 0.01, "max": 0.02, "n": 6}},
        "findings": ({"kind": "cliff", "text": "t"},),
        "flags": ("steal",),
        "notes": ("n",),
        "wall_s": 12.5,
    }
    return Profile(**(fields | changes))


def test_a_saved_profile_reads_back_the_same(tmp_path: Path) -> None:
    profile = made()
    path = tmp_path / "deep" / "p.json"
    profile.save(path)
    again = read_profile(path)
    assert again.to_json() == profile.to_json()
    assert again.predict("llama.cpp", 2, WORK).to_json() == profile.predict("llama.cpp", 2, WORK).to_json()
    assert [item.name for item in path.parent.iterdir()] == ["p.json"]


def test_threads_that_were_not_measured_are_refused_and_the_most_are_the_default() -> None:
    profile = made()
    assert profile.predict("llama.cpp", None, WORK) == profile.predict("llama.cpp", 2, WORK)
    with pytest.raises(UsageError, match=r"not measured at 3 threads and is not guessed; measured are 1, 2"):
        profile.predict("llama.cpp", 3, WORK)


def test_runtimes_and_tests_that_were_not_measured_are_refused() -> None:
    with pytest.raises(UsageError, match=r"onnxruntime was not measured; it holds llama\.cpp"):
        made().predict("onnxruntime", 1, WORK)
    with pytest.raises(UsageError, match=r"no prefill of llama\.cpp at 2 threads was measured"):
        made().predict("llama.cpp", 2, Workload(SMALL, "q4_0", PREFILL, 9))


def test_another_machines_profile_is_not_this_hosts() -> None:
    require_host(made(), "abc", "p.json")
    with pytest.raises(FormatError, match=r"p\.json: is a profile of A CPU \(hardware abc\), not of this host \(xyz\)"):
        require_host(made(), "xyz", "p.json")
    with pytest.raises(FormatError, match="hardware unknown"):
        require_host(made(fingerprint="", basis="imported"), "", "p.json")


def test_a_newer_schema_is_refused() -> None:
    with pytest.raises(FormatError, match="schema version 2 is newer than 1"):
        Profile.from_json(made().to_json() | {"schema": "deepthin/profile/2"})


def test_an_older_schema_is_upgraded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {key: value for key, value in made().to_json().items() if key != "title"} | {"schema": "deepthin/profile/0"}
    with pytest.raises(FormatError, match="'deepthin/profile/0' cannot be upgraded"):
        Profile.from_json(old)
    monkeypatch.setitem(profile_module.UPGRADES, 0, lambda document: document | {"title": document["name"]})
    assert Profile.from_json(old).title == "here"
    assert old["schema"] == "deepthin/profile/0"


@pytest.mark.parametrize("document", [[], {}, {"schema": "deepthin/front/1"}, {"schema": "deepthin/profile/x"}])
def test_other_documents_are_refused(document: Any) -> None:
    with pytest.raises(FormatError, match=r"deepthin/profile/1"):
        upgraded(document)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"basis": "guessed"}, "basis is 'guessed'"),
        ({"probes": {}}, "probes is dict, but a list"),
        ({"versions": []}, "versions is list, but an object"),
        ({"wall_s": "x"}, "wall_s is 'x'"),
        ({"extra": 1}, "key 'extra' is unknown"),
        ({"bandwidth": [{"threads": 1}]}, "key 'num_bytes' is missing"),
    ],
)
def test_damage_is_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(made().to_json() | change))
    with pytest.raises(FormatError, match=says) as caught:
        read_profile(path)
    assert str(caught.value).startswith(str(path))


def test_a_damaged_probe_is_named() -> None:
    document = made().to_json()
    document["probes"][0]["shape"] = "L=1"
    with pytest.raises(FormatError, match="probe: shape 'L=1': d, heads, ff, vocab missing"):
        Profile.from_json(document)


def test_files_that_cannot_be_profiles(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(FormatError, match="is no JSON"):
        read_profile(tmp_path / "p.json")
