"""Others at an op and dispatch key of ours, before and after us: all work, in an order we know."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.explanation import neighbours
from tests import forked_programs, ops
from tests.python_router import run_again, where_the_core_routes

ROOT = Path(__file__).resolve().parents[1]
# A router goes in once, and what is before us must be there by then: an op of one test each.
OPS = {"torch._native": ("asinh", "acosh")}
OTHERS = (
    *("sinh", "cosh", "tan", "atan", "expm1", "log1p", "log10", "log2", "erf", "erfc", "exp2"),
    *("rsqrt", "tanh", "sigmoid", "digamma", "lgamma", "frac", "ceil", "floor", "trunc"),
)
X = torch.rand(4, 8) + 1.5


def an_op() -> str:
    """One that has no router yet: tests of other files, which draw their ops, may come before."""
    routed = {each.op for each in neighbours()}
    return next(op for op in OTHERS if f"aten::{op}" not in routed)


def override(op: str, *, takes: bool = True) -> opgraft.Override:
    """Ours adds 100, on wide tensors or nowhere."""
    wide = when.size("self", -1) >= (8 if takes else 10**6)

    def impl(self: torch.Tensor) -> torch.Tensor:
        return torch.full_like(self, 100)

    return opgraft.register_op_override("aten", op, "CPU", impl, cond=wide, name="ours")


@contextmanager
def third_party(op: str, **options: Any) -> Iterator[list[int]]:
    """A plain `torch.library` kernel that counts its calls and goes on to what was there."""
    calls: list[int] = []
    library = torch.library.Library("aten", "IMPL")
    below = torch.library.get_kernel(f"aten::{op}", "CPU")

    def kernel(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return below.call_boxed(keyset, *args, **kwargs)

    library.impl(op, kernel, "CPU", with_keyset=True, **options)
    try:
        yield calls
    finally:
        library._destroy()


def of(op: str) -> opgraft.explanation.Neighbours:
    address = (f"aten::{op}", "CPU")
    (found,) = [each for each in neighbours() if (each.op, each.dispatch_key) == address]
    return found


def call(op: str, x: torch.Tensor = X) -> torch.Tensor:
    result: torch.Tensor = getattr(torch, op)(x)
    return result


def test_a_third_party_before_us_is_what_a_miss_runs() -> None:
    op = an_op()
    expected = call(op)
    with third_party(op) as calls:
        ours = override(op)
        assert call(op)[0, 0] == 100
        assert calls == [1]  # a first hit is compared with native
        torch.testing.assert_close(call(op, X[:, :4]), expected[:, :4])
        assert calls == [1, 1]
        assert (ours.hits, ours.misses) == (1, 1)
        assert [kernel.owner for kernel in of(op).below][1:] == ["PyTorch"]
        assert __file__.rsplit("/", 1)[1] in of(op).below[0].origin
        report = str(opgraft.explain(f"aten::{op}", X[:, :4]))
        assert "the native kernel is registered at" in report
        assert __file__.rsplit("/", 1)[1] in report
    # It has taken its kernel back, and misses go on.
    torch.testing.assert_close(call(op, X[:, :4]), expected[:, :4])
    assert ours.misses >= 2


@pytest.mark.parametrize("options", [{}, {"allow_override": False}, {"allow_override": True}])
def test_a_third_party_after_us_is_on_top_and_reaches_us(options: dict[str, Any]) -> None:
    op = an_op()
    expected = call(op)
    ours = override(op)
    with third_party(op, **options) as calls:
        assert call(op)[0, 0] == 100
        torch.testing.assert_close(call(op, X[:, :4]), expected[:, :4])
        assert calls == [1, 1]
        assert (ours.hits, ours.misses) == (1, 1)
        assert __file__.rsplit("/", 1)[1] in of(op).above[0].origin
        assert "opgraft" in str(of(op))
        assert "shadowed by a kernel that was registered on top" in str(
            opgraft.explain(f"aten::{op}", X)
        )
    assert of(op).above == ()
    assert of(op).is_alone
    assert call(op)[0, 0] == 100


@contextmanager
def torch_native(
    op: str, impl: Callable[..., Any], dsl: str, *, installed: bool = True
) -> Iterator[Any]:
    """An override of torch's own registry, on tensors of eight columns.

    What installs and removes it is what switches a DSL on and off, since that is public.
    """
    registry = pytest.importorskip("torch._native.registry")
    if not hasattr(registry, "reenable_op_overrides"):
        pytest.skip("this torch._native installs its overrides in another way")

    def is_eight_wide(self: torch.Tensor) -> bool:
        return self.shape[-1] == 8

    registry.register_op_override(dsl, "aten", op, "CPU", is_eight_wide, impl)
    if installed:
        registry.reenable_op_overrides(enable_dsl_names=dsl)
    try:
        yield registry
    finally:
        if installed:
            registry.deregister_op_overrides(disable_dsl_names=dsl)
        # The key begins with the namespace in newer versions of torch.
        for key in [key for key in registry._graphs if key[-2:] == (op, "CPU")]:
            del registry._graphs[key]


def test_torch_native_before_us_is_what_a_miss_runs() -> None:
    op = OPS["torch._native"][0]
    expected = call(op)
    with torch_native(op, lambda self: torch.full_like(self, -1), "before") as registry:
        ours = override(op, takes=False)
        assert call(op)[0, 0] == -1  # we miss, torch._native takes it
        torch.testing.assert_close(call(op, X[:, :4]), expected[:, :4])  # nobody does
        assert ours.misses == 2
        assert of(op).below[0].owner == "torch._native"
        assert of(op).torch_native == ("before",)
        assert "the native kernel is torch._native" in str(opgraft.explain(f"aten::{op}", X))
        wide = override(op)
        assert call(op)[0, 0] == 100  # and ours come first
        wide.remove()
        # torch._native switches its own off and on again: what it captures by then is our router.
        registry.deregister_op_overrides(disable_dsl_names="before")
        torch.testing.assert_close(call(op, X[:, :4]), expected[:, :4])
        registry.reenable_op_overrides(enable_dsl_names="before")
        assert call(op)[0, 0] == -1
        torch.testing.assert_close(call(op, X[:, :4]), expected[:, :4])
        assert of(op).above[0].owner == "torch._native"
    torch.testing.assert_close(call(op, X[:, :4]), expected[:, :4])


def test_torch_native_after_us_is_on_top_and_falls_back_to_us() -> None:
    op = OPS["torch._native"][1]
    expected = call(op)
    ours = override(op)
    wide = torch.rand(4, 9) + 1.5
    with torch_native(op, lambda self: torch.full_like(self, -1), "after"):
        assert call(op)[0, 0] == -1  # torch._native takes it before we are asked
        assert ours.hits == 0
        assert call(op, wide)[0, 0] == 100  # it does not want this one
        torch.testing.assert_close(call(op, X[:, :4]), expected[:, :4])
        assert (ours.hits, ours.misses) == (1, 1)
        assert of(op).above[0].owner == "torch._native"
        note = str(opgraft.explain(f"aten::{op}", wide))
        assert "torch._native" in note
        assert "it is called first" in note
    assert call(op)[0, 0] == 100


def test_torch_native_overrides_that_are_switched_off_are_said() -> None:
    op = "erfinv"
    override(op)
    with torch_native(op, lambda self: self, "off", installed=False):
        assert of(op).torch_native == ("off",)
        assert not of(op).is_alone
        assert "torch._native has overrides here too (off)" in str(
            opgraft.explain(f"aten::{op}", X)
        )
    assert of(op).torch_native == ()


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
Q = torch.randn(1, 2, 16, 64)


def logsumexp(query: torch.Tensor) -> torch.Tensor:
    batch, heads, length, _ = query.shape
    return query.new_zeros(batch, length, heads).transpose(1, 2)


@contextmanager
def flash_attention_impl() -> Iterator[list[int]]:
    """A flash attention implementation, activated as FA4 is: raw kernels that fall back to nobody.

    FA4's own go to CUDA keys and import CuteDSL; this one goes to the CPU's op.
    """
    attention = torch.nn.attention
    calls: list[int] = []

    def kernel(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return torch.full_like(query, 7), logsumexp(query)

    class Handle:
        def __init__(self) -> None:
            self.library: Any = torch.library.Library("aten", "IMPL", "CPU")
            self.library.impl(FLASH, kernel, "CPU")

        def remove(self) -> None:
            self.library = None

    attention.register_flash_attention_impl("TEST", register_fn=Handle)
    attention.activate_flash_attention_impl("TEST")
    try:
        yield calls
    finally:
        attention.restore_flash_attention_impl(_raise_warn=False)


HAS_IMPLS = hasattr(torch.nn.attention, "activate_flash_attention_impl")


@pytest.mark.skipif(not HAS_IMPLS, reason="this torch has no flash attention impls to choose from")
@pytest.mark.parametrize(
    "check",
    [
        "a_flash_attention_impl_before_us",
        "a_flash_attention_impl_that_is_restored_from_below_us",
        "a_flash_attention_impl_after_us",
        "flash_attention_4_before_us",
        "flash_attention_4_after_us",
    ],
)
def test_activated(check: str) -> None:
    # In a process where no test has put a router at that op yet: nothing is before it then.
    program = f"from tests import test_neighbours as t; t.check_{check}()"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "OPGRAFT_PACKS": "none"}
    done = forked_programs.run(program, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def attend(heads: int = 2) -> float:
    q = Q[:, :heads]
    return float(F.scaled_dot_product_attention(q, q, q)[0, 0, 0, 0])


def override_attention() -> opgraft.Override:
    """Ours gives 100, for two heads."""

    def impl(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(query, 100), logsumexp(query)

    wants = when.size("query", 1) == 2
    return opgraft.register_op_override("aten", FLASH, "CPU", impl, cond=wants, name="ours")


def explained() -> str:
    return str(opgraft.explain(F.scaled_dot_product_attention, Q, Q, Q))


def check_a_flash_attention_impl_before_us() -> None:
    with flash_attention_impl() as calls:
        ours = override_attention()
        assert attend() == 100
        assert attend(heads=1) == 7
        assert (ours.hits, ours.misses, len(calls)) == (1, 1, 2)  # a first hit is compared with it
        assert opgraft.explain(F.scaled_dot_product_attention, Q, Q, Q).winners == (ours,)
        assert "the native kernel is registered at" in explained()
        with opgraft.disabled():
            assert attend() == 7
        opgraft.disable(name="ours")
        assert attend() == 7
        opgraft.enable(name="ours")
        assert attend() == 100
        ours.remove()
        assert attend() == 7


def check_a_flash_attention_impl_that_is_restored_from_below_us() -> None:
    native = attend()
    with flash_attention_impl():
        override_attention()
    assert attend() == 100
    with opgraft.disabled():
        after_it_went = attend()
    # The compiled router has a copy of the kernel that it captured. In Python the kernel below the
    # router is looked up again.
    is_kept = loader.in_use() is not None
    assert after_it_went == (7 if is_kept else native)
    assert (of(FLASH).kept is not None) == is_kept
    assert ("and is registered no more" in explained()) == is_kept
    assert ("deregistered" in str(of(FLASH))) == is_kept
    assert of(FLASH).is_alone != is_kept
    assert (of(FLASH).as_dict()["kept"] is not None) == is_kept
    with flash_attention_impl():
        assert attend() == 7
        assert (of(FLASH).kept is not None) == is_kept
    assert attend() == 100


def check_a_flash_attention_impl_after_us() -> None:
    native = attend()
    ours = override_attention()
    with flash_attention_impl():  # on top of us: it asks nobody
        assert attend() == 7
        assert "it is called first, and decides whether they are asked" in explained()
        with opgraft.disabled():
            assert attend() == 7
        assert ours.hits == 0
    assert attend() == 100
    assert of(FLASH).is_alone
    with opgraft.disabled():
        assert attend() == native


FLASH_ON_CUDA = "_scaled_dot_product_flash_attention"


@contextmanager
def flash_attention_4() -> Iterator[None]:
    """FlashAttention-4 as torch registers it, with a module in the place of its kernels."""
    name = "flash_attn.cute.interface"
    kernels = types.ModuleType(name)
    kernels._flash_attn_fwd = kernels._flash_attn_bwd = None  # type: ignore[attr-defined]
    sys.modules[name] = kernels
    torch.nn.attention.activate_flash_attention_impl("FA4")
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
        del sys.modules[name]


def override_on_cuda() -> opgraft.Override:
    wants = when.size("query", 1) == 2
    return opgraft.register_op_override(
        "aten", FLASH_ON_CUDA, "CUDA", lambda query, *rest, **more: None, cond=wants, name="ours"
    )


def explained_on_cuda() -> str:
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(1, 2, 16, 64, device="cuda", dtype=torch.float16)
        return str(opgraft.explain(f"aten::{FLASH_ON_CUDA}", q, q, q))


def owners(kernels: tuple[opgraft.explanation.Kernel, ...]) -> list[str]:
    return [kernel.owner for kernel in kernels]


THEIRS = "torch.nn.attention.activate_flash_attention_impl"


def check_flash_attention_4_before_us() -> None:
    with flash_attention_4():
        override_on_cuda()
        (found,) = neighbours()
        assert found.above == ()
        assert owners(found.below)[0] == THEIRS
        assert f"the native kernel is {THEIRS}" in explained_on_cuda()
        assert "CUDA -> override ours" in explained_on_cuda()
    (found,) = neighbours()
    is_kept = loader.in_use() is not None
    assert (found.kept is not None and found.kept.owner == THEIRS) == is_kept
    assert (f"the native kernel is still {THEIRS}" in explained_on_cuda()) == is_kept


def check_flash_attention_4_after_us() -> None:
    override_on_cuda()
    with flash_attention_4():
        (found,) = neighbours()
        assert owners(found.above) == [THEIRS]
        assert "it takes every call, and asks none of them" in explained_on_cuda()
    (found,) = neighbours()
    assert found.above == ()
    assert THEIRS not in explained_on_cuda()


@contextmanager
def cudnn_frontend(op: str, folder: Path) -> Iterator[None]:
    """Its `cudnn.torch.install()` registers plain kernels, from a file of its own. This one returns
    what it is given."""
    file = folder / "cudnn" / "torch" / "sdpa_provider.py"
    scope: dict[str, Any] = {}
    exec(
        compile("import torch; library = torch.library.Library('aten', 'IMPL')", file, "exec"),
        scope,
    )
    try:
        scope["library"].impl(op, lambda self: self, "CPU", allow_override=True)
        yield
    finally:
        scope["library"]._destroy()


def test_cudnn_frontend_before_us_is_what_a_miss_runs(tmp_path: Path) -> None:
    op, narrow = an_op(), X[:, :4]
    expected = call(op, narrow)
    with cudnn_frontend(op, tmp_path):
        ours = override(op)
        assert call(op)[0, 0] == 100
        assert torch.equal(call(op, narrow), narrow)
        assert (ours.hits, ours.misses) == (1, 1)
        assert owners(of(op).below) == ["cudnn.torch", "PyTorch"] and of(op).above == ()
        assert "the native kernel is cudnn.torch (" in str(opgraft.explain(f"aten::{op}", narrow))
    # The compiled router has a copy of its kernel: see the flash attention impls above.
    is_kept = loader.in_use() is not None
    torch.testing.assert_close(call(op, narrow), narrow if is_kept else expected)


def test_cudnn_frontend_after_us_is_on_top(tmp_path: Path) -> None:
    op, narrow = an_op(), X[:, :4]
    expected = call(op, narrow)
    ours = override(op)
    with cudnn_frontend(op, tmp_path):
        assert owners(of(op).above) == ["cudnn.torch"]
        assert "registered on top of the overrides later, cudnn.torch (" in of(op).notes()[0]
        assert torch.equal(call(op), X)  # it asks nobody
        assert ours.hits == 0
    assert of(op).above == ()
    assert call(op)[0, 0] == 100
    torch.testing.assert_close(call(op, narrow), expected)
    assert (ours.hits, ours.misses) == (1, 1)


def test_only_pytorch_below_is_nothing_to_say() -> None:
    opgraft.register_op_override("aten", "_softmax", "CPU", ops.softmax, cond=when.ndim("self") > 7)
    found = of("_softmax")
    assert found.is_alone
    assert found.notes() == []
    assert found.as_dict()["below"][0]["owner"] == "PyTorch"


@where_the_core_routes
def test_all_of_this_and_traces_with_the_python_router() -> None:
    traces = Path(__file__).with_name("test_trace.py")
    but = "not torch_trace and not without_them and not compiled"
    run_again(__file__, traces, selected=but)
