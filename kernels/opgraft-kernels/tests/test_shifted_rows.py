"""Rows whose length is no multiple of 16 bytes: softmax's and cross-entropy's kernels read and
write whole units of 16 bytes and the ends beside them, and nothing else."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from configurations import FEW_ROWS, cross_entropy_launches
from opgraft_kernels.cross_entropy import triton_kernels as cross_entropy
from opgraft_kernels.launches import Launch
from opgraft_kernels.softmax import triton_kernels as softmax

INF, NAN = math.inf, math.nan
aten = torch.ops.aten
#: Of these several share a program, and none is shifted.
SHORT = [*(size for size in range(1, 41) if size % 8), 197]
#: Alone, as many as share a program or fewer, and more. Each size comes with one of the few.
SIZES = {1: SHORT, 2: SHORT[::3], 3: SHORT[1::3], 5: SHORT[2::3], 129: SHORT}
LONG = (1191, 4097, 50257)


@pytest.fixture(params=[False, True], ids=["softmax", "log_softmax"])
def log(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(autouse=True)
def no_warnings_of_numpy() -> Iterator[None]:
    """The interpreter computes with what special values there are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class Buffer:
    """A matrix inside memory that has `filled` before, behind and between its rows."""

    def __init__(
        self, values: torch.Tensor, filled: float, apart: int | None = None, offset: int = 0
    ) -> None:
        rows, columns = values.shape
        apart = columns if apart is None else apart
        self.filled = filled
        # 64 elements before it: an address that is aligned, unless there is an offset.
        self.memory = values.new_full((64 + offset + rows * apart + 64,), filled)
        self.matrix = self.memory[64 + offset :].as_strided(
            (rows, columns), (apart, 1), 64 + offset
        )
        self.matrix.copy_(values)

    def has_changed_beside(self) -> bool:
        """Whether anything is different outside the matrix."""
        memory = self.memory.clone()
        memory.as_strided(
            self.matrix.shape, self.matrix.stride(), self.matrix.storage_offset()
        ).fill_(self.filled)
        return not torch.equal(memory, torch.full_like(memory, self.filled))


def _random(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, size, device=device).to(dtype)


def _is_shifted(launch: Launch) -> bool:
    return launch.constexprs["ENDS"] > 0


def _into(written: torch.Tensor, planned: torch.Tensor, launch: Launch) -> Launch:
    """A launch that writes somewhere else than planned."""
    arguments = (written if each is planned else each for each in launch.arguments)
    return launch._replace(arguments=tuple(arguments))


def _forward(x: torch.Tensor, log: bool) -> torch.Tensor:
    return aten._log_softmax(x, 1, False) if log else aten._softmax(x, 1, False)


def _backward(g: torch.Tensor, y: torch.Tensor, log: bool) -> torch.Tensor:
    op = aten._log_softmax_backward_data if log else aten._softmax_backward_data
    return op(g, y, 1, y.dtype)


def _assert_close(one: torch.Tensor, right: torch.Tensor) -> None:
    """Within the rounding of the result, relative to the largest one: gradients cancel."""
    largest = float(right[right.isfinite()].abs().max()) if right.isfinite().any() else 0.0
    tolerance = 4 * torch.finfo(one.dtype).eps * max(largest, 1.0)
    torch.testing.assert_close(one.double(), right.double(), rtol=0, atol=tolerance, equal_nan=True)


def _check_softmax(x: Buffer, g: Buffer, log: bool, is_shifted: bool) -> None:
    """The forward of `x` and a backward from `g`, into the midst of other memory."""
    y = Buffer(torch.zeros_like(x.matrix).contiguous(), 7.0)
    launch = softmax.plan_forward(x.matrix, y.matrix, 1, log)
    assert _is_shifted(launch) == is_shifted
    launch()
    _assert_close(y.matrix, _forward(x.matrix.double(), log))
    # As far apart as `g` is.
    y_in = Buffer(y.matrix, NAN, g.matrix.stride(0))
    dx = Buffer(torch.zeros_like(y.matrix), 7.0)
    launch = softmax.plan_backward(g.matrix, y_in.matrix, dx.matrix, 1, log)
    assert _is_shifted(launch) == is_shifted
    launch()
    _assert_close(dx.matrix, _backward(g.matrix.double(), y.matrix.double(), log))
    assert not y.has_changed_beside() and not dx.has_changed_beside()


@pytest.mark.parametrize("rows", SIZES)
def test_short_rows_of_softmax(
    rows: int, log: bool, dtype: torch.dtype, device: torch.device
) -> None:
    for size in SIZES[rows]:
        x, g = (Buffer(_random(rows, size, dtype, device), NAN) for _ in range(2))
        _check_softmax(x, g, log, is_shifted=False)


