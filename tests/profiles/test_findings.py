import math

import numpy as np

from deepthin.profiles.findings import cliffs, dear_heads, slow_kernels
from deepthin.profiles.latency.model import fit_model
from deepthin.profiles.latency.workload import DECODE
from tests.support.probed import TRUTH, Device, conditions, decode_works

SMOOTH = {512: 5.0e10, 544: 5.1e10, 576: 5.0e10, 608: 5.2e10, 640: 5.1e10}


def test_a_smooth_curve_has_no_cliff() -> None:
    assert cliffs(SMOOTH, "deepthin", "q4_0") == []


def test_a_width_far_below_its_neighbours_is_named() -> None:
    (found,) = cliffs(SMOOTH | {576: 2.5e10}, "deepthin", "q4_0")
    assert (found["width"], found["quant"], found["kind"]) == (576, "q4_0", "cliff")
    assert found["loss"] > 0.45
    assert "width 576 is" in found["text"]


def test_a_step_to_another_level_is_no_cliff() -> None:
    assert cliffs({1: 5e10, 2: 5e10, 3: 2e10, 4: 2e10}, "deepthin", "q4_0") == []


def test_a_head_size_that_is_dear_is_named_where_probes_say_so_and_not_where_the_prior_does() -> None:
    where = conditions("llama.cpp")
    works = decode_works(60)
    model = fit_model(Device(where, TRUTH | {"dim_32": 8.0}, noise=0.003).probes(works), where, DECODE)
    (found,) = dear_heads([model])
    assert (found["head_dim"], found["runtime"]) == (32, "llama.cpp")
    assert math.isclose(found["times"], 8.0, rel_tol=0.25)
    assert "heads of 32 costs" in found["text"]
    assert dear_heads([fit_model([], where, DECODE)]) == []
    plain = fit_model(Device(where, TRUTH | {"dim_32": 1.0}, noise=0.003).probes(works), where, DECODE)
    assert dear_heads([plain]) == []


def test_a_format_that_computes_slower_than_memory_delivers_is_listed_worst_first() -> None:
    where = conditions()
    truth = TRUTH | {"product": 2e-11, "product_q8_0": 1.0, "product_q4_0": 6.0, "product_f16": 1.0}
    device = Device(where, truth, noise=0.003)
    works = decode_works(45)
    model = fit_model(device.probes(works), where, DECODE)
    found = slow_kernels([model])
    assert [row["quant"] for row in found] == ["q4_0"]
    exact = 4.5 / 8 / (2e-11 * 6.0) / where.rate(512e6)
    assert math.isclose(found[0]["share"], exact, rel_tol=0.2)
    assert "q4_0, 1 threads" in found[0]["text"]
    assert np.all(np.diff([row["share"] for row in slow_kernels([model, model])]) >= 0)
