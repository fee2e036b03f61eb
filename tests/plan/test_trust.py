"""What a plan relies on: calls with one key do the same, and what may differ is in no plan."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.core import loader
from opgraft.ops.schema import Call, resolve
from opgraft.plan import plans
from opgraft.plan.trial import Trial, TrialFailed, substitutes
from opgraft.ready.dry import default_dtype
from tests import probes
from tests.plan import fuzz
from tests.plan.conftest import doubled, replays, warm

Impl = Callable[..., Any]


def register(op: str, impl: Impl, **keywords: Any) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten", op, "CPU", impl, unconditional_override=True, launch_plan=True, **keywords
    )


def refusal(override: opgraft.Override) -> str:
    assert len(override.plans) == 0
    (reason,) = set(override.plans.refusals.values())
    return reason


def copy_unseen(x: torch.Tensor, y: torch.Tensor) -> None:
    """A launch that no recorder sees."""
    ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)


# ------------------------------------------------------------------ memory that is short


class _TrialWithout(Trial):
    """A trial that cannot make substitutes, or whose replays fail."""

    def __init__(self, *, substitutes: Any = None, replay: Any = None) -> None:
        router = mock.Mock(replay=mock.Mock(side_effect=replay))
        self._call_like = Call(resolve("aten::neg"), (torch.ones(2),))
        self._error = substitutes
        super().__init__(mock.Mock(), router, self._call_like, mock.Mock())

    def _substitute_calls(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._call_like, [self._call_like] * 2

    def _record(self, impl: Impl, call: Call) -> Any:
        return mock.Mock(fingerprint=1), None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("1 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["substitutes", "replay"])
def test_a_trial_without_memory_says_so(where: str, error: Exception) -> None:
    with pytest.raises(TrialFailed, match="there was no memory"):
        _TrialWithout(**{where: error}).run(mock.Mock(), mock.Mock(fingerprint=1))


# ------------------------------------------------------------------ ops that write


def negate_unseen(x: torch.Tensor, y: torch.Tensor) -> None:
    copy_unseen(-x, y)


def _written_first(impl: Impl) -> Impl:
    def written(self: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
        impl(self.clone(), self)
        return self

    return written


def _written_out(impl: Impl) -> Impl:
    def written(*inputs: Any, out: torch.Tensor, **keywords: Any) -> torch.Tensor:
        impl(next(each for each in inputs if isinstance(each, torch.Tensor)), out)
        return out

    return written


def _vectors(count: int) -> list[torch.Tensor]:
    return [torch.randn(8) for _ in range(count)]


#: Ops that write: how an impl is made of a function from one tensor to another, and how to call it.
WRITING: dict[str, tuple[Callable[[Impl], Impl], Callable[[list[torch.Tensor]], Any]]] = {
    "relu_": (_written_first, lambda t: torch.relu_(t[0])),
    "mul_.Tensor": (_written_first, lambda t: t[0].mul_(t[1])),
    "add_.Tensor": (_written_first, lambda t: t[0].add_(t[1])),
    "fill_.Scalar": (_written_first, lambda t: t[0].fill_(2.0)),
    "addcmul_": (_written_first, lambda t: t[0].addcmul_(t[1], t[2])),
    "masked_fill_.Scalar": (_written_first, lambda t: t[0].masked_fill_(t[1].isfinite(), 2.0)),
    "neg.out": (_written_out, lambda t: torch.neg(t[0], out=t[1])),
    "mul.out": (_written_out, lambda t: torch.mul(t[0], t[1], out=t[2])),
    "cumsum.out": (_written_out, lambda t: torch.cumsum(t[0], 0, out=t[1])),
}


@pytest.mark.parametrize("op", WRITING)
def test_a_launch_nobody_sees_in_an_op_that_writes_is_refused(op: str) -> None:
    make, call = WRITING[op]
    override = register(op, make(negate_unseen))
    for count in range(plans.MAX_ATTEMPTS + 4):
        tensors = _vectors(3)
        source = tensors[0].clone()
        result = call(tensors)
        assert override.hits == count + 1
        assert torch.equal(result, -source)
    assert "is not what Python computed" in refusal(override)


@pytest.mark.parametrize("op", WRITING)
def test_an_op_that_writes_is_replayed_and_written_to_once_a_call(op: str) -> None:
    make, call = WRITING[op]
    override = register(op, make(lambda x, y: probes.scale(x, y, 3.0)))
    for count in range(6):
        tensors = _vectors(3)
        source, versions = tensors[0].clone(), [each._version for each in tensors]
        result = call(tensors)
        (written,) = (each for each in tensors if result is each)
        assert torch.equal(result, 3 * source)
        changed = [each for each, v in zip(tensors, versions, strict=True) if each._version != v]
        assert [each is written for each in changed] == [True]
        assert override.hits == count + 1
    assert override.plans.hits == 3


def test_a_trial_leaves_the_arguments_alone() -> None:
    seen: list[int] = []

    def add_one(self: torch.Tensor) -> torch.Tensor:
        seen.append(self.data_ptr())
        return self.add_(1.0)

    register("relu_", add_one)
    x = torch.full((8,), -10.0)  # which relu_ writes to as well
    for count in range(1, 6):
        torch.relu_(x)
        assert x.tolist() == [count - 10] * 8
    assert seen[:2] == [x.data_ptr()] * 2
    assert len(seen) == 3
    assert seen[2] != x.data_ptr()


def test_an_impl_that_fails_in_its_trial_alone_runs_on(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        runs.append(1)
        if len(runs) % 2:
            raise ValueError("not today")
        return doubled(self, dim, half_to_float)

    runs.append(1)
    override = register("_softmax", impl)
    x = torch.randn(4, 8)
    for _ in range(5):
        assert torch.equal(torch.softmax(x, -1), 2 * x)
        runs.append(0) if len(runs) % 2 == 0 else None
    assert override.hits == 5


# ------------------------------------------------------------------ stand-ins


def _calls_for_stand_ins() -> dict[str, Call]:
    base = torch.randn(64)
    double, half = torch.randn(64, dtype=torch.float64), torch.randn(64).half()
    mixed = torch.randn(16)
    mul = resolve("aten::mul.Tensor")
    return {
        "apart": mul.bind((torch.randn(4), torch.randn(4)), {}),
        "the same": mul.bind((base[:4], base[:4]), {}),
        "one tensor twice": mul.bind((base, base), {}),
        "overlapping": mul.bind((base[1:9], base[4:12]), {}),
        "backwards": mul.bind((base[20:24], base[4:8]), {}),
        "strided": mul.bind((base.view(8, 8).t()[1:3], base.view(8, 8)[5:7]), {}),
        "expanded": mul.bind((base[3:4].expand(8), base[8:16]), {}),
        "double": mul.bind((double[1:3], double[5:7]), {}),
        "half": mul.bind((half[1:3], half[4:6]), {}),
        "integers": mul.bind((torch.arange(5), torch.arange(5)), {}),
        "booleans": mul.bind((torch.ones(5, dtype=torch.bool), base[:5]), {}),
        "complex": mul.bind((torch.randn(4, dtype=torch.complex64), base[:4]), {}),
        "8 bits": mul.bind((base.to(torch.float8_e4m3fn)[1:5], base[:4]), {}),
        "a number": mul.bind((base[:4], 2.0), {}),
        "a number in memory": mul.bind((base[:4], base[2]), {}),
        "two dtypes in one memory": mul.bind((mixed[:4], mixed.view(torch.int32)[4:8]), {}),
        "empty": mul.bind((base[:0], base[:0]), {}),
        "one of them empty": mul.bind((base[60:60], base[4:5]), {}),
        "requires grad": mul.bind((base.clone().requires_grad_(), base), {}),
        "a list": resolve("aten::cat").bind(([base[:4], base[8:16], base[:4]],), {}),
        "optional": resolve("aten::native_layer_norm").bind((base, [64], None, base, 1e-5), {}),
    }


@pytest.mark.parametrize("name", _calls_for_stand_ins())
def test_stand_ins_have_the_same_key_and_share_nothing(name: str) -> None:
    call = _calls_for_stand_ins()[name]
    others = substitutes(call)
    core = loader.in_use()
    assert core is not None
    schema = call.op.overload._schema
    keys = [
        core.plan_key(each.values, schema.name, schema.overload_name) for each in (call, others)
    ]
    assert keys[0] == keys[1]
    assert keys[0].has_same_arguments(keys[1])
    for tensor, other in zip(call.tensors(), others.tensors(), strict=True):
        assert (other.shape, other.stride(), other.dtype) == (
            (tensor.shape, tensor.stride(), tensor.dtype)
        )
        if tensor.dim() == 0:  # a number, which the key holds
            assert torch.equal(other, tensor)
            continue
        assert other.untyped_storage()._cdata != tensor.untyped_storage()._cdata
        if tensor.numel() == 0:
            continue
        assert other.data_ptr() % 512 == tensor.data_ptr() % 512
        assert other.storage_offset() != tensor.storage_offset()
        if name != "two dtypes in one memory":
            may_vary = tensor.dtype.is_floating_point or tensor.dtype.is_complex
            same = torch.equal(other.double().abs(), tensor.double().abs())
            assert same != may_vary


# ------------------------------------------------------------------ keys


def _key(*tensors: torch.Tensor) -> Any:
    core = loader.in_use()
    assert core is not None
    call = resolve("aten::addcmul").bind(tensors, {})
    return core.plan_key(call.values, "aten::addcmul", "")


@pytest.mark.parametrize("seed", range(20))
def test_a_key_tells_how_arguments_share_memory_and_nothing_else_of_where_they_lie(
    seed: int,
) -> None:
    rng = random.Random(seed)
    bases = [torch.randn(256), torch.randn(256)]

    def draw() -> tuple[Any, Any]:
        places = [(rng.randrange(2), 4 * rng.randrange(4)) for _ in range(3)]
        tensors = [bases[base][offset : offset + 8] for base, offset in places]
        relations = [
            (first, offset - places[first][1])
            for base, offset in places
            for first in [next(i for i, (b, _) in enumerate(places) if b == base)]
        ]
        return _key(*tensors), tuple(relations)

    drawn = [draw() for _ in range(40)]
    for key, relation in drawn:
        for other, its in drawn:
            assert (key == other) == (relation == its)


def test_arguments_that_overlap_on_storages_of_their_own_have_no_key() -> None:
    memory = torch.randn(32).numpy()
    one, other = torch.from_numpy(memory)[:8], torch.from_numpy(memory)[16:24]
    assert _key(one, torch.randn(8), torch.randn(8)) is not None
    assert _key(one, other, torch.randn(8)) is None
    assert _key(torch.randn(8), one, other) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_key_tells_autocasts_dtype(dtype: torch.dtype) -> None:
    tensors = _vectors(3)
    plain = _key(*tensors)
    with torch.autocast("cpu", dtype=dtype):
        under = _key(*tensors)
        assert under == _key(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16 if dtype == torch.float16 else torch.float16):
        assert under != _key(*tensors)
    assert under != plain
    assert plain.has_same_arguments(under)
    assert _key(*tensors) == plain


def test_a_key_tells_the_default_dtype() -> None:
    tensors = _vectors(3)
    before = _key(*tensors)
    with default_dtype(torch.float64):
        assert _key(*tensors) != before
    assert _key(*tensors) == before


# ------------------------------------------------------------------ where a pointer comes from


def _second_broadcast(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.broadcast_tensors(q, k)[1]


def _second_of_a_grid(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.meshgrid(q, k, indexing="ij")[1][0]


def _by_data(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k.data


def _by_all_of_it(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    start = k.storage_offset() - q.storage_offset()
    return q.as_strided((max(start, 0) + 8,), (1,))[-8:] if start > 0 else k


VIEWS = [_second_broadcast, _second_of_a_grid, _by_data, _by_all_of_it]


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_two_slices_of_one_storage(view: Callable[..., torch.Tensor]) -> None:
    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self)
        probes.scale(view(self, other), out, 2.0)
        return out

    override = register("mul.Tensor", impl)
    for _ in range(4):
        qkv = torch.randn(24)
        assert torch.equal(qkv[:8].mul(qkv[8:16]), qkv[8:16] + qkv[8:16])
    assert override.plans.hits == 1
    # Of other distances, from storages of their own: other keys.
    for q, k in ((qkv[:8], qkv[16:]), (qkv[12:20], qkv[:8]), torch.randn(2, 2, 8)[:, 0]):
        for _ in range(5):
            assert torch.equal(q.mul(k), k + k)
    assert override.plans.hits > 4
    assert override.hits == 19


def test_memory_beyond_the_arguments_is_refused() -> None:
    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self)
        probes.scale(self.as_strided((8,), (1,), self.storage_offset() + 8), out, 2.0)
        return out

    override = register("mul.Tensor", impl)
    base = torch.randn(32)
    for _ in range(plans.MAX_ATTEMPTS + 3):
        assert torch.equal(base[:8].mul(torch.ones(8)), base[8:16] + base[8:16])
    assert "beyond the arguments" in refusal(override)


def test_a_view_at_an_offset_of_the_storage_itself_is_refused() -> None:
    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self)
        probes.scale(self.as_strided((4,), (1,), 4), out[:4], 2.0)
        out[4:].fill_(0.0)
        return out

    override = register("mul.Tensor", impl)
    base = torch.randn(32)
    for start in (0, 0, 0, 4, 4, 0, 4):
        expected = torch.cat([base[4:8] + base[4:8], torch.zeros(4)])
        assert torch.equal(base[start : start + 8].mul(torch.ones(8)), expected)
    assert override.plans.hits == 0


@pytest.mark.parametrize("shift", [-48, -16, -4, 0, 4, 16, 48, 64])
def test_an_output_that_overlaps_the_input(shift: int) -> None:
    def neg(self: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        probes.scale(self, out, -1.0)
        return out

    override = register("neg.out", neg)
    for _ in range(4):
        torch.neg(torch.randn(64), out=torch.empty(64))
    assert override.plans.hits == 1
    overlaps = 0 < abs(shift) < 64
    for call in range(5):
        base = torch.randn(256)
        x, out = base[64:128], base[64 + shift : 128 + shift]
        expected = base.clone()
        if overlaps and call > 0:
            # What is to be recorded is compared with native, which refuses it.
            with pytest.raises(RuntimeError, match="single memory location"):
                torch.neg(x, out=out)
        else:
            # The first one is a later hit of a kind of call that was compared: it is Python's.
            for i in range(64):  # in the order of the C function
                expected[64 + shift + i] = 0.0 - expected[64 + i]
            torch.neg(x, out=out)
        assert torch.equal(base, expected)
    # Of the same memory, and of memory side by side: seen, recorded, tried out, then replayed.
    assert override.plans.hits == (1 if overlaps else 3)


# ------------------------------------------------------------------ autocast, and what a step gets


def _by_mm(self: torch.Tensor, *_: Any) -> torch.Tensor:
    product = self @ self.t()
    out = torch.empty_like(self)
    # As a kernel that was compiled for one dtype reads it.
    probes.scale(product.view(torch.float32) if product.itemsize == 4 else self, out, 2.0)
    return out.add_(product.float())


# An impl of a composite op sees the caller's autocast; one of an op with its own kernel does not.
@pytest.mark.parametrize(
    ("op", "arguments", "sees"), [("_softmax", (-1, False), False), ("relu6", (), True)]
)
@pytest.mark.parametrize("first", [torch.bfloat16, torch.float16, None])
def test_autocast_of_another_dtype(
    first: torch.dtype | None, op: str, arguments: tuple[Any, ...], sees: bool
) -> None:
    override = register(op, _by_mm)
    for dtype in (first, first, first, first, torch.float16, torch.bfloat16, None) * 3:
        x = torch.randn(8, 8)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            got = getattr(torch.ops.aten, op)(x, *arguments)
        with torch.autocast("cpu", dtype=dtype, enabled=sees and dtype is not None):
            expected = _by_mm(x)
        tolerance = 0.1 if sees and dtype is not None else 1e-5
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert override.plans.hits > 3


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.to(torch.float64, copy=True),
        lambda x: torch.empty(2 * x.numel())[x.numel() :].view(x.shape).copy_(x),
        lambda x: torch.empty(x.shape[::-1]).t().copy_(x),
        lambda x: torch.empty(x.shape[0], x.shape[1] + 1),
    ],
    ids=["dtype", "offset", "strides", "shape"],
)
def test_a_step_that_gets_another_tensor_than_it_did_goes_back_to_python(
    other: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    behaves = True

    def clone(self: torch.Tensor, *, memory_format: Any) -> torch.Tensor:
        return torch.empty(self.shape).copy_(self) if behaves else other(self)

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = torch.empty_like(self)
        x = self.clone()
        probes.scale(self if x.dtype != torch.float32 else x.contiguous()[:, :8], out, 2.0)
        return out

    opgraft.register_op_override("aten", "clone", "CPU", clone, unconditional_override=True)
    override = register("_softmax", impl)
    x = torch.randn(1, 8)
    warm(override, x)
    replays(override, lambda: torch.softmax(x, -1))
    behaves = False
    if other(x).shape == x.shape:
        assert torch.equal(torch.softmax(x, -1), 2 * x)
    else:
        torch.softmax(x, -1)
    assert len(override.plans) == 0


# ------------------------------------------------------------------ values read back


def _numpy_function(x: torch.Tensor) -> float:
    import numpy as np

    return float(np.asarray(x.detach())[1])


def _numpy_by_dlpack(x: torch.Tensor) -> float:
    import numpy as np

    return float(np.from_dlpack(x.detach())[1])


#: Ways to read a value out of the second argument.
READS: dict[str, Callable[[torch.Tensor], float]] = {
    "tolist": lambda x: float(x.tolist()[1]),
    "item": lambda x: float(x[1].item()),
    "float": lambda x: float(x[1]),
    "int": lambda x: float(int(x[1])),
    "bool": lambda x: 2.0 if bool(x[1] > 0) else 3.0,
    "index": lambda x: float(range(9)[x[1].long()]),
    "format": lambda x: float(f"{x[1]}"),
    "numpy": lambda x: float(x.detach().numpy()[1]),
    "asarray": _numpy_function,
    "array": lambda x: float(x.detach().__array__()[1]),
    "dlpack": _numpy_by_dlpack,
    "storage": lambda x: float(x.view(torch.uint8).untyped_storage()[4]),
    "storage list": lambda x: float(x.view(torch.uint8).untyped_storage().tolist()[4]),
    "in": lambda x: 2.0 if 1 in x else 3.0,
    "any": lambda x: 2.0 if torch.any(x > 1) else 3.0,
    "equal": lambda x: 2.0 if torch.equal(x, torch.ones_like(x)) else 3.0,
    "unique": lambda x: float(len(x.unique())),
    "nonzero": lambda x: float(len(x.nonzero())),
    "mask": lambda x: float(len(x[x > 1])),
    "split": lambda x: float(len(torch.arange(20.0).tensor_split(x.long())[0])),
    "narrow": lambda x: float(len(torch.arange(20.0).narrow(0, 0, int(x[1])))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32])
@pytest.mark.parametrize("read", READS)
def test_a_value_that_is_read_back_is_in_no_plan(read: str, dtype: torch.dtype) -> None:
    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self)
        probes.scale(self, out, READS[read](other))
        return out

    override = register("mul.Tensor", impl)
    same = torch.tensor([1, 2, 0, 3], dtype=dtype)
    x = torch.randn(4)
    for values in [same] * 5 + [torch.tensor([4, 1, 1, 0], dtype=dtype)] * 3:
        with opgraft.disabled():
            expected = READS[read](values) * x
        assert torch.equal(torch.mul(x, values), expected)
    assert override.hits == 8
    assert override.plans.hits == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda x, index: x.tensor_split(index)[1],
        lambda x, index: x.narrow(0, index[0], 2),
        lambda x, index: x[index[0] : index[0] + 2],
        lambda x, index: x.select(0, index[0]).expand(2),
    ],
    ids=["tensor_split", "narrow", "slice", "select"],
)
def test_a_view_by_a_value_is_in_no_plan(view: Callable[..., torch.Tensor]) -> None:
    def impl(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        out = torch.empty(2)
        out.copy_(view(self, index))
        return out

    override = register("index_select", impl)
    x = torch.randn(8)
    for index in [torch.tensor([1, 3])] * 5 + [torch.tensor([4, 6])] * 2:
        assert torch.equal(x.index_select(0, index), view(x, index).expand(2))
    assert override.plans.hits == 0
    assert override.hits == 7


def test_a_number_that_the_impl_has_written_to_is_not_the_keys() -> None:
    def impl(self: torch.Tensor, other: torch.Tensor, *, alpha: float) -> torch.Tensor:
        self.copy_(other)
        probes.scale(torch.ones(1), self.view(1), float(self))
        return self

    override = register("add_.Tensor", impl)
    for _ in range(6):
        number, other = torch.zeros(()), torch.randn(())
        torch.ops.aten.add_.Tensor(number, other)
        assert float(number) == float(other)
    assert override.plans.hits == 0


@pytest.mark.parametrize("temporary", [False, True])
def test_an_address_that_is_a_constant_is_in_no_plan(temporary: bool) -> None:
    core = loader.in_use()
    assert core is not None

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        x, out = self.clone() if temporary else self, torch.empty_like(self)
        probes.launch(probes.load().scale_kernel, x.data_ptr(), out, x.numel(), 2.0)
        return out

    override = register("_softmax", impl)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    for each in [x] * 5 + [y] * 3:
        assert torch.equal(torch.softmax(each, -1), 2 * each)
    assert "an address as an integer" in refusal(override)


@pytest.mark.parametrize("alignment", [32, 64, 256])
def test_a_trial_keeps_the_alignment_that_a_condition_asks_for(alignment: int) -> None:
    seen: list[int] = []

    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        seen.append(self.data_ptr() % alignment)
        out = torch.empty_like(self)
        probes.scale(self, out, 2.0)
        return out

    base = torch.randn(256)
    x = base[-(base.data_ptr() // 4) % 64 :][:16]
    override = opgraft.register_op_override(
        "aten", "mul.Tensor", "CPU", impl, launch_plan=True, cond=when.aligned("self", alignment)
    )
    for _ in range(5):
        assert torch.equal(x.mul(x), x + x)
    assert override.plans.hits == 2
    assert seen == [0, 0, 0]


# ------------------------------------------------------------------ launches that cannot be


def test_a_kernel_of_a_driver_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    core = loader.in_use()
    assert core is not None

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = doubled(self, dim, half_to_float)
        if (recorder := core.current_recorder()) is not None:
            recorder.cuda_launch(
                function=1,
                grid=[1, 1, 1],
                threads=32,
                shared=0,
                cluster=1,
                cooperative=False,
                dependent=False,
                parameters=[],
                name="nothing",
            )
        return out

    override = register("_softmax", impl)
    x = torch.randn(4, 8)
    for _ in range(plans.MAX_ATTEMPTS + 2):
        assert torch.equal(torch.softmax(x, -1), 2 * x)
    assert "no cuLaunchKernelEx" in refusal(override)


# ------------------------------------------------------------------ forks


@pytest.fixture
def alarm() -> Iterator[Callable[[int], None]]:
    """Ends this process, a child of a fork, after so many seconds."""
    yield lambda seconds: (signal.signal(signal.SIGALRM, signal.SIG_DFL), signal.alarm(seconds))  # type: ignore[func-returns-value]


def _fork(child: Callable[[], None], alarm: Callable[[int], None]) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        alarm(20)
        child()
        status = 0
    finally:
        os._exit(status)


def test_a_fork_while_other_threads_drop_plans(alarm: Callable[[int], None]) -> None:
    override = register("_softmax", doubled)
    inputs = [torch.randn(rows, 8) for rows in range(1, 33)]
    for x in inputs:
        for _ in range(3):
            torch.softmax(x, -1)
    assert len(override.plans) == len(inputs)
    core = loader.in_use()
    assert core is not None
    table = override.plans.table
    keys = [core.plan_key((x, -1, False), "aten::_softmax", "") for x in inputs]
    done = threading.Event()

    def drop() -> None:
        while not done.is_set():
            for key in keys:
                table.drop(key)  # without the GIL

    def child() -> None:
        torch.set_num_threads(1)
        table.entries()
        table.clear()
        x = torch.randn(40, 8)
        for _ in range(4):
            assert torch.equal(torch.softmax(x, -1), 2 * x)

    workers = [threading.Thread(target=drop) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(40):
            assert _fork(child, alarm) == 0
            time.sleep(0.001)
    finally:
        done.set()
        for worker in workers:
            worker.join()


def test_a_fork_while_another_thread_records(alarm: Callable[[int], None]) -> None:
    inside, go_on = threading.Event(), threading.Event()
    before = torch.Tensor.__dlpack__

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        core = loader.in_use()
        assert core is not None
        if len(self) == 4 and core.current_recorder() is not None:
            inside.set()
            go_on.wait(60)
        return doubled(self, dim, half_to_float)

    override = register("_softmax", impl)
    x = torch.randn(4, 8)

    def work() -> None:
        for _ in range(3):
            torch.softmax(x, -1)

    def child() -> None:
        torch.set_num_threads(1)
        assert torch.Tensor.__dlpack__ is before
        y = torch.randn(3, 8)
        warm(override, y)
        assert torch.equal(replays(override, lambda: torch.softmax(y, -1)), 2 * y)
        assert torch.Tensor.__dlpack__ is before

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert inside.wait(60)
        assert torch.Tensor.__dlpack__ is not before
        assert _fork(child, alarm) == 0
    finally:
        go_on.set()
        worker.join()
    assert torch.Tensor.__dlpack__ is before
    assert torch.equal(replays(override, lambda: torch.softmax(x, -1)), 2 * x)


# ------------------------------------------------------------------ what is like a trial's garbage


def _unseen(result: torch.Tensor) -> torch.Tensor:
    """What an impl returns whose launch no recorder sees."""
    y = torch.empty_like(result)
    copy_unseen(result, y)
    return y


#: Ops whose results may be of one bit pattern alone: all `True`, -1, NaN; `False` and 0.
OF_ONE_PATTERN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "isfinite": (torch.isfinite, torch.ones(8)),
    "isnan": (torch.isnan, torch.ones(8)),
    "bitwise_not": (torch.bitwise_not, torch.zeros(8, dtype=torch.int64)),
    "sqrt": (torch.sqrt, -torch.ones(8)),
    "relu": (torch.relu, -torch.ones(8)),
}


@pytest.mark.parametrize("op", OF_ONE_PATTERN)
def test_a_launch_nobody_sees_is_refused_whatever_garbage_it_leaves(op: str) -> None:
    call, x = OF_ONE_PATTERN[op]
    native = opgraft.native(f"aten::{op}")
    override = register(op, lambda self: _unseen(native(self)))
    for count in range(plans.MAX_ATTEMPTS + 4):
        torch.testing.assert_close(call(x), native(x), equal_nan=True)
        assert override.hits == count + 1
    assert refusal(override)


#: How an impl makes a tensor of numbers that are in Python.
FROM_PYTHON: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda x: torch.tensor(-1.0),
    "tensor of a list": lambda x: torch.tensor([-1]),
    "as_tensor": lambda x: torch.as_tensor([-1]),
    "asarray": lambda x: torch.asarray([-1]),
    "new_tensor": lambda x: x.new_tensor([-1]),
    "Tensor": lambda x: torch.Tensor([-1]),
    "scalar_tensor": lambda x: torch.scalar_tensor(-1),
    "LongTensor": lambda x: torch.LongTensor([-1]),
}


@pytest.mark.parametrize("make", FROM_PYTHON.values(), ids=FROM_PYTHON)
def test_a_number_from_python_that_only_rare_values_need(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def impl(self: torch.Tensor) -> torch.Tensor:
        return torch.where(self > 1e6, make(self), self + 0).to(self.dtype)

    override = register("relu", impl)
    small, big = torch.rand(8), torch.full((8,), 1e7)
    for count in range(plans.MAX_ATTEMPTS + 2):
        torch.relu(small)
        assert override.hits == count + 1
    for _ in range(4):
        assert torch.relu(big).tolist() == [-1.0] * 8


# ------------------------------------------------------------------ random programs


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("chunk", range(10))
def test_random_programs_give_with_plans_what_they_give_without(chunk: int) -> None:
    """`python -m tests.plan.fuzz` runs as many as one likes."""
    replayed = 0
    for seed in range(50 * chunk, 50 * (chunk + 1)):
        verdict = fuzz.check(seed)
        assert not verdict.difference
        replayed += verdict.replays > 0
    assert replayed > 10
