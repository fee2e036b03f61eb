"""Attention's kernels and what is around them, with native's own error as the measure.

On a machine without a GPU the Triton kernels run in Triton's interpreter (tests/conftest.py), which
computes float32 and float16 alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("triton")

from errors import largest_error

import opgraft
from opgraft import triton_utils
from opgraft.crossover import models, rule
from opgraft_kernels.attention import aten, overrides, triton_kernels, triton_sizes

aten_ops = torch.ops.aten
gpu = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_flash_attn_4 = pytest.mark.skipif(
    not (HOPPER and overrides._has_flash_attn_4()), reason="needs flash-attn-4 and a Hopper GPU"
)


class Case(NamedTuple):
    batch: int = 1
    heads: int = 2
    heads_k: int = 2
    length_q: int = 40
    length_k: int = 40
    dim: int = 16
    dim_v: int = 16
    causal: bool = False
    # [batch, length, heads, dim] in memory, as models have it.
    strided: bool = False


class Tensors(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor


def _tensors(case: Case, dtype: torch.dtype, device: torch.device | str) -> Tensors:
    torch.manual_seed(sum(case))

    def random(heads: int, length: int, dim: int) -> torch.Tensor:
        if case.strided:
            t = torch.randn(case.batch, length, heads, dim, device=device)
            return t.to(dtype).transpose(1, 2)
        return torch.randn(case.batch, heads, length, dim, device=device).to(dtype)

    return Tensors(
        random(case.heads, case.length_q, case.dim),
        random(case.heads_k, case.length_k, case.dim),
        random(case.heads_k, case.length_k, case.dim_v),
        random(case.heads, case.length_q, case.dim_v),
    )


class Results(NamedTuple):
    out: torch.Tensor
    logsumexp: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def _reference(t: Tensors, causal: bool, scale: float | None = None, dtype: Any = None) -> Results:
    """By the formula and autograd; causal aligned at the bottom right."""
    dtype = dtype or torch.float64
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in t[:3])
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * (scale or q.shape[-1] ** -0.5)
    if causal:
        shift = k.shape[2] - q.shape[2]
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(shift)
        scores = scores.masked_fill(~keep, -math.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    gradients = torch.autograd.grad(out, (q, k, v), t.grad.to(dtype))
    return Results(out.detach(), scores.logsumexp(-1).detach(), *gradients)


def _assert_as_good(ours: Results, native: Results, expected: Results) -> None:
    """At most twice native's error, and what a rounding more or less may come to."""
    for name, one, other, right in zip(Results._fields, ours, native, expected, strict=True):
        floor = 4 * torch.finfo(one.dtype).eps
        assert largest_error(one, right) <= 2 * largest_error(other, right) + floor, name


def _by(kernels: Any, t: Tensors, causal: bool, scale: float | None = None) -> Results:
    """The kernels of a module, without the ops around them."""
    scale = scale or t.q.shape[-1] ** -0.5
    out = torch.full((*t.q.shape[:-1], t.v.shape[-1]), math.nan, device=t.q.device)
    out = out.to(t.q.dtype)
    logsumexp = torch.full(t.q.shape[:-1], math.nan, device=t.q.device)
    kernels.forward(*t[:3], out, logsumexp, scale, causal)
    gradients = [torch.full_like(x, math.nan) for x in t[:3]]
    kernels.backward(t.grad, *t[:3], out, logsumexp, *gradients, scale, causal)
    return Results(out, logsumexp, *gradients)


@pytest.fixture
def dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if device.type == "cuda" and dtype is torch.float32:
        pytest.skip("the tensor cores would round it to tf32")
    return dtype


# ------------------------------------------------------------------------------------- Triton

