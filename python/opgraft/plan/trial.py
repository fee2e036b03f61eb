"""The trial of a plan before it is used, on substitute arguments with the same key.

A plan must be valid for every call with its key (`csrc/plan.h`, Note [What a plan relies on]), but
was recorded from one call. The trial changes all that may differ between calls with one key: the
arguments' addresses, their storage offsets, and floating-point values. The impl runs in Python on
such substitutes, and must do what it did before. The plan is replayed on them, and must return what
Python returned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from opgraft.base import interrupts
from opgraft.ops.schema import Call
from opgraft.plan.recording import Recording
from opgraft.router import copies, device, outputs, threads

if TYPE_CHECKING:
    from opgraft.core.interface import Core, Plan, PlanKey, Router

#: How far a replay's values may differ from Python's, relative to the largest one. Kernels that add
#: with atomics never return the same bits twice. A kernel that was not recorded leaves garbage,
#: which differs by more.
TOLERANCE = 1e-2

_NO_MEMORY = "there was no memory to try the plan out"
_UNRECORDED_HINT = "does the impl launch a kernel in a way that cannot be recorded?"
# The value of each byte of a replay's allocations, one replay after the other. Memory that no
# kernel wrote may equal Python's result by chance (`True`, -1 and NaN look like 0xFF), but not both
# times.
_POISONS = (0xFF, 0x00)
# Substitutes are as well aligned as the arguments. A kernel may fault on less if its override
# requires the alignment (`when.aligned`), or if it always got memory from an allocator.
_ALIGNMENT = 512
# Factors for the values in turn. Values of two calls may differ by more anyway.
_FACTORS = (0.75, 1.25, 0.875)


class TrialFailed(Exception):
    """The trial failed, for this reason."""

    def __init__(self, reason: str, *, is_final: bool = True) -> None:
        super().__init__(reason)
        #: Whether another attempt would fail, too.
        self.is_final = is_final


class Trial:
    """One run of an impl, and of its plan, on substitutes for a call's arguments."""

    def __init__(self, core: Core, router: Router, call: Call, key: PlanKey) -> None:
        self._core = core
        self._router = router
        self._call = call
        self._key = key

    def run(self, impl: Callable[[Call], Any], plan: Plan) -> None:
        """Check that a plan does what Python does.

        Args:
            impl: runs the impl on a call, on this thread as it is now.
            plan: the plan of an earlier call with the same key.

        Raises:
            TrialFailed: it does not, or this cannot be determined.
        """
        try:
            python_call, replay_calls = self._substitute_calls()
        except Exception as error:  # a dtype that few ops support must not fail the call
            no_substitutes = f"its arguments have no substitutes: {error}"
            reason = _NO_MEMORY if device.is_out_of_memory(error) else no_substitutes
            raise TrialFailed(reason) from None
        again, result = self._record(impl, python_call)
        if again.fingerprint != plan.fingerprint:
            raise TrialFailed(
                "two runs with the same metadata did different things", is_final=False
            )
        try:
            difference = self._replays(plan, result, python_call, replay_calls)
        except (RuntimeError, MemoryError) as error:
            out_of_memory = device.is_out_of_memory(error)
            difference = _NO_MEMORY if out_of_memory else f"a replay failed: {error}"
        if difference:
            raise TrialFailed(difference)

    def _record(self, impl: Callable[[Call], Any], call: Call) -> tuple[Any, Any]:
        where = device.of_tensors(call) or torch.device("cpu")
        recording = Recording(self._core, self._router, call, where)
        try:
            with recording.watching():
                result = impl(call)
        except Exception as error:
            if interrupts.is_interrupt(error):
                raise
            # This is not the user's call. If theirs fails as well, they get that error.
            raise TrialFailed(recording.refusal, is_final=False) from None
        plan = recording.finish(result)
        if plan is None:
            raise TrialFailed(recording.refusal, is_final=False)
        return plan, result

    def _replays(self, plan: Plan, result: Any, python_call: Call, replay_calls: list[Call]) -> str:
        for replay_call, poison in zip(replay_calls, _POISONS, strict=True):
            replayed = self._router.replay(plan, replay_call.values, poison=poison)
            with _without_overrides():
                difference = self._difference(result, replayed, python_call, replay_call)
            if difference:
                return difference
        return ""

    def _substitute_calls(self) -> tuple[Call, list[Call]]:
        """Substitute calls, for Python and for each replay: separate ones if the op writes."""
        op = self._call.op
        with _without_overrides():
            python_call = substitutes(self._call)
            replay_calls = [substitutes(self._call) if op.writes else python_call for _ in _POISONS]
        schema = op.overload._schema
        for other in (python_call, *replay_calls):
            key = self._core.plan_key(other.values, schema.name, schema.overload_name)
            if key is None or not key.has_same_arguments(self._key):
                raise NotImplementedError("others like them have another key")
        return python_call, replay_calls

    def _difference(self, result: Any, replayed: Any, python_call: Call, replay_call: Call) -> str:
        op = self._call.op
        pairs = zip(*(outputs.as_outputs(op, each) for each in (result, replayed)), strict=True)
        for index, (one, other) in enumerate(pairs):
            if outputs.has_comparable_values(op, index) and not outputs_agree(one, other):
                return f"output {index} of a replay is not what Python computed: {_UNRECORDED_HINT}"
        if python_call is replay_call:
            return ""
        for argument, one, other in zip(
            op.arguments, python_call.values, replay_call.values, strict=True
        ):
            if not outputs_agree(one, other):
                difference = f"{argument.name} after a replay is not what Python computed"
                return f"{difference}: {_UNRECORDED_HINT}"
        return ""


