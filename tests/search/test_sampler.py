from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepthin.search.sampler import EXHAUSTIVE, GUIDED, NSGA2, choose_sampler

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("points", "trials", "name"),
    [(40, 48, EXHAUSTIVE), (4096, 9000, EXHAUSTIVE), (10**6, 48, GUIDED), (10**6, 2000, GUIDED), (10**6, 5000, NSGA2)],
)
def test_rule_by_size_and_trials(points: int, trials: int, name: str) -> None:
    choice = choose_sampler(points, trials)
    assert choice.name == name
    assert str(trials) in choice.why or f"{points}" in choice.why


def test_the_rule_needs_no_package_that_keeps_threads_busy(tmp_path: Path) -> None:
    """Optuna's GP sampler would load torch, whose threads are busy between proposals; nothing the rule chooses does."""
    script = (
        "import sys, pathlib\n"
        "from deepthin.search.run import SearchConfig, run_search\n"
        "from tests.support.fake_costs import FakeMeasure\n"
        "run_search(SearchConfig(trials=20, sampler='guided'), measure=FakeMeasure(), out=pathlib.Path(sys.argv[1]))\n"
        "print(sorted({'torch', 'scipy', 'sklearn'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_search_from_the_command_line_has_one_thread_for_products() -> None:
    """NumPy's would otherwise stay busy after each step of the guide, while the next shape is being timed."""
    script = (
        "import os, deepthin.cli.search, numpy as np\n"
        "square = np.ones((400, 400))\n"
        "square @ square\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "1"
