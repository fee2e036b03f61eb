"""What the pack does to Triton's interpreter."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from opgraft import triton_utils
from opgraft_kernels import launches
from opgraft_kernels.norms import triton_kernels
from wide_sums import with_wide_sums

pytestmark = pytest.mark.skipif(
    not triton_utils.interpreted(), reason="kernels run on the GPU here"
)


def test_a_function_that_a_kernel_calls_leaves_triton_s_language_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter puts its own functions there once a launch, whatever the grid is."""
    from triton.runtime import interpreter

    patched = []
    patch = interpreter._patch_builtin

    def counted(*arguments: object) -> None:
        patched.append(arguments[0])
        patch(*arguments)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    counts = []
    triton_kernels.rms_norm_forward(torch.randn(1, 64), [64], None, 1e-6)
    patched.clear()
    for count in (1, 300):
        triton_kernels.rms_norm_forward(torch.randn(count, 64), [64], None, 1e-6)
        counts.append(len(patched))
        patched.clear()
    assert counts[0] == counts[1] > 0


def test_what_the_interpreter_put_there_is_gone_afterwards() -> None:
    triton_kernels.rms_norm_forward(torch.randn(4, 64), [64], None, 1e-6)
    assert tl.core.is_builtin(tl.load) and inspect.isfunction(tl.load)


def test_threads_launch_one_at_a_time() -> None:
    """What is the interpreter's own is there once for all threads."""
    inputs = [torch.randn(40, 64) for _ in range(4)]

    def normalise(x: torch.Tensor) -> torch.Tensor:
        return triton_kernels.rms_norm_forward(x, [64], None, 1e-6)[0]

    expected = [normalise(x) for x in inputs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # between bytecodes of each thread
    try:
        with ThreadPoolExecutor(len(inputs)) as pool:
            found = list(pool.map(normalise, inputs * 5))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(*each) for each in zip(found, expected * 5, strict=True))


def test_no_overflow_is_looked_for_that_nothing_would_tell() -> None:
    from triton.runtime import interpreter

    triton_kernels.rms_norm_forward(torch.randn(4, 64), [64], None, 1e-6)
    options = interpreter.interpreter_builder.options
    assert not options.debug and not options.sanitize_overflow


@pytest.mark.parametrize(
    ("dtype", "numpys"),
    [
        (tl.float16, "float16"),
        (tl.bfloat16, "uint16"),
        (tl.int1, "bool"),
        (tl.block_type(tl.int32, [4]), "int32"),
        (tl.pointer_type(tl.float32), "uint64"),
        (tl.block_type(tl.pointer_type(tl.float16), [2, 2]), "uint64"),
    ],
    ids=str,
)
def test_a_dtype_is_numpys_as_before(dtype: tl.dtype, numpys: str) -> None:
    from triton.runtime import interpreter

    triton_kernels.rms_norm_forward(torch.randn(4, 64), [64], None, 1e-6)
    for _ in range(2):
        assert interpreter._get_np_dtype(dtype) == numpys


def test_what_types_and_tensors_say_of_themselves_is_as_before() -> None:
    from triton.runtime import interpreter

    triton_kernels.rms_norm_forward(torch.randn(4, 64), [64], None, 1e-6)
    pointers = tl.pointer_type(tl.float16), tl.pointer_type(tl.float16, const=True)
    for element_ty in (tl.float16, tl.float32, tl.int1, *pointers):
        for shape in ([4], [4, 8], [tl.constexpr(8), 4], tl.tuple([8, 4]), [4]):
            sizes = tuple(tl.core._unwrap_if_constexpr(each) for each in shape)
            kind = tl.block_type(element_ty, shape)
            assert (kind.element_ty, kind.shape) == (element_ty, sizes)
            assert kind.numel == torch.Size(sizes).numel()
            handle = interpreter.TensorHandle(torch.zeros(sizes).bool().numpy(), tl.int1)
            for each in (tl.tensor(handle, kind), tl.tensor(handle, type=kind)):
                assert each.handle is handle and each.type == kind and each.dtype == element_ty
                assert [size.value for size in each.shape] == list(sizes)
                assert each.numel.value == kind.numel
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float16, [3])
    scalars = [tl.tensor(handle, tl.int32), tl.tensor(handle, tl.float32)]
    assert [(each.dtype, len(each.shape)) for each in scalars] == [(tl.int32, 0), (tl.float32, 0)]


