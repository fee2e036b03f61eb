"""RMSNorm's Triton kernels against float64, with native's own error as the measure.

On a machine without a GPU they run in Triton's interpreter (tests/conftest.py), which computes
float32 and float16 alone, and one program after the other: what makes programs wait for one another
runs on the GPU only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from errors import largest_error

import opgraft
from opgraft_kernels.norms import triton_kernels
from opgraft_kernels.norms.overrides import RMS_NORM, condition, register
from opgraft_kernels.norms.triton_kernels import rms_norm_backward, rms_norm_forward

EPS32 = torch.finfo(torch.float32).eps
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Normal, but away from 0, so that rstd stays near 1 on short rows."""
    values = torch.randn(*shape, device=device)
    return (values.sign() * (values.abs() + 0.25)).to(dtype)


def _case(
    shape: Sequence[int],
    dims: int,
    dtype: torch.dtype,
    device: torch.device | str,
    has_weight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """An input, a weight and a gradient of the output."""
    torch.manual_seed(len(shape) + sum(shape))
    weight = _random(shape[-dims:], dtype, device) if has_weight else None
    return _random(shape, dtype, device), weight, _random(shape, dtype, device)


def _reference(
    x: torch.Tensor, weight: torch.Tensor | None, g: torch.Tensor, dims: int, eps: float
) -> dict[str, torch.Tensor | None]:
    """Output, rstd and gradients in float64, by the formula and autograd."""
    x = x.detach().double().requires_grad_()
    over = tuple(range(-dims, 0))
    rstd = (x.square().mean(over, keepdim=True) + eps).rsqrt()
    y = x * rstd
    inputs = [x]
    if weight is not None:
        weight = weight.detach().double().requires_grad_()
        y = y * weight
        inputs.append(weight)
    dx, *dw = torch.autograd.grad(y, inputs, g.double())
    return {"y": y.detach(), "rstd": rstd.detach(), "dx": dx, "dw": dw[0] if dw else None}


def _native(
    x: torch.Tensor, weight: torch.Tensor | None, g: torch.Tensor, dims: int, eps: float | None
) -> dict[str, torch.Tensor | None]:
    x = x.detach().requires_grad_()
    inputs = [x]
    if weight is not None:
        weight = weight.detach().requires_grad_()
        inputs.append(weight)
    y, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[x.dim() - dims :], weight, eps)
    dx, *dw = torch.autograd.grad(y, inputs, g)
    return {"y": y.detach(), "rstd": rstd.detach(), "dx": dx, "dw": dw[0] if dw else None}


def _assert_as_good(
    ours: torch.Tensor | None, native: torch.Tensor | None, expected: torch.Tensor | None
) -> None:
    """`ours` has what `native` promises, and at most twice its error."""
    assert (ours is None) == (native is None) == (expected is None)
    if ours is None or native is None or expected is None:
        return
    assert (ours.shape, ours.dtype, ours.device) == (native.shape, native.dtype, native.device)
    assert ours.is_contiguous()
    floor = 4 * torch.finfo(ours.dtype).eps
    assert largest_error(ours, expected) <= 2 * largest_error(native, expected) + floor


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    g: torch.Tensor,
    dims: int = 1,
    eps: float | None = 1e-5,
) -> None:
    """Forward and backward, with both gradients."""
    shape = x.shape[x.dim() - dims :]
    expected = _reference(x, weight, g, dims, EPS32 if eps is None else eps)
    native = _native(x, weight, g, dims, eps)
    y, rstd = rms_norm_forward(x, shape, weight, eps)
    _assert_as_good(y, native["y"], expected["y"])
    _assert_as_good(rstd, native["rstd"], expected["rstd"])
    dx, dw = rms_norm_backward(g, x, shape, rstd, weight, [True, True])
    _assert_as_good(dx, native["dx"], expected["dx"])
    _assert_as_good(dw, native["dw"], expected["dw"])


# Several rows a tile, one row a tile, more rows than programs, widths that are no power of two.
SHAPES = [(1, 8), (5, 1), (3, 7), (70, 16), (9, 1000), (1, 4096), (2, 4097), (4, 3, 130)]


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_native(
    shape: tuple[int, ...], has_weight: bool, dtype: torch.dtype, device: torch.device
) -> None:
    _check(*_case(shape, 1, dtype, device, has_weight))


