"""Calls that the compiled router takes as C++ arguments, for the signatures in csrc/signatures.h.

An impl returns what native does, plus one: so a result tells who ran, and an argument that arrived
wrong tells as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import router, when
from opgraft.core import loader
from opgraft.ops.schema import resolve
from opgraft.registry import registry
from opgraft.router.compiled import CompiledRouter
from tests import probes

if loader.in_use() is None:
    pytest.skip(f"Python routes here: {loader.status()}", allow_module_level=True)


def is_typed(op: str, dispatch_key: str = "CPU") -> bool:
    installed = router.install(registry.chain(resolve(op), dispatch_key))
    assert isinstance(installed, CompiledRouter)
    typed: bool = installed._router.is_typed
    return typed


def _map(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_map(function, each) for each in value)
    return function(value) if isinstance(value, torch.Tensor) else value


def plus_one(op: str) -> Callable[..., Any]:
    """Native's result with one added; in place where the op writes to its arguments."""
    native = opgraft.native(op)
    writes = resolve(op).overload._schema.is_mutable

    def impl(*args: Any, **kwargs: Any) -> Any:
        result = native(*args, **kwargs)
        return _map(lambda each: each.add_(1) if writes else each + 1, result)

    return impl


def override(op: str, **keywords: Any) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    name_space, _, symbol = op.partition("::")
    return opgraft.register_op_override(name_space, symbol, "CPU", plus_one(op), **keywords)


class Case(NamedTuple):
    """An op with the call that reaches it from Python, as a user writes it."""

    op: str
    call: Callable[[], Any]


def x(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator).to(dtype)


INDEX = torch.tensor([0, 2])
CASES = [
    Case("aten::mul.Tensor", lambda: x(3, 4) * x(4)),
    Case("aten::add.Tensor", lambda: torch.add(x(3, 4), x(3, 4), alpha=2)),
    Case("aten::pow.Tensor_Scalar", lambda: x(3) ** 2),
    Case("aten::silu", lambda: F.silu(x(3))),
    Case("aten::gelu", lambda: F.gelu(x(3), approximate="tanh")),
    Case("aten::clamp", lambda: x(5).clamp(min=-0.5)),
    Case("aten::where.self", lambda: torch.where(x(3) > 0, x(3), x(1))),
    Case("aten::sum.dim_IntList", lambda: x(3, 4).sum([0, 1], dtype=torch.float64)),
    Case("aten::max.dim", lambda: x(3, 4).max(1).values),
    Case("aten::_softmax", lambda: torch.softmax(x(3, 4), -1)),
    Case("aten::mm", lambda: x(2, 3) @ x(3, 4)),
    Case("aten::bmm", lambda: torch.bmm(x(2, 3, 4), x(2, 4, 2))),
    Case("aten::addmm", lambda: F.linear(x(2, 3), x(4, 3), x(4))),
    Case("aten::native_layer_norm", lambda: F.layer_norm(x(3, 4), (4,), x(4))),
    Case("aten::native_group_norm", lambda: F.group_norm(x(2, 4, 3), 2)),
    Case("aten::native_batch_norm", lambda: F.batch_norm(x(4, 3), None, None, training=True)),
    Case(
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        lambda: F.scaled_dot_product_attention(*[x(1, 2, 8, 16)] * 3, scale=0.5),
    ),
    Case("aten::cat", lambda: torch.cat([x(2, 3), x(1, 3)])),
    Case("aten::index.Tensor", lambda: x(4, 3)[:, INDEX]),
    Case("aten::embedding", lambda: F.embedding(INDEX, x(4, 3), padding_idx=1)),
    Case("aten::gather", lambda: x(3, 4).gather(1, torch.zeros(3, 1, dtype=torch.long))),
    Case("aten::topk", lambda: x(8).topk(2).values),
    Case("aten::upsample_nearest2d", lambda: F.interpolate(x(1, 1, 2, 2), scale_factor=2.0)),
    Case("aten::clone", lambda: x(3, 4).T.clone(memory_format=torch.contiguous_format)),
    Case("aten::_foreach_add.Scalar", lambda: torch._foreach_add([x(2), x(3)], 2)),
    Case("aten::_foreach_mul.ScalarList", lambda: torch._foreach_mul([x(2), x(3)], [2, 0.5])),
    Case("aten::mul_.Tensor", lambda: x(3).mul_(x(3))),
    Case("aten::fill_.Scalar", lambda: x(3).fill_(7)),
    Case("aten::index_put_", lambda: x(4).index_put_((INDEX,), x(2), accumulate=True)),
    Case("aten::mm.out", lambda: torch.mm(x(2, 3), x(3, 4), out=torch.empty(2, 4))),
    Case("aten::mul.out", lambda: torch.mul(x(3), x(3), out=torch.empty(3))),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)


