"""PyTorch's own samples of its operators (OpInfo), run with overrides on and compared with stock.

Each case names what an operator reaches at the CPU key, and what stands there as an override: the
native kernel itself, by `opgraft.native` (results must then be identical), or plain torch code.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map_only

import opgraft
from tests import ops

Impl = Callable[..., Any]


# ------------------------------------------------------------------ plain implementations


def bmm(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    return (self.unsqueeze(-1) * mat2.unsqueeze(1)).sum(2)


def cumsum(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None) -> torch.Tensor:
    wide = self if dtype is None else self.to(dtype)
    out = torch.empty(wide.shape, dtype=wide.dtype)
    if wide.ndim == 0:
        return out.copy_(wide)
    total = torch.zeros_like(wide.select(dim, 0)) if wide.size(dim) else None
    for index in range(wide.size(dim)):
        total = total + wide.select(dim, index)
        out.select(dim, index).copy_(total)
    return out


def softmax(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if self.ndim == 0 or self.numel() == 0:
        return torch.ones_like(self)
    return ops.softmax(self, dim, half_to_float)


# ------------------------------------------------------------------ cases


@dataclass(frozen=True)
class Case:
    """An operator, what it reaches, and how often each sample reaches it."""

    name: str
    forward: str
    plain: Impl | None = None
    backward: str | None = None
    out: str | None = None
    variant: str = ""
    #: Composite at CPU: never reached where something is differentiated.
    composite: bool = False
    dtypes: tuple[torch.dtype, ...] = field(
        default=(torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)
    )

    @property
    def info(self) -> OpInfo:
        return next(
            info
            for info in op_db
            if info.name == self.name and info.variant_test_name == self.variant
        )

    def __str__(self) -> str:
        return f"{self.name}{self.variant and '-' + self.variant}"


SOFTMAX_BACKWARD = "_softmax_backward_data"
CASES = [
    Case(
        "nn.functional.rms_norm",
        "_fused_rms_norm",
        plain=ops.rms_norm,
        composite=True,
        dtypes=(torch.float32, torch.float64, torch.bfloat16),  # complex is decomposed above it
    ),
    Case("softmax", "_softmax", plain=softmax, backward=SOFTMAX_BACKWARD, out="_softmax.out"),
    Case("softmax", "_softmax", plain=softmax, backward=SOFTMAX_BACKWARD, variant="with_dtype"),
    Case("bmm", "bmm", plain=bmm, out="bmm.out"),
    Case("mul", "mul.Tensor", out="mul.out"),
    Case("add", "add.Tensor", out="add.out"),
    Case(
        "nn.functional.layer_norm",
        "native_layer_norm",
        plain=ops.layer_norm,
        backward="native_layer_norm_backward",
    ),
    Case("cumsum", "cumsum", plain=cumsum, out="cumsum.out"),
    Case("topk", "topk", out="topk.values"),
]


def override(symbol: str, impl: Impl | None = None) -> opgraft.Override:
    """Override by `impl`, or by the native kernel itself."""
    return opgraft.register_op_override(
        "aten",
        symbol,
        "CPU",
        impl or opgraft.native(f"aten::{symbol}"),
        unconditional_override=True,
    )


def samples(case: Case, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[SampleInput]:
    """The OpInfo's samples, each as it is and with every tensor strided by two."""
    info = case.info
    if dtype not in info.supported_dtypes("cpu"):
        pytest.skip(f"{case} has no samples of {dtype} on CPU")
    # Not `info.sample_inputs`: it searches the stack for a test's name, which takes longer.
    for sample in info.sample_inputs_func(info, "cpu", dtype, requires_grad):
        yield sample
        yield sample.noncontiguous()


def run(case: Case, sample: SampleInput, **keywords: Any) -> Any:
    return case.info(sample.input, *sample.args, **sample.kwargs, **keywords)


def with_stock(case: Case, sample: SampleInput) -> Any:
    with opgraft.disabled():
        return run(case, sample)


def tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def assert_same(mine: Any, stock: Any, *, exact: bool) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    assert len(tensors(mine)) == len(tensors(stock))
    for one, other in zip(tensors(mine), tensors(stock), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.stride() == other.stride() or one.numel() < 2
        torch.testing.assert_close(one, other, equal_nan=True, **tolerance)


def by_dtype(cases: Sequence[Case]) -> list[Any]:
    return [
        pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}")
        for case in cases
        for dtype in case.dtypes
        if dtype in case.info.supported_dtypes("cpu")
    ]


