"""LayerNorm's Triton kernels against float64, with native's own error as the measure.

On a machine without a GPU they run in Triton's interpreter (tests/conftest.py), one program after
the other: what makes programs wait for one another runs on the GPU only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from errors import largest_error
from special_inputs import LAYOUTS

import opgraft
from configurations import norm_launches
from opgraft_kernels.norms import triton_permuted
from opgraft_kernels.norms.overrides import LAYER_NORM, condition, register
from opgraft_kernels.norms.triton_kernels import layer_norm_backward, layer_norm_forward

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
EPS = 1e-5


class Case(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    grad: torch.Tensor

    @property
    def shape(self) -> list[int]:
        return list(self.x.shape[-1:])


def _case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    has_weight: bool = True,
    has_bias: bool = True,
    offset: float = 0.0,
) -> Case:
    torch.manual_seed(sum(shape))
    x, grad = (torch.randn(shape, device=device) for _ in range(2))
    weight, bias = torch.randn(2, shape[-1], device=device).to(dtype).unbind()
    return Case(
        (x + offset).to(dtype),
        weight if has_weight else None,
        bias if has_bias else None,
        grad.to(dtype),
    )


class Results(NamedTuple):
    y: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor
    dx: torch.Tensor | None
    dw: torch.Tensor | None
    db: torch.Tensor | None


def _through_op(case: Case) -> Results:
    tensors = [t.detach().requires_grad_() if t is not None else None for t in case[:3]]
    x, weight, bias = tensors
    y, mean, rstd = torch.ops.aten.native_layer_norm(x, case.shape, weight, bias, EPS)
    present = [t for t in tensors if t is not None]
    gradients = iter(torch.autograd.grad(y, present, case.grad))
    by_tensor = [None if t is None else next(gradients) for t in tensors]
    return Results(y.detach(), mean, rstd, *by_tensor)


def _reference(case: Case) -> Results:
    wide = [None if t is None else t.double() for t in case]
    return _through_op(Case(*wide))  # type: ignore[arg-type]


def _ours(case: Case) -> Results:
    y, mean, rstd = layer_norm_forward(case.x, case.shape, case.weight, case.bias, EPS)
    return Results(
        *(y, mean, rstd),
        *layer_norm_backward(
            case.grad, case.x, case.shape, mean, rstd, case.weight, case.bias, [True] * 3
        ),
    )


def _check(case: Case) -> None:
    """What native promises, and at most twice its error."""
    ours, native, expected = _ours(case), _through_op(case), _reference(case)
    for name, one, other, right in zip(Results._fields, ours, native, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is None or other is None or right is None:
            continue
        assert one.shape == other.shape and one.is_contiguous()
        if case.x.is_cuda or case.x.dtype is torch.float32:  # on CPU native keeps them in 16 bits
            assert one.dtype == other.dtype
        floor = 4 * torch.finfo(one.dtype).eps
        assert largest_error(one, right) <= 2 * largest_error(other, right) + floor, name


# Several rows a tile, one row a tile, more rows than programs, widths that are no power of two.
SHAPES = [(5, 2), (3, 7), (70, 16), (9, 1000), (1, 4096), (2, 4097), (4, 3, 130)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_native(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    _check(_case(shape, dtype, device))


# Of a block and a tail, in the order of their blocks.
WIDTHS = (768, 1152, 1536, 2560, 3072, 4480, 6144, 7168, 11008, 13824)


@pytest.mark.parametrize("hidden", WIDTHS)
def test_rows_with_a_tail(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(_case((3, hidden), dtype, device))


def test_some_rows_with_a_tail_are_summed_together() -> None:
    """By one reduction: what the test above is for."""
    for hidden in (1152, 2560, 4480):
        forward, *_ = norm_launches("layer_norm", torch.float16, hidden)
        assert forward.constexprs["TOGETHER"]
    _, backward, *_ = norm_launches("layer_norm", torch.float32, 1152)
    assert backward.constexprs["TOGETHER"]


# Of equal pieces, in the order of their number: exactly so many, a vector more and less, and a
# column more and less, which is no row of pieces. In 16 bits the backward keeps the weight in
# registers in all rows before 10248.
PIECES = (
    *(1032, 1152, 1288, 2056, 2560, 3072, 3080, 3584, 3585),
    *(5112, 5120, 5121, 6144, 7168),
    *(8200, 10240, 10248, 10242, 14336, 14328, 14344),
)


@pytest.mark.parametrize("hidden", PIECES)
def test_rows_of_pieces(hidden: int, device: torch.device) -> None:
    _check(_case((3, hidden), torch.float16, device))


@pytest.mark.parametrize("hidden", [2560, 4160, 7168])
def test_rows_of_pieces_in_32_bits(hidden: int, device: torch.device) -> None:
    _check(_case((3, hidden), torch.float32, device))


@pytest.mark.parametrize(
    ("rows", "hidden"), [(1, 1152), (9, 1152), (20, 1152), (1, 5120), (9, 5120), (5, 13824)]
)
def test_any_number_of_rows_of_pieces(rows: int, hidden: int, device: torch.device) -> None:
    """Fewer rows than programs, and more; rows that fill tiles of two, and that do not."""
    _check(_case((rows, hidden), torch.float16, device))


@pytest.mark.parametrize("hidden", [1152, 5120, 13824])
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, False), (False, False)])
def test_pieces_without_parameters(
    hidden: int, has_weight: bool, has_bias: bool, device: torch.device
) -> None:
    _check(_case((3, hidden), torch.float16, device, has_weight, has_bias))


@pytest.mark.parametrize("hidden", [1152, 13824])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_rows_of_pieces(layout: str, hidden: int, device: torch.device) -> None:
    case = _case((3, hidden), torch.float16, device)
    lay_out = LAYOUTS[layout]
    _check(case._replace(grad=lay_out(case.grad)))
    _check(case._replace(x=lay_out(case.x)))


@pytest.mark.parametrize("hidden", [1152, 5120, 13824])
def test_a_row_of_pieces_that_are_all_equal_is_its_mean(hidden: int, device: torch.device) -> None:
    """Exactly, as in native: what rounding left would be multiplied by 1 / sqrt(eps) twice."""
    case = _case((4, hidden), torch.float16, device)
    ours = _ours(case._replace(x=torch.full_like(case.x, 7.0)))
    assert case.bias is not None and ours.dw is not None
    assert torch.equal(ours.y, case.bias.expand_as(ours.y))
    assert torch.equal(ours.dw, torch.zeros_like(ours.dw))


@pytest.mark.parametrize("value", [3.3, 7.7, 1000.7, -100.3])
@pytest.mark.parametrize("hidden", [24, 768, 1000, 5120, 9000, 20000])
def test_a_row_of_equal_numbers_of_many_digits_is_its_mean(
    hidden: int, value: float, device: torch.device
) -> None:
    """With BERT's eps, a unit in the mean's last place would be all of a row's variance."""
    x = torch.full((3, hidden), value, device=device)
    y, mean, rstd = layer_norm_forward(x, [hidden], None, None, 1e-12)
    torch.testing.assert_close(y, torch.zeros_like(y), rtol=0, atol=1e-5)
    assert torch.equal(mean, torch.full_like(mean, value))
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e6), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [3.3, -100.3, 3e-3, 6e-8])
@pytest.mark.parametrize("hidden", [24, 768, 5120, 9000])
def test_a_row_of_equal_numbers_of_16_bits_is_its_mean(
    hidden: int, value: float, dtype: torch.dtype, device: torch.device
) -> None:
    """And one in which a single number is the next one is not."""
    if device.type == "cpu" and dtype is torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    x = torch.full((3, hidden), value, device=device, dtype=dtype)
    x[1, hidden // 2] = torch.nextafter(x[0, 0], x.new_tensor(torch.inf))
    y, mean, rstd = layer_norm_forward(x, [hidden], None, None, 1e-12)
    equal = [0, 2]
    torch.testing.assert_close(y[equal], torch.zeros_like(y[equal]), rtol=0, atol=1e-5)
    torch.testing.assert_close(mean[equal], x[equal, :1].float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd[equal], torch.full_like(rstd[equal], 1e6), rtol=1e-2, atol=0)
    exact = torch.nn.functional.layer_norm(x[1].double(), [hidden], None, None, 1e-12)
    torch.testing.assert_close(y[1].double(), exact, rtol=0.05, atol=0.05)


def _normalized(x: torch.Tensor, is_permuted: bool) -> tuple[torch.Tensor, ...]:
    """The forward of rows of a matrix, which are beside one another in memory or across it."""
    if is_permuted:
        x, forward = x.t().contiguous().t()[None], triton_permuted.layer_norm_forward
    else:
        forward = layer_norm_forward
    return forward(x, [x.shape[-1]], None, None, 1e-5)


@pytest.mark.parametrize(
    ("is_permuted", "hidden"),
    [
        *((False, hidden) for hidden in (24, 100, 768, 1000, 4097, 5120, 9000, 20000)),
        *((True, hidden) for hidden in (24, 100, 768, 1000)),  # others are declined
    ],
)
def test_the_mean_of_numbers_around_zero_is_as_near_as_native_s(
    is_permuted: bool, hidden: int, device: torch.device
) -> None:
    """What rounds all large numbers the same way is not in it."""
    torch.manual_seed(0)
    x = torch.rand(64, hidden, device=device) * 18 - 9
    exact = x.double().mean(-1)
    found = (_normalized(x, is_permuted), torch.native_layer_norm(x, [hidden], None, None, 1e-5))
    means = (mean.flatten().double() for _, mean, _ in found)
    ours, native = ((mean - exact).square().mean().sqrt() for mean in means)
    assert ours <= 1.5 * native


@pytest.mark.parametrize("offset", [0.0, 0.5, 0.95, 1.05, 30.0, 1e4])
@pytest.mark.parametrize("hidden", [24, 1000, 4097, 20000])
def test_the_variance_is_as_near_as_native_s_however_far_the_mean_is_from_zero(
    hidden: int, offset: float, device: torch.device
) -> None:
    """A mean of up to one standard deviation is near: its square is taken off the squares'."""
    torch.manual_seed(0)
    x = torch.randn(64, hidden, device=device) + offset
    exact = (x.double().var(-1, correction=0) + 1e-5).rsqrt()
    ours, native = (
        ((found(x, [hidden], None, None, 1e-5)[2].flatten().double() / exact - 1).square().mean())
        for found in (layer_norm_forward, torch.native_layer_norm)
    )
    assert ours.sqrt() <= 2 * native.sqrt()


@pytest.mark.parametrize("value", [3e17, 1e18, 1e19])
@pytest.mark.parametrize(
    ("is_permuted", "hidden"), [(False, 24), (False, 4096), (False, 20000), (True, 24)]
)
def test_squares_that_overflow_where_the_variance_does_not(
    is_permuted: bool, hidden: int, value: float, device: torch.device
) -> None:
    """The square of their mean may be a number still."""
    torch.manual_seed(0)
    x = (1 + torch.randn(17, hidden, device=device) / 100) * value
    x[0] = value
    rstd = _normalized(x, is_permuted)[2].flatten().double()
    exact = (x.double().var(-1, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(rstd[1:], exact[1:], rtol=1e-5, atol=0)
    assert rstd[0] > 1e-12  # all the same: what the mean is off by a rounding, at most


@pytest.mark.parametrize("hidden", [24, 64, 768, 4096])
def test_rows_whose_squares_are_0_are_divided_by_0_as_natively(
    hidden: int, device: torch.device
) -> None:
    x = torch.randn(4, hidden, device=device) * 1e-25
    x[1] *= 1e25
    ours, native = (
        f(x, [hidden], None, None, 0.0)[0] for f in (layer_norm_forward, torch.native_layer_norm)
    )
    assert native[0].isinf().all()
    torch.testing.assert_close(ours, native)


@pytest.mark.parametrize("hidden", [24, 96, 320])
def test_a_row_does_not_depend_on_the_rows_beside_it(hidden: int, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, hidden, device=device)
    before = layer_norm_forward(x, [hidden], None, None, 1e-5)
    x[0] += 50.0  # now its mean is far from zero
    after = layer_norm_forward(x, [hidden], None, None, 1e-5)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[1:], other[1:])


@pytest.mark.parametrize("shape", [(2, 9000), (3, 20000)], ids=str)
def test_long_rows(shape: tuple[int, ...], device: torch.device) -> None:
    _check(_case(shape, torch.float32, device))


@pytest.mark.parametrize("shape", [(6, 40), (2, 4096), (2, 9000)], ids=str)
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, False), (False, False)])
def test_without_parameters(
    shape: tuple[int, ...], has_weight: bool, has_bias: bool, device: torch.device
) -> None:
    _check(_case(shape, torch.float32, device, has_weight, has_bias))


