"""RMSNorm and LayerNorm over clusters, in CuteDSL, against float64, with native's own error as the
measure. All but the conditions needs a Hopper GPU and CuteDSL."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from errors import largest_error

import opgraft
from opgraft import cutedsl_utils
from opgraft_kernels.norms.overrides import LAYER_NORM, RMS_NORM, register

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_cutedsl = pytest.mark.skipif(
    not (HOPPER and cutedsl_utils.runtime_available()), reason="needs Hopper and CuteDSL"
)
pytestmark = [pytest.mark.gpu, needs_cutedsl]

EPS = 1e-5
WIDTHS = {
    "rms_norm": [32768, 65536, 131072],
    "layer_norm": [16384, 32768, 65536, 131072],
}
over_widths = pytest.mark.parametrize(
    ("norm", "hidden"),
    [(name, hidden) for name, widths in WIDTHS.items() for hidden in widths],
    indirect=["norm"],
)
DTYPES = [torch.float16, torch.bfloat16]
# Weight and bias.
PARAMETERS = [(True, True), (True, False), (False, True), (False, False)]
# From here on the overrides take the call, at every width.
ELEMENTS = 2**25


class Case(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    grad: torch.Tensor

    @property
    def shape(self) -> list[int]:
        return list(self.x.shape[-1:])


Results = dict[str, torch.Tensor | None]


class Norm(NamedTuple):
    """A norm by the kernels, by native, and in float64 by its formula."""

    kernels: Callable[[Case], Results]
    native: Callable[[Case], Results]
    through_autograd: Callable[[Case], torch.Tensor]
    register: Callable[[str], list[opgraft.Override]]
    name: str
    has_bias: bool

    def has_forward(self, hidden: int) -> bool:
        """Whether a forward of such rows is over clusters."""
        return self.has_bias or hidden > 32768


def _rms_norm(forward: Any, backward: Any, case: Case) -> Results:
    y, rstd = forward(case.x, case.shape, case.weight, EPS)
    mask = [True, case.weight is not None]
    dx, dw = backward(case.grad, case.x, case.shape, rstd, case.weight, mask)
    return {"y": y, "rstd": rstd, "dx": dx, "dw": dw}


def _layer_norm(forward: Any, backward: Any, case: Case) -> Results:
    y, mean, rstd = forward(case.x, case.shape, case.weight, case.bias, EPS)
    parameters = (case.weight, case.bias)
    mask = [True, *(each is not None for each in parameters)]
    dx, dw, db = backward(case.grad, case.x, case.shape, mean, rstd, *parameters, mask)
    return {"y": y, "mean": mean, "rstd": rstd, "dx": dx, "dw": dw, "db": db}


def _rms_norm_kernels(case: Case) -> Results:
    from opgraft_kernels.norms import cutedsl_kernels as kernels

    # Of shorter rows, which others make the forward of, there is a backward alone.
    over_clusters = case.shape[0] in kernels.TILES["rms_norm"].forward
    forward = kernels.rms_norm_forward if over_clusters else aten._fused_rms_norm
    return _rms_norm(forward, kernels.rms_norm_backward, case)


def _layer_norm_kernels(case: Case) -> Results:
    from opgraft_kernels.norms import cutedsl_kernels as kernels

    return _layer_norm(kernels.layer_norm_forward, kernels.layer_norm_backward, case)


aten = torch.ops.aten
NORMS = {
    "rms_norm": Norm(
        _rms_norm_kernels,
        lambda case: _rms_norm(aten._fused_rms_norm, aten._fused_rms_norm_backward, case),
        lambda case: F.rms_norm(case.x, case.shape, case.weight, EPS),
        partial(register, RMS_NORM),
        "opgraft_kernels.rms_norm",
        has_bias=False,
    ),
    "layer_norm": Norm(
        _layer_norm_kernels,
        lambda case: _layer_norm(aten.native_layer_norm, aten.native_layer_norm_backward, case),
        lambda case: F.layer_norm(case.x, case.shape, case.weight, case.bias, EPS),
        partial(register, LAYER_NORM),
        "opgraft_kernels.layer_norm",
        has_bias=True,
    ),
}


@pytest.fixture(params=NORMS)
def norm(request: pytest.FixtureRequest) -> Norm:
    return NORMS[request.param]


def _case(
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    has_weight: bool = True,
    has_bias: bool = True,
    offset: float = 0.0,
) -> Case:
    torch.manual_seed(rows + hidden)
    x, grad = (torch.randn(rows, hidden, device="cuda") for _ in range(2))
    weight, bias = torch.randn(2, hidden, device="cuda").to(dtype).unbind()
    return Case(
        (x + offset).to(dtype),
        weight if has_weight else None,
        bias if has_bias else None,
        grad.to(dtype),
    )


def _reference(norm: Norm, case: Case) -> Results:
    """In float64, by the formula and autograd."""
    x, weight, bias, grad = (None if t is None else t.detach().double() for t in case)
    assert x is not None
    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    mean = x.mean(-1, keepdim=True) if norm.has_bias else torch.zeros_like(x[:, :1])
    rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = (x - mean) * rstd
    if weight is not None:
        y = y * weight
    if bias is not None and norm.has_bias:
        y = y + bias
    gradients = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(leaves, gradients, strict=True)}
    dx, dw, db = (None if t is None else by_leaf[id(t)] for t in (x, weight, bias))
    statistics = {"y": y.detach(), "mean": mean.detach(), "rstd": rstd.detach()}
    return {**statistics, "dx": dx, "dw": dw, "db": db}


def _check(norm: Norm, case: Case) -> None:
    """What native promises, and at most twice its error."""
    ours, native, expected = norm.kernels(case), norm.native(case), _reference(norm, case)
    assert ours.keys() == native.keys()
    for name, one in ours.items():
        other, right = native[name], expected[name]
        assert (one is None) == (other is None), name
        if one is None or other is None or right is None:
            continue
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        floor = 4 * torch.finfo(one.dtype).eps
        assert largest_error(one, right) <= 2 * largest_error(other, right) + floor, name


# ---------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@over_widths
@pytest.mark.parametrize("rows", [1, 3, 64, 131])
def test_matches_native(norm: Norm, rows: int, hidden: int, dtype: torch.dtype) -> None:
    _check(norm, _case(rows, hidden, dtype, has_bias=norm.has_bias))


@over_widths
@pytest.mark.parametrize(("has_weight", "has_bias"), PARAMETERS[1:])
def test_without_parameters(norm: Norm, has_weight: bool, has_bias: bool, hidden: int) -> None:
    if has_bias and not norm.has_bias:
        pytest.skip("it has no bias")
    _check(norm, _case(5, hidden, torch.bfloat16, has_weight, has_bias))


@pytest.mark.parametrize("hidden", WIDTHS["layer_norm"])
def test_a_large_mean_loses_no_digits(hidden: int) -> None:
    """1000 ** 2 * 2 ** -24, a variance's error as a difference of means, is 6% of this one."""
    norm = NORMS["layer_norm"]
    case = _case(7, hidden, torch.float16, offset=1000.0)
    ours, expected = norm.kernels(case), _reference(norm, case)
    for name, bound in (("mean", 1e-6), ("rstd", 1e-4), ("y", 2e-3), ("dx", 2e-3)):
        one, right = ours[name], expected[name]
        assert one is not None and right is not None
        assert largest_error(one, right) < bound, name


