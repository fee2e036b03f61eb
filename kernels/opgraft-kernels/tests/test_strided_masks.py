"""Attention under masks whose last stride is not 1: T5's permuted bias, masks that are expanded
along keys, and transposed ones.

On the CPU a fused backend takes such masks, so that what is copied there is what a GPU would copy,
and what native computes is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import largest_error
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import opgraft
from opgraft import when
from opgraft.pt2 import fingerprint
from opgraft_kernels.attention import overrides, samples, strided

attend = F.scaled_dot_product_attention
MASKS = samples._STRIDED_MASKS
DTYPES = [torch.float16, torch.bfloat16]
FLASH = SDPBackend.FLASH_ATTENTION.value  # what the CPU has


def inputs(
    dtype: torch.dtype, device: torch.device | str = "cpu", **sizes: int
) -> tuple[samples._Case, list[Tensor]]:
    """Query, key and value, by default laid out as a projection's output is seen."""
    small = {"batch": 2, "heads": 4, "key_heads": 4, "queries": 20, "keys": 27, "dim": 16}
    case = samples._Case(dtype, **{**small, "is_projected": True, **sizes})
    case = case._replace(dim_v=case.dim)
    made = samples._tensors(case, torch.device(device), heads_first=True)
    return case, [made[name] for name in ("query", "key", "value")]


def by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for queries that attend to nothing."""
    q, k, v = (t.to(dtype) for t in (q, k, v))
    bias = torch.where(mask, 0.0, -math.inf) if mask.dtype is torch.bool else mask
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias.to(dtype)
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0) @ v


def differentiated(function: Callable[..., Tensor], given: list[Tensor], grad: Tensor) -> Any:
    """The output, and the gradients of all inputs with floating-point numbers."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
    out = function(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    return (out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype)))


def under(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=mask)


def assert_as_right(given: list[Tensor], grad: Tensor, override: opgraft.Override) -> None:
    """At most twice the error that native has, and some roundings; of the gradients, too."""
    before = override.hits
    ours = differentiated(under, given, grad)
    assert override.hits == before + 1
    with opgraft.disabled():
        native = differentiated(under, given, grad)
    right = differentiated(lambda *g: by_formula(*g, dtype=torch.float64), given, grad)
    for number, (one, other, expected) in enumerate(zip(ours, native, right, strict=True)):
        error, yardstick = (largest_error(each, expected) for each in (one, other))
        assert error <= 2 * yardstick + 2 * torch.finfo(grad.dtype).eps, number


# ------------------------------------------------------------------ on the CPU

