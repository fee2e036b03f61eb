"""What only a CUDA device can show: guards, streams, graphs, and the shipped kernels end to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
import opgraft_kernels
from opgraft import when
from tests import ops

pytestmark = pytest.mark.gpu

BIG = (8192, 4096)


def override_softmax(impl: Any = ops.softmax, **keywords: Any) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    return opgraft.register_op_override("aten", "_softmax", "CUDA", impl, **keywords)


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[opgraft.Override]:
    """The shipped overrides of RMSNorm that take what the tests here call: forward and backward."""
    # Whatever tables say.
    monkeypatch.setattr("opgraft_kernels.norms.overrides._crossover", lambda *_, **__: None)
    shipped = {override.name: override for override in opgraft_kernels.register()}
    return [shipped[f"opgraft_kernels.rms_norm.{way}"] for way in ("forward", "backward")]


# ------------------------------------------------------------------ devices


def test_cpu_and_cuda_arguments_miss_and_native_says_what_is_wrong() -> None:
    override = opgraft.register_op_override(
        "aten", "bmm", "CUDA", lambda self, mat2: self, unconditional_override=True
    )
    with pytest.raises(RuntimeError, match="same device"):
        torch.bmm(torch.ones(1, 2, 2, device="cuda"), torch.ones(1, 2, 2))
    assert (override.hits, override.misses) == (0, 1)


def test_a_zero_dim_cpu_tensor_does_not_count() -> None:
    override = opgraft.register_op_override(
        "aten",
        "mul.Tensor",
        "CUDA",
        lambda self, other: opgraft.native("aten::mul.Tensor")(self, other),
        unconditional_override=True,
    )
    x = torch.ones(4, device="cuda")
    assert (x * torch.tensor(2.0)).tolist() == [2, 2, 2, 2]
    assert (x * 3).tolist() == [3, 3, 3, 3]
    assert override.hits == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_impl_runs_with_the_tensors_device_current(norms: list[opgraft.Override]) -> None:
    seen: list[int] = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        seen.append(torch.cuda.current_device())
        return ops.softmax(self, dim, half_to_float)

    override = override_softmax(impl)
    torch.softmax(torch.randn(4, 4, device="cuda:1"), -1)
    assert override.hits == 1
    assert seen == [1]
    assert torch.cuda.current_device() == 0
    x = torch.randn(*BIG, device="cuda:1", dtype=torch.bfloat16)
    expected = ops.rms_norm(x, [BIG[1]], None, 1e-6)[0]
    torch.testing.assert_close(F.rms_norm(x, (BIG[1],), None, 1e-6), expected)
    assert norms[0].hits == 1


def override_tril_indices(seen: list[int]) -> opgraft.Override:
    """An override of an op without tensors, which notes the current device of each call."""

    def impl(row: int, col: int, offset: int = 0, **options: Any) -> torch.Tensor:
        seen.append(torch.cuda.current_device())
        return opgraft.native("aten::tril_indices")(row, col, offset, **options)  # type: ignore[no-any-return]

    return opgraft.register_op_override(
        "aten", "tril_indices", "CUDA", impl, unconditional_override=True
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_call_without_tensors_runs_with_the_device_that_it_names_current() -> None:
    seen: list[int] = []
    override = override_tril_indices(seen)
    assert torch.tril_indices(3, 3, device="cuda:1").device == torch.device("cuda", 1)
    assert torch.tril_indices(3, 3, device="cuda").device == torch.device("cuda", 0)
    assert override.hits == 2
    assert seen == [1, 0]
    assert torch.cuda.current_device() == 0


def test_a_call_without_tensors_that_has_not_run_before_misses_inside_a_capture() -> None:
    override = override_tril_indices([])
    expected = torch.tril_indices(3, 3).cuda()
    with opgraft.disabled():
        torch.tril_indices(3, 3, device="cuda")  # native is warm
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out = torch.tril_indices(3, 3, device="cuda")
    assert (override.hits, override.misses) == (0, 1)
    graph.replay()
    assert torch.equal(out, expected)
    torch.tril_indices(3, 3, device="cuda")
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out = torch.tril_indices(3, 3, device="cuda")
    assert (override.hits, override.misses) == (2, 1)
    graph.replay()
    assert torch.equal(out, expected)


def test_a_side_stream(norms: list[opgraft.Override]) -> None:
    x = torch.randn(*BIG, device="cuda")
    expected = ops.rms_norm(x, [BIG[1]], None, 1e-6)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = F.rms_norm(x, (BIG[1],), None, 1e-6)
    torch.cuda.current_stream().wait_stream(stream)
    assert norms[0].hits == 1
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------ CUDA graphs


def test_a_call_that_has_not_run_before_misses_inside_a_capture(
    norms: list[opgraft.Override],
) -> None:
    x = torch.randn(*BIG, device="cuda")
    with opgraft.disabled():
        F.rms_norm(x, (BIG[1],), None, 1e-6)  # native is warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.rms_norm(x, (BIG[1],), None, 1e-6)
    assert (norms[0].hits, norms[0].misses) == (0, 1)
    graph.replay()
    torch.testing.assert_close(out, ops.rms_norm(x, [BIG[1]], None, 1e-6)[0], atol=1e-5, rtol=1e-5)


def test_a_warm_call_is_captured_and_replays(norms: list[opgraft.Override]) -> None:
    x = torch.randn(*BIG, device="cuda")
    F.rms_norm(x, (BIG[1],), None, 1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.rms_norm(x, (BIG[1],), None, 1e-6)
    assert (norms[0].hits, norms[0].misses) == (2, 0)
    for _ in range(2):
        x.normal_()
        graph.replay()
        expected = ops.rms_norm(x, [BIG[1]], None, 1e-6)[0]
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_an_error_inside_a_capture_is_raised() -> None:
    calls: list[int] = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        calls.append(1)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("inside")
        return ops.softmax(self, dim, half_to_float)

    override = override_softmax(impl, on_error="fallback")
    x = torch.randn(4, 4, device="cuda")
    torch.softmax(x, -1)
    with pytest.raises(ValueError, match="inside"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.softmax(x, -1)
    assert (override.hits, override.fallbacks) == (2, 0)
    torch.cuda.synchronize()


# ------------------------------------------------------------------ the shipped kernels, end to end


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_training_with_f_rms_norm(norms: list[opgraft.Override], dtype: torch.dtype) -> None:
    forward, backward = norms
    x = torch.randn(*BIG, device="cuda", dtype=dtype)
    weight = torch.rand(BIG[1], device="cuda", dtype=dtype) + 0.5
    grad = torch.randn(*BIG, device="cuda", dtype=dtype)

    def train(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        out = F.rms_norm(leaves[0], weight.shape, leaves[1], 1e-6)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype)))

    mine = train(dtype)
    assert (forward.hits, backward.hits) == (1, 1)
    with opgraft.disabled():
        native, true = train(dtype), train(torch.float64)
    assert (forward.hits, backward.hits) == (1, 1)
    for result, its, reference in zip(mine, native, true, strict=True):
        floor = torch.finfo(dtype).eps * reference.abs().max() / 4
        own = (its.double() - reference).abs().max()
        assert (result.double() - reference).abs().max() <= 2 * own + floor


def test_float64_goes_to_native(norms: list[opgraft.Override]) -> None:
    F.rms_norm(torch.randn(64, 1024, device="cuda", dtype=torch.float64), (1024,))
    assert (norms[0].hits, norms[0].misses) == (0, 1)


def test_autocast_and_a_module(norms: list[opgraft.Override]) -> None:
    norm = torch.nn.RMSNorm(BIG[1], device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        norm(torch.randn(*BIG, device="cuda"))
    assert norms[0].hits == 1


def test_an_input_and_a_weight_of_different_dtypes_never_reach_the_op(
    norms: list[opgraft.Override],
) -> None:
    x = torch.randn(*BIG, device="cuda", dtype=torch.bfloat16)
    F.rms_norm(x, (BIG[1],), torch.ones(BIG[1], device="cuda"))
    assert (norms[0].hits, norms[0].misses) == (0, 0)


def test_a_copy_on_write_input_is_not_copied_on_a_miss(norms: list[opgraft.Override]) -> None:
    x = torch._lazy_clone(torch.randn(64, 1024, device="cuda", dtype=torch.float64))
    F.rms_norm(x, (1024,))
    assert norms[0].misses == 1
    assert torch._C._is_cow_tensor(x)  # type: ignore[attr-defined]


def test_condition_on_device_capability() -> None:
    capability = torch.cuda.get_device_capability()
    override = override_softmax(cond=when.device_capability("self") >= capability)
    beyond = override_softmax(cond=when.device_capability("self") > capability, priority=1)
    torch.softmax(torch.randn(4, 4, device="cuda"), -1)
    assert (override.hits, beyond.misses) == (1, 1)


def test_memory_of_many_hits_is_flat(norms: list[opgraft.Override]) -> None:
    x = torch.randn(*BIG, device="cuda", requires_grad=True)
    weight = torch.ones(BIG[1], device="cuda", requires_grad=True)

    def step() -> None:
        F.rms_norm(x, (BIG[1],), weight, 1e-6).sum().backward()

    for _ in range(3):
        step()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        step()
    assert torch.cuda.memory_allocated() == before
    assert norms[0].hits == norms[1].hits == 53
