"""Impls of composite ops that are traced into graphs of training: `autograd="impl"` with
`compile="traceable"`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

import opgraft
from opgraft import ContractError, when
from tests.python_router import run_again, where_the_core_routes

pytestmark = pytest.mark.filterwarnings("ignore")


class Impl:
    """RMSNorm, by ops that autograd differentiates."""

    def __init__(self, result: Any = lambda normed: normed) -> None:
        self.traces = 0
        self._result = result

    def __call__(
        self, input: torch.Tensor, normalized_shape: Any, weight: Any, eps: float | None
    ) -> torch.Tensor:
        self.traces += opgraft.triton_utils.is_traced()
        return self._result(input * (input.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x * 2, (x.shape[-1],), eps=1e-6).sin()


def register(impl: Any, cond: Any = None, **options: Any) -> opgraft.Override:
    options = {"autograd": "impl", "compile": "traceable", "name": "rms_norm", **options}
    return opgraft.register_op_override(
        "aten", "rms_norm", "CPU", impl, cond=cond, unconditional_override=cond is None, **options
    )


def compiled(**options: Any) -> Any:
    return torch.compile(rms_norm, backend="aot_eager", fullgraph=True, **options)


def trained(function: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = function(x)
    return out.detach(), torch.autograd.grad(out, x, torch.ones_like(out))[0]


def assert_as_stock(found: Any, x: torch.Tensor) -> None:
    with opgraft.disabled():
        torch.testing.assert_close(found, trained(rms_norm, x))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_graph_has_the_impl_and_its_derivative(dynamic: bool) -> None:
    impl = Impl()
    register(impl)
    function = compiled(dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        assert_as_stock(trained(function, x), x)
    assert impl.traces > 0


def test_a_call_that_the_condition_declines_is_left_to_the_compiler() -> None:
    impl = Impl()
    register(impl, when.size("input", 0) >= 8)
    x = torch.randn(4, 8)
    assert_as_stock(trained(compiled(), x), x)
    assert impl.traces == 0


def test_a_condition_on_sizes_is_a_guard() -> None:
    impl = Impl()
    register(impl, when.size("input", 0) >= 8)
    function, traces = compiled(dynamic=True), []
    for rows in (4, 9, 10):
        x = torch.randn(rows, 8)
        assert_as_stock(trained(function, x), x)
        traces.append(impl.traces)
    assert traces[0] == 0 and 0 < traces[1] == traces[2]


@pytest.mark.parametrize("policy", ["auto", "inductor", "opaque"])
def test_other_policies_leave_the_call_to_the_compiler(policy: Any) -> None:
    impl = Impl()
    register(impl, compile=policy)
    x = torch.randn(4, 8)
    assert_as_stock(trained(compiled(), x), x)
    assert impl.traces == 0


def test_the_first_that_takes_a_call_decides() -> None:
    first, second = Impl(), Impl()
    register(second)
    register(first, compile="inductor", name="first", priority=1)
    x = torch.randn(4, 8)
    assert_as_stock(trained(compiled(), x), x)
    assert first.traces == second.traces == 0


def test_one_without_a_derivative_is_passed_by() -> None:
    passed_by, impl = Impl(), Impl()
    register(impl)
    register(passed_by, autograd=None, name="passed by", priority=1)
    x = torch.randn(4, 8)
    assert_as_stock(trained(compiled(), x), x)
    assert passed_by.traces == 0 < impl.traces


def test_one_with_functions_of_its_own_is_differentiated_by_them() -> None:
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return torch.full_like(ctx.saved_tensors[0], 7), None, None, None

    impl = Impl()
    register(impl)
    register(Impl(), autograd=(setup_context, backward), name="pair", priority=1)
    x = torch.randn(4, 8)
    _, gradient = trained(compiled(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 14))
    assert impl.traces == 0


def by_itself(x: torch.Tensor, shape: Any, weight: Any, eps: Any) -> torch.Tensor:
    return F.rms_norm(x, shape, weight, eps)


def natively(x: torch.Tensor, shape: Any, weight: Any, eps: Any) -> torch.Tensor:
    return opgraft.native("aten::rms_norm")(x, shape, weight, eps)


@pytest.mark.parametrize("impl", [by_itself, natively])
def test_the_op_inside_an_impl_is_native(impl: Any) -> None:
    register(impl)
    x = torch.randn(4, 8)
    assert_as_stock(trained(compiled(), x), x)


def test_a_result_that_native_would_not_return_is_an_error() -> None:
    register(Impl(lambda normed: normed.t()))
    with pytest.raises(Exception, match=r"rms_norm.* traced, returned output 0") as raised:
        trained(compiled(), torch.randn(8, 8))
    assert isinstance(raised.value, ContractError) or "ContractError" in str(raised.value)


def test_an_impl_that_fails_after_it_wrote_to_an_argument_is_an_error() -> None:
    register(lambda input, *_: input.mul_(2).item())
    with pytest.raises(Exception, match=r"rms_norm.* traced, wrote to an argument"):
        trained(compiled(), torch.randn(4, 8))


def test_a_result_that_has_lost_its_derivative_is_an_error() -> None:
    register(Impl(torch.Tensor.detach))
    with pytest.raises(Exception, match=r"rms_norm.* traced, returned output 0 without a deriv"):
        trained(compiled(), torch.randn(4, 8))


def test_a_result_that_has_none_natively_needs_none() -> None:
    def max_pool(input: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(input)
        pairs = input.unflatten(-1, (-1, 2))
        largest = pairs.argmax(-1, keepdim=True)
        places = torch.arange(pairs.shape[-2]) * 2 + largest.squeeze(-1)
        return pairs.gather(-1, largest).squeeze(-1), places

    def pooled(x: torch.Tensor) -> torch.Tensor:
        values, indices = F.max_pool1d(x[None], 2, return_indices=True)
        return values + indices

    calls: list[torch.Tensor] = []
    opgraft.register_op_override(
        *("aten", "max_pool1d_with_indices", "CPU", max_pool),
        **{"unconditional_override": True, "autograd": "impl", "compile": "traceable"},
    )
    x = torch.randn(4, 8)
    found = trained(torch.compile(pooled, backend="aot_eager", fullgraph=True), x)
    assert calls
    with opgraft.disabled():
        torch.testing.assert_close(found, trained(pooled, x))


def by_functorch(function: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(torch.func.grad(lambda x: function(x).sum()), backend="aot_eager")(x)


def by_a_subclass(function: Any, x: torch.Tensor) -> torch.Tensor:
    x = TwoTensor(x, x.clone()).requires_grad_()
    torch.compile(function, backend="aot_eager", fullgraph=True)(x).sum().backward()
    return x.grad.a


@pytest.mark.parametrize("gradient_of", [by_functorch, by_a_subclass])
def test_who_must_see_the_pieces_sees_native_s(
    gradient_of: Any, decisions: pytest.LogCaptureFixture
) -> None:
    impl = Impl()
    register(impl)
    x = torch.randn(4, 8)
    found = gradient_of(rms_norm, x)
    with opgraft.disabled():
        torch.testing.assert_close(found, trained(rms_norm, x)[1])
    assert impl.traces == 0 and "cannot be traced" not in decisions.text


def test_an_impl_that_no_graph_can_have_is_left_to_the_compiler(
    decisions: pytest.LogCaptureFixture,
) -> None:
    impl = Impl(lambda normed: normed * float(normed.sum()))
    register(impl)
    x = torch.randn(4, 8)
    assert_as_stock(trained(compiled(), x), x)
    assert impl.traces > 0
    assert "cannot be traced, so the op is left to the compiler" in decisions.text


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_tensors_may_be_in_a_list(dynamic: bool) -> None:
    def column_stack(tensors: list[torch.Tensor]) -> torch.Tensor:
        calls.append(len(tensors))
        return torch.cat([each[:, None] for each in tensors], 1)

    def stacked(x: torch.Tensor) -> torch.Tensor:
        return torch.column_stack([x[0] * 2, x[1].sin()])

    calls: list[int] = []
    opgraft.register_op_override(
        *("aten", "column_stack", "CPU", column_stack),
        **{"unconditional_override": True, "autograd": "impl", "compile": "traceable"},
    )
    x = torch.randn(2, 8)
    found = trained(torch.compile(stacked, backend="aot_eager", dynamic=dynamic), x)
    assert calls
    with opgraft.disabled():
        torch.testing.assert_close(found, trained(stacked, x))


def test_in_eager_mode_its_impl_is_differentiated() -> None:
    impl = Impl()
    override = register(impl)
    x = torch.randn(4, 8)
    assert_as_stock(trained(rms_norm, x), x)
    assert override.hits == 1 and impl.traces == 0


def test_a_graph_of_inference_has_the_impl_too() -> None:
    impl = Impl()
    register(impl)
    x = torch.randn(4, 8)
    found = compiled()(x)
    assert impl.traces > 0
    with opgraft.disabled():
        torch.testing.assert_close(found, rms_norm(x))


@where_the_core_routes
def test_the_python_router_does_the_same() -> None:
    run_again(__file__)
