"""`autograd="impl"`: autograd differentiates the ops that an override of a composite op calls."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import opgraft
from opgraft import when
from opgraft.errors import ContractError, RegistrationError
from opgraft.packs.loading import owning
from opgraft.router import composite
from tests.modes import RecordOps
from tests.python_router import run_again, where_the_core_routes

OP = "scaled_dot_product_attention"


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention, of ops that have derivatives."""
    weights = (query * query.shape[-1] ** -0.5) @ key.mT
    return weights.softmax(-1) @ value


def override(impl: Callable[..., Any] = attention, **terms: Any) -> opgraft.Override:
    terms = {"unconditional_override": "cond" not in terms, "autograd": "impl"} | terms
    return opgraft.register_op_override("aten", OP, "CPU", impl, **terms)


def inputs(*, requires_grad: bool = True, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shape = (2, 3, 5, 4)
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]


def gradients(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out = F.scaled_dot_product_attention(*tensors)
    return torch.autograd.grad(out.square().sum(), tensors)


def test_a_call_that_is_differentiated_is_taken() -> None:
    tensors = inputs()
    expected = gradients(tensors)
    mine = override()
    for _ in range(4):  # the first are compared with native
        torch.testing.assert_close(gradients(tensors), expected)
    assert (mine.hits, mine.misses, mine.fallbacks) == (4, 0, 0)


def test_gradients_of_gradients_are_those_of_what_the_impl_calls() -> None:
    mine = override()
    tensors = inputs()
    assert torch.autograd.gradgradcheck(F.scaled_dot_product_attention, tensors)
    assert mine.hits > 0


@pytest.mark.parametrize("differentiated", ["query", "key", "value"])
def test_one_tensor_that_requires_grad_is_enough(differentiated: str) -> None:
    mine = override()
    tensors = inputs(requires_grad=False)
    one = tensors[["query", "key", "value"].index(differentiated)].requires_grad_()
    assert torch.autograd.gradcheck(lambda _: F.scaled_dot_product_attention(*tensors), one)
    assert mine.hits > 0


def test_without_a_derivative_it_runs_below_autograd() -> None:
    seen = []

    def impl(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch._C._dispatch_tls_is_dispatch_key_excluded("AutogradFunctionality"))
        return attention(*args, **kwargs)

    mine = override(impl)
    with torch.no_grad():
        F.scaled_dot_product_attention(*inputs())
    F.scaled_dot_product_attention(*inputs(requires_grad=False))
    F.scaled_dot_product_attention(*inputs())
    assert seen == [True, True, False]
    assert mine.hits == 3


def test_the_condition_decides() -> None:
    mine = override(cond=when.size("query", -2) >= 8)
    gradients(inputs())
    assert (mine.hits, mine.misses) == (0, 1)
    tensors = [torch.randn(1, 1, 8, 4, requires_grad=True) for _ in range(3)]
    gradients(tensors)
    assert (mine.hits, mine.misses) == (1, 1)


def test_a_condition_in_python_decides() -> None:
    mine = override(cond=lambda query, *args, **kwargs: query.shape[-2] >= 8)
    gradients(inputs())
    assert (mine.hits, mine.misses) == (0, 1)


def test_overrides_without_a_derivative_are_not_asked() -> None:
    others = override(autograd=None, name="others", priority=1)
    mine = override(name="mine")
    gradients(inputs())
    assert (others.hits, others.misses, mine.hits) == (0, 0, 1)
    with torch.no_grad():
        F.scaled_dot_product_attention(*inputs())
    assert (others.hits, mine.hits) == (1, 1)


def test_the_first_with_a_derivative_of_either_kind_takes_it() -> None:
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shapes = [each.shape for each in inputs[:3]]

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (*(grad.new_ones(shape) for shape in ctx.shapes), *[None] * 5)

    pair = override(autograd=(setup_context, backward), name="pair")
    mine = override(name="mine", priority=1)
    tensors = inputs()
    found = gradients(tensors)
    assert (mine.hits, pair.hits) == (1, 0)
    with opgraft.disabled(name="mine"):
        assert all(bool((each == 1).all()) for each in gradients(tensors))
    assert (mine.hits, pair.hits) == (1, 1)
    mine.remove()
    pair.remove()
    torch.testing.assert_close(found, gradients(tensors))


def test_forward_mode_keeps_the_composite() -> None:
    mine = override()
    tensors = inputs(requires_grad=False)
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        dual = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        out = F.scaled_dot_product_attention(dual, *tensors[1:])
        assert forward_ad.unpack_dual(out).tangent is not None
    assert mine.hits == 0


def test_modes_and_transforms_see_the_pieces() -> None:
    mine = override()
    tensors = inputs()
    with RecordOps() as seen:
        gradients(tensors)
    assert len(seen.ops) > 2
    found = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, *tensors[1:]).sum())(
        tensors[0]
    )
    assert found.shape == tensors[0].shape
    assert mine.hits == 0


