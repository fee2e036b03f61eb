"""The contract: an override returns what the native kernel returns, values aside.

The number of outputs is checked on every hit. On the first hits of each kind of call the native
kernel runs as well, and `router/outputs.py` compares both results. The reference is the native
kernel, not the op's meta function: for several ops native differs from its meta function (in
strides, on CPU even in dtypes), and the first meta run of some ops imports Inductor, which takes
seconds. Strides are compared only where native agrees with its meta function.

Native runs before the impl. If native rejects the call, the call raises, whatever the impl
returned. For an op that writes to its arguments native runs on copies, and what both wrote is
compared as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from opgraft.base import interrupts
from opgraft.errors import ContractError
from opgraft.ops.schema import Argument, Call
from opgraft.registry import Override
from opgraft.router import copies, device, outputs, threads
from opgraft.router.call_keys import kind_of
from opgraft.router.outputs import OpResult

log = logging.getLogger(__name__)

#: Native runs on copies of at most this many bytes. Two copies are made.
MAX_COPIED_BYTES = 2**28
#: At most this many bytes of arguments are compared with what they were before.
MAX_WATCHED_BYTES = 2**24

# Parts of native's message when it lacks support for a valid call: a dtype, a device or a mode that
# is not implemented, or a library that fails. The override may exist for such calls.
_UNSUPPORTED = (
    *("not implemented", "not support", "not_support", "unsupported", "deterministic"),
    *("cudnn", "cublas", "cusolver", "cusparse", "execution plan", "internal assert"),
    "not compiled with",
)
# Part of the message when a written argument overlaps itself. torch calls that an "unsupported
# operation" on every backend, so it is checked before `_UNSUPPORTED`.
_OVERLAP = "single memory location"


def checked_outputs(override: Override, result: Any) -> tuple[Any, ...]:
    """An impl's result as one value per output of the schema.

    Raises:
        ContractError: there are too many or too few, or the only output must be a tensor and is
            none.
    """
    returns = override.operator.returns
    if len(returns) == 1:
        if str(returns[0].type) == "Tensor" and not isinstance(result, torch.Tensor):
            _raise_output_error(override, 0, f"with {outputs.describe(result)} instead of a tensor")
        return (result,)
    if not returns:
        return ()
    if not isinstance(result, (tuple, list)) or len(result) != len(returns):
        is_sequence = isinstance(result, (tuple, list))
        got = f"{len(result)} values" if is_sequence else outputs.describe(result)
        raise ContractError(
            f"{display_name(override)} returned {got}; the op has {len(returns)} outputs"
        )
    return tuple(result)


def is_invalid_call(error: Exception) -> bool:
    """Whether native's error means that the call is invalid, not that native lacks support."""
    if isinstance(error, NotImplementedError) or device.is_out_of_memory(error):
        return False
    message = str(error).lower()
    return _OVERLAP in message or not any(sign in message for sign in _UNSUPPORTED)


def begin(
    override: Override,
    call: Call,
    run_native: Callable[[Call], Any],
    *,
    always: bool,
    differentiated: bool,
) -> Check | None:
    """Start the check of a hit; None if the hit is not checked.

    Args:
        override: whose impl is to run.
        call: the arguments.
        run_native: runs the native kernel on a call.
        always: check this hit even if it is not one of the first of its kind.
        differentiated: whether autograd differentiates what the impl calls. Such calls are kinds
            of their own.
    """
    if override.state.is_unchecked:
        return None
    if any(map(is_lazy, call.tensors())):  # whose shape nothing may look at
        return None
    kind: Hashable = kind_of(call)
    if differentiated:
        kind = ("differentiated", kind)
    if not always and not override.state.is_check_due(kind):
        return None
    return Check(override, kind, call, run_native)


