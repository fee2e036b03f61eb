"""Attention with boolean masks: ATen's op, the two ops that it is made of, and FlashAttention-4's
kernels with the bits of a mask."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from errors import largest_error

import opgraft
from opgraft import when
from opgraft_kernels.attention import boolean, boolean_ops, overrides, samples, triton_lists
from opgraft_kernels.attention.triton_lists import plan_boolean_lists

MASKS = samples._BOOLEAN_MASKS
LOWEST = (-math.inf, -65504.0)


def inputs(
    heads: int,
    heads_k: int,
    queries: int,
    keys: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> list[torch.Tensor]:
    """Query, key and value, laid out as a projection's output is seen."""
    return [
        torch.randn(2, length, n, dim, device=device).to(dtype).transpose(1, 2)
        for n, length in ((heads, queries), (heads_k, keys), (heads_k, keys))
    ]


def by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    lowest: float,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """0 for queries whose scores are -inf throughout."""
    q, k, v = (t.to(dtype) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = scale * (q @ k.mT) + torch.where(mask, 0.0, lowest).to(dtype)
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0)
    return weights @ v


def gradients_by_formula(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    lowest: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, ...]:
    """Of query, key and value, for the output's gradient."""
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (q, k, v))
    out = by_formula(q, k, v, mask, scale, lowest, dtype)
    return torch.autograd.grad(out, (q, k, v), grad.to(dtype))


def assert_as_right(
    ours: Iterable[torch.Tensor], native: Iterable[torch.Tensor], right: Iterable[torch.Tensor]
) -> None:
    """At most twice the error that native has, and some roundings."""
    for number, (one, other, expected) in enumerate(zip(ours, native, right, strict=True)):
        error, yardstick = (largest_error(each, expected) for each in (one, other))
        assert error <= 2 * yardstick + 2 * torch.finfo(one.dtype).eps, number


# ------------------------------------------------------------------ the op, on the CPU


@pytest.fixture
def on_cpu() -> Iterator[opgraft.Override]:
    """The override of ATen's op, whose own op is computed natively there."""
    override = opgraft.register_op_override(
        "aten",
        "scaled_dot_product_attention",
        "CPU",
        boolean.attention,
        cond=when.dtype("attn_mask", torch.bool),
        autograd="impl",
        compile="inductor",
        name="boolean masks",
    )
    yield override
    override.remove()


attend = F.scaled_dot_product_attention


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads_k", "scale"), [(4, None), (2, 0.5)])
def test_attention_is_as_natively(
    on_cpu: opgraft.Override, name: str, dtype: torch.dtype, heads_k: int, scale: float | None
) -> None:
    q, k, v = inputs(4, heads_k, 20, 24, 16, dtype)
    mask = samples.boolean_mask(name, 2, 20, 24, torch.device("cpu"))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": heads_k != 4}
    ours = attend(q, k, v, attn_mask=mask, **options)
    assert on_cpu.hits == 1
    with opgraft.disabled():
        expected = attend(q, k, v, attn_mask=mask, **options)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_see_what_it_calls_natively(on_cpu: opgraft.Override, transform: Any) -> None:
    q, k, v = inputs(2, 2, 6, 6, 8, torch.float64)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()

    def run(x: torch.Tensor) -> torch.Tensor:
        return attend(x, k[0], v[0], attn_mask=mask).square().sum()

    given = q if transform is torch.func.vmap else q[0]
    found = transform(run)(given)
    assert on_cpu.hits == 0
    with opgraft.disabled():
        torch.testing.assert_close(found, transform(run)(given))


def test_a_compiled_graph_has_what_the_op_calls_natively(on_cpu: opgraft.Override) -> None:
    q, k, v = inputs(2, 2, 16, 16, 8, torch.float32)
    mask = torch.ones(16, 16, dtype=torch.bool).tril()

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return attend(*tensors, attn_mask=mask)

    found = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
    assert on_cpu.hits == 0
    torch.testing.assert_close(found, run(q, k, v))
    assert on_cpu.hits == 1


