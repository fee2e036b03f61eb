"""The rules that every override lives by, one by one, at the CPU key."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import router, when
from opgraft.ops.schema import resolve
from opgraft.registry import registry
from opgraft.router import decision, dispatcher
from tests import ops
from tests.modes import RecordOps


def override_softmax(impl: object = ops.softmax, **keywords: object) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    return opgraft.register_op_override("aten", "_softmax", "CPU", impl, **keywords)  # type: ignore[arg-type]


def override_rms_norm(impl: object = ops.rms_norm, **keywords: object) -> opgraft.Override:
    keywords.setdefault("unconditional_override", True)
    return opgraft.register_op_override("aten", "_fused_rms_norm", "CPU", impl, **keywords)  # type: ignore[arg-type]


# ------------------------------------------------------------------ install once


def test_the_router_goes_in_once_and_stays() -> None:
    first = override_softmax()
    chain = registry.chain(resolve("aten::_softmax"), "CPU")
    installed = router.installed(chain)
    first.remove()
    override_softmax()
    assert router.installed(chain) is installed
    first.remove()  # twice is fine


def test_a_removed_override_leaves_the_native_result() -> None:
    x = torch.randn(3, 4)
    override = override_softmax(lambda self, dim, half_to_float: torch.zeros_like(self))
    override.remove()
    assert torch.equal(torch.softmax(x, -1), torch.ops.aten._softmax(x, -1, False))
    assert torch.softmax(x, -1).sum().item() == pytest.approx(3)
    assert override.hits == 0


# ------------------------------------------------------------------ no recursion


def test_the_same_op_inside_an_impl_is_the_native_kernel() -> None:
    override = opgraft.register_op_override("aten", "_softmax", "CPU", ops.softmax_by_itself)
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.softmax(x, -1), ops.softmax(x, -1, False))
    assert (override.hits, override.fallbacks) == (1, 1)


def test_another_op_inside_an_impl_is_routed() -> None:
    inner = override_softmax()

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return torch.softmax(self, dim).log()

    outer = opgraft.register_op_override(
        "aten", "_log_softmax", "CPU", impl, unconditional_override=True
    )
    torch.log_softmax(torch.randn(3, 4), -1)
    assert (outer.hits, inner.hits) == (1, 1)


def test_a_thread_that_an_impl_starts_gets_overrides() -> None:
    calls: list[int] = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if not calls:
            calls.append(1)
            thread = threading.Thread(target=torch.softmax, args=(torch.randn(2, 2), -1))
            thread.start()
            thread.join()
        return ops.softmax(self, dim, half_to_float)

    override = override_softmax(impl)
    torch.softmax(torch.randn(3, 4), -1)
    assert override.hits == 2


# ------------------------------------------------------------------ derivative


def test_autograd_is_native_and_the_backward_op_is_an_op_of_its_own() -> None:
    forward = override_softmax()

    def impl(
        grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
    ) -> torch.Tensor:
        return (grad_output - (grad_output * output).sum(dim, keepdim=True)) * output

    backward = opgraft.register_op_override(
        "aten", "_softmax_backward_data", "CPU", impl, unconditional_override=True
    )
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: torch.softmax(x, -1), x)
    assert torch.autograd.gradgradcheck(lambda x: torch.softmax(x, -1), x)
    assert forward.hits > 0
    assert backward.hits > 0


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (4,), torch.arange(1.0, 5.0, dtype=x.dtype), 1e-6)


COMPOSITE_DERIVATIVES = {
    "backward": lambda x: torch.func.grad(lambda x: norm(x).sin().sum())(x),
    "double backward": lambda x: torch.func.hessian(lambda x: norm(x).sin().sum())(x),
    "jvp": lambda x: torch.func.jvp(norm, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda x: torch.func.jacrev(norm)(x),
    "vmap of grad": lambda x: torch.vmap(torch.func.grad(lambda x: norm(x).sin().sum()))(x),
}


@pytest.mark.parametrize("name", COMPOSITE_DERIVATIVES)
def test_a_composite_op_keeps_its_derivative(name: str) -> None:
    x = torch.randn(3, 4, dtype=torch.double)
    expected = COMPOSITE_DERIVATIVES[name](x)
    override = override_rms_norm(_shifted_rms_norm)
    torch.testing.assert_close(COMPOSITE_DERIVATIVES[name](x), expected)
    assert override.hits == 0


def _shifted_rms_norm(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong on purpose: where it ran, a result is off by one."""
    out, rstd = ops.rms_norm(*args)  # type: ignore[arg-type]
    return out + 1, rstd