class Check:
    """A hit that is compared with native: created before the impl runs, ended after it.

    Args:
        override: whose impl is to run.
        kind: the call's kind, to count the check.
        call: the arguments.
        run_native: runs the native kernel on a call.
    """

    def __init__(
        self,
        override: Override,
        kind: Hashable,
        call: Call,
        run_native: Callable[[Call], Any],
    ) -> None:
        self._override = override
        self._kind = kind
        self._call = call
        #: The call that native runs on: with copies of what it writes to.
        self._native_call = call
        #: A copy of the call from before any run.
        self._original_call = call
        self._native: OpResult | None = None
        self._refusal: Exception | None = None
        with threads.scope(threads.EVERYTHING):
            if self._copy():
                self._run_native(run_native)
            self._unwritten = list(_unwritten(call))

    def _copy(self) -> bool:
        """Copy what the call writes to; false if that is too much."""
        if not self._call.writes:
            return True
        if copies.copied_bytes(self._call) > MAX_COPIED_BYTES:
            return False
        try:
            self._native_call, self._original_call = (
                copies.copy_call(self._call),
                copies.copy_call(self._call),
            )
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            log.debug("%s: not checked, %r", self._override.name, error)
            return False
        return True

    def _run_native(self, run_native: Callable[[Call], Any]) -> None:
        try:
            with preserving_rng(self._call):
                result = run_native(self._native_call)
        except Exception as error:
            if is_invalid_call(error):
                self._refusal = error
                return
            if interrupts.is_interrupt(error):
                raise
            log.debug("%s: not checked, native raised %r", self._override.name, error)
            return
        op = self._call.op
        self._native = OpResult(op, outputs.as_outputs(op, result), self._native_call.tensors())

    def end(self, result: Any, rerun: Callable[[Call], Any]) -> None:
        """Compare what the impl returned, and what it did to the arguments.

        Args:
            result: what the impl returned.
            rerun: runs the impl again, on other arguments.

        Raises:
            ContractError: the hit breaks the contract. The message names the override, the output
                or argument, and the difference.
            Exception: what native raised, if the call is invalid. What was written is restored.
        """
        override, call = self._override, self._call
        if self._refusal is not None:
            with threads.scope(threads.EVERYTHING):
                copies.restore(call, self._native_call)
            raise self._refusal
        actual = OpResult(call.op, checked_outputs(override, result), call.tensors())
        with threads.scope(threads.EVERYTHING):
            if call.op.mutates:
                self._check_returned_arguments(actual)
            if self._native is not None:
                self._compare(actual, self._native)
            self._check_unwritten(rerun)
            self._check_reuse(actual)
        # Counted last, so that a failed check is repeated for the next hit. A check counts even if
        # native could not run, or it would be repeated for ever.
        override.state.note_checked(self._kind)

    def _check_returned_arguments(self, actual: OpResult) -> None:
        """An op that writes to its arguments must return those same tensors."""
        written = [tensor for _, tensor in self._call.written()]
        for index, (value, declared) in enumerate(
            zip(actual.outputs, actual.op.returns, strict=True)
        ):
            alias = declared.alias_info
            is_written = alias is not None and alias.is_write and isinstance(value, torch.Tensor)
            if is_written and not any(value is each for each in written):
                raise ContractError(
                    f"{display_name(self._override)} returned a new {outputs.describe(value)} as "
                    f"{outputs.name_of(actual.op, index)}; the op writes to an argument and "
                    "returns that argument itself"
                )

    def _compare(self, actual: OpResult, native: OpResult) -> None:
        def promises(index: int, item: int | None, output: torch.Tensor) -> bool:
            return promises_strides(self._original_call, index, item, output)

        for label, difference in outputs.compare(actual, native, promises):
            raise ContractError(f"{display_name(self._override)} returned {label} {difference}")
        for argument, difference in self._written_argument_differences():
            raise ContractError(
                f"{display_name(self._override)} left argument {argument.name!r} {difference}"
            )

    def _written_argument_differences(self) -> Iterator[tuple[Argument, str]]:
        """How the arguments that were written differ from those that native wrote to."""
        calls = (self._call, self._native_call, self._original_call)
        given, native_given = (tuple(call.tensors()) for call in calls[:2])
        for rows in zip(*(list(call.written()) for call in calls), strict=True):
            (argument, one), (_, other), (_, before) = rows
            found = [f"with {each}" for each in outputs.dtype_device_shape_differences(one, other)]
            if not found and outputs.strides_differ(one, other):
                found.append(f"with strides {one.stride()}, native's are {other.stride()}")
            for ours, theirs in zip(given, native_given, strict=True):
                if ours is not one and outputs.shares_memory(one, [ours]) != outputs.shares_memory(
                    other, [theirs]
                ):
                    where = "in another" if outputs.shares_memory(one, [ours]) else "not in another"
                    found.append(f"{where} argument's memory, unlike native")
            if not found and not self._call.op.is_random:
                found += _missing_or_extra_writes(argument, one, other, before)
            yield from ((argument, each) for each in found)

    def _check_unwritten(self, rerun: Callable[[Call], Any]) -> None:
        """An impl must not change what the op does not write to."""
        changed = [
            argument
            for argument, tensor, before in self._unwritten
            if not _are_equal(_bytes(tensor), before)
        ]
        if changed and self._writes_again(rerun):
            names = ", ".join(repr(argument.name) for argument in changed)
            raise ContractError(
                f"{display_name(self._override)} wrote to argument {names}, which the op does not "
                "write to: let it work on a copy"
            )

    def _writes_again(self, rerun: Callable[[Call], Any]) -> bool:
        """Whether the impl writes to copies, too. Else another thread may have made the change."""
        again = copies.copy_call(self._call, everything=True)
        before = {id(tensor): contents for _, tensor, contents in self._unwritten}
        pairs = []
        for tensor, copied in zip(self._call.tensors(), again.tensors(), strict=True):
            if id(tensor) in before:
                copied.copy_(before[id(tensor)].view(tensor.dtype).view(tensor.shape))
                pairs.append((copied, before[id(tensor)]))
        try:
            rerun(again)
        except Exception as error:
            if interrupts.is_interrupt(error):
                raise
            return True
        return any(not _are_equal(_bytes(copied), contents) for copied, contents in pairs)

    def _check_reuse(self, actual: OpResult) -> None:
        """The results of two calls must not share memory, since both may be alive."""
        found = [
            (storage, copies.span(tensor))
            for tensor in actual.tensors()
            if not outputs.is_empty(tensor) and not outputs.shares_memory(tensor, actual.inputs)
            if (storage := copies.storage_of(tensor)) is not None
        ]
        for storage, (first, last) in found:
            for earlier, (begin, end) in self._override.state.results_of(self._kind):
                if earlier.cdata == storage._cdata and first < end and begin < last:
                    raise ContractError(
                        f"{display_name(self._override)} returned the memory of an earlier result, "
                        "which it has kept; return a new tensor on every call"
                    )
        ranges = [(StorageWeakRef(storage), span) for storage, span in found]
        self._override.state.keep_results(self._kind, ranges)