CASES = [
    Case(),
    Case(causal=True),
    Case(length_q=1, length_k=1, causal=True),
    Case(length_q=17, length_k=17),
    Case(length_q=33, length_k=70),
    Case(length_q=33, length_k=70, causal=True),
    Case(length_q=1, length_k=65, causal=True),
    Case(batch=2, heads=4, heads_k=1, causal=True, strided=True),
    Case(heads=4, heads_k=2, strided=True),
    Case(dim=24, dim_v=40),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_matches_the_formula(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    t = _tensors(case, dtype, device)
    ours = _by(triton_kernels, t, case.causal)
    _assert_as_good(ours, _reference(t, case.causal, dtype=dtype), _reference(t, case.causal))


def test_triton_takes_a_scale(device: torch.device) -> None:
    t = _tensors(Case(), torch.float16, device)
    ours = _by(triton_kernels, t, False, scale=0.7)
    native = _reference(t, False, scale=0.7, dtype=torch.float16)
    _assert_as_good(ours, native, _reference(t, False, scale=0.7))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_triton_refuses_a_scale(scale: float) -> None:
    t = _tensors(Case(), torch.float32, "cpu")
    with pytest.raises(ValueError, match="scale must be positive"):
        triton_kernels.forward(t.q, t.k, t.v, t.q, None, scale, False)


def test_triton_needs_no_logsumexp(device: torch.device) -> None:
    t = _tensors(Case(), torch.float16, device)
    out = torch.empty_like(t.q)
    triton_kernels.forward(*t[:3], out, None, 0.25, False)
    assert largest_error(out, _reference(t, False).out) < 2e-3


def test_triton_rows_whose_scores_are_all_minus_infinity(device: torch.device) -> None:
    """They attend to nothing, as natively; exp(S - L) is then 0 in any backward."""
    t = _tensors(Case(), torch.float16, device)
    t.q[0, 0, 3], t.k[0, 0] = -math.inf, t.k[0, 0].abs() + 1
    out, logsumexp = torch.empty_like(t.q), torch.empty(t.q.shape[:3], device=device)
    triton_kernels.forward(*t[:3], out, logsumexp, 0.25, False)
    assert out[0, 0, 3].eq(0).all() and logsumexp[0, 0, 3] == math.inf
    assert out.isfinite().all()


def test_triton_backward_has_the_same_bits(device: torch.device) -> None:
    t = _tensors(Case(heads=4, heads_k=2, causal=True), torch.float16, device)
    first, second = (_by(triton_kernels, t, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# What a call reads and writes by tiles of rows.
BY_ROWS = ("q", "k", "v", "grad", "out", "dq", "dk", "dv")


def assert_rows_may_be_far_apart(
    name: str, inputs: Tensors, folder: Path, bias: torch.Tensor | None = None
) -> None:
    """Rows of a tile 2**31 elements apart and more, where offsets of 32 bits would wrap around."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    near = inputs._asdict()
    for each, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        near[each] = torch.zeros_like(near[like])
    far = {each: t.clone() for each, t in near.items()}
    apart, start = 2**27, 2**31
    _, heads, length, dim = near[name].shape
    # Of the file only what is written takes space.
    size = start + length * apart
    memory = torch.from_file(str(folder / "far"), shared=True, size=size, dtype=torch.float16)
    far[name] = memory[start:].as_strided((1, heads, length, dim), (dim, dim, apart, 1))
    far[name].copy_(near[name])
    for t in (near, far):
        q, k, v, grad, out, dq, dk, dv = (t[each] for each in BY_ROWS)
        logsumexp = torch.empty(q.shape[:3])
        triton_kernels.forward(q, k, v, out, logsumexp, 0.25, False, bias)
        triton_kernels.backward(grad, q, k, v, out, logsumexp, dq, dk, dv, 0.25, False, bias)
    assert all(torch.equal(near[each], far[each]) for each in BY_ROWS)


@pytest.mark.parametrize("name", BY_ROWS)
def test_triton_rows_lie_more_than_2_to_the_31_elements_apart(name: str, tmp_path: Path) -> None:
    inputs = _tensors(Case(length_q=20, length_k=20), torch.float16, "cpu")
    assert_rows_may_be_far_apart(name, inputs, tmp_path)


@pytest.mark.parametrize("name", ["q", "k"])
def test_triton_norms_are_of_rows_that_far_apart(name: str, tmp_path: Path) -> None:
    """A score that makes up for a low tile of the mask is expected where the norm says so."""
    case = Case(heads=4, heads_k=4, length_q=20, length_k=40)
    inputs = _tensors(case, torch.float16, "cpu")
    inputs.q[:, :, 18], inputs.k[:, :, 35] = 200.0, 20.0
    bias = torch.zeros(1, 1, 20, 40)
    bias[..., 32:] = -9984.0
    assert_rows_may_be_far_apart(name, inputs, tmp_path, bias.expand(1, 4, 20, 40))


def test_triton_leaves_the_allocator_of_the_user() -> None:
    from triton.runtime import _allocation

    before = _allocation._allocator.get()
    _by(triton_kernels, _tensors(Case(), torch.float32, "cpu"), False)
    assert _allocation._allocator.get() is before


# ------------------------------------------------------------- through opgraft, interpreted


@pytest.fixture
def on_cpu() -> Iterator[tuple[opgraft.Override, opgraft.Override]]:
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    forward, backward = overrides.register("CPU")
    yield forward, backward


@pytest.mark.parametrize("case", [Case(), Case(causal=True, strided=True)], ids=str)
def test_sdpa_hits_on_cpu(case: Case, on_cpu: tuple[opgraft.Override, opgraft.Override]) -> None:
    t = _tensors(case, torch.float16, "cpu")

    def run() -> tuple[torch.Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in t[:3])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
        return out, *torch.autograd.grad(out, (q, k, v), t.grad)

    ours = run()
    assert [override.hits for override in on_cpu] == [1, 1]
    with opgraft.disabled():
        native = run()
    for one, other in zip(ours, native, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("backward_is_native", [True, False])
def test_forward_and_backward_agree_on_cpu(
    backward_is_native: bool, on_cpu: tuple[opgraft.Override, opgraft.Override]
) -> None:
    """The logsumexp that one kernel writes is the one that the other reads."""
    t = _tensors(Case(causal=True), torch.float16, "cpu")
    q, k, v = (x.detach().requires_grad_() for x in t[:3])
    forward_scope, backward_scope = opgraft.disabled(), opgraft.disabled()
    if not backward_is_native:
        with forward_scope:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradients = torch.autograd.grad(out, (q, k, v), t.grad)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with backward_scope:
            gradients = torch.autograd.grad(out, (q, k, v), t.grad)
    hits = [override.hits for override in on_cpu]
    assert hits == [int(backward_is_native), int(not backward_is_native)]
    for one, right in zip(gradients, _reference(t, True)[2:], strict=True):
        torch.testing.assert_close(one, right.half(), rtol=2e-3, atol=2e-3)


# ------------------------------------------------- what the ops promise, with a kernel of torch's


def _is_readable(t: torch.Tensor) -> bool:
    """By vectors of 16 bytes, and by the copy engine."""
    apart = all(s > 0 and s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
    return apart and t.stride(-1) == 1 and t.data_ptr() % 16 == 0


class _Formula:
    """Kernels by the formula, in the signature of the modules'."""

    @staticmethod
    def forward(q: Any, k: Any, v: Any, out: Any, logsumexp: Any, scale: Any, causal: Any) -> None:
        assert all(map(_is_readable, (q, k, v)))
        result = _reference(Tensors(q, k, v, torch.zeros_like(out)), causal, scale)
        out.copy_(result.out)
        if logsumexp is not None:
            logsumexp.copy_(result.logsumexp)

    @staticmethod
    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> None:
        *gradients, scale, causal = rest
        assert all(map(_is_readable, (grad, q, k, v, out)))
        expected = _reference(Tensors(q, k, v, grad), causal, scale)
        torch.testing.assert_close(out.double(), expected.out, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), expected.logsumexp, atol=1e-2, rtol=1e-2)
        for mine, right in zip(gradients, expected[2:], strict=True):
            mine.copy_(right)


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "kernels", lambda module: _Formula)


class OpCalls(NamedTuple):
    """How an op and its backward are called."""

    forward: Any
    backward: Any
    forward_impl: Callable[..., Any]
    backward_impl: Callable[..., Any]
    forward_arguments: Callable[[Tensors, bool], tuple[Any, ...]]
    backward_arguments: Callable[[Tensors, bool, tuple[Any, ...]], tuple[Any, ...]]
    swapped: bool = False  # [batch, length, heads, dim]

    def view(self, t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2) if self.swapped else t


def _lengths(t: Tensors) -> tuple[int, int]:
    return t.q.shape[2], t.k.shape[2]


def _raw(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2)


OPS = {
    "cudnn": OpCalls(
        aten_ops._scaled_dot_product_cudnn_attention,
        aten_ops._scaled_dot_product_cudnn_attention_backward,
        aten.cudnn_forward,
        aten.cudnn_backward,
        lambda t, causal: (*t[:3], None, True, 0.0, causal, False),
        lambda t, causal, r: (
            *(t.grad, *t[:3], r[0], r[1], r[6], r[7], None, None, None),
            *(*_lengths(t), 0.0, causal),
        ),
    ),
    "flash": OpCalls(
        aten_ops._scaled_dot_product_flash_attention,
        aten_ops._scaled_dot_product_flash_attention_backward,
        aten.flash_forward,
        aten.flash_backward,
        lambda t, causal: (*t[:3], 0.0, causal, False),
        lambda t, causal, r: (
            *(t.grad, *t[:3], r[0], r[1], None, None),
            *(*_lengths(t), 0.0, causal, r[6], r[7]),
        ),
    ),
    "efficient": OpCalls(
        aten_ops._scaled_dot_product_efficient_attention,
        aten_ops._scaled_dot_product_efficient_attention_backward,
        aten.efficient_forward,
        aten.efficient_backward,
        lambda t, causal: (*t[:3], None, True, 0.0, causal),
        lambda t, causal, r: (
            *(t.grad, *t[:3], None, r[0], r[1], r[2], r[3]),
            *(0.0, [True, True, True, False], causal),
        ),
    ),
    "raw flash": OpCalls(
        aten_ops._flash_attention_forward,
        aten_ops._flash_attention_backward,
        aten.raw_flash_forward,
        aten.raw_flash_backward,
        lambda t, causal: (*(*map(_raw, t[:3]), None, None, *_lengths(t), 0.0, causal, False),),
        lambda t, causal, r: (
            *(_raw(t.grad), *map(_raw, t[:3]), r[0], r[1], None, None),
            *(*_lengths(t), 0.0, causal, r[2], r[3]),
        ),
        swapped=True,
    ),
}


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        meta = {"dtype": value.dtype, "device": "meta"}
        return torch.empty_strided(value.shape, value.stride(), **meta)
    return value


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    return value


@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "case",
    [
        Case(length_q=7, length_k=7),
        Case(length_q=7, length_k=9, strided=True),
        Case(heads=4, heads_k=2, length_q=32, length_k=32, causal=True, strided=True),
        Case(dim=16, dim_v=24),
    ],
    ids=str,
)
def test_outputs_are_what_the_op_promises(op: str, case: Case) -> None:
    if case.dim != case.dim_v and "flash" in op:
        pytest.skip("the op has one head dimension")
    if case.heads != case.heads_k and op == "efficient":
        pytest.skip("the op has as many key heads as query heads")
    calls = OPS[op]
    t = _tensors(case, torch.float16, "cpu")
    arguments = calls.forward_arguments(t, case.causal)
    results = calls.forward_impl("cutedsl_kernels", *arguments)
    promised = calls.forward(*map(_to_meta, arguments))
    assert [_layout(r) for r in results] == [_layout(p) for p in promised]
    expected = _reference(t, case.causal)
    assert largest_error(calls.view(results[0]), expected.out) < 2e-3

    arguments = calls.backward_arguments(t, case.causal, results)
    gradients = calls.backward_impl("cutedsl_kernels", *arguments)
    promised = calls.backward(*map(_to_meta, arguments))
    assert [_layout(g) for g in gradients] == [_layout(p) for p in promised]
    for gradient, right in zip(gradients[:3], expected[2:], strict=True):
        assert largest_error(calls.view(gradient), right) < 2e-3


@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_no_logsumexp_where_none_is_asked_for(name: str) -> None:
    t = _tensors(Case(), torch.float16, "cpu")
    results = OPS[name].forward_impl("cutedsl_kernels", *t[:3], None, False)
    assert largest_error(results[0], _reference(t, False).out) < 2e-3
    assert results[1] is None or results[1].numel() == 0


@pytest.mark.usefixtures("formula")
def test_padding_of_the_efficient_logsumexp_takes_part_in_nothing() -> None:
    t = _tensors(Case(length_q=7, length_k=7), torch.float16, "cpu")
    logsumexp = aten.efficient_forward("cutedsl_kernels", *t[:3], None, True)[1]
    assert logsumexp.shape[-1] == 32
    assert logsumexp[..., :7].isfinite().all() and (logsumexp[..., 7:] == math.inf).all()


@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    "change",
    [
        lambda t: torch.ones((), dtype=t.dtype).expand(t.shape),
        lambda t: t[..., :1].expand(t.shape),
        lambda t: t[:, :1].expand(t.shape),
        lambda t: torch.cat([t, t[..., :3]], -1)[..., :-3],
        lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
        lambda t: t.mT.contiguous().mT,
    ],
)
def test_tensors_in_any_layout(which: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = list(_tensors(Case(), torch.float16, "cpu"))
    tensors[which] = change(tensors[which])
    t = Tensors(*tensors)
    for calls in (OPS["flash"], OPS["raw flash"]):
        results = calls.forward_impl("cutedsl_kernels", *calls.forward_arguments(t, False))
        arguments = calls.backward_arguments(t, False, results)
        gradients = calls.backward_impl("cutedsl_kernels", *arguments)
        for gradient, right in zip(gradients, _reference(t, False)[2:], strict=True):
            assert largest_error(calls.view(gradient), right) < 2e-3


# ---------------------------------------------------------------------------------- conditions


def _arguments(op: str, values: tuple[Any, ...]) -> dict[str, Any]:
    """By name, defaults filled in."""
    schema = getattr(torch.ops.aten, op).default._schema.arguments
    defaults = {a.name: a.default_value for a in schema}
    return {**defaults, **dict(zip((a.name for a in schema), values, strict=False))}


def _holds(calls: OpCalls, op: Any, t: Tensors, causal: bool, **changes: Any) -> bool:
    arguments = _arguments(op.name, calls.forward_arguments(t, causal))
    return overrides._dense(op).holds({**arguments, **changes})


FORWARD_OPS = {
    "cudnn": overrides._CUDNN,
    "flash": overrides._FLASH,
    "efficient": overrides._EFFICIENT,
    "raw flash": overrides._RAW_FLASH,
}


@pytest.mark.parametrize("name", FORWARD_OPS)
def test_conditions_take_what_the_kernels_can(name: str) -> None:
    op, calls = FORWARD_OPS[name], OPS[name]
    for causal, strided, heads_k in itertools.product((False, True), (False, True), (2, 1)):
        case = Case(heads_k=heads_k, strided=strided)
        t = _tensors(case, torch.float16, "cpu")
        assert _holds(calls, op, t, causal)
        assert _holds(calls, op, t, causal, scale=0.5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 1), (2, 1, 5)], ids=str)
