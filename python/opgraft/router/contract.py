"""The contract: an override returns what the native kernel would have returned, values aside.

Number of outputs, on every hit. On the first hits of each signature the native kernel runs as well,
and `router/outputs.py` compares what both returned. The native kernel itself is the reference, not
the op's meta function: native differs from its meta (strides, on CPU even dtypes) for several ops,
and the first meta run of some ops imports Inductor, which takes seconds. Strides count only where
native agrees with its meta.

Native runs first, and what it refuses is an error whatever the impl makes of it. An op that writes
to its arguments runs natively on copies of them, and what it leaves there is compared as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from opgraft.errors import ContractError
from opgraft.ops.schema import Argument, Call
from opgraft.registry import Override
from opgraft.router import copies, outputs, threads
from opgraft.router.outputs import Returned
from opgraft.router.signature import signature

log = logging.getLogger(__name__)

#: Bytes that an op may write to for native to run beside it, on copies: twice as many are made.
MAX_COPIED_BYTES = 2**28
#: Bytes of arguments that are compared with what they were, tensor by tensor while they fit.
MAX_WATCHED_BYTES = 2**24

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
# What native's message has where it cannot do a call that is right: a dtype, a device or a mode
# that it lacks, a library that gives up. That may be what the override is for.
_LACKS = (
    *("not implemented", "not support", "not_support", "unsupported", "deterministic"),
    *("cudnn", "cublas", "cusolver", "cusparse", "execution plan", "internal assert"),
    *("not compiled with", "out of memory"),
)
# What is written to overlaps: torch calls that an "unsupported operation", whatever the backend.
_OVERLAP = "single memory location"


def returned(override: Override, result: Any) -> tuple[Any, ...]:
    """An impl's result as one value per output of the schema.

    Raises:
        ContractError: there are too many or too few, or the only one is no tensor where it must be.
    """
    returns = override.operator.returns
    if len(returns) == 1:
        if str(returns[0].type) == "Tensor" and not isinstance(result, torch.Tensor):
            _refuse(override, 0, f"with {outputs.describe(result)} instead of a tensor")
        return (result,)
    if not returns:
        return ()
    if not isinstance(result, (tuple, list)) or len(result) != len(returns):
        is_sequence = isinstance(result, (tuple, list))
        got = f"{len(result)} values" if is_sequence else outputs.describe(result)
        raise ContractError(f"{who(override)} returned {got}; the op has {len(returns)} outputs")
    return tuple(result)


def is_refusal(error: Exception) -> bool:
    """Whether native's error says that the call is wrong, not that native cannot do it."""
    if isinstance(error, (NotImplementedError, *OUT_OF_MEMORY)):
        return False
    message = str(error).lower()
    return _OVERLAP in message or not any(sign in message for sign in _LACKS)


def begin(
    override: Override, call: Call, run_native: Callable[[Call], Any], always: bool
) -> Check | None:
    """Before a hit: what it is to be compared with; None where it is not to be.

    Args:
        override: whose impl is to run.
        call: the arguments.
        run_native: runs the native kernel on a call.
        always: compare it, whether it is one of the first of its signature or not.
    """
    key = signature(call)
    if not always and not override.state.is_check_due(key):
        return None
    return Check(override, key, call, run_native)