@over_widths
@pytest.mark.parametrize("mask", [(m >> 1 & 1, m & 1) for m in range(4)], ids=str)
def test_output_mask(norm: Norm, mask: tuple[int, int], hidden: int) -> None:
    case = _case(40, hidden, torch.bfloat16, has_bias=norm.has_bias)
    every = norm.kernels(case)
    wanted = [True, *(bool(m) for m in mask)]
    if norm.has_bias:
        from opgraft_kernels.norms.cutedsl_kernels import layer_norm_backward

        some = layer_norm_backward(
            case.grad, case.x, case.shape, every["mean"], every["rstd"], case.weight, case.bias,
            wanted,
        )  # fmt: skip
    else:
        from opgraft_kernels.norms.cutedsl_kernels import rms_norm_backward

        wanted = wanted[:2]
        some = rms_norm_backward(case.grad, case.x, case.shape, every["rstd"], case.weight, wanted)
    assert [each is not None for each in some] == wanted
    for name, one in zip(("dx", "dw", "db"), some, strict=False):
        if one is not None:
            assert torch.equal(one, every[name]), name


@over_widths
def test_results_have_the_same_bits(norm: Norm, hidden: int) -> None:
    case = _case(1000, hidden, torch.bfloat16, has_bias=norm.has_bias)
    first = norm.kernels(case)
    for _ in range(5):
        for name, again in norm.kernels(case).items():
            assert torch.equal(first[name], again), name


@over_widths
def test_more_than_2_to_31_elements(norm: Norm, hidden: int) -> None:
    """Offsets past 32 bits: the last rows are right."""
    rows = 2**31 // hidden + 3
    small = _case(3, hidden, torch.bfloat16, has_bias=norm.has_bias)
    case = small._replace(
        x=torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16),
        grad=torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16),
    )
    ours = norm.kernels(case)
    for some in (slice(0, 3), slice(rows - 3, rows)):
        expected = _reference(norm, case._replace(x=case.x[some], grad=case.grad[some]))
        for name in ("y", "dx"):
            one, right = ours[name], expected[name]
            assert one is not None and right is not None
            assert largest_error(one[some], right) < 0.01


