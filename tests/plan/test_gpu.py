"""Launch plans on a CUDA device: every kind of launch, streams, graphs, threads, memory, errors."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
import opgraft_kernels
from opgraft import cutedsl_utils, when
from opgraft.core import loader
from opgraft.plan import plans
from tests import probes

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

triton = pytest.importorskip("triton")

from tests.plan import triton_kernels  # noqa: E402 (it compiles for the interpreter without a GPU)

pytestmark = pytest.mark.gpu

EPS = 1e-6
#: Of the stress test. 10,000 calls take about a minute.
CALLS = int(os.environ.get("OPGRAFT_STRESS_CALLS", "10000"))


def register(impl: Callable[..., Any], **keywords: Any) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    return opgraft.register_op_override(
        "aten", "_fused_rms_norm", "CUDA", impl, launch_plan=True, **keywords
    )


def inputs(rows: int = 64, hidden: int = 1024, dtype: torch.dtype = torch.bfloat16) -> Any:
    return (
        torch.randn(rows, hidden, device="cuda", dtype=dtype),
        torch.randn(hidden, device="cuda", dtype=dtype),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return torch.ops.aten._fused_rms_norm(x, list(weight.shape), weight, EPS)


def check(result: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Against the formula in float64."""
    wide = x.double()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    tolerance = 2e-2 if x.dtype != torch.float32 else 1e-4
    torch.testing.assert_close(result[1].double(), rstd, rtol=1e-3, atol=1e-3)
    expected = wide * rstd * weight.double()
    torch.testing.assert_close(result[0].double(), expected, rtol=tolerance, atol=tolerance)


