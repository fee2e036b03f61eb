"""Overrides at random: which ops, how many, under which conditions, in which of the forms."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import opgraft
from opgraft import when
from opgraft.ops.schema import resolve
from tests.fuzz.programs import Kind

#: Every op that programs reach and that overrides are put on, by kind of program.
OPS: dict[Kind, tuple[str, ...]] = {
    "exact": (
        *("aten::relu", "aten::tanh", "aten::sigmoid", "aten::gelu", "aten::_softmax"),
        *("aten::_log_softmax", "aten::native_layer_norm", "aten::_fused_rms_norm"),
        *("aten::sum.dim_IntList", "aten::mean.dim", "aten::cumsum", "aten::topk", "aten::sort"),
        *("aten::add.Tensor", "aten::sub.Tensor", "aten::mul.Tensor", "aten::maximum"),
        *("aten::where.self", "aten::mm", "aten::bmm", "aten::cat", "aten::index_select"),
        *("aten::relu_", "aten::tanh_", "aten::add_.Tensor", "aten::mul_.Tensor"),
        *("aten::fill_.Scalar", "aten::zero_", "aten::gt.Scalar", "aten::clone"),
        *("aten::_softmax_backward_data", "aten::_log_softmax_backward_data"),
        *("aten::threshold_backward", "aten::tanh_backward", "aten::sigmoid_backward"),
        *("aten::gelu_backward", "aten::native_layer_norm_backward", "aten::index_add"),
        # lists of outputs, and what writes without saying so
        *("aten::unbind.int", "aten::split.Tensor", "aten::_foreach_mul.Scalar"),
        *("aten::native_batch_norm", "aten::native_batch_norm_backward"),
    ),
    "smooth": (
        *("aten::tanh", "aten::sigmoid", "aten::_softmax", "aten::mul.Tensor", "aten::mm"),
        *("aten::bmm", "aten::mean.dim", "aten::_softmax_backward_data", "aten::tanh_backward"),
        "aten::sigmoid_backward",
    ),
}

#: Composite ops that programs reach and that write or alias: with an override that never holds they
#: do what they do without, down to the graph's nodes.
COMPOSITES = (
    *("aten::reshape", "aten::contiguous", "aten::flatten.using_ints", "aten::narrow"),
    *("aten::chunk", "aten::to.dtype", "aten::expand_as", "aten::matmul"),
)


def register(seed: int, kind: Kind, key: str = "CPU") -> list[opgraft.Override]:
    """Register overrides on some ops; `opgraft.overrides()` has them too.

    Args:
        seed: of every choice.
        kind: of the programs that they are for: bit for bit native's results, or their own.
        key: the dispatch key.
    """
    rng = random.Random(seed)
    count = rng.randint(2, len(OPS[kind]))
    registered = []
    for op in rng.sample(OPS[kind], count):
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            registered.append(_register(rng, kind, op, key))
    for op in rng.sample(COMPOSITES, rng.randint(0, len(COMPOSITES))):
        registered.append(
            opgraft.register_op_override(*op.split("::"), key, _never, cond=when.ndim("self") == 99)
        )
    return registered


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("its condition never holds")


def _register(rng: random.Random, kind: Kind, op: str, key: str) -> opgraft.Override:
    operator = resolve(op)
    impl, terms = _impl(rng, kind, op, operator.writes)
    namespace, _, symbol = op.partition("::")
    return opgraft.register_op_override(
        *(namespace, symbol, key, impl),
        priority=rng.choice((0, 0, 1)),
        dsl=rng.choice((None, "one", "two")),
        **terms,
        **({} if "keyset" in terms.get("name", "") else _condition(rng, operator)),
    )


# ------------------------------------------------------------------ conditions


def _condition(rng: random.Random, operator: Any) -> dict[str, Any]:
    tensors = [a.name for a in operator.arguments if a.kind == "Tensor"]
    if not tensors or rng.random() < 0.3:
        return {"unconditional_override": True}
    name = rng.choice(tensors)
    if rng.random() < 0.15:
        wanted = rng.choice((0, 1))
        position = [a.name for a in operator.arguments].index(name)

        def in_python(*args: Any, **kwargs: Any) -> bool:
            return args[position].ndim % 2 == wanted

        return {"cond": in_python}
    part = rng.choice(
        (
            lambda: when.ndim(name) >= rng.randint(0, 3),
            lambda: when.numel(name) % rng.randint(1, 3) == 0,
            lambda: when.dtype(name, torch.float32, torch.float64),
            lambda: when.is_contiguous(name),
            lambda: ~when.is_contiguous(name),
            lambda: when.aligned(name, 16),
            lambda: when.requires_grad(name),
            lambda: (when.size(name, -1) <= rng.choice((4, 8))) & (when.numel(name) > 0),
            lambda: when.stride(name, 0) != 1,
        )
    )
    return {"cond": part()}


# ------------------------------------------------------------------ impls


#: Ops whose first argument is a list.
_TAKE_LISTS = ("aten::cat", "aten::_foreach_mul.Scalar")


class Broken(RuntimeError):
    """What an impl raises that is meant to fall back."""


def _impl(
    rng: random.Random, kind: Kind, op: str, writes: bool
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """An impl, and what it must be registered with."""
    own = (SMOOTH if kind == "smooth" else EXACT).get(op)
    if own is not None and (kind == "smooth" or rng.random() < 0.5):
        return own, {}
    overload = resolve(op).overload
    native = opgraft.native(op)

    def by_itself(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    made_of_others = _is_made_of_others(op)

    def by_native(*args: Any, **kwargs: Any) -> Any:
        # A kernel's own calls are not cast by its caller's autocast, so an impl's are not either.
        assert made_of_others or not torch._C._is_any_autocast_enabled()
        return native(*args, **kwargs)

    def with_keyset(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if args[0].ndim == 2:
            raise Broken("for matrices")
        return overload(*args, **kwargs)

    choice = rng.choice(("itself", "native", "keyset", "broken"))
    if choice == "keyset":
        return with_keyset, {"name": f"keyset {rng.randrange(10**9)}"}
    if choice == "broken" and not writes and op not in _TAKE_LISTS:
        return sometimes, {"on_error": "fallback"}
    return (by_native if choice == "native" else by_itself), {}


@cache
def _is_made_of_others(op: str) -> bool:
    """Whether native has no kernel of its own on the CPU; asked before the first router is in."""
    return not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU")


def _topk(self: Tensor, k: int, dim: int, largest: bool, sorted: bool) -> Any:
    return torch.topk(self.clone(), k, dim, largest, sorted)


def _relu_(self: Tensor) -> Tensor:
    return self.clamp_(min=0)


def _zero_(self: Tensor) -> Tensor:
    return self.fill_(0)


#: Other ways to the same bits.
EXACT: dict[str, Callable[..., Any]] = {
    "aten::relu_": _relu_,
    "aten::zero_": _zero_,
    "aten::topk": _topk,
}


def _tanh(self: Tensor) -> Tensor:
    # Native's layout, and other values.
    return opgraft.native("aten::tanh")(self).copy_(2 / (1 + torch.exp(-2 * self)) - 1)


def _sigmoid(self: Tensor) -> Tensor:
    return opgraft.native("aten::sigmoid")(self).copy_(1 / (1 + torch.exp(-self)))


def _softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if self.numel() == 0:
        return torch.empty_like(self, memory_format=torch.contiguous_format)
    weights = (self - self.amax(dim, keepdim=True)).exp()
    return (weights / weights.sum(dim, keepdim=True)).contiguous()


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    product = grad * output
    return (product - output * product.sum(dim, keepdim=True)).to(dtype).contiguous()


def _mm(self: Tensor, mat2: Tensor) -> Tensor:
    # Blocks of the inner dimension, added up.
    half = self.shape[1] // 2
    return torch.mm(self[:, :half], mat2[:half]) + torch.mm(self[:, half:], mat2[half:])


def _bmm(self: Tensor, mat2: Tensor) -> Tensor:
    return (self.unsqueeze(-1) * mat2.unsqueeze(-3)).sum(-2).contiguous()


def _mean(
    self: Tensor, dim: list[int] | None, keepdim: bool, *, dtype: torch.dtype | None
) -> Tensor:
    count = 1
    for each in range(self.ndim) if dim is None else dim:
        count *= self.shape[each]
    return opgraft.native("aten::sum.dim_IntList")(self, dim, keepdim, dtype=dtype) / count


def _tanh_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    return opgraft.native("aten::tanh_backward")(grad_output, output) * 1.0


def _sigmoid_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    return opgraft.native("aten::sigmoid_backward")(grad_output, output) * 1.0


#: Results of their own, within a few roundings of native's.
SMOOTH: dict[str, Callable[..., Any]] = {
    "aten::tanh": _tanh,
    "aten::sigmoid": _sigmoid,
    "aten::_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::mm": _mm,
    "aten::bmm": _bmm,
    "aten::mean.dim": _mean,
    "aten::tanh_backward": _tanh_backward,
    "aten::sigmoid_backward": _sigmoid_backward,
}
