"""`register_backward`: an op that another op differentiates, in the core and in Python."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import opgraft
from opgraft.core import loader
from opgraft.errors import RegistrationError
from opgraft.ops.schema import resolve
from tests.python_router import run_again, where_the_core_routes

SCALED = "(Tensor x, Tensor? weight, float scale, int[] unused) -> (Tensor out, Tensor cosine)"
SCALED_BACKWARD = (
    "(Tensor grad_out, Tensor? weight, Tensor x, Tensor cosine, float scale) "
    "-> (Tensor grad_x, Tensor grad_weight)"
)
_numbers = itertools.count()


class Define(Protocol):
    """Defines two ops, and returns their names."""

    def __call__(
        self,
        schema: str = SCALED,
        backward_schema: str = SCALED_BACKWARD,
        impl: Callable[..., Any] = ...,
        backward: Callable[..., Any] = ...,
    ) -> tuple[str, str]: ...


def scaled(
    x: torch.Tensor, weight: torch.Tensor | None, scale: float, unused: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scale * weight * sin(x)`, and the cosine that its backward needs."""
    return x.sin() * scale * (1 if weight is None else weight), x.cos()


def scaled_backward(
    grad_out: torch.Tensor,
    weight: torch.Tensor | None,
    x: torch.Tensor,
    cosine: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the weight."""
    factor = torch.ones_like(x) if weight is None else weight
    return grad_out * cosine * scale * factor, grad_out * x.sin() * scale


@pytest.fixture
def define() -> Iterator[Define]:
    libraries = []

    def defined(
        schema: str = SCALED,
        backward_schema: str = SCALED_BACKWARD,
        impl: Callable[..., Any] = scaled,
        backward: Callable[..., Any] = scaled_backward,
    ) -> tuple[str, str]:
        namespace = f"opgraft_backward_{next(_numbers)}"
        library = torch.library.Library(namespace, "FRAGMENT")
        libraries.append(library)
        for name, text, kernel in (
            ("op", schema, impl),
            ("op_backward", backward_schema, backward),
        ):
            library.define(name + text)
            library.impl(name, kernel, "CompositeExplicitAutograd")
        return f"{namespace}::op", f"{namespace}::op_backward"

    yield defined
    for library in libraries:
        library._destroy()


@pytest.fixture
def op(define: Define) -> Any:
    names = define()
    opgraft.register_backward(*names)
    return overload(names[0])


def overload(name: str) -> Any:
    namespace, _, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op).default


def number(*shape: int, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(*(shape or (5,)), dtype=torch.float64, requires_grad=requires_grad)


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_gradients_are_the_backward_ops(op: Any, needed: tuple[bool, bool]) -> None:
    x, weight = (number(requires_grad=each) for each in needed)
    assert torch.autograd.gradcheck(lambda a, b: op(a, b, 2.0, [1])[0], (x, weight))


def test_an_argument_that_is_none_gets_no_gradient(op: Any) -> None:
    x = number()
    op(x, None, 2.0, [])[0].sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_an_output_whose_gradient_is_not_asked_for_has_none(op: Any) -> None:
    out, cosine = op(number(), None, 2.0, [])
    assert out.requires_grad
    assert not cosine.requires_grad


def test_without_a_gradient_nothing_is_kept(op: Any) -> None:
    x = number()
    with torch.no_grad():
        assert op(x, None, 2.0, [])[0].grad_fn is None
    assert op(x.detach(), None, 2.0, [])[0].grad_fn is None


def test_gradients_that_are_missing_are_zero(define: Define) -> None:
    names = define(
        "(Tensor x) -> (Tensor one, Tensor two)",
        "(Tensor grad_one, Tensor grad_two) -> Tensor grad_x",
        lambda x: (x * 2, x * 3),
        lambda one, two: 2 * one + 3 * two,
    )
    opgraft.register_backward(*names)
    x = number()
    overload(names[0])(x)[1].sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 3).all())


def test_gradients_that_are_missing_are_none_where_that_is_taken(define: Define) -> None:
    seen = []

    def backward(one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor:
        seen.append((one is None, two is None))
        return 2 * one if two is None else 3 * two  # type: ignore[operator]

    names = define(
        "(Tensor x) -> (Tensor one, Tensor two)",
        "(Tensor? grad_one, Tensor? grad_two) -> Tensor grad_x",
        lambda x: (x * 2, x * 3),
        backward,
    )
    opgraft.register_backward(*names)
    for index in (0, 1):
        overload(names[0])(number())[index].sum().backward()
    assert seen == [(False, True), (True, False)]


def test_what_is_saved_is_freed_and_says_so(op: Any) -> None:
    x = number()
    out = op(x, None, 2.0, [])[0]
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_a_saved_argument_that_is_written_to_is_an_error(op: Any) -> None:
    x, weight = number(), number(requires_grad=False)
    out = op(x, weight, 2.0, [])[0]
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_ends_with_its_last_tensor(define: Define) -> None:
    names = define(
        "(Tensor x) -> Tensor out",
        "(Tensor grad_out, Tensor out) -> Tensor grad_x",
        torch.exp,
        torch.mul,
    )
    opgraft.register_backward(*names)
    out = overload(names[0])(number())  # saved by its own node
    kept = weakref.ref(out)
    del out
    gc.collect()
    assert kept() is None


def test_to_differentiate_twice_is_an_error(op: Any) -> None:
    x = number()
    (gradient,) = torch.autograd.grad(op(x, None, 2.0, [])[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="op_backward is not implemented"):
        gradient.sum().backward()


SIN = "(Tensor x) -> (Tensor y, Tensor cosine)"


def test_to_differentiate_twice_is_an_error_whatever_is_saved(define: Define) -> None:
    """Nothing that the backward op gets has a graph of its own."""
    names = define(
        SIN,
        "(Tensor grad_y, Tensor cosine) -> Tensor grad_x",
        lambda x: (x.sin(), x.cos()),
        torch.mul,
    )
    opgraft.register_backward(*names)
    x = number()
    y = overload(names[0])(x)[0].sum() + x.square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    torch.testing.assert_close(gradient, x.cos() + 2 * x)
    with pytest.raises(RuntimeError, match="op_backward is not implemented"):
        torch.autograd.grad(gradient.sum(), x)
    with pytest.raises(RuntimeError, match="op_backward is not implemented"):
        torch.autograd.functional.hessian(lambda each: overload(names[0])(each)[0].sum(), x)


def test_a_backward_op_with_a_derivative_is_differentiated(define: Define) -> None:
    names = define(
        "(Tensor x) -> Tensor y",
        "(Tensor grad_y, Tensor x) -> Tensor grad_x",
        torch.sin,
        lambda grad, x: grad * x.cos(),
    )
    again = define(
        "(Tensor grad_y, Tensor x) -> Tensor grad_x",
        "(Tensor grad_grad_x, Tensor grad_y, Tensor x) -> (Tensor grad_grad_y, Tensor grad_x)",
        lambda grad, x: grad * x.cos(),
        lambda g, grad, x: (g * x.cos(), -g * grad * x.sin()),
    )
    torch.library.register_autograd(
        names[1],
        lambda ctx, g: overload(again[1])(g, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    opgraft.register_backward(*names)
    x = number()
    hessian = torch.autograd.functional.hessian(lambda each: overload(names[0])(each).sum(), x)
    torch.testing.assert_close(hessian, torch.diag(-x.detach().sin()))


FORWARD_MODE = "::op has no forward-mode derivative: .* declared its backward alone"


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("argument", ["x", "weight"])
def test_forward_mode_is_an_error(op: Any, argument: str, requires_grad: bool) -> None:
    given = {name: number(requires_grad=requires_grad) for name in ("x", "weight")}
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=FORWARD_MODE):
        given[argument] = forward_ad.make_dual(given[argument], torch.ones(5).double())
        op(*given.values(), 2.0, [])


def test_forward_mode_by_functorch_is_an_error(op: Any) -> None:
    x = number(requires_grad=False)
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        torch.func.jvp(lambda each: op(each, None, 2.0, [])[0], (x,), (x,))


def test_forward_mode_of_other_tensors_is_none_of_its_own(op: Any) -> None:
    x = number()
    with forward_ad.dual_level():
        forward_ad.make_dual(number(requires_grad=False), torch.ones(5).double())
        op(x, None, 2.0, [])[0].sum().backward()
        with torch.no_grad():
            op(x, None, 2.0, [])
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_tangent_of_the_upstream_gradient_is_not_lost_in_silence(
    op: Any, create_graph: bool
) -> None:
    x = number()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="op_backward has no"):
        weight = forward_ad.make_dual(number(requires_grad=False), torch.ones(5).double())
        y = op(x, None, 2.0, [])[0]
        torch.autograd.grad((y * weight).sum(), x, create_graph=create_graph)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(op: Any, use_reentrant: bool) -> None:
    x = number()
    checkpoint(
        lambda each: op(each, None, 2.0, [])[0], x, use_reentrant=use_reentrant
    ).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_hooks_on_saved_tensors_are_asked(op: Any) -> None:
    x, packed = number(), []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        out = op(x, None, 2.0, [])[0]
    assert len(packed) == 3  # x, the cosine, and what leads to the op's inputs
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


@pytest.mark.parametrize("lazy", ["conjugate", "negative", "zero"])
def test_a_gradient_that_is_lazy_arrives_as_it_is(define: Define, lazy: str) -> None:
    names = define(
        "(Tensor x) -> Tensor out",
        "(Tensor grad_out) -> Tensor grad_x",
        lambda x: x * 2,
        lambda grad: grad * 2,
    )
    opgraft.register_backward(*names)
    x = torch.randn(4, dtype=torch.complex128, requires_grad=True)
    out = overload(names[0])(x)
    gradient = torch.randn(4, dtype=torch.complex128)
    given = {
        "conjugate": gradient.conj(),
        "negative": torch._neg_view(gradient),
        "zero": torch._efficientzerotensor(4, dtype=torch.complex128),
    }[lazy]
    (found,) = torch.autograd.grad(out, x, given)
    torch.testing.assert_close(found, 2 * (given.clone() if lazy != "zero" else 0 * gradient))


def test_threads(op: Any) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                x = number()
                op(x, None, 2.0, [])[0].sum().backward()
                torch.testing.assert_close(x.grad, 2 * x.detach().cos())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# ------------------------------------------------------------------ with other things


def test_overrides_of_both_ops_are_hit(define: Define) -> None:
    names = define()
    opgraft.register_backward(*names)
    overrides = [
        opgraft.register_op_override(
            *name.split("::"), "CPU", impl, unconditional_override=True, name=name
        )
        for name, impl in zip(names, (scaled, scaled_backward), strict=True)
    ]
    x = number()
    for _ in range(3):
        overload(names[0])(x, None, 2.0, [])[0].sum().backward()
    assert [each.hits for each in overrides] == [3, 3]


def test_a_graph_is_traced_through_both(define: Define) -> None:
    names = define()
    opgraft.register_backward(*names)
    for name in names:
        meta = scaled if name == names[0] else scaled_backward
        torch.library.register_fake(name, meta)
    x = number()
    expected = torch.autograd.grad(overload(names[0])(x, None, 2.0, [])[0].sum(), x)
    compiled = torch.compile(lambda x: overload(names[0])(x, None, 2.0, [])[0], backend="aot_eager")
    found = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(found, expected)


@where_the_core_routes
def test_compiled_autograd_traces_the_backward(define: Define) -> None:
    names = define()
    opgraft.register_backward(*names)
    torch.library.register_fake(names[1], scaled_backward)
    x = number()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        overload(names[0])(x, None, 2.0, [])[0].sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


@where_the_core_routes
def test_ops_that_were_destroyed_are_named() -> None:
    namespace = f"opgraft_backward_{next(_numbers)}"

    def cell(*, registers: bool) -> torch.library.Library:
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define("op(Tensor x) -> Tensor out")
        library.define("op_backward(Tensor grad_out) -> Tensor grad_x")
        library.impl("op", lambda x: x * 2, "CPU")
        library.impl("op_backward", lambda grad: grad * 2, "CPU")
        if registers:
            opgraft.register_backward(f"{namespace}::op", f"{namespace}::op_backward")
        return library

    x = number()
    library = cell(registers=True)
    out = overload(f"{namespace}::op")(x)
    library._destroy()
    with pytest.raises(RuntimeError, match="define both again"):
        out.sum().backward()
    library = cell(registers=False)
    with pytest.raises(RuntimeError, match="register the backward again"):
        resolve(f"{namespace}::op").overload(x)
    library._destroy()
    library = cell(registers=True)
    resolve(f"{namespace}::op").overload(x).sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 2).all())
    library._destroy()


# ------------------------------------------------------------------ bad input

BAD = {
    "an argument of another name": (
        "(Tensor x) -> Tensor out",
        "(Tensor grad_out, Tensor y) -> Tensor grad_x",
        "argument 'y' is no gradient of an output .*grad_out.*, no argument .*x.* and no output",
    ),
    "no gradient": (
        "(Tensor x) -> Tensor out",
        "(Tensor x) -> Tensor grad_x",
        "no argument is the gradient of an output",
    ),
    "an output without a name": (
        "(Tensor x) -> Tensor",
        "(Tensor grad_out) -> Tensor grad_x",
        "An output has a name if the schema gives it one",
    ),
    "a result without a name": (
        "(Tensor x) -> Tensor out",
        "(Tensor grad_out) -> Tensor",
        "it returns 'a tensor without a name'",
    ),
    "a gradient of no argument": (
        "(Tensor x) -> Tensor out",
        "(Tensor grad_out) -> Tensor grad_y",
        "it returns 'grad_y': name each result",
    ),
    "a gradient of a number": (
        "(Tensor x, float y) -> Tensor out",
        "(Tensor grad_out) -> Tensor grad_y",
        "y is no tensor",
    ),
    "one name for two": (
        "(Tensor x) -> Tensor x",
        "(Tensor grad_x) -> Tensor grad_x",
        "x names an argument and an output",
    ),
    "a list of tensors": (
        "(Tensor x, Tensor[] others) -> Tensor out",
        "(Tensor grad_out, Tensor[] others) -> Tensor grad_x",
        "argument 'others' is a list of tensors",
    ),
    "two results of one name": (
        "(Tensor x) -> Tensor out",
        "(Tensor grad_out) -> (Tensor grad_x, Tensor grad_x)",
        "returns grad_x twice",
    ),
    "what is written to": (
        "(Tensor(a!) x) -> Tensor out",
        "(Tensor grad_out) -> Tensor grad_x",
        "writes to an argument",
    ),
    "another result than a tensor": (
        "(Tensor x) -> (Tensor out, int number)",
        "(Tensor grad_out) -> Tensor grad_x",
        "returns something else than tensors",
    ),
}


#: A type of the op's argument, and one of the backward op's.
OTHER_TYPES = {
    "a tensor that may be None": ("Tensor?", "Tensor"),
    "a number for a tensor": ("Tensor", "float"),
    "a tensor for a number": ("float", "Tensor"),
    "another number": ("int", "float"),
    "a number that may be None": ("int?", "int"),
    "numbers for one": ("int", "int[]"),
    "one for numbers": ("int[]", "int"),
    "a bool": ("bool", "int"),
    "a dtype": ("ScalarType", "int"),
    "a scalar": ("Scalar", "float"),
}


@pytest.mark.parametrize("case", OTHER_TYPES)
def test_an_argument_of_another_type_is_refused(define: Define, case: str) -> None:
    given, wanted = OTHER_TYPES[case]
    names = define(
        f"(Tensor x, {given} other) -> Tensor out",
        f"(Tensor grad_out, {wanted} other) -> Tensor grad_x",
    )
    with pytest.raises(RegistrationError) as raised:
        opgraft.register_backward(*names)
    assert str(raised.value) == (
        f"register_backward({names[0]!r}, {names[1]!r}): its argument 'other' is of type {wanted}, "
        f"and gets {names[0]}'s argument 'other', which is of type {given}: declare it as "
        f"'{given} other'"
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("grad_out", "float grad_out"), ("out", "Tensor grad_out, float out")],
)
def test_what_is_of_an_output_is_a_tensor(define: Define, name: str, arguments: str) -> None:
    names = define("(Tensor x) -> Tensor out", f"({arguments}) -> Tensor grad_x")
    with pytest.raises(RegistrationError, match=f"'{name}' is of type float, .*'Tensor {name}'"):
        opgraft.register_backward(*names)


@pytest.mark.parametrize("kind", ["Tensor", "float", "int[]", "SymInt", "Scalar", "ScalarType"])
def test_what_may_be_none_takes_what_is_not(define: Define, kind: str) -> None:
    names = define(
        f"(Tensor x, {kind} other) -> Tensor out",
        f"(Tensor grad_out, {kind}? other) -> Tensor grad_x",
        lambda x, other: x * 2,
        lambda grad, other: grad * (2 if other is not None else 0),
    )
    opgraft.register_backward(*names)
    x = number()
    other = {"Tensor": torch.ones(1), "int[]": [1], "ScalarType": torch.float64}.get(kind, 1)
    overload(names[0])(x, other).sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 2).all())


@pytest.mark.parametrize("case", BAD)
def test_names_that_do_not_say_what_is_what_are_refused(define: Define, case: str) -> None:
    schema, backward_schema, message = BAD[case]
    names = define(schema, backward_schema)
    with pytest.raises(RegistrationError, match=message) as raised:
        opgraft.register_backward(*names)
    assert names[0] in str(raised.value)


def test_an_op_whose_pieces_autograd_differentiates_is_refused(define: Define) -> None:
    names = define("(Tensor x) -> Tensor y", "(Tensor grad_y) -> Tensor grad_x")
    namespace = names[0].partition("::")[0]
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("implicit(Tensor x) -> Tensor y")
        library.impl("implicit", torch.sin, "CompositeImplicitAutograd")
        with pytest.raises(RegistrationError, match="register it for CompositeExplicitAutograd"):
            opgraft.register_backward(f"{namespace}::implicit", names[1])


def test_pytorchs_own_ops_are_refused(define: Define) -> None:
    with pytest.raises(RegistrationError, match="a derivative of PyTorch's own"):
        opgraft.register_backward("aten::exp", define()[1])


@pytest.mark.parametrize("name", ["exp", 3, "opgraft_no::op"])
def test_ops_that_do_not_exist_are_refused(define: Define, name: Any) -> None:
    with pytest.raises(RegistrationError, match=str(name)):
        opgraft.register_backward(name, define()[1])


@where_the_core_routes
def test_without_the_core_it_is_the_same() -> None:
    assert loader.in_use() is not None
    run_again(__file__)
