"""Products of float32 by parts that a kernel has split before, as exact as native's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from errors import largest_error
from test_attention_masks import NAMES, by_formula, by_triton

from opgraft_kernels.attention import triton_kernels, triton_sizes
from opgraft_kernels.attention.triton_sizes import Device, Kind

HOPPER, AMPERE, INTERPRETER = Device(9), Device(8), Device(0)


def _lengths_that_split(device: torch.device) -> int:
    return 600 if device.type == "cuda" else 70


@pytest.fixture
def device(device: torch.device) -> torch.device:
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("nothing is split elsewhere than on Hopper")
    return device


# ------------------------------------------------------------------ what is split


@pytest.mark.parametrize("length", [1, 64, 100, 128, 129])
@pytest.mark.parametrize("dim", [4, 20, 64, 100])
def test_parts_sum_up_to_the_whole(length: int, dim: int, device: torch.device) -> None:
    scales = 10.0 ** torch.randint(-25, 25, (2, length, 3, dim), device=device)
    x = (torch.randn(2, length, 3, dim, device=device) * scales).transpose(1, 2)
    (parts,), launches = triton_kernels._split(x)
    parts.fill_(math.nan)
    for launch in launches:
        launch()
    rows = parts.shape[2] // 3
    assert rows % 128 == 0
    high, middle, low = parts.float().unflatten(2, (3, rows)).unbind(2)
    whole = high + (middle + low)
    torch.testing.assert_close(whole[:, :, :length], x, rtol=0, atol=0)
    assert not whole[:, :, length:].any()
    # The interpreter cuts off where a GPU rounds.
    assert (middle.abs() <= high.abs() / 2**7).all() and (low.abs() <= high.abs() / 2**14).all()


@pytest.mark.parametrize(
    ("device", "kind", "readers", "expected"),
    [
        (HOPPER, Kind(64, 4), 1024, (True, True)),
        (HOPPER, Kind(64, 2), 1024, (False, False)),
        (HOPPER, Kind(128, 4), 1024, (True, False)),
        (HOPPER, Kind(128, 4), 63, (False, False)),
        (HOPPER, Kind(256, 4), 1024, (False, False)),
        (HOPPER, Kind(32, 4), 1024, (True, False)),
        (HOPPER, Kind(64, 4), 256, (False, True)),
        (HOPPER, Kind(64, 4), 128, (False, False)),
        (AMPERE, Kind(64, 4), 1024, (False, False)),
        (INTERPRETER, Kind(64, 4), 64, (True, True)),
        (INTERPRETER, Kind(64, 4), 63, (False, False)),
    ],
    ids=str,
)
def test_what_is_split(
    device: Device, kind: Kind, readers: int, expected: tuple[bool, bool]
) -> None:
    assert triton_sizes.splits_forward(device, kind, readers, 1024) == expected[0]
    assert triton_sizes.splits_backward(device, kind, readers) == expected[1]


@pytest.mark.parametrize(("keys", "expected"), [(63, False), (64, True)])
def test_few_keys_are_not_split(keys: int, expected: bool) -> None:
    """Parts would take more memory than the call does."""
    assert triton_sizes.splits_forward(HOPPER, Kind(128, 4), 4096, keys) == expected


# ------------------------------------------------------------------ attention


class Call(NamedTuple):
    dim: int = 64
    heads_k: int = 4
    fewer_keys: int = 0
    causal: bool = False
    # "learnt", of each head and with a gradient; "masks", of -inf and shared by heads; or none.
    bias: str = ""


CALLS = [
    Call(),
    Call(dim=20, fewer_keys=3),
    Call(dim=36, heads_k=1, causal=True),
    Call(dim=100),
    Call(dim=128, causal=True),
    Call(bias="learnt"),
    Call(dim=44, fewer_keys=5, bias="learnt"),
    Call(dim=48, fewer_keys=-40, bias="masks"),
    Call(dim=72, heads_k=2, bias="masks"),
]


def _tensors(call: Call, device: torch.device) -> list[torch.Tensor]:
    queries = _lengths_that_split(device)
    keys = queries - call.fewer_keys

    def rows(heads: int, length: int) -> torch.Tensor:
        return torch.randn(2, length, heads, call.dim, device=device).transpose(1, 2)

    shapes = (4, queries), (call.heads_k, keys), (call.heads_k, keys), (4, queries)
    return [rows(*each) for each in shapes]


def _bias(call: Call, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
    if not call.bias:
        return None
    bias = torch.randn(2, 4 if call.bias == "learnt" else 1, queries, keys, device=device)
    if call.bias == "masks":
        bias[:, :, :, keys // 2 :] = -math.inf
        bias[0, :, :, : keys // 3] = 0.0
    return bias.expand(2, 4, queries, keys)


def _is_learnt(bias: torch.Tensor) -> bool:
    return bias.stride(1) != 0


def _by_kernels(
    tensors: list[torch.Tensor], bias: torch.Tensor | None, causal: bool = False
) -> list[torch.Tensor | None]:
    with_dbias = bias is not None and _is_learnt(bias)
    scale = tensors[0].shape[-1] ** -0.5
    return by_triton(tensors, bias, causal=causal, with_dbias=with_dbias, scale=scale)


def _by_formula(
    tensors: list[torch.Tensor], bias: torch.Tensor | None, causal: bool, dtype: torch.dtype
) -> list[torch.Tensor]:
    scale = tensors[0].shape[-1] ** -0.5
    return by_formula(tensors, bias, dtype, causal=causal, scale=scale)


@pytest.fixture
def split_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched with parts, by name."""
    found = []
    run = triton_kernels._run

    def note(launches: Any) -> None:
        found.extend(
            each.kernel.__name__ for each in launches if each.constexprs.get("SPLIT", False)
        )
        run(launches)

    monkeypatch.setattr(triton_kernels, "_run", note)
    return found


