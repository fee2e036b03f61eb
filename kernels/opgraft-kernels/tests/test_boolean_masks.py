"""Attention with boolean masks: ATen's op, its derivative, the ops that it is made of, and the
kernels of FlashAttention-4 under it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from errors import largest_error

import opgraft
from opgraft import when
from opgraft_kernels import kept
from opgraft_kernels.attention import boolean, boolean_ops, overrides, samples
from opgraft_kernels.attention.triton_lists import plan_lists

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
    """Query, key, value and the output's gradient, laid out as a projection's output is seen."""
    shapes = ((heads, queries), (heads_k, keys), (heads_k, keys), (heads, queries))
    return [
        torch.randn(2, length, n, dim, device=device).to(dtype).transpose(1, 2)
        for n, length in shapes
    ]


def by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    lowest: float,
) -> tuple[torch.Tensor, ...]:
    """The output and the gradients in float64; 0 of queries whose scores are -inf throughout."""
    q, k, v, grad = (t.detach().double() for t in (q, k, v, grad))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = scale * (q @ k.repeat_interleave(group, 1).mT)
    scores = scores + torch.where(mask, 0.0, lowest).double()
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0)
    out = weights @ v.repeat_interleave(group, 1)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


# ------------------------------------------------------------------ the op, on the CPU


@pytest.fixture
def on_cpu() -> Iterator[opgraft.Override]:
    """The override of ATen's op, whose two ops are computed natively there."""
    override = opgraft.register_op_override(
        "aten",
        "scaled_dot_product_attention",
        "CPU",
        boolean.attention,
        cond=when.dtype("attn_mask", torch.bool),
        autograd=(boolean.setup_context, boolean.backward),
        compile="inductor",
        name="boolean masks",
    )
    yield override
    override.remove()


def attend(*given: Any, **options: Any) -> list[torch.Tensor]:
    """The output and the gradients of F.scaled_dot_product_attention.

    Args:
        given: query, key, value, the output's gradient, and the mask.
        options: of the function.
    """
    *tensors, grad, mask = given
    q, k, v = (t.detach().requires_grad_() for t in tensors)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads_k", "scale"), [(4, None), (2, 0.5)])
def test_attention_and_its_gradients_are_as_natively(
    on_cpu: opgraft.Override, name: str, dtype: torch.dtype, heads_k: int, scale: float | None
) -> None:
    given = inputs(4, heads_k, 20, 24, 16, dtype)
    mask = samples.boolean_mask(name, 2, 20, 24, torch.device("cpu"))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": heads_k != 4}
    ours = attend(*given, mask, **options)
    assert on_cpu.hits == 1
    with opgraft.disabled():
        expected = attend(*given, mask, **options)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_without_gradients_nothing_is_kept(on_cpu: opgraft.Override) -> None:
    q, k, v, _ = inputs(2, 2, 8, 8, 16, torch.float32)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert on_cpu.hits == 1 and not out.requires_grad
    assert kept.take(out) is None


def test_gradcheck(on_cpu: opgraft.Override) -> None:
    q, k, v, _ = (t.requires_grad_() for t in inputs(2, 2, 5, 6, 4, torch.float64))
    mask = samples.boolean_mask("causal", 2, 5, 6, torch.device("cpu"))
    assert torch.autograd.gradcheck(
        lambda *given: F.scaled_dot_product_attention(*given, attn_mask=mask), (q, k, v)
    )
    assert on_cpu.hits > 0


def test_differentiating_twice_is_an_error(on_cpu: opgraft.Override) -> None:
    q, k, v, _ = (t.requires_grad_() for t in inputs(1, 1, 4, 4, 8, torch.float32))
    mask = torch.ones(4, 4, dtype=torch.bool)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(opgraft.OpgraftError, match="boolean masks"):
        torch.autograd.grad(dq.sum(), q)
    assert on_cpu.hits == 1