@pytest.mark.parametrize("shape", [(6, 1000), (3, 2560), (2, 7168), (2, 20000)], ids=str)
def test_a_large_mean_loses_no_digits(shape: tuple[int, ...], device: torch.device) -> None:
    case = _case(shape, torch.float32, device, offset=1000.0)
    ours, expected = _ours(case), _reference(case)
    for one, right in zip(ours, expected, strict=True):
        assert one is not None and right is not None
        # The input's own rounding, 1000 * 2**-24, by far less than the variance of 1 would be off
        # as a difference of means: 1000**2 * 2**-24.
        assert largest_error(one, right) < 2e-4


class Backward(NamedTuple):
    """The arguments of a backward but for the mask, and all of its results."""

    arguments: tuple[Any, ...]
    every: tuple[torch.Tensor | None, ...]


@functools.cache
def _backward(hidden: int, dtype: torch.dtype, device: torch.device) -> Backward:
    """Computed once for all masks."""
    case = _case((7, hidden), dtype, device)
    _, mean, rstd = layer_norm_forward(case.x, case.shape, case.weight, case.bias, EPS)
    arguments = (case.grad, case.x, case.shape, mean, rstd, case.weight, case.bias)
    return Backward(arguments, layer_norm_backward(*arguments, [True] * 3))