@over_widths
def test_cuda_graph_replays(norm: Norm, hidden: int) -> None:
    case = _case(77, hidden, torch.bfloat16, has_bias=norm.has_bias)
    expected = norm.kernels(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = norm.kernels(case)
    for _ in range(3):
        for each in outputs.values():
            assert each is not None
            each.fill_(math.nan)
        graph.replay()
        for name, one in outputs.items():
            assert torch.equal(one, expected[name]), name


def test_two_streams(norm: Norm) -> None:
    """Clusters of two launches share the multiprocessors and all finish."""
    cases = [
        _case(512, hidden, torch.bfloat16, has_bias=norm.has_bias) for hidden in (65536, 131072)
    ]
    expected = [norm.kernels(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    outputs: list[list[Results]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(10):
        for case, stream, output in zip(cases, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                output.append(norm.kernels(case))
    torch.cuda.synchronize()
    for output, right in zip(outputs, expected, strict=True):
        for each in output:
            assert all(torch.equal(each[name], right[name]) for name in right)


# ---------------------------------------------------------------------------- through opgraft


def _registered(norm: Norm) -> dict[str, opgraft.Override]:
    return {each.name.removeprefix(f"{norm.name}."): each for each in norm.register("CUDA")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@over_widths
@pytest.mark.parametrize("has_parameters", [True, False])
def test_overrides_are_hit(
    norm: Norm, hidden: int, dtype: torch.dtype, has_parameters: bool
) -> None:
    overrides = _registered(norm)
    has_bias = has_parameters and norm.has_bias
    case = _case(ELEMENTS // hidden + 1, hidden, dtype, has_parameters, has_bias)
    leaves = Case(*(None if t is None else t.detach().requires_grad_() for t in case))  # type: ignore[arg-type]
    y = norm.through_autograd(leaves)
    y.backward(case.grad)
    assert overrides["forward_by_cluster"].hits == int(norm.has_forward(hidden))
    assert overrides["forward"].hits == int(not norm.has_forward(hidden))
    assert overrides["backward_by_cluster"].hits == 1
    assert overrides["backward"].hits == 0
    gradients = {"dx": leaves.x, "dw": leaves.weight, "db": leaves.bias}
    ours: Results = {"y": y.detach()}
    ours |= {name: t.grad for name, t in gradients.items() if t is not None}
    with opgraft.disabled():
        native = norm.native(case)
    expected = _reference(norm, case)
    for name, one in ours.items():
        other, right = native[name], expected[name]
        assert one is not None and other is not None and right is not None
        floor = 4 * torch.finfo(dtype).eps
        assert largest_error(one, right) <= 2 * largest_error(other, right) + floor, name


def _strided(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t[:, :8]], dim=1)[:, : t.shape[1]]


def _misaligned(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


@pytest.mark.parametrize("layout", [_strided, _misaligned], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("which", ["x", "grad"])
def test_other_layouts_are_declined(
    norm: Norm, which: str, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    overrides = _registered(norm)
    case = _case(ELEMENTS // 65536 + 1, 65536, torch.bfloat16, has_bias=norm.has_bias)
    expected = norm.native(case)  # by the overrides
    clusters = [overrides[f"{direction}_by_cluster"] for direction in ("forward", "backward")]
    assert [each.hits for each in clusters] == [1, 1]
    results = norm.native(case._replace(**{which: layout(getattr(case, which))}))
    assert [each.hits for each in clusters] == [1 if which == "x" else 2, 1]
    for name, one in results.items():
        right = expected[name]
        assert one is not None and right is not None
        assert largest_error(one, right.double()) < 0.02, name


def test_other_calls_are_declined(norm: Norm) -> None:
    overrides = _registered(norm)
    clusters = [overrides[f"{direction}_by_cluster"] for direction in ("forward", "backward")]
    for rows, hidden, dtype in (
        (512, 65536, torch.float32),
        (2048, 8192, torch.bfloat16),
        (2048, 24576, torch.bfloat16),
        (512, 65536 + 8, torch.bfloat16),
    ):
        norm.native(_case(rows, hidden, dtype, has_bias=norm.has_bias))
        assert [each.hits for each in clusters] == [0, 0], (rows, hidden, dtype)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", NORMS)
def test_calls_of_the_widths_that_there_are_kernels_for_are_taken(
    name: str, direction: str
) -> None:
    kernels = importlib.import_module("opgraft_kernels.norms.cutedsl_kernels")
    declared = {"rms_norm": RMS_NORM, "layer_norm": LAYER_NORM}[name]
    widths = getattr(declared, direction).clusters
    assert set(widths) == getattr(kernels.TILES[name], direction).keys()
    norm = NORMS[name]
    override = _registered(norm)[f"{direction}_by_cluster"]
    for hidden in widths:
        before = override.hits
        norm.native(_case(4, hidden, torch.bfloat16, has_bias=norm.has_bias))
        assert override.hits - before == 1, hidden
