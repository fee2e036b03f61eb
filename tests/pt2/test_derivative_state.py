"""An own derivative, whatever it keeps and however: differentiated once right, twice an error.

The error may be left out where the second derivative is right, as forward mode's is.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import opgraft
from opgraft import OpgraftError, Override, when
from opgraft.router import derivative as own
from tests.pt2 import models

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")

Setup = Callable[[Any, tuple[Any, ...], torch.Tensor], None]
Backward = Callable[[Any, torch.Tensor], torch.Tensor]


def by(name: str) -> Backward:
    return lambda ctx, grad: grad * getattr(ctx, name)


def setting(name: str, value: Callable[[torch.Tensor, torch.Tensor], Any]) -> Setup:
    return lambda ctx, inputs, output: setattr(ctx, name, value(inputs[0], output))


def saving(value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Setup:
    return lambda ctx, inputs, output: ctx.save_for_backward(value(inputs[0], output))


def saved(ctx: Any) -> torch.Tensor:
    (tensor,) = ctx.saved_tensors
    assert isinstance(tensor, torch.Tensor)
    return tensor


#: Ways to hold what the derivative of exp needs: its output, or its input.
KEPT: dict[str, tuple[Setup, Backward]] = {
    "save_for_backward(o)": (saving(lambda x, o: o), lambda ctx, g: g * saved(ctx)),
    "save_for_backward(x)": (saving(lambda x, o: x), lambda ctx, g: g * saved(ctx).exp()),
    "save_for_backward(x.detach())": (
        saving(lambda x, o: x.detach()),
        lambda ctx, g: g * saved(ctx).exp(),
    ),
    "save_for_backward(o.clone())": (
        saving(lambda x, o: o.clone()),
        lambda ctx, g: g * saved(ctx),
    ),
    "save_for_backward(x * 2)": (
        saving(lambda x, o: x * 2),
        lambda ctx, g: g * (saved(ctx) / 2).exp(),
    ),
    "a tuple of outputs": (setting("t", lambda x, o: (o,)), lambda ctx, g: g * ctx.t[0]),
    "a tuple of detached outputs": (
        setting("t", lambda x, o: (o.detach(),)),
        lambda ctx, g: g * ctx.t[0],
    ),
    "a list": (setting("saved", lambda x, o: [x]), lambda ctx, g: g * ctx.saved[0].exp()),
    "a dict": (setting("kept", lambda x, o: {"x": x}), lambda ctx, g: g * ctx.kept["x"].exp()),
    "an attribute": (setting("x", lambda x, o: x), lambda ctx, g: g * ctx.x.exp()),
    "a detached attribute": (
        setting("_saved", lambda x, o: x.detach()),
        lambda ctx, g: g * ctx._saved.exp(),
    ),
    "a computed attribute": (
        setting("save", lambda x, o: x.sin().asin()),
        lambda ctx, g: g * ctx.save.exp(),
    ),
    "a function": (setting("f", lambda x, o: lambda: x), lambda ctx, g: g * ctx.f().exp()),
    "detached in the backward": (
        saving(lambda x, o: x),
        lambda ctx, g: (g * saved(ctx).exp()).detach(),
    ),
    "twice the saved tensors": (
        saving(lambda x, o: o),
        lambda ctx, g: g * (saved(ctx) + saved(ctx)) / 2,
    ),
}


def loss(function: Any) -> Any:
    return lambda x: function(x).pow(2).sum()


def exp(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x * 1.5)


def an_input() -> torch.Tensor:
    return torch.linspace(-0.7, 0.9, 6, dtype=torch.float64).view(2, 3)


def by_create_graph(x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(exp(x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def by_the_incoming_gradient(x: torch.Tensor) -> torch.Tensor:
    x, v = x.requires_grad_(), torch.ones_like(x).requires_grad_()
    (first,) = torch.autograd.grad(exp(x), x, v, create_graph=True)
    return torch.autograd.grad(first.sum(), v)[0]


def by_a_penalty(x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    y = exp(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.sum() + first.pow(2).sum()).backward()
    assert x.grad is not None
    return x.grad


def by_backward_twice(x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    exp(x).sum().backward(create_graph=True)
    assert x.grad is not None
    first = x.grad
    x.grad = None
    first.sum().backward()
    return x.grad


def by_jvp_of_vjp(x: torch.Tensor) -> torch.Tensor:
    _, pull = vjp(exp, x)
    return jvp(lambda v: pull(v)[0], (torch.ones_like(x),), (torch.ones_like(x),))[1]


def by_dual_gradients(x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    y = exp(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        (first,) = torch.autograd.grad(y, x, dual)
        tangent = torch.autograd.forward_ad.unpack_dual(first).tangent
        assert isinstance(tangent, torch.Tensor)
        return tangent


TWICE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "create_graph": by_create_graph,
    "the incoming gradient": by_the_incoming_gradient,
    "a penalty": by_a_penalty,
    "backward twice": by_backward_twice,
    "dual gradients": by_dual_gradients,
    "grad of grad": grad(lambda x: grad(loss(exp))(x).pow(2).sum()),
    "jacrev of jacrev": jacrev(jacrev(exp)),
    "jacrev of grad": jacrev(grad(loss(exp))),
    "vmap of grad of grad": vmap(grad(lambda x: grad(loss(exp))(x).pow(2).sum())),
    "grad of vmap of grad": grad(lambda x: vmap(grad(loss(exp)))(x).pow(2).sum()),
    "grad by create_graph": lambda x: grad(lambda x: by_create_graph_inside(x).sum())(x),
    "jvp of vjp": by_jvp_of_vjp,
    "jvp of grad": lambda x: jvp(grad(loss(exp)), (x,), (torch.ones_like(x),))[1],
    "hessian": hessian(loss(exp)),
    "jacfwd of grad": jacfwd(grad(loss(exp))),
}


def by_create_graph_inside(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(exp(x).sum(), x, create_graph=True)[0]


def register(kept: str, policy: str = "opaque") -> Override:
    setup_context, backward = KEPT[kept]
    return models.override(
        "exp",
        lambda self: torch.pow(torch.e, self),
        when.dtype("self", torch.float64),
        autograd=(setup_context, backward),
        compile=policy,
    )


ONCE = {
    "backward": lambda x: torch.autograd.grad(loss(exp)(x.requires_grad_()), x)[0],
    "grad": grad(loss(exp)),
    "jacrev": jacrev(exp),
    "vmap of grad": vmap(grad(loss(exp))),
    "grad of vmap": grad(loss(vmap(exp))),
    "vjp": lambda x: vjp(exp, x)[1](torch.ones_like(x))[0],
    "jvp": lambda x: jvp(exp, (x,), (torch.ones_like(x),))[1],
    "compiled": lambda x: torch.autograd.grad(
        torch.compile(loss(exp), backend="aot_eager", fullgraph=True)(x.requires_grad_()), x
    )[0],
    "checkpoint": lambda x: torch.autograd.grad(
        loss(lambda x: checkpoint(exp, x, use_reentrant=False))(x.requires_grad_()), x
    )[0],
}


@pytest.mark.parametrize("how", ONCE)
@pytest.mark.parametrize("kept", KEPT)
def test_differentiated_once_it_is_right(kept: str, how: str) -> None:
    override = register(kept)
    result = ONCE[how](an_input())
    assert override.hits > 0
    with opgraft.disabled():
        torch.testing.assert_close(result, ONCE[how](an_input()))


@pytest.mark.parametrize("how", TWICE)
@pytest.mark.parametrize("kept", KEPT)
def test_differentiated_twice_it_is_right_or_an_error(kept: str, how: str) -> None:
    override = register(kept)
    try:
        result = TWICE[how](an_input())
    except OpgraftError as error:
        assert "derivative of the backward of override 'exp'" in str(error)
        result = None
    assert override.hits > 0
    if result is not None:
        with opgraft.disabled():
            torch.testing.assert_close(result, TWICE[how](an_input()))


@pytest.mark.parametrize("how", ["grad of grad", "jacrev of grad"])
def test_differentiated_twice_in_a_compiled_graph(how: str) -> None:
    override = register("a tuple of detached outputs")
    run = torch.compile(TWICE[how], backend="aot_eager", fullgraph=True)
    # From torch 2.15 on Dynamo's error quotes ours, whose own quotes are escaped then.
    with pytest.raises(Exception, match=r"derivative of the backward of override \\*'exp\\*'"):
        run(an_input())
    assert override.enabled


def test_an_op_with_several_outputs() -> None:
    override = models.override(
        "_fused_rms_norm",
        models.itself("_fused_rms_norm"),
        autograd=(models.rms_norm_setup, models.rms_norm_backward),
    )
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)

    def normalised() -> torch.Tensor:
        return torch.ops.aten._fused_rms_norm(x, [8], weight, 1e-6)[0].pow(3).sum()

    first = torch.autograd.grad(normalised(), (x, weight), create_graph=True)
    assert override.hits == 1
    with opgraft.disabled():
        torch.testing.assert_close(first, torch.autograd.grad(normalised(), (x, weight)))
    for gradient in first:
        with pytest.raises(OpgraftError, match="differentiate once"):
            torch.autograd.grad(gradient.sum(), weight, retain_graph=True)


# ------------------------------------------------------------------ what is saved


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kept", ["save_for_backward(o)", "twice the saved tensors"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpointing(kept: str, reentrant: bool, backend: str) -> None:
    """The forward is computed anew as often as with the op's own derivative.

    That is up to torch: 2.11 does not checkpoint what is compiled by the backend `eager`.
    """

    def twice(x: torch.Tensor) -> torch.Tensor:
        return exp(exp(x).sin())

    def gradient() -> torch.Tensor:
        run = torch.compile(
            lambda x: checkpoint(twice, x, use_reentrant=reentrant), backend=backend
        )
        x = an_input().requires_grad_()
        return of_backward(run, x) if reentrant else torch.autograd.grad(run(x).sum(), x)[0]

    override = register(kept)
    result = gradient()
    with opgraft.disabled():
        x = an_input().requires_grad_()
        torch.testing.assert_close(result, torch.autograd.grad(twice(x).sum(), x)[0])
    override.remove()
    torch._dynamo.reset()
    without = models.override("exp", models.itself("exp"))
    gradient()
    assert override.hits == without.hits >= 2


def of_backward(run: Any, x: torch.Tensor) -> torch.Tensor:
    """The gradient by `backward`: reentrant checkpointing has no other."""
    run(x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("kept", ["save_for_backward(o)", "twice the saved tensors"])
def test_what_is_saved_is_packed_and_read_once(kept: str) -> None:
    override = register(kept)
    seen: Counter[str] = Counter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen["packed"] += tensor.numel()
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        seen["unpacked"] += tensor.numel()
        return tensor

    x = an_input().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = torch.exp(x)
    y.sum().backward()
    assert override.hits == 1
    assert seen == {"packed": 6, "unpacked": 6}


def test_what_is_saved_is_not_read_by_who_does_not_ask() -> None:
    register("a tuple of detached outputs")

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("read")

    x = an_input().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = torch.exp(x)
    y.sum().backward()
    assert x.grad is not None


def test_the_context_is_the_nodes_own() -> None:
    seen = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.one, ctx.two = 1, 2
        del ctx.one
        ctx.save_for_backward(output)

    def backward(ctx: Any, grad: Any) -> Any:
        seen.append((hasattr(ctx, "one"), ctx.two, ctx.needs_input_grad, len(ctx.saved_tensors)))
        return grad * saved(ctx)

    models.override("exp", torch.exp, autograd=(setup_context, backward))
    torch.exp(an_input().requires_grad_()).sum().backward()
    assert seen == [(False, 2, (True,), 1)]


# ------------------------------------------------------------------ what is kept


class Kept:
    """What only the impl holds."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.pow(torch.e, x)


def test_an_override_that_is_removed_goes_with_all_that_it_holds() -> None:
    impl = Kept()
    setup_context, backward = KEPT["save_for_backward(o)"]
    override = models.override("exp", impl, autograd=(setup_context, backward))
    torch.exp(an_input().requires_grad_()).sum().backward()
    assert override.hits == 1
    (kernel,) = [each for chain, each in own._installed.items() if chain.op.name == "aten::exp"]
    functions = len(kernel._functions)
    override.remove()
    alive = weakref.ref(impl)
    del impl, override
    gc.collect()
    assert alive() is None
    assert len(kernel._functions) < functions