@pytest.mark.parametrize("hidden", [768, 1152, 2560, 4480, 7168, 12288, 13824])
def test_rows_with_a_tail(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(*_case((3, hidden), 1, dtype, device))


# A backward of equal pieces: exactly so many, and not. In 16 bits the last two have no registers
# for the weight.
@pytest.mark.parametrize("hidden", [1032, 1152, 2056, 3072, 3080, 3584, 3585, 12424, 14336])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_pieces(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(*_case((rows, hidden), 1, dtype, device))


@pytest.mark.parametrize("hidden", [3584, 13824])
def test_pieces_without_a_weight(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(*_case((3, hidden), 1, dtype, device, has_weight=False))


# Rows that the forward reads twice, and the backward in columns or by groups of programs.
@pytest.mark.parametrize("shape", [(2, 20000), (3, 34000)], ids=str)
def test_long_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    _check(*_case(shape, 1, dtype, device))


@pytest.mark.parametrize("eps", [None, 0.0, 1e-5, 0.5])
def test_eps(eps: float | None, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, g = _case((6, 40), 1, dtype, device)
    # So small that eps decides; its square is lost in float16.
    _check(x * 2**-10 if eps is None else x, weight, g, eps=eps)


@pytest.mark.parametrize("dims", [2, 3])
def test_several_normalized_dimensions(dims: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(*_case((5, 3, 4, 6), dims, dtype, device), dims=dims)


def test_a_row_alone(dtype: torch.dtype, device: torch.device) -> None:
    _check(*_case((33,), 1, dtype, device))


@pytest.mark.parametrize("hidden", [24, 1792, 20000])
@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_output_mask(
    mask: tuple[bool, bool], hidden: int, has_weight: bool, device: torch.device
) -> None:
    x, weight, g = _case((7, hidden), 1, torch.float32, device, has_weight)
    _, rstd = rms_norm_forward(x, [hidden], weight, 1e-5)
    gradients = rms_norm_backward(g, x, [hidden], rstd, weight, mask)
    both = rms_norm_backward(g, x, [hidden], rstd, weight, (True, True))
    assert [each is not None for each in gradients] == [mask[0], mask[1] and has_weight]
    for one, expected in zip(gradients, both, strict=True):
        if one is not None:
            torch.testing.assert_close(one, expected)


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t()


def _sliced(t: torch.Tensor) -> torch.Tensor:
    """Rows a distance apart that is no multiple of 16 bytes."""
    return torch.cat([t, t[:, :3]], dim=1)[:, : t.shape[1]]


def _every_other_column(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, dim=1)[:, ::2]


def _misaligned(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


LAYOUTS = [_transposed, _sliced, _every_other_column, _misaligned]


@pytest.mark.parametrize("hidden", [48, 1792, 20000])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts(
    layout: Callable[[torch.Tensor], torch.Tensor], hidden: int, device: torch.device
) -> None:
    x, weight, g = _case((5, hidden), 1, torch.float32, device)
    assert weight is not None
    _check(layout(x), layout(weight[None])[0], layout(g))


@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 48), (2, 20000)], ids=str)
def test_expanded_gradients(shape: tuple[int, ...], device: torch.device) -> None:
    """What `.sum()` and `.mean(0)` hand to a backward: strides of 0."""
    x, weight, g = _case(shape, 1, torch.float32, device)
    _check(x, weight, torch.ones((), device=device).expand(shape))
    _check(x, weight, g[..., :1, :].expand(shape))
    _check(x, weight, g[..., :1].expand(shape))


def test_rows_that_do_not_fold(device: torch.device) -> None:
    x, weight, g = _case((4, 6, 32), 1, torch.float32, device)
    _check(x.transpose(0, 1).contiguous().transpose(0, 1), weight, g[:, :, :])
    _check(x[:, ::2], weight, g[:, 1::2])
    _check(x[::2, 1:3], weight, g[1::2, 1:3])


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 3, 16, device=device)
    weight = torch.ones(16, device=device)
    y, rstd = rms_norm_forward(x, [16], weight, 1e-5)
    assert (y.shape, rstd.shape) == (x.shape, (0, 3, 1))
    dx, dw = rms_norm_backward(x, x, [16], rstd, weight, (True, True))
    assert dx is not None and dx.shape == x.shape
    assert dw is not None and torch.equal(dw, torch.zeros(16, device=device))


def test_empty_rows_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="no elements"):
        rms_norm_forward(torch.empty(3, 0, device=device), [0], None, 1e-5)


@pytest.mark.parametrize(("rows", "hidden"), [(300, 40), (40, 3000), (7, 20000)])
def test_weight_gradient_has_the_same_bits(rows: int, hidden: int, device: torch.device) -> None:
    if device.type == "cuda":
        rows *= 50
    x, weight, g = _case((rows, hidden), 1, torch.float32, device)
    _, rstd = rms_norm_forward(x, [hidden], weight, 1e-5)
    first, *others = (
        rms_norm_backward(g, x, [hidden], rstd, weight, (True, True)) for _ in range(3)
    )
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert one is not None and same is not None and torch.equal(one, same)


# ---------------------------------------------------------------------------- through opgraft


@pytest.mark.parametrize("has_weight", [True, False])
def test_overrides_take_what_they_are_for(
    has_weight: bool, device: torch.device, dispatch_key: str
) -> None:
    forward, backward = register(RMS_NORM, dispatch_key)[:2]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (16384, 8192) if device.type == "cuda" else (64, 32)
    x, weight, g = _case(shape, 1, dtype, device, has_weight)
    ours = _native(x, weight, g, 1, 1e-5)
    # On the CPU a call that needs a gradient keeps its composite derivative, and so misses.
    F.rms_norm(x, shape[-1:], weight, 1e-5)
    assert forward.hits >= 1
    assert backward.hits == (1 if device.type == "cuda" else 0)
    misses = forward.misses
    declined = x.double() if device.type == "cuda" else x[:1]
    F.rms_norm(declined, shape[-1:], None, 1e-5)
    assert forward.misses == misses + 1

    y = F.rms_norm(x, shape[-1:], weight, 1e-5)
    for override in opgraft.overrides():
        override.remove()
    expected = _reference(x, weight, g, 1, 1e-5)
    native = _native(x, weight, g, 1, 1e-5)
    _assert_as_good(y, native["y"], expected["y"])
    for name, tensor in ours.items():
        _assert_as_good(tensor, native[name], expected[name])


def _declines(condition: object, **arguments: object) -> bool:
    return not condition.holds(arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("x", "weight", "normalized_shape"),
    [
        (torch.ones(16, 8, dtype=torch.bfloat16), None, [8]),
        (torch.ones(16, 8, dtype=torch.float64), None, [8]),
        (torch.ones(15, 8), None, [8]),
        (torch.ones(16, 0), None, [0]),
        (torch.ones(16, 8), None, [7]),
        (torch.ones(16, 8), None, [16, 8]),
        (torch.ones(16, 8), None, []),
        (torch.ones(16, 8), torch.ones(7), [8]),
        (torch.ones(16, 8), torch.ones(1, 8), [8]),
        (torch.ones(16, 8), torch.ones(8, dtype=torch.float16), [8]),
        (torch.ones(()), None, []),
    ],
)
def test_conditions_decline_what_the_kernels_would_get_wrong(
    x: torch.Tensor, weight: torch.Tensor | None, normalized_shape: list[int]
) -> None:
    wanted = condition(RMS_NORM, "forward", "CPU")
    fine = {"input": torch.ones(16, 8), "normalized_shape": [8], "weight": None, "eps": None}
    assert wanted.holds(fine)
    assert wanted.holds({**fine, "weight": torch.ones(8)})
    assert _declines(wanted, input=x, normalized_shape=normalized_shape, weight=weight, eps=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rstd": torch.ones(15, 1)},
        {"rstd": torch.ones(16, 1, dtype=torch.float64)},
        {"grad_out": torch.ones(16, 8, dtype=torch.float16)},
        {"grad_out": torch.ones(15, 8)},
        {"weight": torch.ones(7)},
    ],
    ids=str,
)
def test_backward_condition_declines(wrong: dict[str, torch.Tensor]) -> None:
    wanted = condition(RMS_NORM, "backward", "CPU")
    fine = {
        "grad_out": torch.ones(16, 8),
        "input": torch.ones(16, 8),
        "normalized_shape": [8],
        "rstd": torch.ones(16, 1),
        "weight": torch.ones(8),
        "output_mask": [True, True],
    }
    assert wanted.holds(fine)
    assert _declines(wanted, **{**fine, **wrong})