def test_only_some_inputs_need_a_gradient(on_cpu: opgraft.Override) -> None:
    q, k, v, grad = inputs(2, 2, 9, 7, 8, torch.float32)
    v.requires_grad_()
    mask = torch.rand(2, 1, 9, 7) < 0.7
    mask[..., 0] = True
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask).backward(grad)
    expected = by_formula(q, k, v, grad, mask, 8**-0.5, -math.inf)[3]
    assert on_cpu.hits == 1 and v.grad is not None and q.grad is None
    torch.testing.assert_close(v.grad, expected.float())


def test_checkpointing(on_cpu: opgraft.Override) -> None:
    q, k, v, grad = inputs(2, 2, 9, 7, 8, torch.float32)
    mask = torch.ones(9, 7, dtype=torch.bool)
    q.requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(2 * x, k, v, attn_mask=mask)

    checkpoint(block, q, use_reentrant=False).backward(grad)
    (expected,) = torch.autograd.grad(block(q), q, grad)
    assert on_cpu.hits == 3 and q.grad is not None
    torch.testing.assert_close(q.grad, expected)


def test_transforms_see_the_pieces(on_cpu: opgraft.Override) -> None:
    q, k, v, _ = inputs(2, 2, 6, 6, 8, torch.float32)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, k, v, attn_mask=mask).square().sum()

    found = torch.func.grad(loss)(q)
    x = q.detach().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    assert on_cpu.hits == 1  # of the second one
    torch.testing.assert_close(found, expected)


def test_a_compiled_graph_has_what_the_op_calls_natively(on_cpu: opgraft.Override) -> None:
    q, k, v, _ = inputs(2, 2, 16, 16, 8, torch.float32)
    mask = torch.ones(16, 16, dtype=torch.bool).tril()

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*tensors, attn_mask=mask)

    found = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
    assert on_cpu.hits == 0
    torch.testing.assert_close(found, run(q, k, v))
    assert on_cpu.hits == 1


