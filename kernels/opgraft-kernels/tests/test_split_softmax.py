"""Softmax's rows that are split over programs, which wait for one another on the GPU.

Triton's interpreter runs programs in turn. Here each keeps all that it publishes, and they run
twice: the second time all is there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import special_inputs
import triton
import triton.language as tl

import opgraft
from configurations import MULTIPROCESSORS, softmax_launches
from opgraft_kernels import launches, rows
from opgraft_kernels.launches import Device, Launch
from opgraft_kernels.launches import Tile as RowTile
from opgraft_kernels.softmax import triton_kernels as kernels
from opgraft_kernels.softmax.overrides import register

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
aten = torch.ops.aten
#: Of a device with so few multiprocessors a few groups of programs run at once.
FEW = Device(multiprocessors=20, shared_memory=228 * 1024, can_wait=True)
#: The longest rows that are not split, in bytes: where they are few; and of many, where most are.
LONGEST, LONGEST_OF_MANY = 128 * 1024, 32 * 1024


@triton.jit
def _publish(slots_ptr, step, split, value, SLOTS: tl.constexpr):
    """As the kernels do; `step` is a Python integer here."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tag = tl.full(value.shape, step + 1, tl.int64)
    tl.store(slots_ptr + step * SLOTS + split, bits | (tag << 32))