def assert_same(got: Any, expected: Any) -> None:
    with opgraft.disabled():  # comparing calls ops too
        torch.testing.assert_close(got, expected)


def and_one(value: Any) -> Any:
    with opgraft.disabled():
        return _map(lambda each: each + 1, value)


@each_case
def test_a_hit_gets_the_call_s_arguments_and_gives_its_result(case: Case) -> None:
    expected = and_one(case.call())
    mine = override(case.op)
    assert is_typed(case.op)
    for hits in (1, 2, 3, 4):  # the first two are checked against native, on a way of their own
        assert_same(case.call(), expected)
        assert (mine.hits, mine.misses) == (hits, 0)


@each_case
def test_a_miss_is_native_and_counted(case: Case) -> None:
    expected = case.call()
    first = resolve(case.op).arguments[0].name
    is_list = resolve(case.op).arguments[0].kind.startswith("List")
    tensor = when.item(first, 0) if is_list else first
    first_cond = (when.ndim(tensor) >= 0) & (when.numel(tensor) == 10**9)
    mine, other = (override(case.op, name=name, cond=first_cond) for name in "ab")
    for misses in (1, 2, 3):
        assert_same(case.call(), expected)
        assert (mine.hits, mine.misses, other.misses) == (0, misses, misses)


@pytest.mark.parametrize("argument", ["self", "mat1", "mat2"])
def test_a_miss_is_counted_whichever_argument_a_condition_asks_for(argument: str) -> None:
    added = override("aten::addmm", cond=when.size(argument, 0) == 5)
    torch.addmm(x(5), x(5, 5), x(5, 5))
    for _ in range(3):
        torch.addmm(x(4), x(4, 4), x(4, 4))
    assert (added.hits, added.misses) == (1, 3)


def test_overrides_that_ask_for_different_arguments_are_switched_on_and_off() -> None:
    of_self = override("aten::addmm", cond=when.size("self", 0) == 5, name="of_self")
    of_mat2 = override("aten::addmm", cond=when.size("mat2", 0) == 6, name="of_mat2")
    arguments = x(4), x(4, 6), x(6, 4)
    native = opgraft.native("aten::addmm")(*arguments)
    for off, is_hit in (("of_self", True), ("of_mat2", False), ("of_self", True)):
        opgraft.enable()
        opgraft.disable(name=off)
        hits = of_mat2.hits
        result = torch.addmm(*arguments)
        torch.testing.assert_close(result, native + is_hit)
        assert of_mat2.hits == hits + is_hit
    assert of_self.misses == 1


@pytest.mark.parametrize("made", [lambda: x(3, 4), lambda: x(4, 3).t()], ids=["rows", "columns"])
def test_a_condition_of_strides_alone_decides(made: Callable[[], torch.Tensor]) -> None:
    added = override("aten::silu", cond=when.is_contiguous("self"))
    given = made()
    torch.testing.assert_close(F.silu(given), given * given.sigmoid() + given.is_contiguous())
    assert (added.hits, added.misses) == (given.is_contiguous(), not given.is_contiguous())


def test_a_tensor_whose_sizes_are_its_own_to_say_is_no_hit_and_no_error() -> None:
    added = override("aten::silu", cond=when.size("self", 0) == 5)
    nested = torch.nested.nested_tensor([x(2, 3), x(4, 3)])
    assert [each.shape for each in F.silu(nested).unbind()] == [(2, 3), (4, 3)]
    assert added.hits == 0


@each_case
def test_an_override_that_is_off_is_not_asked(case: Case) -> None:
    expected = case.call()
    mine = override(case.op, name="off")
    with opgraft.disabled(name="off"):
        assert_same(case.call(), expected)
    opgraft.disable(name="off")
    assert_same(case.call(), expected)
    assert (mine.hits, mine.misses) == (0, 0)