@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(24, torch.float32), (9000, torch.float32), (1152, torch.float16), (13824, torch.float16)],
)
@pytest.mark.parametrize("mask", [(m >> 2 & 1, m >> 1 & 1, m & 1) for m in range(8)], ids=str)
def test_output_mask(
    mask: tuple[int, ...], hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    arguments, every = _backward(hidden, dtype, device)
    some = layer_norm_backward(*arguments, output_mask=[bool(m) for m in mask])
    assert [each is not None for each in some] == [bool(m) for m in mask]
    for one, expected in zip(some, every, strict=True):
        if one is not None:
            torch.testing.assert_close(one, expected)


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t, t[:, :3]], dim=1)[:, : t.shape[1]],
        lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
        lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
        lambda t: t[:1].expand(t.shape),
        lambda t: t[:, :1].expand(t.shape),
    ],
)
def test_layouts(layout: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    case = _case((5, 48), torch.float32, device)
    _check(case._replace(grad=layout(case.grad)))
    if layout(case.x).std(-1).min() > 0.1:
        _check(case._replace(x=layout(case.x)))


def test_no_rows(device: torch.device) -> None:
    case = _case((0, 16), torch.float32, device)
    ours = _ours(case)
    assert (ours.y.shape, ours.mean.shape) == (case.x.shape, (0, 1))
    assert ours.dw is not None and torch.equal(ours.dw, torch.zeros(16, device=device))


def test_rows_of_one_element_have_a_gradient_of_zero(device: torch.device) -> None:
    """Where a fused multiply-add left what rounding took off its product, times 1 / sqrt(eps)."""
    x, g = (torch.randn(257, 1, device=device)[1:] for _ in range(2))
    weight, bias = torch.randn(1, device=device), torch.randn(1, device=device)
    _, mean, rstd = layer_norm_forward(x, [1], weight, bias, 1e-5)
    dx, _, _ = layer_norm_backward(g, x, [1], mean, rstd, weight, bias, [True, True, True])
    assert dx is not None and torch.equal(dx, torch.zeros_like(dx))


@pytest.mark.parametrize(("rows", "hidden"), [(300, 40), (40, 3000), (7, 5120), (7, 9000)])
def test_parameter_gradients_have_the_same_bits(
    rows: int, hidden: int, device: torch.device
) -> None:
    case = _case((rows * (50 if device.type == "cuda" else 1), hidden), torch.float32, device)
    first, second = _ours(case), _ours(case)
    for one, same in zip(first, second, strict=True):
        assert one is not None and same is not None and torch.equal(one, same)


# ---------------------------------------------------------------------------- through opgraft


def test_overrides_take_what_they_are_for(device: torch.device, dispatch_key: str) -> None:
    forward, backward = register(LAYER_NORM, dispatch_key)[:2]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = _case((16384, 8192) if device.type == "cuda" else (64, 32), dtype, device)
    ours = _through_op(case)
    assert (forward.hits, backward.hits) == (1, 1)
    with opgraft.disabled():
        native = _through_op(case)
    for one, other in zip(ours, native, strict=True):
        assert one is not None and other is not None
        assert largest_error(one, other) < 0.02
    misses = forward.misses
    declined = case.x.double() if device.type == "cuda" else case.x[:1]
    F.layer_norm(declined, case.shape)
    assert forward.misses == misses + 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": torch.ones(16, 8, dtype=torch.bfloat16)},
        {"input": torch.ones(16, 8, dtype=torch.float64)},
        {"input": torch.ones(15, 8)},
        {"normalized_shape": [7]},
        {"normalized_shape": [16, 8]},
        {"weight": torch.ones(7)},
        {"weight": torch.ones(8, dtype=torch.float16)},
        {"bias": torch.ones(1, 8)},
        {"bias": torch.ones(8, dtype=torch.float16)},
    ],
)
def test_forward_condition_declines(wrong: dict[str, object]) -> None:
    wanted = condition(LAYER_NORM, "forward", "CPU")
    fine = {
        "input": torch.ones(16, 8),
        "normalized_shape": [8],
        "weight": None,
        "bias": torch.ones(8),
        "eps": EPS,
    }
    assert wanted.holds(fine)
    assert not wanted.holds({**fine, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": torch.ones(15, 1)},
        {"rstd": torch.ones(16, 1, dtype=torch.float64)},
        {"grad_out": torch.ones(16, 8, dtype=torch.float16)},
        {"grad_out": torch.ones(15, 8)},
    ],
)
def test_backward_condition_declines(wrong: dict[str, torch.Tensor]) -> None:
    wanted = condition(LAYER_NORM, "backward", "CPU")
    fine = {
        "grad_out": torch.ones(16, 8),
        "input": torch.ones(16, 8),
        "normalized_shape": [8],
        "mean": torch.ones(16, 1),
        "rstd": torch.ones(16, 1),
        "weight": torch.ones(8),
        "bias": None,
        "output_mask": [True] * 3,
    }
    assert wanted.holds(fine)
    assert not wanted.holds({**fine, **wrong})