@triton.jit
def _values_of_step(ptrs, tag):
    """The values of slots; NaN where they are of another step."""
    found = tl.load(ptrs)
    values = (found & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where((found >> 32).to(tl.int32) == tag, values, float("nan"))


@triton.jit
def _values_of_step_in_two(ptrs, others, tag):
    return _values_of_step(ptrs, tag), _values_of_step(others, tag)


@pytest.fixture(autouse=True)
def programs_run_in_turn(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Where there is no GPU: nobody waits, and a ring is longer than any test's steps."""
    if torch.cuda.is_available():
        yield
        return
    ring = tl.constexpr(64)
    monkeypatch.setattr(rows, "_wait_for_slots", _values_of_step)
    monkeypatch.setattr(rows, "_wait_for_two_slots", _values_of_step_in_two)
    for module in (rows, launches, kernels):
        monkeypatch.setattr(module, "RING", ring)
    monkeypatch.setattr(kernels, "publish", _publish)
    if "device" in request.fixturenames:  # rows of three programs say as much as those of seventeen
        monkeypatch.setattr(kernels, "_SPLIT_ROW", 16 * 1024)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture(params=[False, True], ids=["softmax", "log_softmax"])
def log(request: pytest.FixtureRequest) -> bool:
    return request.param


def _run(launch: Launch, device: torch.device) -> None:
    assert launch.kernel in (kernels._forward_split_kernel, kernels._backward_split_kernel)
    assert launch.options["launch_cooperative_grid"]
    launch()
    if device.type == "cpu":
        launch()


def _forward(x: torch.Tensor, log: bool) -> torch.Tensor:
    y = torch.full(x.shape, 7.0, dtype=x.dtype, device=x.device)
    _run(kernels.plan_forward(x, y, 1, log, FEW), x.device)
    return y


def _backward(g: torch.Tensor, y: torch.Tensor, log: bool) -> torch.Tensor:
    dx = torch.full(g.shape, 7.0, dtype=g.dtype, device=g.device)
    _run(kernels.plan_backward(g, y, dx, 1, log, FEW), g.device)
    return dx


def _op(log: bool) -> Callable[..., torch.Tensor]:
    return aten._log_softmax if log else aten._softmax


def _backward_op(log: bool) -> Callable[..., torch.Tensor]:
    return aten._log_softmax_backward_data if log else aten._softmax_backward_data


def _assert_close(one: torch.Tensor, right: torch.Tensor) -> None:
    """Within the rounding of the largest result."""
    tolerance = 4 * torch.finfo(one.dtype).eps * float(right.abs().max())
    torch.testing.assert_close(one.double(), right, rtol=0, atol=tolerance)


def _check(x: torch.Tensor, g: torch.Tensor, log: bool) -> None:
    y = _forward(x, log)
    _assert_close(y, _op(log)(x.double(), 1, False))
    dx = _backward(g, y, log)
    _assert_close(dx, _backward_op(log)(g.double(), y.double(), 1, torch.float64))


@pytest.mark.parametrize(("rows", "beyond"), [(1, 16), (2, 8192), (5, 12288 - 16)])
def test_rows(rows: int, beyond: int, log: bool, dtype: torch.dtype, device: torch.device) -> None:
    """The last program's part has any length."""
    size = (kernels._SPLIT_ROW + beyond) // dtype.itemsize
    x, g = torch.randn(2, rows, size, device=device)
    _check((4 * x).to(dtype), g.to(dtype), log)


@pytest.mark.parametrize(("rows", "beyond"), [(1, 1), (3, 3), (2, 4095)])
def test_rows_that_begin_anywhere(
    rows: int, beyond: int, log: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """In a unit of 16 bytes; what is before and behind whole units is the first program's."""
    shape = rows, kernels._SPLIT_ROW // dtype.itemsize + beyond
    x, g = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    _check(4 * x, g, log)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_ends_of_several_steps(steps: int, log: bool, device: torch.device) -> None:
    """A group goes from row to row, and ends are loaded for the next one; here it is one program,
    so the interpreter can run it."""
    size = LONGEST_OF_MANY // 2 + 1
    x, g = (torch.randn(3 * steps, size, device=device).half() for _ in range(2))
    y, dx = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
    alone = Device(multiprocessors=3, shared_memory=2**20, can_wait=True)
    part = RowTile(1, 2 * LONGEST_OF_MANY, 4)
    for kernel, values, tensors in (
        (kernels._forward_split_kernel, 2, (x, y)),
        (kernels._backward_split_kernel, 1, (g, y, dx)),
    ):
        strides = (size,) * (len(tensors) - 1)
        call = kernels._Call(tensors, strides, kernels.Lines.of(x, 1), log)
        launch = kernels._launch_split(kernel, call, part, values, 0, alone)
        assert launch is not None and launch.grid == 3 and launch.constexprs["ENDS"] > 0
        _run(launch, device)
    _assert_close(y, _op(log)(x.double(), 1, False))
    _assert_close(dx, _backward_op(log)(g.double(), y.double(), 1, torch.float64))


@pytest.mark.parametrize("beyond", [8, 11])
def test_nothing_beside_rows_is_read_or_written(
    beyond: int, log: bool, dtype: torch.dtype, device: torch.device
) -> None:
    size = kernels._SPLIT_ROW // dtype.itemsize + beyond
    x, g, y, dx = (
        torch.full((2 * size + 128,), math.nan, dtype=dtype, device=device) for _ in range(4)
    )
    rows = [each[64:-64].view(2, size) for each in (x, g, y, dx)]
    rows[0].normal_()
    rows[1].normal_()
    _run(kernels.plan_forward(rows[0], rows[2], 1, log, FEW), device)
    _run(kernels.plan_backward(rows[1], rows[2], rows[3], 1, log, FEW), device)
    for written, inside in ((y, rows[2]), (dx, rows[3])):
        assert inside.isfinite().all()
        assert written[:64].isnan().all() and written[-64:].isnan().all()


@pytest.mark.parametrize("between", [8, 64])
@pytest.mark.parametrize("beyond", [8, 5])
def test_rows_that_are_apart(
    between: int, beyond: int, log: bool, dtype: torch.dtype, device: torch.device
) -> None:
    size = kernels._SPLIT_ROW // dtype.itemsize + beyond
    x, g = (torch.randn(3, size + between, device=device).to(dtype) for _ in range(2))
    x[:, size:] = g[:, size:] = math.nan
    _check(x[:, :size], g[:, :size], log)


def test_special_values(log: bool, device: torch.device) -> None:
    x = special_inputs.special_rows(kernels._SPLIT_ROW // 4 + 240).to(device)
    native, right = _op(log)(x, 1, False), _op(log)(x.double(), 1, False)
    _check_special(_forward(x, log), native, right)
    g = torch.randn_like(x)
    native_dx = _backward_op(log)(g, native, 1, x.dtype)
    right = _backward_op(log)(g.double(), native.double(), 1, torch.float64)
    _check_special(_backward(g, native, log), native_dx, right)


def _check_special(one: torch.Tensor, native: torch.Tensor, right: torch.Tensor) -> None:
    finite = native.isfinite()
    torch.testing.assert_close(one[~finite], native[~finite], equal_nan=True)
    torch.testing.assert_close(one[finite], right[finite].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("beyond", [8, 1])
def test_one_program_alone_has_a_finite_value(
    where: str, beyond: int, log: bool, dtype: torch.dtype, device: torch.device
) -> None:
    size = kernels._SPLIT_ROW // dtype.itemsize + beyond
    x = torch.full((2, size), -math.inf, dtype=dtype, device=device)
    x[:, 0 if where == "first" else -1] = 3.0
    torch.testing.assert_close(_forward(x, log), _op(log)(x, 1, False))


# ---------------------------------------------------------------------------- which rows are split


def _is_split(launches: list[Launch]) -> list[bool]:
    return [bool(launch.options) for launch in launches]


MANY = 2 * MULTIPROCESSORS
#: The longest rows that are not split, in bytes, of a forward and a backward.
UNSPLIT = {
    (torch.float32, MANY): (LONGEST_OF_MANY, LONGEST_OF_MANY),
    (torch.bfloat16, MANY): (LONGEST, LONGEST_OF_MANY),
    (torch.float32, MANY - 1): (LONGEST, LONGEST),
    (torch.bfloat16, MANY - 1): (LONGEST, LONGEST),
}


@pytest.mark.parametrize(("dtype", "rows"), UNSPLIT, ids=str)
def test_rows_are_split_that_are_longer_than_so_many_bytes(
    dtype: torch.dtype, rows: int, log: bool
) -> None:
    for number, longest in enumerate(UNSPLIT[dtype, rows]):
        for beyond in (0, 1, 16 // dtype.itemsize):
            shape = (rows, longest // dtype.itemsize + beyond)
            assert _is_split(softmax_launches(dtype, shape, log))[number] == (beyond > 0)


OTHER: dict[str, dict[str, Any]] = {
    "strided": {"shape": (2, 128256, 8)},
    "unaligned": {"between": 1},
    "to float32": {"wide": torch.float32},
    "longer than all programs hold": {"shape": (2, 2**22)},
    "a device with little shared memory": {"shared_memory": 64 * 1024},
    "a device whose programs do not wait": {"can_wait": False},
}


@pytest.mark.parametrize("other", OTHER)
def test_other_rows_are_not_split(other: str, log: bool) -> None:
    options = {"shape": (64, 128256), **OTHER[other]}
    assert _is_split(softmax_launches(torch.float16, log=log, **options)) == [False, False]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("offset", [1, 4])
def test_rows_at_addresses_that_are_not_aligned_are_not_split(
    offset: int, log: bool, device: torch.device
) -> None:
    size = LONGEST // 2 + 8
    memory = torch.zeros(size + 64, dtype=torch.float16, device=device)
    x, y = memory[offset:][:size].view(1, size), torch.zeros(1, size, dtype=torch.float16)
    launches = [
        kernels.plan_forward(x, y, 1, log, FEW),
        kernels.plan_forward(y, x, 1, log, FEW),
        kernels.plan_backward(y, x, y, 1, log, FEW),
    ]
    assert _is_split(launches) == [False] * 3


# ---------------------------------------------------------------------------- the GPU alone


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize("size", [128256, 100001])
@pytest.mark.parametrize("rows", [1, 64, 131, 1000])
def test_as_many_rows_as_use_slots_again(
    rows: int, size: int, log: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """With the same bits every time."""
    x, g = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
    y = _op(log)(x, 1, False)
    forward = kernels.log_softmax_forward if log else kernels.softmax_forward
    backward = kernels.log_softmax_backward if log else kernels.softmax_backward
    ours, dx = forward(x, 1, False), backward(g, y, 1, x.dtype)
    for _ in range(3):
        assert torch.equal(forward(x, 1, False), ours)
        assert torch.equal(backward(g, y, 1, x.dtype), dx)
    _assert_close(ours, _op(log)(x.double(), 1, False))
    _assert_close(dx, _backward_op(log)(g.double(), y.double(), 1, torch.float64))


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_cuda_graph_replays(log: bool, device: torch.device) -> None:
    """A replay starts with the words of the replay before it: they have to be zeroed each time."""
    x, g = torch.randn(2, 300, 128256, device=device)
    forward = kernels.log_softmax_forward if log else kernels.softmax_forward
    backward = kernels.log_softmax_backward if log else kernels.softmax_backward

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        y = forward(x, 1, False)
        return y, backward(g, y, 1, x.dtype)

    expected = both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = both()
    for _ in range(3):
        for each in outputs:
            each.fill_(math.nan)
        graph.replay()
        for one, same in zip(outputs, expected, strict=True):
            assert torch.equal(one, same)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize("rows", [64, 300])
def test_launch_plans(rows: int, log: bool, device: torch.device) -> None:
    """Each replay has slots of its own, zeroed."""
    overrides = {each.name: each for each in register("CUDA")}
    function = torch.log_softmax if log else torch.softmax
    name = f"opgraft_kernels.{function.__name__}"
    for _ in range(6):
        x = torch.randn(rows, 128256, device=device, requires_grad=True)
        y = function(x, 1)
        g = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, g)
        with opgraft.disabled():
            torch.testing.assert_close(y, function(x, 1))
            torch.testing.assert_close(dx, _backward_op(log)(g, y.detach(), 1, x.dtype))
    for way in ("forward", "backward"):
        override = overrides[f"{name}.{way}"]
        assert override.hits == 6
        assert override.plans is not None and len(override.plans) == 1, override.plans.refusals
