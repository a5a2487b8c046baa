"""The kit: at most ten files that load, names that say everything, and a script for a plain shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepthin.cli.bench import write_onnx_for_timing
from deepthin.engine.errors import FormatError
from deepthin.engine.load import load_model
from deepthin.export.gguf_writer import write_gguf
from deepthin.profiles import kit as kit_module
from deepthin.profiles.importing import import_profile
from deepthin.profiles.kit import WriteModel, parse_probe_name, probe_name, write_kit
from deepthin.profiles.llama_bench_rows import parse_rows
from deepthin.profiles.probe_plans import KIT_PLAN
from deepthin.profiles.probe_shapes import ProbeModel
from tests.profiles.test_llama_bench_rows import row
from tests.support.probed import SMALL

WRITERS: dict[str, WriteModel] = {"llama.cpp": write_gguf, "onnxruntime": write_onnx_for_timing}
FAKE_BENCH = """#!/bin/sh
# stands for llama-bench: prints the rows of the model it is given
case "$1" in --help) echo "-d, --n-depth"; exit 0;; esac
{python} - "$@" <<'PY'
import json, sys
arguments = sys.argv[1:]
value = lambda flag: arguments[arguments.index(flag) + 1]
rows = []
for threads in value("-t").split(","):
    for depth in value("-d").split(","):
        for prompt, gen in ((int(value("-p")), 0), (0, int(value("-n")))):
            base = json.loads(open({base!r}).read())
            base.update(model_filename=value("-m"), n_threads=int(threads), n_prompt=prompt, n_gen=gen, n_depth=int(depth))
            base["samples_ns"] = [10_000_000 + i for i in range(int(value("-r")))]
            rows.append(base)
print(json.dumps(rows))
PY
"""


@pytest.fixture
def small_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit of tiny models."""
    plan = {
        runtime: [ProbeModel(models[0].shape.replace(num_layers=2, vocab_size=512), models[0].quant)]
        for runtime, models in KIT_PLAN.items()
    }
    monkeypatch.setattr(kit_module, "KIT_PLAN", plan)
    folder = tmp_path / "kit"
    rows = write_kit(folder, WRITERS)
    assert [row["runtime"] for row in rows] == list(plan)
    assert all(row["bytes"] > 1000 for row in rows)
    return folder


@pytest.mark.parametrize("models", KIT_PLAN.values(), ids=KIT_PLAN.keys())
def test_names_say_shape_and_format(models: list[ProbeModel]) -> None:
    for model in models:
        name = probe_name(model.shape, model.quant, ".gguf")
        assert not set(name) & set(",= /\\:")
        assert parse_probe_name(f"/data/local/tmp/{name}") == (model.shape, model.quant)


@pytest.mark.parametrize("name", ["model.gguf", "probe-L4-q4_0.gguf", "probe-L4-d256-heads4-ff768-vocab4096-tied-q9.gguf", ""])
def test_other_names_are_none_of_ours(name: str) -> None:
    assert parse_probe_name(name) is None


def test_names_keep_every_part_of_a_shape() -> None:
    shape = SMALL.replace(head_dim=32, mlp="gelu", qk_norm=True, qkv_bias=True, tie_word_embeddings=False)
    assert parse_probe_name(probe_name(shape, "q8_0", ".onnx")) == (shape, "q8_0")


def test_the_models_load(small_kit: Path) -> None:
    (path,) = small_kit.glob("*.gguf")
    named = parse_probe_name(path.name)
    assert named is not None
    assert load_model(path).shape.replace(max_seq_len=named[0].max_seq_len) == named[0]


def test_the_script_runs_over_the_models_and_its_results_import(small_kit: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.json"
    base.write_text(json.dumps(row()))
    bench = tmp_path / "llama-bench"
    bench.write_text(FAKE_BENCH.format(python=sys.executable, base=str(base)))
    bench.chmod(0o755)
    environment = {**os.environ, "LLAMA_BENCH": str(bench), "THREADS": "1,2", "PYTHON": "false"}
    done = subprocess.run(["sh", "run.sh"], cwd=small_kit, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = parse_rows((small_kit / "results.json").read_text(), "results.json")
    assert len(rows) == 8
    profile = import_profile(rows, "phone")
    assert profile.threads_of("llama.cpp") == (1, 2)
    assert {probe.work.test for probe in profile.probes} == {"decode", "prefill"}


def test_the_script_says_when_there_is_no_llama_bench(small_kit: Path) -> None:
    environment = {**os.environ, "LLAMA_BENCH": "/nonexistent/llama-bench"}
    done = subprocess.run(["sh", "run.sh"], cwd=small_kit, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "set LLAMA_BENCH" in done.stderr
    assert not (small_kit / "results.json").exists()


def test_the_onnx_script_times_its_models_and_its_results_import(small_kit: Path) -> None:
    command = [sys.executable, "run_onnx.py", "--threads", "1", "--repetitions", "3"]
    done = subprocess.run(command, cwd=small_kit, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    profile = import_profile(parse_rows(done.stdout, "results-onnx.json"), "phone")
    assert profile.runtimes == ("onnxruntime",)
    assert len(profile.probes) == 3


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(FormatError, match=r"no kit of ours \(it holds 'thesis.txt'\)"):
        write_kit(tmp_path, WRITERS)
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_kit_may_be_written_again(small_kit: Path) -> None:
    assert len(write_kit(small_kit, WRITERS)) == 2
