"""The gradient of an embedding's weight in Triton against float64, by native's own error.

On a machine without a GPU the kernels run in Triton's interpreter (tests/conftest.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import special_inputs
from errors import relative_error

import opgraft
from opgraft import Override
from opgraft_kernels.embedding import triton_kernels
from opgraft_kernels.embedding.overrides import condition, register

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
native = torch.ops.aten.embedding_dense_backward


@pytest.fixture
def override(dispatch_key: str) -> Override:
    (override,) = register(dispatch_key)
    return override


def _random(
    shape: tuple[int, ...], rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients, and indices."""
    torch.manual_seed(sum(shape) + rows + width)
    g = torch.randn(*shape, width, device=device).to(dtype)
    return g, torch.randint(rows, shape, device=device)


def _check(
    override: Override,
    g: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    padding_idx: int = -1,
    scaled: bool = False,
) -> torch.Tensor:
    """What native promises, and at most twice its error."""
    rest = (indices, rows, padding_idx, scaled)
    before = override.hits
    ours = native(g, *rest)
    assert override.hits == before + 1
    with opgraft.disabled():
        natives, right = native(g, *rest), native(g.double(), *rest)
    assert ours.shape == natives.shape and ours.dtype == natives.dtype
    assert ours.stride() == natives.stride()
    assert (
        relative_error(ours, right) <= 2 * relative_error(natives, right) + torch.finfo(g.dtype).eps
    )
    return ours


