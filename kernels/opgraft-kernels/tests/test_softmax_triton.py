"""The softmax ops' Triton kernels against float64, with native's own error as the measure.

On a machine without a GPU they run in Triton's interpreter (tests/conftest.py).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import special_inputs
import triton
import triton.language as tl
from errors import relative_error

import opgraft
from opgraft import Override
from opgraft_kernels.softmax import triton_kernels as kernels
from opgraft_kernels.softmax.overrides import OPS, Op, condition, register

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
INF, NAN = math.inf, math.nan


class Function(NamedTuple):
    """One of both functions: its kernels, and the ops that they stand for."""

    name: str
    forward: Callable[..., torch.Tensor]
    backward: Callable[..., torch.Tensor]
    op: Callable[..., torch.Tensor]
    backward_op: Callable[..., torch.Tensor]


aten = torch.ops.aten
FUNCTIONS = (
    Function(
        "softmax",
        kernels.softmax_forward,
        kernels.softmax_backward,
        aten._softmax,
        aten._softmax_backward_data,
    ),
    Function(
        "log_softmax",
        kernels.log_softmax_forward,
        kernels.log_softmax_backward,
        aten._log_softmax,
        aten._log_softmax_backward_data,
    ),
)


@pytest.fixture(params=FUNCTIONS, ids=lambda each: each.name)
def function(request: pytest.FixtureRequest) -> Function:
    return request.param


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(sum(shape))
    x, g = torch.randn(2, *shape, device=device)
    return (4 * x).to(dtype), g.to(dtype)


def _check_one(
    one: torch.Tensor, native: torch.Tensor, right: torch.Tensor, largest_term: float = 0.0
) -> None:
    """What native promises, and at most twice its error.

    `largest_term`: of the sum that the result is. Where terms cancel, as in the gradient of a row
    whose gradients are equal, what is left is their rounding, native's and ours.
    """
    assert one.shape == native.shape and one.dtype == native.dtype
    assert one.stride() == native.stride()
    cancelled = largest_term / float(right.abs().max().clamp(min=1e-30))
    floor = 4 * torch.finfo(one.dtype).eps * max(1.0, cancelled)
    assert relative_error(one, right) <= 2 * relative_error(native, right) + floor


def _check(function: Function, x: torch.Tensor, g: torch.Tensor, dim: int) -> None:
    y, native = function.forward(x, dim, False), function.op(x, dim, False)
    _check_one(y, native, function.op(x.double(), dim, False))
    # Of the same output, as the two backward kernels.
    dx = function.backward(g, native, dim, x.dtype)
    native_dx = function.backward_op(g, native, dim, x.dtype)
    right = function.backward_op(g.double(), native.double(), dim, torch.float64)
    weighted = g if function.name == "log_softmax" else g * native
    _check_one(dx, native_dx, right, float(weighted.abs().max()))


@pytest.mark.parametrize("size", [1, 2, 17, 1000, 4097])
@pytest.mark.parametrize("rows", [1, 5])
def test_rows(
    function: Function, rows: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    _check(function, *_random((rows, size), dtype, device), -1)


@pytest.mark.parametrize("shape", [(70, 16), (3, 3, 130), (1000, 3), (24,)], ids=str)
def test_rows_that_share_a_program(
    function: Function, shape: tuple[int, ...], device: torch.device
) -> None:
    _check(function, *_random(shape, torch.float32, device), -1)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    ("shape", "dim"), [((70, 16), 1), ((2, 40000), 1), ((2, 9, 5), 1), ((2, 3000, 70), 1)], ids=str
)
def test_no_nan_is_made_of_what_nothing_uses(
    function: Function, shape: tuple[int, ...], dim: int, device: torch.device
) -> None:
    """The interpreter warns of each."""
    x, g = _random(shape, torch.float32, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check(function, x, g, dim)


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tile_of_rows_of_any_size_is_one_that_triton_takes(itemsize: int, log: bool) -> None:
    for size, unit in itertools.product(TILED_SIZES, _units(itemsize)):
        tile = kernels.tile_of.__wrapped__(size, itemsize, kernels.FORWARD_TILE, unit, log)
        _check_tile(tile, size, 64)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("inner", [2, 33, 200, 1024, 2**20])
@pytest.mark.parametrize("reading", [kernels.strided_forward, kernels.strided_backward])
def test_a_tile_of_strided_lines_of_any_size_is_one_that_triton_takes(
    reading: Callable[[int, int], kernels.Strided], inner: int, itemsize: int
) -> None:
    for size, unit in itertools.product(TILED_SIZES, _units(itemsize)):
        chosen = reading(itemsize, unit)
        tile = kernels.strided_tile_of(size, inner, itemsize, unit, chosen)
        _check_tile(tile, size, 128 if reading is kernels.strided_forward else 64)
        if tile.whole and tile.lines * tile.block * itemsize <= chosen.a_warp:
            assert tile.num_warps == 1  # which needs no other


TILED_SIZES = (*range(1, 1100), 4096, 8193, 16384, 50257, 131072)


def _units(itemsize: int) -> Iterator[int]:
    return (each for each in (1, 2, 4, 8) if each * itemsize <= 2 * 16)  # of 16 bits, in float32


def _check_tile(tile: kernels.Tile, size: int, most: int) -> None:
    """most: elements of a thread. Of a backward's two tensors no more than there are registers."""
    for number in (tile.lines, tile.block, tile.num_warps):
        assert number > 0 and number & (number - 1) == 0, (size, tile)
    assert tile.num_warps <= 32 and (tile.block >= size or not tile.whole), (size, tile)
    assert tile.lines * tile.block <= 32 * most * tile.num_warps, (size, tile)