def _unwritten(call: Call) -> Iterator[tuple[Argument, torch.Tensor, torch.Tensor]]:
    """The arguments that the op must not change, with copies of their bytes, up to the limit."""
    written = [tensor for _, tensor in call.written()]
    left = MAX_WATCHED_BYTES
    for argument, tensor in call.named_tensors():
        strided = copies.storage_of(tensor) is not None and not tensor.is_quantized
        if not strided or outputs.is_empty(tensor) or outputs.shares_memory(tensor, written):
            continue
        size = tensor.numel() * tensor.element_size()
        if size <= left:
            left -= size
            yield argument, tensor, _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes of a tensor's elements."""
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copied.view(-1).view(torch.uint8)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two copies of bytes are equal.

    They are compared on the CPU: a process's first comparison on a GPU waits until its kernels are
    loaded, for longer than it takes to read so few bytes.
    """
    return torch.equal(_words(one.cpu()), _words(other.cpu()))


def _words(contents: torch.Tensor) -> torch.Tensor:
    """Bytes as larger numbers, if there are whole ones: they are compared in a fraction of the
    time."""
    return contents.view(torch.int64) if contents.numel() % 8 == 0 else contents


def _missing_or_extra_writes(
    argument: Argument, actual: torch.Tensor, native: torch.Tensor, before: torch.Tensor
) -> Iterator[str]:
    """An argument that only one of impl and native changed."""
    if (
        argument.name in outputs.CONSUMED
        or outputs.is_empty(before)
        or copies.storage_of(actual) is None
    ):
        return
    if actual.shape != before.shape or actual.dtype != before.dtype or actual.is_quantized:
        return
    one, other, then = (_bytes(each) for each in (actual, native, before))
    if torch.equal(one, then) and outputs.value_difference(before, native) is not None:
        yield "as it was, where native writes to it"
    elif torch.equal(other, then) and outputs.value_difference(actual, native) is not None:
        yield "with other values, where native leaves those that it had"


@contextmanager
def preserving_rng(call: Call) -> Iterator[None]:
    """Restore the state of every random generator that a second run of the op advances.

    Of other libraries' ops any may: torch asks nobody to declare it.
    """
    if not call.op.is_random and call.op.name.startswith("aten::"):
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


def _raise_output_error(override: Override, index: int, difference: str) -> NoReturn:
    output = outputs.name_of(override.operator, index)
    raise ContractError(f"{display_name(override)} returned {output} {difference}")


def promised_strides_differ(call: Call, index: int, actual: Any, native: Any) -> bool:
    """Whether an output's strides differ from native's, and native's are promised."""
    return outputs.strides_differ(actual, native) and promises_strides(call, index, None, native)


def promises_strides(call: Call, index: int, item: int | None, native: torch.Tensor) -> bool:
    """Whether the strides of native's output are those of the op's meta function.

    If they differ (softmax of a transposed tensor on CPU), nobody can rely on them. This is called
    only for an output whose strides differ, because a first meta run can take seconds.
    """
    try:
        with _disable_current_modes():
            result = call.op.overload(*map(_as_meta, call.args), **_meta_kwargs(call))
        promised = outputs.as_outputs(call.op, result)[index]
        promised = promised if item is None else promised[item]
    except Exception:  # no meta function, or one that depends on data
        return True
    return not outputs.strides_differ(promised, native)


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


def display_name(override: Override) -> str:
    """The name of an override in messages."""
    return f"override {override.name!r} of {override.op} at {override.dispatch_key}"