class Check:
    """A hit that is compared with native: made before its impl runs, ended after.

    Args:
        override: whose impl is to run.
        signature: the call's, to count the check.
        call: the arguments.
        run_native: runs the native kernel on a call.
    """

    def __init__(
        self,
        override: Override,
        signature: Hashable,
        call: Call,
        run_native: Callable[[Call], Any],
    ) -> None:
        self._override = override
        self._signature = signature
        self._call = call
        #: The call that native had: copies of what it writes to.
        self._natives = call
        #: And as it was before.
        self._before = call
        self._native: Returned | None = None
        self._refusal: Exception | None = None
        with threads.scope(threads.EVERYTHING):
            if self._copy():
                self._ask_native(run_native)
            self._watched = list(_watched(call))

    def _copy(self) -> bool:
        """Copy what the call writes to; false where that is too much."""
        if not self._call.writes:
            return True
        if copies.size(self._call) > MAX_COPIED_BYTES:
            return False
        try:
            self._natives, self._before = copies.of(self._call), copies.of(self._call)
        except OUT_OF_MEMORY as error:
            log.debug("%s: not checked, %r", self._override.name, error)
            return False
        return True

    def _ask_native(self, run_native: Callable[[Call], Any]) -> None:
        try:
            with keeping_rng(self._call):
                result = run_native(self._natives)
        except Exception as error:
            if is_refusal(error):
                self._refusal = error
                return
            log.debug("%s: not checked, native raised %r", self._override.name, error)
            return
        op = self._call.op
        self._native = Returned(op, outputs.as_outputs(op, result), self._natives.tensors())

    def end(self, result: Any, rerun: Callable[[Call], Any]) -> None:
        """Compare what the impl returned, and what became of the arguments.

        Args:
            result: what the impl returned.
            rerun: runs the impl again, on other arguments.

        Raises:
            ContractError: the message names the override, the output or argument, the difference.
            Exception: native's own, where it refuses the call. What was written is put back.
        """
        override, call = self._override, self._call
        if self._refusal is not None:
            with threads.scope(threads.EVERYTHING):
                copies.restore(call, self._natives)
            raise self._refusal
        mine = Returned(call.op, returned(override, result), call.tensors())
        with threads.scope(threads.EVERYTHING):
            if call.op.mutates:
                self._check_returned_arguments(mine)
            if self._native is not None:
                self._compare(mine, self._native)
            self._check_watched(rerun)
            self._check_reuse(mine)
        # Last: what failed is compared again next time. Where native could not answer it does
        # count, so that native is not asked for ever.
        override.state.note_checked(self._signature)

    def _check_returned_arguments(self, mine: Returned) -> None:
        """An op that writes to its arguments returns those very arguments."""
        written = [tensor for _, tensor in self._call.written()]
        for index, (value, declared) in enumerate(zip(mine.outputs, mine.op.returns, strict=True)):
            alias = declared.alias_info
            is_written = alias is not None and alias.is_write and isinstance(value, torch.Tensor)
            if is_written and not any(value is each for each in written):
                raise ContractError(
                    f"{who(self._override)} returned a new {outputs.describe(value)} as "
                    f"{outputs.name_of(mine.op, index)}; the op writes to an argument and returns "
                    "that argument itself"
                )

    def _compare(self, mine: Returned, native: Returned) -> None:
        def promises(index: int, place: int | None, output: torch.Tensor) -> bool:
            return promises_strides(self._before, index, place, output)

        for label, difference in outputs.compare(mine, native, promises):
            raise ContractError(f"{who(self._override)} returned {label} {difference}")
        for argument, difference in self._written_differences():
            raise ContractError(
                f"{who(self._override)} left argument {argument.name!r} {difference}"
            )

    def _written_differences(self) -> Iterator[tuple[Argument, str]]:
        """What an op writes to that an impl leaves otherwise than native does."""
        calls = (self._call, self._natives, self._before)
        given, natives = (tuple(call.tensors()) for call in calls[:2])
        for rows in zip(*(list(call.written()) for call in calls), strict=True):
            (argument, one), (_, other), (_, before) = rows
            found = [f"with {each}" for each in outputs.place_differences(one, other)]
            if not found and outputs.layouts_differ(one, other):
                found.append(f"with strides {one.stride()}, native's are {other.stride()}")
            for mine, its in zip(given, natives, strict=True):
                if mine is not one and outputs.shares(one, [mine]) != outputs.shares(other, [its]):
                    where = "in another" if outputs.shares(one, [mine]) else "not in another"
                    found.append(f"{where} argument's memory, unlike native")
            if not found and not self._call.op.is_random:
                found += _effects(argument, one, other, before)
            yield from ((argument, each) for each in found)

    def _check_watched(self, rerun: Callable[[Call], Any]) -> None:
        """An impl leaves what the op does not write to as it is."""
        changed = [
            argument
            for argument, tensor, kept in self._watched
            if not torch.equal(_bytes(tensor), kept)
        ]
        if changed and self._writes_again(rerun):
            names = ", ".join(repr(argument.name) for argument in changed)
            raise ContractError(
                f"{who(self._override)} wrote to argument {names}, which the op leaves as it is: "
                "let it work on a copy"
            )

    def _writes_again(self, rerun: Callable[[Call], Any]) -> bool:
        """Whether the impl writes to copies, too: what changed may have been another thread's."""
        again = copies.of(self._call, everything=True)
        kept = {id(tensor): held for _, tensor, held in self._watched}
        pairs = []
        for tensor, copied in zip(self._call.tensors(), again.tensors(), strict=True):
            if id(tensor) in kept:
                copied.copy_(kept[id(tensor)].view(tensor.dtype).view(tensor.shape))
                pairs.append((copied, kept[id(tensor)]))
        try:
            rerun(again)
        except Exception:
            return True
        return any(not torch.equal(_bytes(copied), held) for copied, held in pairs)

    def _check_reuse(self, mine: Returned) -> None:
        """Results of two calls, which may live at once, do not share memory."""
        found = [
            (storage, copies.span(tensor))
            for tensor in mine.tensors()
            if not outputs.is_empty(tensor) and not outputs.shares(tensor, mine.given)
            if (storage := copies.storage_of(tensor)) is not None
        ]
        for storage, (first, last) in found:
            for kept, (begin, end) in self._override.state.results_of(self._signature):
                if kept.cdata == storage._cdata and first < end and begin < last:
                    raise ContractError(
                        f"{who(self._override)} returned the memory of an earlier result, which "
                        "it has kept; return a new tensor on every call"
                    )
        places = [(StorageWeakRef(storage), place) for storage, place in found]
        self._override.state.keep_results(self._signature, places)