def warm(override: opgraft.Override, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Call until the call is replayed."""
    for _ in range(1 + plans.MAX_ATTEMPTS):
        rms_norm(x, weight)
    assert len(override.plans) == 1, override.plans.refusals


def replays(override: opgraft.Override, call: Callable[[], Any], times: int = 1) -> Any:
    before = override.plans.hits
    result = call()
    assert override.plans.hits == before + times, override.plans
    return result


@pytest.fixture(autouse=True)
def triton_allocator() -> None:
    triton.set_allocator(
        lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8)
    )


@pytest.fixture
def planned() -> opgraft.Override:
    return register(triton_kernels.plain)


# ------------------------------------------------------------------ every kind of launch


@pytest.mark.parametrize("name", sorted(triton_kernels.RECORDABLE))
def test_every_launch(name: str) -> None:
    override = register(triton_kernels.RECORDABLE[name])
    warm(override, *inputs())
    x, weight = inputs()
    garbage = torch.full((64, 1024), float("nan"), device="cuda", dtype=torch.bfloat16)
    del garbage  # what a replay allocates
    check(replays(override, lambda: rms_norm(x, weight)), x, weight)


def test_a_launch_around_the_front_is_refused() -> None:
    override = register(triton_kernels.around_the_front)
    for _ in range(6):
        rms_norm(*inputs())
    (reason,) = override.plans.refusals.values()
    assert "it does not use Triton's own" in reason


def test_a_launch_on_another_stream_is_refused() -> None:
    stream = torch.cuda.Stream()

    def impl(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = triton_kernels.plain(input, normalized_shape, weight, eps)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    override = register(impl)
    for _ in range(6):
        rms_norm(*inputs())
    (reason,) = override.plans.refusals.values()
    assert "not on the stream that was current" in reason


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_misaligned_tensors_have_plans_of_their_own(planned: opgraft.Override, offset: int) -> None:
    _, weight = inputs()
    warm(planned, *inputs())
    storage = torch.randn(65 * 1024, device="cuda", dtype=torch.bfloat16)
    x = storage[offset : offset + 64 * 1024].view(64, 1024)
    for _ in range(4):
        check(rms_norm(x, weight), x, weight)
    assert len(planned.plans) == (2 if offset % 8 else 1)


def test_the_kernel_stays_although_triton_forgets_it(planned: opgraft.Override) -> None:
    x, weight = inputs()
    warm(planned, x, weight)
    triton_kernels.rms_norm.device_caches.clear()
    gc.collect()
    check(replays(planned, lambda: rms_norm(x, weight)), x, weight)


def test_cute_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    quack = pytest.importorskip("quack.rmsnorm")
    # What it has on disk it loads as functions of tvm-ffi that CuteDSL knows nothing of.
    monkeypatch.setattr(sys.modules["quack.cache"], "CACHE_ENABLED", False)

    def impl(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
        out, _, rstd = quack.rmsnorm_fwd(input, weight, eps=eps, store_rstd=True)
        return out, rstd.view(*input.shape[:-1], 1)

    override = register(impl)
    warm(override, *inputs())
    x, weight = inputs()
    check(replays(override, lambda: rms_norm(x, weight)), x, weight)


# ------------------------------------------------------------------ streams, graphs, threads


def test_a_side_stream(planned: opgraft.Override) -> None:
    x, weight = inputs()
    warm(planned, x, weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.normal_()  # late, and on this stream: a replay on another would read what was there
        result = replays(planned, lambda: rms_norm(x, weight))
    torch.cuda.current_stream().wait_stream(stream)
    check(result, x, weight)


def test_a_graph_captures_a_replay(planned: opgraft.Override) -> None:
    x, weight = inputs()
    warm(planned, x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = replays(planned, lambda: rms_norm(x, weight))
    for _ in range(2):
        x.normal_()
        graph.replay()
        check(result, x, weight)


def test_nothing_is_recorded_inside_a_capture(planned: opgraft.Override) -> None:
    x, weight = inputs()
    rms_norm(x, weight)
    recordings = planned.plans.recordings
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = rms_norm(x, weight)
        graph.replay()
        check(result, x, weight)
    assert planned.plans.recordings == recordings == 0


def test_a_thread_that_python_never_saw_and_without_the_gil(planned: opgraft.Override) -> None:
    x, weight = inputs()
    warm(planned, x, weight)
    core = loader.in_use()
    assert core is not None
    rest = ([1024], weight, EPS)
    before = planned.plans.hits
    # The tensor comes first; the others follow in the op's order.
    probes.call_on_a_thread("aten::_fused_rms_norm", [x], rest, 3)
    assert probes.needs_no_gil("aten::_fused_rms_norm", [x], rest)
    torch.cuda.synchronize()
    assert planned.plans.hits == before + 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device(planned: opgraft.Override) -> None:
    x, weight = inputs()
    warm(planned, x, weight)
    there = x.to("cuda:1"), weight.to("cuda:1")
    for _ in range(4):
        result = rms_norm(*there)
    assert len(planned.plans) == 2
    check(replays(planned, lambda: rms_norm(*there)), *there)
    check(result, *there)
    assert torch.cuda.current_device() == 0


# ------------------------------------------------------------------ when Python is wanted


def test_launch_hooks_of_triton(planned: opgraft.Override) -> None:
    x, weight = inputs()
    warm(planned, x, weight)
    seen: list[Any] = []
    runtime = triton.knobs.runtime

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    runtime.launch_enter_hook.add(hook)
    try:
        replays(planned, lambda: rms_norm(x, weight), times=0)
        assert seen == ["rms_norm"]
    finally:
        runtime.launch_enter_hook.remove(hook)
    replays(planned, lambda: rms_norm(x, weight))
    with runtime.scope():
        runtime.launch_exit_hook = hook  # another than the chain of hooks that was there
        replays(planned, lambda: rms_norm(x, weight), times=0)
        assert len(seen) == 2
    replays(planned, lambda: rms_norm(x, weight))


def test_deterministic_fill(planned: opgraft.Override) -> None:
    x, weight = inputs()
    warm(planned, x, weight)
    torch.use_deterministic_algorithms(True)
    try:
        replays(planned, lambda: rms_norm(x, weight), times=0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_profiler_sees_the_kernel(planned: opgraft.Override) -> None:
    x, weight = inputs()
    warm(planned, x, weight)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        replays(planned, lambda: rms_norm(x, weight))
        torch.cuda.synchronize()
    names = {event.name for event in profile.events()}
    assert "aten::_fused_rms_norm" in names
    assert "rms_norm" in names


# ------------------------------------------------------------------ memory and errors


def test_memory_of_replays_is_what_the_results_take() -> None:
    override = register(triton_kernels.with_two_launches)
    x, weight = inputs()
    warm(override, x, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results = [replays(override, lambda: rms_norm(x, weight)) for _ in range(10)]
    assert torch.cuda.memory_allocated() == before + 10 * (64 * 1024 * 2 + 512)
    del results
    assert torch.cuda.memory_allocated() == before


def test_out_of_memory(planned: opgraft.Override) -> None:
    x, weight = inputs(2**15, 2**15)  # 2 GiB
    warm(planned, x, weight)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**30) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            rms_norm(x, weight)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(planned.plans) == 1
    y, rstd = replays(planned, lambda: rms_norm(x, weight))
    check((y[:8], rstd[:8]), x[:8], weight)


def test_a_forked_child_gets_an_error(planned: opgraft.Override) -> None:
    x, weight = inputs()
    warm(planned, x, weight)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            rms_norm(x, weight)
        except RuntimeError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(replays(planned, lambda: rms_norm(x, weight)), x, weight)


# ------------------------------------------------------------------ the shipped kernels


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> dict[str, opgraft.Override]:
    # Whatever tables say.
    monkeypatch.setattr("opgraft_kernels.norms.overrides._crossover", lambda *_, **__: None)
    every = opgraft_kernels.register()
    return {override.name: override for override in every if override.plans is not None}


@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("hidden", [128, 1000, 1024, 4096, 65536])
def test_rms_norm_of_the_pack_by_plans(
    pack: dict[str, opgraft.Override], rows: int, hidden: int
) -> None:
    shape = [hidden]
    for override in pack.values():
        override.remove()
    forward, backward = (
        # Whatever its condition says of sizes.
        opgraft.register_op_override(
            *pack[f"opgraft_kernels.rms_norm.{way}"].op.split("::"),
            "CUDA",
            pack[f"opgraft_kernels.rms_norm.{way}"].impl,
            cond=when.numel("input") > 0,
            launch_plan=True,
            name=f"planned {way}",
        )
        for way in ("forward", "backward")
    )

    def train(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        out = F.rms_norm(leaves[0], shape, leaves[1], EPS)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    for _ in range(6):
        x, weight = inputs(rows, hidden)
        grad = torch.randn_like(x)
        mine = train(x, weight, grad)
    assert forward.plans.hits >= 1, forward.plans.refusals
    assert backward.plans.hits >= 1, backward.plans.refusals
    with opgraft.disabled():
        native = train(x, weight, grad)
        true = train(x.double(), weight.double(), grad.double())
    for result, its, reference in zip(mine, native, true, strict=True):
        floor = torch.finfo(torch.bfloat16).eps * reference.abs().max() / 4
        own = (its.double() - reference).abs().max()
        assert (result.double() - reference).abs().max() <= 2 * own + floor


def shipped_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def shipped_layer_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, weight, EPS)


def attention(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    q = x.view(2, 2048, 16, 128).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q * weight[0], q, is_causal=True)


def flash_attention(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return attention(x, weight)


@pytest.mark.parametrize("function", [shipped_rms_norm, shipped_layer_norm])
@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_shipped_norms_are_replayed(
    pack: dict[str, opgraft.Override], function: Callable[..., Any], rows: int
) -> None:
    hit = replayed(pack, function, (rows, 1024))
    name = function.__name__.removeprefix("shipped_")
    assert hit == {f"opgraft_kernels.{name}.{way}" for way in ("forward", "backward")}


@pytest.mark.parametrize("function", [shipped_rms_norm, shipped_layer_norm])
@pytest.mark.parametrize("hidden", [65536, 131072])
def test_shipped_norms_over_clusters_are_replayed(
    pack: dict[str, opgraft.Override], function: Callable[..., Any], hidden: int
) -> None:
    if not cutedsl_utils.runtime_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper and CuteDSL")
    hit = replayed(pack, function, (2**24 // hidden, hidden))
    name = function.__name__.removeprefix("shipped_")
    assert hit == {f"opgraft_kernels.{name}.{way}_by_cluster" for way in ("forward", "backward")}


@pytest.mark.parametrize("function", [attention, flash_attention])
def test_shipped_attention_is_replayed(
    pack: dict[str, opgraft.Override], function: Callable[..., Any]
) -> None:
    hit = replayed(pack, function, (2 * 2048 * 16, 128))
    attention = {name for name in hit if ".attention." in name}
    assert len(attention) == 2 and any(name.endswith("_backward") for name in attention), hit
    if "opgraft_kernels.attention.cutedsl.scaled_dot_product_cudnn_attention" in pack:
        assert all(".cutedsl." in name for name in attention)


def replayed(
    pack: dict[str, opgraft.Override], function: Callable[..., Any], shape: tuple[int, ...]
) -> set[str]:
    """The overrides whose plans a training step of a function replays; checks its results."""

    def train(dtype: torch.dtype, function: Callable[..., Any] = function) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype).view(out.shape))]

    torch.manual_seed(0)
    x, weight = inputs(*shape)
    grad = torch.randn_like(x)
    for _ in range(8):
        train(torch.bfloat16)
    before = {name: override.plans.hits for name, override in pack.items()}
    mine = train(torch.bfloat16)
    hit = {name for name, override in pack.items() if override.plans.hits > before[name]}
    with opgraft.disabled():
        native = train(torch.bfloat16)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            exact = train(torch.float32, attention if function is flash_attention else function)
    for result, its, reference in zip(mine, native, exact, strict=True):
        floor = torch.finfo(torch.bfloat16).eps * reference.abs().max() / 4
        own = (its - reference).abs().max()
        assert (result - reference).abs().max() <= 2 * own + floor
    return hit


# ------------------------------------------------------------------ everything at once


def test_threads_streams_changing_shapes_evictions_and_toggling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 32)
    monkeypatch.setattr(plans, "REPLAYS_PER_RECORDING", 2)
    override = register(triton_kernels.with_two_launches, name="planned")
    hidden_sizes = (128, 256, 1024)
    shapes = [(rows, hidden) for rows in range(1, 200) for hidden in hidden_sizes]
    threads, errors = 8, []
    for hidden in hidden_sizes:
        rms_norm(*inputs(1, hidden))  # compiled
    streams = [torch.cuda.Stream() for _ in range(2)]
    worst = torch.zeros(threads, device="cuda", dtype=torch.float64)
    barrier = threading.Barrier(threads + 1)
    torch.cuda.synchronize()

    def run(index: int, calls: int) -> None:
        rng = random.Random(index)
        with torch.cuda.stream(streams[index % 2]), torch.no_grad():
            for _ in range(calls):
                # A few shapes come often, and the rest seldom.
                some = shapes[:40] if rng.random() < 0.8 else shapes
                x, weight = inputs(*rng.choice(some), dtype=torch.float32)
                out, rstd = rms_norm(x, weight)
                true = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
                error = (out - x * true * weight).abs().max() + (rstd / true - 1).abs().max()
                # NaN stays: garbage must not be lost.
                worst[index] = torch.maximum(worst[index], error.double())

    def guarded(index: int) -> None:
        try:
            for calls in (CALLS // 4, CALLS - CALLS // 4):
                run(index, calls // threads)
                torch.cuda.synchronize()
                barrier.wait(300)
                barrier.wait(300)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    workers = [threading.Thread(target=guarded, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    memory, recorded = [], 0
    try:
        for _ in range(2):
            while barrier.n_waiting < threads and not errors:
                # Fewer calls are for tools that slow them down: a recording must fit in between.
                time.sleep(0.2 * max(1, 10_000 // CALLS))
                recorded = max(recorded, override.plans.recordings)
                opgraft.disable(name="planned")
                opgraft.enable(name="planned")
            barrier.wait(300)
            gc.collect()
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_allocated())
            barrier.wait(300)
    except threading.BrokenBarrierError:
        pass
    for worker in workers:
        worker.join()
    assert not errors, errors
    assert float(worst.max()) < 1e-3, worst
    assert max(recorded, override.plans.recordings) > 0
    assert override.hits > CALLS // 50  # while it was not disabled
    assert abs(memory[1] - memory[0]) <= 2**20, memory


# ------------------------------------------------------------------ what a plan relies on


def register_as(op: str, impl: Callable[..., Any]) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten", op, "CUDA", impl, unconditional_override=True, launch_plan=True
    )


def test_two_slices_of_one_storage() -> None:
    def second(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self)
        triton_kernels.scale(torch.broadcast_tensors(self, other)[1], out, 2.0)
        return out

    override = register_as("mul.Tensor", second)
    for distance in (256, 256, 256, 256, 512, 256, 512, 512, 512):
        qkv = torch.randn(1024, device="cuda")
        q, k = qkv[:256], qkv[distance : distance + 256]
        assert torch.equal(q.mul(k), k + k)
    assert override.plans.hits > 2


def test_an_op_that_writes() -> None:
    def relu_(self: torch.Tensor) -> torch.Tensor:
        triton_kernels.scale(self, self, 2.0)
        return self

    override = register_as("relu_", relu_)
    for _ in range(6):
        x = torch.randn(1000, device="cuda")
        expected = x + x
        assert torch.relu_(x) is x
        assert torch.equal(x, expected)
    assert override.plans.hits == 3


def test_another_overlap_of_the_output() -> None:
    def neg(self: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        triton_kernels.scale(self.clone(), out, -1.0)
        return out

    override = register_as("neg.out", neg)
    for shift in (512, 512, 512, 512, 16, 16, 512, 16, 16, -16):
        base = torch.randn(2048, device="cuda")
        x, out = base[600:1000], base[600 + shift : 1000 + shift]
        expected = 0.0 - x
        try:
            torch.neg(x, out=out)
        except RuntimeError as error:  # native refuses it, where it runs beside the first hits
            assert abs(shift) < len(x) and "refer to a single memory location" in str(error)
            continue
        assert torch.equal(out, expected)
    assert override.plans.hits > 1


def test_another_dtype_of_autocast() -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        product = self @ self.t()
        out = torch.empty_like(product)
        triton_kernels.scale(product, out, 2.0)
        return out.float()

    override = register_as("_softmax", impl)
    for dtype in [torch.bfloat16] * 4 + [torch.float16, torch.bfloat16] * 4:
        x = torch.randn(16, 16, device="cuda")
        with torch.autocast("cuda", dtype=dtype):
            got = torch.ops.aten._softmax(x, -1, False)
            expected = impl(x, -1, False)
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
    assert override.plans.hits > 1
