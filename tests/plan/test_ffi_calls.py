"""Recording tvm-ffi functions, as CuteDSL's compiled kernels are: with a C++ one, on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft.plan import ffi_calls
from tests import probes
from tests.plan.conftest import replays, warm

tvm_ffi = pytest.importorskip("tvm_ffi")

# y = factor * x, if `go`; an error without elements to take.
SOURCE = """
#include <tvm/ffi/c_api.h>
extern "C" int scale(void*, const TVMFFIAny* a, int32_t count, TVMFFIAny*) {
  auto tensor = [](const TVMFFIAny& any) {
    return any.type_index == kTVMFFIDLTensorPtr
               ? (const DLTensor*)any.v_ptr
               : (const DLTensor*)((const char*)any.v_obj + sizeof(TVMFFIObject));
  };
  const DLTensor *x = tensor(a[0]), *y = tensor(a[1]);
  if (count != 6 || a[5].type_index != kTVMFFINone || x->ndim != 2 || x->strides[1] != 1) {
    TVMFFIErrorSetRaisedFromCStr("ValueError", "scale cannot do that");
    return -1;
  }
  if (!a[4].v_int64) return 0;
  for (int64_t i = 0; i < x->shape[0] * x->shape[1]; ++i) {
    ((float*)y->data)[i] = (float)(a[2].v_float64 * a[3].v_int64) * ((const float*)x->data)[i];
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The address of the function in `SOURCE`."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("ffi")
    (folder / "scale.cpp").write_text(SOURCE)
    include = Path(tvm_ffi.__file__).parent / "include"
    library = folder / "scale.so"
    subprocess.run(
        ["c++", "-shared", "-fPIC", f"-I{include}", str(folder / "scale.cpp"), "-o", str(library)],
        check=True,
        timeout=120,
    )
    function = ctypes.CDLL(str(library)).scale
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


class ExecutionArguments:
    has_pointer_address_arg_specs = False


class Kernel(tvm_ffi.Function):  # type: ignore[name-defined]
    """What CuteDSL returns for a function with positional parameters."""

    execution_args = ExecutionArguments()

    def __call__(self, *arguments: Any) -> Any:
        return tvm_ffi.Function.__call__(self, *arguments)


class KernelWithKeywords:
    """What it returns for one with defaults."""

    execution_args = ExecutionArguments()

    def __init__(self, function: Any) -> None:
        from tvm_ffi.utils import kwargs_wrapper

        self._function = function
        self._kwargs_wrapper = kwargs_wrapper.make_kwargs_wrapper(
            function,
            arg_names=["x", "y", "factor", "times", "go", "nothing"],
            arg_defaults=(3, True, None),
        )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._kwargs_wrapper(*arguments, **keywords)

    def __tvm_ffi_object__(self) -> Any:
        return self._function


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuteDSL's module of these classes."""
    module = types.ModuleType(ffi_calls._PROVIDER)
    module.TVMFFIJitCompiledFunction = Kernel  # type: ignore[attr-defined]
    module.TVMFFIJitCompiledFunctionWithKwargs = KernelWithKeywords  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cutlass", types.ModuleType("cutlass"))
    monkeypatch.setitem(sys.modules, ffi_calls._PROVIDER, module)


@pytest.fixture
def positional(scale: int, provider: None) -> Iterator[Kernel]:
    kernel = Kernel.__new__(Kernel)
    kernel.__move_handle_from__(tvm_ffi.Function.__from_extern_c__(scale))
    yield kernel


@pytest.fixture
def with_keywords(scale: int, provider: None) -> KernelWithKeywords:
    return KernelWithKeywords(tvm_ffi.Function.__from_extern_c__(scale))


def impl_of(kernel: Any, **keywords: Any) -> Callable[..., torch.Tensor]:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = torch.empty_like(self)
        if keywords:
            kernel(self, out, 2.0, **keywords)
        else:
            kernel(self, out, 2.0, 3, True, None)
        return out

    return impl


def test_a_function_with_positional_parameters(
    register: Callable[..., opgraft.Override], positional: Kernel
) -> None:
    override = register(impl_of(positional))
    warm(override, torch.randn(4, 8))
    x = torch.randn(4, 8)
    assert torch.equal(replays(override, lambda: torch.softmax(x, -1)), 6 * x)
    (plan,) = override.plans
    assert plan.steps.endswith("call a tvm-ffi function")


def test_a_function_with_keywords(
    register: Callable[..., opgraft.Override], with_keywords: KernelWithKeywords
) -> None:
    override = register(impl_of(with_keywords, times=5))
    warm(override, torch.randn(4, 8))
    x = torch.randn(4, 8)
    assert torch.equal(replays(override, lambda: torch.softmax(x, -1)), 10 * x)


def test_a_replay_needs_no_gil(
    register: Callable[..., opgraft.Override], positional: Kernel
) -> None:
    from opgraft.core import loader

    override = register(impl_of(positional))
    x = torch.randn(4, 8)
    warm(override, x)
    core = loader.in_use()
    assert core is not None
    assert probes.needs_no_gil("aten::_softmax", [x], (-1, False))


def test_the_methods_are_put_back(
    register: Callable[..., opgraft.Override], positional: Kernel
) -> None:
    before = Kernel.__call__
    warm(register(impl_of(positional)), torch.randn(4, 8))
    assert Kernel.__call__ is before


def test_an_error_of_the_function_is_the_impls_own(
    register: Callable[..., opgraft.Override], positional: Kernel
) -> None:
    override = register(impl_of(positional))
    x = torch.randn(2, 4, 8)
    for _ in range(3):
        with pytest.raises(ValueError, match="scale cannot do that"):
            torch.softmax(x, -1)
    assert len(override.plans) == 0


def test_arguments_that_a_plan_cannot_hold(
    register: Callable[..., opgraft.Override], positional: Kernel
) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = torch.empty_like(self)
        positional(self, out, 2.0, 3, True, None)
        with contextlib.suppress(ValueError):
            positional(self, out, "a longer text", 3, True, (1, 2))
        return out

    override = register(impl)
    for _ in range(6):
        torch.softmax(torch.ones(4, 8), -1)
    (reason,) = override.plans.refusals.values()
    assert "a plan cannot hold" in reason
