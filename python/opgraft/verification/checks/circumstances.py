"""Checks of what is around a call: modes, what is kept after it, who else looks."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.router import threads
from opgraft.router.outputs import same_bits
from opgraft.verification.checks.registry import check
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    first_difference,
    first_difference_from_run,
    first_line,
    memory_of,
    needs_plain_hit,
    output_name,
)
from opgraft.verification.reference import native
from opgraft.verification.samples import Position, run, tensors_of
from opgraft.verification.single_override import is_interpreted

#: Looks at the arguments while an impl runs: after each call of C that it makes.
_LOOKS = 2000
#: Calls after which all that is kept on purpose (a plan, a compiled kernel) is made.
_CALLS_BEFORE = 3


# ------------------------------------------------------------------ modes and defaults


@contextmanager
def _default_dtype() -> Iterator[None]:
    stated = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(stated)


_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "in inference mode": torch.inference_mode,
    "in grad mode": torch.enable_grad,
    "with float64 as the default dtype": _default_dtype,
}


@check("some")
def check_modes(seen: Observation) -> None:
    """In inference mode, in grad mode, with another default dtype: what there is without them."""
    if seen.is_random:
        raise NotApplicable("the op is random")
    needs_plain_hit(seen)
    for name, mode in _MODES.items():
        # Tensors made in inference mode are of another kind, and it is these that are passed then.
        with torch.inference_mode() if mode is torch.inference_mode else torch.no_grad():
            call = seen.sample.call()
        hits = seen.subject.override.hits
        try:
            with torch.no_grad(), mode():
                result = run(call)
        except Exception as error:
            if not _native_runs(seen, mode):
                continue
            raise Failed(f"{name} it raised {first_line(error)}") from error
        if seen.subject.override.hits == hits:
            continue  # its condition may ask for the mode
        try:
            index = first_difference_from_run(seen, result)
        except Exception as error:  # a result on another device cannot be compared
            raise Failed(f"{name} its result cannot be read: {first_line(error)}") from error
        if index is not None:
            raise Failed(f"{name} {output_name(seen, index)} differs from what it is without")


def _native_runs(seen: Observation, mode: Callable[[], AbstractContextManager[Any]]) -> bool:
    call = seen.sample.call()
    try:
        with torch.no_grad(), mode():
            native(call)
    except Exception:
        return False
    return True


# ------------------------------------------------------------------ what others see meanwhile


@check("some")
def check_meanwhile(seen: Observation) -> None:
    """While it runs, too, arguments are as they were: another thread may be reading them."""
    needs_plain_hit(seen)
    if is_interpreted(seen.subject.override):
        raise NotApplicable("Triton's interpreter makes too many calls to look after each")
    call = seen.sample.call()
    may_write = {a.name for a in call.op.arguments if a.written}
    tensors = [
        (position, tensor, memory_of(tensor))
        for position, tensor in tensors_of(call.op, call.values)
        if position.argument not in may_write
    ]
    found: list[Position] = []
    looks = 0

    def look(frame: Any, event: str, function: Any) -> None:
        nonlocal looks
        if event not in ("c_return", "return") or found or looks >= _LOOKS:
            return
        looks += 1
        with threads.scope(threads.EVERYTHING):
            for position, tensor, kept in tensors:
                if not torch.equal(memory_of(tensor), kept):
                    found.append(position)

    with torch.no_grad(), _profiling(look):
        run(call)
    if found:
        raise Failed(
            f"it wrote to {str(found[0])!r} while it ran, if only for a time: another thread that "
            "reads it then gets a wrong result"
        )


@contextmanager
def _profiling(function: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Have a function called at each call and return on this thread."""
    before = sys.getprofile()
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(before)


# ------------------------------------------------------------------ what is kept


