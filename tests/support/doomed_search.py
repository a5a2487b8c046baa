"""A search in a process of its own that kills itself: ``python -m tests.support.doomed_search OUT LOG TRIALS WHERE COUNT``.

WHERE says what ends it at the COUNT-th time: ``measure`` (a trial is in flight), ``stored`` (measured, but the study was not
told), ``torn`` (half a measurement line and half a journal line are on disk), ``told`` (between two trials).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from deepthin.engine.shape import Shape
from deepthin.profiles.schema import TokenCost
from deepthin.search.cost import Cost
from deepthin.search.folder import JOURNAL, MEASUREMENTS, RunFolder
from deepthin.search.run import SearchConfig, run_search
from deepthin.search.study import SearchStudy
from tests.support.fake_costs import FakeMeasure


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


class Doom:
    """Counts down to the kill."""

    def __init__(self, count: int) -> None:
        self.left = count

    def strike(self) -> bool:
        self.left -= 1
        return self.left == 0


def main(out: Path, log: Path, trials: int, where: str, count: int) -> None:
    measure, doom = FakeMeasure(log), Doom(count)
    store, tell = RunFolder.store_measured, SearchStudy.tell

    def measuring(shape: Shape, quant: str) -> TokenCost | Cost:
        cost = measure(shape, quant)
        if where == "measure" and doom.strike():
            die()
        return cost

    def storing(folder: RunFolder, key: str, cost: Cost) -> Cost:
        if where == "torn" and doom.strike():
            for name, text in ((MEASUREMENTS, '{"key": "L=3,d'), (JOURNAL, '{"op_code":4,"wor')):
                with (folder.path / name).open("a") as file:
                    file.write(text)
            die()
        stored = store(folder, key, cost)
        if where == "stored" and doom.strike():
            die()
        return stored

    def telling(study: SearchStudy, *args: Any) -> None:
        tell(study, *args)
        if where == "told" and doom.strike():
            die()

    RunFolder.store_measured = storing  # type: ignore[method-assign,assignment]
    SearchStudy.tell = telling  # type: ignore[assignment,method-assign]
    run_search(SearchConfig(trials=trials), measure=measuring, out=out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
