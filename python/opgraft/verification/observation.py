"""Runs a sample with an override and with the native kernel, and compares the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from opgraft.errors import ContractError
from opgraft.ops.describing import describe, offset, strides
from opgraft.ops.schema import Call, Op
from opgraft.registry import Override
from opgraft.router import outputs
from opgraft.router.outputs import same_bits
from opgraft.verification.layouts import SPECIAL
from opgraft.verification.process_state import ProcessState
from opgraft.verification.reference import (
    CallResults,
    native,
    native_with_written,
    reference,
    written,
)
from opgraft.verification.samples import Sample, run, tensors_of

#: The native kernel counts as deterministic if so many runs return the same bits.
_NATIVE_RUNS = 12
#: Sums in a changing order may differ by so many units in the last place of the largest value.
_NOISE = 4
#: With no more elements than this, two random results may be equal by chance.
_FEW_RANDOM_ELEMENTS = 64
#: Storages up to this size are compared as a whole, around the tensor too.
_WHOLE_STORAGE = 2**28


class Failed(Exception):
    """A check found something wrong."""


class NotApplicable(Exception):
    """A check has nothing to say about this override or sample."""


@dataclass
class Subject:
    """The override under test, and the options of the test."""

    override: Override
    device: torch.device
    k: float
    seed: int
    #: The largest error so far, as a multiple of native's own.
    worst_error: float = 0.0
    references: dict[str, None] = field(default_factory=dict)

    @property
    def op(self) -> Op:
        return self.override.operator


@dataclass
class Run:
    """One run of a call with the override on."""

    call: Call
    outputs: tuple[Any, ...] = ()
    error: Exception | None = None
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0
    changed: list[str] = field(default_factory=list)
    #: The settings that changed, and the random generators that advanced.
    settings: list[str] = field(default_factory=list)
    advanced: list[str] = field(default_factory=list)


class Observation:
    """A sample with the results of the override and the native kernel; each is run on first use."""

    def __init__(self, subject: Subject, sample: Sample) -> None:
        self.subject = subject
        self.sample = sample

    @cached_property
    def wanted(self) -> bool:
        """Whether the override should take the call."""
        call = self.sample.call()
        if any(tensor.is_conj() or tensor.is_neg() for tensor in call.tensors()):
            return False
        return self.subject.override.condition_holds(call)

    @cached_property
    def native(self) -> CallResults:
        with torch.no_grad():
            return native_with_written(self.sample.call())

    @cached_property
    def override_run(self) -> Run:
        with torch.no_grad():
            return observe(self.subject.override, self.sample.call(), self.subject.device)

    @property
    def is_special(self) -> bool:
        """Whether the sample has special values, which new random ones would undo."""
        return any(layout in SPECIAL for layout in self.sample.layouts.values())

    @cached_property
    def is_random(self) -> bool:
        """Whether the native kernel's own result is random (dropout, but not with p=0); differences
        from the order of additions do not count."""
        if not self.subject.op.is_random or self.refused:
            return False
        with torch.no_grad():
            first, second = (native(self.sample.call()).outputs for _ in range(2))
        if first_difference(self, first, second, same_but_for_noise) is not None:
            return True
        # With few elements, two random results are often equal.
        elements = max((t.numel() for t in first if isinstance(t, torch.Tensor)), default=0)
        return elements <= _FEW_RANDOM_ELEMENTS and self.native_advances_rng

    @cached_property
    def native_advances_rng(self) -> bool:
        """Whether the native kernel advances a random generator."""
        device = self.subject.device
        call = self.sample.call()
        before = ProcessState.now(device)
        with torch.no_grad():
            native(call)
        return bool(before.advanced(ProcessState.now(device)))

    @cached_property
    def repeats(self) -> bool:
        """Whether the override's own result has the same bits from run to run."""
        return (
            first_difference(
                self, self.override_run.outputs, observe_again(self).override_run.outputs, same_bits
            )
            is None
        )

    @cached_property
    def native_is_deterministic(self) -> bool:
        """Whether the native kernel's result has the same bits in several runs.

        It takes several: if a kernel's programs add in the order in which they finish, most runs
        agree. cuDNN's backward differed between runs only on a GPU that other processes used, too.
        """
        again = (observe_again(self).native.outputs for _ in range(_NATIVE_RUNS))
        return all(
            first_difference(self, self.native.outputs, each, same_bits) is None for each in again
        )

    @cached_property
    def reference(self) -> CallResults:
        with torch.no_grad():
            outcome = reference(self.sample.call())
        self.subject.references[outcome.what] = None
        return outcome

    @cached_property
    def refused(self) -> bool:
        """Whether the native kernel raises, so that the call is not valid."""
        try:
            return self.native is None
        except Exception:
            return True

    @property
    def took(self) -> bool:
        """Whether the override's own impl made the result."""
        ran = self.override_run
        return ran.error is None and ran.hits > 0 and ran.fallbacks < ran.hits

    def describe(self) -> str:
        try:
            return describe_call(self.sample.call())
        except Exception as error:  # too little memory is left, for instance
            return f"cannot be made again: {first_line(error)}"