CHOICE = strided._choice


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[opgraft.Override]:
    """The override, where a mask that needs a gradient has a fused backend, too."""
    monkeypatch.setattr(strided, "_choice", lambda *_: FLASH)
    monkeypatch.setattr(strided, "_FUSED", (FLASH,))
    override = opgraft.register_op_override(
        "aten",
        "scaled_dot_product_attention",
        "CPU",
        strided.attention,
        cond=when.stride("attn_mask", -1) != 1,
        autograd="impl",
        compile="traceable",
        name="strided masks",
    )
    torch._dynamo.reset()
    yield override
    override.remove()
    torch._dynamo.reset()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that native gets."""
    noted: list[Tensor] = []
    native = opgraft.native

    def noting(op: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            noted.append(args[3])
            return native(op)(*args, **kwargs)

        return call

    monkeypatch.setattr(opgraft, "native", noting)
    return noted


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_attention_and_all_gradients_are_right(
    on_cpu: opgraft.Override, name: str, dtype: torch.dtype
) -> None:
    case, tensors = inputs(dtype)
    mask = samples.strided_mask(name, case, torch.device("cpu"))
    assert_as_right([*tensors, mask], torch.randn_like(tensors[0]), on_cpu)


@pytest.mark.parametrize("name", MASKS)
def test_native_gets_rows_that_are_dense_and_aligned(
    on_cpu: opgraft.Override, seen: list[Tensor], name: str
) -> None:
    case, (q, k, v) = inputs(torch.bfloat16)
    attend(q, k, v, attn_mask=samples.strided_mask(name, case, q.device))
    (mask,) = seen
    assert mask.stride(-1) == 1 and all(stride % 16 == 0 for stride in mask.stride()[:-1])
    assert mask.untyped_storage().nbytes() % 16 == 0


@pytest.mark.parametrize("shape", [(1, 1, 20, 27), (2, 1, 1, 27), (2, 4, 20, 27), (20, 27)])
def test_what_is_broadcast_is_not_copied_for_each(
    on_cpu: opgraft.Override, seen: list[Tensor], shape: tuple[int, ...]
) -> None:
    _, (q, k, v) = inputs(torch.float32)
    stored = torch.ones(shape[-1:] + shape[:-1], dtype=torch.bool).movedim(0, -1)
    whole = (2, 4, 20, 27)[-len(shape) :]
    attend(q, k, v, attn_mask=stored.expand(whole))
    assert seen[0].shape == shape


def test_the_gradient_of_an_expanded_bias_is_of_each_element(on_cpu: opgraft.Override) -> None:
    _, tensors = inputs(torch.float32)
    bias = torch.randn(1, 1, 27, 20).mT.expand(2, 4, 20, 27)
    assert_as_right([*tensors, bias], torch.randn_like(tensors[0]), on_cpu)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 2], ids=["query", "value"])
def test_numbers_of_queries_without_a_key_are_as_natively(
    on_cpu: opgraft.Override, position: int, number: float
) -> None:
    """Natively 0 times NaN is NaN."""
    case, given = inputs(torch.float32)
    mask = samples.strided_mask("of queries", case, given[0].device)
    given[position][0, :, 0] = number
    ours = attend(*given, attn_mask=mask)
    assert on_cpu.hits == 1
    with opgraft.disabled(), sdpa_kernel(SDPBackend.MATH):
        native = attend(*given, attn_mask=mask)
    torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("number", [torch.finfo(torch.bfloat16).min, 3e38, math.nan, math.inf])
@pytest.mark.parametrize("of_whole_rows", [True, False])
def test_extreme_numbers_of_a_mask_are_as_natively(
    on_cpu: opgraft.Override, number: float, of_whole_rows: bool
) -> None:
    """By matrix products, which is what a GPU has for such a mask."""
    case, (q, k, v) = inputs(torch.bfloat16)
    mask = samples.strided_mask("transposed bias", case, q.device)
    mask[:, :, 3:5, slice(None) if of_whole_rows else slice(9)] = number
    ours = attend(q, k, v, attn_mask=mask)
    assert on_cpu.hits == 1
    with opgraft.disabled():
        native, _ = strided._by_math(q, k, v, mask)
    torch.testing.assert_close(ours, native, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.bfloat16).min])
def test_no_number_is_infinite_in_a_backend_s_arithmetic(lowest: float) -> None:
    """It multiplies by log2(e) in float32. And which of a row's numbers are its largest stays."""
    mask = torch.full((3, 8), lowest).bfloat16()
    mask[1, :3] = torch.finfo(torch.bfloat16).min
    mask[2, :3] = 1.0
    expected = torch.softmax(mask.double(), -1).nan_to_num(0.0)
    is_empty = strided._fill_empty_rows(mask)
    assert (mask.amax(-1).float() * math.log2(math.e)).isfinite().all()
    assert is_empty.flatten().tolist() == [lowest == -math.inf, False, False]
    found = torch.softmax(mask.double(), -1).masked_fill(is_empty, 0.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", MASKS)
def test_the_output_is_laid_out_as_natively_on_a_gpu(on_cpu: opgraft.Override, name: str) -> None:
    case, (q, k, v) = inputs(torch.float32)
    mask = samples.strided_mask(name, case, q.device)
    assert attend(q, k, v, attn_mask=mask).stride() == strided._by_math(q, k, v, mask)[0].stride()


def test_what_is_not_chosen_is_native_s(
    on_cpu: opgraft.Override, seen: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user asked for another backend, say."""
    monkeypatch.setattr(strided, "_choice", CHOICE)
    case, (q, k, v) = inputs(torch.float32)
    mask = samples.strided_mask("bias", case, q.device)
    with sdpa_kernel(SDPBackend.MATH):
        attend(q, k, v, attn_mask=mask)
    attend(q, k, v, attn_mask=mask)
    assert on_cpu.hits == 2 and seen[0] is mask and seen[1] is not mask


def test_a_learnt_mask_is_asked_about_as_such(
    on_cpu: opgraft.Override, seen: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's fused backend has no gradient of a mask."""
    monkeypatch.setattr(strided, "_choice", CHOICE)
    case, (q, k, v) = inputs(torch.float32)
    mask = samples.strided_mask("bias", case, q.device).requires_grad_()
    attend(q, k, v, attn_mask=mask)
    with torch.no_grad():
        attend(q, k, v, attn_mask=mask)
    assert [each is mask for each in seen] == [True, False]


def test_under_deterministic_algorithms_it_is_native(
    on_cpu: opgraft.Override, seen: list[Tensor]
) -> None:
    case, (q, k, v) = inputs(torch.float32)
    mask = samples.strided_mask("bias", case, q.device)
    torch.use_deterministic_algorithms(True)
    try:
        attend(q, k, v, attn_mask=mask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert on_cpu.hits == 1 and seen[0] is mask


def twice_differentiated(given: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
    wanted = [t for t in leaves if t.requires_grad]
    first = torch.autograd.grad(under(*leaves), wanted, grad, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), wanted)


@pytest.mark.parametrize("name", MASKS)
def test_differentiating_twice_is_as_natively(on_cpu: opgraft.Override, name: str) -> None:
    case, tensors = inputs(torch.float64)
    given = [*tensors, samples.strided_mask(name, case, torch.device("cpu"))]
    grad = torch.randn_like(tensors[0])
    ours = twice_differentiated(given, grad)
    assert on_cpu.hits == 1
    with opgraft.disabled(), sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(ours, twice_differentiated(given, grad))


SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "the same": lambda x: (x, x, x),
    "made of one another": lambda x: (x, 2 * x, x.cos()),
}


@pytest.mark.parametrize("name", SHARED)
def test_inputs_that_share_a_source_may_be_differentiated_twice(
    on_cpu: opgraft.Override, name: str
) -> None:
    case, (x, _, _) = inputs(torch.float64, keys=20)
    mask = samples.strided_mask("bias", case, x.device)
    x = x.detach().requires_grad_()

    def derivatives() -> tuple[Tensor, Tensor]:
        out = under(*SHARED[name](x), mask)
        (first,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        return first.detach(), torch.autograd.grad(first.square().sum(), x)[0]

    ours = derivatives()
    assert on_cpu.hits == 1
    with opgraft.disabled(), sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(ours, derivatives())


@pytest.mark.parametrize("needs", [0, 1, 2])
def test_only_one_input_needs_a_gradient(on_cpu: opgraft.Override, needs: int) -> None:
    case, (q, k, v) = inputs(torch.float64)
    mask = samples.strided_mask("of queries", case, q.device)
    leaf = (q, k, v)[needs].requires_grad_()
    out = under(q, k, v, mask)
    (once,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    (again,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    torch.testing.assert_close(once, again)


def test_compiled_autograd_has_the_gradients_of_all_inputs(on_cpu: opgraft.Override) -> None:
    case, tensors = inputs(torch.float32)
    leaves = [*tensors, samples.strided_mask("bias", case, torch.device("cpu"))]
    leaves = [each.detach().requires_grad_() for each in leaves]

    def gradients() -> list[Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        under(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    with compiled_autograd._enable(torch.compile(backend="eager")):
        ours = gradients()
    assert on_cpu.hits == 1
    with opgraft.disabled():
        torch.testing.assert_close(ours, gradients())


def test_forward_mode_is_the_composite_s(on_cpu: opgraft.Override) -> None:
    case, (q, k, v) = inputs(torch.float64)
    mask = samples.strided_mask("bias", case, q.device)
    with sdpa_kernel(SDPBackend.MATH):
        torch.func.jvp(lambda x: attend(x, k, v, attn_mask=mask), (q,), (q,))
    assert on_cpu.hits == 0


def test_checkpointing(on_cpu: opgraft.Override) -> None:
    case, (q, k, v) = inputs(torch.float32)
    mask = samples.strided_mask("bias", case, q.device)
    grad = torch.randn_like(q)

    def block(x: Tensor, bias: Tensor) -> Tensor:
        return attend(2 * x, k, v, attn_mask=bias * 2)

    def by_checkpoint(x: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, x, bias, use_reentrant=False)
        return out

    found = differentiated(by_checkpoint, [q, mask], grad)
    assert on_cpu.hits == 2
    torch.testing.assert_close(found, differentiated(block, [q, mask], grad))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_may_be_written_to_before_the_backward(on_cpu: opgraft.Override, name: str) -> None:
    case, (q, k, v) = inputs(torch.float32)
    mask = samples.strided_mask(name, case, q.device)
    q.requires_grad_()
    (expected,) = torch.autograd.grad(under(q, k, v, mask).sum(), q)
    buffer = torch.empty_strided(mask.shape, (4096, 1024, 1, 32), dtype=mask.dtype).copy_(mask)
    out = under(q, k, v, buffer)
    buffer.fill_(1)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], expected)


def test_a_mask_may_be_made_in_inference_mode(on_cpu: opgraft.Override) -> None:
    case, tensors = inputs(torch.float32)
    with torch.inference_mode():
        mask = samples.strided_mask("of queries", case, torch.device("cpu"))
    assert_as_right([*tensors, mask], torch.randn_like(tensors[0]), on_cpu)


# ------------------------------------------------------------------ compiled, on the CPU


def with_mask_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers makes it for a compiled graph in which nothing is hidden."""
    place = torch.arange(q.shape[2], device=q.device)
    mask = (place >= 0)[:, None].expand(q.shape[0], 1, q.shape[2], k.shape[2])
    return attend(q, k, v, attn_mask=mask)


def with_bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """As T5's, of which a table has a row for each distance."""
    places = [torch.arange(t.shape[2], device=q.device) for t in (q, k)]
    bias = table[(places[0][:, None] - places[1]).abs().clamp(max=len(table) - 1)]
    return attend(q, k, v, attn_mask=bias.permute(2, 0, 1).unsqueeze(0))


MODELS: dict[str, Callable[..., Tensor]] = {"of queries": with_mask_of_queries, "bias": with_bias}


def of_model(name: str, dtype: torch.dtype, device: torch.device | str, **sizes: int) -> Any:
    """A model, and what it gets."""
    case, tensors = inputs(dtype, device, **sizes)
    table = torch.randn(9, case.heads, device=device, dtype=dtype)
    return MODELS[name], [*tensors, table] if name == "bias" else tensors


class Copies:
    """How often the mask was copied while something ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        dense = strided._dense

        def noting(mask: Tensor) -> Tensor:
            self.count += 1
            return dense(mask)

        monkeypatch.setattr(strided, "_dense", noting)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_graph_copies_the_mask(
    on_cpu: opgraft.Override,
    name: str,
    trains: bool,
    backend: str,
    dynamic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = Copies(monkeypatch)
    compiled = torch.compile(MODELS[name], backend=backend, fullgraph=True, dynamic=dynamic)
    counts = []
    for batch in (2, 3, 5):
        # Of other queries the CPU's output is not laid out as a GPU's matrix product's.
        sizes = {"batch": batch, "is_projected": False}
        model, given = of_model(name, torch.float32, "cpu", **sizes)
        ours = run(compiled, given, trains)
        counts.append(copies.count)
        with opgraft.disabled():
            torch.testing.assert_close(ours, run(model, given, trains))
    # The graph is traced for all sizes, or for each.
    assert counts[0] > 0 and (counts[2] == counts[0]) == dynamic


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_traced_tensors_have_the_backend_that_others_have(
    on_cpu: opgraft.Override, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the dispatcher, no fused backend takes a fake tensor."""
    found = []

    def noting(*given: Any) -> int:
        found.append(CHOICE(*given))
        return found[-1]

    monkeypatch.setattr(strided, "_choice", noting)
    model, given = of_model("of queries", torch.float32, "cpu", is_projected=False)
    run(torch.compile(model, backend="aot_eager", fullgraph=True), given, trains)
    assert set(found) == {FLASH}


def test_the_compiler_s_caches_can_have_the_impl_in_their_keys() -> None:
    """Else AOTAutograd's cache is bypassed, for whatever a process compiles."""
    assert fingerprint.digest_reachable(strided.attention) is not None


def run(function: Callable[..., Tensor], given: list[Tensor], trains: bool) -> tuple[Tensor, ...]:
    """The output and, in training, the gradients of all inputs."""
    if trains:
        grad = torch.linspace(-1, 1, given[0].numel(), device=given[0].device)
        return differentiated(function, given, grad.view(given[0].shape))
    with torch.no_grad():
        return (function(*given),)


# ------------------------------------------------------------------ which calls are taken


def call(**changes: Any) -> dict[str, Any]:
    """A call that is taken on Ampere, as arguments by name."""
    case, (q, k, v) = inputs(torch.bfloat16, queries=80, keys=72, dim=64)
    named = {"query": q, "key": k, "value": v, "dropout_p": 0.0, "is_causal": False}
    named["attn_mask"] = samples.strided_mask("bias", case, q.device)
    return {**named, "scale": None, "enable_gqa": False, **changes}


@pytest.fixture
def condition(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without what is about the device."""
    monkeypatch.setattr(overrides, "_ampere", lambda: when.ndim("query") == 4)
    return overrides.strided_condition()


TRUE = torch.ones(2, 4, 80, 72, dtype=torch.bool)
BIAS = torch.zeros(2, 4, 72, 80).bfloat16().mT
TAKEN: dict[str, dict[str, Any]] = {
    "a bias": {},
    "of one batch": {"attn_mask": BIAS[:1]},
    "that heads share": {"attn_mask": BIAS[:, :1]},
    "a matrix": {"attn_mask": BIAS[0, 0]},
    "a boolean one": {"attn_mask": TRUE.mT.contiguous().mT},
    "expanded along keys": {"attn_mask": TRUE[:, :1, :, :1].expand(2, 1, 80, 72)},
    "a scale": {"scale": 0.5},
}
LEFT: dict[str, dict[str, Any]] = {
    "no mask": {"attn_mask": None},
    "dense rows": {"attn_mask": BIAS.contiguous()},
    "one key for all": {"attn_mask": BIAS[..., :1]},
    "other keys": {"attn_mask": BIAS[..., :71]},
    "other queries": {"attn_mask": BIAS[:, :, :79]},
    "another dtype": {"attn_mask": BIAS.float()},
    "float32": {
        "query": torch.randn(2, 4, 80, 64),
        **{n: torch.randn(2, 4, 72, 64) for n in ("key", "value")},
    }
    | {"attn_mask": torch.zeros(2, 4, 72, 80).mT},
    "dropout": {"dropout_p": 0.1},
    "causal besides": {"is_causal": True},
    "a negative scale": {"scale": -1.0},
    "three dimensions": {"attn_mask": BIAS[0]},
    "groups that it was not told of": {
        name: torch.randn(2, 2, 72, 64).bfloat16() for name in ("key", "value")
    },
    "few queries": {
        "query": torch.randn(2, 4, 8, 64).bfloat16(),
        "attn_mask": BIAS[:, :, :8],
    },
}


@pytest.mark.parametrize("name", TAKEN)
def test_masks_of_other_strides_are_taken(condition: Any, name: str) -> None:
    assert condition.holds(call(**TAKEN[name]))


@pytest.mark.parametrize("name", LEFT)
def test_other_calls_are_left_to_native(condition: Any, name: str) -> None:
    assert not condition.holds(call(**LEFT[name]))


@pytest.mark.parametrize("name", TAKEN)
def test_no_call_is_also_one_of_boolean_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "_hopper", lambda: when.ndim("query") == 4)
    assert not overrides.boolean_condition().holds(call(**TAKEN[name]))


@pytest.mark.crossovers
@pytest.mark.parametrize("mask_itemsize", [1, 2])
def test_samples_are_of_their_cells_and_taken(condition: Any, mask_itemsize: int) -> None:
    crossover = overrides._strided_crossover()
    assert crossover.calls is not None
    made = 0
    for rows, keys, dim in itertools.product((2**10, 2**13), (32, 256), (32, 64, 128, 256)):
        cell = {"rows": rows, "keys": keys, "dim": dim, "mask_itemsize": mask_itemsize}
        for found in crossover.calls(torch.device("cpu"), **cell):
            made += 1
            assert condition.holds(found)
            of_call = {name: each.evaluate(found) for name, each in crossover.features.items()}
            for name, begin in cell.items():
                assert begin <= of_call[name] < 2 * begin
    assert made == 28


# ------------------------------------------------------------------ on a GPU


@pytest.fixture
def on_gpu() -> Iterator[opgraft.Override]:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU of Ampere or later")
    torch._dynamo.reset()
    override = overrides.register_strided(by_table=False)
    yield override
    override.remove()
    torch._dynamo.reset()


LARGE = {"heads": 8, "key_heads": 8, "queries": 320, "keys": 333, "dim": 64}
BACKENDS = {
    "any": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
}


@pytest.mark.gpu
@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_and_all_gradients_are_right_on_a_gpu(
    on_gpu: opgraft.Override, name: str, dtype: torch.dtype, backends: str
) -> None:
    """Queries that attend to nothing included."""
    case, tensors = inputs(dtype, "cuda", **LARGE)
    mask = samples.strided_mask(name, case, torch.device("cuda"))
    with sdpa_kernel(BACKENDS[backends], set_priority=True):
        for _ in range(3):
            assert_as_right([*tensors, mask], torch.randn_like(tensors[0]), on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize("number", [torch.finfo(torch.bfloat16).min, 3e38, math.nan, math.inf])
@pytest.mark.parametrize("of_whole_rows", [True, False])
def test_extreme_numbers_of_a_mask_are_as_natively_on_a_gpu(
    on_gpu: opgraft.Override, number: float, of_whole_rows: bool, backends: str
) -> None:
    case, (q, k, v) = inputs(torch.bfloat16, "cuda", **LARGE)
    mask = samples.strided_mask("transposed bias", case, q.device)
    mask[:, :, 3:5, slice(None) if of_whole_rows else slice(9)] = number
    with sdpa_kernel(BACKENDS[backends], set_priority=True):
        ours = attend(q, k, v, attn_mask=mask)
    assert on_gpu.hits == 1
    with opgraft.disabled():
        native = attend(q, k, v, attn_mask=mask)
    torch.testing.assert_close(ours, native, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_no_scores_are_kept_on_a_gpu(on_gpu: opgraft.Override, name: str) -> None:
    """A fused backend runs: natively the scores alone take four times the mask of each head."""
    model, given = of_model(
        name, torch.bfloat16, "cuda", **{**LARGE, "queries": 2048, "keys": 2048}
    )

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            model(*given)
        return torch.cuda.max_memory_allocated() - before

    for _ in range(3):
        ours = peak()
    assert on_gpu.hits == 3
    with opgraft.disabled():
        assert ours < peak() / 2


@pytest.mark.gpu
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_is_right_on_a_gpu(
    on_gpu: opgraft.Override,
    name: str,
    dynamic: bool,
    trains: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = Copies(monkeypatch)
    compiled = torch.compile(MODELS[name], fullgraph=True, dynamic=dynamic)
    for batch in (2, 3):
        model, given = of_model(name, torch.bfloat16, "cuda", **LARGE, batch=batch)
        ours = run(compiled, given, trains)
        with opgraft.disabled():
            native = run(model, given, trains)
        for one, other in zip(ours, native, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
    assert copies.count > 0


@pytest.mark.gpu
def test_the_user_s_backend_is_kept_on_a_gpu(on_gpu: opgraft.Override) -> None:
    case, (q, k, v) = inputs(torch.bfloat16, "cuda", **LARGE)
    mask = samples.strided_mask("bias", case, q.device)
    with sdpa_kernel(SDPBackend.MATH):
        ours = attend(q, k, v, attn_mask=mask)
        with opgraft.disabled():
            assert ours.equal(attend(q, k, v, attn_mask=mask))
