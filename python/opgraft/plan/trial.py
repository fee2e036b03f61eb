"""Trying a plan out before it is used: on other tensors, which its key cannot tell from the call's.

A plan holds for every call with its key (`csrc/plan.h`, Note [What a plan relies on]), and was
recorded in one. What differs between calls with one key is made to differ here: where the arguments
lie, their offsets in their storages, and the values of floating-point numbers. The impl runs in
Python on such arguments, and must do what it did before; the plan is replayed on them, and must
give what Python gave.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from opgraft.ops.schema import Call
from opgraft.plan.recording import Recording
from opgraft.router import copies, device, outputs, threads

if TYPE_CHECKING:
    from opgraft.core.interface import Core, Plan, PlanKey, Router

#: How far a replay may be off what Python computed, relative to its largest value: kernels that add
#: with atomics never give the same bits twice, and one that was not recorded leaves garbage.
TOLERANCE = 1e-2

_NO_MEMORY = "there was no memory to try the plan out"
_UNSEEN = "does the impl launch a kernel in a way that cannot be recorded?"
# What each byte of a replay's allocations is set to, in one replay after the other: what nobody
# wrote may by chance be what Python computed (`True`, -1, NaN are like 0xFF), but not both times.
_POISONS = (0xFF, 0x00)
# What stands in is as well aligned as what it stands in for: a kernel whose override asks for that
# (`when.aligned`), or that has only ever got what an allocator gives, may fault on less.
_ALIGNMENT = 512
# What every third value is multiplied by: no more than a call's values may differ by anyway.
_FACTORS = (0.75, 1.25, 0.875)


class Refused(Exception):
    """There is no plan, for this reason."""

    def __init__(self, reason: str, *, is_final: bool = True) -> None:
        super().__init__(reason)
        #: Whether another attempt would do no better.
        self.is_final = is_final


class Trial:
    """One run of an impl, and of its plan, on stand-ins of a call's arguments."""

    def __init__(self, core: Core, router: Router, call: Call, key: PlanKey) -> None:
        self._core = core
        self._router = router
        self._call = call
        self._key = key

    def run(self, impl: Callable[[Call], Any], plan: Plan) -> None:
        """Make sure that a plan does what Python does.

        Args:
            impl: runs the impl on a call, on this thread as it is now.
            plan: of an earlier call with the same key.

        Raises:
            Refused: it does not, or nobody can tell.
        """
        try:
            mine, others = self._stand_ins()
        except torch.OutOfMemoryError:
            raise Refused(_NO_MEMORY) from None
        except Exception as error:  # a dtype that few ops take: no reason for the call to fail
            raise Refused(f"nothing can stand in for its arguments: {error}") from None
        again, result = self._record(impl, mine)
        if again.fingerprint != plan.fingerprint:
            raise Refused("two runs with the same metadata did different things", is_final=False)
        try:
            difference = self._replays(plan, result, mine, others)
        except torch.OutOfMemoryError:
            difference = _NO_MEMORY
        except RuntimeError as error:
            difference = f"a replay failed: {error}"
        if difference:
            raise Refused(difference)

    def _record(self, impl: Callable[[Call], Any], call: Call) -> tuple[Any, Any]:
        where = device.of(call) or torch.device("cpu")
        recording = Recording(self._core, self._router, call, where)
        try:
            with recording.watching():
                result = impl(call)
        except Exception:
            # It is no call of the user's. If theirs fails as well, that is the error.
            raise Refused(recording.refusal, is_final=False) from None
        plan = recording.finish(result)
        if plan is None:
            raise Refused(recording.refusal, is_final=False)
        return plan, result

    def _replays(self, plan: Plan, result: Any, mine: Call, others: list[Call]) -> str:
        for its, poison in zip(others, _POISONS, strict=True):
            replayed = self._router.replay(plan, its.values, poison=poison)
            with _aside():
                difference = self._difference(result, replayed, mine, its)
            if difference:
                return difference
        return ""

    def _stand_ins(self) -> tuple[Call, list[Call]]:
        """Arguments for Python and for each replay: others where they write to them."""
        op = self._call.op
        with _aside():
            mine = stand_ins(self._call)
            others = [stand_ins(self._call) if op.writes else mine for _ in _POISONS]
        schema = op.overload._schema
        for other in (mine, *others):
            key = self._core.plan_key(other.values, schema.name, schema.overload_name)
            if key is None or not key.has_same_arguments(self._key):
                raise NotImplementedError("others like them have another key")
        return mine, others

    def _difference(self, result: Any, replayed: Any, mine: Call, its: Call) -> str:
        op = self._call.op
        pairs = zip(*(outputs.as_outputs(op, each) for each in (result, replayed)), strict=True)
        for index, (one, other) in enumerate(pairs):
            if outputs.has_values(op, index) and not agree(one, other):
                return f"output {index} of a replay is not what Python computed: {_UNSEEN}"
        if mine is its:
            return ""
        for argument, one, other in zip(op.arguments, mine.values, its.values, strict=True):
            if not agree(one, other):
                return f"{argument.name} after a replay is not what Python computed: {_UNSEEN}"
        return ""


