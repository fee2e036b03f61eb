"""Overrides with a derivative of their own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import opgraft
from opgraft import OpgraftError, Override, RegistrationError, when
from opgraft.core import loader
from opgraft.router.derivative import DerivativeKernel
from tests import ops
from tests.modes import RecordOps
from tests.pt2 import models
from tests.python_router import run_again, where_the_core_routes


class Derivative:
    """Softmax's derivative, counted."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        self.ran["setup_context"] += 1
        ctx.save_for_backward(output)
        ctx.dim = inputs[1]

    def backward(self, ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        self.ran["backward"] += 1
        (output,) = ctx.saved_tensors
        weighted = output * grad
        return weighted - output * weighted.sum(ctx.dim, keepdim=True), None, None

    def functions(self) -> tuple[Any, Any]:
        return self.setup_context, self.backward


@pytest.fixture
def derivative() -> Derivative:
    return Derivative()


@pytest.fixture
def override(derivative: Derivative) -> Override:
    return opgraft.register_op_override(
        "aten",
        "_softmax",
        "CPU",
        ops.softmax,
        cond=when.size("self", -1) == 8,
        autograd=derivative.functions(),
        compile="opaque",
    )


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 1.5, -1)


def reference(x: torch.Tensor) -> torch.Tensor:
    with opgraft.disabled():
        return softmax(x)


def scalar(function: Any) -> Any:
    weights = torch.linspace(-1, 1, 8, dtype=torch.float64)
    return lambda x: (function(x) * weights).sum()


def an_input(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, 8, dtype=torch.float64, generator=generator)


def expected(transform: Any, *shape: int) -> torch.Tensor:
    with opgraft.disabled():
        return transform(softmax)(an_input(*shape))


TRANSFORMS = {
    "grad": (lambda f: grad(scalar(f)), (3,)),
    "vmap of grad": (lambda f: vmap(grad(scalar(f))), (3,)),
    "grad of vmap": (lambda f: grad(scalar(vmap(f))), (3,)),
    "vmap of vmap of grad": (lambda f: vmap(vmap(grad(scalar(f)))), (2, 3)),
    "jacrev": (jacrev, (3,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_own_derivative_is_right_and_used_under(
    name: str, derivative: Derivative, override: Override
) -> None:
    transform, shape = TRANSFORMS[name]
    torch.testing.assert_close(transform(softmax)(an_input(*shape)), expected(transform, *shape))
    assert derivative.ran["backward"] > 0
    assert override.hits > 0


#: Tensors that are resolved below autograd, before a native kernel.
LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugate": lambda x: x.conj(),
    "negative": lambda x: torch._neg_view(x),
    "zero": lambda x: x * torch._efficientzerotensor((), dtype=x.dtype),
}
OVER_LAZY: dict[str, Callable[[Any], Any]] = {
    "grad": grad,
    "vmap of grad": lambda f: vmap(grad(f)),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x).sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones((), dtype=torch.float64))[0],
}


@pytest.mark.parametrize(
    ("kind", "transform"),
    # vmap has no rule for `_neg_view`.
    [(k, t) for k in LAZY for t in OVER_LAZY if (k, "vmap" in t) != ("negative", True)],
)
def test_own_derivative_of_a_lazy_tensor(kind: str, transform: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (LAZY[kind](x).exp() * (1 + 2j)).real.sum()

    override = models.override(
        "exp",
        models.itself("exp"),
        autograd=(
            lambda ctx, inputs, output: ctx.save_for_backward(output),
            lambda ctx, grad: grad * ctx.saved_tensors[0].conj(),
        ),
    )
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3) * (1 - 0.5j)
    result = OVER_LAZY[transform](loss)(x)
    assert override.hits > 0
    with opgraft.disabled():
        torch.testing.assert_close(result, OVER_LAZY[transform](loss)(x))


