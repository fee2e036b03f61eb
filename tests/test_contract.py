"""The contract check: an override that returns what native never would is an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import opgraft
from opgraft import ContractError
from opgraft.core import loader
from opgraft.registry.state import CHECKED_HITS, OverrideState
from opgraft.router import contract, outputs
from tests import ops
from tests.python_router import run_again, where_the_core_routes


def register(impl: Callable[..., Any], op: str = "_softmax", **keywords: Any) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten", op, "CPU", impl, unconditional_override=True, name="mine", **keywords
    )


BROKEN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "dtype": (lambda y: y.double(), r"dtype torch.float64, native's is torch.float32"),
    "shape": (lambda y: y[:1].clone(), r"shape torch.Size\(\[1, 4\]\), native's is"),
    "device": (lambda y: y.to("meta"), r"device meta, native's is cpu"),
    "strides": (lambda y: y.t().contiguous().t(), r"strides \(1, 3\), native's are \(4, 1\)"),
    "None instead of a tensor": (lambda y: None, r"None instead of a tensor"),
    "number of outputs": (lambda y: (y, y), r"tuple instead of a tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_output_unlike_natives_is_refused(name: str) -> None:
    change, message = BROKEN[name]
    override = register(lambda *args: change(ops.softmax(*args)))
    with pytest.raises(
        ContractError, match=rf"override 'mine' of aten::_softmax at CPU.*{message}"
    ):
        torch.softmax(torch.randn(3, 4), -1)
    assert override.hits == 1


def test_an_output_in_an_arguments_memory_is_refused() -> None:
    register(lambda self, dim, half_to_float: self)
    with pytest.raises(ContractError, match="output 0 in the memory of an argument"):
        torch.softmax(torch.randn(3, 4), -1)


def test_outputs_that_share_memory_are_refused() -> None:
    def impl(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.zeros(4, 5)
        return both[:, :4], both[:, 4:]

    register(impl, op="_fused_rms_norm")
    with pytest.raises(ContractError, match=r"strides|same memory"):
        torch.ops.aten._fused_rms_norm(torch.randn(4, 4), [4], None, None)


def test_too_few_outputs_are_refused_on_every_hit() -> None:
    results: list[Any] = []

    def impl(*args: Any) -> Any:
        return results.pop() if results else ops.rms_norm(*args)

    override = register(impl, op="_fused_rms_norm")
    x = torch.randn(4, 4)
    for _ in range(CHECKED_HITS + 1):
        torch.ops.aten._fused_rms_norm(x, [4], None, None)
    results.append((x,))
    with pytest.raises(ContractError, match="returned 1 values; the op has 2 outputs"):
        torch.ops.aten._fused_rms_norm(x, [4], None, None)
    assert override.hits == CHECKED_HITS + 2


def test_an_in_place_op_returns_its_argument() -> None:
    register(lambda self, other, alpha: self + other, op="add_.Tensor")
    x = torch.ones(3)
    with pytest.raises(ContractError, match="returned a new Tensor as output 0"):
        x += torch.ones(3)


def test_strides_count_only_where_native_agrees_with_its_own_meta() -> None:
    x = torch.randn(2, 3, 4, 5).transpose(1, 3)
    arguments = (None, None, None, None, True, 0.1, 1e-5)
    native = torch.native_batch_norm(x, *arguments)
    meta = torch.native_batch_norm(x.to("meta"), *arguments)
    assert native[0].stride() != meta[0].stride(), "pick another op: this one agrees by now"

    def impl(*args: Any) -> tuple[torch.Tensor, ...]:
        out, mean, rstd = opgraft.native("aten::native_batch_norm")(*args)
        return torch.empty_like(meta[0], device="cpu").copy_(out), mean, rstd

    override = register(impl, op="native_batch_norm")
    assert torch.native_batch_norm(x, *arguments)[0].stride() == meta[0].stride()
    assert override.hits == 1


def test_a_view_may_alias_because_native_does() -> None:
    override = register(lambda self, size: self.as_strided(size, (1,)), op="view")
    x = torch.randn(3, 4)
    assert x.view(12).untyped_storage()._cdata == x.untyped_storage()._cdata
    assert override.hits == 1


def test_only_the_first_hits_of_a_signature_are_compared() -> None:
    override = register(ops.softmax)
    for rows in range(1, 6):
        torch.softmax(torch.randn(rows, 4), -1)  # sizes do not make a new signature
    assert list(override.state.checked.values()) == [CHECKED_HITS]
    torch.softmax(torch.randn(4), -1)
    torch.softmax(torch.randn(4, 4).double(), -1)
    torch.softmax(torch.randn(4, 4)[:, :3], -1)
    assert len(override.state.checked) == 4
    assert override.hits == 8


def test_a_random_op_is_checked_without_touching_the_generator() -> None:
    def impl(self: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.rand(self.shape) > p
        return self * mask / (1 - p), mask

    override = register(impl, op="native_dropout")
    x = torch.randn(8)
    torch.manual_seed(0)
    first = torch.native_dropout(x, 0.5, True)
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(8)
    assert override.hits == 1
    assert torch.equal(torch.rand(1), after)
    assert first[0].shape == x.shape


def test_an_untagged_random_op_of_a_library_is_checked_without_touching_the_generator() -> None:
    with torch.library._scoped_library("opgraft_random", "FRAGMENT") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x + torch.rand(8), "CPU")
        override = opgraft.register_op_override(
            *("opgraft_random", "noisy", "CPU", lambda x: x + torch.rand(8) / 2),
            unconditional_override=True,
        )
        torch.manual_seed(0)
        torch.ops.opgraft_random.noisy(torch.ones(8))
        after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(8)
    assert override.hits == 1
    assert torch.equal(torch.rand(1), after)


def test_overrides_are_off_while_native_is_asked() -> None:
    inner = opgraft.register_op_override(
        "aten",
        "mean.dim",
        "CPU",
        lambda *args, **kwargs: opgraft.native("aten::mean.dim")(*args, **kwargs),
        unconditional_override=True,
    )

    def impl(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = args[0]
        rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-6)
        return x * rstd, rstd

    # Natively `_fused_rms_norm` is composed of ops with `mean` among them.
    override = register(impl, op="_fused_rms_norm")
    torch.ops.aten._fused_rms_norm(torch.randn(4, 4), [4], None, 1e-6)
    assert (override.hits, inner.hits) == (1, 0)


# ------------------------------------------------------------------ lists, views, layouts


def native_of(op: str) -> Callable[..., Any]:
    return opgraft.native(f"aten::{op}")


LISTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a list of new tensors": (
        "_foreach_add.Scalar",
        lambda: torch._foreach_add([torch.ones(3), torch.ones(2, 4)], 1),
    ),
    "a list of views": ("split.Tensor", lambda: torch.ones(6).split(3)),
    "a list of slices": ("unbind.int", lambda: torch.ones(2, 3).unbind()),
}
LIST_FAULTS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "1 items, native returns 2": lambda items: items[:1],
    "item 1 with dtype": lambda items: [items[0], items[1].double()],
    "item 1 with shape": lambda items: [items[0], items[1].unsqueeze(0)],
    "output 0 with Tensor, native returns": lambda items: items[0],
}


@pytest.mark.parametrize("fault", LIST_FAULTS)
@pytest.mark.parametrize("name", LISTS)
def test_items_of_a_list_are_compared(name: str, fault: str) -> None:
    op, call = LISTS[name]
    native = native_of(op)
    override = register(lambda *args: LIST_FAULTS[fault](list(native(*args))), op=op)
    with pytest.raises((ContractError, RuntimeError, TypeError), match="mine") as raised:
        call()
    assert isinstance(raised.value, ContractError) and fault.split(",", maxsplit=1)[0] in str(
        raised.value
    )
    assert override.hits == 1


def test_items_in_one_memory_are_refused() -> None:
    def impl(self: list[torch.Tensor], scalar: Any) -> list[torch.Tensor]:
        return list(torch.zeros(2, 3).unbind())

    register(impl, op="_foreach_add.Scalar")
    with pytest.raises(ContractError, match="two outputs in the same memory"):
        torch._foreach_add([torch.ones(3), torch.ones(3)], 1)


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x.view(12),
    "expand": lambda x: x.unsqueeze(0).expand(2, 3, 4),
    "transpose.int": lambda x: x.transpose(0, 1),
    "slice.Tensor": lambda x: x[1:],
    "select.int": lambda x: x.select(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "as_strided": lambda x: x.as_strided((2,), (1,)),
    "split.Tensor": lambda x: x.split(2),
}


@pytest.mark.parametrize("op", VIEWS)
def test_a_view_op_that_returns_copies_is_refused(op: str) -> None:
    native = native_of(op)

    def impl(*args: Any, **kwargs: Any) -> Any:
        result = native(*args, **kwargs)
        return [t.clone() for t in result] if isinstance(result, (list, tuple)) else result.clone()

    override = register(impl, op=op)
    with pytest.raises(
        ContractError, match=r"override 'mine' .*(strides|in new memory, where native's is a view)"
    ):
        VIEWS[op](torch.randn(3, 4))
    assert override.hits == 1


def test_a_view_of_another_place_is_refused() -> None:
    register(lambda self, dim, index: self[0], op="select.int")
    with pytest.raises(ContractError, match="0 bytes into an argument's memory, native's is 16"):
        torch.randn(3, 4).select(0, 1)


def test_a_view_of_another_place_is_refused_where_no_schema_says_that_it_is_one() -> None:
    def impl(self: torch.Tensor, split_size: int, dim: int = 0) -> Any:
        return native_of("unsafe_split.Tensor")(self, split_size, dim)[::-1]

    override = register(impl, op="unsafe_split.Tensor")
    with pytest.raises(ContractError, match="48 bytes into an argument's memory, native's is 0"):
        torch.unsafe_split(torch.randn(6, 4), 3)
    assert override.hits == 1


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", outputs.TOLERANCES, ids=str)
def test_numbers_near_the_largest_are_told_apart(dtype: torch.dtype) -> None:
    """The absolute value of a complex number may be infinite where both parts are finite."""
    largest = torch.finfo(dtype).max
    number = complex(largest, largest) if dtype.is_complex else largest
    native = torch.tensor([number, 1.0], dtype=dtype)
    for other in (-number, 0.5 * number):
        actual = torch.tensor([other, 1.0], dtype=dtype)
        assert outputs.value_difference(actual, native) is not None
        assert outputs.Difference(actual, native, finite=False).found()
    assert outputs.value_difference(native.clone(), native) is None
    assert not outputs.Difference(native.clone(), native, finite=False).found()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("one", [NAN, INF, -INF, 0.0])
@pytest.mark.parametrize("other", [NAN, INF, -INF, 0.0])
def test_special_values_are_told_apart(one: float, other: float, dtype: torch.dtype) -> None:
    actual, native = (torch.tensor([1.0, each], dtype=dtype) for each in (one, other))
    same = repr(one) == repr(other) or (dtype.is_complex and {one, other} == {INF, -INF})
    assert (outputs.value_difference(actual, native) is None) == same
    assert outputs.Difference(actual, native, finite=False).found() != same
    is_finite = bool((actual.isfinite() & native.isfinite()).all())
    expected = not same if is_finite else None
    assert outputs.Difference(actual, native, finite=True).found() == expected


LAYOUTS_OF_BOTH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda values: values,
    "permuted": lambda values: values.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "expanded": lambda values: values[:1].expand(values.shape),
    "complex": lambda values: torch.complex(values, -values),
    "conjugate": lambda values: torch.complex(values, -values).conj(),
}


@pytest.mark.parametrize("layout", LAYOUTS_OF_BOTH.values(), ids=LAYOUTS_OF_BOTH)
@pytest.mark.parametrize("place", [(0, 0, 0), (0, 3, 4), (0, 1, 2)])
@pytest.mark.parametrize("finite", [True, False])
def test_a_difference_is_found_in_whatever_part_it_is(
    layout: Callable[[torch.Tensor], torch.Tensor],
    place: tuple[int, ...],
    finite: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outputs, "_PART", 7)
    differs = partial(outputs.Difference, finite=finite)
    values = torch.randn(3, 4, 5)
    other = values.clone()
    other[place] += 1
    native = layout(values)
    assert differs(native.clone(), native).found() is False
    assert differs(layout(other).clone(), native).found()


def test_integers_are_compared_exactly() -> None:
    large = torch.tensor([2**62, 1])
    for one, same in [(large, True), (large + 1, False), (large[:0], True)]:
        other = large[: len(one)]
        assert outputs.Difference(one, other, finite=True).found() is not same


def test_a_view_op_that_returns_its_argument_is_refused() -> None:
    register(lambda self, size: self, op="view")
    with pytest.raises(ContractError, match="being an argument itself"):
        torch.randn(3, 4).view(3, 4)


LAYOUTS: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {
    "sparse_coo": ("_to_sparse", lambda: torch.eye(3).to_sparse()),
    "sparse_csr": ("_to_sparse_csr", lambda: torch.eye(3).to_sparse_csr()),
    "sparse_bsc": ("_to_sparse_bsc", lambda: torch.eye(4).to_sparse_bsc((2, 2))),
    "mkldnn": ("to_mkldnn", lambda: torch.eye(3).to_mkldnn()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_without_strides_pass_where_they_are_right(layout: str) -> None:
    op, call = LAYOUTS[layout]
    override = register(native_of(op), op=op)
    expected = call().to_dense()
    with opgraft.shadow(rate=1.0, on_mismatch="raise"):
        for _ in range(CHECKED_HITS):
            assert torch.equal(call().to_dense(), expected)
    assert override.hits == CHECKED_HITS + 1
    assert override.shadowed == CHECKED_HITS


SPARSE_FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layout torch.strided": lambda t: t.to_dense(),
    "dtype torch.float64": lambda t: t.double(),
    r"shape torch.Size\(\[4, 3\]\)": lambda t: torch.sparse_coo_tensor(
        t.indices(), t.values(), (4, 3), is_coalesced=True
    ),
    "is_coalesced False": lambda t: torch.sparse_coo_tensor(t.indices(), t.values(), (3, 3)),
    "sparse_dim 1": lambda t: t.to_dense().to_sparse(1),
}


@pytest.mark.parametrize("fault", SPARSE_FAULTS)
def test_sparse_outputs_are_compared(fault: str) -> None:
    native = native_of("_to_sparse")
    register(lambda *args, **kwargs: SPARSE_FAULTS[fault](native(*args, **kwargs)), op="_to_sparse")
    with pytest.raises(ContractError, match=f"override 'mine' .* with {fault}"):
        torch.eye(3).to_sparse()


@pytest.mark.parametrize(("scale", "zero_point"), [(0.2, 3), (0.1, 4)])
def test_the_quantizer_of_an_output_is_compared(scale: float, zero_point: int) -> None:
    native = native_of("quantize_per_tensor")
    register(
        lambda self, *args: native(self, scale, zero_point, torch.qint8), op="quantize_per_tensor"
    )
    with warnings.catch_warnings(), pytest.raises(ContractError, match=r"mine.* with quantizer"):
        warnings.simplefilter("ignore")
        torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.qint8)


# ------------------------------------------------------------------ kinds of calls


def forgets(op: str, name: str, instead: Any) -> Callable[..., Any]:
    """Native, but for one argument, which it takes to be another."""
    native = native_of(op)
    overload = opgraft.ops.schema.resolve(f"aten::{op}")

    def impl(*args: Any, **kwargs: Any) -> Any:
        named = overload.bind(args, kwargs).named | {name: instead}
        call = overload.bind((), named)
        return native(*call.args, **call.kwargs)

    return impl


X = torch.arange(12.0).view(3, 4) + 1
KINDS: dict[str, tuple[str, str, Any, Callable[[], Any], Callable[[], Any]]] = {
    "keepdim": ("argmax", "keepdim", False, lambda: X.argmax(1), lambda: X.argmax(1, True)),
    "a dtype": (
        *("cumsum", "dtype", torch.float32),
        *(lambda: X.cumsum(0, dtype=torch.float32), lambda: X.cumsum(0, dtype=torch.float64)),
    ),
    "no dtype": (
        *("sum.dim_IntList", "dtype", None),
        *(lambda: X.sum(0), lambda: X.sum(0, dtype=torch.float64)),
    ),
    "a dimension": ("argmax", "dim", 1, lambda: X.argmax(1), lambda: X.argmax(0)),
    "dimensions": ("sum.dim_IntList", "dim", [0], lambda: X.sum([0]), lambda: X.sum([1])),
    "a memory format": (
        *("clone", "memory_format", torch.preserve_format),
        lambda: X.t().clone(memory_format=torch.preserve_format),
        lambda: X.t().clone(memory_format=torch.contiguous_format),
    ),
    "a mask": (
        *("native_layer_norm_backward", "output_mask", [True, True, True]),
        lambda: layer_norm_backward([True, True, True]),
        lambda: layer_norm_backward([True, False, True]),
    ),
    "a reduction": (
        *("mse_loss", "reduction", 1),
        lambda: torch.ops.aten.mse_loss(X, X + 1, 1),
        lambda: torch.ops.aten.mse_loss(X, X + 1, 0),
    ),
}


def layer_norm_backward(mask: list[bool]) -> Any:
    one, weight = torch.ones(3, 1), torch.ones(4)
    return torch.ops.aten.native_layer_norm_backward(X, X, [4], one, one, weight, weight, mask)


@pytest.mark.parametrize("name", KINDS)
def test_what_chooses_the_kind_of_an_output_is_part_of_a_calls_kind(name: str) -> None:
    op, argument, instead, good, bad = KINDS[name]
    override = register(forgets(op, argument, instead), op=op)
    for _ in range(CHECKED_HITS + 1):
        good()
    with pytest.raises(ContractError, match="override 'mine'"):
        bad()
    assert override.hits == CHECKED_HITS + 2


def test_sizes_and_numbers_make_no_kinds() -> None:
    override = register(native_of("view"), op="view")
    clamp = register(native_of("clamp"), op="clamp")
    for size in range(1, 40):
        torch.ones(size, 2).view(2, size)
        torch.ones(3).clamp(0.5 * size, size)
    assert (override.hits, clamp.hits) == (39, 39)
    assert (len(override.state.checked), len(clamp.state.checked)) == (1, 1)


def test_integers_make_a_bounded_number_of_kinds() -> None:
    override = register(native_of("roll"), op="roll")
    choice = register(native_of("argmax"), op="argmax")
    for shift in range(40):
        torch.ones(60).roll(shift)
    for dim in range(4):
        torch.ones(1, 1, 1, 1).argmax(dim)
    assert len(override.state.checked) == 1
    assert len(choice.state.checked) == 4


# ------------------------------------------------------------------ what is written


WRITERS: dict[str, tuple[str, Callable[..., Any], Callable[[], Any], str]] = {
    "out= left empty": (
        *("abs.out", lambda self, *, out: out),
        lambda: torch.abs(X, out=torch.empty(0)),
        r"with shape torch.Size\(\[0\]\)",
    ),
    "out= left as it was": (
        *("abs.out", lambda self, *, out: out),
        lambda: torch.abs(X, out=torch.zeros(3, 4)),
        "left argument 'out' as it was, where native writes to it",
    ),
    "self resized": (
        *("add_.Tensor", lambda self, other, *, alpha: self.add_(other).resize_(6)),
        lambda: torch.ones(3, 4).add_(1),
        r"with shape torch.Size\(\[6\]\)",
    ),
    "self set to another tensor": (
        *("add_.Tensor", lambda self, other, *, alpha: self.set_(other)),
        lambda: torch.ones(3, 4).add_(X),
        "in another argument's memory",
    ),
    "self restrided": (
        *("abs_", lambda self: self.as_strided_((3, 4), (1, 3))),
        lambda: (-torch.ones(3, 4)).abs_(),
        "with strides",
    ),
    "set_ that sets nothing": (
        *("set_.source_Tensor", lambda self, source: self.resize_(source.shape)),
        lambda: torch.empty(0).set_(torch.ones(3, 4)),
        "left argument 'self' .*not in another argument's memory",
    ),
    "written where native writes nothing": (
        *("clamp_", lambda self, min, max: self.fill_(5)),
        lambda: torch.ones(3).clamp_(0, 9),
        "left argument 'self' with other values, where native leaves those that it had",
    ),
    "a list's item left as it was": (
        *("_foreach_add_.Scalar", lambda self, scalar: self[0].add_(scalar) and None),
        lambda: torch._foreach_add_([torch.ones(1), torch.ones(3)], 1),
        "left argument 'self' as it was",
    ),
}


# Without the core a number in a Tensor slot is made by `set_`, which nothing may then be put on.
ON_SET = pytest.mark.skipif(loader.in_use() is None, reason="the router in Python needs set_")


def each(cases: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(n, marks=ON_SET) if c[0].startswith("set_") else n for n, c in cases.items()
    ]


@pytest.mark.parametrize("name", each(WRITERS))
def test_what_is_written_otherwise_than_native_does_is_refused(name: str) -> None:
    op, impl, call, message = WRITERS[name]
    override = register(impl, op=op)
    with pytest.raises(ContractError, match=f"override 'mine' .*{message}"):
        call()
    assert override.hits == 1


RIGHT_WRITERS: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {
    "out= that fits": ("abs.out", lambda: torch.abs(-X, out=torch.empty(3, 4))),
    "out= that is empty": ("abs.out", lambda: torch.abs(-X, out=torch.empty(0))),
    "out= that is a slice": ("abs.out", lambda: torch.abs(-X, out=torch.empty(3, 8)[:, ::2])),
    "self twice": ("add_.Tensor", lambda: (y := X.clone()).add_(y)),
    "a part of self": ("add_.Tensor", lambda: (y := X.clone()).add_(y[:1].clone())),
    "set_": ("set_.source_Tensor", lambda: torch.empty(0).set_(X.clone())),
    "resize_": ("resize_", lambda: torch.ones(3).resize_(2)),
    "transpose_": ("transpose_", lambda: X.clone().transpose_(0, 1)),
    "nothing": ("mul_.Tensor", lambda: X.clone().mul_(1)),
    "what requires grad": (
        "mul_.Tensor",
        lambda: (X.clone().requires_grad_() * 1).mul_(X),
    ),
    "a parameter": (
        "mul_.Tensor",
        torch.no_grad()(lambda: torch.nn.Parameter(X.clone()).mul_(X)),
    ),
    "an inference tensor": ("mul_.Tensor", torch.inference_mode()(lambda: X.clone().mul_(X))),
    "index_put_": ("index_put_", lambda: X.clone().index_put_((torch.tensor([1]),), X[0])),
}


@pytest.mark.parametrize("name", each(RIGHT_WRITERS))
def test_an_op_that_writes_passes_where_it_is_right(name: str) -> None:
    op, call = RIGHT_WRITERS[name]
    expected = call()
    override = register(native_of(op), op=op)
    for _ in range(CHECKED_HITS + 1):
        found = call()
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert override.hits == CHECKED_HITS + 1


def test_what_is_too_large_to_copy_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "MAX_COPIED_BYTES", 40)
    override = register(lambda self, *, out: out, op="abs.out")
    assert torch.abs(-X, out=torch.zeros(3, 4)).sum() == 0
    with pytest.raises(ContractError, match="left argument 'out' as it was"):
        torch.abs(-X[0], out=torch.zeros(4))
    assert override.hits == 2


def test_an_input_that_another_thread_writes_to_is_not_held_against_the_impl() -> None:
    x = torch.randn(3, 4)

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        result = ops.softmax(self, dim, half_to_float)
        if self.data_ptr() == x.data_ptr():
            x.add_(1)  # as a thread that shares the parameters would, at this moment
        return result

    override = register(impl)
    torch.softmax(x, -1)
    assert override.hits == 1


def test_one_buffer_for_every_call_is_refused() -> None:
    kept: list[torch.Tensor] = []

    def impl(*args: Any) -> torch.Tensor:
        kept[:] = kept or [ops.softmax(*args)]
        return kept[0]

    override = register(impl)
    torch.softmax(torch.randn(3, 4), -1)
    with pytest.raises(ContractError, match="returned the memory of an earlier result"):
        torch.softmax(torch.randn(3, 4), -1)
    assert override.hits == 2


def test_parts_of_one_arena_are_results_of_their_own() -> None:
    arena, used = torch.zeros(64), [0]

    def impl(*args: Any) -> torch.Tensor:
        result = ops.softmax(*args)
        used[0] += result.numel()
        place = arena[used[0] - result.numel() : used[0]]
        return place.view(result.shape).copy_(result)

    override = register(impl)
    for _ in range(CHECKED_HITS + 1):
        torch.softmax(torch.randn(3, 4), -1)
    assert override.hits == CHECKED_HITS + 1


# ------------------------------------------------------------------ what native refuses


REFUSED: dict[str, tuple[str, Callable[..., Any], Callable[[], Any], type[Exception]]] = {
    "an index": (
        *("embedding", lambda weight, indices, *args: weight[indices.clamp(max=1)]),
        *(lambda: torch.embedding(torch.ones(2, 3), torch.tensor([7])), IndexError),
    ),
    "sizes": (
        *("bmm", lambda self, mat2: self.new_zeros(1, 2, 5)),
        *(lambda: torch.bmm(torch.ones(1, 2, 3), torch.ones(1, 4, 5)), RuntimeError),
    ),
    "an overlap": (
        *("relu_", lambda self: self),
        *(lambda: torch.ones(3).expand(2, 3).relu_(), RuntimeError),
    ),
    "an index that is written to": (
        *("index_add_", lambda self, dim, index, source, *, alpha: self.zero_()),
        *(lambda: KEPT.index_add_(0, torch.tensor([7]), torch.ones(1, 3)), RuntimeError),
    ),
}
KEPT = torch.ones(2, 3)


@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_natives_error_is_the_result(name: str, shadowed: bool) -> None:
    op, impl, call, kind = REFUSED[name]
    with pytest.raises(kind) as stock:
        call()
    override = register(impl, op=op)
    checked = CHECKED_HITS if not shadowed else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverrideState, "is_check_due", lambda *args: not shadowed)
        if shadowed:
            with opgraft.shadow(rate=1.0), pytest.raises(kind) as raised:
                call()
        for _ in range(checked):
            with pytest.raises(kind) as raised:
                call()
    assert str(raised.value) == str(stock.value)
    assert override.hits == max(checked, 1)
    assert override.mismatches == 0
    assert KEPT.sum() == 6, "what an impl wrote is put back"


def test_what_native_only_lacks_an_override_may_bring() -> None:
    override = register(lambda self, dim, half: ops.softmax(self.float(), dim, False).long())
    for _ in range(CHECKED_HITS + 1):
        assert torch.softmax(torch.ones(2, 3, dtype=torch.int64), -1).dtype == torch.int64
    assert override.hits == CHECKED_HITS + 1


@pytest.mark.parametrize(
    ("error", "refuses"),
    [
        (IndexError("index out of range in self"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True),
        (ValueError("expected 2D"), True),
        (RuntimeError("unsupported operation: ... refers to a single memory location."), True),
        (NotImplementedError("\"mm\" not implemented for 'Half'"), False),
        (RuntimeError("Sort does not support complex dtypes on CPU"), False),
        (RuntimeError("x does not have a deterministic implementation"), False),
        (RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (MemoryError(), False),
    ],
    ids=lambda each: str(each)[:30],
)
def test_which_errors_of_native_are_refusals(error: Exception, refuses: bool) -> None:
    assert contract.is_invalid_call(error) == refuses


@pytest.mark.parametrize("op", ["_to_copy", "copy_"])
def test_a_hit_with_a_parameter_that_has_no_sizes_is_not_compared(op: str) -> None:
    """Such a parameter raises an error for its shape."""
    native = opgraft.native(f"aten::{op}")
    override = register(lambda *args, **kwargs: native(*args, **kwargs), op)
    model = torch.nn.LazyLinear(3).double()
    model.load_state_dict(torch.nn.Linear(4, 3).state_dict())
    assert model(torch.ones(2, 4, dtype=torch.double)).shape == (2, 3)
    assert override.hits > 0


@where_the_core_routes
def test_the_same_in_the_python_router() -> None:
    run_again(__file__, selected="not python_router")
