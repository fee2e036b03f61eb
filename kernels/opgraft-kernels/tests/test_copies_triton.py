"""Copies to another dtype in Triton have native's bits.

On a machine without a GPU the kernel runs in Triton's interpreter (tests/conftest.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

import opgraft
from opgraft import Override
from opgraft_kernels.copies import triton_kernels
from opgraft_kernels.copies.overrides import register

LEAST = 4096  # elements that the interpreter takes


@pytest.fixture(autouse=True)
def override(dispatch_key: str) -> Iterator[Override]:
    (override,) = register(dispatch_key)
    yield override
    override.remove()


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def other(request: pytest.FixtureRequest, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Another dtype than `dtype`."""
    if request.param == dtype:
        pytest.skip("no other dtype")
    if device.type == "cpu" and request.param == torch.bfloat16:
        pytest.skip("the interpreter computes on the bits of bfloat16")
    return request.param


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Equal where the elements are; all NaN are."""
    canonical = torch.where(t.isnan(), torch.full_like(t, math.nan), t)
    return canonical.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _natively(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with opgraft.disabled():
        return call()


def _check(override: Override, x: torch.Tensor, other: torch.dtype, hits: int = 1) -> None:
    """Both ops that copy give native's bits in native's layout, and were hit."""
    with opgraft.disabled():
        expected = x.to(other)
        target = torch.zeros_like(expected)
    before = override.hits
    converted, copied = x.to(other), target.copy_(x)
    assert override.hits == before + 2 * hits
    assert copied is target
    with opgraft.disabled():
        assert converted.stride() == expected.stride()
        for each in (converted, copied):
            assert torch.equal(_bits(each), _bits(expected))


# ---------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("size", [LEAST, LEAST + 1, 2 * LEAST - 1, 3 * LEAST + 8])
def test_sizes(
    override: Override, size: int, dtype: torch.dtype, other: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(size)
    _check(override, torch.randn(size, device=device).to(dtype), other)


def test_every_16_bit_number(
    override: Override, dtype: torch.dtype, other: torch.dtype, device: torch.device
) -> None:
    if dtype.itemsize != 2:
        pytest.skip("there are 2**32 others")
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    _check(override, numbers.to(device), other)


def test_what_rounds_and_what_overflows(
    override: Override, other: torch.dtype, device: torch.device
) -> None:
    """Halfway between neighbours, beyond the largest number, and below the least."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = every.view(other).float()
    after = torch.nextafter(numbers, torch.tensor(math.inf))
    halfway = (numbers + torch.roll(numbers, 1)) / 2
    ends = torch.tensor([65504.0, 65519.9, 65520.0, 3.4e38, 2.0**-25, 2.0**-24.5, 1e-45, -0.0])
    if other == torch.float32:
        pytest.skip("nothing rounds")
    _check(override, torch.cat([numbers, after, halfway, ends, -ends]).to(device), other)


