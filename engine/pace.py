"""Fewer threads for the next tokens when another process takes a core, and all of them again when it is gone.

Threads that share each product in fixed parts wait for the slowest, so a thread without a core costs far more than it adds.
Sums do not depend on the number of threads, so it may change from token to token.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STRIKES = 2.0  # a lost core counts 1, a slow token 1/2; a good token takes a fifth of them back
SLOW = 1.6  # times the usual token
TRIAL_TOKENS = 3  # good ones in a row before all threads are back
SETTLING_TOKENS = 4  # after which fewer threads are compared with more
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # before all threads are tried again; doubled by each failure
CALM_S = 1.0  # with all threads and nothing lost; then the pause starts anew


class Pace:
    """How many of ``most`` threads the next job should use: ``active``, kept up to date by :meth:`record`.

    Args:
        most: threads there are.
        clock: seconds, monotonic.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start with all threads."""
        self.most = self.active = most
        self._clock = clock
        self._fallback = most  # what is used while ``active`` is on trial
        self._pause_s = FIRST_PAUSE_S
        self._again_at = self._hold_until = 0.0  # when all threads are tried again; until when none is dropped
        self._strikes = 0.0
        self._tokens = 0  # since the number of threads changed
        self._usual_s = self._mean_s = 0.0
        self._since, self._spent_s = 0, 0.0  # tokens and seconds since the trouble began
        self._before_s = 0.0  # mean with the number of threads used before, to compare with
        self._calm_since = clock()

    def record(self, seconds: float | None, *, lost: bool) -> None:
        """Take in a job that ran on ``active`` threads.

        Args:
            seconds: of one token; None for a job whose time says nothing.
            lost: a thread was seen to lose its core.
        """
        if self.most == 1:
            return
        now = self._clock()
        bad = lost
        if seconds is not None:
            self._tokens += 1
            bad = bad or 0 < self._usual_s * SLOW < seconds
            # the least lately seen; it may rise slowly, as tokens do with the depth
            self._usual_s = min(seconds, self._usual_s * 1.01) if self._usual_s else seconds
            self._mean_s += (seconds - self._mean_s) * max(0.25, 1 / self._tokens)
            if bad and self._strikes < 0.5:
                self._since, self._spent_s = 0, 0.0
            self._since, self._spent_s = self._since + 1, self._spent_s + seconds
        self._strikes = self._strikes + (1.0 if lost else 0.5) if bad else 0.8 * self._strikes
        if self._fallback < self.active:
            self._on_trial(now, seconds, bad)
        elif self.active < self.most and self._tokens == SETTLING_TOKENS and self._mean_s > self._before_s > 0:
            self._change(self.most, now)  # fewer are no better: whoever took the core is everywhere
            self._hold_until = self._again_at
        elif self._strikes >= STRIKES and now >= self._hold_until and self.active > 1:
            self._before_s = self._spent_s / max(1, self._since)
            self._change(self.active - max(1, self.active // 4), now)
        elif self.active < self.most and now >= self._again_at:
            self._before_s = self._mean_s
            self._change(self.most, now, self.active)
        elif now - self._calm_since > CALM_S:
            self._pause_s = FIRST_PAUSE_S
        if bad or self.active < self.most:
            self._calm_since = now

    def _on_trial(self, now: float, seconds: float | None, bad: bool) -> None:
        """All threads are being tried against ``_fallback``, whose mean is ``_before_s``."""
        if bad or (seconds is not None and 0 < self._before_s < seconds):
            self._before_s = self._mean_s
            self._change(self._fallback, now)
        elif self._tokens >= TRIAL_TOKENS or seconds is None:
            self._fallback, self._calm_since = self.active, now

    def _change(self, active: int, now: float, fallback: int | None = None) -> None:
        """Use ``active`` threads; more than ``fallback`` are on trial."""
        trying = fallback is not None and fallback < active
        self.active, self._fallback = active, active if fallback is None else fallback
        if not trying:
            self._again_at = now + self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._strikes, self._tokens, self._usual_s, self._mean_s = 0.0, 0, 0.0, 0.0