# ---------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("width", [1, 7, 130, 1000, 2056])
@pytest.mark.parametrize("rows", [1, 35])
def test_widths_and_rows(
    override: Override, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    _check(override, *_random((40,), rows, width, dtype, device), rows)


@pytest.mark.parametrize("tokens", [1, 64, 128, 129, 600])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_numbers_of_tokens(
    override: Override, rows: int, tokens: int, device: torch.device
) -> None:
    """One chunk and several, not whole ones; rows of several spans, and of none."""
    _check(override, *_random((tokens,), rows, 3, torch.float32, device), rows)


@pytest.mark.parametrize("shape", [(), (1, 1), (6, 7), (2, 3, 5)], ids=str)
def test_indices_of_any_shape(
    override: Override, shape: tuple[int, ...], device: torch.device
) -> None:
    _check(override, *_random(shape, 9, 12, torch.float32, device), 9)


def _indices(kind: str, tokens: int, rows: int) -> torch.Tensor:
    found = {
        "equal": torch.full((tokens,), rows - 1),
        "distinct": torch.randperm(rows)[:tokens],
        "ascending": torch.arange(tokens) * rows // tokens,
        "descending": rows - 1 - torch.arange(tokens) * rows // tokens,
        "mostly equal": torch.where(torch.arange(tokens) % 7 == 3, torch.arange(tokens) % rows, 5),
    }
    return found[kind]


@pytest.mark.parametrize("kind", ["equal", "distinct", "ascending", "descending", "mostly equal"])
@pytest.mark.parametrize(("padding_idx", "scaled"), [(-1, False), (5, False), (-1, True)])
def test_distributions(
    override: Override, kind: str, padding_idx: int, scaled: bool, device: torch.device
) -> None:
    g, _ = _random((200,), 300, 5, torch.float32, device)
    indices = _indices(kind, 200, 300).to(device)
    ours = _check(override, g, indices, 300, padding_idx, scaled)
    if padding_idx >= 0:
        assert not ours[padding_idx].any()


def test_a_row_of_thousands_of_tokens_is_nearer_than_by_native(
    override: Override, device: torch.device
) -> None:
    g, indices = _random((2000,), 2, 4, torch.float32, device)
    rest = (torch.where(indices == 0, 0, 3), 4, -1, False)
    ours = native(g + 10, *rest)
    with opgraft.disabled():
        right, natives = native((g + 10).double(), *rest), native(g + 10, *rest)
    assert override.hits == 1
    assert relative_error(ours, right) <= min(relative_error(natives, right), 5e-7)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_a_token_that_is_no_row_counts_for_none(
    index_dtype: torch.dtype, device: torch.device
) -> None:
    """Not by the op: on the CPU native writes out of bounds where it counts the tokens."""
    backward = triton_kernels.embedding_dense_backward
    g, indices = _random((140,), 10, 4, torch.float32, device)
    highest = torch.iinfo(index_dtype).max
    wrong = torch.tensor([-1, -10, 10, 11, 2**31 - 1, highest, -highest - 1], device=device)
    is_row = torch.arange(140, device=device) % 3 != 0
    some = torch.where(is_row, indices, wrong.repeat(20)).to(index_dtype)
    expected = backward(g[is_row], indices[is_row], 10, -1, True)
    assert backward(g, some, 10, -1, True).equal(expected)
    assert not backward(g, wrong.repeat(20), 10, -1, True).any()


def test_nothing_is_written_beside_the_gradient(device: torch.device) -> None:
    g, indices = _random((70,), 12, 5, torch.float32, device)
    indices[::9], indices[1] = 12, -4
    memory = torch.full((7 + 10 * 5 + 7,), 3.5, device=device)
    dw = memory[7:-7].view(10, 5)
    planned, launches = triton_kernels.plan(g, indices, 10, -1, False)
    for launch in launches:
        elsewhere = tuple(dw if each is planned else each for each in launch.arguments)
        launch._replace(arguments=elsewhere)()
    assert (memory[:7] == 3.5).all() and (memory[-7:] == 3.5).all()
    is_row = (indices >= 0) & (indices < 10)
    with opgraft.disabled():
        right = native(g[is_row].double(), indices[is_row], 10, -1, False)
    assert relative_error(dw, right) < 1e-6


def test_the_same_bits_every_time(override: Override, device: torch.device) -> None:
    g, indices = _random((300,), 4, 9, torch.float32, device)
    first = native(g, indices, 4, -1, False)
    assert all(native(g, indices, 4, -1, False).equal(first) for _ in range(2))
    assert override.hits == 3


def test_the_order_of_a_row_of_few_tokens_is_that_of_the_tokens(
    override: Override, device: torch.device
) -> None:
    g, indices = _random((130,), 40, 3, torch.float32, device)
    expected = torch.zeros(40, 3, device=device)
    for token, row in enumerate(indices.tolist()):
        expected[row] += g[token]
    assert native(g, indices, 40, -1, False).equal(expected)
    assert override.hits == 1


def test_special_values_stay_in_their_row(override: Override, device: torch.device) -> None:
    g, indices = torch.ones(130, 3, device=device), torch.arange(130, device=device) % 8
    g[0, 1], g[1, 2], g[2::8] = torch.nan, torch.inf, -0.0
    ours = native(g, indices, 8, -1, False)
    assert override.hits == 1
    with opgraft.disabled():
        torch.testing.assert_close(ours, native(g, indices, 8, -1, False), equal_nan=True)


LAYOUTS = {
    **special_inputs.LAYOUTS,
    "one element": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(override: Override, layout: str, device: torch.device) -> None:
    g, indices = _random((20,), 6, 24, torch.float32, device)
    _check(override, LAYOUTS[layout](g), indices.repeat_interleave(2)[::2], 6)


def test_scratch_memory_grows_by_the_square_root_of_tokens() -> None:
    for log2 in (10, 14, 18):
        sizes = triton_kernels.sizes_of(2**log2)
        assert sizes.places == 2**log2
        assert sizes.places // sizes.span <= 4 * 2 ** (log2 // 2)


def test_sizes_fit_together() -> None:
    around = (2**log2 + by for log2 in range(8, 31) for by in (-1, 0, 1))
    for tokens in (*range(1, 140), *around):
        sizes = triton_kernels.sizes_of(tokens)
        assert tokens <= sizes.places < tokens + sizes.chunk
        for part in (sizes.span, triton_kernels._SORTED, triton_kernels._MERGED):
            assert sizes.chunk % part == 0
        assert sizes.span % triton_kernels._SPAN_TOKENS == 0


# ---------------------------------------------------------------------------- through opgraft


def _gradient(indices: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    weight = weight.detach().requires_grad_()
    y = F.embedding(indices, weight, **options)
    factors = 1 / (1 + torch.arange(y.numel(), device=y.device).view_as(y))
    (dw,) = torch.autograd.grad(y, weight, factors.to(y.dtype))
    return dw


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": -2}, {"scale_grad_by_freq": True}], ids=str
)
def test_gradients(
    override: Override, options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    weight, indices = torch.randn(11, 6, device=device).to(dtype), torch.arange(12) * 5 % 11
    ours = _gradient(indices.view(3, 4).to(device), weight, **options)
    assert override.hits == 1
    with opgraft.disabled():
        expected = _gradient(indices.view(3, 4).to(device), weight, **options)
    torch.testing.assert_close(ours, expected)


def test_the_gradient_of_a_sum(override: Override, device: torch.device) -> None:
    """Autograd's gradient is one element, expanded."""
    embedding = torch.nn.Embedding(10, 4, padding_idx=2, device=device)
    embedding(torch.tensor([[1, 2], [1, 9]], device=device)).sum().backward()
    assert override.hits == 1
    expected = torch.zeros(10, 4, device=device)
    expected[1], expected[9] = 2.0, 1.0
    assert embedding.weight.grad is not None and embedding.weight.grad.equal(expected)


def test_sparse_gradients_are_natives(override: Override, device: torch.device) -> None:
    dw = _gradient(
        torch.tensor([1, 3, 1], device=device), torch.ones(5, 4, device=device), sparse=True
    )
    assert dw.is_sparse
    assert override.hits == 0


def _squares(weight: torch.Tensor) -> torch.Tensor:
    indices = torch.tensor([[1, 4, 1], [0, 4, 4]], device=weight.device)
    return F.embedding(indices, weight, padding_idx=0).square().sum()


TRANSFORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "grad": torch.func.grad(_squares),
    "vmap of grad": lambda w: torch.vmap(torch.func.grad(_squares))(torch.stack([w, 2 * w])),
    "grad of grad": torch.func.grad(lambda w: torch.func.grad(_squares)(w).square().sum()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(override: Override, transform: str, device: torch.device) -> None:
    weight = torch.randn(6, 3, device=device)
    ours = TRANSFORMS[transform](weight)
    assert override.hits >= 1
    with opgraft.disabled():
        torch.testing.assert_close(ours, TRANSFORMS[transform](weight))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(override: Override, backend: str, device: torch.device) -> None:
    weight = torch.randn(6, 3).requires_grad_()
    (expected,) = torch.autograd.grad(_squares(weight), weight)
    torch._dynamo.reset()
    compiled = torch.compile(_squares, backend=backend, fullgraph=True)
    (dw,) = torch.autograd.grad(compiled(weight), weight)
    torch.testing.assert_close(dw, expected)
    assert override.hits >= 1


# ---------------------------------------------------------------------------- the condition


def _fine() -> dict[str, Any]:
    return {
        "grad_output": torch.ones(4, 8),
        "indices": torch.zeros(4, dtype=torch.int64),
        "num_weights": 10,
        "padding_idx": -1,
        "scale_grad_by_freq": False,
    }


@pytest.mark.parametrize(
    "also",
    [
        {},
        {"indices": torch.zeros(4, dtype=torch.int32)},
        {"indices": torch.zeros(2, 2, dtype=torch.int64)},
        {"grad_output": torch.ones(2, 2, 8)},
        {"grad_output": torch.ones(4, 8, dtype=torch.float16)},
        {"grad_output": torch.ones(8, 4).t()},
        {"grad_output": torch.ones(()).expand(4, 8)},
        {"num_weights": 1},
        {"padding_idx": 3, "scale_grad_by_freq": True},
    ],
)
def test_condition_takes(also: dict[str, Any]) -> None:
    assert condition("CPU").holds({**_fine(), **also})


@pytest.mark.parametrize(
    "wrong",
    [
        {"grad_output": torch.ones(4, 8, dtype=torch.float64)},
        {"grad_output": torch.ones(4, 8, dtype=torch.bfloat16)},
        {"grad_output": torch.ones(3, 8)},
        {"grad_output": torch.ones(4, 0)},
        {"grad_output": torch.ones(())},
        {"grad_output": torch.ones(0, 8), "indices": torch.zeros(0, dtype=torch.int64)},
        {"indices": torch.zeros(4, dtype=torch.int16)},
        {"indices": torch.zeros(4)},
        {"num_weights": 0},
        {"num_weights": 2**30 + 1},
    ],
)
def test_condition_declines(wrong: dict[str, Any]) -> None:
    assert not condition("CPU").holds({**_fine(), **wrong})


# ------------------------------------------------------------------------------- the GPU alone


@pytest.mark.parametrize("device", [CUDA], indirect=True)
@pytest.mark.parametrize(
    ("tokens", "rows", "width"),
    [(16384, 128256, 2048), (16384, 32000, 4096), (16384, 50257, 1024), (100_003, 262144, 100)],
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_large(
    override: Override,
    tokens: int,
    rows: int,
    width: int,
    padded: bool,
    scaled: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """With a row of half of the tokens."""
    g, indices = _random((tokens,), rows, width, dtype, device)
    indices[tokens // 3 : tokens // 3 + tokens // 2] = 7
    ours = _check(override, g, indices, rows, 7 if padded else -1, scaled)
    assert native(g, indices, rows, 7 if padded else -1, scaled).equal(ours)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_more_than_2_to_31_elements(override: Override, device: torch.device) -> None:
    """Offsets past 32 bits, of what is read and of what is written."""
    tokens = rows = 2**18 + 64
    g = torch.ones(tokens, 2**13, device=device, dtype=torch.bfloat16)
    dw = native(g, rows - 1 - torch.arange(tokens, device=device), rows, -1, False)
    assert override.hits == 1
    assert dw.numel() > 2**31 and dw.eq(1).all()


@pytest.mark.gpu
def test_a_launch_plan_sees_the_values_of_each_call() -> None:
    (override,) = register("CUDA")
    device = torch.device("cuda")
    g, _ = _random((3000,), 100, 64, torch.float32, device)
    for seed in range(8):
        torch.manual_seed(seed)
        _check(override, g, torch.randint(1 + 30 * seed % 100, (3000,), device=device), 100)
    assert len(list(override.plans)) == 1
