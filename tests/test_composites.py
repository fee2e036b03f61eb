"""Composite ops: what no override takes is as without us, and what one takes is kept book of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import when
from opgraft.errors import ContractError, RegistrationError
from opgraft.ops.schema import resolve
from tests.composites import composites
from tests.modes import RecordOps
from tests.python_router import run_again, where_the_core_routes

ROOT = Path(__file__).parents[1]
IN_PYTHON = os.environ.get("OPGRAFT_ROUTER") == "python"


def override(op: str, impl: Callable[..., Any], **terms: Any) -> opgraft.Override:
    terms = terms or {"unconditional_override": True}
    return opgraft.register_op_override("aten", op, "CPU", impl, **terms)


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("its condition never holds")


# ------------------------------------------------------------------ misses

#: Which part of PyTorch's own samples, in which ways; the first with the compiled core. All of it:
#: `python -m tests.composites 0 1`.
PARTS = {
    "all, as it comes": ("", "0", "1", "plain"),
    "some, in every way": ("", "3", "24"),
    "some, in every way, in Python": ("python", "11", "48"),
}


@pytest.mark.longest
@pytest.mark.skipif(IN_PYTHON, reason="these are programs of their own")
@pytest.mark.parametrize("part", PARTS)
def test_a_composite_op_that_no_override_takes_is_as_without_us(part: str) -> None:
    router, *arguments = PARTS[part]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.composites", *arguments],
        cwd=ROOT,
        env=os.environ | {"OPGRAFT_ROUTER": router},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["differences"] == []
    assert (found["hits"], found["steady"] > 0.9 * found["runs"]) == (0, True)
    if "plain" in arguments:
        reached = {op.name for op in composites() if op.writes_or_aliases} & set(found["reached"])
        assert len(reached) >= 210, sorted(reached)


def test_a_dispatch_mode_sees_what_a_missed_composite_op_is_made_of() -> None:
    linear = override("linear", never, cond=when.ndim("input") == 9)
    x, weight, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
    with RecordOps() as seen:
        F.linear(x, weight, bias)
    assert seen.ops == ["aten.t.default", "aten.addmm.default"]
    assert linear.misses == 1


def test_a_view_that_a_missed_composite_op_made_is_tracked() -> None:
    reshape = override("reshape", never, cond=when.ndim("self") == 9)
    buffer, w = torch.zeros(2, 2), torch.ones(4, requires_grad=True)
    buffer.reshape(-1).add_(w)
    (buffer * 2).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [2, 2, 2, 2]
    assert reshape.misses == 1


# ------------------------------------------------------------------ hits


def write_to_a_saved_tensor(write: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    z = y.sin()
    write(y.detach())
    z.sum().backward()


def _square(self: torch.Tensor) -> torch.Tensor:
    return self.mul_(self)


def _square_by_a_kernel(self: torch.Tensor) -> torch.Tensor:
    self.numpy()[...] **= 2  # as a kernel does: torch sees nothing of it
    return self


@pytest.mark.parametrize("impl", [_square, _square_by_a_kernel])
def test_what_an_impl_writes_to_counts_as_written(impl: Callable[..., Any]) -> None:
    square = override("square_", impl)
    x = torch.full((3,), 2.0)
    for count in (1, 2, 3):
        x.square_()
        assert x._version == count
    assert (square.hits, x[0].item()) == (3, 256.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        write_to_a_saved_tensor(torch.square_)
    assert square.hits == 4


def test_what_an_impl_writes_to_in_inference_mode() -> None:
    square = override("square_", _square)
    outside = torch.full((3,), 2.0)
    with torch.inference_mode():
        outside.square_()
        assert torch.full((3,), 2.0).square_().is_inference()
    assert outside._version == 1
    assert square.hits == 2


RESHAPES: dict[str, Callable[..., Any]] = {
    "by a view": lambda self, shape: self.view(shape),
    "by itself": lambda self, shape: torch.reshape(self, shape),
    "by native": lambda self, shape: opgraft.native("aten::reshape")(self, shape),
    "by as_strided": lambda self, shape: self.as_strided(self.view(shape).shape, (1,)),
}


@pytest.mark.parametrize("how", RESHAPES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_view_that_an_impl_returns_is_tracked(how: str, grad: bool) -> None:
    reshape = override("reshape", RESHAPES[how])
    for _ in range(3):
        buffer, w = torch.zeros(2, 2), torch.ones(4, requires_grad=True)
        with torch.set_grad_enabled(grad):
            view = buffer.reshape(-1)
        assert (view._is_view(), view._base is buffer, view.shape) == (True, True, (4,))
        with torch.no_grad():
            view.add_(1)
        assert buffer._version == 1
        if grad:
            view.add_(w)
            (buffer * 2).sum().backward()
            assert w.grad is not None
            assert w.grad.tolist() == [2, 2, 2, 2]
    assert reshape.hits == 3


def test_views_that_an_impl_returns_in_a_list_are_tracked() -> None:
    chunk = override("chunk", lambda self, chunks, dim: list(self.split(1, dim)))
    buffer = torch.zeros(3, 2)
    for _ in range(3):
        assert all(each._base is buffer for each in torch.chunk(buffer, 3))
    assert chunk.hits == 3


def test_an_impl_that_returns_its_argument_returns_the_same_tensor() -> None:
    contiguous = override("contiguous", lambda self, *, memory_format: self)
    x = torch.ones(3)
    assert torch.ops.aten.contiguous.default(x) is x
    assert contiguous.hits == 1
    assert not x._is_view()


def test_memory_of_an_argument_as_another_dtype_is_refused() -> None:
    override("view_as", lambda self, other: self.view(torch.int32).view(other.shape))
    with pytest.raises((ContractError, RuntimeError), match="dtype"):
        torch.ones(2, 2).view_as(torch.ones(4))


def test_an_impl_runs_below_autograd_wherever_the_call_comes_from() -> None:
    excluded: list[tuple[bool, ...]] = []

    def impl(self: torch.Tensor) -> torch.Tensor:
        off = torch._C._dispatch_tls_is_dispatch_key_excluded
        excluded.append((off("AutogradFunctionality"), off("ADInplaceOrView")))
        return self * self

    square = override("square", impl)
    x = torch.ones(3)
    for _ in range(3):
        torch.square(x)
    with torch.inference_mode():
        torch.square(x)
    assert excluded == [(True, True)] * 4
    assert square.hits == 4


def test_a_form_that_decides_for_itself_gets_keys_below_autograd() -> None:
    keys: list[bool] = []

    def impl(keyset: torch._C.DispatchKeySet, self: torch.Tensor) -> Any:
        keys.append(keyset.has(torch._C.DispatchKey.AutogradCPU))
        return torch.ops.aten.square.default.redispatch(keyset, self)

    square = override("square", impl, unconditional_override=False)
    for _ in range(3):
        assert torch.square(torch.full((2,), 3.0)).tolist() == [9, 9]
    assert keys == [False] * 3
    assert (square.hits, square.fallbacks) == (3, 3)


def test_what_falls_back_to_a_composite_op_is_tracked() -> None:
    def broken(self: torch.Tensor, shape: list[int]) -> torch.Tensor:
        raise ValueError("no")

    reshape = override("reshape", broken, unconditional_override=True, on_error="fallback")
    buffer = torch.zeros(2, 2)
    with pytest.warns(match="failed"):
        assert buffer.reshape(-1)._base is buffer
    assert reshape.fallbacks == 1
    assert buffer.reshape(-1)._base is buffer


def test_shadow_mode_compares_a_composite_op() -> None:
    square = override("square", lambda self: self * self)
    with opgraft.shadow(rate=1.0):
        for _ in range(3):
            torch.square(torch.ones(3))
    assert (square.hits, square.shadowed, square.mismatches) == (3, 3, 0)


def test_a_hit_that_must_be_differentiated_is_the_composites() -> None:
    square = override("square", never)
    x = torch.ones(3, requires_grad=True)
    torch.square(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    assert square.hits == 0


@pytest.mark.parametrize(
    "op", ["requires_grad_", "set_data", "retain_grad", "_version", "unsafe_chunk"]
)
def test_what_is_about_autograds_own_state_is_refused(op: str) -> None:
    with pytest.raises(RegistrationError, match="below autograd"):
        override(op, lambda *args: None)


def test_what_is_asked_of_uninitialized_parameters_is_refused() -> None:
    with pytest.raises(RegistrationError, match="uninitialized"):
        override("_has_compatible_shallow_copy_type", lambda *args: True)
    assert torch.nn.LazyLinear(3)(torch.ones(2, 4)).shape == (2, 3)


# ------------------------------------------------------------------ autocast


def _cumsum(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None) -> torch.Tensor:
    return self @ torch.ones(self.shape[1], self.shape[1]).triu()


def test_an_impl_runs_outside_of_its_callers_autocast() -> None:
    cumsum = override("cumsum", _cumsum)
    x = torch.randn(4, 64)
    for _ in range(3):
        torch.cumsum(x, 1)
    with torch.autocast("cpu", torch.bfloat16):
        result = torch.cumsum(x, 1)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, opgraft.native("aten::cumsum")(x, 1, dtype=None))
    assert cumsum.hits == 4


X, POSITIVE, SIDE = torch.randn(4, 6), torch.rand(4, 6) + 0.1, torch.randn(6, 6)
KERNELS: dict[str, tuple[Any, ...]] = {
    "relu": (X,),
    "tanh": (X,),
    "exp": (X,),
    "log": (POSITIVE,),
    "pow.Tensor_Scalar": (POSITIVE, 1.5),
    "sum.dim_IntList": (X, [1]),
    "mean.dim": (X, [1]),
    "prod.dim_int": (X, 1),
    "cumsum": (X, 1),
    "cumprod": (X, 1),
    "_softmax": (X, 1, False),
    "_log_softmax": (X, 1, False),
    "native_layer_norm": (X, [6], None, None, 1e-5),
    "add.Tensor": (X, POSITIVE),
    "mul.Tensor": (X, POSITIVE),
    "mm": (X, SIDE),
    "addmm": (X, X, SIDE),
    "bmm": (X[None], SIDE[None]),
    "cat": ([X, POSITIVE], 0),
    "topk": (X, 2),
    "argmax": (X,),
    "gelu": (X,),
    "index_select": (X, 0, torch.tensor([1, 2])),
    "smooth_l1_loss": (X, POSITIVE),
    "_cdist_forward": (X, POSITIVE, 2.0, None),
}


@pytest.mark.parametrize("symbol", KERNELS)
def test_impls_that_call_what_autocast_casts(symbol: str) -> None:
    op, args = resolve(f"aten::{symbol}"), KERNELS[symbol]
    native, seen = opgraft.native(op.overload), []

    def impl(*args: Any, **kwargs: Any) -> Any:
        seen.append((torch.is_autocast_enabled("cpu"), (SIDE @ SIDE).dtype))
        return native(*args, **kwargs)

    with torch.autocast("cpu", torch.bfloat16):
        expected = op.overload(*args)
    graft = override(symbol, impl)
    for autocast in (False, False, False, True, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = op.overload(*args)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert seen == [(False, torch.float32)] * graft.hits
    assert graft.hits == 6


TOKENS = torch.randn(2, 4, 8)
ENCODER = (
    *(TOKENS, 8, 2, torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8)),
    *(False, False, 1e-5, torch.randn(8), torch.randn(8), torch.randn(8), torch.randn(8)),
    *(torch.randn(16, 8), torch.randn(16), torch.randn(8, 16), torch.randn(8), None, None),
)
#: Ops with a kernel of the CPU's own that calls others, which autocast casts.
CALLS_CAST_OPS: dict[str, tuple[Any, ...]] = {
    "aten::_transformer_encoder_layer_fwd": ENCODER,
    "autocast_tests::project": (X,),
}


@pytest.fixture
def project() -> Iterator[None]:
    library = torch.library.Library("autocast_tests", "DEF")
    library.define("project(Tensor x) -> Tensor")
    library.impl("project", lambda x: x @ SIDE, "CPU")
    yield
    for override in opgraft.overrides():  # of an op that is destroyed they go with a warning
        override.remove()
    library._destroy()


@pytest.mark.parametrize("symbol", CALLS_CAST_OPS)
def test_an_impl_sees_autocast_where_the_native_kernel_calls_what_it_casts(
    project: None, symbol: str
) -> None:
    op, args = resolve(symbol), CALLS_CAST_OPS[symbol]
    native, seen = opgraft.native(op.overload), []

    def impl(*args: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return native(*args)

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = op.overload(*args)
    namespace, _, name = symbol.partition("::")
    opgraft.register_op_override(namespace, name, "CPU", impl, unconditional_override=True)
    for autocast in (False, False, False, True, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            result = op.overload(*args)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert seen == [False] * 3 + [True] * 3


def by_matmul(one: Any, two: Any, dims: list[int], others: list[int]) -> torch.Tensor:
    return one @ two  # cast, as what native is made of is


def by_sums(one: Any, two: Any, dims: list[int], others: list[int]) -> torch.Tensor:
    return (one[:, :, None] * two).sum(1)


def contract() -> torch.Tensor:
    return torch.tensordot(X, SIDE, dims=1)


def test_an_impl_of_a_composite_op_sees_the_autocast_that_its_pieces_would() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = contract()
    assert expected.dtype == torch.bfloat16
    graft = override("tensordot", by_matmul)
    for autocast in (False, False, False, True, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = contract()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert graft.hits == 6


def test_an_impl_of_a_composite_op_that_ignores_autocast_is_found_out() -> None:
    graft = override("tensordot", by_sums)
    for _ in range(3):
        contract()
    assert graft.hits == 3
    with pytest.raises(ContractError, match="dtype"), torch.autocast("cpu", torch.bfloat16):
        contract()


def test_what_failed_under_autocast_is_quarantined_there_alone() -> None:
    graft = override("tensordot", by_sums, unconditional_override=True, on_error="fallback")
    contract()
    with pytest.warns(match="dtype"), torch.autocast("cpu", torch.bfloat16):
        assert contract().dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert contract().dtype == torch.bfloat16
    assert (graft.hits, graft.fallbacks) == (2, 1)
    assert contract().dtype == torch.float32
    assert graft.hits == 3


def _look_up_by_matmul(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
    return ((indices[:, None] == torch.arange(len(weight))).float() @ weight).float()


PARAMETER = torch.nn.Parameter(torch.randn(6, 6))
#: Ops of which no kernel is the CPU's own, so that autocast reaches what an impl calls.
FOR_ALL_BACKENDS: dict[str, tuple[Any, ...]] = {
    "embedding": (PARAMETER, torch.tensor([1, 2])),
    "diag_embed": (X,),
    "repeat_interleave.self_int": (X, 2),
    "tensordot": (X, SIDE, [1], [0]),
    "cosine_similarity": (X, POSITIVE),
}


@pytest.mark.parametrize("symbol", FOR_ALL_BACKENDS)
def test_what_is_cast_inside_an_impl_keeps_no_gradient_from_a_parameter(symbol: str) -> None:
    op, native = resolve(f"aten::{symbol}"), opgraft.native(f"aten::{symbol}")
    dtypes = []

    def impl(*args: Any, **kwargs: Any) -> Any:
        dtypes.append((PARAMETER @ SIDE).dtype)
        return native(*args, **kwargs)

    graft = override(symbol, impl)
    for _ in range(4):
        PARAMETER.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            op.overload(*FOR_ALL_BACKENDS[symbol])
            assert torch.is_autocast_cache_enabled()
            F.linear(X, PARAMETER).float().sum().backward()
        assert PARAMETER.grad is not None
        PARAMETER.grad = None
    assert (graft.hits, dtypes) == (4, [torch.bfloat16] * 4)


def test_what_a_plan_casts_keeps_no_gradient_from_a_parameter() -> None:
    terms = {"unconditional_override": True, "launch_plan": not IN_PYTHON}
    embedding = override("embedding", _look_up_by_matmul, **terms)
    weight, indices = torch.nn.Parameter(torch.randn(6, 6)), torch.tensor([1, 2])
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            F.embedding(indices, weight)
            (grad,) = torch.autograd.grad(F.linear(X, weight).float().sum(), weight)
        torch.testing.assert_close(grad, X.sum(0).expand(6, 6), rtol=0.05, atol=0.05)
    assert embedding.hits == 6
    assert embedding.plans is None or embedding.plans.hits == 3


# ------------------------------------------------------------------ without grad


def _reshape(self: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return torch.ops.aten.view(self, shape)


@pytest.mark.parametrize("leaf", [True, False])
def test_a_view_without_grad_of_what_requires_grad(leaf: bool) -> None:
    reshape = override("reshape", _reshape)
    x = torch.ones(4, requires_grad=True)
    for _ in range(4):
        base = x if leaf else x * 1
        with torch.no_grad():
            view = base.reshape(2, 2)
        assert (view.requires_grad, view._base is base) == (True, True)
        with pytest.raises(RuntimeError, match="created in no_grad mode"):
            view.add_(1)
    assert reshape.hits == 4


@pytest.mark.parametrize("plans", [False, True])
def test_an_inference_tensor_is_not_written_to_outside_of_inference_mode(plans: bool) -> None:
    terms = {"unconditional_override": True, "launch_plan": plans}
    square = override("square_", lambda self: torch.mul(self, self, out=self), **terms)
    with torch.inference_mode():
        x = torch.full((3,), 2.0)
    for _ in range(6):
        with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
            x.square_()
    assert x.tolist() == [2.0, 2.0, 2.0]
    with torch.inference_mode():
        x.square_()
        x.reshape(3).square_()
    assert x.tolist() == [16.0, 16.0, 16.0]
    assert square.hits >= 2


# ------------------------------------------------------------------ the Python router


@where_the_core_routes
def test_the_python_router_does_the_same() -> None:
    run_again(__file__)
