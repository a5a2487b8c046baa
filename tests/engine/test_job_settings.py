from __future__ import annotations

import threading
import time

import numpy as np

from deepthin.engine.decoder import Decoder
from deepthin.engine.kernels import decode as k
from deepthin.engine.kernels.sync import ARRIVED, PHASE, PHASE_PARKED, publish
from deepthin.engine.model import random_model
from deepthin.engine.shape import Shape


def test_a_worker_that_lags_behind_never_sees_the_next_jobs_settings() -> None:
    """Thread 0 may set up the next job while a worker has yet to leave the last barrier of this one.

    Here the worker has settings of its own, which change in mid-job as they would under a worker that lost its core.
    """
    slow = random_model(Shape.parse("L=6,d=256,heads=4,ff=1024,vocab=64"))  # its job lasts long enough to be caught midway
    with Decoder(slow, threads=2, context=64) as decoder:
        runner = decoder._runner
        at = next(index for index, array in enumerate(runner.arrays) if array is runner.ints)
        own = runner.ints.copy()
        ours = (*runner.arrays[:at], own, *runner.arrays[at + 1 :])
        for ints in (runner.ints, own):
            ints[k.NUM_TOKENS], ints[k.POSITION], ints[k.LOGITS] = 32, 0, k.LOGITS_NONE
        before = int(runner.ctl[PHASE])
        first = threading.Thread(target=k.work, args=(0, *ours))
        first.start()
        while runner.ctl[PHASE] == before:
            time.sleep(0)
        runner.ints[k.LOGITS] = k.LOGITS_LAST
        assert first.is_alive(), "the job ended before its settings could change; make it slower"
        first.join()
        time.sleep(0.05)
        waiting = int(runner.ctl[ARRIVED])
        if waiting:
            runner.ctl[ARRIVED] = 0
            publish(runner.ctl, PHASE, PHASE_PARKED, np.int32(runner.ctl[PHASE] + 1))  # or closing hangs
        assert waiting == 0, "the worker waits at a barrier that thread 0 never reaches"
