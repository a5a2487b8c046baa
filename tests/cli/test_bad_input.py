"""``deepthin export`` with input and disks that are not as they should be: exit code 1, one line, nothing left behind."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deepthin.cli.main import main
from deepthin.export import bundle as bundle_module
from tests.support.hf_folders import write_hf_folder
from tests.support.refusal import assert_one_line
from tests.support.tiny_models import lively_model, tiny_shape

TINY = "L=2,d=64,heads=4,kv=2,ff=96,vocab=96,tied"
WEIGHTS, INDEX, Q = "model.safetensors", "model.safetensors.index.json", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("source") / "model", lively_model(tiny_shape("plain")))


@pytest.fixture
def source(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "source"))


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ``export`` ends with, exit code 1."""
    assert main(["export", *arguments, "--quiet"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1, error
    assert_one_line(error.rstrip("\n"))
    return error


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save(folder: Path, weights: dict[str, Any], name: str = WEIGHTS) -> None:
    save_file(weights, folder / name, metadata={"format": "pt"})


def cut_short(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def overlapping(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header[Q]["data_offsets"] = [at - 4 for at in header[Q]["data_offsets"]]
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def key_twice(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        (folder / name).write_text(text[:-1] + ', "vocab_size": 96}')

    return change


def sharded(folder: Path, *, names: tuple[str, str] = ("one.safetensors", "two.safetensors")) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    parts = {name: dict(list(weights.items())[at::2]) for at, name in enumerate(names)}
    for name, part in parts.items():
        save(folder, part, name)
    index = {"weight_map": {tensor: name for name, part in parts.items() for tensor in part}}
    (folder / INDEX).write_text(json.dumps(index))


def without_a_shard(folder: Path) -> None:
    sharded(folder)
    (folder / "two.safetensors").unlink()


def with_a_foreign_shard(folder: Path) -> None:
    sharded(folder)
    shutil.copyfile(folder / "one.safetensors", folder / "two.safetensors")


def with_a_shard_outside(folder: Path) -> None:
    sharded(folder)
    shutil.move(folder / "two.safetensors", folder.parent / "two.safetensors")
    text = (folder / INDEX).read_text().replace("two.safetensors", "../two.safetensors")
    (folder / INDEX).write_text(text)


def as_dtype(dtype: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save(folder, {name: values.astype(dtype) for name, values in load_file(folder / WEIGHTS).items()})

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**text, **changes}))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut_short, "was it cut short? Fetch or export it again"),
        (overlapping, f"tensor '{Q}'"),
        (key_twice("config.json"), "key 'vocab_size' appears twice"),
        (without_a_shard, "'two.safetensors', which is not in the folder"),
        (with_a_foreign_shard, "two.safetensors: it holds tensor"),
        (with_a_shard_outside, "'../two.safetensors' is no plain file name"),
        (as_dtype(np.float64), "is stored as 'F64', which this version does not read"),
        (as_dtype(np.int8), "is stored as 'I8', which this version does not read"),
        (config(hidden_size=96), "do they belong together?"),
        (config(num_hidden_layers=3), "'model.layers.2.input_layernorm.weight' is missing"),
        (config(num_hidden_layers=1), "belongs to no part of the model that config.json describes"),
        (config(num_key_value_heads=4), "do they belong together?"),
        (config(tie_word_embeddings=False), "should 'tie_word_embeddings' be true?"),
    ],
)
def test_sources_that_are_not_right(
    source: Path, tmp_path: Path, change: Callable[[Path], None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(source)
    assert words in refusal([str(source), "--out", str(tmp_path / "new" / "out")], capsys)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("value", "options", "words"),
    [
        (1e6, ["--to", "hf", "--hf-dtype", "f16"], "cannot become f16: a weight is larger than f16 can hold (65504)"),
        (3.4e38, ["--to", "hf", "--hf-dtype", "bf16"], "cannot become bf16: a weight is larger than bf16 can hold"),
        (1e6, ["--to", "gguf", "--quant", "f16"], "cannot become f16: a weight is larger than f16 can hold (65504)"),
        (1e9, ["--to", "gguf", "--quant", "q8_0"], "cannot become q8_0: a block's scale or minimum, which q8_0 stores as f16,"),
        (
            -1e9,
            ["--to", "genai", "--quant", "q4_0"],
            "cannot become q4_0: a block's scale or minimum, which q4_0 stores as f16,",
        ),
        (
            -1e6,
            ["--to", "gguf", "--quant", "q4_1"],
            "cannot become q4_1: a block's scale or minimum, which q4_1 stores as f16,",
        ),
        (np.inf, ["--to", "gguf", "--quant", "q8_0"], "cannot store a value that is not finite as q8_0"),
    ],
)
def test_values_that_a_target_cannot_hold(
    tmp_path: Path, value: float, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = lively_model(tiny_shape("plain"))
    weights = np.array(model.tensors["blk.1.attn_q"].dequantize())
    weights[3, 5] = value
    folder = write_hf_folder(tmp_path / "source", model)
    save(folder, {**load_file(folder / WEIGHTS), "model.layers.1.self_attn.q_proj.weight": weights})
    error = refusal([str(folder), "--out", str(tmp_path / "out"), *options], capsys)
    assert words in error and "tensor 'blk.1.attn_q'" in error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@contextmanager
def no_file_larger_than(count: int) -> Iterator[None]:
    """What a full disk is to whoever writes: a write that the system refuses half-way."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on the size of files")
@pytest.mark.parametrize("target", ["hf", "genai", "transformersjs", "gguf"])
def test_a_disk_that_fills_up(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights of each target are refused in the middle; an older bundle there stays as it was."""
    out, fresh = tmp_path / "out", tmp_path / "new" / "folder" / "out"
    assert main(["export", TINY, "--out", str(out), "--to", "gguf", "--quant", "q4_0", "--quiet"]) == 0
    capsys.readouterr()
    before = tree(out)
    for folder in (out, fresh):
        with no_file_larger_than(60_000):
            error = refusal([TINY, "--out", str(folder), "--to", target, "--quant", "f32", "--force"], capsys)
        assert "the bundle cannot be written (File too large); is there space and permission?" in error
    assert tree(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_is_full_at_the_very_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundle_module, "write_manifest", full)
    error = refusal([TINY, "--out", str(tmp_path / "out"), "--to", "gguf", "--quant", "q4_0"], capsys)
    assert "No space left on device" in error and not list(tmp_path.iterdir())


def test_an_older_bundle_is_replaced_as_a_whole_and_only_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", TINY, "--out", str(out), "--to", "gguf", "--quant", "q4_0", "--quiet"]) == 0
    capsys.readouterr()
    before = tree(out)
    again = [TINY, "--out", str(out), "--to", "hf", "--seed", "1"]
    assert "or replace it with --force" in refusal(again, capsys)
    assert tree(out) == before
    assert main(["export", *again, "--force", "--quiet"]) == 0
    assert not (out / "gguf").exists() and (out / "hf" / WEIGHTS).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), KeyboardInterrupt()])
def test_the_older_bundle_comes_back_when_the_new_one_cannot_move_in(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert main(["export", TINY, "--out", str(out), "--to", "gguf", "--quant", "q4_0", "--quiet"]) == 0
    before, rename = tree(out), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    again = ["export", TINY, "--out", str(out), "--to", "gguf", "--quant", "f32", "--force", "--quiet"]
    assert main(again) != 0
    assert tree(out) == before and [path.name for path in tmp_path.iterdir()] == ["out"]