# ------------------------------------------------------------------------------- the GPU alone


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(
    "shape",
    [
        (1000, 1),
        (8193, 7),
        (4097, 1000),
        (777, 4097),
        (1, 131072),
        (300, 131072),
        (33, 65537),
        # Longer than all programs that run at once can hold: not split over them.
        (3, 1_200_001),
        (2, 2_400_000),
    ],
    ids=str,
)
def test_large(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    _check(*_case(shape, 1, dtype, device))


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(("rows", "hidden"), [(2**19 + 3, 4096), (2**14 + 1, 131072), (2**31, 1)])
def test_more_than_2_to_31_elements(rows: int, hidden: int, device: torch.device) -> None:
    """Offsets past 32 bits: the last rows, and the sum over all, are right."""
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    g = torch.ones(hidden, device=device, dtype=torch.bfloat16).expand(rows, hidden)
    weight = _random((hidden,), torch.bfloat16, device)
    assert x.numel() >= 2**31
    y, rstd = rms_norm_forward(x, [hidden], weight, 1e-5)
    dx, dw = rms_norm_backward(g, x, [hidden], rstd, weight, (True, True))
    assert dx is not None and dw is not None
    total = torch.zeros(hidden, device=device, dtype=torch.float64)
    step = max(1, 2**25 // hidden)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        total += (x[some].double() * rstd[some]).sum(0)
    assert largest_error(dw, total) < 0.01
    for some in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 3, rows)):
        expected = _reference(x[some], weight, g[some], 1, 1e-5)
        assert expected["y"] is not None and expected["dx"] is not None
        assert largest_error(y[some], expected["y"]) < 0.01
        assert largest_error(dx[some], expected["dx"]) < 0.01


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_compiles_once_for_many_sizes(device: torch.device) -> None:
    """Neither a new number of rows nor a new width under one block compiles anything."""
    kernels = [
        kernel
        for name, kernel in vars(triton_kernels).items()
        if name.endswith("_kernel") and hasattr(kernel, "device_caches")
    ]
    assert len(kernels) == 8

    def compiled() -> int:
        return sum(len(cache[0]) for each in kernels for cache in each.device_caches.values())

    def run(rows: int, hidden: int) -> None:
        x, weight, g = _case((rows, hidden), 1, torch.float16, device)
        _, rstd = rms_norm_forward(x, [hidden], weight, 1e-5)
        rms_norm_backward(g, x, [hidden], rstd, weight, (True, True))

    run(1, 2048 - 16)  # whose one program writes dw itself, not a partial sum in float32
    # Sums are added up in five ways: of up to 4 programs, of 8, of 31, of 127, of more.
    for rows in (16, 32, 100, 128, 512):
        run(rows, 2048 - 16)
    run(100, 65536 + 16)
    before = compiled()
    assert before
    for rows in (1, 2, 3, 16, 17, 99, 129, 600):
        run(rows, 2048 - 16)
        run(rows, 2048 - 32)
        run(rows, 65536 + 16)
        run(rows, 65536 + 4096)
    assert compiled() == before


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(("rows", "hidden"), [(4096, 1024), (64, 65536)])
def test_cuda_graph_replays(rows: int, hidden: int, device: torch.device) -> None:
    """A replay starts with the words of the replay before it: they have to be zeroed each time."""
    x, weight, g = _case((rows, hidden), 1, torch.bfloat16, device)

    def step() -> tuple[torch.Tensor | None, ...]:
        y, rstd = rms_norm_forward(x, [hidden], weight, 1e-5)
        return (y, *rms_norm_backward(g, x, [hidden], rstd, weight, (True, True)))

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for _ in range(3):
        for each in outputs:
            assert each is not None
            each.fill_(math.nan)
        graph.replay()
        for one, same in zip(outputs, expected, strict=True):
            assert one is not None and same is not None and torch.equal(one, same)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_groups_of_programs_on_two_streams(device: torch.device) -> None:
    """Two grids whose programs wait for one another run side by side and both finish."""
    cases = [_case((512, 65536), 1, torch.bfloat16, device) for _ in range(2)]
    expected = [rms_norm_forward(x, [65536], weight, 1e-5)[0] for x, weight, _ in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    outputs: list[list[torch.Tensor]] = [[], []]
    for _ in range(10):
        for (x, weight, _), stream, output in zip(cases, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                output.append(rms_norm_forward(x, [65536], weight, 1e-5)[0])
    torch.cuda.synchronize()
    for output, right in zip(outputs, expected, strict=True):
        assert all(torch.equal(each, right) for each in output)
