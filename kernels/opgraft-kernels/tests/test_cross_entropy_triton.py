"""Cross-entropy's Triton kernels against float64, with native's own error as the measure.

On a machine without a GPU they run in Triton's interpreter (tests/conftest.py).
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import special_inputs
from errors import relative_error

import opgraft
from configurations import FEW_ROWS, cross_entropy_launches
from covering import sample
from opgraft import Override
from opgraft_kernels.cross_entropy import triton_kernels
from opgraft_kernels.cross_entropy.overrides import condition, register
from opgraft_kernels.launches import Launch

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
INF, NAN = math.inf, math.nan
REDUCTIONS = ("none", "mean", "sum")


@pytest.fixture
def override(dispatch_key: str) -> Iterator[Override]:
    override, *parts = register(dispatch_key)
    yield override
    forward, _ = parts
    assert forward.hits >= override.hits - override.fallbacks


def _logits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return (4 * torch.randn(shape, device=device)).to(dtype)


def _targets(logits: torch.Tensor, ignored: int | None = None) -> torch.Tensor:
    shape, classes = logits.shape[:-1], logits.shape[-1]
    target = torch.randint(0, classes, shape, device=logits.device)
    if ignored is not None:
        target.view(-1)[::3] = ignored
    return target


def _weight(logits: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 2, logits.shape[-1], device=logits.device).to(logits.dtype)


def _both(
    logits: torch.Tensor, target: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the logits' gradient."""
    x = logits.detach().requires_grad_()
    loss = F.cross_entropy(x, target, **options)
    weights = 1 / (1 + torch.arange(loss.numel(), device=loss.device).view_as(loss))
    (dx,) = torch.autograd.grad(loss, x, weights.to(loss.dtype))
    return loss.detach(), dx


