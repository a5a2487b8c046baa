"""Mapped pages are let go once read, and only they."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from deepthin.engine.formats import FORMATS
from deepthin.engine.load import load_model
from deepthin.engine.mapped import let_go
from deepthin.engine.model import random_model
from deepthin.engine.plan import plan_model
from deepthin.engine.shape import Shape
from deepthin.export.gguf_writer import write_gguf
from tests.support.hf_folders import write_hf_folder

SHAPE = Shape.parse("L=3,d=256,heads=4,kv=2,ff=640,vocab=4096,tied")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux's")


def resident(path: Path) -> int:
    """Bytes of the maps of ``path`` that count as this process's memory."""
    kilobytes, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024


@needs_linux
@pytest.mark.parametrize("quant", ["f16", "q4_1"])
def test_packing_a_gguf_file_lets_all_of_it_go(quant: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(random_model(SHAPE, quant=quant), path)
    model = load_model(path)
    assert resident(path) == 0, "the header stays"
    before = {name: tensor.data.copy() for name, tensor in model.tensors.items()}
    assert resident(path) > 0.9 * path.stat().st_size, "reading maps nothing, so this test shows nothing"
    plan_model(model, lanes=8, q8_bias=0)
    assert resident(path) == 0
    for name, tensor in model.tensors.items():
        np.testing.assert_array_equal(tensor.data, before[name])


@needs_linux
def test_converting_a_folder_s_weights_lets_most_of_its_file_go(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "hf", random_model(SHAPE))
    path = folder / "model.safetensors"
    model = load_model(folder)
    converted = model.quantized("q8_0")
    kept = {name for name, tensor in converted.tensors.items() if tensor is model.tensors[name]}
    assert kept == {name for name in model.tensors if "norm" in name}
    # a touch maps some 64 KiB around it, so tensors that lie in another order than they are converted in leave their edges
    assert resident(path) < path.stat().st_size / 5


def test_memory_that_is_no_read_only_map_keeps_its_bytes(tmp_path: Path) -> None:
    anonymous = mmap.mmap(-1, 1 << 16)
    owned, shared = np.full(1 << 16, 7, np.uint8), np.frombuffer(anonymous, np.uint8)
    shared[:] = 9
    frozen = shared[100:5000]
    frozen.flags.writeable = False
    for view in (owned, owned[5:4000], shared, frozen, np.zeros(0, np.uint8)):
        let_go(view)
    assert (owned == 7).all()
    assert (shared == 9).all()


def test_an_empty_view_at_the_end_of_a_map_is_let_go(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 16)
    with (tmp_path / "file").open("rb") as handle:
        mapped = np.frombuffer(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    let_go(mapped[4096:])
    let_go(mapped[17:300])
    assert mapped[17] == 17


def test_ordered_rows_are_stored_as_in_the_file_and_read_in_order() -> None:
    model = random_model(SHAPE, quant="q8_0")
    tensor = model.tensors["blk.0.attn_q"]
    order = np.arange(len(tensor.stored))[::-1].copy()
    turned = type(tensor)(FORMATS["q8_0"], tensor.dims, tensor.stored, order)
    np.testing.assert_array_equal(turned.data, tensor.data[::-1])
    np.testing.assert_array_equal(turned.dequantize(), tensor.dequantize()[::-1])
    np.testing.assert_array_equal(turned.converted(FORMATS["f32"]).dequantize(), tensor.dequantize()[::-1])
    assert turned.num_bytes == tensor.stored.nbytes