def test_own_derivative_is_right_and_used_by_backward(
    derivative: Derivative, override: Override
) -> None:
    x = an_input(3).requires_grad_()
    (result,) = torch.autograd.grad(scalar(softmax)(x), x)
    torch.testing.assert_close(result, expected(lambda f: grad(scalar(f)), 3))
    assert derivative.ran == {"setup_context": 1, "backward": 1}
    assert override.hits == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_own_derivative_is_right_and_used_in_compiled_graphs(
    backend: str, derivative: Derivative, override: Override
) -> None:
    compiled = torch.compile(scalar(softmax), backend=backend, fullgraph=True)
    x = an_input(3).requires_grad_()
    (result,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(result, expected(lambda f: grad(scalar(f)), 3))
    assert derivative.ran["backward"] > 0, "the graph's backward is the override's"
    assert override.hits == 1


def test_own_derivative_under_func_grad_inside_compile(
    derivative: Derivative, override: Override
) -> None:
    compiled = torch.compile(grad(scalar(softmax)), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(an_input(3)), expected(lambda f: grad(scalar(f)), 3))
    assert derivative.ran["backward"] > 0
    assert override.hits == 1


@pytest.mark.parametrize(
    "transform",
    [jacfwd, lambda f: lambda x: jvp(f, (x,), (x,))[1], lambda f: hessian(scalar(f))],
    ids=["jacfwd", "jvp", "hessian"],
)
def test_forward_mode_keeps_the_derivative_of_the_op(
    transform: Any, derivative: Derivative, override: Override
) -> None:
    torch.testing.assert_close(transform(softmax)(an_input(2)), expected(transform, 2))
    assert derivative.ran["backward"] == 0
    assert override.hits > 0


def test_dual_tensors_keep_the_derivative_of_the_op(
    derivative: Derivative, override: Override
) -> None:
    def tangent(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), x)
            return torch.autograd.forward_ad.unpack_dual(softmax(dual)).tangent.detach()

    result = tangent(an_input(2))
    hits = override.hits
    with opgraft.disabled():
        torch.testing.assert_close(result, tangent(an_input(2)))
    assert hits == 1


def test_differentiating_twice_is_an_error_that_names_the_override(
    derivative: Derivative, override: Override
) -> None:
    x = an_input(3).requires_grad_()
    (first,) = torch.autograd.grad(scalar(softmax)(x), x, create_graph=True)
    with pytest.raises(OpgraftError, match=r"derivative of the backward of override .*softmax"):
        torch.autograd.grad(first.pow(2).sum(), x)


def test_differentiating_twice_by_nested_grads_is_an_error(override: Override) -> None:
    def once(x: torch.Tensor) -> torch.Tensor:
        return grad(scalar(softmax))(x).pow(2).sum()

    with pytest.raises(OpgraftError, match=r"twice, call the op under opgraft\.disabled"):
        grad(once)(an_input(3))
    with opgraft.disabled(name=override.name):
        assert grad(once)(an_input(3)).abs().sum() > 0


