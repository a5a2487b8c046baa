"""What a token costs on a profile's device, predicted: stands in for ``block_costs.BlockCosts`` where nothing can be timed."""

from __future__ import annotations

import contextlib
import hashlib
import json

from deepthin.engine.accounting import bytes_read_per_token
from deepthin.engine.errors import UnsupportedError, UsageError
from deepthin.engine.formats import scheme_named
from deepthin.engine.shape import Shape
from deepthin.profiles.latency.model import LatencyModel
from deepthin.profiles.latency.runtimes import runtime_named
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload
from deepthin.profiles.profile import Profile
from deepthin.profiles.schema import Predicted, TokenCost

PREDICTED_FLAG, EXTRAPOLATED_FLAG = "predicted", "extrapolated"


class PredictedCosts:
    """Pass ``costs.measure`` where a measuring callable is wanted.

    Args:
        profile: of the device.
        runtime: one of its runtimes; the first when None.
        threads: one of its thread counts; the most when None.
        context: cached tokens.

    Raises:
        UsageError: the profile has no such runtime or thread count.
    """

    def __init__(self, profile: Profile, context: int, *, runtime: str | None = None, threads: int | None = None) -> None:
        self.profile, self.context = profile, context
        self.runtime = runtime or next(iter(profile.runtimes), "")
        self.model = profile.model(self.runtime, threads, DECODE)
        self.threads = self.model.conditions.threads
        self.prompts: LatencyModel | None = None
        with contextlib.suppress(UsageError):  # where no prompts were measured
            self.prompts = profile.model(self.runtime, self.threads, PREFILL)

    @property
    def identity(self) -> str:
        """Which prediction this is: device, basis, runtime, threads, and a digest of the model."""
        models = [model.to_json() for model in (self.model, self.prompts) if model is not None]
        text = json.dumps([*models, self.profile.curve.to_json()], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        profile = self.profile
        return f"{profile.name} ({profile.basis}), {self.runtime}, {self.threads} threads, {digest}"

    def measure(self, shape: Shape, quant: str) -> TokenCost:
        """The predicted cost of ``shape`` stored as ``quant``; parts share the relative interval of the whole.

        Raises:
            UnsupportedError: the runtime does not run the format.
        """
        scheme, runs = scheme_named(quant), runtime_named(self.runtime).formats
        heads = (*runs, "f16", "bf16")  # a float table is a float table, however wide the runtime makes it
        if scheme.body.name not in runs or scheme.head.name not in heads:
            raise UnsupportedError(f"{self.runtime} does not run {quant} as it is stored")
        prediction = self.model.predict(Workload(shape, quant, DECODE, 1, self.context))
        total, terms = prediction.seconds, prediction.terms

        def part(seconds: float) -> Predicted:
            factor = seconds / total.value
            return total.scaled(factor, "s")

        blocks = terms["weights"] + terms["layers"] + terms["attention"]
        return TokenCost(
            seconds_per_token=total,
            block_s=part(blocks / shape.num_executed_layers),
            head_s=part(terms["head"]),
            embed_s=part(0.0),
            overhead_s=part(terms["overhead"]),
            bytes_per_token=bytes_read_per_token(shape, quant),
            threads=self.threads,
            context=self.context,
            quant=quant,
            measured_now=False,
            flags=(PREDICTED_FLAG, *((EXTRAPOLATED_FLAG,) if prediction.extrapolated else ())),
        )

    def first_token(self, shape: Shape, quant: str, prompt: int) -> Predicted | None:
        """Seconds until the first token after a prompt of so many tokens; None where the profile has no prompts.

        Raises:
            UsageError: the prompt is empty.
        """
        work = Workload(shape, quant, PREFILL, prompt, 0)
        return None if self.prompts is None else self.prompts.predict(work).seconds
