"""Impls and conditions run where native kernels do: below `__torch_function__`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft


class Plain(torch.Tensor):
    """With torch's own `__torch_function__`, which makes results of this type."""


class Scaled(torch.Tensor):
    """Gives a function a meaning of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 100 if func is torch.sigmoid else result


def silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    assert not torch._C._len_torch_function_stack()
    sigmoid = torch.sigmoid(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    # On the CPU, as a kernel there makes it: no device is given.
    exponentials = torch.empty(x.shape, dtype=x.dtype)
    exponentials.copy_(x - x.amax(dim, keepdim=True)).exp_()
    return exponentials / exponentials.sum(dim, keepdim=True)


def override(op: str, impl: Any, **options: Any) -> opgraft.Override:
    options.setdefault("unconditional_override", "cond" not in options)
    return opgraft.register_op_override("aten", op, "CPU", impl, **options)


def gradient(kind: type[torch.Tensor]) -> tuple[torch.Tensor, str]:
    """That of a leaf of a type, and the type of the gradient that its hook sees."""
    x = torch.linspace(-1, 1, 6).as_subclass(kind).requires_grad_()
    seen: list[str] = []
    x.register_hook(lambda grad: seen.append(type(grad).__name__))
    F.silu(x).as_subclass(torch.Tensor).sum().backward()
    assert x.grad is not None
    return x.grad.as_subclass(torch.Tensor), seen[0]


# Of the first hits, which Python compares with native, and of those after them.
@pytest.mark.parametrize("hits_before", [0, 3])
@pytest.mark.parametrize("kind", [Plain, Scaled])
def test_a_subclass_does_not_change_what_an_impl_computes(
    kind: type[torch.Tensor], hits_before: int
) -> None:
    expected, seen = gradient(kind)
    ours = override("silu_backward", silu_backward)
    for _ in range(hits_before):
        gradient(torch.Tensor)
    found, seen_by_ours = gradient(kind)
    torch.testing.assert_close(found, expected)
    assert (seen_by_ours, ours.hits) == (seen, hits_before + 1)


@pytest.mark.parametrize("hits_before", [0, 3])
def test_a_mode_does_not_change_what_an_impl_computes(hits_before: int) -> None:
    ours = override("_softmax", softmax)
    scripted = torch.jit.script(_softmax_of)
    x = torch.randn(2, 3)
    for _ in range(hits_before):
        scripted(x)
    with torch.device("meta"):
        result = scripted(x)
        assert torch.empty(1).device.type == "meta"
    torch.testing.assert_close(result, opgraft.native("aten::_softmax")(x, -1, False))
    assert ours.hits == hits_before + 1


def _softmax_of(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


@pytest.mark.parametrize("hits_before", [0, 3])
def test_a_mode_that_an_impl_enters_holds_inside_it(hits_before: int) -> None:
    devices: list[str] = []

    def impl(x: torch.Tensor) -> torch.Tensor:
        with torch.device("meta"):
            devices.append(torch.empty(1).device.type)
        return x * 2

    override("neg", impl)
    for _ in range(hits_before + 1):
        torch.neg(torch.ones(2))
    assert set(devices) == {"meta"}


def test_a_condition_sees_no_mode_and_no_subclass() -> None:
    types: list[type] = []

    def cond(grad: torch.Tensor, x: torch.Tensor) -> bool:
        types.append(type(x * 2))
        return not torch._C._len_torch_function_stack()

    ours = override("silu_backward", silu_backward, cond=cond)
    gradient(Plain)
    assert (types, ours.hits) == ([torch.Tensor], 1)


def test_a_mode_is_there_again_after_an_impl_raised() -> None:
    def impl(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no kernel")

    override("neg", impl)
    scripted = torch.jit.script(_negative_of)
    with torch.device("meta"):
        with pytest.raises(Exception, match="no kernel"):
            scripted(torch.ones(2, device="cpu"))
        assert torch.empty(1).device.type == "meta"


def _negative_of(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(x)


def test_a_condition_that_calls_its_op_gets_the_native_kernel() -> None:
    ours = override("relu", lambda x: x.clamp(min=0), cond=lambda x: bool(x.relu().any()))
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(torch.relu(x), torch.tensor([0.0, 2.0]))
    torch.relu(-x.abs())
    assert (ours.hits, ours.misses) == (1, 1)
    assert "returned false" in str(opgraft.explain("aten::relu", -x.abs()))
