"""This machine as measuring wants it: what is installed, and what is not is said."""

import pytest

from deepthin.cli.bench import write_onnx_for_timing
from deepthin.engine.errors import PeerMissingError
from deepthin.export.gguf_writer import write_gguf
from deepthin.profiles import host
from deepthin.profiles.host import host_bench
from deepthin.profiles.probe_plans import plan_of
from deepthin.profiles.probe_shapes import ProbeModel
from deepthin.profiles.probing import WriteModel
from tests.support.probed import SMALL

WRITERS: dict[str, WriteModel] = {"llama.cpp": write_gguf, "onnxruntime": write_onnx_for_timing}


def test_the_host_opens_what_is_installed_and_measures_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "find_spec", lambda package: None if package == "llama_cpp" else object())
    with host_bench({"cpu_model": "x"}, ("deepthin", "llama.cpp", "onnxruntime"), WRITERS, (2, 1, 2)) as bench:
        assert bench.threads == (1, 2)
        assert list(bench.open_runtimes) == ["deepthin", "llama.cpp", "onnxruntime"]
        assert bench.plans["onnxruntime"] == plan_of("onnxruntime")
        assert len(bench.engine_digest) == 12
        model = ProbeModel(SMALL.replace(num_layers=1), "q4_0")
        timed = bench.open_runtimes["deepthin"](model, 1)
        subject, context = timed.decode(0)
        assert 0 < subject()["seconds"] < 1
        assert context == 0
        timed.close()
        with pytest.raises(PeerMissingError, match=r"llama\.cpp is not installed"):
            bench.open_runtimes["llama.cpp"](model, 1)
        rates = bench.read_bandwidth(1, 1 << 20, 3)
        assert len(rates) == 3
        assert min(rates) > 1e8
        assert bench.versions("deepthin")