def test_a_composite_op_is_overridden_where_nothing_is_differentiated() -> None:
    override = override_rms_norm()
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        norm(x)
    with torch.inference_mode():
        norm(x)
    norm(x.detach())
    assert override.hits == 3
    norm(x)
    assert override.hits == 3


# ------------------------------------------------------------------ right device


def test_tensors_on_different_devices_miss() -> None:
    override = opgraft.register_op_override(
        "aten", "where.self", "CPU", lambda *args: args[1], unconditional_override=True
    )
    op = torch.ops.aten.where.self
    x = torch.randn(3)
    report = opgraft.explain(op, x > 0, x, torch.empty(3, device="meta"))
    assert report.winner is None
    assert "different devices: cpu, meta" in str(report)
    assert override.hits == 0


def test_conjugated_tensors_miss() -> None:
    # mm is one of the ops that torch lets see a lazily conjugated tensor.
    x = torch.randn(2, 2, dtype=torch.complex64)
    expected = x.conj().resolve_conj() @ x
    override = opgraft.register_op_override(
        "aten", "mm", "CPU", lambda self, mat2: self.new_zeros(2, 2), unconditional_override=True
    )
    torch.testing.assert_close(x.conj() @ x, expected)
    assert (override.hits, override.misses) == (0, 1)


# ------------------------------------------------------------------ order


def test_the_last_registered_of_the_users_own_is_asked_first() -> None:
    first, second = override_softmax(name="a"), override_softmax(name="b")
    torch.softmax(torch.randn(2, 2), -1)
    assert (first.hits, second.hits) == (0, 1)


def test_higher_priority_is_asked_first() -> None:
    high, low = override_softmax(name="a", priority=1), override_softmax(name="b")
    torch.softmax(torch.randn(2, 2), -1)
    assert (high.hits, low.hits) == (1, 0)


def test_the_first_condition_that_holds_wins_and_every_decline_is_counted() -> None:
    wide = override_softmax(name="wide", cond=when.size("self", -1) >= 8)
    any_size = override_softmax(name="any", priority=-1)
    torch.softmax(torch.randn(2, 8), -1)
    torch.softmax(torch.randn(2, 4), -1)
    assert (wide.hits, wide.misses) == (1, 1)
    assert (any_size.hits, any_size.misses) == (1, 0)


# ------------------------------------------------------------------ the rest of torch goes on


def test_under_vmap_the_op_and_its_override_see_the_batch() -> None:
    override = override_softmax()
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(
        torch.vmap(lambda x: torch.softmax(x, -1))(x), ops.softmax(x, -1, False)
    )
    assert override.hits == 1


def test_under_a_dispatch_mode_and_a_fake_mode() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    override = override_softmax()
    with RecordOps() as seen:
        torch.softmax(torch.randn(2, 2), -1)
    assert "aten._softmax.default" in seen.ops
    assert override.hits == 1
    with FakeTensorMode():
        assert torch.softmax(torch.randn(2, 2), -1).shape == (2, 2)
    assert override.hits == 1