def test_where_another_backend_was_asked_for_it_computes(
    on_cpu: opgraft.Override, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is native's, and so is the gradient."""
    given = inputs(4, 2, 9, 7, 8, torch.float64)
    mask = torch.rand(2, 1, 9, 7) < 0.7
    monkeypatch.setattr(boolean, "_is_like_native", lambda *_: False)
    ours = attend(*given, mask, enable_gqa=True, scale=0.3)
    assert on_cpu.hits == 1
    with opgraft.disabled():
        expected = attend(*given, mask, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("choice", range(-1, 5))
def test_on_a_gpu_cudnn_alone_treats_empty_rows_alike(choice: int) -> None:
    assert boolean._is_like_native(choice, "cuda") == (choice == 3)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0a0+git12"])
def test_until_torch_2_12_what_is_false_is_a_number_for_cudnn(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    boolean._lowest.cache_clear()
    monkeypatch.setattr(torch, "__version__", version)
    found = [boolean._lowest(dtype, "cuda") for dtype in (torch.float16, torch.bfloat16)]
    boolean._lowest.cache_clear()
    assert found == ([-65504.0, -65536.0] if version.startswith("2.11") else [-math.inf] * 2)


# ------------------------------------------------------------------ the two ops


@pytest.mark.parametrize("lowest", LOWEST)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads_k", [1, 4])
def test_native_kernels_are_right(name: str, lowest: float, heads_k: int) -> None:
    q, k, v, grad = inputs(4, heads_k, 19, 23, 8, torch.float64)
    mask = samples.boolean_mask(name, 2, 19, 23, torch.device("cpu"))
    out, logsumexp = boolean_ops.attention(q, k, v, mask, 0.3, lowest)
    found = boolean_ops.attention_backward(grad, q, k, v, out, logsumexp, mask, 0.3, lowest)
    right = by_formula(q, k, v, grad, mask, 0.3, lowest)
    torch.testing.assert_close((out, *found), right)
    is_empty = ~mask.any(-1).expand(logsumexp.shape) & (lowest == -math.inf)
    assert logsumexp.isinf().equal(is_empty)


@pytest.mark.parametrize("sample", list(samples.boolean_forward_samples(torch.device("cpu"))))
def test_metadata_is_native_s(sample: dict[str, Any]) -> None:
    if sample["query"].shape[2] > 300:
        pytest.skip("slow on a CPU")
    found = boolean_ops.attention(**sample)
    on_meta = {
        name: each.to("meta") if isinstance(each, torch.Tensor) else each
        for name, each in sample.items()
    }
    expected = getattr(torch.ops.opgraft_kernels, boolean_ops.FORWARD)(**on_meta)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


# ------------------------------------------------------------------ lists of tiles


@pytest.mark.parametrize("seed", range(12))
def test_what_is_in_no_list_has_no_probability(seed: int, device: torch.device) -> None:
    """Queries without a key included, which attend to all if a number stands for False."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    lowest, name = LOWEST[seed % 2], rng.choice(MASKS)
    queries, keys = rng.choice(((256, 256), (129, 450), (450, 200)))
    q, k = torch.randn(2, 2, queries, 16), torch.randn(2, 1, keys, 16)
    mask = samples.boolean_mask(name, 2, queries, keys, torch.device("cpu"))
    if rng.random() < 0.5:
        mask = mask.expand(2, 1, queries, keys).contiguous()
    wide = mask.expand(2, 2, queries, keys)
    scores = q @ k.mT + torch.where(wide, 0.0, lowest)
    logsumexp = scores.logsumexp(-1)
    of_mask, of_q, of_k = (t.to(device) for t in (wide, q, k))
    for tile, lse in itertools.product(((128, 128), (192, 128), (128, 64)), (None, logsumexp)):
        if lse is not None and tile[0] != 128:
            continue
        rows, cols = tile
        lse_of = None if lse is None else lse.to(device)
        lists, _, _, launches = plan_lists(of_mask, of_q, of_k, 1.0, *tile, lse_of, lowest)
        for launch in launches:
            launch()
        counts = (scores - logsumexp[..., None]).exp().nan_to_num(0.0) > 0
        for batch, head, row in itertools.product(*map(range, lists.shape[:3])):
            with_mask, without = (
                each[1 : 1 + each[0]].tolist() for each in lists[batch, head, row]
            )
            for other in range(lists.shape[-1] - 1):
                of_queries, of_keys = (row, other) if lse is None else (other, row)
                place = (
                    *(batch, head, slice(of_queries * rows, (of_queries + 1) * rows)),
                    slice(of_keys * cols, (of_keys + 1) * cols),
                )
                is_listed = other in with_mask or other in without
                assert is_listed or not counts[place].any()
                assert other not in without or wide[place].all()


@pytest.mark.parametrize("lowest", LOWEST)
def test_of_padding_what_is_false_is_in_no_list_whatever_the_scores(
    lowest: float, device: torch.device
) -> None:
    q = 1000 * torch.randn(2, 2, 512, 16)
    mask = torch.zeros(2, 1, 1, 512, dtype=torch.bool)
    mask[0], mask[1, ..., :256] = True, True
    of_mask, of_q = mask.expand(2, 2, 512, 512).to(device), q.to(device)
    lists, _, _, launches = plan_lists(of_mask, of_q, of_q, 1.0, 128, 128, None, lowest)
    for launch in launches:
        launch()
    assert [launch.kernel.__name__ for launch in launches] == [
        "_mark_boolean_kernel",
        "_list_kernel",
    ]
    assert lists[0, 0, 0, :, 0].tolist() == [0, 4] and lists[1, 1, 3, :, 0].tolist() == [0, 2]


# ------------------------------------------------------------------ which calls are taken


def call(**changes: Any) -> dict[str, Any]:
    """A call of ATen's op that is taken on Hopper, as arguments by name."""
    q, k, v, _ = inputs(4, 4, 256, 300, 64, torch.bfloat16)
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
def test_the_two_ops_take_what_the_whole_takes(
    op: overrides._Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no mask or logsumexp that would be read out of bounds."""
    is_half = when.dtype("query", torch.float16, torch.bfloat16)
    monkeypatch.setattr(overrides, "_hopper", lambda: is_half)
    condition = overrides._is_right_of_boolean(op)
    named = {name: call()[name] for name in ("query", "key", "value")}
    named |= {"mask": TRUE, "scale": 0.1, "lowest": -math.inf}
    out, logsumexp = torch.empty(2, 4, 256, 64).bfloat16(), torch.empty(2, 4, 256)
    given = {**named, "out": out, "grad_out": out, "logsumexp": logsumexp}
    assert condition.holds(given)
    assert not condition.holds({**given, "mask": TRUE[..., :299]})
    assert not condition.holds({**given, "mask": TRUE.bfloat16()})
    if op.is_backward:
        assert not condition.holds({**given, "logsumexp": logsumexp[:1]})
        assert not condition.holds({**given, "logsumexp": logsumexp.double()})


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
    q, k, v, grad = inputs(4, heads_k, queries, keys, dim, dtype, on_hopper)
    mask = samples.boolean_mask(name, 2, queries, keys, on_hopper)
    scale = dim**-0.5
    # Of queries with nothing but low numbers the gradients in float32 are too coarse for any
    # backward that keeps the logsumexp alone.
    grad = grad.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    right = by_formula(q, k, v, grad, mask, scale, lowest)
    out, logsumexp = boolean_ops.forward("cutedsl_kernels", q, k, v, mask, scale, lowest)
    given = (grad, q, k, v, out, logsumexp, mask, scale, lowest)
    found = boolean_ops.backward("cutedsl_kernels", *given)
    for one, expected in zip((out, *found), right, strict=True):
        assert largest_error(one, expected) <= 2e-2
    _, expected = boolean_ops.attention(q, k, v, mask, scale, lowest)
    torch.testing.assert_close(logsumexp, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("is_in_training", [True, False])
def test_sdpa_is_as_natively(name: str, is_in_training: bool, on_hopper: torch.device) -> None:
    """Queries without a key included."""
    found = overrides.register_boolean(by_table=False)
    q, k, v, grad = inputs(4, 4, 640, 640, 64, torch.bfloat16, on_hopper)
    mask = samples.boolean_mask(name, 2, 640, 640, on_hopper)
    grad = grad.masked_fill(~mask.any(-1, keepdim=True), 0.0)

    def run() -> list[torch.Tensor]:
        if is_in_training:
            return attend(q, k, v, grad, mask)
        return [F.scaled_dot_product_attention(q, k, v, attn_mask=mask)]

    for _ in range(5):
        ours = run()
    assert [each.hits for each in found] == [5, 5, 5 * is_in_training]
    with opgraft.disabled():
        native = run()
    for one, other in zip(ours, native, strict=True):
        assert largest_error(one, other.double()) <= 2e-2


@pytest.mark.gpu
def test_what_a_mask_removes_reaches_nothing(on_hopper: torch.device) -> None:
    q, k, v, grad = inputs(4, 4, 512, 512, 64, torch.bfloat16, on_hopper)
    mask = torch.arange(512, device=on_hopper) < 256
    k[:, :, 256:] = v[:, :, 256:] = math.nan
    mask = mask.expand(2, 1, 1, 512)
    out, lse = boolean_ops.forward("cutedsl_kernels", q, k, v, mask, 0.125, -65504.0)
    given = (grad, q, k, v, out, lse, mask, 0.125, -65504.0)
    gradients = boolean_ops.backward("cutedsl_kernels", *given)
    assert all(each.isfinite().all() for each in (out, *gradients))
    assert all(each[:, :, 256:].eq(0).all() for each in gradients[1:])
