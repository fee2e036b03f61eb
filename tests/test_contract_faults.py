"""The contract check over many ops: right impls pass it, and faults put into them are caught.

PyTorch's own samples say how ops are called. Each test takes a share of them, drawn with a seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import opgraft
from opgraft import ContractError
from opgraft.ops.schema import Call, Op
from opgraft.registry.state import CHECKED_HITS
from opgraft.router import outputs
from tests import opinfo_calls
from tests.python_router import run_again, where_the_core_routes

ROOT = Path(__file__).parent.parent
#: Of PyTorch's operators one in so many is tried, by name: their number is another in each torch.
SHARE = 24
SEED = 7
#: These are tried besides: few ops return lists, views of a part, or outputs that are alike, and by
#: the draw alone the ops that write in place can be too few.
ALWAYS = {
    *("split", "unbind", "unbind_copy"),
    *("aminmax", "linalg.lu", "linalg.slogdet", "native_batch_norm", "native_layer_norm"),
    *("nn.functional.logsigmoid", "var_mean"),
    *("complex", "view_as_complex"),
    *("clamp", "masked_fill", "pow", "sqrt"),
}

Result = Any
#: An impl's result made wrong, for a call and a right result; None where the fault does not fit.
Fault = Callable[[Call, Result, dict[str, Any]], Result | None]


@pytest.fixture(scope="module")
def calls() -> dict[Op, list[Call]]:
    found = opinfo_calls.calls(chosen=is_chosen)
    assert len(found) > 60
    return found


def is_chosen(info: Any) -> bool:
    name = info.full_name
    return name in ALWAYS or random.Random(f"{SEED} {name}").random() < 1 / SHARE


def run(call: Call) -> Any:
    call = opinfo_calls.fresh(call)
    return call.op.overload(*call.args, **call.kwargs)


def register(op: Op, impl: Callable[..., Any], **keywords: Any) -> opgraft.Override:
    return opgraft.register_op_override(
        *op.name.split("::"), "CPU", impl, unconditional_override=True, name="mine", **keywords
    )


# ------------------------------------------------------------------ what is right


def by_native(op: Op) -> Callable[..., Any]:
    return opgraft.native(op.overload)


def by_a_copy(op: Op) -> Callable[..., Any]:
    """Native's values in memory of the impl's own, laid out as native's."""
    native = opgraft.native(op.overload)

    def impl(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, copied, native(*args, **kwargs))

    return impl


def copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        return tensor.clone()
    return opinfo_calls.copied(tensor)


@pytest.mark.parametrize("way", [by_native, by_a_copy], ids=lambda way: way.__name__)
def test_a_right_impl_passes(way: Callable[[Op], Any], calls: dict[Op, list[Call]]) -> None:
    hit = 0
    for op, known in calls.items():
        if way is by_a_copy and any(returned.alias_info for returned in op.returns):
            continue
        override = register(op, way(op))
        for call in known:
            for _ in range(CHECKED_HITS + 1):
                run(call)
        assert override.hits >= len(known) * (CHECKED_HITS + 1), op
        hit += override.hits
        override.remove()
    assert hit > 300


# ------------------------------------------------------------------ what is not


def tensors(call: Call, result: Result) -> list[torch.Tensor]:
    """A result's dense tensors that have elements and are not random states."""
    values = outputs.as_outputs(call.op, result)
    found = outputs.OpResult(call.op, values, ()).tensors()
    return [t for t in found if t.layout == torch.strided and t.numel() and not t.is_quantized]


def swapped(call: Call, result: Result, old: torch.Tensor, new: torch.Tensor) -> Result:
    return tree_map_only(torch.Tensor, lambda each: new if each is old else each, result)


def on_one(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Fault:
    """A change of the last tensor of a result: in lists, of the last item."""

    def fault(call: Call, result: Result, memory: dict[str, Any]) -> Result | None:
        if call.op.mutates:  # what is returned is the argument
            return None
        for old in reversed(tensors(call, result)):
            new = change(old)
            if new is not None and new is not old:
                return swapped(call, result, old, new)
        return None

    return fault


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.float32)