def test_where_another_backend_was_asked_for_it_computes(
    on_cpu: opgraft.Override, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(4, 2, 9, 7, 8, torch.float64)
    mask = torch.rand(2, 1, 9, 7) < 0.7
    monkeypatch.setattr(boolean, "_is_like_native", lambda *_: False)
    monkeypatch.delattr(boolean, "_forward")
    ours = attend(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)
    assert on_cpu.hits == 1
    with opgraft.disabled():
        expected = attend(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("needs", [(), ("key",), ("query", "key", "value")], ids=str)
@pytest.mark.parametrize("with_grad", [True, False])
def test_the_logsumexp_is_computed_for_a_backward_alone(
    monkeypatch: pytest.MonkeyPatch, needs: tuple[str, ...], with_grad: bool
) -> None:
    q, k, v = inputs(2, 2, 9, 7, 8, torch.float32)
    for name, each in {"query": q, "key": k, "value": v}.items():
        each.requires_grad_(name in needs)
    noted: list[bool] = []

    def note(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        noted.append(given[-1])
        return boolean_ops.attention(*given)

    monkeypatch.setattr(boolean, "_forward", note)
    mask = torch.ones(9, 7, dtype=torch.bool)
    with torch.set_grad_enabled(with_grad):
        boolean.attention(q, k, v, mask, 0.0, False, scale=None, enable_gqa=False)
    assert noted == [with_grad and len(needs) > 0]


# ------------------------------------------------------------------ its derivative, on the CPU


@pytest.fixture
def in_training(on_cpu: opgraft.Override) -> Iterator[list[opgraft.Override]]:
    """The overrides of ATen's op, and of the two that it and its derivative call."""
    parts = [
        opgraft.register_op_override(
            *(boolean_ops.NAMESPACE, name, "CPU", impl), name=name, unconditional_override=True
        )
        for name, impl in (
            (boolean_ops.FORWARD, boolean_ops.attention),
            (boolean_ops.BACKWARD, boolean_ops.attention_backward),
        )
    ]
    yield [on_cpu, *parts]
    for each in parts:
        each.remove()


def hits(found: list[opgraft.Override]) -> list[int]:
    return [each.hits for each in found]


def attend_and_differentiate(
    tensors: list[torch.Tensor], grad: torch.Tensor, mask: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of query, key and value."""
    given = [t.detach().requires_grad_() for t in tensors]
    out = attend(*given, attn_mask=mask, **options)
    return (out.detach(), *torch.autograd.grad(out, given, grad))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads_k", "scale"), [(4, None), (2, 0.5)])
def test_gradients_are_as_natively(
    in_training: list[opgraft.Override],
    name: str,
    dtype: torch.dtype,
    heads_k: int,
    scale: float | None,
) -> None:
    tensors = inputs(4, heads_k, 20, 24, 16, dtype)
    grad = torch.randn_like(tensors[0])
    mask = samples.boolean_mask(name, 2, 20, 24, torch.device("cpu"))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": heads_k != 4}
    ours = attend_and_differentiate(tensors, grad, mask, **options)
    assert hits(in_training) == [1, 1, 1]
    with opgraft.disabled():
        expected = attend_and_differentiate(tensors, grad, mask, **options)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_gradcheck(in_training: list[opgraft.Override]) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(2, 2, 5, 6, 4, torch.float64))
    mask = samples.boolean_mask("causal", 2, 5, 6, torch.device("cpu"))
    assert torch.autograd.gradcheck(lambda *given: attend(*given, attn_mask=mask), (q, k, v))
    assert all(hits(in_training))


def test_differentiating_twice_is_an_error(in_training: list[opgraft.Override]) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(1, 1, 4, 4, 8, torch.float32))
    out = attend(q, k, v, attn_mask=torch.ones(4, 4, dtype=torch.bool))
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dq.sum(), q)
    assert hits(in_training) == [1, 1, 1]


def test_only_some_inputs_need_a_gradient(in_training: list[opgraft.Override]) -> None:
    q, k, v = inputs(2, 2, 9, 7, 8, torch.float32)
    grad = torch.randn_like(q)
    v.requires_grad_()
    mask = torch.rand(2, 1, 9, 7) < 0.7
    mask[..., 0] = True
    attend(q, k, v, attn_mask=mask).backward(grad)
    assert hits(in_training) == [1, 1, 1] and v.grad is not None and q.grad is None
    expected = gradients_by_formula(grad, q, k, v, mask, 8**-0.5, -math.inf)[2]
    torch.testing.assert_close(v.grad, expected.float())


def test_checkpointing(in_training: list[opgraft.Override]) -> None:
    q, k, v = inputs(2, 2, 9, 7, 8, torch.float32)
    grad = torch.randn_like(q)
    mask = torch.ones(9, 7, dtype=torch.bool)
    q.requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return attend(2 * x, k, v, attn_mask=mask)

    checkpoint(block, q, use_reentrant=False).backward(grad)
    assert hits(in_training) == [2, 2, 1] and q.grad is not None
    (expected,) = torch.autograd.grad(block(q), q, grad)
    torch.testing.assert_close(q.grad, expected)


# A buffer's shape, and the mask that is made of it.
BUFFERS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "of queries and keys": ((2, 1, 9, 7), lambda buffer: buffer),
    "of keys": ((2, 1, 1, 7), lambda buffer: buffer),
    "expanded": ((2, 1, 1, 7), lambda buffer: buffer.expand(2, 1, 9, 7)),
    "cut": ((2, 1, 9, 12), lambda buffer: buffer[..., :7]),
    "of a matrix": ((9, 7), lambda buffer: buffer),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_mask_may_be_written_to_before_the_backward(
    in_training: list[opgraft.Override], name: str
) -> None:
    """As natively: a buffer has the mask of the next batch by then."""
    tensors = inputs(2, 2, 9, 7, 8, torch.float32)
    grad = torch.randn_like(tensors[0])
    shape, mask_of = BUFFERS[name]
    first, second = torch.rand(2, *shape) < 0.7

    def run() -> tuple[torch.Tensor, ...]:
        given, buffer = [t.detach().requires_grad_() for t in tensors], first.clone()
        out = attend(*given, attn_mask=mask_of(buffer))
        buffer.copy_(second)
        return torch.autograd.grad(out, given, grad)

    ours = run()
    assert hits(in_training) == [1, 1, 1]
    with opgraft.disabled():
        torch.testing.assert_close(ours, run())


@pytest.mark.parametrize("name", BUFFERS)
def test_a_mask_may_be_made_in_inference_mode(
    in_training: list[opgraft.Override], name: str
) -> None:
    tensors = inputs(2, 2, 9, 7, 8, torch.float32)
    grad = torch.randn_like(tensors[0])
    shape, mask_of = BUFFERS[name]
    with torch.inference_mode():
        mask = mask_of(torch.rand(shape) < 0.7)
    ours = attend_and_differentiate(tensors, grad, mask)
    assert hits(in_training) == [1, 1, 1]
    with opgraft.disabled():
        native = attend_and_differentiate(tensors, grad, mask)
    torch.testing.assert_close(ours, native)


@pytest.mark.parametrize(("name", "stored"), [("expanded", 14), ("cut", 126), ("of keys", 14)])
def test_what_is_saved_of_a_mask_is_what_is_not_broadcast(
    in_training: list[opgraft.Override], name: str, stored: int
) -> None:
    """A byte for each of its elements in memory, not for each score."""
    tensors = [each.requires_grad_() for each in inputs(2, 2, 9, 7, 8, torch.float32)]
    shape, mask_of = BUFFERS[name]
    saved: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        attend(*tensors, attn_mask=mask_of(torch.rand(shape) < 0.7))
    (mask,) = (each for each in saved if each.dtype is torch.bool)
    assert hits(in_training) == [1, 1, 0] and mask.untyped_storage().nbytes() == stored


@pytest.mark.parametrize("with_grad", [True, False])
def test_a_mask_is_copied_for_a_backward_alone(
    with_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(2, 2, 9, 7, 8, torch.float32)
    noted: list[torch.Tensor] = []

    def note(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        noted.append(given[3])
        return boolean_ops.attention(*given)

    monkeypatch.setattr(boolean, "_forward", note)
    mask = torch.ones(9, 7, dtype=torch.bool)
    q.requires_grad_(with_grad)
    boolean.attention(q, k, v, mask, 0.0, False, scale=None, enable_gqa=False)
    assert (noted[0] is mask) != with_grad


def test_where_another_backend_was_asked_for_gradients_are_its_own(
    in_training: list[opgraft.Override], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs(4, 2, 9, 7, 8, torch.float64)
    grad, mask = torch.randn_like(tensors[0]), torch.rand(2, 1, 9, 7) < 0.7
    monkeypatch.setattr(boolean, "_is_like_native", lambda *_: False)
    ours = attend_and_differentiate(tensors, grad, mask, enable_gqa=True, scale=0.3)
    assert hits(in_training)[1:] == [0, 0]
    with opgraft.disabled():
        expected = attend_and_differentiate(tensors, grad, mask, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(ours, expected)


# ------------------------------------------------------------------ what ATen's op asks about


@pytest.mark.parametrize("choice", range(-1, 5))
def test_on_a_gpu_cudnn_alone_treats_empty_rows_alike(choice: int) -> None:
    assert boolean._is_like_native(choice, "cuda") == (choice == 3)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.10.1", [-65504.0, -65536.0]),
        ("2.11.0+cu130", [-65504.0, -65536.0]),
        ("2.11.1+cu130", [None, None]),
        ("2.12.0", [-math.inf, -math.inf]),
        ("2.13.0+cpu", [-math.inf, -math.inf]),
    ],
)
def test_until_torch_2_12_what_is_false_is_a_number_for_cudnn(
    version: str, expected: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or was; of versions of which nobody looked nothing is taken."""
    boolean._lowest.cache_clear()
    monkeypatch.setattr(torch, "__version__", version)
    found = [boolean._lowest(dtype, "cuda") for dtype in (torch.float16, torch.bfloat16)]
    boolean._lowest.cache_clear()
    assert found == expected


# ------------------------------------------------------------------ the two ops that it is made of


@pytest.mark.parametrize("lowest", LOWEST)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads_k", [1, 4])
def test_native_kernels_are_right(name: str, lowest: float, heads_k: int) -> None:
    q, k, v = inputs(4, heads_k, 19, 23, 8, torch.float64)
    mask = samples.boolean_mask(name, 2, 19, 23, torch.device("cpu"))
    out, logsumexp = boolean_ops.attention(q, k, v, mask, 0.3, lowest, True)
    torch.testing.assert_close(out, by_formula(q, k, v, mask, 0.3, lowest))
    scores = 0.3 * (q @ k.repeat_interleave(4 // heads_k, 1).mT) + torch.where(mask, 0.0, lowest)
    expected = scores.logsumexp(-1)
    expected = torch.where(expected == -math.inf, math.inf, expected)
    torch.testing.assert_close(logsumexp, expected)
    grad = torch.randn_like(out)
    found = boolean_ops.attention_backward(grad, q, k, v, out, logsumexp, mask, 0.3, lowest)
    torch.testing.assert_close(found, gradients_by_formula(grad, q, k, v, mask, 0.3, lowest))


def inputs_with_large_scores(
    heads_k: int, dim: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[list[torch.Tensor], torch.Tensor, float]:
    """Query, key and value, a mask whose first queries see nothing, and a scale, by which the
    scores of those are about 1600 and -1600. exp of 12 is infinite in float16, of 89 in float32 and
    bfloat16, of 710 in float64."""
    queries, keys, size = 64, 72, 20.0
    q, k, v = inputs(4, heads_k, queries, keys, dim, dtype, device)
    mask = samples.boolean_mask("causal", 2, queries, keys, torch.device(device))
    q = torch.where(mask.any(-1, keepdim=True), q, torch.full_like(q, size))
    k = k + size * (1 - 2 * (torch.arange(keys, device=device) % 2))[:, None].to(dtype)
    return [q, k, v], mask, 4.0 / dim


@pytest.mark.parametrize("heads_k", [1, 4])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_large_scores_of_queries_without_a_key_leave_gradients_alone(
    in_training: list[opgraft.Override], dtype: torch.dtype, heads_k: int
) -> None:
    """As natively, where exp of such a score is infinite."""
    tensors, mask, scale = inputs_with_large_scores(heads_k, 16, dtype, "cpu")
    grad = torch.randn_like(tensors[0])
    options: dict[str, Any] = {"scale": scale, "enable_gqa": heads_k != 4}
    ours = attend_and_differentiate(tensors, grad, mask, **options)
    assert hits(in_training) == [1, 1, 1]
    with opgraft.disabled():
        native = attend_and_differentiate(tensors, grad, mask, **options)
    given = (*tensors, mask, scale, -math.inf)
    right = (by_formula(*given), *gradients_by_formula(grad, *given))
    assert_as_right(ours, native, right)


def test_a_logsumexp_that_is_not_wanted_is_empty() -> None:
    q, k, v = inputs(4, 2, 9, 7, 8, torch.float32)
    mask = torch.rand(2, 1, 9, 7) < 0.7
    out, logsumexp = boolean_ops.attention(q, k, v, mask, 0.3, -math.inf, False)
    assert logsumexp.shape == (0,) and logsumexp.dtype == torch.float32
    assert out.equal(boolean_ops.attention(q, k, v, mask, 0.3, -math.inf, True)[0])


def test_gradients_without_a_logsumexp_are_an_error() -> None:
    q, k, v = (t.requires_grad_() for t in inputs(4, 2, 9, 7, 8, torch.float32))
    mask = torch.rand(2, 1, 9, 7) < 0.7
    forward = getattr(torch.ops.opgraft_kernels, boolean_ops.FORWARD)
    out, _ = forward(q, k, v, mask, 0.3, -math.inf, False)
    with pytest.raises(ValueError, match="compute_logsumexp=True"):
        out.sum().backward()


@pytest.mark.parametrize("shape", [(2, 1, 1, 500), (1, 1, 400, 500), (2, 4, 400, 500)])
def test_a_broadcast_mask_stays_one(shape: tuple[int, ...]) -> None:
    """While nothing is compiled, memory is short."""
    q, k, v = inputs(4, 4, 400, 500, 8, torch.float32)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(shape)
    made: list[int] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.where.self:
                made.append(found.numel())
            return found

    with Noting():
        out, lse = boolean_ops.attention(q, k, v, mask, 0.3, -math.inf, True)
        boolean_ops.attention_backward(out, q, k, v, out, lse, mask, 0.3, -math.inf)
    assert made == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_metadata_is_native_s(dtype: torch.dtype) -> None:
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    for q, k, v in (inputs(4, 2, 7, 9, 8, dtype), [torch.randn(2, 4, n, 8) for n in (7, 9, 9)]):
        for wanted in (False, True):
            given: tuple[Any, ...] = (q, k, v, mask, 0.3, -math.inf, wanted)
            out, lse = boolean_ops.attention(*given)
            expect_metadata(boolean_ops.FORWARD, given, (out, lse))
        given = (out, q, k, v, out, lse, mask, 0.3, -math.inf)
        expect_metadata(boolean_ops.BACKWARD, given, boolean_ops.attention_backward(*given))


def expect_metadata(op: str, given: tuple[Any, ...], found: tuple[torch.Tensor, ...]) -> None:
    on_meta = (each.to("meta") if isinstance(each, torch.Tensor) else each for each in given)
    expected = getattr(torch.ops.opgraft_kernels, op)(*on_meta)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_the_backward_names_what_it_returns() -> None:
    schema = getattr(torch.ops.opgraft_kernels, boolean_ops.BACKWARD).default._schema
    assert [each.name for each in schema.returns] == ["grad_query", "grad_key", "grad_value"]


# ------------------------------------------------------------------ lists of tiles


#: Of queries and keys; and the queries that a backward's have.
TILES, BACKWARD_ROWS = ((128, 128), (192, 128), (128, 64)), (128,)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [128, 0])
def test_what_is_in_no_list_has_no_probability(
    seed: int, most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries without a key included, which attend to all if a number stands for False."""
    monkeypatch.setattr(triton_lists, "_MOST_BY_KEY", most)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    lowest, name = LOWEST[seed % 2], rng.choice(MASKS)
    queries, keys = rng.choice(((256, 256), (129, 450), (450, 200)))
    mask = samples.boolean_mask(name, 2, queries, keys, torch.device("cpu"))
    if rng.random() < 0.5:
        mask = mask.expand(2, 1, queries, keys).contiguous()
    wide = mask.expand(2, 2, queries, keys)
    counts = torch.softmax(torch.where(wide, 0.0, lowest), -1).nan_to_num(0.0) > 0
    logsumexp = torch.randn(2, 2, queries)
    for (rows, cols), by_keys in itertools.product(TILES, (False, True)):
        if by_keys and rows not in BACKWARD_ROWS:
            continue
        of_backward = (logsumexp.to(device),) if by_keys else ()
        lists, usable, launches, _ = plan_boolean_lists(
            wide.to(device), rows, cols, lowest, *of_backward
        )
        for launch in launches:
            launch()
        if by_keys:
            assert usable is not None
            padded = F.pad(logsumexp, (0, -queries % rows), value=math.inf)
            assert usable.cpu().equal(padded)
        for batch, head, row in itertools.product(*map(range, lists.shape[:3])):
            with_mask, without = (
                each[1 : 1 + each[0]].tolist() for each in lists[batch, head, row]
            )
            assert with_mask == sorted(with_mask) and without == sorted(without)
            for tile in range(lists.shape[-1] - 1):
                of_queries, of_keys = (tile, row) if by_keys else (row, tile)
                place = (
                    *(batch, head, slice(of_queries * rows, (of_queries + 1) * rows)),
                    slice(of_keys * cols, (of_keys + 1) * cols),
                )
                is_listed = tile in with_mask or tile in without
                assert is_listed or not counts[place].any()
                is_whole = wide[place].all() and (of_keys + 1) * cols <= keys
                assert tile not in without or is_whole


@pytest.mark.parametrize("lowest", LOWEST)
def test_of_padding_what_is_false_is_in_no_list(lowest: float, device: torch.device) -> None:
    mask = torch.zeros(2, 1, 1, 512, dtype=torch.bool)
    mask[0], mask[1, ..., :256] = True, True
    lists, _, launches, _ = plan_boolean_lists(
        mask.to(device).expand(2, 2, 512, 512), 128, 128, lowest
    )
    for launch in launches:
        launch()
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["_list_by_key_kernel"]
    assert lists[0, 0, 0, :, 0].tolist() == [0, 4] and lists[1, 1, 3, :, 0].tolist() == [0, 2]


@pytest.mark.parametrize("lowest", LOWEST)
def test_of_padding_a_backward_lists_no_tile_of_its_keys(
    lowest: float, device: torch.device
) -> None:
    """And reads the logsumexp as it is, where it is of whole tiles."""
    mask = torch.zeros(2, 1, 1, 512, dtype=torch.bool)
    mask[0], mask[1, ..., :256] = True, True
    logsumexp = torch.randn(2, 2, 512, device=device)
    lists, usable, launches, _ = plan_boolean_lists(
        mask.to(device).expand(2, 2, 512, 512), 128, 128, lowest, logsumexp
    )
    for launch in launches:
        launch()
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["_list_by_key_kernel"] and usable is logsumexp
    assert lists[1, 1, :, :, 0].tolist() == [[0, 4], [0, 4], [0, 0], [0, 0]]


@pytest.mark.parametrize("keys", [128, 300, 301, 64])
@pytest.mark.parametrize("queries", [1, 130])
@pytest.mark.parametrize("byte", [1, 2, 0x80, 0xFF])
def test_bits_are_the_mask_s(keys: int, queries: int, byte: int, device: torch.device) -> None:
    """Read in fours where the rows allow it; and whatever number stands for True."""
    mask = torch.rand(2, 1, queries, keys) < 0.5
    stored = (mask * byte).to(torch.uint8).view(torch.bool).to(device)
    wide = stored.expand(2, 3, 130, keys)
    _, _, launches, bits = plan_boolean_lists(wide, 128, 128, -math.inf)
    for launch in launches:
        launch()
    assert launches[0].constexprs["WIDE"] == (4 if keys % 4 == 0 else 1)
    assert bits is not None and bits.shape == (2, 3, 130, 4 * -(-keys // 128))
    found = (bits.cpu()[..., None] >> torch.arange(32)) & 1
    found = found.flatten(-2)[..., :keys].bool()
    assert found.equal(mask.expand(2, 3, 130, keys))


# ------------------------------------------------------------------ which calls are taken


def call(**changes: Any) -> dict[str, Any]:
    """A call of ATen's op that is taken on Hopper, as arguments by name."""
    q, k, v = inputs(4, 4, 256, 300, 64, torch.bfloat16)
    mask = torch.ones(2, 1, 1, 300, dtype=torch.bool)
    named = {"query": q, "key": k, "value": v, "attn_mask": mask, "dropout_p": 0.0}
    return {**named, "is_causal": False, "scale": None, "enable_gqa": False, **changes}


@pytest.fixture
def condition(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without what is about the device."""
    is_half = when.dtype("query", torch.float16, torch.bfloat16)
    monkeypatch.setattr(overrides, "_hopper", lambda: is_half)
    return overrides.boolean_condition()


TRUE = torch.ones(2, 1, 256, 300, dtype=torch.bool)
TAKEN: dict[str, dict[str, Any]] = {
    "of keys": {},
    "of queries and keys": {"attn_mask": TRUE},
    "of one batch": {"attn_mask": TRUE[:1]},
    "expanded": {"attn_mask": TRUE[:1].expand(2, 4, 256, 300)},
    "cut": {"attn_mask": torch.ones(2, 1, 256, 320, dtype=torch.bool)[..., :300]},
    "a scale": {"scale": 0.5},
}
LEFT: dict[str, dict[str, Any]] = {
    "no mask": {"attn_mask": None},
    "an additive one": {"attn_mask": TRUE.bfloat16()},
    "of each head": {"attn_mask": TRUE.repeat(1, 4, 1, 1)},
    "of a matrix": {"attn_mask": TRUE[0, 0]},
    "transposed": {"attn_mask": TRUE.mT.contiguous().mT},
    "of one key for all": {"attn_mask": TRUE[..., :1]},
    "of other keys": {"attn_mask": torch.ones(2, 1, 1, 299, dtype=torch.bool)},
    "of other queries": {"attn_mask": TRUE[:, :, :255]},
    "dropout": {"dropout_p": 0.1},
    "causal besides": {"is_causal": True},
    "a negative scale": {"scale": -1.0},
    "a tiny scale": {"scale": 1e-8},
    "float32": {"query": torch.randn(2, 4, 256, 64)},
    "groups that it was not told of": {
        name: torch.randn(2, 2, 300, 64).bfloat16() for name in ("key", "value")
    },
    "few queries": {"query": torch.randn(2, 4, 8, 64).bfloat16()},
}


@pytest.mark.parametrize("name", TAKEN)
def test_masks_that_heads_share_are_taken(condition: Any, name: str) -> None:
    assert condition.holds(call(**TAKEN[name]))


@pytest.mark.parametrize("name", LEFT)
def test_other_calls_are_left_to_native(condition: Any, name: str) -> None:
    assert not condition.holds(call(**LEFT[name]))


def test_groups_are_taken_where_they_are_asked_for(condition: Any) -> None:
    assert condition.holds(call(**LEFT["groups that it was not told of"], enable_gqa=True))


@pytest.mark.parametrize("op", overrides._PARTS)
def test_the_ops_that_it_is_made_of_take_nothing_that_would_be_read_out_of_bounds(
    op: overrides._Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_half = when.dtype("query", torch.float16, torch.bfloat16)
    monkeypatch.setattr(overrides, "_hopper", lambda: is_half)
    condition = overrides._is_right_of_boolean(op)
    given = {name: call()[name] for name in ("query", "key", "value")}
    given |= {"mask": TRUE, "scale": 0.1, "lowest": -math.inf}
    if op.is_backward:
        out, logsumexp = torch.empty(2, 4, 256, 64).bfloat16(), torch.empty(2, 4, 256)
        given |= {"out": out, "grad_out": out, "logsumexp": logsumexp}
        for other in (
            *(logsumexp[:1], logsumexp.flatten(), logsumexp[..., None], logsumexp.double()),
            torch.empty(2, 4, 512)[..., ::2],
        ):
            assert not condition.holds({**given, "logsumexp": other})
        assert not condition.holds({**given, "grad_out": out[:, :, 1:]})
    assert condition.holds(given)
    assert not condition.holds({**given, "mask": TRUE[..., :299]})
    assert not condition.holds({**given, "mask": TRUE[:, :, :255]})
    assert not condition.holds({**given, "mask": TRUE.bfloat16()})


@pytest.mark.crossovers
def test_samples_are_of_their_cells() -> None:
    crossover = overrides._crossover(overrides._SDPA, overrides._CUTEDSL_BOOLEAN)
    assert "for_all_heads" not in crossover.features
    for for_all_queries, fills in itertools.product((0, 1), (0, 1)):
        cell = {"rows": 2**12, "keys": 128, "dim": 64, "for_all_queries": for_all_queries}
        cell["fills_tiles"] = fills
        assert crossover.calls is not None
        for found in crossover.calls(torch.device("cpu"), **cell):
            of_call = {name: each.evaluate(found) for name, each in crossover.features.items()}
            assert of_call | {"rows": 0, "keys": 0} == cell | {"rows": 0, "keys": 0}
            assert found["attn_mask"].dtype == torch.bool and not found["attn_mask"].all()


# ------------------------------------------------------------------ on a GPU


@pytest.fixture
def on_hopper() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    pytest.importorskip("flash_attn.cute")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("lowest", LOWEST)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("dim", "heads_k", "queries", "keys", "dtype"),
    [
        (64, 4, 512, 512, torch.bfloat16),
        (128, 2, 300, 333, torch.float16),
        (72, 4, 640, 640, torch.bfloat16),
        (96, 1, 200, 1000, torch.bfloat16),
        (256, 4, 257, 512, torch.bfloat16),
    ],
    ids=str,
)
def test_kernels_are_right(
    dim: int,
    heads_k: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    name: str,
    lowest: float,
    on_hopper: torch.device,
) -> None:
    q, k, v = inputs(4, heads_k, queries, keys, dim, dtype, on_hopper)
    mask = samples.boolean_mask(name, 2, queries, keys, on_hopper)
    by, given = "cutedsl_kernels", (q, k, v, mask, dim**-0.5, lowest)
    # Of queries with nothing but low numbers the scores in float32 are too coarse for any backward
    # that keeps the logsumexp alone.
    grad = torch.randn_like(q).masked_fill(~mask.any(-1, keepdim=True), 0.0)
    out, lse = boolean_ops.attention_by(by, *given, True)
    gradients = boolean_ops.attention_backward_by(by, grad, q, k, v, out, lse, *given[3:])
    expected, expected_lse = boolean_ops.attention(*given, True)
    native = boolean_ops.attention_backward(grad, q, k, v, expected, expected_lse, *given[3:])
    right = (by_formula(*given), *gradients_by_formula(grad, *given))
    assert_as_right((out, *gradients), (expected, *native), right)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-2)
    found, _ = boolean_ops.attention_by(by, *given, False)
    assert_as_right([found], [expected], right[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("heads_k", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_scores_of_queries_without_a_key_leave_gradients_alone_on_a_gpu(
    dtype: torch.dtype, heads_k: int, on_hopper: torch.device
) -> None:
    """After either forward, and by either backward."""
    tensors, mask, scale = inputs_with_large_scores(heads_k, 64, dtype, on_hopper)
    grad, given = torch.randn_like(tensors[0]), (*tensors, mask, scale, -math.inf)
    native = boolean_ops.attention, boolean_ops.attention_backward
    ours = (
        partial(boolean_ops.attention_by, "cutedsl_kernels"),
        partial(boolean_ops.attention_backward_by, "cutedsl_kernels"),
    )
    right = (by_formula(*given), *gradients_by_formula(grad, *given))
    coarse = (by_formula(*given, dtype=dtype), *gradients_by_formula(grad, *given, dtype=dtype))
    for (forward, _), (_, backward) in itertools.product((native, ours), repeat=2):
        out, lse = forward(*given, True)
        gradients = backward(grad, *tensors, out, lse, *given[3:])
        assert_as_right((out, *gradients), coarse, right)


def lowest_on_gpu(dtype: torch.dtype) -> float:
    """What native adds where a mask is False."""
    lowest = boolean._lowest(dtype, "cuda")
    if lowest is None:
        pytest.skip("not known of this torch")
    return lowest


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_sdpa_is_as_natively(name: str, on_hopper: torch.device) -> None:
    """Queries without a key included."""
    found = overrides.register_boolean(by_table=False)
    q, k, v = inputs(4, 4, 640, 640, 64, torch.bfloat16, on_hopper)
    mask = samples.boolean_mask(name, 2, 640, 640, on_hopper)
    for _ in range(5):
        ours = attend(q, k, v, attn_mask=mask)
    assert hits(found) == [5, 5, 0]
    with opgraft.disabled():
        native = attend(q, k, v, attn_mask=mask)
    right = by_formula(q, k, v, mask, 0.125, lowest_on_gpu(q.dtype))
    assert_as_right([ours], [native], [right])


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_sdpa_in_training_is_as_natively(name: str, on_hopper: torch.device) -> None:
    found = overrides.register_boolean(by_table=False)
    tensors = inputs(4, 4, 640, 640, 64, torch.bfloat16, on_hopper)
    mask = samples.boolean_mask(name, 2, 640, 640, on_hopper)
    grad = torch.randn_like(tensors[0]).masked_fill(~mask.any(-1, keepdim=True), 0.0)
    for _ in range(5):
        ours = attend_and_differentiate(tensors, grad, mask)
    assert hits(found) == [5, 5, 5]
    with opgraft.disabled():
        native = attend_and_differentiate(tensors, grad, mask)
    given = (*tensors, mask, 0.125, lowest_on_gpu(grad.dtype))
    assert_as_right(ours, native, (by_formula(*given), *gradients_by_formula(grad, *given)))


@pytest.mark.gpu
def test_what_a_mask_removes_reaches_nothing(on_hopper: torch.device) -> None:
    q, k, v = inputs(4, 4, 512, 512, 64, torch.bfloat16, on_hopper)
    mask = (torch.arange(512, device=on_hopper) < 256).expand(2, 1, 1, 512)
    k[:, :, 256:] = v[:, :, 256:] = math.nan
    by, numbers = "cutedsl_kernels", (0.125, -65504.0)
    out, lse = boolean_ops.attention_by(by, q, k, v, mask, *numbers, True)
    grad = torch.randn_like(out)
    gradients = boolean_ops.attention_backward_by(by, grad, q, k, v, out, lse, mask, *numbers)
    assert all(each.isfinite().all() for each in (out, *gradients))
    assert all(each[:, :, 256:].eq(0).all() for each in gradients[1:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "heads", "length", "dim"),
    [(131, 64, 2048, 128), (9, 1, 2**14, 64)],
    ids=["of the query", "of the mask"],
)
def test_more_than_2_to_31_elements(
    batch: int, heads: int, length: int, dim: int, on_hopper: torch.device
) -> None:
    """Offsets past 32 bits: the last heads are right, forward and backward."""
    q, k, v = (
        torch.randn(batch, length, heads, dim, device=on_hopper, dtype=torch.bfloat16)
        for _ in range(3)
    )
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    mask = samples.boolean_mask("causal", batch, length, length, on_hopper)
    assert max(q.numel(), mask.numel()) > 2**31
    by, others = "cutedsl_kernels", (dim**-0.5, -math.inf)
    out, lse = boolean_ops.attention_by(by, q, k, v, mask, *others, True)
    gradients = boolean_ops.attention_backward_by(by, out, q, k, v, out, lse, mask, *others)
    for some in (slice(0, 1), slice(-1, None)):
        *part, grad = (each[some, -2:] for each in (q, k, v, out))
        given = (*part, mask[some], *others)
        right = (by_formula(*given), *gradients_by_formula(grad, *given))
        coarse = (
            by_formula(*given, dtype=q.dtype),
            *gradients_by_formula(grad, *given, dtype=q.dtype),
        )
        assert_as_right([each[some, -2:] for each in (out, *gradients)], coarse, right)