# ------------------------------------------------------------------------------- the GPU alone


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(
    "shape",
    [
        (1000, 2),
        (8193, 7),
        (777, 4097),
        (1001, 1152),  # whose sums are added up in the same launch
        (1000, 3584),
        (300, 12288),
        (401, 13824),
        (65, 16383),
        (1, 131072),
        (33, 65537),
        # Longer than all programs that run at once can hold: not split over them.
        (2, 2_400_000),
    ],
    ids=str,
)
def test_large(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    _check(_case(shape, dtype, device))


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(("rows", "hidden"), [(2**19 + 3, 4096), (2**17 + 1, 16384)])
def test_more_than_2_to_31_elements(rows: int, hidden: int, device: torch.device) -> None:
    """Offsets past 32 bits: the last rows are right."""
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    case = _case((3, hidden), torch.bfloat16, device)
    grad = case.grad[:1].expand(rows, hidden)
    assert x.numel() >= 2**31
    y, mean, rstd = layer_norm_forward(x, [hidden], case.weight, case.bias, EPS)
    dx, _, db = layer_norm_backward(
        grad, x, [hidden], mean, rstd, case.weight, case.bias, [True] * 3
    )
    assert dx is not None and db is not None
    assert largest_error(db, grad[0].double() * rows) < 0.01
    for some in (slice(0, 3), slice(rows - 3, rows)):
        expected = _reference(case._replace(x=x[some], grad=grad[some]))
        assert expected.dx is not None
        assert largest_error(y[some], expected.y) < 0.01
        assert largest_error(dx[some], expected.dx) < 0.01


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(("rows", "hidden"), [(4096, 1024), (64, 13824), (64, 65536)])
def test_cuda_graph_replays(rows: int, hidden: int, device: torch.device) -> None:
    """A replay starts with the words of the replay before it: they have to be zeroed each time."""
    case = _case((rows, hidden), torch.bfloat16, device)
    expected = _ours(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = _ours(case)
    for _ in range(3):
        for each in outputs:
            assert each is not None
            each.fill_(math.nan)
        graph.replay()
        for one, same in zip(outputs, expected, strict=True):
            assert one is not None and same is not None and torch.equal(one, same)