def tangent_of_dual_upstream(x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        out = softmax(x)
        upstream = torch.autograd.forward_ad.make_dual(torch.ones_like(out), out.detach())
        (gradient,) = torch.autograd.grad(out, x, upstream)
        return torch.autograd.forward_ad.unpack_dual(gradient).tangent


def tangent_of_dual_factor(x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        factor = torch.autograd.forward_ad.make_dual(torch.ones(x.shape), x.detach().clone())
        (gradient,) = torch.autograd.grad((softmax(x) * factor).sum(), x)
        return torch.autograd.forward_ad.unpack_dual(gradient).tangent


def tangent_of_pullback(x: torch.Tensor) -> torch.Tensor:
    out, pullback = vjp(softmax, x)
    _, (tangent,) = jvp(pullback, (torch.ones_like(out),), (out,))
    return tangent


@pytest.mark.parametrize(
    "forward_over_reverse", [tangent_of_dual_upstream, tangent_of_dual_factor, tangent_of_pullback]
)
def test_an_upstream_gradient_with_a_tangent_is_an_error_that_names_the_mend(
    forward_over_reverse: Callable[[torch.Tensor], torch.Tensor], override: Override
) -> None:
    """Only the upstream gradient has a tangent, so the override takes the call."""
    names = rf"override '{re.escape(override.name)}' of aten::_softmax.* autograd= .*"
    mend = re.escape(f"opgraft.disabled(name={override.name!r})")
    with pytest.raises(OpgraftError, match=rf"{names} in forward mode.* under {mend}"):
        forward_over_reverse(an_input(2))
    assert override.hits == 1
    with opgraft.disabled(name=override.name):
        assert forward_over_reverse(an_input(2)).abs().sum() > 0


def test_forward_over_reverse_in_one_transform_keeps_the_derivative_of_the_op(
    override: Override,
) -> None:
    """Whatever has the tangent, `jvp` is known where the op is called."""

    def of_factor(f: Any) -> torch.Tensor:
        def gradient(factor: torch.Tensor) -> torch.Tensor:
            return grad(lambda x: (f(x) * factor).sum())(an_input(2))

        factor = torch.ones(an_input(2).shape)
        return jvp(gradient, (factor,), (an_input(2),))[1]

    def of_input(f: Any) -> torch.Tensor:
        return jvp(grad(scalar(f)), (an_input(2),), (an_input(2),))[1]

    for tangent in (of_factor, of_input):
        before = override.hits
        result = tangent(softmax)
        assert override.hits == before + 1
        with opgraft.disabled():
            torch.testing.assert_close(result, tangent(softmax))


def test_a_gradient_that_needs_no_second_one_may_keep_its_graph(override: Override) -> None:
    x = an_input(3).requires_grad_()
    (first,) = torch.autograd.grad(scalar(softmax)(x), x, create_graph=True)
    torch.testing.assert_close(first.detach(), expected(lambda f: grad(scalar(f)), 3))


def test_a_call_that_the_override_declines_keeps_the_derivative_of_the_op(
    derivative: Derivative, override: Override
) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    softmax(x).pow(2).sum().backward()
    assert derivative.ran["backward"] == 0
    assert override.misses == 1
    assert x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.skipif(loader.in_use() is None, reason="the router in Python asks for every call")
def test_a_call_that_no_condition_wants_never_asks_python(
    override: Override, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(DerivativeKernel, "differentiating_override", asked)
    softmax(torch.randn(3, 4, requires_grad=True)).sum().backward()
    with torch.no_grad():
        softmax(torch.randn(3, 8, requires_grad=True))
    with pytest.raises(AssertionError, match="asked"):
        softmax(torch.randn(3, 8, requires_grad=True))


def test_what_a_condition_calls_of_the_op_itself_is_natives(derivative: Derivative) -> None:
    asked = []

    def cond(self: torch.Tensor, dim: int, half_to_float: bool) -> bool:
        asked.append(torch.softmax(self, dim).sum())  # as differentiable as the call itself
        return True

    override = opgraft.register_op_override(
        *("aten", "_softmax", "CPU", ops.softmax), cond=cond, autograd=derivative.functions()
    )
    x = an_input(3).requires_grad_()
    scalar(softmax)(x).backward()
    assert (override.hits, derivative.ran["backward"]) == (1, 1)
    assert len(asked) <= 2


def test_a_condition_sees_the_callers_grad_mode_whenever_it_is_asked(
    derivative: Derivative,
) -> None:
    modes = []

    def cond(*args: Any) -> bool:
        modes.append(torch.is_grad_enabled())
        return modes[-1]

    inside = []

    def impl(*args: Any) -> torch.Tensor:
        inside.append(torch.is_grad_enabled())
        return ops.softmax(*args)

    override = opgraft.register_op_override(
        *("aten", "_softmax", "CPU", impl), cond=cond, autograd=derivative.functions()
    )
    x = an_input(3).requires_grad_()
    scalar(softmax)(x).backward()
    assert (override.hits, derivative.ran["backward"]) == (1, 1)
    assert all(modes) and not any(inside)
    with torch.no_grad():
        softmax(x)
    assert (override.hits, modes[-1]) == (1, False)


def test_switched_off_it_is_the_derivative_of_the_op(
    derivative: Derivative, override: Override
) -> None:
    x = an_input(3).requires_grad_()
    with opgraft.disabled():
        scalar(softmax)(x).backward()
    opgraft.native("aten::_softmax")(x, -1, False).sum().backward()
    override.remove()
    scalar(softmax)(x).backward()
    assert derivative.ran["backward"] == 0
    assert override.hits == 0


def test_the_first_override_that_takes_the_call_decides_whose_derivative_it_is(
    derivative: Derivative, override: Override
) -> None:
    first = opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True
    )
    x = an_input(3).requires_grad_()
    scalar(softmax)(x).backward()
    assert first.hits > 0
    assert derivative.ran["backward"] == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_composite_op_gets_hits_in_training(backend: str) -> None:
    override = opgraft.register_op_override(
        "aten",
        "_fused_rms_norm",
        "CPU",
        ops.rms_norm,
        unconditional_override=True,
        autograd=(models.rms_norm_setup, models.rms_norm_backward),
        compile="opaque",
    )
    weight = torch.linspace(0.5, 1.5, 8, requires_grad=True)
    x = an_input(3).float().requires_grad_()

    def loss() -> torch.Tensor:
        return F.rms_norm(x, (8,), weight, 1e-6).pow(2).sum()

    explanation = opgraft.explain("aten::_fused_rms_norm", x, [8], weight, 1e-6)
    assert explanation.winner is override
    result = torch.autograd.grad(torch.compile(loss, backend=backend)(), (x, weight))
    assert override.hits == 1
    with opgraft.disabled():
        torch.testing.assert_close(result, torch.autograd.grad(loss(), (x, weight)))


# ------------------------------------------------------------------ composite ops


def cross_entropy(x: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    return -x.log_softmax(1).gather(1, target[:, None]).mean()


class CrossEntropy:
    """A composite op's override with a derivative of its own, which is counted."""

    def __init__(self, compile: Any) -> None:
        self.backwards = 0
        self.override = models.override(
            "cross_entropy_loss",
            cross_entropy,
            autograd=(self.setup_context, self.backward),
            compile=compile,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    def backward(self, ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        self.backwards += 1
        x, target = ctx.saved_tensors
        return grad * (x.softmax(1) - F.one_hot(target, x.shape[1])) / len(x), *[None] * 5


def loss(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, torch.tensor([1, 0, 7]))


def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = an_input(3).requires_grad_()
    (dx,) = torch.autograd.grad(function(x), x)
    return dx


def native_gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with opgraft.disabled():
        return gradient(function)


def test_a_dispatch_mode_sees_the_pieces_of_a_composite_op_forward_and_backward() -> None:
    ours = CrossEntropy("inductor")
    with RecordOps() as seen:
        dx = gradient(loss)
    assert {"aten._log_softmax.default", "aten.nll_loss_backward.default"} <= set(seen.ops)
    torch.testing.assert_close(dx, native_gradient(loss))
    assert (ours.override.hits, ours.backwards) == (0, 0)
    gradient(loss)
    assert (ours.override.hits, ours.backwards) == (1, 1)


@pytest.mark.parametrize("name", [*TRANSFORMS, "hessian", "jvp"])
def test_functorch_sees_the_pieces_of_a_composite_op(name: str) -> None:
    transforms: dict[str, Callable[[torch.Tensor], Any]] = {
        "grad": grad(loss),
        "vmap of grad": lambda x: vmap(grad(loss))(torch.stack([x, -x])),
        "grad of vmap": grad(lambda x: vmap(loss)(torch.stack([x, -x])).sum()),
        "vmap of vmap of grad": lambda x: vmap(vmap(grad(loss)))(torch.stack([x, -x])[None]),
        "jacrev": jacrev(loss),
        "hessian": hessian(loss),
        "jvp": lambda x: jvp(loss, (x,), (x,)),
    }
    ours = CrossEntropy("inductor")
    result = transforms[name](an_input(3))
    assert (ours.override.hits, ours.backwards) == (0, 0)
    with opgraft.disabled():
        torch.testing.assert_close(result, transforms[name](an_input(3)))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no DTensor")
def test_loss_parallel_sees_the_pieces_of_cross_entropy() -> None:
    """It has a rule of its own for each, by which ranks keep their part of the classes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    ours = CrossEntropy("inductor")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = an_input(3).requires_grad_()
        with loss_parallel():
            loss(DTensor.from_local(x, mesh, [Shard(1)])).backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(x.grad, native_gradient(loss))
    assert (ours.override.hits, ours.backwards) == (0, 0)


def test_explain_says_why_the_override_does_not_differentiate_a_composite_op() -> None:
    models.override(
        "cross_entropy_loss",
        cross_entropy,
        when.dtype("target", torch.int64),
        autograd=(CrossEntropy.setup_context, CrossEntropy.backward),
    )
    x = an_input(3).requires_grad_()
    taken = opgraft.explain("aten::cross_entropy_loss", x, torch.tensor([1, 0, 7]))
    declined = opgraft.explain(
        "aten::cross_entropy_loss", x, torch.tensor([1, 0, 7], dtype=torch.uint8)
    )
    assert taken.winner is not None
    assert declined.winner is None
    assert "declines: when.dtype('target', torch.int64)" in str(declined)


@pytest.mark.skipif(loader.in_use() is None, reason="the router in Python has a kernel more")
def test_a_composite_op_gets_a_derivative_without_a_change_of_the_dispatcher() -> None:
    """Changing it while other threads dispatch can crash the process."""
    first = models.override("cosine_similarity", models.itself("cosine_similarity"))
    before = torch._C._dispatch_dump("aten::cosine_similarity")
    second = models.override(
        "cosine_similarity",
        models.itself("cosine_similarity"),
        priority=1,
        autograd=(
            lambda ctx, inputs, output: None,
            lambda ctx, grad: (grad[:, None].expand(3, 8), None, None, None),
        ),
    )
    x = an_input(3).requires_grad_()
    (dx,) = torch.autograd.grad(F.cosine_similarity(x, x.detach()).sum(), x)
    assert torch._C._dispatch_dump("aten::cosine_similarity") == before
    assert (first.hits, second.hits) == (0, 1)
    assert dx.eq(1).all()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("compile", "used"), [("opaque", 1), ("inductor", 0), ("auto", 0)])
def test_a_graph_that_leaves_the_op_to_the_compiler_leaves_it_its_derivative(
    compile: Any, used: int, dynamic: bool
) -> None:
    ours = CrossEntropy(compile)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(gradient(compiled), native_gradient(loss))
    assert (ours.override.hits, ours.backwards) == (used, used)


def test_the_wrong_number_of_gradients_is_an_error_that_names_the_override() -> None:
    opgraft.register_op_override(
        "aten",
        "_softmax",
        "CPU",
        ops.softmax,
        unconditional_override=True,
        autograd=(lambda ctx, inputs, output: None, lambda ctx, grad: grad),
    )
    x = an_input(3).requires_grad_()
    with pytest.raises(OpgraftError, match=r"softmax.* returned 1 gradients; the op has 3 arg"):
        softmax(x).sum().backward()


@pytest.mark.parametrize(
    ("op", "autograd", "message"),
    [
        ("_softmax", len, "two functions"),
        ("_softmax", (len,), "two functions"),
        ("add_.Tensor", (len, len), "writes to an argument"),
        ("cat", (len, len), "tensors is a list of tensors"),
    ],
)
def test_a_derivative_that_cannot_be_is_refused(op: str, autograd: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        opgraft.register_op_override(
            "aten", op, "CPU", lambda *a, **k: None, unconditional_override=True, autograd=autograd
        )


def test_disabled_differentiates_natively(derivative: Derivative, override: Override) -> None:
    torch.testing.assert_close(reference(an_input(2)), softmax(an_input(2)))


@where_the_core_routes
def test_the_python_router_does_the_same() -> None:
    run_again(__file__)