def test_autocast_casts_before_the_override() -> None:
    seen: list[torch.dtype] = []

    def impl(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
        seen.append(self.dtype)
        return opgraft.native("aten::mm")(self, mat2)  # type: ignore[no-any-return]

    override = opgraft.register_op_override("aten", "mm", "CPU", impl, unconditional_override=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.randn(2, 3) @ torch.randn(3, 4)
    assert override.hits == 1
    assert seen == [torch.bfloat16]


def test_checkpoint_and_functional_call() -> None:
    from torch.utils.checkpoint import checkpoint

    override = override_softmax()
    x = torch.randn(3, 4, requires_grad=True)
    checkpoint(lambda x: torch.softmax(x, -1).square().sum(), x, use_reentrant=False).backward()
    assert override.hits == 2
    layer = torch.nn.Softmax(-1)
    torch.func.functional_call(layer, {}, (x,))
    assert override.hits == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_runs_the_override_without_a_break(backend: str) -> None:
    override = override_softmax(cond=when.size("self", 0) >= 4)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch.softmax(x * 2, -1) + 1, backend=backend, fullgraph=True, dynamic=True
    )
    for rows in (8, 3, 5):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(compiled(x), ops.softmax(x * 2, -1, False) + 1)
    assert (override.hits, override.misses) == (2, 1)


# ------------------------------------------------------------------ threads


def test_counters_lose_nothing_across_threads() -> None:
    override = override_softmax(cond=when.size("self", -1) >= 4)

    def work() -> None:
        for _ in range(300):
            torch.softmax(torch.ones(1, 4), -1)
            torch.softmax(torch.ones(1, 2), -1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (override.hits, override.misses) == (1200, 1200)


def test_ten_thousand_swaps_while_four_threads_call() -> None:
    x = torch.randn(4, 8)
    expected = ops.softmax(x, -1, False)
    override_softmax().remove()  # the router is in; from here on only snapshots are swapped
    stop = threading.Event()
    wrong: list[object] = []
    hits: list[int] = []

    def call() -> None:
        while not stop.is_set():
            try:
                result = torch.softmax(x, -1)
                if not torch.allclose(result, expected, atol=1e-6):
                    wrong.append(result)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for swap in range(5_000):
            override = override_softmax()
            if swap % 50 == 0:
                time.sleep(0.001)  # let the callers meet it: registering alone keeps the GIL
            override.remove()
            hits.append(override.hits)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert sum(hits) > 0


def test_calls_during_interpreter_shutdown_are_misses() -> None:
    program = """
import atexit, torch, opgraft
opgraft.register_op_override(
    "aten", "_softmax", "CPU", lambda self, dim, half: self * 0 + 0.5, unconditional_override=True
)
class Late:
    def __init__(self): self.x = torch.zeros(2)
    def __del__(self): torch.softmax(self.x, -1)
late = Late()
atexit.register(lambda: torch.softmax(torch.zeros(2), -1))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


# ------------------------------------------------------------------ odd tensors


def override_relu(**keywords: object) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten",
        "relu",
        "CPU",
        lambda self: self.clamp_min(0),
        unconditional_override=True,
        **keywords,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kind", ["negated", "zero"])
def test_what_is_lazy_reaches_an_impl_in_memory_or_not_at_all(kind: str) -> None:
    # For most ops torch fills the memory in before the kernel; the router declines what comes lazy.
    if kind == "negated":
        lazy = torch.view_as_complex(torch.randn(3, 2)).conj().imag
        assert lazy.is_neg()
    else:
        lazy = torch._efficientzerotensor((3,))
    seen: list[bool] = []

    def impl(self: torch.Tensor) -> torch.Tensor:
        seen.append(self.is_neg() or self._is_zerotensor())
        return self.clamp_min(0)

    override = opgraft.register_op_override(
        "aten", "relu", "CPU", impl, unconditional_override=True
    )
    torch.testing.assert_close(torch.relu(lazy), lazy.clone().clamp_min(0))
    assert (override.hits, seen) == (1, [False])
    assert opgraft.explain("aten::relu", lazy).winner is override


def test_parameters_and_plain_subclasses_are_tensors_like_others() -> None:
    class Plain(torch.Tensor):
        pass

    override = override_relu()
    with torch.no_grad():
        torch.relu(torch.nn.Parameter(torch.randn(3)))
        result = torch.relu(torch.randn(3).as_subclass(Plain))
    assert isinstance(result, Plain)
    assert override.hits == 2


def test_a_wrapper_subclass_reaches_the_override_by_what_it_wraps() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    override = override_relu()
    result = torch.relu(TwoTensor(torch.randn(3), torch.randn(3)))
    assert isinstance(result, TwoTensor)
    assert override.hits == 2


def test_an_absent_tensor_arrives_as_none_and_may_be_returned_as_none() -> None:
    seen: list[object] = []

    def impl(*args: object) -> object:
        seen.append(args[5])
        return opgraft.native("aten::native_layer_norm_backward")(*args)

    override = opgraft.register_op_override(
        "aten", "native_layer_norm_backward", "CPU", impl, unconditional_override=True
    )
    x = torch.randn(3, 4, requires_grad=True)
    torch.nn.functional.layer_norm(x, (4,)).square().sum().backward()
    assert x.grad is not None
    assert override.hits == 1
    assert seen == [None]


def test_an_op_that_is_defined_anew_with_other_arguments_is_left_alone() -> None:
    for schema, arguments in (
        ("again(Tensor x) -> Tensor", 1),
        ("again(Tensor x, Tensor y) -> Tensor", 2),
    ):
        with torch.library._scoped_library("opgraft_again", "FRAGMENT") as library:
            library.define(schema)
            library.impl("again", lambda *args: args[-1] * 2, "CPU")
            if arguments == 1:
                override = opgraft.register_op_override(
                    "opgraft_again", "again", "CPU", lambda x: x + 1, unconditional_override=True
                )
            torch.ops.opgraft_again.again(*[torch.ones(2)] * arguments)
    assert override.hits == 1


def test_a_call_that_is_captured_before_it_ran_is_natives_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device that stands for a GPU: the CPU has no captures."""
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    on_device = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    with torch.library._scoped_library("opgraft_captured", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "PrivateUse1")
        override = opgraft.register_op_override(
            *("opgraft_captured", "twice", "PrivateUse1", lambda x: x + x),
            unconditional_override=True,
        )
        twice = torch.ops.opgraft_captured.twice.default
        with pytest.warns(opgraft.OverrideWarning, match="before the capture") as warned:
            for _ in range(2):
                twice.redispatch(on_device, torch.ones(2, device="meta"))
        override.remove()
    assert len(warned) == 1 and override.name in str(warned[0].message)
    assert (override.hits, override.misses) == (0, 2)


def test_the_python_router_warns_of_such_a_call_too() -> None:
    override = override_softmax()
    call = resolve("aten::_softmax").bind((torch.ones(2, 3), -1, False), {})
    with pytest.warns(opgraft.OverrideWarning, match="before the capture") as warned:
        taken = [decision.takes(override, call, capturing=True) for _ in range(2)]
    assert (taken, len(warned), override.misses) == ([False, False], 1, 2)


def test_a_router_in_python_leaves_others_registrations_on_torchs_list() -> None:
    """Impls of an op with a kernel in Python see autocast, those of its next router too."""
    with torch.library._scoped_library("opgraft_listed", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        op = resolve("opgraft_listed::twice")
        assert not dispatcher.is_registered_in_python(op, "CPU")
        dispatcher.register(op, "CPU", lambda keys, x: x * 2)._destroy()
        assert not dispatcher.is_registered_in_python(op, "CPU")
        library.impl("twice", lambda x: x * 2, "CPU")
        for _ in range(2):
            dispatcher.register(op, "CPU", lambda keys, x: x + x)._destroy()
            assert dispatcher.is_registered_in_python(op, "CPU")