def _in_float64(
    logits: torch.Tensor, target: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if options.get("weight") is not None:
        options = {**options, "weight": options["weight"].double()}
    return _both(logits.double(), target, **options)


def _check_one(one: torch.Tensor, native: torch.Tensor, right: torch.Tensor) -> None:
    """What native promises, and at most twice its error."""
    assert one.shape == native.shape and one.dtype == native.dtype
    assert one.stride() == native.stride()
    floor = 4 * torch.finfo(one.dtype).eps
    assert relative_error(one, right) <= 2 * relative_error(native, right) + floor


def _check(override: Override, logits: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
    ours, hits = _both(logits, target, **options), override.hits
    with opgraft.disabled():
        native = _both(logits, target, **options)
        right = _in_float64(logits, target, **options)
    assert hits == 1
    for each in zip(ours, native, right, strict=True):
        _check_one(*each)


# ---------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("classes", [1, 2, 17, 1000, 4097])
@pytest.mark.parametrize("rows", [1, 5])
def test_rows(
    override: Override, rows: int, classes: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = _logits((rows, classes), dtype, device)
    _check(override, logits, _targets(logits))


@pytest.mark.parametrize("shape", [(70, 16), (390, 130), (3000, 3)], ids=str)
def test_rows_that_share_a_program(
    override: Override, shape: tuple[int, ...], device: torch.device
) -> None:
    logits = _logits(shape, torch.float32, device)
    _check(override, logits, _targets(logits))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("shape", [(70, 17), (2, 40000)], ids=str)
def test_no_nan_is_made_of_what_nothing_uses(
    override: Override, shape: tuple[int, ...], device: torch.device
) -> None:
    """The interpreter warns of each."""
    logits = _logits(shape, torch.float32, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check(override, logits, _targets(logits), label_smoothing=0.1, weight=_weight(logits))


@pytest.mark.parametrize("classes", [32768, 40000, 50257, 128256])
def test_rows_that_are_read_in_blocks(
    override: Override, classes: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = _logits((2, classes), dtype, device)
    _check(override, logits, _targets(logits))


#: So many that each multiprocessor has several, or the interpreter's two.
MANY_ROWS = 9


@pytest.mark.parametrize("beyond", [-1, 0, 1, 8, 4095, 4096, 4097, 8192 + 72])
def test_many_long_rows(
    override: Override, beyond: int, dtype: torch.dtype, device: torch.device
) -> None:
    """From the first length on that is read in small blocks: a few, and tails of every kind."""
    logits = _logits((MANY_ROWS, 16384 // dtype.itemsize + beyond), dtype, device)
    _check(override, logits, _targets(logits, ignored=-100), weight=_weight(logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "kib", "smoothing", "is_small"),
    [
        (MANY_ROWS, 15, 0.0, False),
        (MANY_ROWS, 16, 0.0, True),
        (MANY_ROWS, 64, 0.0, True),
        (MANY_ROWS, 250, 0.0, True),
        (MANY_ROWS, 250, 0.1, False),
        (FEW_ROWS, 64, 0.0, False),
        (FEW_ROWS, 250, 0.0, False),
    ],
)
def test_many_long_rows_are_read_in_small_blocks(
    dtype: torch.dtype, rows: int, kib: int, smoothing: float, is_small: bool
) -> None:
    launch, *_ = cross_entropy_launches(dtype, rows, kib * 1024 // dtype.itemsize, smoothing)
    block = launch.constexprs["BLOCK"] * dtype.itemsize
    assert ((block, launch.num_warps) == (8 * 1024, 4)) is is_small


@pytest.mark.parametrize("classes", [7, 40000])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_one_row_without_a_batch(
    override: Override, reduction: str, classes: int, device: torch.device
) -> None:
    logits = _logits((classes,), torch.float32, device)
    _check(override, logits, _targets(logits), reduction=reduction)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_ignored_row_without_a_batch_is_as_natively(
    override: Override, reduction: str, smoothing: float, device: torch.device
) -> None:
    """Native's mean of it is 0 on a GPU, and 0 / 0 on the CPU."""
    logits, target = _logits((20,), torch.float32, device), torch.tensor(-100, device=device)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    ours, hits = _both(logits, target, **options), override.hits
    assert hits == (reduction != "mean")
    with opgraft.disabled():
        native = _both(logits, target, **options)
    torch.testing.assert_close(ours, native, equal_nan=True)


# Every three of these with each other: weights, what is ignored and smoothing all go into one sum.
OPTIONS = [
    pytest.param(*each, id=" ".join(map(str, each)))
    for each in sample(
        itertools.product(REDUCTIONS, (0.0, 0.3, 1.0), (False, True), (None, -100, 2)),
        lambda each: itertools.combinations(enumerate(each), 3),
    )
]


@pytest.mark.parametrize(("reduction", "smoothing", "weighted", "ignored"), OPTIONS)
@pytest.mark.parametrize("classes", [33, 20000], ids=["a tile", "in blocks"])
def test_options(
    override: Override,
    classes: int,
    reduction: str,
    smoothing: float,
    weighted: bool,
    ignored: int | None,
    device: torch.device,
) -> None:
    logits = _logits((7, classes), torch.float32, device)
    _check(
        override,
        logits,
        _targets(logits, ignored),
        reduction=reduction,
        label_smoothing=smoothing,
        weight=_weight(logits) if weighted else None,
        ignore_index=-100 if ignored is None else ignored,
    )


def test_an_ignored_class_of_64_bits(override: Override, device: torch.device) -> None:
    logits = _logits((7, 20), torch.float32, device)
    _check(override, logits, _targets(logits, 2**40), ignore_index=2**40)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1024, 1025, 16385, 40000])
def test_more_rows_than_a_program_adds_up(
    override: Override, rows: int, reduction: str, device: torch.device
) -> None:
    logits = _logits((rows, 3), torch.float32, device)
    _check(override, logits, _targets(logits, -100), reduction=reduction)


def test_the_sum_has_the_same_bits_every_time(override: Override, device: torch.device) -> None:
    logits = _logits((20000, 5), torch.float32, device)
    target = _targets(logits)
    losses = {F.cross_entropy(logits, target).item() for _ in range(5)}
    assert len(losses) == 1
    assert override.hits == 5


@pytest.mark.parametrize("offset", [1e3, -1e6])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [100, 20000], ids=["a tile", "in blocks"])
def test_large_logits_lose_no_digits(
    override: Override, classes: int, smoothing: float, offset: float, device: torch.device
) -> None:
    logits = _logits((4, classes), torch.float32, device) + offset
    _check(override, logits, _targets(logits), label_smoothing=smoothing)


@pytest.mark.parametrize("classes", [100, 20000], ids=["a tile", "in blocks"])
def test_logits_that_grow_lose_no_digits(
    override: Override, classes: int, device: torch.device
) -> None:
    """Each block has a new maximum."""
    logits = torch.linspace(-500, 500, classes, device=device).expand(3, -1).contiguous()
    _check(override, logits, _targets(logits), label_smoothing=0.1, weight=_weight(logits))


LAYOUTS = {
    **{name: special_inputs.LAYOUTS[name] for name in ("sliced rows", "misaligned", "one row")},
    "some rows": lambda t: t.repeat_interleave(2, dim=0)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(override: Override, layout: str, device: torch.device) -> None:
    logits = _logits((6, 48), torch.float32, device)
    _check(override, LAYOUTS[layout](logits), _targets(logits))


def test_targets_and_gradients_that_are_not_contiguous(
    override: Override, device: torch.device
) -> None:
    logits = _logits((6, 48), torch.float32, device).requires_grad_()
    target = _targets(logits).repeat_interleave(2)[::2]
    g = torch.randn(12, device=device)[::2]

    def gradient() -> torch.Tensor:
        loss = F.cross_entropy(logits, target, reduction="none")
        return torch.cat([*torch.autograd.grad(loss, logits, g, retain_graph=True),
                          *torch.autograd.grad(loss.sum(), logits)])  # fmt: skip

    ours, hits = gradient(), override.hits
    with opgraft.disabled():
        torch.testing.assert_close(ours, gradient())
    assert hits == 1


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": torch._neg_view,
    "zero": lambda g: g * torch._efficientzerotensor((), device=g.device),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_that_are_lazy(
    override: Override, reduction: str, kind: str, device: torch.device
) -> None:
    x = _logits((4, 9), torch.float32, device).requires_grad_()
    target = _targets(x)

    def gradient() -> torch.Tensor:
        loss = F.cross_entropy(x, target, reduction=reduction)
        return torch.autograd.grad(loss, x, LAZY[kind](torch.ones_like(loss)))[0]

    ours, hits = gradient(), override.hits
    with opgraft.disabled():
        torch.testing.assert_close(ours, gradient())
    assert hits == 1


# ---------------------------------------------------------------------------- the range's ends


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chosen", ["first", "middle", "last", "ignored"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [17, 30000], ids=["a tile", "in blocks"])
def test_special_values(
    override: Override,
    classes: int,
    weighted: bool,
    chosen: str,
    smoothing: float,
    device: torch.device,
) -> None:
    logits = special_inputs.special_rows(classes).to(device)
    index = {"first": 0, "middle": classes // 2, "last": classes - 1, "ignored": -100}[chosen]
    target = torch.full((10,), index, device=device)
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
    if weighted:
        options["weight"] = _weight(logits)
    ours, hits = _both(logits, target, **options), override.hits
    with opgraft.disabled():
        native = _both(logits, target, **options)
        right = _in_float64(logits, target, **options)
    assert hits == 1
    for one, other, exact in zip(ours, native, right, strict=True):
        finite = other.isfinite()
        torch.testing.assert_close(one[~finite], other[~finite], equal_nan=True)
        torch.testing.assert_close(one[finite], exact[finite].float(), rtol=1e-5, atol=1e-5)


#: Rows without probabilities, and rows that nearly have none: what all else is, None being random
#: numbers, and what is where, by the share of the row before it.
_UNLIKELY: dict[str, tuple[float | None, dict[float, float]]] = {
    "NaN throughout": (NAN, {}),
    "NaN first": (None, {0.0: NAN}),
    "NaN inside": (None, {0.5: NAN}),
    "NaN last": (None, {1.0: NAN}),
    "NaN, else -inf": (-INF, {0.5: NAN}),
    "-inf throughout": (-INF, {}),
    "inf throughout": (INF, {}),
    "inf once": (None, {0.5: INF}),
    "inf twice": (None, {0.1: INF, 0.9: INF}),
    "inf, else -inf": (-INF, {0.5: INF}),
    "inf, then NaN": (None, {0.1: INF, 0.9: NAN}),
    "NaN, then inf": (None, {0.1: NAN, 0.9: INF}),
}
_LIKELY: dict[str, tuple[float | None, dict[float, float]]] = {
    "finite first, else -inf": (-INF, {0.0: 3.0}),
    "finite last, else -inf": (-INF, {1.0: 3.0}),
    "as low as can be": (torch.finfo(torch.float32).min, {}),
}
_ROWS = {**_UNLIKELY, **_LIKELY}


def _unlikely_rows(classes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    rows = torch.randn(len(_ROWS), classes)
    for row, (throughout, others) in zip(rows, _ROWS.values(), strict=True):
        if throughout is not None:
            row.fill_(throughout)
        for share, value in others.items():
            row[round(share * (classes - 1))] = value
    lowest = torch.finfo(dtype).min
    return torch.where(rows.isinf(), rows, rows.clamp(min=lowest)).to(device, dtype)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [20, 40000], ids=["a tile", "in blocks"])
def test_the_statistics_of_any_row_are_natives(
    override: Override,
    classes: int,
    weighted: bool,
    smoothing: float,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A launch plan is compared with native in its first calls, whatever rows they have."""
    x = _unlikely_rows(classes, dtype, device)
    target = torch.full((len(_ROWS),), classes // 2, device=device)
    target[::4] = -100
    weight = _weight(x) if weighted else None
    (forward,) = (each for each in opgraft.overrides() if each.name.endswith(".forward"))
    hits = forward.hits

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.ops.opgraft_kernels._cross_entropy(
            x, target, weight, 0, -100, smoothing, dtype=torch.float32
        )

    ours = run()
    assert forward.hits == hits + 1
    with opgraft.disabled():
        native = run()
    torch.testing.assert_close(ours, native, equal_nan=True)
    lacking = ours[1].isnan()
    assert lacking[:, : len(_UNLIKELY)].all() and not lacking[:, len(_UNLIKELY) :].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ignored(
    override: Override, reduction: str, weighted: bool, smoothing: float, device: torch.device
) -> None:
    logits = _logits((5, 20), torch.float32, device)
    target = torch.full((5,), -100, device=device)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = _weight(logits)
    (loss, dx), hits = _both(logits, target, **options), override.hits
    assert hits == 1
    assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
    assert (dx == 0).all()
    with opgraft.disabled():
        native, native_dx = _both(logits, target, **options)
    torch.testing.assert_close((loss, dx), (native, native_dx), equal_nan=True)


# ---------------------------------------------------------------------------- classes that are not


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("wrong", [8, -1, 2**40, -(2**33)])
@pytest.mark.parametrize("shape", [(4, 8), (8,)], ids=str)
def test_a_class_out_of_range_is_natives_error(
    override: Override, shape: tuple[int, ...], wrong: int, device: torch.device
) -> None:
    logits = _logits(shape, torch.float32, device)
    target = _targets(logits)
    for _ in range(3):  # later hits are not compared with native
        F.cross_entropy(logits, target, reduction="sum")
    target.view(-1)[-1] = wrong
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        F.cross_entropy(logits, target, reduction="sum")
    assert override.hits >= 3


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_nothing_is_read_out_of_bounds(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """On a GPU an assertion fails asynchronously: what the program goes on reading is masked."""
    monkeypatch.setattr(triton_kernels, "check_targets", lambda *_: None)
    x = _logits((4, 8), torch.float32, device)
    target = torch.tensor([3, 2**31, -5, 2**40])
    loss, _, _ = triton_kernels.forward(x, target, _weight(x), 0, -100, 0.0, dtype=x.dtype)
    assert loss[1:].eq(0).all() and loss[0] > 0


ASSERTS = """
import torch, opgraft, torch.nn.functional as F
from opgraft_kernels.cross_entropy import overrides
overrides._crossover = lambda: None
override, forward, backward = overrides.register("CUDA")
logits, target = torch.randn(4, 8, device="cuda"), torch.tensor([0, 1, 2, 3], device="cuda")
with opgraft.when_not_ready("wait"):
    for _ in range(3):
        F.cross_entropy(logits, target)
assert override.hits == 3
target[2] = 8
F.cross_entropy(logits, target)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "device-side assert" in str(error), error
    print("asserted")
"""


@pytest.mark.gpu
def test_a_class_out_of_range_fails_an_assertion_on_the_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", ASSERTS], capture_output=True, text=True)
    assert "asserted" in done.stdout, done.stderr[-2000:]


# ---------------------------------------------------------------------------- memory


class _Allocations(TorchDispatchMode):
    """The numbers of elements of all tensors that ops return."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements += [t.numel() for t in [result] if isinstance(t, torch.Tensor)]
        return result


@pytest.mark.parametrize("reduction", range(3))
@pytest.mark.parametrize("classes", [3000, 40000])
def test_the_forward_allocates_a_few_numbers_a_row(
    classes: int, reduction: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter copies what a kernel gets.
    monkeypatch.setattr(Launch, "__call__", lambda launch: None)
    x = _logits((50, classes), torch.float32, device)
    target, weight = _targets(x), _weight(x)
    with _Allocations() as allocations:
        triton_kernels.forward(x, target, weight, reduction, -100, 0.1, dtype=x.dtype)
    assert max(allocations.elements) == 2 * 50


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_graph_holds_no_tensor_of_the_logits_size_but_the_logits(
    override: Override, reduction: str, device: torch.device
) -> None:
    x = _logits((50, 300), torch.float32, device).requires_grad_()
    target, saved = _targets(x), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        F.cross_entropy(x, target, reduction=reduction)
    assert override.hits == 1
    assert [t.data_ptr() for t in saved if t.numel() >= x.numel()] == [x.data_ptr()]
    assert sum(t.numel() for t in saved) <= x.numel() + 3 * 50 + 2


# ---------------------------------------------------------------------------- through opgraft


def _loss(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % x.shape[1])


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_gradients_by_finite_differences(override: Override, device: torch.device) -> None:
    """In float32, so steps are long; the loss is smooth enough."""
    x = _logits((3, 5), torch.float32, device)
    _, dx = _both(x, torch.tensor([1, 4, -100]), label_smoothing=0.1, weight=_weight(x))
    step = 1e-2
    for index in itertools.product(range(3), range(5)):
        by = torch.zeros_like(x)
        by[index] = step
        up, down = (
            F.cross_entropy(each, torch.tensor([1, 4, -100]), _weight(x), label_smoothing=0.1)
            for each in (x + by, x - by)
        )
        assert abs((up - down).item() / (2 * step) - dx[index].item()) < 1e-3
    assert override.hits == 31


def test_without_grad(override: Override, device: torch.device) -> None:
    x = _logits((5, 30), torch.float32, device).requires_grad_()
    with torch.no_grad():
        ours = _loss(x)
    with torch.inference_mode():
        _loss(x)
    assert override.hits == 2 and not ours.requires_grad
    with opgraft.disabled():
        torch.testing.assert_close(ours, _loss(x).detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_under_autocast(
    override: Override, reduction: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = _logits((5, 30), dtype, device)
    target = _targets(x)
    with torch.autocast(device.type, torch.bfloat16):
        ours, hits = _both(x, target, reduction=reduction), override.hits
        with opgraft.disabled():
            native = _both(x, target, reduction=reduction)
    assert hits == 1
    assert [t.dtype for t in ours] == [t.dtype for t in native] == [torch.float32, dtype]
    torch.testing.assert_close(ours, native, rtol=2e-2, atol=2e-2)


def test_a_graph_that_is_used_twice(override: Override, device: torch.device) -> None:
    x = _logits((5, 30), torch.float32, device).requires_grad_()
    loss = _loss(x)
    other = _loss(x * 2)  # its statistics are its own
    first, again = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    (second,) = torch.autograd.grad(other, x)
    assert override.hits == 2
    with opgraft.disabled():
        torch.testing.assert_close(first, torch.autograd.grad(_loss(x), x)[0])
        torch.testing.assert_close(second, torch.autograd.grad(_loss(x * 2), x)[0])
    assert first.equal(again)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(override: Override, reentrant: bool, device: torch.device) -> None:
    x = _logits((5, 30), torch.float32, device).requires_grad_()
    loss = checkpoint(_loss, x, use_reentrant=reentrant)
    (dx,) = torch.autograd.grad(loss, x) if not reentrant else (loss.backward(), x.grad)[1:]
    assert override.hits == 2
    with opgraft.disabled():
        torch.testing.assert_close(dx, torch.autograd.grad(_loss(x), x)[0])


def test_differentiating_twice_is_an_error(override: Override, device: torch.device) -> None:
    x = _logits((5, 30), torch.float32, device).requires_grad_()
    (dx,) = torch.autograd.grad(_loss(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="_cross_entropy_backward is not implemented"):
        dx.square().sum().backward()
    assert override.hits == 1


def test_a_saved_tensor_that_was_written_to_is_an_error(
    override: Override, device: torch.device
) -> None:
    x = _logits((5, 30), torch.float32, device).requires_grad_()
    logits = x * 1
    loss = _loss(logits)
    logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert override.hits == 1


TRANSFORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "grad": torch.func.grad(_loss),
    "vmap": lambda x: torch.vmap(_loss)(torch.stack([x, 2 * x])),
    "vmap of grad": lambda x: torch.vmap(torch.func.grad(_loss))(torch.stack([x, 2 * x])),
    "grad of vmap": torch.func.grad(lambda x: torch.vmap(_loss)(torch.stack([x, 2 * x])).sum()),
    "grad of grad": torch.func.grad(lambda x: torch.func.grad(_loss)(x).square().sum()),
    "jvp": lambda x: torch.func.jvp(_loss, (x,), (torch.ones_like(x),)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_what_the_op_is_made_of(
    override: Override, transform: str, device: torch.device
) -> None:
    x = _logits((3, 7), torch.float32, device)
    ours = TRANSFORMS[transform](x)
    assert override.hits == 0
    with opgraft.disabled():
        torch.testing.assert_close(ours, TRANSFORMS[transform](x))


def test_a_dispatch_mode_sees_what_the_op_is_made_of(
    override: Override, device: torch.device
) -> None:
    class Seen(TorchDispatchMode):
        names: tuple[str, ...] = ()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            self.names = (*self.names, func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x = _logits((3, 7), torch.float32, device).requires_grad_()
    with Seen() as seen:
        _loss(x).backward()
    assert {"_log_softmax", "nll_loss_forward", "nll_loss_backward"} <= set(seen.names)
    assert override.hits == 0


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(override: Override, backend: str, device: torch.device) -> None:
    """The compiler has its own code, forward and backward; without it, the override runs."""
    x = _logits((33, 70), torch.float32, device).requires_grad_()
    with opgraft.disabled():
        expected = torch.autograd.grad(_loss(x), x)
    torch._dynamo.reset()
    compiled = torch.compile(_loss, backend=backend, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), expected)
    assert override.hits == (1 if backend == "eager" else 0)


def test_where_the_kernel_fails_native_answers_and_differentiates(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(triton_kernels, "forward", fail)
    with opgraft.packs.owning("a-pack"):
        override, forward, _ = register(device.type.upper())
    x = _logits((3, 7), torch.float32, device)
    target = _targets(x)
    ours = _both(x, target, label_smoothing=0.1, weight=_weight(x))
    assert (override.hits, forward.fallbacks) == (1, 1)
    with opgraft.disabled():
        native = _both(x, target, label_smoothing=0.1, weight=_weight(x))
    torch.testing.assert_close(ours, native)


# ---------------------------------------------------------------------------- the condition


def _fine() -> dict[str, Any]:
    return {
        "self": torch.ones(4, 8),
        "target": torch.zeros(4, dtype=torch.int64),
        "weight": None,
        "reduction": 1,
        "ignore_index": -100,
        "label_smoothing": 0.0,
    }


@pytest.mark.parametrize(
    "also",
    [
        {},
        {"self": torch.ones(4, 12)[:, :8]},
        {"self": torch.ones(8), "target": torch.tensor(1), "reduction": 0},
        {"weight": torch.ones(8)},
        {"reduction": 0},
        {"label_smoothing": 1.0},
    ],
)
def test_condition_takes(also: dict[str, Any]) -> None:
    assert condition("CPU").holds({**_fine(), **also})


@pytest.mark.parametrize(
    "wrong",
    [
        {"self": torch.ones(4, 8, dtype=torch.float64)},
        {"self": torch.ones(4, 8, dtype=torch.bfloat16)},
        {"self": torch.ones(8, 4).t()},
        {"self": torch.ones(4, 8, 2), "target": torch.zeros(4, 2, dtype=torch.int64)},
        {"self": torch.ones(0, 8), "target": torch.zeros(0, dtype=torch.int64)},
        {"self": torch.ones(4, 0)},
        {"target": torch.zeros(4, dtype=torch.uint8)},
        {"target": torch.zeros(3, dtype=torch.int64)},
        {"target": torch.zeros(4, 8, dtype=torch.int64)},
        {"target": torch.ones(4, 8)},
        {"weight": torch.ones(7)},
        {"weight": torch.ones(8, dtype=torch.float16)},
        {"weight": torch.ones(16)[::2]},
        {"weight": torch.ones(8, requires_grad=True)},
        {"weight": torch.ones(1, 8)},
        {"self": torch.ones(8), "target": torch.tensor(1)},
        {"reduction": 3},
        {"reduction": -1},
        {"label_smoothing": -0.1},
        {"label_smoothing": 1.5},
        {"label_smoothing": NAN},
    ],
)
def test_condition_declines(wrong: dict[str, Any]) -> None:
    assert not condition("CPU").holds({**_fine(), **wrong})


# ------------------------------------------------------------------------------- the GPU alone


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(
    "shape",
    [(8193, 16), (777, 1000), (300, 4097), (33, 65537), (64, 128256), (5, 262144), (3, 1_000_003)],
    ids=str,
)
def test_large(
    override: Override, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    logits = _logits(shape, dtype, device)
    _check(override, logits, _targets(logits, -100), label_smoothing=0.1)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_more_than_2_to_31_elements(override: Override, device: torch.device) -> None:
    """Offsets past 32 bits: the first and the last rows are right."""
    x = torch.randn(2**14 + 64, 2**17, device=device, dtype=torch.bfloat16).requires_grad_()
    assert x.numel() >= 2**31
    target = _targets(x)
    loss = F.cross_entropy(x, target, reduction="none")
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert override.hits == 1
    for some in (slice(0, 3), slice(-3, None)):
        right, right_dx = _in_float64(x[some].detach(), target[some], reduction="sum")
        assert relative_error(loss[some].detach().sum(), right) < 0.01
        assert relative_error(dx[some], right_dx) < 0.01