def test_operands_are_made_alike_as_before() -> None:
    from triton.runtime import interpreter

    triton_kernels.rms_norm_forward(torch.randn(4, 64), [64], None, 1e-6)
    semantic = interpreter.interpreter_semantic

    def block(dtype: tl.dtype, *shape: int) -> tl.tensor:
        handle = interpreter.TensorHandle(torch.zeros(shape, dtype=torch.int8).numpy(), dtype)
        return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)

    a, b = block(tl.int32, 4, 8), block(tl.float32, 4, 8)
    assert all(map(operator.is_, semantic.broadcast_impl_value(a, b), (a, b)))
    assert semantic.cast(a, tl.int32) is a and semantic.cast(a, tl.block_type(tl.int32, [2])) is a
    assert semantic.cast(a, tl.float32).dtype == tl.float32
    for other in (block(tl.int32), block(tl.int32, 8), block(tl.int32, 4, 1)):
        for pair in (a, other), (other, a):
            both = semantic.broadcast_impl_value(*pair)
            assert [each.handle.data.shape for each in both] == [(4, 8)] * 2
            assert [list(each.type.shape) for each in both] == [[4, 8]] * 2
    with pytest.raises(ValueError, match="incompatible dimensions"):
        semantic.broadcast_impl_value(a, block(tl.int32, 8, 4))


def test_a_function_of_the_language_is_called_without_a_check_of_who_calls() -> None:
    from triton.runtime import interpreter

    triton_kernels.rms_norm_forward(torch.randn(4, 64), [64], None, 1e-6)
    if interpreter._patch_attr.__module__ != "opgraft_kernels.interpreter":
        pytest.skip("this Triton calls them in another way")

    def twice(x: int, _semantic: object = None) -> tuple[int, object]:
        return 2 * x, _semantic

    @functools.wraps(twice)
    def checked(*args: object, **kwargs: object) -> object:
        raise AssertionError("the check was called")

    language, scope = SimpleNamespace(twice=twice), interpreter._LangPatchScope()
    interpreter._patch_attr(language, "twice", checked, None, scope)
    assert language.twice(3) == language.twice(x=3) == (6, interpreter.interpreter_semantic)
    scope.restore()
    assert language.twice(3) == (6, None)


@triton.jit
def _then(a, b, c, d):
    """x -> a * x + b, and then x -> c * x + d: which of them is first matters."""
    return a * c, b * c + d


@triton.jit
def _reduce_kernel(a_ptr, b_ptr, AXIS: tl.constexpr, KEEPS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    a, b = tl.reduce((tl.load(a_ptr + at), tl.load(b_ptr + at)), AXIS, _then, keep_dims=KEEPS)
    to = tl.arange(0, SIZE)
    if KEEPS:
        to = tl.expand_dims(to, AXIS)
    tl.store(a_ptr + to, a)
    tl.store(b_ptr + to, b)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_reduction_by_an_own_function_combines_blocks_in_their_order(
    is_own: bool, axis: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_kernels.rms_norm_forward(torch.randn(4, 64), [64], None, 1e-6)
    calls, combine = [], _then.fn

    def counted(*values: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        calls.append(values)
        return combine(*values)

    counted.__module__ = "opgraft_kernels.counted" if is_own else __name__
    monkeypatch.setattr(_then, "fn", counted)
    a, b = torch.randint(-2, 3, (2, 4, 8)).float()
    expected = a.select(axis, 0), b.select(axis, 0)
    for c, d in zip(a.unbind(axis)[1:], b.unbind(axis)[1:], strict=True):
        expected = expected[0] * c, expected[1] * c + d
    size = expected[0].numel()
    _reduce_kernel[1,](a, b, axis, keeps, size)
    assert torch.equal(a.flatten()[:size], expected[0])
    assert torch.equal(b.flatten()[:size], expected[1])
    assert len(calls) == ((2, 3)[axis] if is_own else 32 - size)


@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.parametrize("partials", [5, 64, 65, 150])  # one step of either tile, and more
@pytest.mark.parametrize("hidden", [7, 200, 1024, 2100])
def test_sums_of_wide_programs_have_the_bits_of_those_that_a_gpu_runs(
    hidden: int, partials: int, has_other: bool
) -> None:
    """Tests run the wide ones, see `few_programs_of_sums`."""
    partial = torch.randn(*([2] if has_other else []), partials, hidden)

    def sums(change: Callable[[launches.Launch], launches.Launch]) -> list[torch.Tensor]:
        found = list(torch.full((1 + has_other, hidden), torch.nan))
        launch = change(launches.plan_sum(partial, *found))
        launch.kernel[(launch.grid,)](*launch.arguments, **launch.keywords)
        return found

    narrow, wide = sums(lambda launch: launch), sums(with_wide_sums)
    expected = partial.double().sum(-2).view(1 + has_other, hidden)
    for one, other, right in zip(narrow, wide, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-4)


def test_sums_of_wide_programs_have_fewer() -> None:
    """Still several for each of two matrices, where a row has more columns than one."""
    launch = launches.plan_sum(torch.zeros(2, 5, 2100), torch.zeros(2100), torch.zeros(2100))
    assert (launch.grid, with_wide_sums(launch).grid) == (66, 6)