@each_case
def test_a_condition_in_python_gets_the_arguments(case: Case) -> None:
    native = case.call()
    expected = and_one(native)
    given: list[int] = []

    def cond(*args: Any, **kwargs: Any) -> bool:
        given.append(len(args) + len(kwargs))
        return len(given) > 1

    mine = override(case.op, cond=cond)
    assert_same(case.call(), native)
    assert_same(case.call(), expected)
    assert given == [len(resolve(case.op).arguments)] * 2
    assert (mine.hits, mine.misses) == (1, 1)


# ------------------------------------------------------------------ what the op returns


def test_an_op_in_place_returns_what_it_was_given() -> None:
    mine = override("aten::mul_.Tensor")
    tensor = torch.ones(3)
    assert tensor.mul_(torch.full((3,), 2.0)) is tensor
    assert tensor.tolist() == [3, 3, 3]
    assert mine.hits == 1


def test_an_op_with_out_returns_what_it_was_given() -> None:
    mine = override("aten::mul.out")
    out = torch.empty(3)
    assert torch.mul(torch.ones(3), torch.ones(3), out=out) is out
    assert out.tolist() == [2, 2, 2]
    assert mine.hits == 1


def test_several_outputs_come_in_their_order() -> None:
    mine = override("aten::native_layer_norm")
    args = (x(3, 4), [4], None, None, 1e-5)
    expected = opgraft.native("aten::native_layer_norm")(*args)
    got = torch.native_layer_norm(*args)
    assert mine.hits == 1
    for one, native in zip(got, expected, strict=True):
        assert_same(one, native + 1)


def test_an_op_without_results() -> None:
    tensors = [torch.zeros(2), torch.ones(1)]

    def impl(self: list[torch.Tensor], scalar: float) -> None:
        for tensor in self:
            tensor.fill_(scalar * 10)

    mine = opgraft.register_op_override(
        "aten", "_foreach_add_.Scalar", "CPU", impl, unconditional_override=True
    )
    torch._foreach_add_(tensors, 2)
    assert mine.hits == 1
    assert [tensor.tolist() for tensor in tensors] == [[20, 20], [20]]


def test_an_impl_that_raises_does_so_through_the_typed_call() -> None:
    class Own(Exception):
        pass

    def impl(*_: Any) -> Any:
        raise Own("mine")

    opgraft.register_op_override("aten", "bmm", "CPU", impl, unconditional_override=True)
    with pytest.raises(Own, match="mine"):
        torch.bmm(x(1, 2, 2), x(1, 2, 2))


def test_natives_error_is_natives() -> None:
    override("aten::bmm", cond=when.numel("self") == 0)
    with pytest.raises(RuntimeError, match="size"):
        torch.bmm(x(1, 2, 2), x(1, 3, 2))


def test_the_same_op_inside_the_impl_is_native() -> None:
    mine = opgraft.register_op_override(
        "aten", "bmm", "CPU", lambda keyset, self, mat2: torch.bmm(self, mat2)
    )
    a = x(2, 3, 3)
    got = torch.bmm(a, a)
    assert (mine.hits, mine.fallbacks) == (1, 1)
    assert_same(got, torch.stack([each @ each for each in a]))


# ------------------------------------------------------------------ other ways to the same kernel


def test_a_boxed_call_is_routed_alike() -> None:
    mine = override("aten::_softmax", cond=when.size("self", -1) == 4)
    with torch.inference_mode():  # without the autograd kernel, which would unbox it
        hit = torch.ops.aten._softmax.default(x(3, 4), -1, False)
        torch.ops.aten._softmax.default(x(3, 5), -1, False)
    assert_same(hit, opgraft.native("aten::_softmax")(x(3, 4), -1, False) + 1)
    assert (mine.hits, mine.misses) == (1, 1)
    probes.call_on_a_thread("aten::_softmax", [x(3, 4)], (-1, False), 10)
    probes.call_on_a_thread("aten::_softmax", [x(3, 5)], (-1, False), 10)
    assert (mine.hits, mine.misses) == (11, 11)