@pytest.mark.parametrize(("case", "dtype"), by_dtype(CASES))
def test_forward_by_the_native_kernel_is_stock(case: Case, dtype: torch.dtype) -> None:
    registered = override(case.forward)
    count = 0
    with torch.no_grad():
        for sample in samples(case, dtype, requires_grad=False):
            assert_same(run(case, sample), with_stock(case, sample), exact=True)
            count += 1
    assert (registered.hits, registered.misses) == (count, 0)
    assert registered.fallbacks == count


PLAIN = [
    pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}")
    for case in CASES
    for dtype in (torch.float32, torch.float64)
    # `ops.rms_norm` computes in float32, which is too little for float64.
    if case.plain is not None and not (case.composite and dtype is torch.float64)
]


@pytest.mark.parametrize(("case", "dtype"), PLAIN)
def test_forward_by_plain_torch_is_close_to_stock(case: Case, dtype: torch.dtype) -> None:
    registered = override(case.forward, case.plain)
    count = 0
    with torch.no_grad():
        for sample in samples(case, dtype, requires_grad=False):
            assert_same(run(case, sample), with_stock(case, sample), exact=False)
            count += 1
    assert (registered.hits, registered.misses) == (count, 0)
    assert registered.fallbacks == 0


def leaves(sample: SampleInput) -> list[torch.Tensor]:
    everything = (sample.input, sample.args, sample.kwargs)
    return [leaf for leaf in tensors(everything) if leaf.requires_grad]


def gradients(case: Case, sample: SampleInput) -> list[torch.Tensor | None]:
    outputs = [each for each in tensors(run(case, sample)) if each.requires_grad]
    seeds = [torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype) for out in outputs]
    return list(torch.autograd.grad(outputs, leaves(sample), seeds, allow_unused=True))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["native", "plain"])
def test_backward_is_stock(case: Case, kind: str) -> None:
    if kind == "plain" and case.plain is None:
        pytest.skip("no plain implementation")
    forward = override(case.forward, case.plain if kind == "plain" else None)
    backward = override(case.backward) if case.backward else None
    count = 0
    for sample in samples(case, torch.float32, requires_grad=True):
        mine = gradients(case, sample)
        with opgraft.disabled():
            stock = gradients(case, sample)
        assert [each is None for each in mine] == [each is None for each in stock]
        assert_same(mine, stock, exact=kind == "native")
        count += 1
    if case.composite:
        assert forward.hits == 0  # its derivative is that of the ops it is made of
    elif case.name in ("mul", "bmm"):
        assert forward.hits > count  # their backward consists of the same op
    elif case.name in ("add", "softmax", "topk", "nn.functional.layer_norm"):
        assert forward.hits == count
    else:
        assert forward.hits >= count
    if backward is not None:
        assert (backward.hits, backward.misses) == (count, 0)


def empty_like(result: Any, shape: Callable[[torch.Tensor], Sequence[int]]) -> Any:
    fresh = tree_map_only(torch.Tensor, lambda t: torch.empty(shape(t), dtype=t.dtype), result)
    return tuple(fresh) if isinstance(fresh, (tuple, list)) else fresh


@pytest.mark.parametrize("case", [case for case in CASES if case.out], ids=str)
@pytest.mark.parametrize("fit", ["fits", "is resized"])
def test_out_is_written_and_returned(case: Case, fit: str) -> None:
    assert case.info.supports_out and case.out
    registered = override(case.out)
    functional = override(case.forward)
    count = 0
    for sample in samples(case, torch.float32, requires_grad=False):
        stock = with_stock(case, sample)
        out = empty_like(stock, lambda t: t.shape if fit == "fits" else (0,))
        returned = run(case, sample, out=out)
        for given, got in zip(tensors(out), tensors(returned), strict=True):
            assert given is got
        for given, expected in zip(tensors(out), tensors(stock), strict=True):
            torch.testing.assert_close(given, expected, rtol=0, atol=0)
        count += 1
    assert registered.hits == count
    assert functional.hits == 0


@pytest.mark.parametrize("symbol", ["mul_.Tensor", "add_.Tensor", "cumsum_"])
def test_in_place_writes_the_argument_and_returns_it(symbol: str) -> None:
    registered = override(symbol)
    method = symbol.split(".", maxsplit=1)[0]
    x = torch.arange(6.0).reshape(2, 3)
    argument = 1 if method == "cumsum_" else torch.tensor([2.0, 3.0, 4.0])
    mine, stock = x.clone(), x.clone()
    assert getattr(mine, method)(argument) is mine
    with opgraft.disabled():
        getattr(stock, method)(argument)
    assert torch.equal(mine, stock)
    assert (registered.hits, registered.misses) == (1, 0)


