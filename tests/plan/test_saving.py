"""Plans that are recorded without memory, written as JSON, and loaded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from opgraft.core import loader
from opgraft.ops.schema import Call, resolve
from opgraft.ready.dry_recording import DryRecording

CPU = torch.device("cpu")
Impl = Callable[[torch.Tensor], torch.Tensor]
NEG = resolve("aten::neg")


def recorded(impl: Impl, x: torch.Tensor) -> dict[str, Any]:
    """What is saved of an impl of `aten::neg` that runs on a tensor without memory."""
    core = loader.in_use()
    assert core is not None
    mode = FakeTensorMode()
    call = Call(NEG, (mode.from_tensor(x),))
    recording = DryRecording(core, call, CPU)
    with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
        with mode, recording.watching():
            result = impl(call.values[0])
        saved = recording.finish(result)
    assert saved is not None, recording.refusal
    return json.loads(json.dumps(saved))


def loaded(saved: dict[str, Any]) -> Any:
    core = loader.in_use()
    assert core is not None
    return core.load_plan("aten::neg", "", saved, [], CPU, None)


X = torch.randn(4, 6)
INFINITY = float("inf")


@pytest.mark.parametrize(
    "impl",
    [
        lambda x: x * -1.0,
        lambda x: x * -1,
        lambda x: (x * 1j * 1j).real.contiguous(),
        lambda x: torch.full_like(x, -INFINITY).clamp(-INFINITY, 0.0) + x,
        lambda x: torch.full(x.shape, float("nan")).nan_to_num(0.0) - x,
        lambda x: torch.zeros_like(x, memory_format=torch.preserve_format) - x,
        lambda x: torch.zeros(x.shape, dtype=torch.float64, device="cpu", layout=torch.strided) - x,
        lambda x: torch.div(x, -1.0, rounding_mode=None),
        lambda x: torch._foreach_mul([x, x], [1.0, -1.0])[1],
        lambda x: torch.cat([x, -1.0 * x])[x.shape[0] :].clone(),
        lambda x: torch.sub(torch.zeros_like(x), x, alpha=1),
    ],
)
def test_numbers_survive_json(impl: Impl) -> None:
    x = torch.randn(4, 6)
    saved = recorded(impl, x)
    # What is saved of the plan that was loaded is what it was loaded from.
    core = loader.in_use()
    assert core is not None
    again = core.saved_plan(loaded(saved))
    assert json.dumps(again, sort_keys=True) == json.dumps(saved, sort_keys=True)


def _damaged(value: Any, rng: random.Random) -> Any:
    """The same with one value changed."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return value | {key: _damaged(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        return [*value[:index], _damaged(value[index], rng), *value[index + 1 :]]
    return rng.choice(
        [None, -1, 2**31, 2**63, 2**70, -(2**63), 0.5, "", "op", "view", [], {}, [[]]]
    )


@pytest.mark.parametrize("seed", range(100))
def test_what_is_no_plan_is_an_error(seed: int) -> None:
    rng = random.Random(seed)
    saved = recorded(lambda x: torch.cat([x * 2.0, x[:1].t().contiguous().t()])[:4].clone(), X)
    try:
        loaded(_damaged(saved, rng))
    except Exception as error:
        assert not isinstance(error, (SystemError, MemoryError)), error