def test_a_compiled_graph_keeps_the_composite() -> None:
    mine = override()
    tensors = inputs(dtype=torch.float32)
    expected = F.scaled_dot_product_attention(*tensors)
    hits = mine.hits
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), expected)
    assert mine.hits == hits


def test_opgraft_native_runs_the_composite_with_its_derivative() -> None:
    tensors = inputs()
    expected = gradients(tensors)

    def impl(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = opgraft.native(f"aten::{OP}")(*args, **kwargs)
        return result

    mine = override(impl)
    for _ in range(3):
        torch.testing.assert_close(gradients(tensors), expected)
    assert (mine.hits, mine.fallbacks) == (3, 3)


def test_the_form_that_decides_for_itself_gets_keys_with_autograd() -> None:
    keysets = []

    def impl(keyset: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        keysets.append(keyset.has(torch._C.DispatchKey.AutogradCPU))
        return attention(*args, **kwargs)

    mine = override(impl, unconditional_override=False)
    gradients(inputs())
    with torch.no_grad():
        F.scaled_dot_product_attention(*inputs())
    assert keysets == [True, False]
    assert mine.hits == 2


def test_a_result_that_has_lost_its_derivative_is_refused() -> None:
    def impl(*args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(*args, **kwargs).detach()

    override(impl)
    with pytest.raises(ContractError, match="requires_grad"):
        F.scaled_dot_product_attention(*inputs())


class Detaches:
    """An impl whose result loses its derivative from some call on."""

    def __init__(self) -> None:
        self.detaches = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = attention(*args, **kwargs)
        return result.detach() if self.detaches else result


@pytest.mark.parametrize("shadow", [False, True])
def test_a_result_that_has_lost_its_derivative_is_refused_after_the_first_calls(
    shadow: bool,
) -> None:
    impl = Detaches()
    mine = override(impl, name="mine")
    with opgraft.shadow(rate=1.0) if shadow else nullcontext():
        for _ in range(3):
            F.scaled_dot_product_attention(*inputs())
        impl.detaches = True
        with pytest.raises(ContractError, match=r"override 'mine' of .* cannot differentiate; let"):
            F.scaled_dot_product_attention(*inputs())
    assert mine.hits == 4


def test_native_serves_instead_of_a_result_that_has_lost_its_derivative() -> None:
    """Where `on_error` says so, as after any other breach of the contract."""
    impl, tensors = Detaches(), inputs()
    expected = gradients(tensors)
    mine = override(impl, on_error="fallback")
    for _ in range(3):
        gradients(tensors)
    impl.detaches = True
    with pytest.warns(opgraft.OverrideWarning, match="cannot differentiate"):
        torch.testing.assert_close(gradients(tensors), expected)
    torch.testing.assert_close(gradients(tensors), expected)
    assert (mine.hits, mine.fallbacks) == (4, 1)
    assert "quarantined" in str(opgraft.explain(f"aten::{OP}", *tensors))


def test_what_was_written_to_is_not_written_again_for_a_lost_derivative() -> None:
    detaches = False

    def batch_norm(x: Any, w: Any, b: Any, rm: Any, rv: Any, *rest: Any) -> torch.Tensor:
        out: torch.Tensor = opgraft.native("aten::batch_norm")(x, w, b, rm, rv, *rest)
        return out.detach() if detaches else out

    mine = opgraft.register_op_override(
        *("aten", "batch_norm", "CPU", batch_norm),
        unconditional_override=True,
        autograd="impl",
        on_error="fallback",
    )

    def call() -> torch.Tensor:
        F.batch_norm(x, mean := torch.zeros(3), torch.ones(3), weight, None, training=True)
        return mean

    x, weight = torch.randn(8, 3), torch.ones(3, requires_grad=True)
    for _ in range(3):
        torch.testing.assert_close(call(), 0.1 * x.mean(0))
    detaches = True
    with pytest.raises(ContractError, match="cannot differentiate"):
        call()
    assert mine.hits == 4


def test_after_an_error_native_serves_with_its_derivative() -> None:
    def impl(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise ValueError("no kernel")

    tensors = inputs()
    expected = gradients(tensors)
    mine = override(impl, on_error="fallback")
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        torch.testing.assert_close(gradients(tensors), expected)
    torch.testing.assert_close(gradients(tensors), expected)
    assert mine.hits == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_runs_it_twice(use_reentrant: bool) -> None:
    tensors = inputs()
    expected = gradients(tensors)
    mine = override()
    for _ in range(3):  # also while native runs beside it, to be compared
        out = checkpoint(F.scaled_dot_product_attention, *tensors, use_reentrant=use_reentrant)
        found = [torch.autograd.grad(out.square().sum(), tensors)] if not use_reentrant else []
        for each in found:
            torch.testing.assert_close(each, expected)
        if use_reentrant:
            for tensor in tensors:
                tensor.grad = None
            out.square().sum().backward()
            torch.testing.assert_close(tuple(t.grad for t in tensors), expected)
    assert mine.hits == 6


@pytest.mark.parametrize("first", [True, False])
def test_checkpointing_ends_a_recomputation_inside_an_impl(first: bool) -> None:
    """By an exception, where the last tensor is saved: the impl has not failed."""
    mine = override(on_error="fallback")
    tensors = inputs()
    if not first:
        for _ in range(3):
            gradients(tensors)
    before = mine.hits
    expected = gradients(tensors)
    for _ in range(2):
        out = checkpoint(F.scaled_dot_product_attention, *tensors, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), tensors), expected)
    assert (mine.hits - before, mine.fallbacks) == (5, 0)


def test_where_hooks_are_disabled_hits_are_compared_all_the_same() -> None:
    mine = override()
    tensors = inputs()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        gradients(tensors)
    assert mine.hits == 1


def test_calls_in_training_are_checked_apart() -> None:
    """What was right without gradients may lose one of two derivatives."""

    def std_mean(self: torch.Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
        return self.std(dim, unbiased, keepdim), self.mean(dim, keepdim).detach()

    opgraft.register_op_override(
        "aten", "std_mean.dim", "CPU", std_mean, unconditional_override=True, autograd="impl"
    )
    x = torch.randn(3, 4)
    for _ in range(3):
        torch.std_mean(x, [1])
    with pytest.raises(ContractError, match="output 1"):
        torch.std_mean(x.requires_grad_(), [1])


def test_a_result_that_natively_has_no_derivative_is_none_that_was_lost() -> None:
    mine = opgraft.register_op_override(
        *("aten", "gather_backward", "CPU"),
        lambda grad, self, dim, index, sparse_grad: self.new_zeros(self.shape).scatter_add(
            dim, index, grad
        ),
        unconditional_override=True,
        autograd="impl",
    )
    x, index = torch.randn(3, 4, requires_grad=True), torch.zeros(3, 4, dtype=torch.int64)
    for _ in range(4):
        torch.autograd.grad(x.gather(0, index).sum(), x, create_graph=True)
    assert mine.hits == 4


def test_a_derivative_that_native_made_is_none_of_the_impls() -> None:
    """A result that natively has none is right, whatever native made where the impl failed."""

    def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self.dim() == 2:
            raise ValueError("no matrices")
        result: torch.Tensor = opgraft.native("aten::type_as")(self, other)
        return result

    mine = opgraft.register_op_override(
        *("aten", "type_as", "CPU", type_as),
        unconditional_override=True,
        autograd="impl",
        on_error="fallback",
    )
    other = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for _ in range(4):
        assert not torch.randn(3).type_as(other).requires_grad
    hits = mine.hits
    with pytest.warns(opgraft.OverrideWarning, match="no matrices"):
        assert torch.randn(3, 3, requires_grad=True).type_as(other).requires_grad
    assert not torch.randn(3).type_as(other).requires_grad
    assert mine.hits == hits + 2


def test_shadow_mode_writes_nothing_twice() -> None:
    def batch_norm(x: Any, w: Any, b: Any, rm: Any, rv: Any, *rest: Any) -> torch.Tensor:
        out: torch.Tensor = 2 * opgraft.native("aten::batch_norm")(x, w, b, rm, rv, *rest)
        return out

    opgraft.register_op_override(
        "aten", "batch_norm", "CPU", batch_norm, unconditional_override=True, autograd="impl"
    )
    x, weight = torch.randn(8, 3), torch.ones(3, requires_grad=True)
    mean, variance = torch.zeros(3), torch.ones(3)
    with opgraft.shadow(rate=1.0, on_mismatch="quarantine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.batch_norm(x, mean, variance, weight, None, training=True)
    torch.testing.assert_close(mean, 0.1 * x.mean(0))


def test_hooks_get_what_the_impl_saves_alone() -> None:
    counts = []
    override()
    tensors = inputs()
    for _ in range(3):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
            F.scaled_dot_product_attention(*tensors)
        counts.append(len(saved))
    assert counts[0] == counts[1] == counts[2] > 0


def test_shadow_mode_compares_it_and_leaves_its_derivative() -> None:
    mine = override()
    tensors = inputs()
    expected = gradients(tensors)
    with opgraft.shadow(rate=1.0):
        torch.testing.assert_close(gradients(tensors), expected)
    assert (mine.shadowed, mine.mismatches) == (1, 0)


def test_shadow_mode_replaces_a_wrong_result_by_natives_with_its_derivative() -> None:
    tensors = inputs()
    expected = gradients(tensors)
    wrong = False

    def impl(*args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(*args, **kwargs) * (2 if wrong else 1)

    mine = override(impl)
    for _ in range(3):
        gradients(tensors)
    wrong = True
    with opgraft.shadow(rate=1.0, on_mismatch="quarantine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(gradients(tensors), expected)
    assert mine.mismatches == 1


def test_traces_and_explain_say_who_runs() -> None:
    mine = override(name="mine")
    tensors = inputs()
    assert opgraft.explain(f"aten::{OP}", *tensors).winner is mine
    with opgraft.trace() as trace:
        gradients(tensors)
    assert "mine" in str(trace)
    assert mine.hits == 1
    with forward_ad.dual_level():
        tensors[0] = forward_ad.make_dual(tensors[0].detach(), torch.ones_like(tensors[0]))
        assert opgraft.explain(f"aten::{OP}", *tensors).winner is None


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", ["none", "pair", "impl"])
def test_an_open_forward_mode_level_without_a_tangent_changes_nothing(
    kind: str, requires_grad: bool
) -> None:
    mine = override(autograd=KINDS[kind])
    tensors = inputs(requires_grad=requires_grad)
    taken = [mine] if not requires_grad or kind != "none" else []
    with forward_ad.dual_level():
        explained = opgraft.explain(f"aten::{OP}", *tensors).winner
        (reached,) = opgraft.explain(F.scaled_dot_product_attention, *tensors).reached
        F.scaled_dot_product_attention(*tensors)
    assert [each for each in (explained, reached.winner) if each] == 2 * taken
    assert mine.hits == len(taken)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", ["none", "pair", "impl"])
def test_a_tensor_of_a_subclass_without_a_tangent_changes_nothing(kind: str) -> None:
    mine = override(autograd=KINDS[kind])
    tensors = [
        each.as_subclass(Subclass)  # type: ignore[arg-type]
        for each in inputs(requires_grad=kind != "none")
    ]
    with forward_ad.dual_level():
        F.scaled_dot_product_attention(*tensors)
    assert mine.hits == 1


def _nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(tensor)


MAKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": torch.clone,
    "of a subclass": lambda tensor: tensor.clone().as_subclass(Subclass),  # type: ignore[arg-type]
    "with a __torch_dispatch__": lambda tensor: TwoTensor(tensor.clone(), tensor.clone()),
    "fake": _fake,
    "nested": _nested,
    "sparse": torch.Tensor.to_sparse,
    "meta": lambda tensor: tensor.to("meta"),
    "functional": torch._to_functional_tensor,
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_tensor_of_any_kind_has_no_tangent_by_itself(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with forward_ad.dual_level():
        assert not composite.has_tangent(make(torch.ones(3)))


@pytest.mark.parametrize("kind", ["plain", "of a subclass", "with a __torch_dispatch__", "fake"])
def test_a_tangent_is_found_whatever_holds_it(kind: str) -> None:
    tensor, tangent = MAKE[kind](torch.ones(3)), MAKE[kind](torch.ones(3))
    if kind == "fake":
        tangent = torch.ones_like(tensor)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensor, tangent)
        version = dual._version
        assert composite.has_tangent(dual) and not composite.has_tangent(tensor)
        assert dual._version == version
    assert not composite.has_tangent(dual)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda f: torch.func.grad(f)(torch.ones(3)), False),
        (lambda f: torch.func.vmap(f)(torch.ones(2, 3)), False),
        (lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)), True),
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_of_what_functorch_wraps_a_tangent_is_known(
    transform: Callable[[Callable[[torch.Tensor], torch.Tensor]], object], expected: bool
) -> None:
    found: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(composite.has_tangent(x))
        return x.sum()

    with nullcontext() if expected else forward_ad.dual_level():  # `jvp` opens its own
        transform(function)
    assert found == [expected]


@pytest.mark.parametrize("kind", ["none", "pair", "impl"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_tangent_of_any_argument_keeps_the_composite(kind: str, mode: Any) -> None:
    mine = override(autograd=KINDS[kind])
    query, key, value = inputs(requires_grad=False)
    tensors = query.requires_grad_(), key
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        value = forward_ad.make_dual(value, torch.ones_like(value))
        with mode():
            assert opgraft.explain(f"aten::{OP}", *tensors, value).winner is None
            (reached,) = opgraft.explain(F.scaled_dot_product_attention, *tensors, value).reached
            assert reached.winner is None
            F.scaled_dot_product_attention(*tensors, value)
    assert mine.hits == 0


def test_a_call_with_a_tangent_is_nobodys_miss() -> None:
    """Nobody is asked, and both routers count that alike."""
    found = in_order("none", "pair", "impl")
    query, key, value = inputs()
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        dual = forward_ad.make_dual(value, torch.ones_like(value))
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                F.scaled_dot_product_attention(query, key, dual)
    assert [(each.hits, each.misses) for each in found.values()] == [(0, 0)] * 3
    gradients([query, key, value])
    assert [found[kind].hits for kind in found] == [0, 1, 0]


def test_in_inference_mode_a_tangent_is_nothing() -> None:
    mine = override()
    query, key, value = inputs(requires_grad=False)
    with forward_ad.dual_level(), torch.inference_mode():
        query = forward_ad.make_dual(query, torch.ones_like(query))
        assert opgraft.explain(f"aten::{OP}", query, key, value).winner is mine
        F.scaled_dot_product_attention(query, key, value)
    assert mine.hits == 1


def test_threads_differentiate_at_once() -> None:
    tensors = inputs()
    expected = gradients(tensors)
    mine = override()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                torch.testing.assert_close(gradients(tensors), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert mine.hits == 80


def test_an_inference_tensor_needs_no_derivative() -> None:
    mine = override()
    with torch.inference_mode():
        out = F.scaled_dot_product_attention(*inputs(requires_grad=False))
    assert out.is_inference()
    assert mine.hits == 1


def test_autocast_casts_before_it() -> None:
    dtypes = []

    def impl(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtypes.append(query.dtype)
        return attention(query, *args, **kwargs)

    tensors = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        native = F.scaled_dot_product_attention(*tensors)
        mine = override(impl)
        out = F.scaled_dot_product_attention(*tensors)
    assert out.dtype == native.dtype
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), tensors))
    assert mine.hits == 1


# ------------------------------------------------------------------ several kinds of derivative


def ones_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shapes = [each.shape for each in inputs[:3]]


def ones_backward(ctx: Any, grad: torch.Tensor) -> Any:
    """Gradients that are wrong, so that they are told from others."""
    return (*(grad.new_ones(shape) for shape in ctx.shapes), *[None] * 5)


KINDS: dict[str, Any] = {"none": None, "pair": (ones_setup, ones_backward), "impl": "impl"}


def in_order(*kinds: str, **terms: Any) -> dict[str, opgraft.Override]:
    """Overrides of these kinds, the first with the highest priority."""
    return {
        kind: override(name=kind, autograd=KINDS[kind], priority=-place, **terms)
        for place, kind in enumerate(kinds)
    }


@pytest.mark.parametrize("kinds", list(itertools.permutations(KINDS)))
def test_the_first_with_a_derivative_runs_whatever_its_kind(kinds: tuple[str, ...]) -> None:
    found = in_order(*kinds)
    first = next(kind for kind in kinds if kind != "none")
    tensors = inputs()
    assert opgraft.explain(f"aten::{OP}", *tensors).winner is found[first]
    grads = gradients(tensors)
    assert {kind: each.hits for kind, each in found.items()} == {
        kind: int(kind == first) for kind in KINDS
    }
    assert all(bool((each == 1).all()) for each in grads) == (first == "pair")


@pytest.mark.parametrize("kinds", list(itertools.permutations(KINDS)))
def test_without_a_derivative_the_first_runs_whatever_its_kind(kinds: tuple[str, ...]) -> None:
    found = in_order(*kinds)
    tensors = inputs(requires_grad=False)
    assert opgraft.explain(f"aten::{OP}", *tensors).winner is found[kinds[0]]
    F.scaled_dot_product_attention(*tensors)
    assert [found[kind].hits for kind in kinds] == [1, 0, 0]


@pytest.mark.parametrize("kinds", list(itertools.permutations(KINDS)))
def test_explain_and_a_trace_say_of_each_kind_what_happens(kinds: tuple[str, ...]) -> None:
    in_order(*kinds)
    tensors = inputs()
    first = next(kind for kind in kinds if kind != "none")
    with opgraft.trace() as trace:
        F.scaled_dot_product_attention(*tensors)
    (row,) = trace.rows
    traced = {each.override.name: "takes" for each in row.overrides if each.hits}
    traced |= {each.override.name: miss.status for each in row.overrides for miss in each.misses}
    explained = opgraft.explain(f"aten::{OP}", *tensors).verdicts
    (reached,) = opgraft.explain(F.scaled_dot_product_attention, *tensors).reached
    said = [
        {each.override.name: each.status for each in all_} for all_ in (explained, reached.verdicts)
    ]
    for statuses in (traced, *said):
        assert [kind for kind in kinds if statuses[kind] == "takes"] == [first]
        before = kinds[: kinds.index(first)]
        assert all(statuses[kind] == "not asked" for kind in before)
        # What comes after it, and could not differentiate the call, is one or the other.
        assert all(statuses[kind] in ("behind", "not asked") for kind in set(kinds) - {first})


@pytest.mark.parametrize("holds", [True, False], ids=["takes", "declines"])
@pytest.mark.parametrize("kind", KINDS)
def test_explain_asks_a_condition_in_python_no_more_than_it_needs(kind: str, holds: bool) -> None:
    asked: list[bool] = []

    def cond(*args: Any, **kwargs: Any) -> bool:
        asked.append(holds)
        return holds

    mine = override(autograd=KINDS[kind], cond=cond)
    tensors = inputs(requires_grad=kind != "none")
    assert (opgraft.explain(f"aten::{OP}", *tensors).winner is mine) == holds
    # Of a pair: once for whether it differentiates the call, and once for the verdict.
    assert len(asked) == (2 if kind == "pair" else 1)


@pytest.mark.parametrize("kinds", [("pair", "impl"), ("impl", "pair")])
def test_the_next_kind_runs_where_the_first_is_quarantined(kinds: tuple[str, ...]) -> None:
    def fails(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise ValueError("no kernel")

    first = override(fails, autograd=KINDS[kinds[0]], priority=1, on_error="fallback", name="first")
    then = override(autograd=KINDS[kinds[1]], name="then")
    tensors = inputs()
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        gradients(tensors)
    assert then.hits == 0
    assert opgraft.explain(f"aten::{OP}", *tensors).winner is then
    grads = gradients(tensors)
    assert (first.hits, then.hits) == (1, 1)
    assert all(bool((each == 1).all()) for each in grads) == (kinds[1] == "pair")


def checkpointed(tensors: list[torch.Tensor]) -> torch.Tensor:
    def run(*each: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*each)

    out: torch.Tensor = checkpoint(run, *tensors, use_reentrant=False)
    return out


def saving_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], output)


def saving_backward(ctx: Any, grad: torch.Tensor) -> Any:
    """Gradients that are wrong, so that they are told from others."""
    return (*(torch.ones_like(each) for each in ctx.saved_tensors[:3]), *[None] * 5)


SAVING = {**KINDS, "pair": (saving_setup, saving_backward)}


class FailsAt:
    """Attention that has no kernel for a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if query.shape[-2] == self.length:
            raise ValueError("no kernel")
        return attention(query, *args, **kwargs)


@pytest.mark.parametrize("behind", [None, "none", "impl", "pair"])
def test_a_pair_that_fails_in_a_checkpoint_leaves_its_derivative(behind: str | None) -> None:
    """What the first forward saved is compared with what the second one saves."""
    mine = override(
        FailsAt(5), autograd=SAVING["pair"], on_error="fallback", name="mine", priority=1
    )
    then = None if behind is None else override(autograd=SAVING[behind], name="then")
    tensors = inputs()
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        out = checkpointed(tensors)
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(bool((each == 1).all()) for each in grads)
    assert (mine.hits, mine.fallbacks) == (1, 1)
    assert then is None or then.hits == 0, "the second forward is native, as the first one was"


@pytest.mark.parametrize("behind", ["impl", "pair"])
def test_explain_says_that_native_runs_the_forward_of_a_quarantined_pair(behind: str) -> None:
    override(FailsAt(5), autograd=SAVING["pair"], on_error="fallback", name="mine", priority=1)
    then = override(autograd=SAVING[behind], name="then")
    tensors = inputs()
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        F.scaled_dot_product_attention(*tensors)
    hits = then.hits
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        explained = opgraft.explain("aten::scaled_dot_product_attention", *tensors)
        F.scaled_dot_product_attention(*tensors)
    assert explained.winner is None and then.hits == hits
    (verdict,) = (each for each in explained.verdicts if each.override is then)
    assert verdict.status == "not asked" and "native runs its forward" in verdict.reason


@pytest.mark.parametrize("behind", [None, "impl", "pair"])
def test_a_pair_that_fails_after_a_checkpoint_leaves_its_derivative(behind: str | None) -> None:
    """Kinds of calls have no sizes: another call puts this one into quarantine."""
    mine = override(
        FailsAt(7), autograd=SAVING["pair"], on_error="fallback", name="mine", priority=1
    )
    if behind is not None:
        override(autograd=SAVING[behind], name="then")
    tensors, longer = inputs(), torch.randn(2, 3, 7, 4, dtype=torch.float64)
    out = checkpointed(tensors)
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        F.scaled_dot_product_attention(longer, longer, longer)
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(bool((each == 1).all()) for each in grads)
    assert mine.hits == 2


def test_where_what_runs_first_fails_in_a_checkpoint_no_pair_takes_its_place() -> None:
    mine = override(FailsAt(5), on_error="fallback", name="mine", priority=1)
    then = override(autograd=SAVING["pair"], name="then")
    tensors = inputs()
    with opgraft.disabled():
        expected = torch.autograd.grad(checkpointed(tensors).sum(), tensors)
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        out = checkpointed(tensors)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), tensors), expected)
    assert (mine.hits, then.hits) == (1, 0)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_quarantined_pair_gives_no_derivative_to_calls_that_its_condition_declines(
    keeps: bool,
) -> None:
    """A condition in Python is asked after the quarantine."""
    mine = override(
        FailsAt(5),
        autograd=SAVING["pair"],
        on_error="fallback",
        cond=lambda query, *args, **kwargs: query.shape[-2] == 5,
    )
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        gradients(inputs())
    shape = (2, 3, 7, 4)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    run = checkpointed if keeps else lambda each: F.scaled_dot_product_attention(*each)
    with opgraft.disabled():
        expected = torch.autograd.grad(run(tensors).sum(), tensors)
    torch.testing.assert_close(torch.autograd.grad(run(tensors).sum(), tensors), expected)
    assert mine.hits == 1


def test_who_is_passed_by_may_have_the_name_of_who_runs() -> None:
    """A pack's override may have the name of a user's own, which has no pack."""
    before = opgraft.register_op_override(
        *("aten", OP, "CPU", attention), unconditional_override=True, name="same", priority=1
    )
    with owning("a-pack"):
        pair = override(autograd=KINDS["pair"], name="same")
    tensors = inputs()
    assert opgraft.explain(f"aten::{OP}", *tensors).winner is pair
    assert all(bool((each == 1).all()) for each in gradients(tensors))
    assert (before.hits, pair.hits) == (0, 1)


def test_a_condition_that_fails_leaves_the_call_to_the_next_kind() -> None:
    pair = override(autograd=KINDS["pair"], priority=1, cond=when.size("query", -2) >= 8)
    mine = override()
    gradients(inputs())
    assert (pair.hits, mine.hits) == (0, 1)


LONG = when.size("query", -2) >= 8


def in_python(query: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return query.size(-2) >= 8


@pytest.mark.parametrize("observed", [False, True], ids=["", "observed"])
@pytest.mark.parametrize("cond", [LONG, in_python], ids=["when", "python"])
@pytest.mark.parametrize("kind", ["pair", "impl"])
def test_who_declines_a_call_that_native_differentiates_misses_it(
    kind: str, cond: Any, observed: bool
) -> None:
    mine = override(autograd=KINDS[kind], cond=cond)
    below = override(autograd=None, cond=cond, name="below")
    with opgraft.trace() if observed else nullcontext():
        gradients(inputs())
    assert (mine.hits, mine.misses, below.misses) == (0, 1, 0)
    F.scaled_dot_product_attention(*inputs(requires_grad=False))
    assert (mine.hits, mine.misses, below.misses) == (0, 2, 1)


@pytest.mark.parametrize("conds", list(itertools.product([LONG, in_python], repeat=3)))
def test_each_that_is_asked_misses_a_call_once(conds: tuple[Any, ...]) -> None:
    """Also where one that comes between two takes it, behind which nobody is asked."""
    first = override(autograd=KINDS["pair"], cond=conds[0], name="first", priority=3)
    second = override(autograd="impl", cond=conds[1], name="second", priority=2)
    third = override(autograd=KINDS["pair"], cond=conds[2], name="third", priority=1)
    gradients(inputs())
    assert [each.misses for each in (first, second, third)] == [1, 1, 1]
    taking = override(autograd="impl", name="taking", priority=2)  # before `second`
    gradients(inputs())
    assert [each.misses for each in (first, taking, second, third)] == [2, 0, 1, 1]
    taking.remove()
    taking = override(autograd=KINDS["pair"], name="taking", priority=2)
    gradients(inputs())
    assert [each.misses for each in (first, taking, second, third)] == [3, 0, 1, 1]
    assert taking.hits == 1


def test_who_is_off_or_not_asked_misses_nothing() -> None:
    mine = override(autograd=KINDS["pair"], cond=LONG)
    tensors = inputs()
    with opgraft.disabled():
        gradients(tensors)
    with RecordOps():  # which sees the pieces
        gradients(tensors)
    opgraft.explain(f"aten::{OP}", *tensors)
    opgraft.explain(F.scaled_dot_product_attention, *tensors, backward=True)
    torch.compile(F.scaled_dot_product_attention, backend="aot_eager")(*tensors)
    assert mine.misses == 0


@pytest.mark.parametrize("first", ["none", "pair"])
def test_a_condition_on_grad_mode_is_the_same_in_the_forward(first: str) -> None:
    """Autograd has switched it off there, where another override would run."""

    def is_training(*args: Any, **kwargs: Any) -> bool:
        return torch.is_grad_enabled()

    def is_not(*args: Any, **kwargs: Any) -> bool:
        return not torch.is_grad_enabled()

    pair = override(autograd=KINDS["pair"], cond=is_training, name="pair")
    none = override(autograd=None, cond=is_not, name="none", priority=1 if first == "none" else -1)
    for _ in range(4):
        assert all(bool((each == 1).all()) for each in gradients(inputs()))
    assert (pair.hits, none.hits) == (4, 0)
    with torch.no_grad():
        F.scaled_dot_product_attention(*inputs())
    assert (pair.hits, none.hits) == (4, 1)


def odd(*args: Any, **kwargs: Any) -> bool:
    raise KeyError("an odd argument")


@pytest.mark.parametrize("kind", ["pair", "impl"])
def test_a_condition_that_raises_is_an_error(kind: str) -> None:
    mine = override(autograd=KINDS[kind], cond=odd, name="mine", priority=1)
    then = override(name="then")
    tensors = inputs()
    (reached,) = opgraft.explain(F.scaled_dot_product_attention, *tensors).reached
    for explained in (opgraft.explain(f"aten::{OP}", *tensors), reached):
        assert explained.winner is None and "its condition raises KeyError" in str(explained)
    with pytest.raises(KeyError, match="an odd argument"):
        gradients(tensors)
    mine.remove()
    gradients(tensors)
    assert (mine.hits, then.hits) == (0, 1)


@pytest.mark.parametrize("run", [gradients, lambda tensors: checkpointed(tensors).sum().backward()])
@pytest.mark.parametrize("kind", ["pair", "impl"])
def test_a_condition_that_raises_may_fall_back(kind: str, run: Callable[..., Any]) -> None:
    mine = override(autograd=KINDS[kind], cond=odd, on_error="fallback", name="mine", priority=1)
    then = override(name="then")
    with pytest.warns(opgraft.OverrideWarning, match="mine.*failed.*an odd argument"):
        run(inputs())
    hits = then.hits
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        run(inputs())
    assert mine.hits == 0 and then.hits == 2 * hits > 0
    (verdict, _) = opgraft.explain(f"aten::{OP}", *inputs()).verdicts
    assert verdict.status == "quarantined"


def test_who_comes_first_without_a_derivative_takes_the_next_call_without_one() -> None:
    """That it was passed by ends with the call."""
    found = in_order("none", "pair")
    gradients(inputs())
    F.scaled_dot_product_attention(*inputs(requires_grad=False))
    assert (found["none"].hits, found["pair"].hits) == (1, 1)


@pytest.mark.parametrize("kinds", [("none", "pair"), ("impl", "pair")])
def test_a_compiled_graph_keeps_the_composite_where_the_pair_is_not_first(
    kinds: tuple[str, ...],
) -> None:
    """The graph would ask the whole chain when it runs."""
    in_order(*kinds, compile="opaque")
    tensors = inputs(dtype=torch.float32)
    with opgraft.disabled():
        expected = gradients(tensors)
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
    found = torch.autograd.grad(compiled(*tensors).square().sum(), tensors)
    torch.testing.assert_close(found, expected)


# ------------------------------------------------------------------ registration


def test_an_op_with_a_kernel_of_its_own_cannot_have_it() -> None:
    with pytest.raises(RegistrationError, match=r"aten::_softmax: the op is not composite at CPU"):
        opgraft.register_op_override(
            *("aten", "_softmax", "CPU", lambda self, dim, half_to_float: self),
            unconditional_override=True,
            autograd="impl",
        )


def test_a_launch_plan_would_hide_the_ops() -> None:
    with pytest.raises(RegistrationError, match="a launch plan replays kernels"):
        override(launch_plan=True)


def test_kernels_that_are_not_ready_are_for_the_ops() -> None:
    with pytest.raises(RegistrationError, match="when_not_ready='native'"):
        override(when_not_ready="native")


def test_another_word_is_refused() -> None:
    with pytest.raises(RegistrationError, match=r"two functions.*or 'impl'.*it is 'through'"):
        override(autograd="through")


@where_the_core_routes
def test_the_python_router_does_the_same() -> None:
    run_again(__file__)