@pytest.mark.parametrize(
    "shapes", [((0, 3, 4), (0, 4, 5)), ((2, 0, 4), (2, 4, 5)), ((2, 3, 0), (2, 0, 5))], ids=str
)
def test_empty_batches_of_bmm(shapes: tuple[Sequence[int], Sequence[int]]) -> None:
    registered = override("bmm", bmm)
    one, other = (torch.randn(shape, requires_grad=True) for shape in shapes)
    result = torch.bmm(one, other)
    grads = torch.autograd.grad(result.sum(), (one, other))
    with opgraft.disabled():
        stock = torch.bmm(one, other)
        assert torch.equal(result, stock)
        for mine, its in zip(grads, torch.autograd.grad(stock.sum(), (one, other)), strict=True):
            assert torch.equal(mine, its)
    assert registered.hits == 3


# ------------------------------------------------------------------ numbers and promotion

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]
NUMBERS: list[complex] = [2, -3, 2.5, 0.0, float("inf"), True, False, 1 + 2j]
EXPRESSIONS: dict[str, tuple[str, Callable[[Any, Any], torch.Tensor]]] = {
    "x + n": ("add.Tensor", lambda x, n: x + n),
    "n + x": ("add.Tensor", lambda x, n: n + x),
    "x - n": ("sub.Tensor", lambda x, n: x - n),
    "n - x": ("sub.Tensor", lambda x, n: n - x),
    "x * n": ("mul.Tensor", lambda x, n: x * n),
    "n * x": ("mul.Tensor", lambda x, n: n * x),
    "x / n": ("div.Tensor", lambda x, n: x / n),
    "add(x, n, alpha=2)": ("add.Tensor", lambda x, n: torch.add(x, n, alpha=2)),
    "where(c, x, n)": ("where.self", lambda x, n: torch.where(torch.tensor(True), x, n)),
    "pow(n, x)": ("pow.Tensor_Tensor", lambda x, n: torch.pow(torch.tensor(n), x)),
    "maximum(x, n)": ("maximum", lambda x, n: torch.maximum(x, torch.tensor(n))),
}


def outcome(compute: Callable[[Any, Any], torch.Tensor], x: torch.Tensor, n: Any) -> Any:
    """The result, or the error that it raises: an override must not change either."""
    try:
        return compute(x, n)
    except Exception as error:
        return (type(error), str(error))


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("shape", [(), (3,)], ids=["0-dim", "1-dim"])
def test_numbers_promote_exactly_as_in_stock(expression: str, shape: Sequence[int]) -> None:
    symbol, compute = EXPRESSIONS[expression]
    registered = override(symbol)
    computed = 0
    for dtype, number in itertools.product(DTYPES, NUMBERS):
        x = torch.ones(shape, dtype=dtype)
        before = registered.hits
        mine = outcome(compute, x, number)
        hits = registered.hits - before
        with opgraft.disabled():
            stock = outcome(compute, x, number)
        if not isinstance(stock, torch.Tensor):
            assert mine == stock
            continue
        assert isinstance(mine, torch.Tensor), (dtype, number, mine)
        assert mine.dtype == stock.dtype, (dtype, number)
        torch.testing.assert_close(mine, stock, rtol=0, atol=0, equal_nan=True)
        assert hits == 1, (dtype, number)
        computed += 1
    assert computed >= len(DTYPES)  # not everything was an error


@pytest.mark.parametrize("symbol", ["add.Tensor", "mul.Tensor", "div.Tensor"])
def test_tensors_promote_exactly_as_in_stock(symbol: str) -> None:
    registered = override(symbol)
    compute = getattr(torch, symbol.split(".", maxsplit=1)[0])
    count = 0
    for (one, other), (rank, other_rank) in itertools.product(
        itertools.product(DTYPES, DTYPES), [(1, 1), (0, 1), (1, 0), (0, 0)]
    ):
        x = torch.ones((2,) * rank, dtype=one)
        y = torch.ones((2,) * other_rank, dtype=other)
        mine = outcome(compute, x, y)
        with opgraft.disabled():
            stock = outcome(compute, x, y)
        count += 1
        if not isinstance(stock, torch.Tensor):
            assert mine == stock
            continue
        assert (mine.dtype, mine.shape) == (stock.dtype, stock.shape)
        if stock.dtype is not torch.complex32:  # which can hardly do anything on CPU
            assert torch.equal(mine, stock)
    assert registered.hits == count