def test_a_boxed_call_of_an_op_in_place_and_with_out() -> None:
    in_place, out_of = override("aten::mul_.Tensor"), override("aten::mul.out")
    with torch.inference_mode():
        tensor, out = torch.ones(2), torch.empty(2)
        assert torch.ops.aten.mul_.Tensor(tensor, torch.full((2,), 2.0)) is tensor
        assert torch.ops.aten.mul.out(tensor, torch.ones(2), out=out) is out
    assert (tensor.tolist(), out.tolist()) == ([3, 3], [4, 4])
    assert (in_place.hits, out_of.hits) == (1, 1)


def test_a_scripted_function() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return torch.bmm(a, a)

    scripted = torch.jit.script(function)
    a = x(2, 3, 3)
    expected = and_one(function(a))
    mine = override("aten::bmm")
    for hits in (1, 2, 3):
        assert_same(scripted(a), expected)
        assert mine.hits == hits


def test_autograd_differentiates_above_it() -> None:
    forward = opgraft.register_op_override(
        "aten",
        "bmm",
        "CPU",
        lambda self, mat2: torch.einsum("bij,bjk->bik", self, mat2),
        cond=when.size("self", 0) == 2,
    )
    a = x(2, 3, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(torch.bmm, (a, a.detach().clone()))
    assert forward.hits > 0


def test_vmap_brings_the_batch_to_it() -> None:
    mine = override("aten::_softmax", cond=when.ndim("self") == 3)
    batch = x(5, 3, 4)
    got = torch.vmap(lambda each: torch.softmax(each, -1))(batch)
    assert_same(got, opgraft.native("aten::_softmax")(batch, -1, False) + 1)
    assert mine.hits == 1


def test_symbolic_sizes_are_numbers_by_the_time_they_arrive() -> None:
    # The C++ kernel of `embedding` takes a symbolic integer.
    mine = override("aten::embedding", cond=when.value("padding_idx") == 2)
    assert is_typed("aten::embedding")
    torch._dynamo.reset()
    weight = x(6, 3)

    def function(index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, weight, padding_idx=2) * index.shape[0]

    compiled = torch.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)
    for size in (2, 3, 5):
        index = torch.arange(size)
        expected = (weight[index] + 1) * size
        assert_same(compiled(index), expected)
    assert mine.hits == 3


def test_fake_tensors_never_reach_it() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mine = override("aten::native_layer_norm")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(x(3, 4))
        assert F.layer_norm(fake, (fake.shape[-1],)).shape == (3, 4)
    assert (mine.hits, mine.misses) == (0, 0)


@pytest.mark.parametrize("boxed", [False, True])
def test_a_symbolic_size_at_the_kernel_itself_is_no_number_to_a_condition(boxed: bool) -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mine = override("aten::roll", cond=when.item("shifts", 0) == 1)
    size = ShapeEnv().create_unbacked_symint()
    roll = torch.ops.aten.roll.default
    with torch.inference_mode(boxed):  # without the autograd kernel, which hands on C++ arguments
        with pytest.raises(Exception, match="concrete integers"):
            roll(x(4), [size], [0])  # native needs the number, and there is none
        assert (mine.hits, mine.misses) == (0, 1)
        roll(x(4), [1], [0])
        assert mine.hits == 1


# ------------------------------------------------------------------ what is taken boxed


def test_an_op_with_another_signature_is_routed_boxed() -> None:
    assert not is_typed("aten::_linalg_det")
    calls = override("aten::_linalg_det", cond=when.size("A", -1) == 2)
    expected = torch.linalg.det(x(3, 3))
    assert_same(torch.linalg.det(x(3, 3)), expected)
    torch.linalg.det(x(2, 2))
    assert (calls.hits, calls.misses) == (1, 2)


def test_an_op_whose_kernel_is_python_s_is_routed_boxed() -> None:
    with torch.library._scoped_library("opgraft_typed", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        mine = opgraft.register_op_override(
            "opgraft_typed", "double", "CPU", lambda x: x * 3, cond=when.numel("x") == 2
        )
        assert not is_typed("opgraft_typed::double")
        op = torch.ops.opgraft_typed.double
        assert op(torch.ones(2)).tolist() == [3, 3]
        assert op(torch.ones(1)).tolist() == [2]
    assert (mine.hits, mine.misses) == (1, 1)