@pytest.mark.parametrize("size", [32768, 40000, 50257, 128256])
def test_rows_that_are_read_in_blocks(
    function: Function, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    _check(function, *_random((2, size), dtype, device), -1)


@pytest.mark.parametrize("beyond", [-1, 1, 7, 8, 4096, 8191, 8192, 8200])
@pytest.mark.parametrize("rows", [1, 9])
def test_rows_beyond_what_registers_hold(
    function: Function, rows: int, beyond: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The last block of a row, which is read again first, has any length."""
    longest = kernels.FORWARD_TILE // dtype.itemsize
    _check(function, *_random((rows, longest + beyond), dtype, device), -1)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((2, 17, 5), 1),
        ((3, 7), 0),
        ((2, 21, 6, 50), 1),
        ((2, 3, 4, 5), -3),
        ((2, 1000, 2), -2),
        ((1, 64, 33), 0),
        ((300, 40), 0),
        ((2, 3000, 70), 1),
    ],
    ids=str,
)
def test_any_dimension(
    function: Function,
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    _check(function, *_random(shape, dtype, device), dim)


@triton.jit(do_not_specialize=["program", "inner"])
def _keep_lines(outer_ptr, place_ptr, program, inner, LINES: tl.constexpr):
    outer, place, there = kernels._lines(program, 0, inner, LINES, STRIDED=True)
    index = tl.arange(0, LINES)
    tl.store(outer_ptr + index, outer, mask=there)
    tl.store(place_ptr + index, place, mask=there)


@pytest.mark.parametrize("inner", [2**31 - 1, 2**31 - 512, 2**31 - 513, 2**30, 1000, 512, 1])
def test_lines_of_as_many_elements_between_as_32_bits_count(
    inner: int, device: torch.device
) -> None:
    """Of the last program of the first matrix, and of the first one of the next."""
    lines = 512
    last = -(-inner // lines) - 1
    for program, expected in (
        (last, (0, range(last * lines, inner))),
        (last + 1, (1, range(min(lines, inner)))),
    ):
        outer, place = torch.full((2, lines), -1, dtype=torch.int64, device=device)
        _keep_lines[(1,)](outer, place, program, inner, lines)
        where, places = expected
        assert place[: len(places)].tolist() == list(places)
        assert (outer[: len(places)] == where).all()
        assert (place[len(places) :] == -1).all()


LAYOUTS = {
    **special_inputs.LAYOUTS,
    "one column": lambda t: t[:, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1])
def test_layouts(function: Function, layout: str, dim: int, device: torch.device) -> None:
    x, g = _random((6, 48), torch.float32, device)
    _check(function, LAYOUTS[layout](x), g, dim)
    _check(function, x, LAYOUTS[layout](g), dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [17, 30000], ids=["a tile", "in blocks"])
def test_special_values(function: Function, size: int, dim: int, device: torch.device) -> None:
    x = special_inputs.special_rows(size).to(device)
    x = x if dim == 1 else x.t().contiguous()
    native = function.op(x, dim, False)
    y, right = function.forward(x, dim, False), function.op(x.double(), dim, False)
    _check_special(y, native, right)
    g = torch.randn_like(x)
    native_dx = function.backward_op(g, native, dim, x.dtype)
    right = function.backward_op(g.double(), native.double(), dim, torch.float64)
    _check_special(function.backward(g, native, dim, x.dtype), native_dx, right)


def _check_special(one: torch.Tensor, native: torch.Tensor, right: torch.Tensor) -> None:
    """Not finite where native is not; elsewhere near float64, which long sums of native are not."""
    finite = native.isfinite()
    torch.testing.assert_close(one[~finite], native[~finite], equal_nan=True)
    torch.testing.assert_close(one[finite], right[finite].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "dim"), [((5, 100), 1), ((2, 40000), 1), ((5, 40, 9), 1)])
def test_half_to_float(
    function: Function, shape: tuple[int, ...], dim: int, device: torch.device
) -> None:
    """The CPU's own ops refuse it: what it is to be there is what float32 gives."""
    x, g = _random(shape, torch.float16, device)
    y, expected = function.forward(x, dim, True), function.op(x.float(), dim, False)
    _check_one(y, expected, function.op(x.double(), dim, False))
    dx = function.backward(g.float(), expected, dim, torch.float16)
    assert dx.dtype is torch.float16
    right = function.backward_op(g.float(), expected, dim, torch.float32)
    assert relative_error(dx, right.double()) <= torch.finfo(torch.float16).eps


# ---------------------------------------------------------------------------- through opgraft


@pytest.fixture
def overrides(dispatch_key: str) -> dict[str, Override]:
    return {each.name.removeprefix("opgraft_kernels."): each for each in register(dispatch_key)}


def _gradient(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = function(x)
    weights = 1 / (1 + torch.arange(y.numel(), device=y.device).view_as(y))
    (dx,) = torch.autograd.grad(y, x, weights)
    return y.detach(), dx


def _cross_entropy(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % x.shape[1])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("softmax", lambda x: F.softmax(x, 1)),
        ("softmax", lambda x: F.softmax(x, 0)),
        ("log_softmax", lambda x: F.log_softmax(x, -1)),
        ("log_softmax", lambda x: F.log_softmax(x, -2)),
        ("log_softmax", _cross_entropy),
    ],
    ids=["softmax", "softmax of columns", "log_softmax", "log_softmax of columns", "cross_entropy"],
)
def test_gradients(
    name: str,
    call: Callable[[torch.Tensor], torch.Tensor],
    overrides: dict[str, Override],
    device: torch.device,
) -> None:
    x, _ = _random((33, 70), torch.float32, device)
    ours = _gradient(call, x)
    hit = {each: override.hits for each, override in overrides.items() if override.hits}
    assert hit == {f"{name}.forward": 1, f"{name}.backward": 1}
    with opgraft.disabled():
        native = _gradient(call, x)
    torch.testing.assert_close(ours, native)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_compiled(overrides: dict[str, Override], device: torch.device) -> None:
    """Inductor's own code computes it, or the override: the result is the same."""
    x, _ = _random((33, 70), torch.float32, device)

    def call(x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(F.softmax(x, 0), 1)

    torch._dynamo.reset()
    expected = _gradient(call, x)
    assert all(override.hits == 1 for override in overrides.values())
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(_gradient(compiled, x), expected)


@pytest.mark.parametrize("shapes", [((3, 2, 4), (2, 3, 4)), ((4, 1, 6), (2, 2, 6))], ids=str)
def test_a_gradient_of_another_shape_is_natives(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    function: Function,
    overrides: dict[str, Override],
    device: torch.device,
) -> None:
    """Of as many elements: an error, or an answer of the gradient's shape."""
    y = torch.rand(shapes[1], device=device)
    g = torch.rand(shapes[1], device=device)
    for _ in range(3):  # later hits are not compared with native
        function.backward_op(g, y, -1, y.dtype)

    def result_or_error() -> object:
        try:
            return function.backward_op(g.view(shapes[0]), y, -1, y.dtype).tolist()
        except RuntimeError as error:
            return str(error)

    ours = result_or_error()
    assert overrides[f"{function.name}.backward"].hits == 4
    with opgraft.disabled():
        assert ours == result_or_error()


def _fine(direction: str) -> dict[str, object]:
    x = torch.ones(4, 8)
    if direction == "forward":
        return {"self": x, "dim": -1, "half_to_float": False}
    return {"grad_output": x, "output": x, "dim": 1, "input_dtype": torch.float32}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_condition_takes(op: Op) -> None:
    wanted, fine = condition(op, "CPU"), _fine(op.direction)
    assert wanted.holds(fine)
    for dim in (0, -2, 1):
        assert wanted.holds({**fine, "dim": dim})
    assert wanted.holds({**fine, op.normalized: torch.ones(4, 12)[:, :8]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"self": torch.ones(4, 8, dtype=torch.float64)},
        {"self": torch.ones(4, 8, dtype=torch.bfloat16)},
        {"self": torch.ones(())},
        {"self": torch.ones(0, 8)},
        {"self": torch.ones(8, 4).t()},
        {"self": torch.ones(4, 12)[:, :8], "dim": 0},
        {"dim": 2},
        {"dim": -3},
        {"half_to_float": True},
    ],
)
def test_forward_condition_declines(wrong: dict[str, object]) -> None:
    assert not condition(OPS[0], "CPU").holds({**_fine("forward"), **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"grad_output": torch.ones(4, 7)},
        {"grad_output": torch.ones(8, 4)},
        {"grad_output": torch.ones(4, 8, dtype=torch.float16)},
        {"output": torch.ones(4, 8, dtype=torch.float64)},
        {"input_dtype": torch.float16},
        {"input_dtype": torch.float64},
        {"dim": 2},
    ],
)
def test_backward_condition_declines(wrong: dict[str, object]) -> None:
    assert not condition(OPS[2], "CPU").holds({**_fine("backward"), **wrong})