@contextmanager
def _collecting_only_what_is_new() -> Iterator[None]:
    """A scope in which the garbage collector leaves aside what there was before.

    Looking at all that torch and its tests made would take most of the time of a check.
    """
    if gc.get_freeze_count():  # somebody else did that, and would find it undone
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@check("some")
def check_references(seen: Observation) -> None:
    """After a call nothing holds its arguments and results but the caller."""
    needs_plain_hit(seen)
    with _collecting_only_what_is_new():
        if not _kept_after(seen.sample.call):
            return
        for _ in range(_CALLS_BEFORE):
            _kept_after(seen.sample.call)
        kept = _kept_after(seen.sample.call)
        with threads.scope(threads.EVERYTHING):
            natively = _kept_after(seen.sample.call)
    if kept and not natively:
        raise Failed(
            f"it keeps {kept[0]} alive after the call: memory that nobody can free, and that is "
            "somebody else's by then"
        )


@check("once")
def check_growth(seen: Observation) -> None:
    """A call leaves no tensor of its own behind that the one before has not left."""
    needs_plain_hit(seen)
    with _collecting_only_what_is_new():
        for _ in range(_CALLS_BEFORE):
            _kept_after(seen.sample.call)
        if not _grows(seen):
            return
        with threads.scope(threads.EVERYTHING):
            natively = _grows(seen)
    if not natively:
        raise Failed("each call leaves a tensor behind: memory grows until there is none")


def _grows(seen: Observation) -> bool:
    counts = []
    for _ in range(_CALLS_BEFORE + 1):
        _kept_after(seen.sample.call)
        gc.collect()  # what a cycle holds is nobody's
        counts.append(list(map(type, gc.get_objects())).count(torch.Tensor))
    return all(one < other for one, other in itertools.pairwise(counts))


def _kept_after(make: Callable[[], Call]) -> list[str]:
    """What of a call has memory that is still there after it, with nobody to ask for it."""
    from torch.multiprocessing.reductions import StorageWeakRef

    def watched() -> list[tuple[str, Any]]:
        call = make()
        with torch.no_grad():
            result = run(call)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [(repr(str(position)), t) for position, t in tensors_of(call.op, call.values)]
        tensors += [
            (f"result {index}", each)
            for index, each in enumerate(outputs)
            if isinstance(each, torch.Tensor)
        ]
        return [
            (name, StorageWeakRef(tensor.untyped_storage()))
            for name, tensor in tensors
            if tensor.layout == torch.strided
        ]

    references = watched()
    alive = [name for name, reference in references if not reference.expired()]
    if alive:
        gc.collect()  # what a cycle holds is nobody's
        alive = [name for name, reference in references if not reference.expired()]
    return alive


@check("some")
def check_again(seen: Observation) -> None:
    """On the same tensors with other values in them it computes from these, and what it returned
    before stays as it is."""
    if seen.is_random or seen.subject.op.mutates:
        raise NotApplicable("the op writes to its arguments or is random")
    needs_plain_hit(seen)
    call = seen.sample.call()
    with torch.no_grad():
        first = _outputs(seen, run(call))
        kept = [each.clone() if isinstance(each, torch.Tensor) else each for each in first]
        other = Observation(seen.subject, seen.sample.with_new_values(1))
        if not _refilled(call, other.sample.call()):
            raise NotApplicable("its arguments cannot be given other values")
        second = run(call)
    index = first_difference(seen, kept, first, same_bits)
    if index is not None:
        raise Failed(f"{output_name(seen, index)} of one call is changed by the next")
    if not other.took:
        return
    index = first_difference_from_run(other, second)
    if index is not None:
        raise Failed(
            f"{output_name(seen, index)} is not computed from the values that its arguments have "
            "now, but from those that they had in an earlier call"
        )


def _outputs(seen: Observation, result: Any) -> list[Any]:
    return [result] if len(seen.subject.op.returns) == 1 else list(result or ())


def _refilled(call: Call, other: Call) -> bool:
    """Put another call's values into a call's tensors; False where that cannot be."""
    ours, theirs = (list(tensors_of(each.op, each.values)) for each in (call, other))
    for (_, tensor), (_, values) in zip(ours, theirs, strict=True):
        try:
            tensor.copy_(values)
        except RuntimeError:  # several of its elements are one place in memory
            return False
    return bool(ours)