def _expected_kernels(call: Call, device: torch.device) -> list[str]:
    of_backward = ["backward_keys_kernel", "backward_queries_kernel"]
    in_backward = device.type == "cpu" or call.dim in triton_sizes.SPLIT_BACKWARD_DIMS
    return ["forward_kernel", *(of_backward if in_backward else [])]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_attention_is_as_exact_as_native(
    call: Call, split_kernels: list[str], device: torch.device
) -> None:
    tensors = _tensors(call, device)
    bias = _bias(call, tensors[0].shape[2], tensors[1].shape[2], device)
    ours = _by_kernels(tensors, bias, call.causal)
    assert split_kernels == _expected_kernels(call, device)
    expected = _by_formula(tensors, bias, call.causal, torch.float64)
    native = _by_formula(tensors, bias, call.causal, torch.float32)
    # A mask that heads share has a gradient by the formula alone.
    for one, other, right in zip(ours, native, expected, strict=False):
        if one is not None:
            assert largest_error(one, right) <= 2 * largest_error(other, right) + 1e-6


# Not large scores: of a query with one that all others are nothing beside, gradients are rounding.
NOT_FINITE = [(of, value) for of in range(4) for value in (math.inf, -math.inf, math.nan)]


@pytest.mark.parametrize(("of", "value"), [*NOT_FINITE, (2, 1e30), (3, 1e30)])
def test_what_is_not_finite_or_large_reaches_what_it_reaches_natively(
    of: int, value: float, split_kernels: list[str], device: torch.device
) -> None:
    """Rows that are finite natively are finite, and right."""
    tensors = _tensors(Call(), device)
    tensors[of][0, 1, 5, 7] = value
    ours = _by_kernels(tensors, None)
    assert split_kernels == _expected_kernels(Call(), device)
    native = _by_formula(tensors, None, False, torch.float32)
    for name, one, right in zip(NAMES, ours, native, strict=False):
        if name == "logsumexp" or one is None:
            continue
        is_there = right.isfinite().all(-1) & (right.abs() < 1e20).all(-1)
        assert torch.equal(one.isfinite().all(-1) & (one.abs() < 1e20).all(-1), is_there)
        torch.testing.assert_close(one[is_there], right[is_there], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exponent", [-60, 60])
def test_values_of_any_size(exponent: int, device: torch.device) -> None:
    """bfloat16 has the range of float32: values, and their gradients, scale with it."""
    q, k, v, grad = _tensors(Call(), device)
    size = 2.0**exponent
    scaled, plain = (_by_kernels([q, k, each, grad], None)[:5] for each in (v * size, v))
    for name, one, other in zip(NAMES[:5], scaled, plain, strict=True):
        assert one is not None and other is not None
        times = size if name in ("out", "dq", "dk") else 1.0
        assert largest_error(one, other * times) <= 1e-6