# ------------------------------------------------------------------------------- the GPU alone


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((8193, 16), 1),
        ((777, 1000), 1),
        ((300, 4097), 1),
        ((33, 65537), 1),
        ((5, 262144), 1),
        ((3, 1_000_003), 1),
        ((4, 150, 128, 128), 1),
        ((2, 4096, 1000), 1),
        ((70000, 33), 0),
    ],
    ids=str,
)
def test_large(
    function: Function,
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    _check(function, *_random(shape, dtype, device), dim)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2**19 + 3, 4096), 1), ((2**14 + 1, 2**17), 1), ((8, 2**28 + 16), 0)],
    ids=str,
)
def test_more_than_2_to_31_elements(
    function: Function, shape: tuple[int, int], dim: int, device: torch.device
) -> None:
    """Offsets past 32 bits: the first and the last lines are right."""
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    assert x.numel() >= 2**31
    y = function.forward(x, dim, False)
    dx = function.backward(x, y, dim, x.dtype)
    for some in (slice(0, 3), slice(-3, None)):
        where = (some, slice(None)) if dim == 1 else (slice(None), some)
        expected = function.op(x[where].double(), dim, False)
        assert relative_error(y[where], expected) < 0.01
        right = function.backward_op(x[where].double(), y[where].double(), dim, torch.float64)
        assert relative_error(dx[where], right) < 0.01


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_half_to_float_is_natives(function: Function, device: torch.device) -> None:
    x, g = _random((64, 1000), torch.float16, device)
    y = function.op(x, -1, True)
    torch.testing.assert_close(function.forward(x, -1, True), y)
    arguments = (g.float(), y, -1, torch.float16)
    torch.testing.assert_close(function.backward(*arguments), function.backward_op(*arguments))