def test_a_number_that_came_out_of_an_override_promotes_on() -> None:
    """The results of numbers are tensors, but a 0-dim one still gives way to a 1-dim one."""
    registered = override("mul.Tensor")
    x = torch.ones(3, dtype=torch.float16)
    chained = x * (torch.tensor(2.0, dtype=torch.float64) * 2)
    assert chained.dtype == torch.float16
    assert (x.sum() * 2.5 * x).dtype == torch.float16
    assert registered.hits == 4


@pytest.mark.parametrize("number", [2**31, -(2**62), 1e300, 5e-324, -0.0])
def test_numbers_keep_their_full_range(number: complex) -> None:
    registered = override("mul.Tensor")
    for dtype in (torch.int64, torch.float64):
        x = torch.ones(2, dtype=dtype)
        mine = x * number
        with opgraft.disabled():
            stock = x * number
        assert mine.dtype == stock.dtype
        assert torch.equal(mine.view(torch.int64), stock.view(torch.int64))  # -0.0 too
    assert registered.hits == 2


def test_a_number_promotes_under_a_default_device_and_a_default_dtype() -> None:
    registered = override("mul.Tensor")

    @torch.jit.script  # calls the op from C++, where the default-device mode is still on
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2.5

    x = torch.ones(3, dtype=torch.int32)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert (x * 2.5).dtype == torch.float64
        with torch.device("meta"):
            result = twice(x)
    finally:
        torch.set_default_dtype(before)
    assert (result.device.type, result.dtype) == ("cpu", torch.float64)
    assert registered.hits == 2


# ------------------------------------------------------------------ torch's own checks of an op

OPCHECKS: list[tuple[str, Impl | None, Callable[[], tuple[Any, ...]]]] = [
    ("_softmax", softmax, lambda: (torch.randn(3, 4, requires_grad=True), -1, False)),
    ("bmm", bmm, lambda: tuple(torch.randn(2, 3, 3, requires_grad=True) for _ in range(2))),
    ("mul.Tensor", None, lambda: (torch.randn(3, 4, requires_grad=True), torch.randn(4))),
    (
        "native_layer_norm",
        ops.layer_norm,
        lambda: (torch.randn(3, 4, requires_grad=True), [4], torch.randn(4), None, 1e-5),
    ),
    ("add_.Tensor", None, lambda: (torch.randn(3, 4), torch.randn(4))),
    ("_fused_rms_norm", ops.rms_norm, lambda: (torch.randn(3, 4), [4], None, None)),
]


OPCHECK_UTILITIES = (
    *("test_schema", "test_autograd_registration"),
    *("test_faketensor", "test_aot_dispatch_dynamic"),
)


@pytest.mark.parametrize(("symbol", "impl", "arguments"), OPCHECKS, ids=[c[0] for c in OPCHECKS])
def test_opcheck_passes_with_the_override_on(
    symbol: str, impl: Impl | None, arguments: Callable[[], tuple[Any, ...]]
) -> None:
    registered = override(symbol, impl)
    misses = {}
    for check in OPCHECK_UTILITIES:
        before = registered.misses
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of tracing
            torch.library.opcheck(registered.operator.overload, arguments(), test_utils=check)
        misses[check] = registered.misses - before
    assert registered.hits > 0
    # These two call the op once under a dispatch mode of theirs, which sees what a composite op is
    # made of: no override is asked there.
    is_composite = symbol == "_fused_rms_norm"
    under_a_mode = {"test_schema", "test_faketensor"} if is_composite else set()
    assert misses == {check: int(check in under_a_mode) for check in OPCHECK_UTILITIES}


@pytest.mark.parametrize("symbol", ["_softmax", "bmm", "native_layer_norm"])
def test_gradcheck_through_an_override(symbol: str) -> None:
    _, impl, arguments = next(each for each in OPCHECKS if each[0] == symbol)
    registered = override(symbol, impl)
    inputs = tree_map_only(
        torch.Tensor, lambda t: t.detach().double().requires_grad_(), arguments()
    )
    overload = registered.operator.overload

    def first(*tensors: Any) -> torch.Tensor:
        result = overload(*tensors)
        return result[0] if isinstance(result, tuple) else result

    assert torch.autograd.gradcheck(first, inputs)
    assert torch.autograd.gradgradcheck(first, inputs)
    assert registered.hits > 0