def _watched(call: Call) -> Iterator[tuple[Argument, torch.Tensor, torch.Tensor]]:
    """What the op must leave as it is, with its bytes as they are now, while they are not many."""
    written = [tensor for _, tensor in call.written()]
    left = MAX_WATCHED_BYTES
    for argument, tensor in call.named_tensors():
        strided = copies.storage_of(tensor) is not None and not tensor.is_quantized
        if not strided or outputs.is_empty(tensor) or outputs.shares(tensor, written):
            continue
        size = tensor.numel() * tensor.element_size()
        if size <= left:
            left -= size
            yield argument, tensor, _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes of a tensor's elements."""
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copied.view(-1).view(torch.uint8)


def _effects(
    argument: Argument, mine: torch.Tensor, native: torch.Tensor, before: torch.Tensor
) -> Iterator[str]:
    """What was written, where native writes nothing, or nothing, where native writes."""
    if (
        argument.name in outputs.USED_UP
        or outputs.is_empty(before)
        or copies.storage_of(mine) is None
    ):
        return
    if mine.shape != before.shape or mine.dtype != before.dtype or mine.is_quantized:
        return
    one, other, then = (_bytes(each) for each in (mine, native, before))
    if torch.equal(one, then) and outputs.distance(before, native) is not None:
        yield "as it was, where native writes to it"
    elif torch.equal(other, then) and outputs.distance(mine, native) is not None:
        yield "with other values, where native leaves those that it had"


@contextmanager
def keeping_rng(call: Call) -> Iterator[None]:
    """Leave every random generator that a second run of the op would advance as it is."""
    if not call.op.is_random:
        yield
        return
    own = [(g, g.get_state()) for g in call.values if isinstance(g, torch.Generator)]
    devices = {t.device.index for t in call.tensors() if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        for generator, state in own:
            generator.set_state(state)


def _refuse(override: Override, index: int, difference: str) -> NoReturn:
    output = outputs.name_of(override.operator, index)
    raise ContractError(f"{who(override)} returned {output} {difference}")


def strides_differ(call: Call, index: int, mine: Any, native: Any) -> bool:
    """Whether an output's strides are not native's, where native's are those that it promises."""
    return outputs.layouts_differ(mine, native) and promises_strides(call, index, None, native)


def promises_strides(call: Call, index: int, place: int | None, native: torch.Tensor) -> bool:
    """Whether the strides of native's output are what the op's meta function says, too.

    Where they are not (softmax of a transposed tensor on CPU), nobody can rely on them. Asked only
    for an output whose strides differ, because a first meta run can take seconds.
    """
    try:
        with _disable_current_modes():
            result = call.op.overload(*map(_as_meta, call.args), **_meta_kwargs(call))
        promised = outputs.as_outputs(call.op, result)[index]
        promised = promised if place is None else promised[place]
    except Exception:  # an op without a meta function, or one that depends on data
        return True
    return not outputs.layouts_differ(promised, native)


def _meta_kwargs(call: Call) -> dict[str, Any]:
    return {name: _as_meta(value) for name, value in call.kwargs.items()}


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="meta", requires_grad=False
        )
    if isinstance(value, (list, tuple)):
        return [_as_meta(item) for item in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def who(override: Override) -> str:
    """How messages name an override."""
    return f"override {override.name!r} of {override.op} at {override.dispatch_key}"