@pytest.mark.parametrize("size", LONG)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_longer_rows_of_softmax(
    rows: int, size: int, log: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, g = (Buffer(_random(rows, size, dtype, device), INF) for _ in range(2))
    _check_softmax(x, g, log, is_shifted=True)


@pytest.mark.parametrize("size", [1191, 40001])
@pytest.mark.parametrize("beyond", [8, 48])
def test_strides_that_are_congruent(
    size: int, beyond: int, log: bool, device: torch.device
) -> None:
    x, g = (Buffer(_random(5, size, torch.float16, device), NAN, size + beyond) for _ in range(2))
    _check_softmax(x, g, log, is_shifted=True)


@pytest.mark.parametrize("size", [5, 27, 197, 1191, 40001])
@pytest.mark.parametrize("beyond", [1, 3, 4])
def test_other_strides_are_read_as_narrowly_as_before(
    size: int, beyond: int, log: bool, device: torch.device
) -> None:
    x, g = (Buffer(_random(5, size, torch.float16, device), NAN, size + beyond) for _ in range(2))
    _check_softmax(x, g, log, is_shifted=False)


@pytest.mark.parametrize("size", [33, 66, 129, 132, 260, 300, 511, 514, 577, 1000, 1021])
@pytest.mark.parametrize("rows", [2, 5])
def test_rows_that_a_warp_alone_has(
    rows: int, size: int, log: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Fewer than it has at once, and more: rows of any unit, masked and not."""
    for beyond in (1, 8 // dtype.itemsize):
        x, g = (Buffer(_random(rows, size, dtype, device), NAN, size + beyond) for _ in range(2))
        x.matrix[-1, : size // 2] = -INF
        _check_softmax(x, g, log, is_shifted=False)


@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.parametrize("size", [27, 1191])
def test_addresses_that_are_not_aligned(
    size: int, offset: int, log: bool, device: torch.device
) -> None:
    x, g = (Buffer(_random(5, size, torch.float16, device), NAN, offset=offset) for _ in range(2))
    _check_softmax(x, g, log, is_shifted=False)


@pytest.mark.parametrize("size", [601, 1191, 40001])
def test_half_to_float(size: int, log: bool, device: torch.device) -> None:
    x = Buffer(_random(5, size, torch.float16, device), NAN)
    y = Buffer(torch.zeros(5, size, device=device), 7.0)
    launch = softmax.plan_forward(x.matrix, y.matrix, 1, log)
    assert _is_shifted(launch) and launch.constexprs["UNIT"] == 8
    launch()
    _assert_close(y.matrix, _forward(x.matrix.double(), log))
    g = Buffer(_random(5, size, torch.float32, device), NAN)
    dx = Buffer(torch.zeros(5, size, device=device, dtype=torch.float16), 7.0)
    launch = softmax.plan_backward(g.matrix, y.matrix, dx.matrix, 1, log)
    assert _is_shifted(launch) and launch.constexprs["UNIT"] == 8
    launch()
    _assert_close(dx.matrix, _backward(g.matrix.double(), y.matrix.double(), log))
    assert not y.has_changed_beside() and not dx.has_changed_beside()


@pytest.mark.parametrize("size", [601, 1191, 40001])
def test_masked_rows_of_softmax(size: int, log: bool, device: torch.device) -> None:
    """All of it, all but its ends, all but one element inside, and a half of it."""
    x = torch.full((9, size), -INF, device=device)
    x[1, 0] = x[2, -1] = x[3, size // 2] = 3.0
    x[4, : size // 2 + 1] = 1.0
    x[5, size // 2 :] = 2.0
    x[6, 0] = x[6, -1] = -100.0
    y = Buffer(torch.zeros_like(x), 7.0)
    launch = softmax.plan_forward(Buffer(x, INF).matrix, y.matrix, 1, log)
    assert _is_shifted(launch)
    launch()
    _assert_close(y.matrix, _forward(x.double(), log))


@pytest.mark.parametrize("size", [1191, 4097])
def test_a_program_writes_its_own_row_alone(size: int, log: bool, device: torch.device) -> None:
    """Others write theirs at the same time."""
    x, g = (_random(300, size, torch.float16, device) for _ in range(2))
    y, dx = (torch.full_like(x, 7.0) for _ in range(2))
    for launch, written in (
        (softmax.plan_forward(x, y, 1, log), y),
        (softmax.plan_backward(g, x, dx, 1, log), dx),
    ):
        assert _is_shifted(launch) and launch.grid > 1
        launch._replace(grid=1)()
        assert (written[launch.constexprs["LINES"] :] == 7.0).all()
        assert not (written[: launch.constexprs["LINES"]] == 7.0).all()


# ---------------------------------------------------------------------------- cross-entropy


def _weight(classes: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.5, 2, classes, device=device)


def _check_cross_entropy(
    x: Buffer, weighted: bool, smoothing: float, *, is_shifted: bool = True
) -> None:
    """The losses of rows, one of them ignored, and their gradient, into the midst of other
    memory."""
    rows, classes = x.matrix.shape
    device = x.matrix.device
    target = torch.randint(0, classes, (rows,), device=device)
    target[0], target[-1] = 0, classes - 1
    target[rows // 2 : rows // 2 + 1] = -100
    weight = _weight(classes, device) if weighted else None
    kind = 0, -100, smoothing
    (losses, statistics, mass), (launch,) = cross_entropy.plan_forward(
        x.matrix, target, weight, *kind, dtype=torch.float32
    )
    assert _is_shifted(launch) == (is_shifted and smoothing == 0)
    launch()
    exact = x.matrix.double().requires_grad_()
    right = F.cross_entropy(
        exact,
        target,
        weight=None if weight is None else weight.double(),
        reduction="none",
        label_smoothing=smoothing,
    )
    torch.testing.assert_close(losses, right.float(), rtol=1e-5, atol=1e-5)
    g = torch.randn(rows, device=device)
    (right_dx,) = torch.autograd.grad(right, exact, g.double())
    dx = Buffer(torch.zeros_like(x.matrix).contiguous(), 7.0)
    planned, (*sums, launch) = cross_entropy.plan_backward(
        g, x.matrix, target, weight, statistics, mass, *kind
    )
    assert _is_shifted(launch) == is_shifted
    for each in (*sums, _into(dx.matrix, planned, launch)):
        each()
    _assert_close(dx.matrix, right_dx)
    assert not dx.has_changed_beside()


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_short_rows_of_cross_entropy(
    rows: int, smoothing: float, dtype: torch.dtype, device: torch.device
) -> None:
    for classes in SIZES[rows]:
        x = Buffer(_random(rows, classes, dtype, device), NAN)
        _check_cross_entropy(x, classes % 2 == 0, smoothing, is_shifted=False)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", LONG)
def test_longer_rows_of_cross_entropy(
    classes: int, smoothing: float, weighted: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = Buffer(_random(5, classes, dtype, device), INF)
    _check_cross_entropy(x, weighted, smoothing)


#: Of so many, each multiprocessor has several, or the interpreter's two.
MANY_ROWS = 9


@pytest.mark.parametrize(("weighted", "smoothing"), [(False, 0.0), (True, 0.0), (True, 0.1)])
@pytest.mark.parametrize("classes", [16383, 16385, 20479, 20481, 40001, 40007])
def test_many_long_rows_of_cross_entropy(
    classes: int, weighted: bool, smoothing: float, device: torch.device
) -> None:
    x = Buffer(_random(MANY_ROWS, classes, torch.float16, device), INF)
    _check_cross_entropy(x, weighted, smoothing)


@pytest.mark.parametrize(
    ("rows", "dtype", "classes", "walks"),
    [
        (MANY_ROWS, torch.float16, 16383, False),
        (MANY_ROWS, torch.float16, 16385, True),
        (MANY_ROWS, torch.float16, 40000, False),
        (MANY_ROWS, torch.float32, 40001, False),
        (FEW_ROWS, torch.float16, 40001, False),
    ],
)
def test_programs_of_cross_entropys_backward_walk_over_many_long_rows_of_16_bits(
    rows: int, dtype: torch.dtype, classes: int, walks: bool
) -> None:
    *_, launch = cross_entropy_launches(dtype, rows, classes)
    assert (launch.constexprs["STAGES"] > 0) is walks
    assert (launch.grid == rows) is (walks or classes == 16383)


@pytest.mark.parametrize(("beyond", "is_shifted"), [(8, True), (16, True), (1, False), (4, False)])
@pytest.mark.parametrize("classes", [1191, 40001])
def test_strides_of_cross_entropy(
    classes: int, beyond: int, is_shifted: bool, device: torch.device
) -> None:
    x = Buffer(_random(5, classes, torch.float16, device), NAN, classes + beyond)
    _check_cross_entropy(x, weighted=True, smoothing=0.1, is_shifted=is_shifted)


@pytest.mark.parametrize("offset", range(1, 8))
def test_addresses_of_cross_entropy_that_are_not_aligned(offset: int, device: torch.device) -> None:
    x = Buffer(_random(5, 1191, torch.float16, device), NAN, offset=offset)
    _check_cross_entropy(x, weighted=False, smoothing=0.0, is_shifted=False)


@pytest.mark.parametrize(
    ("rows", "classes"),
    [(2, 1191), (2, 40001), (MANY_ROWS, 40001)],
    ids=["a tile", "in blocks", "walking"],
)
def test_a_program_writes_its_own_part_of_the_gradient(
    rows: int, classes: int, device: torch.device
) -> None:
    x = _random(rows, classes, torch.float16, device)
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    statistics = torch.zeros(2, rows, device=device)
    g, dx = torch.ones(rows, device=device), torch.full_like(x, 7.0)
    planned, (launch,) = cross_entropy.plan_backward(
        g, x, target, None, statistics, torch.empty(0), 0, -100, 0.0
    )
    launch = _into(dx, planned, launch)
    assert _is_shifted(launch) and launch.grid > 1
    launch._replace(grid=1)()
    block = classes if launch.grid == rows else launch.constexprs["BLOCK"]
    written = dx != 7.0
    assert written[0, :block].all()
    assert not written[1].any()
    # The block, and the row's end.
    assert int(written[0].sum()) <= block + launch.constexprs["UNIT"]