def test_what_kernels_read_has_strides_of_whole_16_bytes(shape: tuple[int, ...]) -> None:
    """Also of dimensions of size 1: a descriptor is made of them all."""
    part = torch.randn(*shape, 129, dtype=torch.float16)[..., :128]
    aligned = aten.aligned(part)
    assert torch.equal(aligned, part)
    assert [stride % 8 for stride in aligned.stride()[:-1]] == [0, 0, 0]


@pytest.mark.parametrize("name", FORWARD_OPS)
def test_conditions_decline_options(name: str) -> None:
    op, calls = FORWARD_OPS[name], OPS[name]
    t = _tensors(Case(), torch.float16, "cpu")
    changes: list[dict[str, Any]] = [
        {"dropout_p": 0.1},
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": 1e300},
        {"scale": math.inf},
        {"scale": math.nan},
    ]
    mask = torch.zeros(1)
    for argument, value in (
        ("attn_bias", mask),
        ("return_debug_mask", True),
        ("window_size_left", 16),
        ("alibi_slopes", mask),
        ("seqused_k", mask),
    ):
        if argument in op.arguments:
            changes.append({argument: value})
    for change in changes:
        assert not _holds(calls, op, t, False, **change), change


@pytest.mark.parametrize("name", FORWARD_OPS)
@pytest.mark.parametrize(
    ("which", "change"),
    [
        (1, lambda k: k[:, :, :20]),
        (1, lambda k: k.float()),
        (1, lambda k: k[..., :8]),
        (1, lambda k: k.repeat(1, 2, 1, 1)[:, :3]),
        (2, lambda v: v[:, :1]),
        (0, lambda q: q[:, :0]),
    ],
)
def test_conditions_decline_tensors(
    name: str, which: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    op, calls = FORWARD_OPS[name], OPS[name]
    t = list(_tensors(Case(), torch.float16, "cpu"))
    t[which] = change(t[which])
    assert not _holds(calls, op, Tensors(*t), False)


@pytest.mark.parametrize("name", FORWARD_OPS)
def test_conditions_know_how_each_op_aligns_causal(name: str) -> None:
    op, calls = FORWARD_OPS[name], OPS[name]
    for length_q, length_k in ((8, 16), (16, 8), (16, 16)):
        t = _tensors(Case(length_q=length_q, length_k=length_k), torch.float16, "cpu")
        assert _holds(calls, op, t, False)
        fits = length_q <= length_k if "flash" in name else length_q == length_k
        assert _holds(calls, op, t, True) == fits


@pytest.mark.parametrize(
    "wrong",
    [
        {"logsumexp": torch.zeros(1, 2, 40, dtype=torch.float64)},
        {"grad_out": torch.zeros(1, 2, 40, 16)},
        {"grad_out": torch.zeros(1, 2, 39, 16, dtype=torch.float16)},
        {"out": torch.zeros(1, 2, 39, 16, dtype=torch.float16)},
    ],
)
def test_backward_conditions_decline(wrong: dict[str, torch.Tensor]) -> None:
    calls, op = OPS["flash"], overrides._FLASH_BACKWARD
    t = _tensors(Case(), torch.float16, "cpu")
    results = (t.q, torch.zeros(1, 2, 40), None, None, 40, 40, None, None)
    arguments = _arguments(op.name, calls.backward_arguments(t, False, results))
    assert overrides._dense(op).holds(arguments)
    assert not overrides._dense(op).holds({**arguments, **wrong})


BACKWARD_OPS = {
    "cudnn": overrides._CUDNN_BACKWARD,
    "flash": overrides._FLASH_BACKWARD,
    "efficient": overrides._EFFICIENT_BACKWARD,
    "raw flash": overrides._RAW_FLASH_BACKWARD,
}
# Of 2 batches, 3 heads and 33 queries, as native's forward makes it; for the efficient op padded.
LOGSUMEXP = {
    "cudnn": (2, 3, 33, 1),
    "flash": (2, 3, 33),
    "efficient": (2, 3, 64),
    "raw flash": (2, 3, 33),
}


def _backward_holds(name: str, logsumexp: torch.Tensor) -> bool:
    calls, op = OPS[name], BACKWARD_OPS[name]
    t = _tensors(Case(2, 3, 3, 33, 40), torch.float16, "cpu")
    results = (calls.view(t.q), logsumexp, *([None] * 6))
    arguments = _arguments(op.name, calls.backward_arguments(t, False, results))
    return overrides._dense(op).holds(arguments)


@pytest.mark.parametrize("name", BACKWARD_OPS)
def test_backward_conditions_take_a_logsumexp_of_native_s_shape(name: str) -> None:
    shape = LOGSUMEXP[name]
    t = _tensors(Case(2, 3, 3, 33, 40), torch.float16, "cpu")
    promised = OPS[name].forward(*map(_to_meta, OPS[name].forward_arguments(t, False)))[1]
    assert promised.shape == shape
    assert _backward_holds(name, torch.zeros(shape))


@pytest.mark.parametrize("change", ["rows", "heads", "batch", "of other dimensions", "flat"])
@pytest.mark.parametrize("name", BACKWARD_OPS)
def test_backward_conditions_decline_a_logsumexp_of_another_shape(name: str, change: str) -> None:
    """It would be read out of bounds, or as what it is not."""
    shape = LOGSUMEXP[name]
    other = {
        "rows": (2, 3, 32, *shape[3:]),
        "heads": (2, 2, *shape[2:]),
        "batch": (1, *shape[1:]),
        "of other dimensions": (2, shape[2], 3, *shape[3:]),
        "flat": (math.prod(shape),),
    }[change]
    assert not _backward_holds(name, torch.zeros(other))
    assert not _backward_holds(name, torch.zeros(*shape, 2))


@pytest.mark.parametrize(
    ("shape", "taken"), [((3, 50), True), ((3, 49), False), ((50, 3), False), ((1, 3, 50), False)]
)
def test_packed_sequences_have_a_logsumexp_of_all_queries(
    shape: tuple[int, ...], taken: bool
) -> None:
    q = torch.zeros(50, 3, 16, dtype=torch.float16)
    ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    values = (q, q, q, q, q, torch.zeros(shape), ends, ends, 30, 30, 0.0, True, None, None)
    op = overrides._RAW_FLASH_BACKWARD
    assert overrides._varlen(op).holds(_arguments(op.name, values)) == taken


def test_a_logsumexp_of_too_few_queries_is_left_to_native_on_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    found = overrides.register("CPU")
    t = _tensors(Case(1, 2, 2, 33, 40), torch.float16, "cpu")
    out, logsumexp = aten_ops._scaled_dot_product_flash_attention_for_cpu(*t[:3])
    backward = aten_ops._scaled_dot_product_flash_attention_for_cpu_backward
    backward(t.grad, *t[:3], out, logsumexp, 0.0, False)
    assert [each.hits for each in found] == [1, 1]
    # Of memory that has them all: native looks no more.
    backward(t.grad, *t[:3], out, logsumexp[:, :, :32], 0.0, False)
    assert [each.hits for each in found] == [1, 1]


H200 = models.Model("NVIDIA H200", (9, 0))
FILLS_NO_TILE = 0


@pytest.mark.crossovers
@pytest.mark.parametrize(
    ("op", "rows", "keys", "dim", "causal", "grouped", "faster"),
    [
        ("cudnn_attention_backward", 2**14, 512, 128, False, False, True),
        ("cudnn_attention_backward", 2**18, 4096, 128, True, False, True),
        ("cudnn_attention_backward", 2**15, 1024, 64, True, False, True),
        ("cudnn_attention_backward", 2**18, 2**14, 128, False, True, True),
        ("cudnn_attention_backward", 2**18, 512, 128, False, True, False),
        ("cudnn_attention", 2**16, 4096, 128, True, False, True),
        ("cudnn_attention", 2**18, 2**14, 128, False, True, True),
        ("cudnn_attention", 2**18, 1024, 64, True, False, False),
        ("cudnn_attention", 2**11, 128, 128, False, False, False),
        ("cudnn_attention", 2**18, 4096, 256, False, False, True),
        ("flash_attention", 2**18, 4096, 128, False, False, True),
        ("efficient_attention", 2**18, 4096, 128, True, False, True),
        # The op repeats keys: nothing was measured of groups.
        ("efficient_attention", 2**18, 4096, 128, True, True, False),
    ],
)
def test_the_h200_s_table_says_where_flash_attention_4_is_faster(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    op: str,
    rows: int,
    keys: int,
    dim: int,
    causal: bool,
    grouped: bool,
    faster: bool,
) -> None:
    monkeypatch.setattr(overrides, "_has_flash_attn_4", lambda: True)
    monkeypatch.setenv("OPGRAFT_TABLES", str(tmp_path))
    found = {override.name: override for override in overrides.register("CUDA")}
    override = found[f"opgraft_kernels.attention.cutedsl.scaled_dot_product_{op}"]
    assert override.decisions is not None
    in_force = override.decisions.in_force(H200)
    taken = in_force is not None and in_force.grid.takes(
        [rows, keys, dim, causal, grouped, FILLS_NO_TILE], rule.PLAN
    )
    assert taken == faster


@pytest.mark.crossovers
@pytest.mark.parametrize("kind", [overrides._CUTEDSL, overrides._TRITON], ids=lambda k: k.name)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_k", [8, 2])
def test_flash_attention_s_own_op_is_decided_by_what_was_measured_of_the_one_that_calls_it(
    kind: overrides._Kind, heads_k: int, causal: bool
) -> None:
    """Of packed sequences, too."""
    t = _tensors(Case(2, 8, heads_k, 300, 300, 64, 64, causal), torch.float16, "cpu")
    flash = _arguments(overrides._FLASH.name, OPS["flash"].forward_arguments(t, causal))
    raw = _arguments(overrides._RAW_FLASH.name, OPS["raw flash"].forward_arguments(t, causal))
    names = ("query", "key", "value")
    packed = {**raw, **{name: raw[name].flatten(0, 1) for name in names}}

    def features(op: overrides._Op, arguments: dict[str, Any]) -> dict[str, Any]:
        crossover = overrides._crossover(op, kind)
        assert (crossover.measured_as is None) == (op is overrides._FLASH)
        return {name: each.evaluate(arguments) for name, each in crossover.features.items()}

    expected = features(overrides._FLASH, flash)
    assert list(features(overrides._RAW_FLASH, raw).items()) == list(expected.items())
    assert features(overrides._RAW_FLASH, packed) == expected
    if kind is overrides._CUTEDSL:
        assert expected["is_grouped"] == (heads_k != 8)


@pytest.mark.parametrize(
    ("queries", "keys", "taken"),
    [(8, 8, False), (16, 16, True), (16, 17, False), (127, 4096, False), (128, 4096, True)],
)
@pytest.mark.parametrize("name", FORWARD_OPS)
def test_few_queries_of_many_keys_are_declined(
    name: str, queries: int, keys: int, taken: bool
) -> None:
    t = _tensors(Case(1, 2, 2, queries, keys, 64, 64), torch.float16, "cpu")
    op = FORWARD_OPS[name]
    arguments = _arguments(op.name, OPS[name].forward_arguments(t, False))
    assert overrides._has_enough_queries(op).holds(arguments) == taken


def test_registering_goes_by_priority() -> None:
    names = {o.op: [] for o in overrides.register("CUDA")}
    for override in opgraft.overrides():
        names[override.op].append((override.dsl, override.priority))
    first = [("cutedsl", 1)] if overrides._has_flash_attn_4() else []
    assert names["aten::_scaled_dot_product_flash_attention"] == [*first, ("triton", 0)]
    with_masks = [*first, ("triton", 0), ("triton", 0)]
    assert names["aten::_scaled_dot_product_cudnn_attention"] == with_masks


# ------------------------------------------------------------------------------- the GPU alone

GPU_CASES = [
    Case(2, 4, 4, 256, 256, 64, 64),
    Case(2, 4, 4, 256, 256, 128, 128, True, True),
    Case(1, 1, 1, 17, 17, 128, 128, True),
    Case(2, 3, 3, 127, 127, 64, 64, True, True),
    Case(2, 3, 3, 129, 129, 128, 128),
    Case(1, 8, 1, 4097, 4097, 128, 128, True, True),
    Case(1, 8, 8, 4097, 4097, 64, 64, False, True),
    Case(2, 8, 2, 300, 700, 128, 128, False, True),
]
DIM_CASES = [
    Case(2, 4, 4, 515, 515, 96, 96, True, True),
    Case(2, 4, 4, 515, 515, 192, 128, True),
    Case(2, 4, 2, 515, 515, 256, 256, False, True),
    Case(2, 4, 4, 515, 77, 40, 40, False, True),
    Case(2, 4, 4, 197, 197, 64, 64, False, True),
    Case(2, 4, 4, 300, 300, 72, 72, False, True),
    Case(2, 4, 2, 515, 515, 80, 80, True, True),
    Case(2, 4, 4, 257, 257, 88, 88, False, True),
    # Many tiles: a backward may be right on few alone.
    *(Case(8, 16, 16, 1024, 1024, dim, dim, False) for dim in (40, 64, 72, 80, 88, 96, 128)),
    *(Case(1, 16, 16, 2048, 2048, dim, dim, True) for dim in (40, 72, 80, 88, 96)),
]


def _native_can(name: str, t: Tensors, causal: bool) -> bool:
    """Whether F.scaled_dot_product_attention would ever make this call of native's."""
    if name == "raw flash":
        return t.q.shape[-1] == t.v.shape[-1]
    q, k, v = (x.detach().requires_grad_() for x in t[:3])
    grouped = q.shape[1] != k.shape[1]
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
    return getattr(torch.backends.cuda, f"can_use_{name}_attention")(parameters, False)


def _through(calls: OpCalls, forward: Any, backward: Any, t: Tensors, causal: bool) -> Results:
    results = forward(*calls.forward_arguments(t, causal))
    gradients = backward(*calls.backward_arguments(t, causal, results))[:3]
    logsumexp = results[1].reshape(*results[1].shape[:2], -1)[..., : t.q.shape[2]]
    return Results(calls.view(results[0]), logsumexp, *map(calls.view, gradients))


@gpu
@pytest.mark.parametrize("kernels", ["cutedsl_kernels", "triton_kernels"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("case", [*GPU_CASES, *DIM_CASES], ids=str)
def test_every_pair_of_forward_and_backward_agrees(case: Case, name: str, kernels: str) -> None:
    """Native and ours, either before either."""
    if kernels == "cutedsl_kernels" and not (HOPPER and overrides._has_flash_attn_4()):
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    if kernels == "triton_kernels" and case.dim > triton_sizes.MAX_DIM:
        pytest.skip("wider than Triton's kernels take")
    calls = OPS[name]
    t = _tensors(case, torch.bfloat16, "cuda")
    if not _native_can(name, t, case.causal):
        pytest.skip("torch would never call it so")
    if case.causal and case.length_q != case.length_k:
        pytest.skip("declined")
    native = (calls.forward, calls.backward)
    ours = (
        lambda *a: calls.forward_impl(kernels, *a),
        lambda *a: calls.backward_impl(kernels, *a),
    )
    expected = _reference(t, case.causal)
    yardstick = _through(calls, *native, t, case.causal)
    pairs = [ours, (ours[0], native[1]), (native[0], ours[1])]
    for forward, backward in pairs:
        _assert_as_good(_through(calls, forward, backward, t, case.causal), yardstick, expected)


@gpu
@pytest.mark.parametrize("name", OPS)
def test_every_forward_gets_a_launch_plan(name: str) -> None:
    calls = OPS[name]
    override = triton_utils.register_op_override(
        "aten",
        calls.forward.__name__,
        "CUDA",
        partial(calls.forward_impl, "triton_kernels"),
        unconditional_override=True,
        launch_plan=True,
    )
    t = _tensors(Case(2, 4, 4, 256, 256, 64, 64), torch.bfloat16, "cuda")
    for _ in range(4):
        calls.forward(*calls.forward_arguments(t, False))
    assert override.plans is not None and len(override.plans) == 1, override.plans.refusals


@gpu
@needs_flash_attn_4
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_sequences_laid_end_to_end(dim: int, group: int, causal: bool) -> None:
    """Some of one token; where keys are fewer than queries, those that see none give zeros."""
    begins_q, begins_k = [0, 1, 301, 429, 506, 536], [0, 5, 305, 433, 510, 530]
    cum_q, cum_k = (torch.tensor(b, dtype=torch.int32, device="cuda") for b in (begins_q, begins_k))
    shape = (8, dim)
    q, grad = (torch.randn(536, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = torch.randn(2, 530, 8 // group, dim, device="cuda", dtype=torch.bfloat16)
    forward = (q, k, v, cum_q, cum_k, 300, 300, 0.0, causal, False)

    def backward(r: tuple[Any, ...]) -> tuple[Any, ...]:
        return grad, q, k, v, r[0], r[1], cum_q, cum_k, 300, 300, 0.0, causal, r[2], r[3]

    native = aten_ops._flash_attention_forward(*forward)
    ours = aten.raw_flash_forward("cutedsl_kernels", *forward)
    native_gradients = aten_ops._flash_attention_backward(*backward(native))
    for results in (ours, native):
        gradients = aten.raw_flash_backward("cutedsl_kernels", *backward(results))
        for one, other in zip(
            (results[0], *gradients), (native[0], *native_gradients), strict=True
        ):
            assert one.stride() == other.stride()
            assert largest_error(one, other) < 2e-2


def _sdpa(t: Tensors, causal: bool) -> tuple[torch.Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in t[:3])
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out, *torch.autograd.grad(out, (q, k, v), t.grad)


def _hits() -> dict[str, int]:
    return {o.op.split("::")[1]: o.hits for o in opgraft.overrides() if o.hits}


@gpu
@needs_flash_attn_4
@pytest.mark.parametrize(
    ("backend", "op"),
    [
        (None, "_scaled_dot_product_cudnn_attention"),
        (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
        (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_hits(backend: SDPBackend | None, op: str, causal: bool) -> None:
    overrides.register("CUDA")
    t = _tensors(Case(2, 16, 16, 4096, 4096, 128, 128, causal, True), torch.bfloat16, "cuda")
    with sdpa_kernel(backend or SDPBackend.CUDNN_ATTENTION):
        ours = _sdpa(t, causal)
        with opgraft.disabled():
            native = _sdpa(t, causal)
    assert _hits() == {op: 1, f"{op}_backward": 1}
    for one, other in zip(ours, native, strict=True):
        assert one.stride() == other.stride()
        assert largest_error(one, other) < 2e-2


@gpu
def test_triton_stands_in_for_flash_attn_4() -> None:
    overrides.register("CUDA")
    t = _tensors(Case(2, 16, 16, 4096, 4096, 64, 64, True, True), torch.bfloat16, "cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), opgraft.disabled(dsl="cutedsl"):
        _sdpa(t, True)
    hits = {o.name: o.hits for o in opgraft.overrides() if o.hits}
    assert all(".triton." in name for name in hits) and len(hits) == 2


@gpu
@needs_flash_attn_4
def test_deterministic_mode_gets_deterministic_gradients() -> None:
    overrides.register("CUDA")
    t = _tensors(Case(2, 16, 16, 4096, 4096, 128, 128, True, True), torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            first, second = _sdpa(t, True), _sdpa(t, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@gpu
@needs_flash_attn_4
@pytest.mark.parametrize(
    "run",
    [
        lambda t: torch.compile(lambda q: F.scaled_dot_product_attention(q, t.k, t.v))(t.q),
        lambda t: torch.vmap(
            lambda q: F.scaled_dot_product_attention(q, t.k, t.v), in_dims=0, out_dims=0
        )(t.q[None])[0],
    ],
)
def test_other_ways_to_call_sdpa(run: Callable[[Tensors], torch.Tensor]) -> None:
    overrides.register("CUDA")
    t = _tensors(Case(2, 16, 16, 4096, 4096, 128, 128), torch.bfloat16, "cuda")
    ours = run(t)
    assert _hits()
    with opgraft.disabled():
        native = F.scaled_dot_product_attention(t.q, t.k, t.v)
    assert largest_error(ours, native) < 2e-2


@gpu
@needs_flash_attn_4
def test_autocast_hits() -> None:
    overrides.register("CUDA")
    t = _tensors(Case(2, 16, 16, 4096, 4096, 128, 128), torch.float32, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        F.scaled_dot_product_attention(t.q, t.k, t.v)
    assert _hits() == {"_scaled_dot_product_cudnn_attention": 1}


@gpu
@needs_flash_attn_4
def test_cuda_graph_replays() -> None:
    overrides.register("CUDA")
    t = _tensors(Case(2, 16, 16, 4096, 4096, 128, 128), torch.bfloat16, "cuda")
    for _ in range(3):
        expected = F.scaled_dot_product_attention(t.q, t.k, t.v)
    graph = torch.cuda.CUDAGraph()
    before = sum(_hits().values())
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(t.q, t.k, t.v)
    assert sum(_hits().values()) == before + 1
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, expected)


@gpu
@needs_flash_attn_4
def test_empty_batches_are_native() -> None:
    overrides.register("CUDA")
    t = _tensors(Case(0, 16, 16, 4096, 4096, 128, 128), torch.bfloat16, "cuda")
    with opgraft.disabled():
        native = F.scaled_dot_product_attention(*t[:3])
    ours = F.scaled_dot_product_attention(*t[:3])
    # torch 2.11 returns None here, as cuDNN's op leaves its output undefined.
    assert (ours is None) == (native is None)
    assert ours is None or ours.shape == t.q.shape
    assert not _hits()


@gpu
@pytest.mark.parametrize("kernels", ["cutedsl_kernels", "triton_kernels"])
def test_more_than_2_to_31_elements(kernels: str) -> None:
    """Offsets past 32 bits: the last heads are right, forward and backward."""
    if kernels == "cutedsl_kernels" and not (HOPPER and overrides._has_flash_attn_4()):
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    batch, heads, length, dim = 131, 64, 2048, 128
    q = torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
    q = q.transpose(1, 2)
    assert q.numel() > 2**31
    out, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
    logsumexp = torch.empty(q.shape[:3], device="cuda")
    module = aten.kernels(kernels)
    scale = dim**-0.5
    module.forward(q, q, q, out, logsumexp, scale, True)
    module.backward(out, q, q, q, out, logsumexp, dq, dk, dv, scale, True)
    for some in (slice(0, 1), slice(-1, None)):
        part = q[some, -2:]
        right = _reference(Tensors(part, part, part, out[some, -2:]), True, scale)
        ours = (out, logsumexp, dq, dk, dv)
        for one, other in zip(ours, right, strict=True):
            # q being k, P is all but 1 on the diagonal, and what is left of dS is rounding.
            assert largest_error(one[some, -2:], other) < 0.06


@gpu
def test_native_of_float32_is_as_exact_where_tf32_is_allowed() -> None:
    """Why no kernel here computes in plain tf32: under that flag native does not either."""
    given = [torch.randn(2, 4, 512, 64, device="cuda", requires_grad=True) for _ in range(3)]
    grad = torch.randn_like(given[0])

    def run() -> list[torch.Tensor]:
        with opgraft.disabled(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            out = F.scaled_dot_product_attention(*given)
            return [out, *torch.autograd.grad(out, given, grad)]

    before = torch.get_float32_matmul_precision()
    exact = run()
    torch.set_float32_matmul_precision("high")
    try:
        allowed = run()
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(map(torch.equal, exact, allowed))
