"""What OpInfo's samples call, and the random numbers that they are made of."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from opgraft.ops.schema import resolve
from opgraft.verification import opinfo, samples

CPU = torch.device("cpu")


def info_named(name: str) -> Any:
    return next(each for each in opinfo.all_infos() if each.name == name)


@pytest.mark.parametrize("differentiate", [False, True])
@pytest.mark.parametrize("function", ["nn.functional.layer_norm", "native_layer_norm", "neg"])
@pytest.mark.parametrize("op", ["aten::native_layer_norm", "aten::native_layer_norm_backward"])
def test_what_is_called_is_what_calls_are_recorded_of(
    op: str, function: str, differentiate: bool
) -> None:
    how: Any = (info_named(function), torch.float32, CPU, 0)
    recorded = list(opinfo.op_calls(resolve(op), *how, differentiate=differentiate, limit=2))
    called = opinfo.called(*how, differentiate=differentiate)
    assert (resolve(op).overload in called) == bool(recorded)


def test_an_opinfo_is_run_once_to_find_who_calls_any_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opinfo, "_called", {})
    made, function_calls = [], opinfo.function_calls
    monkeypatch.setattr(
        opinfo, "function_calls", lambda *a, **k: (made.append(a), function_calls(*a, **k))[1]
    )
    for _ in range(2):
        opinfo.called(info_named("neg"), torch.float32, CPU, 0, differentiate=False)
    assert len(made) == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="its generators are seeded, too")
def test_no_stack_is_written_down_to_seed_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = torch.rand(4)
    monkeypatch.setattr(traceback, "format_stack", lambda: pytest.fail("it takes a millisecond"))
    with opinfo.seeded(3):
        assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("values", [[], [-3.5, 2.0], [0.0, float("inf")], [float("nan")]], ids=str)
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn],
    ids=str,
)
def test_the_range_of_values_is_that_of_the_finite_ones(
    dtype: torch.dtype, values: list[float]
) -> None:
    tensor = torch.tensor(values).to(dtype)
    finite = [each for each in tensor.double().tolist() if abs(each) < float("inf")]
    expected = (min(finite), max(finite)) if finite else (-1.0, 1.0)
    assert samples._range(tensor) == expected
