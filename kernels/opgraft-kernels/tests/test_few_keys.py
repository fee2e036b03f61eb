"""Attention over few keys, which a program holds at once: the kernels, and which calls get them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from errors import largest_error
from test_attention import (
    BY_ROWS,
    Case,
    _assert_as_good,
    _by,
    _reference,
    _tensors,
    assert_rows_may_be_far_apart,
)
from test_attention_masks import assert_right, bias_of, by_formula

from opgraft_kernels.attention import triton_kernels, triton_sizes
from opgraft_kernels.attention.triton_short import short_backward_kernel, short_forward_kernel
from opgraft_kernels.attention.triton_sizes import Device, Kind
from opgraft_kernels.attention.triton_tiles import BY_KEY, BY_SCORE

SHORT = (short_forward_kernel, short_backward_kernel)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """All that these kernels can do goes to them, on any device; the kernels that were launched."""
    monkeypatch.setattr(triton_sizes, "_FEW_KEYS", dict.fromkeys(range(13), 128))
    monkeypatch.setattr(triton_sizes, "_MANY_QUERIES", 1)
    monkeypatch.setattr(triton_sizes, "_FEW_PROGRAMS", 1)
    # So that a program has several tiles of few queries.
    monkeypatch.setattr(triton_sizes, "_MANY_PROGRAMS", 2)
    found: list[Any] = []
    launch = triton_kernels._launch

    def noting(launches: list[Any]) -> None:
        found.extend(each.kernel for each in launches)
        launch(launches)

    monkeypatch.setattr(triton_kernels, "_launch", noting)
    yield found


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def half(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if device.type == "cpu" and request.param is torch.bfloat16:
        pytest.skip("the interpreter computes on the bits of bfloat16")
    return request.param


CASES = [
    Case(),
    Case(length_q=200, length_k=77, dim=40, dim_v=40),
    Case(length_q=130, length_k=16),
    Case(length_q=65, length_k=15),
    Case(length_q=64, length_k=1),
    Case(length_q=1, length_k=97),
    Case(length_q=129, length_k=128, dim=64, dim_v=64),
    Case(length_q=40, length_k=113, dim=32, dim_v=24),
    Case(batch=2, heads=4, heads_k=2, length_q=70, length_k=49, strided=True),
    Case(batch=2, heads=4, heads_k=1, length_q=33, length_k=33, strided=True),
    Case(length_q=49, length_k=49, dim=128, dim_v=128),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_match_the_formula(
    case: Case, half: torch.dtype, device: torch.device, launched: list[Any]
) -> None:
    t = _tensors(case, half, device)
    ours = _by(triton_kernels, t, False)
    assert launched == list(SHORT)
    _assert_as_good(ours, _reference(t, False, dtype=half), _reference(t, False))


@pytest.mark.parametrize(
    "case",
    [
        Case(causal=True),
        Case(length_q=33, length_k=70, causal=True),
        Case(length_q=100, length_k=100, causal=True, strided=True),
        Case(batch=2, heads=4, heads_k=2, length_q=60, length_k=60, causal=True),
    ],
    ids=str,
)
def test_the_backward_knows_causal(
    case: Case, half: torch.dtype, device: torch.device, launched: list[Any]
) -> None:
    t = _tensors(case, half, device)
    ours = _by(triton_kernels, t, True)
    assert launched[-1] is short_backward_kernel and short_forward_kernel not in launched
    _assert_as_good(ours, _reference(t, True, dtype=half), _reference(t, True))


def _masked(
    shape: tuple[int, ...], lengths: tuple[int, int], lowest: float, half: torch.dtype, device: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    queries, keys = lengths
    sizes = (queries, keys, keys, queries)
    tensors = [torch.randn(2, 4, size, 16, device=device).to(half) for size in sizes]
    bias = bias_of(shape, lowest, device).to(half).expand(2, 4, queries, keys)
    return tensors, bias


@pytest.mark.parametrize("lowest", [0.0, -math.inf, -65504.0], ids=["numbers", "mask", "low"])
@pytest.mark.parametrize(
    "shape", [(2, 4, 70, 90), (1, 4, 70, 90), (2, 1, 1, 90), (2, 1, 70, 1)], ids=str
)
def test_the_backward_adds_a_bias(
    shape: tuple[int, ...],
    lowest: float,
    half: torch.dtype,
    device: torch.device,
    launched: list[Any],
) -> None:
    tensors, bias = _masked(shape, (70, 90), lowest, half, device)
    scale = tensors[0].shape[-1] ** -0.5
    q, k, v, grad = tensors
    out, logsumexp = torch.full_like(q, math.nan), q.new_full(q.shape[:3], math.nan).float()
    triton_kernels.forward(q, k, v, out, logsumexp, scale, False, bias)
    dq, dk, dv = (torch.full_like(each, math.nan) for each in (q, k, v))
    dbias = torch.full(bias.shape, math.nan, dtype=half, device=device)
    triton_kernels.backward(grad, q, k, v, out, logsumexp, dq, dk, dv, scale, False, bias, dbias)
    assert launched[-1] is short_backward_kernel
    native, right = (by_formula(tensors, bias, each) for each in (half, torch.float64))
    assert_right([out, logsumexp, dq, dk, dv, dbias], native, right)


def test_native_s_logsumexp_of_minus_infinity_is_that_of_a_query_without_a_key(
    half: torch.dtype, device: torch.device, launched: list[Any]
) -> None:
    """-inf - -inf would be NaN."""
    tensors, bias = _masked((2, 4, 70, 90), (70, 90), 0.0, half, device)
    bias = bias.index_fill(2, torch.tensor([3, 69], device=device), -math.inf)
    q, k, v, grad = tensors
    out, logsumexp = torch.empty_like(q), torch.empty(q.shape[:3], device=device)
    triton_kernels.forward(q, k, v, out, logsumexp, 0.25, False, bias)
    assert logsumexp[:, :, (3, 69)].eq(math.inf).all()
    found = []
    for each in (logsumexp, logsumexp.where(logsumexp != math.inf, -math.inf)):
        dq, dk, dv = (torch.full_like(t, math.nan) for t in (q, k, v))
        triton_kernels.backward(grad, q, k, v, out, each, dq, dk, dv, 0.25, False, bias)
        found.append([dq, dk, dv])
    assert launched[-1] is short_backward_kernel
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_rows_whose_scores_are_all_minus_infinity_attend_to_nothing(
    device: torch.device, launched: list[Any]
) -> None:
    t = _tensors(Case(), torch.float16, device)
    t.q[0, 0, 3], t.k[0, 0] = -math.inf, t.k[0, 0].abs() + 1
    out, logsumexp = torch.empty_like(t.q), torch.empty(t.q.shape[:3], device=device)
    triton_kernels.forward(*t[:3], out, logsumexp, 0.25, False)
    assert launched == [short_forward_kernel]
    assert out[0, 0, 3].eq(0).all() and logsumexp[0, 0, 3] == math.inf
    assert out.isfinite().all()


@pytest.mark.parametrize("lowest", [1.0, -1.0], ids=["high", "low"])
def test_scores_of_hundreds_leave_no_nan(
    lowest: float, half: torch.dtype, device: torch.device
) -> None:
    """All of one sign, so that keys that are not there would have other exponentials."""
    t = _tensors(Case(length_q=70, length_k=37, dim=32, dim_v=32), half, device)
    t = t._replace(q=t.q.abs() * 8, k=lowest * t.k.abs() * 8)
    ours = _by(triton_kernels, t, False)
    _assert_as_good(ours, _reference(t, False, dtype=half), _reference(t, False))


def test_no_logsumexp_is_needed(device: torch.device, launched: list[Any]) -> None:
    t = _tensors(Case(), torch.float16, device)
    out = torch.empty_like(t.q)
    triton_kernels.forward(*t[:3], out, None, 0.25, False)
    assert launched == [short_forward_kernel]
    assert largest_error(out, _reference(t, False).out) < 2e-3


def test_the_backward_has_the_same_bits(device: torch.device) -> None:
    t = _tensors(Case(heads=4, heads_k=2, causal=True), torch.float16, device)
    first, again = (_by(triton_kernels, t, True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_lie_more_than_2_to_the_31_elements_apart(
    name: str, tmp_path: Path, launched: list[Any]
) -> None:
    inputs = _tensors(Case(length_q=20, length_k=20), torch.float16, "cpu")
    assert_rows_may_be_far_apart(name, inputs, tmp_path)
    assert launched == [*SHORT, *SHORT]


# ------------------------------------------------------------------------- which calls get them


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()


HOPPER = Device(9)


@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize(
    ("device", "kind", "causal", "queries", "keys", "holds"),
    [
        (HOPPER, Kind(40), False, 4096, 77, True),
        (HOPPER, Kind(128), False, 1024, 128, True),
        (HOPPER, Kind(40), False, 4096, 129, False),
        (HOPPER, Kind(40), False, 1023, 77, False),
        (HOPPER, Kind(40), True, 4096, 77, False),
        (HOPPER, Kind(40, bias=BY_KEY.value), False, 4096, 77, False),
        (HOPPER, Kind(136), False, 4096, 77, False),
        (HOPPER, Kind(40, itemsize=4), False, 4096, 77, False),
        (Device(8), Kind(40), False, 4096, 77, False),
        (Device(10), Kind(40), False, 4096, 77, False),
    ],
)
def test_forwards_that_get_them(
    device: Device, kind: Kind, causal: bool, queries: int, keys: int, holds: bool
) -> None:
    assert triton_sizes.forward_holds_keys(device, kind, causal, queries, keys) is holds


@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize(
    ("device", "kind", "programs", "keys", "holds"),
    [
        (HOPPER, Kind(64), 1024, 128, True),
        (HOPPER, Kind(64), 1024, 224, True),
        (HOPPER, Kind(64), 1024, 225, False),
        (HOPPER, Kind(72), 1024, 128, True),
        (HOPPER, Kind(72), 1024, 129, False),
        (HOPPER, Kind(64, bias=BY_SCORE.value), 1024, 128, True),
        (HOPPER, Kind(64, bias=BY_SCORE.value), 1024, 129, False),
        (HOPPER, Kind(64), 63, 128, False),
        (HOPPER, Kind(64, itemsize=4), 1024, 49, False),
        (Device(8), Kind(64), 1024, 128, False),
    ],
)
def test_backwards_that_get_them(
    device: Device, kind: Kind, programs: int, keys: int, holds: bool
) -> None:
    assert triton_sizes.backward_holds_keys(device, kind, programs, keys) is holds


@pytest.mark.parametrize("keys", range(1, 129))
def test_the_parts_hold_all_keys_and_are_powers_of_two(keys: int) -> None:
    first, more = triton_sizes.blocks_of_keys(keys)
    assert keys <= first + more <= max(16, 2 * keys)
    assert first % 16 == 0 and first & (first - 1) == 0 and more & (more - 1) == 0
    assert more < 16 or first < keys, "the first part leaves nothing for the second"
