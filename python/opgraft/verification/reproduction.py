"""Makes a failing sample again, from its id."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.registry import Override
from opgraft.verification import sources
from opgraft.verification.checks import CHECKS
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    Subject,
    describe_call,
)
from opgraft.verification.reference import native
from opgraft.verification.runner import device_of
from opgraft.verification.samples import Sample, parse
from opgraft.verification.single_override import only


class Reproduction:
    """A sample of an override: look at its arguments, run it, check it."""

    def __init__(self, override: Override, sample: Sample, k: float) -> None:
        self.override = override
        self.sample = sample
        self._k = k

    @property
    def call(self) -> Call:
        """The call, with new tensors each time."""
        return self.sample.call()

    @property
    def args(self) -> tuple[Any, ...]:
        return self.call.args

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.call.kwargs

    def run(self) -> Any:
        """What the op returns with the override on."""
        call = self.call
        with torch.no_grad(), only(self.override):
            return call.op.overload(*call.args, **call.kwargs)

    def native(self) -> Any:
        """What the native kernel returns: a tuple, one value for each output."""
        with torch.no_grad():
            return native(self.call).outputs

    def check(self, name: str) -> None:
        """Run one check of a verification.

        Raises:
            AssertionError: it fails; the message is the report's.
        """
        subject = Subject(
            self.override, device_of(self.override.dispatch_key), self._k, self.sample.seed
        )
        try:
            with only(self.override):
                CHECKS[name](Observation(subject, self.sample))
        except NotApplicable:
            return
        except Failed as failed:
            raise AssertionError(f"{name}: {failed}") from failed

    def __repr__(self) -> str:
        return f"<sample {self.sample.id!r}: {describe_call(self.call)}>"


def reproduce(override: Override, sample_id: str, *, seed: int, k: float) -> Reproduction:
    """The sample of that id."""
    base_id, edits, layouts = parse(sample_id)
    base = sources.find(override, base_id, device_of(override.dispatch_key), seed)
    return Reproduction(override, Sample(base, edits, layouts, seed), k)