@pytest.mark.parametrize("shape", [(LEAST,), (2, 3, 1001), (1, LEAST, 1), (2, 3, 4, 5, 67)])
def test_shapes(
    override: Override, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    other = torch.float16 if dtype == torch.float32 else torch.float32
    _check(override, torch.randn(shape, device=device).to(dtype), other)


def test_channels_last(override: Override, dtype: torch.dtype, device: torch.device) -> None:
    other = torch.float16 if dtype == torch.float32 else torch.float32
    x = torch.randn(2, 8, 30, 20, device=device).to(dtype)
    _check(override, x.to(memory_format=torch.channels_last), other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", list(itertools.permutations((torch.float16, torch.bfloat16))))
def test_more_than_2_to_the_31_elements(
    override: Override, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter computes on the bits of bfloat16")
    x = torch.zeros(2**31 + 4099, dtype=dtypes[0], device=device)
    x[-4100:] = 3.0
    x[2**31 - 7] = 5.0
    before = override.hits
    y = x.to(dtypes[1])
    assert override.hits == before + 1
    assert y[-4100:].eq(3.0).all() and y[2**31 - 7] == 5.0 and y.sum(dtype=torch.float64) == 12305


# ---------------------------------------------------------------------------- what is native's


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.t(),
        lambda t: t[:, :-1],
        lambda t: t[:1].expand(t.shape),
        lambda t: t.flatten()[1:],
        lambda t: t.to(torch.float64),
        lambda t: t[:0],
    ],
    ids=["transposed", "sliced", "expanded", "misaligned", "float64", "empty"],
)
def test_other_layouts_and_dtypes_decline(
    override: Override,
    layout: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    with opgraft.disabled():
        x = layout(torch.randn(2 * LEAST // 64, 64, device=device).to(dtype))
        target = torch.zeros(x.shape, dtype=torch.float16, device=device)
    before = override.hits
    if dtype == torch.float16 and x.dtype == dtype:
        pytest.skip("one dtype")
    target.copy_(x)
    assert override.hits == before
    assert torch.equal(_bits(target), _bits(_natively(lambda: torch.zeros_like(target).copy_(x))))


def test_broadcast_declines(override: Override, device: torch.device) -> None:
    x = torch.randn(1, LEAST, device=device)
    target = torch.empty(2, LEAST, dtype=torch.float16, device=device).copy_(x)
    assert override.hits == 0
    assert torch.equal(target, _natively(x.half).expand(2, -1))


@pytest.mark.parametrize("shapes", [((LEAST, 2), (2, LEAST)), ((2, LEAST), (1, 2, LEAST))])
def test_other_shapes_of_as_many_elements_are_natives(
    override: Override, shapes: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device
) -> None:
    """The first cannot be broadcast: native's error; the second can."""
    target = torch.zeros(shapes[1], dtype=torch.float16, device=device)
    x = torch.randn(shapes[0], device=device)
    if len(shapes[0]) == len(shapes[1]):
        with pytest.raises(RuntimeError, match="must match"):
            target.copy_(x)
        assert not target.any()
    else:
        assert torch.equal(target.copy_(x)[0], _natively(x.half))


def test_what_overlaps_in_part_is_natives(override: Override, device: torch.device) -> None:
    """An error on CUDA; the CPU copies without one."""

    def copy(memory: torch.Tensor) -> torch.Tensor:
        return memory.copy_(memory.view(torch.float16)[: memory.numel()])

    memory = torch.arange(LEAST, device=device).float()
    if device.type == "cuda":
        with pytest.raises(RuntimeError, match="unsupported operation"):
            copy(memory)
        return
    expected = _natively(lambda: copy(memory.clone()))
    assert torch.equal(copy(memory), expected)


@pytest.mark.parametrize("shift", [0, 64])
def test_what_is_overwritten_where_it_is_read(
    override: Override, shift: int, device: torch.device
) -> None:
    """In place, and into the memory that follows."""
    if device.type == "cpu":
        pytest.skip("the interpreter computes on the bits of bfloat16")
    memory = torch.randn(2 * LEAST, device=device).to(torch.bfloat16)
    source = memory[:LEAST]
    start = LEAST + shift if shift else 0
    target = memory.view(torch.float16)[start : start + LEAST - shift]
    source = source[: target.numel()]
    expected = _natively(lambda: source.to(torch.float16))
    assert torch.equal(target.copy_(source), expected)


# ---------------------------------------------------------------------------- around it


def test_a_gradient_passes_through(override: Override, device: torch.device) -> None:
    x = torch.randn(64, 128, device=device, requires_grad=True)
    y = x.half()
    y.backward(torch.full_like(y, 3.0))
    assert override.hits == 2
    assert x.grad is not None and x.grad.dtype == torch.float32 and x.grad.eq(3.0).all()


def test_what_is_written_has_another_version(override: Override, device: torch.device) -> None:
    target = torch.zeros(LEAST, dtype=torch.float16, device=device)
    before = target._version
    target.copy_(torch.randn(LEAST, device=device))
    assert target._version == before + 1 and override.hits == 1


def test_several_threads_write_their_own(override: Override, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter runs a launch at a time")
    sources = [torch.full((LEAST,), float(n), device=device) for n in range(16)]
    with ThreadPoolExecutor(4) as pool:
        targets = list(pool.map(torch.Tensor.half, sources))
    for n, target in enumerate(targets):
        assert target.eq(n).all()
    assert override.hits == 16


def test_programs_are_as_many_as_blocks() -> None:
    for elements in (1, 1024, 1025, 2**31 + 1):
        meta = torch.empty(elements, dtype=torch.float16, device="meta")
        launch = triton_kernels.plan(meta, meta)
        block = launch.constexprs["BLOCK"]
        assert (launch.grid - 1) * block < elements <= launch.grid * block