def _aside() -> AbstractContextManager[None]:
    """What is done here beside the impl and its plan is no call of the user's."""
    return threads.scope(threads.EVERYTHING)


# ------------------------------------------------------------------ stand-ins


def stand_ins(call: Call) -> Call:
    """Other arguments for a call, which share memory among themselves as its own do.

    They are at other addresses, as well aligned, and at other offsets in their storages, and what
    is no argument's in between is 0xFF. Floating-point values differ. Integers do not: they may be
    indices, and no kernel is to be led out of bounds; nor do numbers, which the key holds.

    >>> from opgraft.ops.schema import resolve
    >>> base = torch.ones(8)
    >>> call = resolve("aten::mul.Tensor").bind((base[:4], base[2:6]), {})
    >>> one, other = stand_ins(call).values
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
                made[id(tensors[0])] = tensors[0]  # it may be marked as a number of Python's
            else:
                made.update(_on_another_storage(tensors))

    def stand_in(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [stand_in(each) for each in value]
        return made[id(value)] if isinstance(value, torch.Tensor) else value

    return Call(call.op, tuple(map(stand_in, call.values)))


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
    source = _bytes(first)

    def copy(span: tuple[int, int]) -> None:
        b, e = span
        memory[shift + b - begin : shift + e - begin].copy_(source[b:e])

    for span in spans:
        copy(span)
    if len({tensor.dtype for tensor in full}) == 1:
        _vary(memory[shift : shift + size].view(first.dtype))
    for tensor, span in zip(full, spans, strict=True):
        if _is_number(tensor):
            copy(span)
    return {id(tensor): _at(memory, shift - begin, tensor) for tensor in tensors}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage."""
    storage = tensor.untyped_storage()
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    place = (0, (storage.nbytes(),), (1,))
    return everything.set_(storage, *place)  # type: ignore[call-overload, no-any-return]


def _at(memory: torch.Tensor, shift: int, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on other memory, so many bytes further behind than it is on its own."""
    start = (tensor.storage_offset() * tensor.itemsize + shift) if tensor.numel() else 0
    place = (start // tensor.itemsize, tensor.shape, tensor.stride())
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    other.set_(memory.untyped_storage(), *place)  # type: ignore[call-overload]
    return other.requires_grad_(tensor.requires_grad)


def _vary(values: torch.Tensor) -> None:
    """Change what may be changed: 0, infinity and NaN stay, and so does every sign."""
    if not (values.is_floating_point() or values.is_complex()):
        return
    if values.itemsize == 1:  # 8-bit floats, which few ops take
        values = values.view(torch.uint8)
        values.copy_(values.flip(0))
        return
    for start, factor in enumerate(_FACTORS):
        values[start :: len(_FACTORS)].mul_(factor)


# ------------------------------------------------------------------ comparison


def agree(one: Any, other: Any) -> bool:
    """Whether two outputs have the same metadata, and values that differ by rounding at most.

    >>> agree(torch.tensor([1.0, float("nan")]), torch.tensor([1.001, float("nan")]))
    True
    >>> agree(torch.ones(2), torch.zeros(2))
    False
    >>> agree([torch.ones(2), None], [torch.ones(2), None])
    True
    """
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(agree, one, other))
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
