"""Outputs whose values nobody may rely on: whoever compares outputs leaves out the same ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

import opgraft
from opgraft.plan.trial import Trial
from opgraft.router import outputs

#: Returned beside a result; in each what the kernel is free to choose.
FREE = sorted(outputs.UNSPECIFIED)
#: The same, and one name that promises its values.
NAMES = [*FREE, "logsumexp"]


@functools.cache
def library() -> torch.library.Library:
    """Once in a process: workers take tests over from one another, so one may come to this module
    more than once, and an op that is defined anew has no router."""
    made = torch.library.Library("exempt", "DEF")
    for name in NAMES:
        made.define(f"with_{name}(Tensor x) -> (Tensor out, Tensor {name})")
        made.impl(f"with_{name}", lambda x: (x * 2, torch.zeros(3)), "CPU")
        made.impl(f"with_{name}", lambda x: (x * 2, x.new_empty(3)), "Meta")
    return made


@pytest.fixture
def override(request: pytest.FixtureRequest) -> Iterator[opgraft.Override]:
    library()
    registered = opgraft.register_op_override(
        "exempt",
        f"with_{request.param}",
        "CPU",
        lambda x: (x * 2, torch.ones(3)),
        unconditional_override=True,
        samples=lambda device: [(torch.rand(8, device=device),)],
    )
    yield registered
    registered.remove()


def verified(override: opgraft.Override) -> bool:
    report = opgraft.verify(override, opinfo=False, checks=["hit", "values"], max_samples=2)
    assert report.overrides[0].hits > 0
    return report.ok


def shadowed(override: opgraft.Override) -> bool:
    with opgraft.shadow(rate=1.0):
        getattr(torch.ops.exempt, override.op.partition("::")[2])(torch.rand(8))
    assert override.shadowed == 1
    return override.mismatches == 0


def replayed(override: opgraft.Override) -> bool:
    call = override.operator.bind((torch.rand(8),), {})
    mine, native = (torch.ones(8), torch.ones(3)), (torch.ones(8), torch.zeros(3))
    return not Trial(None, None, call, None)._difference(mine, native, call, call)


@pytest.mark.parametrize("compares", [verified, shadowed, replayed])
@pytest.mark.parametrize("override", FREE, indirect=True)
def test_nobody_compares_values_that_no_op_promises(compares, override) -> None:  # type: ignore
    assert compares(override)


@pytest.mark.parametrize("compares", [verified, shadowed, replayed])
@pytest.mark.parametrize("override", ["logsumexp"], indirect=True)
def test_everybody_compares_the_others(compares, override) -> None:  # type: ignore
    assert not compares(override)
