"""The measured profile that scripts without a stopwatch take their times from; kept beside the results of its machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runs import RESULTS

from deepthin.engine.errors import UsageError
from deepthin.profiles.machine import machine_name
from deepthin.profiles.profile import Profile

PROFILE = "search-profile.json"
CONTEXT = 512  # cached tokens that times are taken at


def kept_profile(results: Path = RESULTS) -> Path:
    """The stored profile.

    Raises:
        UsageError: there is none, or more than one.
    """
    found = sorted(results.glob(f"*/{PROFILE}"))
    if len(found) != 1:
        raise UsageError(f"{results}: {len(found)} files are called {PROFILE}, one is needed; name a profile with --profile")
    return found[0]


def keep(profile: Profile, results: Path = RESULTS) -> Path:
    """Store what predicting needs of ``profile``, below the results of its machine.

    That is the models of its first runtime at its most threads, without raw samples.
    """
    path = results / machine_name(profile.machine) / PROFILE
    runtime = profile.runtimes[0]
    wanted = (runtime, max(profile.threads_of(runtime)))
    models = tuple(one for one in profile.models if (one.conditions.runtime.name, one.conditions.threads) == wanted)
    replace(profile, models=models, probes=(), bandwidth_samples=(), findings=(), sustained=None).save(path)
    return path