def observe(override: Override, call: Call, device: torch.device) -> Run:
    """Run a call with the override enabled, and note changes of its arguments and of the process.

    Changed settings of the process are restored.
    """
    before = (override.hits, override.misses, override.fallbacks)
    kept = {position: memory_of(tensor) for position, tensor in tensors_of(call.op, call.values)}
    ran = Run(call)
    state = ProcessState.now(device)
    try:
        result = run(call)
        ran.outputs = outputs.as_outputs(call.op, result) + written(call)
    except Exception as error:
        ran.error = error
    later = ProcessState.now(device)
    ran.settings, ran.advanced = state.changed(later), state.advanced(later)
    state.restore()
    ran.hits, ran.misses, ran.fallbacks = (
        now - then
        for now, then in zip(
            (override.hits, override.misses, override.fallbacks), before, strict=True
        )
    )
    may_write = {argument.name for argument, _ in call.written()}
    for position, tensor in tensors_of(call.op, call.values):
        if position.argument not in may_write and not torch.equal(
            memory_of(tensor), kept[position]
        ):
            ran.changed.append(str(position))
    return ran


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's memory, and of the memory around it."""
    storage = tensor.untyped_storage()
    if tensor.layout != torch.strided or storage.nbytes() > _WHOLE_STORAGE:
        return tensor.detach().clone().contiguous().view(-1).view(torch.uint8)
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage).clone()  # type: ignore[call-overload, no-any-return]


def observe_again(seen: Observation) -> Observation:
    return Observation(seen.subject, seen.sample)


def unless_refused(run_native: Callable[[], CallResults]) -> CallResults:
    """Native's results; a call that it refuses says nothing about the override."""
    try:
        return run_native()
    except Exception as error:
        raise NotApplicable(f"native raises {first_line(error)}") from error


def output_pairs(seen: Observation) -> list[tuple[Any, Any]]:
    expected = unless_refused(lambda: seen.native).outputs
    return list(zip(seen.override_run.outputs, expected, strict=True))


def reference_at(outputs: tuple[Any, ...], index: int, expected: Any) -> Any:
    # A formula may not compute all outputs of its op.
    return outputs[index] if index < len(outputs) else expected


def needs_run(seen: Observation) -> None:
    if seen.override_run.hits == 0:
        raise NotApplicable("it declines the call")


def needs_hit(seen: Observation, check: str) -> None:
    needs_run(seen)
    error = seen.override_run.error
    if error is None:
        return
    if isinstance(error, ContractError) and contract_check(error) == check:
        raise Failed(str(error))
    raise NotApplicable("it raised")


def needs_plain_hit(seen: Observation) -> None:
    if not seen.took:
        raise NotApplicable("no sample is taken")


#: The check that a contract error belongs to, by a word of its message.
_CONTRACT_CHECKS = (
    ("strides ", "strides"),
    ("dtype ", "dtype"),
    ("shape ", "shape"),
    ("storage of", "storage"),
    ("negative bit", "form"),
    ("conjugate bit", "form"),
    ("with type ", "form"),
    ("requires_grad", "form"),
    ("is_inference", "form"),
    ("memory", "aliasing"),
    ("wrote to argument", "inputs"),
)


def contract_check(error: ContractError) -> str:
    message = str(error).split(" returned ", 1)[-1]
    return next((check for word, check in _CONTRACT_CHECKS if word in message), "hit")


def first_difference(
    seen: Observation,
    first: Sequence[Any],
    second: Sequence[Any],
    same: Callable[[torch.Tensor, Any], bool],
) -> int | None:
    """The first output in which two runs of a call differ; random states are not compared."""
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if isinstance(one, torch.Tensor) and has_values(seen, index) and not same(one, other):
            return index
    return None


def first_difference_from_run(seen: Observation, result: Any) -> int | None:
    """The first output in which another run differs from the observed one, except for rounding."""
    results = outputs.as_outputs(seen.subject.op, result)
    # The arguments that the op writes to come after its outputs.
    mine = seen.override_run.outputs[: len(results)]
    return first_difference(seen, results, mine, partial(agree, seen))


def same_but_for_noise(one: torch.Tensor, other: torch.Tensor) -> bool:
    return same_bits(one, other) or differ_by_noise(one, other)


def differ_by_noise(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of one kernel differ only as sums in another order do: in the last places
    of the largest value."""
    if not one.is_floating_point():
        return False
    finite = other[other.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    noise = _NOISE * torch.finfo(one.dtype).eps * largest
    return torch.allclose(one, other, rtol=0.0, atol=noise, equal_nan=True)


def agree(seen: Observation, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of the same call are equal, except for rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True):
        return True
    return not seen.repeats and differ_by_noise(one, other)


def has_values(seen: Observation, index: int) -> bool:
    """Whether an output's values are compared; the arguments that the call writes to come last."""
    op, behind = seen.subject.op, index - len(seen.subject.op.returns)
    if behind < 0:
        return outputs.has_comparable_values(op, index)
    if not any(each.written and each.name in outputs.CONSUMED for each in op.arguments):
        return True
    names = [argument.name for argument, _ in seen.sample.call().written()]
    return names[behind] not in outputs.CONSUMED


def output_name(seen: Observation, index: int) -> str:
    op = seen.subject.op
    if index < len(op.returns):
        return outputs.name_of(op, index)
    return f"the argument {index - len(op.returns)} that is written to"


def describe_call(call: Call) -> str:
    """A call's arguments, in one line."""
    return ", ".join(f"{name}={described(value)}" for name, value in call.named.items())


def described(value: Any) -> str:
    return describe(value, strides, offset)


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