def _without_overrides() -> AbstractContextManager[None]:
    """Switch off all overrides: what runs here beside the impl and its plan is not the user's."""
    return threads.scope(threads.EVERYTHING)


# ------------------------------------------------------------------ stand-ins


def substitutes(call: Call) -> Call:
    """Substitutes for a call's arguments, which alias each other as the originals do.

    They are at other addresses, as well aligned, and at other offsets in their storages. Bytes
    between arguments are 0xFF. Floating-point values differ. Integers do not, because they may be
    indices, and kernels must stay in bounds. Nor do numbers, because they are in the key.

    >>> from opgraft.ops.schema import resolve
    >>> base = torch.ones(8)
    >>> call = resolve("aten::mul.Tensor").bind((base[:4], base[2:6]), {})
    >>> one, other = substitutes(call).values
    >>> other.data_ptr() - one.data_ptr(), one.storage_offset() == 0
    (8, False)
    """
    distinct = {id(tensor): tensor for tensor in call.tensors()}
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in distinct.values():
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    written = {id(tensor) for _, tensor in call.written()}
    made: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for tensors in storages.values():
            is_lone_number = len(tensors) == 1 and _is_number(tensors[0])
            if is_lone_number and id(tensors[0]) not in written:
                made[id(tensors[0])] = tensors[0]  # it may be a wrapped number
            else:
                made.update(_on_another_storage(tensors))

    return call.changed(lambda value: made[id(value)] if isinstance(value, torch.Tensor) else value)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dim() == 0


def _on_another_storage(tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    full = [tensor for tensor in tensors if tensor.numel() > 0] or tensors[:1]
    spans = [copies.span(tensor) for tensor in full]
    begin, end = min(b for b, _ in spans), max(e for _, e in spans)
    first = full[0]
    size = end - begin
    memory = torch.empty(size + 2 * _ALIGNMENT, dtype=torch.uint8, device=first.device)
    address = first.data_ptr() - spans[0][0] + begin if size else 0
    shift = (address - memory.data_ptr()) % _ALIGNMENT
    if shift == begin:
        shift += _ALIGNMENT
    starts = zip((shift - begin + b for b, _ in spans), full, strict=True)
    if any(start % tensor.itemsize for start, tensor in starts):
        raise NotImplementedError("an address is no multiple of its element's size")
    memory.fill_(0xFF)
    source = _storage_bytes(first)

    def copy(span: tuple[int, int]) -> None:
        b, e = span
        memory[shift + b - begin : shift + e - begin].copy_(source[b:e])

    for span in spans:
        copy(span)
    if len({tensor.dtype for tensor in full}) == 1:
        _change_values(memory[shift : shift + size].view(first.dtype))
    for tensor, span in zip(full, spans, strict=True):
        if _is_number(tensor):
            copy(span)
    return {id(tensor): _on_memory(memory, shift - begin, tensor) for tensor in tensors}


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage."""
    storage = tensor.untyped_storage()
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    place = (0, (storage.nbytes(),), (1,))
    return everything.set_(storage, *place)  # type: ignore[call-overload, no-any-return]


def _on_memory(memory: torch.Tensor, shift: int, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on other memory, with its storage offset shifted by so many bytes."""
    start = (tensor.storage_offset() * tensor.itemsize + shift) if tensor.numel() else 0
    place = (start // tensor.itemsize, tensor.shape, tensor.stride())
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    other.set_(memory.untyped_storage(), *place)  # type: ignore[call-overload]
    return other.requires_grad_(tensor.requires_grad)


def _change_values(values: torch.Tensor) -> None:
    """Change floating-point values. 0, infinity and NaN stay, and so does every sign."""
    if not (values.is_floating_point() or values.is_complex()):
        return
    if values.itemsize == 1:  # 8-bit floats, which few ops support
        values = values.view(torch.uint8)
        values.copy_(values.flip(0))
        return
    for start, factor in enumerate(_FACTORS):
        values[start :: len(_FACTORS)].mul_(factor)


# ------------------------------------------------------------------ comparison


def outputs_agree(one: Any, other: Any) -> bool:
    """Whether two outputs have the same metadata, and values that are equal up to rounding.

    >>> outputs_agree(torch.tensor([1.0, float("nan")]), torch.tensor([1.001, float("nan")]))
    True
    >>> outputs_agree(torch.ones(2), torch.zeros(2))
    False
    >>> outputs_agree([torch.ones(2), None], [torch.ones(2), None])
    True
    """
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(outputs_agree, one, other))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other) or (one != one and other != other)
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    wide = torch.complex128 if one.is_complex() else torch.float32
    one, other = one.to(wide), other.to(wide)
    finite = one[one.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