def other_strides(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.ndim < 2 or min(tensor.shape) < 2 or not tensor.is_contiguous():
        return None
    return tensor.mT.contiguous().mT


def conjugated(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.conj() if tensor.is_complex() else None


def grad_required(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else None


def a_parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False)


def of_inference_mode(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return copied(tensor)


class Subclass(torch.Tensor):
    """A tensor type of somebody's own."""


def the_argument(call: Call, result: Result, memory: dict[str, Any]) -> Result | None:
    """An output in the memory of an argument, where native's is not."""
    if call.op.mutates:
        return None
    for old in tensors(call, result):
        if outputs.shares_memory(old, call.tensors()):
            continue
        for given in call.tensors():
            if given.dtype == old.dtype and given.numel() >= old.numel() and not given.is_nested:
                flat = given.new_empty(0).set_(given.untyped_storage())
                if flat.untyped_storage().nbytes() >= old.untyped_storage().nbytes():
                    new = given.as_strided(old.shape, old.stride(), 0)
                    return swapped(call, result, old, new)
    return None


def one_memory(call: Call, result: Result, memory: dict[str, Any]) -> Result | None:
    """Two outputs in one memory."""
    found = [] if call.op.mutates else tensors(call, result)
    for first, second in itertools.pairwise(found):
        alike = (first.dtype, first.shape, first.stride()) == (
            *(second.dtype, second.shape, second.stride()),
        )
        if alike and not outputs.shares_memory(first, [second, *call.tensors()]):
            return swapped(call, result, second, first.view_as(first))
    return None


def a_copy_of_a_view(call: Call, result: Result, memory: dict[str, Any]) -> Result | None:
    # What no schema promises, such as `_unsafe_view`'s sharing, need not be.
    if call.op.mutates or all(returned.alias_info is None for returned in call.op.returns):
        return None
    views = [t for t in tensors(call, result) if outputs.shares_memory(t, call.tensors())]
    return swapped(call, result, views[-1], copied(views[-1])) if views else None


def another_place(call: Call, result: Result, memory: dict[str, Any]) -> Result | None:
    """A view of the right argument, elsewhere in it."""
    if call.op.mutates:
        return None
    for view in tensors(call, result):
        room = view.untyped_storage().nbytes() // view.element_size()
        needed = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
        if outputs.shares_memory(view, call.tensors()) and room > needed:
            offset = 1 if view.storage_offset() == 0 else 0
            return swapped(call, result, view, view.as_strided(view.shape, view.stride(), offset))
    return None


def one_buffer(call: Call, result: Result, memory: dict[str, Any]) -> Result | None:
    """The same memory, on every call."""
    found = [] if call.op.mutates else tensors(call, result)
    found = [t for t in found if not outputs.shares_memory(t, [*call.tensors()])]
    if not found:
        return None
    kept = memory.setdefault("buffer", found[-1])
    return swapped(call, result, found[-1], kept)


def writes_an_argument(call: Call, result: Result, memory: dict[str, Any]) -> Result | None:
    """An argument is written to that the op leaves as it is, by what bumps no version."""
    written = [t for _, t in call.written()]
    for given in call.tensors():
        plain = given.numel() and given.ndim and 0 not in given.stride()
        if plain and not outputs.shares_memory(given, [*written, *tensors(call, result)]):
            given.copy_(given.clone().fill_(1) if bool((given != 1).any()) else given * 0)
            return result
    return None


def nothing_written(call: Call, result: Result, memory: dict[str, Any]) -> Result | None:
    """What native writes to is left as it was."""
    before = memory["before"]
    pairs = list(zip(call.written(), before.written(), strict=True))
    for (_, one), (_, old) in pairs:
        sized = one.shape == old.shape and one.dtype == old.dtype and one.numel()
        if sized and outputs.value_difference(old, one) is not None and not call.op.is_random:
            one.copy_(old)
            return result
        if one.shape != old.shape and not old.numel():  # `out=` that native resizes
            one.set_(old)
            return result
    return None


def an_item_less(call: Call, result: Result, memory: dict[str, Any]) -> Result | None:
    is_list = len(call.op.returns) == 1 and isinstance(result, (list, tuple)) and result
    return list(result)[:-1] if is_list and not call.op.mutates else None


FAULTS: dict[str, Fault] = {
    "dtype": on_one(other_dtype),
    "shape": on_one(lambda t: copied(t).unsqueeze(0)),
    "strides": on_one(other_strides),
    "conjugate bit": on_one(conjugated),
    "negative bit": on_one(lambda t: torch._neg_view(t) if t.is_floating_point() else None),
    "requires grad": on_one(grad_required),
    "Parameter": on_one(a_parameter),
    "subclass": on_one(lambda t: t.as_subclass(Subclass)),
    "inference tensor": on_one(of_inference_mode),
    "device": on_one(lambda t: t.to("meta")),
    "None": lambda call, result, memory: nothing(call, result),
    "an argument": the_argument,
    "two outputs in one memory": one_memory,
    "a copy of a view": a_copy_of_a_view,
    "a view of another place": another_place,
    "one buffer": one_buffer,
    "an item less": an_item_less,
    "an argument is written": writes_an_argument,
    "nothing is written": nothing_written,
}
#: Fewer ops have what some faults need.
AT_LEAST = {
    "conjugate bit": 1,
    "two outputs in one memory": 10,
    "a view of another place": 3,
    "an item less": 3,
}


def nothing(call: Call, result: Result) -> Result | None:
    """None, where a tensor is due."""
    found = [] if call.op.mutates else tensors(call, result)
    return _None if found and found[-1] is result else None


class _None:
    """Stands for a None that an impl returns, where None says that a fault does not fit."""


def faulty(op: Op, fault: Fault, memory: dict[str, Any]) -> Callable[..., Any]:
    native = opgraft.native(op.overload)

    def impl(*args: Any, **kwargs: Any) -> Any:
        call = op.bind(args, kwargs)
        memory["before"] = opinfo_calls.fresh(call)
        result = native(*args, **kwargs)
        wrong = fault(call, result, memory)
        if wrong is None:
            return result
        memory["made"] = True
        return None if wrong is _None else wrong

    return impl


def tried(calls: dict[Op, list[Call]], fault: Fault) -> Iterator[tuple[Op, str | None]]:
    """Each op whose calls can have a fault, and what is said of it; None where nothing is."""
    for op, known in calls.items():
        for call in known:
            memory: dict[str, Any] = {}
            override = register(op, faulty(op, fault, memory))
            said = None
            try:
                for _ in range(CHECKED_HITS):
                    run(call)
            except ContractError as error:
                said = str(error)
            assert override.hits > 0
            override.remove()
            if memory.get("made"):
                yield op, said


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_in_the_first_hits(name: str, calls: dict[Op, list[Call]]) -> None:
    found = list(tried(calls, FAULTS[name]))
    missed = {op.name for op, said in found if said is None}
    unclear = [said for _, said in found if said is not None and "override 'mine' of" not in said]
    assert (missed, unclear) == (set(), [])
    assert len({op.name for op, _ in found}) >= AT_LEAST.get(name, 10)


@where_the_core_routes
def test_the_same_in_the_python_router() -> None:
    run_again(__file__, selected="not python_router")
