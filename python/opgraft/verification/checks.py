"""The checks of a verification: what an override must do on a sample, and what its op must survive.

Each check is a function of an observed call. It returns where the call is as it should be, raises
:class:`Failed` with what is wrong, or :class:`NotApplicable` with why it says nothing here.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from opgraft import env
from opgraft.errors import ContractError
from opgraft.registry import Override
from opgraft.router import contract, threads
from opgraft.router.python import why_not
from opgraft.schema import Call, Op, resolve
from opgraft.verification import opinfo
from opgraft.verification.reference import (
    NATIVE,
    Error,
    Outcome,
    errors,
    narrowed,
    native,
    perturbed,
    reference,
    widened,
)
from opgraft.verification.samples import CannotMake, Sample, functional_of, run, tensors_of

#: Draws of a call's values over which errors are taken, where one alone is above the bound.
_DRAWS = 12
#: Calls after which a launch plan is there: one to see that the call comes again, two recordings,
#: and some that an autotuned kernel needs to settle.
_RUNS_TO_A_PLAN = 8
#: Runs of the native kernel that have to have the same bits for it to be taken as deterministic.
_NATIVE_RUNS = 12
#: Arguments this many times larger than an output make it a reduction of them.
_TERMS = 16
#: Units in the last place of a result's largest value that sums in a changing order may be apart.
_NOISE = 4
#: Storages up to this size are compared as a whole, around the tensor too.
_WHOLE_STORAGE = 2**28


class Failed(Exception):
    """A check found something wrong."""


class NotApplicable(Exception):
    """A check has nothing to say about this override or sample."""


@dataclass
class Subject:
    """The override under test, and the terms of the test."""

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

    @property
    def decides_itself(self) -> bool:
        return self.override.takes_keyset


@dataclass
class Ran:
    """One run of a call with the override on."""

    call: Call
    outputs: tuple[Any, ...] = ()
    error: Exception | None = None
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0
    changed: list[str] = field(default_factory=list)


class Observation:
    """A sample with what the override and the native kernel make of it, each run when asked for."""

    def __init__(self, subject: Subject, sample: Sample) -> None:
        self.subject = subject
        self.sample = sample

    @cached_property
    def wanted(self) -> bool:
        """Whether the override should take the call."""
        call = self.sample.call()
        if any(tensor.is_conj() or tensor.is_neg() for tensor in call.tensors()):
            return False
        return self.subject.override.wants(call)

    @cached_property
    def native(self) -> Outcome:
        with torch.no_grad():
            call = self.sample.call()
            outcome = native(call)
            return Outcome((*outcome.outputs, *written(call)), outcome.what)

    @cached_property
    def mine(self) -> Ran:
        with torch.no_grad():
            return observe(self.subject.override, self.sample.call())

    @cached_property
    def is_random(self) -> bool:
        """Whether the native kernel's own result changes from run to run, by more than the order of
        its sums: dropout, but not of 0."""
        if not self.subject.op.is_random or self.refused:
            return False
        with torch.no_grad():
            first, second = (native(self.sample.call()).outputs for _ in range(2))
        return _first_unlike(self, first, second, _same_but_for_noise) is not None

    @cached_property
    def repeats(self) -> bool:
        """Whether the override's own result has the same bits from run to run."""
        return _first_unlike(self, self.mine.outputs, _again(self).mine.outputs, _same_bits) is None

    @cached_property
    def native_repeats(self) -> bool:
        """Whether the native kernel's has, in several runs.

        Where programs add up in the order in which they come, most runs of a call agree: cuDNN's
        backward differed from one run to the next on a GPU that other processes used, too.
        """
        again = (_again(self).native.outputs for _ in range(_NATIVE_RUNS))
        return all(
            _first_unlike(self, self.native.outputs, each, _same_bits) is None for each in again
        )

    @cached_property
    def reference(self) -> Outcome:
        with torch.no_grad():
            outcome = reference(self.sample.call())
        self.subject.references[outcome.what] = None
        return outcome

    @cached_property
    def refused(self) -> bool:
        """Whether the native kernel raises: then it is no call that anybody can make."""
        try:
            return self.native is None
        except Exception:
            return True

    @property
    def took(self) -> bool:
        """Whether the override's own kernel made the result."""
        ran = self.mine
        return ran.error is None and ran.hits > 0 and ran.fallbacks < ran.hits

    def describe(self) -> str:
        return describe(self.sample.call())


def observe(override: Override, call: Call) -> Ran:
    """Run a call with the override on, and look at what became of its arguments."""
    before = (override.hits, override.misses, override.fallbacks)
    kept = {place: _bytes(tensor) for place, tensor in tensors_of(call.op, call.values)}
    ran = Ran(call)
    try:
        result = run(call)
        ran.outputs = (result,) if len(call.op.returns) == 1 else tuple(result or ())
        ran.outputs += written(call)
    except Exception as error:
        ran.error = error
    ran.hits, ran.misses, ran.fallbacks = (
        now - then
        for now, then in zip(
            (override.hits, override.misses, override.fallbacks), before, strict=True
        )
    )
    may_write = {a.name for a in call.op.arguments if a.written}
    for place, tensor in tensors_of(call.op, call.values):
        if place.argument not in may_write and not torch.equal(_bytes(tensor), kept[place]):
            ran.changed.append(str(place))
    return ran


def written(call: Call) -> tuple[torch.Tensor, ...]:
    """The arguments that the op writes to."""
    names = {a.name for a in call.op.arguments if a.written}
    return tuple(t for place, t in tensors_of(call.op, call.values) if place.argument in names)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor's memory holds, and what lies around it, as a copy."""
    storage = tensor.untyped_storage()
    if tensor.layout != torch.strided or storage.nbytes() > _WHOLE_STORAGE:
        return tensor.detach().clone().contiguous().view(-1).view(torch.uint8)
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage).clone()  # type: ignore[call-overload, no-any-return]


@contextmanager
def alone(override: Override) -> Iterator[None]:
    """Only this override is on, on this thread; what it raises is not hidden by a fallback.

    Raises:
        Failed: another override is told from it by nothing that can be selected.
    """
    from opgraft.registry import Selector, registry

    others = [each for each in registry.overrides(Selector()) if each is not override]
    with _scopes([Selector(**_given(each)) for each in others], override):
        stated, override.on_error = override.on_error, "raise"
        try:
            with _run_all(override):
                yield
        finally:
            override.on_error = stated


@contextmanager
def _run_all(override: Override) -> Iterator[None]:
    """While this lasts, Python runs what has no launch plan, whether it pays or not."""
    if override.plans is None:
        yield
        return
    override.plans.table.runs_all = True
    try:
        yield
    finally:
        override.plans.table.runs_all = False


def _given(override: Override) -> dict[str, str]:
    return {key: value for key, value in override.identity.items() if value is not None}


@contextmanager
def _scopes(selectors: list[Any], override: Override) -> Iterator[None]:
    if not selectors:
        yield
        return
    first, *rest = selectors
    if first.matches(override):
        raise Failed(
            f"another override of {override.op} at {override.dispatch_key} is named "
            f"{override.name!r} too, so that this one cannot be run alone: rename one of them"
        )
    with threads.scope(first), _scopes(rest, override):
        yield


# ------------------------------------------------------------------ on every sample


def check_hit(seen: Observation) -> None:
    """It runs where its condition holds, and only there."""
    ran, override = seen.mine, seen.subject.override
    if ran.error is not None:
        if isinstance(ran.error, ContractError) and _contract_check(ran.error) != "hit":
            return  # another check's business
        if seen.refused or not (seen.wanted or ran.hits):
            raise NotApplicable("the native kernel refuses the call")
        raise Failed(f"it raised {type(ran.error).__name__}: {ran.error}")
    if seen.wanted and ran.hits == 0:
        raise Failed(f"its condition holds and it did not run: {_why(override, seen)}")
    if not seen.wanted and ran.hits:
        raise Failed("it ran, and its condition does not hold")


def _why(override: Override, seen: Observation) -> str:
    if reason := override.why_off():
        return reason
    decline = why_not(override, seen.sample.call(), capturing=False)
    if decline is not None:
        return decline.reason
    from opgraft import router
    from opgraft.registry import registry
    from opgraft.router import composite

    installed = router.installed(registry.chain(override.operator, override.dispatch_key))
    if installed is not None and installed.is_composite:
        return f"the op is {composite.NOTE}"
    return "the call does not reach it (opgraft.explain says where it goes)"


def check_miss(seen: Observation) -> None:
    """Where it declines, the result is the native kernel's, bit for bit (but for random states)."""
    if seen.wanted or seen.mine.hits:
        raise NotApplicable("it takes the call")
    if seen.mine.error is not None:
        raise NotApplicable("the native kernel refuses the call")
    if seen.is_random:
        raise NotApplicable("the op is random")
    expected = _unless_refused(lambda: seen.native).outputs
    index = _first_unlike(seen, seen.mine.outputs, expected, _same_bits)
    if index is None:
        return
    if not seen.native_repeats:
        raise NotApplicable("native's own results differ from run to run")
    raise Failed(f"{output_name(seen, index)} is not what the native kernel returns")


def check_dtype(seen: Observation) -> None:
    """Outputs have the dtypes that native's have."""
    _compare_metadata(seen, "dtype")


def check_shape(seen: Observation) -> None:
    """Outputs have the shapes that native's have."""
    _compare_metadata(seen, "shape")


def _compare_metadata(seen: Observation, what: str) -> None:
    _needs_hit(seen, what)
    for index, (mine, expected) in enumerate(_pairs(seen)):
        one, other = getattr(mine, what, None), getattr(expected, what, None)
        if one != other:
            raise Failed(f"{output_name(seen, index)} has {what} {one}, native's is {other}")


def check_strides(seen: Observation) -> None:
    """Outputs have native's strides, wherever native's are those that the op promises."""
    _needs_hit(seen, "strides")
    pairs = _pairs(seen)
    if seen.native.what != NATIVE:
        raise NotApplicable("the backend has no native kernel, and a decomposition's are nobody's")
    for index, (mine, expected) in enumerate(pairs):
        if not isinstance(mine, torch.Tensor) or mine.shape != expected.shape:
            continue
        if index < len(seen.subject.op.returns) and contract.strides_differ(
            seen.sample.call(), index, mine, expected
        ):
            raise Failed(
                f"{output_name(seen, index)} has strides {mine.stride()}, native's are "
                f"{expected.stride()}"
            )


def check_aliasing(seen: Observation) -> None:
    """Outputs share no memory with arguments or each other, unless native's do."""
    _needs_hit(seen, "aliasing")
    if seen.subject.op.mutates:
        raise NotApplicable("the op returns what it writes to")
    call = seen.mine.call
    fresh = seen.sample.call()
    with torch.no_grad():
        expected = _unless_refused(lambda: native(fresh)).outputs
    for index, (mine, theirs) in enumerate(zip(seen.mine.outputs, expected, strict=True)):
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            continue
        if contract.shares(mine, call.tensors()) and not contract.shares(theirs, fresh.tensors()):
            raise Failed(f"{output_name(seen, index)} is in the memory of an argument")
        if contract.shares(mine, seen.mine.outputs[:index]) and not contract.shares(
            theirs, expected[:index]
        ):
            raise Failed(f"{output_name(seen, index)} is in the memory of another output")


def check_inputs(seen: Observation) -> None:
    """Arguments, and the memory around them, are as they were."""
    _needs_run(seen)
    if seen.mine.changed:
        raise Failed(f"it wrote to {', '.join(map(repr, seen.mine.changed))}, or beside it")


def check_values(seen: Observation) -> None:
    """No output is further from the reference than k times native's own distance."""
    _needs_hit(seen, "values")
    if seen.is_random:
        raise NotApplicable("the op is random: its values cannot be compared")
    for index, (mine, expected) in enumerate(_pairs(seen)):
        exact = _at(seen.reference.outputs, index, expected)
        if not isinstance(mine, torch.Tensor) or not isinstance(exact, torch.Tensor):
            continue
        if mine.dtype != expected.dtype or mine.shape != expected.shape:
            continue  # another check says so
        if _is_state(seen, index):
            continue
        judge(seen, index, mine, expected, exact)


def _at(outputs: tuple[Any, ...], index: int, expected: Any) -> Any:
    # What an op writes to is beyond its outputs, and the outputs are what it wrote to.
    return outputs[index] if index < len(outputs) else expected


def judge(
    seen: Observation, index: int, mine: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor
) -> None:
    """Raise where an output's error is too large, over several draws of the call's values."""
    where = output_name(seen, index)
    if not (mine.is_floating_point() or mine.is_complex()):
        if not torch.equal(mine, expected):
            count = int((mine != expected).sum())
            raise Failed(f"{where} differs from native's in {count} of {mine.numel()} elements")
        return
    error, problem = errors(mine, expected, exact)
    if problem is not None:
        raise Failed(f"{where} has {problem}")
    if not error.within(seen.subject.k) and mine.dtype in (torch.float64, torch.complex128):
        error = replace(error, native=_in_float32(seen, index, exact))
    if not error.within(seen.subject.k):
        error = _over_draws(seen, index, error)
    if not error.within(seen.subject.k):
        error = replace(error, noise=_noise(seen, index, exact))
    if not error.within(seen.subject.k):
        raise Failed(f"{where} has {error}; allowed are {seen.subject.k:g} times")
    seen.subject.worst_error = max(seen.subject.worst_error, error.mine / max(error.bound, 1e-300))


def _in_float32(seen: Observation, index: int, exact: torch.Tensor) -> float:
    """Native's own error in float64, of which it is the reference: as large as in float32, in units
    of the last place."""
    with torch.no_grad():
        try:
            call = narrowed(seen.sample.call())
            narrow = native(call).outputs[index]
            wide = native(widened(call, torch.float64)).outputs[index]
        except Exception:  # it takes float64 only
            return 0.0
    error, _ = errors(narrow, narrow, wide)
    scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return error.native * scale


def _noise(seen: Observation, index: int, exact: torch.Tensor) -> float:
    """How much a sum changes when the arguments do in the last places of float32.

    Of a few sums, native's own error says little: where terms cancel it may be small by chance, and
    the order of adding up is a kernel's own choice. Zero for what is no reduction: there are enough
    elements for native's largest error to mean something.
    """
    terms = max((t.numel() for t in seen.sample.call().tensors()), default=0)
    if terms < _TERMS * exact.numel():
        return 0.0
    largest = 0.0
    for draw in range(_DRAWS):
        with torch.no_grad():
            try:
                moved = reference(perturbed(seen.sample.call(), seen.subject.seed + draw))
            except Exception:
                return largest
        other = moved.outputs[index] if index < len(moved.outputs) else None
        if isinstance(other, torch.Tensor) and other.shape == exact.shape:
            difference = (other.double() - exact.double()).abs()
            finite = difference[difference.isfinite()]
            largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
    return largest


def _over_draws(seen: Observation, index: int, error: Error) -> Error:
    """As :func:`_with_more_draws`, of an output."""

    def outputs(draw: int) -> Sequence[Any]:
        again = Observation(seen.subject, seen.sample.redrawn(draw))
        try:
            pair = (again.mine.outputs[index], again.native.outputs[index])
            return (*pair, _at(again.reference.outputs, index, pair[1]))
        except Exception:  # no such call with other values
            return ()

    return error if _is_special(seen) else _with_more_draws(error, outputs)


def _is_special(seen: Observation) -> bool:
    """Whether the sample's values are what it is about, so that others say nothing."""
    return any(layout == "special" for layout in seen.sample.layouts.values())


def _with_more_draws(error: Error, again: Callable[[int], Sequence[Any]]) -> Error:
    """The error together with those of more draws: of one alone, native's may be small by chance.

    Args:
        error: of the first draw.
        again: the override's result, native's and the reference's of a draw; empty where there is
            no such call with other values.
    """
    for draw in range(1, _DRAWS):
        found = again(draw)
        if found and all(isinstance(each, torch.Tensor) for each in found):
            other, problem = errors(*found)
            # NaN is as bad in any draw.
            error = error.joined(other if problem is None else replace(other, mine=math.inf))
    return error


def _needs_run(seen: Observation) -> None:
    if seen.mine.hits == 0:
        raise NotApplicable("it declines the call")


def _needs_hit(seen: Observation, check: str) -> None:
    _needs_run(seen)
    error = seen.mine.error
    if error is None:
        return
    if isinstance(error, ContractError) and _contract_check(error) == check:
        raise Failed(str(error))
    raise NotApplicable("it raised")


#: What a contract error speaks of, by a word of its message.
_CONTRACT_CHECKS = (
    ("strides ", "strides"),
    ("dtype ", "dtype"),
    ("shape ", "shape"),
    ("same memory", "aliasing"),
    ("memory of an argument", "aliasing"),
)


def _contract_check(error: ContractError) -> str:
    message = str(error).split(" returned ", 1)[-1]
    return next((check for word, check in _CONTRACT_CHECKS if word in message), "hit")


def _pairs(seen: Observation) -> list[tuple[Any, Any]]:
    expected = _unless_refused(lambda: seen.native).outputs
    return list(zip(seen.mine.outputs, expected, strict=True))


def _unless_refused(run_native: Callable[[], Outcome]) -> Outcome:
    """What native makes of a call: one that it refuses says nothing about the override."""
    try:
        return run_native()
    except Exception as error:
        raise NotApplicable(f"native raises {_first_line(error)}") from error


def output_name(seen: Observation, index: int) -> str:
    op = seen.subject.op
    if index < len(op.returns):
        return contract.output_name(op, index)
    return f"the argument {index - len(op.returns)} that is written to"


def _is_state(seen: Observation, index: int) -> bool:
    returns = seen.subject.op.returns
    return index < len(returns) and returns[index].name in contract.RNG_OUTPUTS


def _same_bits(one: torch.Tensor, other: Any) -> bool:
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_complex():
        one, other = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
    return torch.equal(one.isnan(), other.isnan()) and bool((one.eq(other) | one.isnan()).all())


def describe(call: Call) -> str:
    """A call's arguments, in one line."""
    return ", ".join(
        f"{a.name}={_described(value)}"
        for a, value in zip(call.op.arguments, call.values, strict=True)
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        contiguous = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        offset = f" offset {value.storage_offset()}" if value.storage_offset() else ""
        return f"{dtype}{list(value.shape)}{contiguous}{offset}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return repr(value)


# ------------------------------------------------------------------ on a few samples


def check_determinism(seen: Observation) -> None:
    """The same call gives the same bits, wherever native's does."""
    if seen.is_random:
        raise NotApplicable("the op is random")
    _needs_plain_hit(seen)
    if seen.repeats:
        return
    if not seen.native_repeats:
        raise NotApplicable("native's own results differ from run to run")
    with _deterministic():
        first = _again(seen)
        if first.mine.hits and not first.repeats:
            raise Failed(
                "two runs of the same call differ, under torch.use_deterministic_algorithms(True) "
                "too, and native's do not"
            )


def check_uninitialized(seen: Observation) -> None:
    """Nothing of the result comes from memory that was never written."""
    if seen.is_random:
        raise NotApplicable("the op is random")
    _needs_plain_hit(seen)
    with _deterministic():  # torch.empty then holds NaN, or the largest integer
        filled = _again(seen)
        if filled.mine.error is not None:
            raise Failed(f"with memory filled it raised {filled.mine.error!r}")
    index = _first_unlike(seen, seen.mine.outputs, filled.mine.outputs, partial(_agree, seen))
    if index is not None:
        raise Failed(
            f"{output_name(seen, index)} changes with what its memory held before: a part of it is "
            "never written, or read before it is"
        )


@contextmanager
def _deterministic() -> Iterator[None]:
    stated = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(stated, warn_only=warn_only)


def _again(seen: Observation) -> Observation:
    return Observation(seen.subject, seen.sample)


def _first_unlike(
    seen: Observation,
    first: Sequence[Any],
    second: Sequence[Any],
    same: Callable[[torch.Tensor, Any], bool],
) -> int | None:
    """The first output in which two runs of a call differ; random states may."""
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if isinstance(one, torch.Tensor) and not _is_state(seen, index) and not same(one, other):
            return index
    return None


def _first_unlike_mine(seen: Observation, result: Any) -> int | None:
    """The first output in which another run's result is not the observed one's, rounding aside."""
    outputs = (result,) if len(seen.subject.op.returns) == 1 else tuple(result or ())
    # What the op writes to comes behind its outputs.
    mine = seen.mine.outputs[: len(outputs)]
    return _first_unlike(seen, outputs, mine, partial(_agree, seen))


def _agree(seen: Observation, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of the same call are the same, rounding aside."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True):
        return True
    return not seen.repeats and _differ_by_noise(one, other)


def _same_but_for_noise(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _same_bits(one, other) or _differ_by_noise(one, other)


def _differ_by_noise(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of one kernel differ by no more than sums in whatever order the terms
    come: in the last places of the largest value."""
    if not one.is_floating_point():
        return False
    finite = other[other.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    noise = _NOISE * torch.finfo(one.dtype).eps * largest
    return torch.allclose(one, other, rtol=0.0, atol=noise, equal_nan=True)


def _needs_plain_hit(seen: Observation) -> None:
    if not seen.took:
        raise NotApplicable("no sample is taken")


def check_out(seen: Observation) -> None:
    """The `out=` variants write what native's write, into what they are given."""
    op = seen.subject.op
    variants = list(_out_variants(op))
    if not variants:
        raise NotApplicable("the op has no out= variant")
    for variant in variants:
        for fits in (True, False):
            _check_variant(seen, variant, fits)


def _out_variants(op: Op) -> Iterator[Op]:
    if op.mutates:
        return
    packet = op.overload.overloadpacket
    for name in packet.overloads():
        variant = resolve(getattr(packet, name))
        if variant.mutates and functional_of(variant) is op:
            yield variant


def _check_variant(seen: Observation, variant: Op, fits: bool) -> None:
    expected = seen.native.outputs
    if not all(isinstance(each, torch.Tensor) for each in expected):
        raise NotApplicable("native returns no tensor")
    outs = [a.name for a in variant.arguments if a.written]
    given = [torch.empty_like(e) if fits else e.new_empty(0) for e in expected]
    arguments = {**seen.sample.call().named, **dict(zip(outs, given, strict=True))}
    call = variant.bind((), arguments)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resizing
        try:
            result = run(call)
        except Exception as error:
            with threads.scope(threads.EVERYTHING):
                try:
                    run(variant.bind((), arguments))
                except Exception:
                    raise NotApplicable(f"native refuses out=: {error}") from None
            raise Failed(f"{variant.name} raised {type(error).__name__}: {error}") from error
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    for index, (out, returned, theirs) in enumerate(zip(given, results, expected, strict=True)):
        if returned is not out:
            raise Failed(f"{variant.name} returned another tensor than its out=")
        if out.shape != theirs.shape:
            raise Failed(f"{variant.name} left out= at shape {tuple(out.shape)}")
        if not _is_state(seen, index) and not seen.is_random:
            exact = _at(seen.reference.outputs, index, theirs)
            if isinstance(exact, torch.Tensor):
                judge(seen, index, out, theirs, exact)


class Gradients(NamedTuple):
    """The gradients of a call's tensors, by three ways."""

    names: list[str]
    mine: list[torch.Tensor | None]
    native: list[torch.Tensor | None]
    exact: list[torch.Tensor | None]


def check_gradients(seen: Observation) -> None:
    """Gradients through the op are as right as native's."""
    subject = seen.subject
    if subject.op.mutates or seen.is_random:
        raise NotApplicable("the op writes to its arguments or is random")
    gradients = _three_gradients(seen)
    for index, (name, one, other, best) in enumerate(zip(*gradients, strict=True)):
        if (one is None) != (other is None):
            raise Failed(f"the gradient of {name} is {'missing' if one is None else 'there'}")
        if one is None or other is None or best is None:
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            raise Failed(
                f"the gradient of {name} is {_described(one)}, native's {_described(other)}"
            )
        error, problem = errors(one, other, best)
        if problem is None and not _near(error, one, other, subject.k):
            error = _gradient_over_draws(seen, index, error)
        if problem is not None or not _near(error, one, other, subject.k):
            raise Failed(f"the gradient of {name} has {problem or error}")


def _three_gradients(seen: Observation) -> Gradients:
    """The gradients with the override, natively, and in float64 if there is that.

    Raises:
        NotApplicable: there are none, or the op is a backward that is not reached.
    """
    subject, source = seen.subject, seen.sample.base.source
    call = _differentiable(seen) if source is None else _forward_call(seen)
    hits = subject.override.hits
    mine = _gradients(call, subject.seed)
    if source is not None and subject.override.hits == hits:
        raise NotApplicable(f"a backward of {source.op.name} never reaches the op here")
    with threads.scope(threads.EVERYTHING):
        expected = _gradients(call, subject.seed)
        exact = _exact_gradients(call, subject.seed)
    names = [str(place) for place, t in tensors_of(call.op, call.values) if t.requires_grad]
    return Gradients(names, mine, expected, expected if exact is None else exact)


def _gradient_over_draws(seen: Observation, index: int, error: Error) -> Error:
    """As :func:`_with_more_draws`, of a gradient."""

    def gradients(draw: int) -> Sequence[Any]:
        try:
            again = _three_gradients(Observation(seen.subject, seen.sample.redrawn(draw)))
        except (CannotMake, NotApplicable):
            return ()
        return again.mine[index], again.native[index], again.exact[index]

    return error if _is_special(seen) else _with_more_draws(error, gradients)


def _near(error: Error, one: torch.Tensor, other: torch.Tensor, k: float) -> bool:
    """Whether a result of several ops is as right as native's: errors of each may add up."""
    if error.within(2 * k):
        return True
    exact = one.dtype in (torch.float64, torch.complex128)  # native is the reference, its error 0
    return exact and torch.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


def _differentiable(seen: Observation) -> Call:
    call = seen.sample.call()
    tensors = [t for _, t in tensors_of(call.op, call.values)]
    floating = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    if not floating:
        raise NotApplicable("no argument is floating-point")
    for tensor in floating:
        tensor.requires_grad_()
    return call


def _forward_call(seen: Observation) -> Call:
    base = seen.sample.base.source
    assert base is not None
    forward = Observation(seen.subject, Sample(base, seen.sample.edits, {}, seen.sample.seed))
    return _differentiable(forward)


def _gradients(call: Call, seed: int) -> list[torch.Tensor | None]:
    inputs = [t for _, t in tensors_of(call.op, call.values) if t.requires_grad]
    with torch.enable_grad():
        result = run(call)
        try:
            return opinfo.gradients(result, inputs, seed)
        except (RuntimeError, NotImplementedError) as error:
            words = str(error)
            if "not implemented" in words or "not differentiable" in words:
                raise NotApplicable(f"native has no derivative here: {words}") from None
            raise


def _exact_gradients(call: Call, seed: int) -> list[torch.Tensor | None] | None:
    """In float64, where the op has that."""
    wide = widened(call, torch.float64)
    for (_, tensor), (_, narrow) in zip(
        tensors_of(wide.op, wide.values), tensors_of(call.op, call.values), strict=True
    ):
        if narrow.requires_grad:
            tensor.requires_grad_()
    try:
        return _gradients(wide, seed)
    except Exception:
        return None


def check_gradcheck(seen: Observation) -> None:
    """Numerical and analytical derivatives agree, in float64."""
    call = seen.sample.call()
    dtypes = {t.dtype for t in call.tensors() if t.is_floating_point()}
    if dtypes != {torch.float64}:
        raise NotApplicable("it takes no call in float64")
    if max(t.numel() for t in call.tensors()) > 512:
        raise NotApplicable("the calls that it takes are too large")
    if seen.subject.op.mutates or seen.is_random:
        raise NotApplicable("the op writes to its arguments or is random")
    call = _differentiable(seen)
    inputs = tuple(t for _, t in tensors_of(call.op, call.values) if t.requires_grad)

    def function(*tensors: torch.Tensor) -> Any:
        fresh = dict(zip(map(id, inputs), tensors, strict=True))
        values = tuple(_replaced(value, fresh) for value in call.values)
        result = run(Call(call.op, values))
        results = result if isinstance(result, tuple) else (result,)
        return tuple(r for r in results if isinstance(r, torch.Tensor) and r.requires_grad)

    with threads.scope(threads.EVERYTHING):
        try:
            torch.autograd.gradcheck(function, inputs, fast_mode=True)
        except Exception as error:
            raise NotApplicable(f"native fails it: {_first_line(error)}") from None
    hits = seen.subject.override.hits
    try:
        torch.autograd.gradcheck(function, inputs, fast_mode=True)
    except Exception as error:
        raise Failed(f"gradcheck: {_first_line(error)}") from error
    if seen.subject.override.hits == hits:
        raise NotApplicable("in grad mode it takes no call")


def _replaced(value: Any, fresh: dict[int, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_replaced(each, fresh) for each in value]
    return fresh.get(id(value), value)


def check_fake(seen: Observation) -> None:
    """FakeTensors of the same call give outputs of the same dtype, shape and strides."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    _needs_plain_hit(seen)
    real = seen.sample.call()
    with FakeTensorMode() as mode:
        fake = Call(real.op, tuple(_faked(value, mode) for value in real.values))
        try:
            with torch.no_grad():
                result = run(fake)
        except Exception as error:
            raise NotApplicable(f"the op has no FakeTensor rule: {_first_line(error)}") from None
    results = (result,) if len(real.op.returns) == 1 else tuple(result)
    for index, (mine, promised) in enumerate(zip(seen.mine.outputs, results, strict=False)):
        if not isinstance(mine, torch.Tensor) or not isinstance(promised, torch.Tensor):
            continue
        if _is_state(seen, index):
            continue
        for what in ("dtype", "shape"):
            theirs = getattr(seen.native.outputs[index], what)
            one, other = getattr(mine, what), getattr(promised, what)
            if one != other and theirs == other:
                raise Failed(
                    f"{output_name(seen, index)} has {what} {one}, FakeTensor says {other}"
                )
    override = seen.subject.override
    if override.wants(fake) != seen.wanted:
        raise Failed("its condition says something else on FakeTensors than on the real ones")


def _faked(value: Any, mode: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    return [_faked(each, mode) for each in value] if isinstance(value, (list, tuple)) else value


def check_opcheck(seen: Observation) -> None:
    """`torch.library.opcheck` finds nothing that it does not find natively."""
    _needs_plain_hit(seen)
    _quietly_opcheck(seen, natively=True)
    hits = seen.subject.override.hits
    _quietly_opcheck(seen, natively=False)
    if seen.subject.override.hits == hits:
        raise Failed("torch.library.opcheck ran and the override was never hit")


def _quietly_opcheck(seen: Observation, *, natively: bool) -> None:
    call = seen.sample.call()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if natively:
                with threads.scope(threads.EVERYTHING):
                    torch.library.opcheck(call.op.overload, call.args, call.kwargs)
            else:
                torch.library.opcheck(call.op.overload, call.args, call.kwargs)
    except Exception as error:
        if natively:
            raise NotApplicable(f"native fails it: {_first_line(error)}") from None
        raise Failed(f"torch.library.opcheck: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def check_autocast(seen: Observation) -> None:
    """Under autocast the result is as right as native's."""
    if seen.subject.op.mutates or seen.is_random:
        raise NotApplicable("the op writes to its arguments or is random")
    if not any(t.dtype == torch.float32 for t in seen.sample.call().tensors()):
        raise NotApplicable("no call in float32 is taken")
    device = seen.subject.device.type
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a dtype that this device does not cast to
            with torch.autocast(device, dtype=dtype):
                expected = _unless_refused(lambda: native(seen.sample.call()))
                mine = observe(seen.subject.override, seen.sample.call())
        if mine.error is not None:
            raise Failed(f"under autocast to {dtype} it raised {_first_line(mine.error)}")
        for index, (one, other) in enumerate(zip(mine.outputs, expected.outputs, strict=False)):
            if not isinstance(one, torch.Tensor) or _is_state(seen, index):
                continue
            if one.dtype != other.dtype or one.shape != other.shape:
                raise Failed(
                    f"under autocast to {dtype}, {output_name(seen, index)} is {_described(one)}, "
                    f"native's {_described(other)}"
                )
            exact = _at(seen.reference.outputs, index, other)
            if isinstance(exact, torch.Tensor):
                judge(seen, index, one, other, exact)


def check_threads(seen: Observation) -> None:
    """Calls of several threads at once give what one thread gets."""
    if seen.is_random:
        raise NotApplicable("the op is random")
    _needs_plain_hit(seen)
    override = seen.subject.override
    if interprets(override):
        raise NotApplicable("Triton's interpreter works on one thread at a time")
    calls = [[seen.sample.call() for _ in range(4)] for _ in range(4)]
    problems: list[str] = []
    start = threading.Barrier(len(calls))

    def work(mine: list[Call]) -> None:
        try:
            start.wait(30)
            with torch.no_grad(), alone_on_this_thread(override):
                for call in mine:
                    if _first_unlike_mine(seen, run(call)) is not None:
                        problems.append("a result differs from what one thread gets")
        except Exception as error:
            problems.append(f"a thread raised {_first_line(error)}")

    workers = [threading.Thread(target=work, args=(mine,)) for mine in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if problems:
        raise Failed(f"with {len(workers)} threads: {problems[0]}")


def check_replay(seen: Observation) -> None:
    """Replayed from a launch plan, a call gives what the other checks ask of a hit."""
    _needs_plain_hit(seen)
    plans = seen.subject.override.plans
    if plans is None:
        raise NotApplicable("it has no launch plans")
    before = plans.hits
    for _ in range(_RUNS_TO_A_PLAN):
        again = _again(seen)
        if again.mine.error is not None:
            raise Failed(f"called again, it raised {again.mine.error!r}")
        if plans.hits > before:
            break
    else:
        reasons = "; ".join(dict.fromkeys(plans.refusals.values()))
        unlike = "its kind is another each time, by the address or a number on the CPU"
        raise NotApplicable(f"no launch plan was recorded: {reasons or unlike}")
    for check in (check_dtype, check_shape, check_strides, check_aliasing, check_values):
        try:
            check(again)
        except NotApplicable:
            pass
        except Failed as failed:
            raise Failed(f"replayed from a launch plan, {failed}") from None


@contextmanager
def alone_on_this_thread(override: Override) -> Iterator[None]:
    """As :func:`alone`, on a thread of our own; errors are being raised already."""
    from opgraft.registry import Selector, registry

    others = [each for each in registry.overrides(Selector()) if each is not override]
    with _scopes([Selector(**_given(each)) for each in others], override):
        yield


def interprets(override: Override) -> bool:
    """Whether the override's kernels run in Triton's interpreter here."""
    return env.interprets_triton() and override.dsl == "triton"


def check_front(seen: Observation) -> None:
    """What users call (`F.softmax`), forward and backward, as PyTorch's own tests call it."""
    front = seen.sample.base.front
    if front is None:
        raise NotApplicable("the sample is none of PyTorch's own")
    if seen.is_random:
        raise NotApplicable("the op is random")
    subject = seen.subject
    mine, expected, exact = _front_results(front, subject)
    for index, (one, other) in enumerate(zip(mine, expected, strict=True)):
        best = exact[index] if exact is not None else other
        if one is None or other is None or best is None:
            if (one is None) != (other is None):
                raise Failed(f"{front.id}: result {index} is {_described(one)}, stock is not")
            continue
        if one.dtype != other.dtype or one.shape != other.shape:
            raise Failed(
                f"{front.id}: result {index} is {_described(one)}, stock {_described(other)}"
            )
        if not (one.is_floating_point() or one.is_complex()):
            if not torch.equal(one, other):
                raise Failed(f"{front.id}: result {index} differs from stock")
            continue
        error, problem = errors(one, other, best)
        if problem is None and not _near(error, one, other, subject.k):
            error = _front_over_draws(front, subject, index, error)
        if problem is not None or not _near(error, one, other, subject.k):
            raise Failed(f"{front.id}: result {index} (gradients last) has {problem or error}")


def _front_over_draws(front: opinfo.Front, subject: Subject, index: int, error: Error) -> Error:
    """As :func:`_with_more_draws`, of what users call."""

    def results(draw: int) -> Sequence[Any]:
        try:
            drawn = _front_results(front, replace(subject, seed=subject.seed + draw))
            found = [each[index] for each in drawn if each is not None]
        except (NotApplicable, IndexError):
            return ()
        return found[0], found[1], found[-1]

    return _with_more_draws(error, results)


def _front_results(
    front: opinfo.Front, subject: Subject
) -> tuple[list[Any], list[Any], list[Any] | None]:
    """Results and gradients with the override, natively, and natively in float64 if there is that.

    Raises:
        Failed: with the override it raises.
        NotApplicable: it raises natively.
    """
    # Natively first: where that raises it is no call.
    expected = _run_front(front, subject, natively=True, wide=False)
    mine = _run_front(front, subject, natively=False, wide=False)
    assert mine is not None and expected is not None
    return mine, expected, _run_front(front, subject, natively=True, wide=True)


def _run_front(
    front: opinfo.Front, subject: Subject, *, natively: bool, wide: bool
) -> list[Any] | None:
    """Results and gradients of a front, flat."""
    kind = subject.device.type
    requires_grad = front.dtype in front.info.supported_backward_dtypes(kind)
    samples = opinfo.fronts(
        front.info,
        front.dtype,
        subject.device,
        subject.seed,
        requires_grad=requires_grad,
        limit=front.index + 1,
    )
    sample = next((sample for each, sample in samples if each.index == front.index), None)
    if sample is None:
        raise NotApplicable("there is no such sample with other values")
    if wide:
        if not front.dtype.is_floating_point:
            return None
        sample = sample.transform(_widened)
    scope = threads.scope(threads.EVERYTHING) if natively else _nothing()
    with scope, warnings.catch_warnings(), opinfo.seeded(subject.seed):
        warnings.simplefilter("ignore")
        try:
            result = front.info(sample.input, *sample.args, **sample.kwargs)
            gradients = opinfo.gradients(result, opinfo.leaves(sample), subject.seed)
        except Exception as error:
            if wide:
                return None
            if natively:
                raise NotApplicable(f"native raises {_first_line(error)}") from None
            raise Failed(f"{front.id} raised {_first_line(error)}") from error
    from torch.utils._pytree import tree_leaves

    flat = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    return [*flat, *gradients]


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def check_compile(seen: Observation) -> None:
    """A compiled graph that calls the op gives results as right as native's, without a break."""
    if seen.subject.op.mutates or seen.is_random:
        raise NotApplicable("the op writes to its arguments or is random")
    _needs_plain_hit(seen)
    overload = seen.subject.op.overload
    call = seen.sample.call()
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda args, kwargs: overload(*args, **kwargs), fullgraph=True, dynamic=dynamic
        )
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = compiled(call.args, call.kwargs)
        except Exception as error:
            with threads.scope(threads.EVERYTHING):
                torch._dynamo.reset()
                try:
                    compiled(call.args, call.kwargs)
                except Exception:
                    raise NotApplicable(f"stock fails it: {_first_line(error)}") from None
            raise Failed(f"compiled with dynamic={dynamic}: {_first_line(error)}") from error
        outputs = (result,) if len(seen.subject.op.returns) == 1 else tuple(result)
        for index, one in enumerate(outputs):
            other = seen.native.outputs[index]
            exact = _at(seen.reference.outputs, index, other)
            if isinstance(one, torch.Tensor) and isinstance(exact, torch.Tensor):
                if one.shape != other.shape or one.dtype != other.dtype:
                    raise Failed(f"compiled, {output_name(seen, index)} is {_described(one)}")
                if not _is_state(seen, index):
                    judge(seen, index, one, other, exact)


# ------------------------------------------------------------------ on a CUDA device


def _needs_cuda(seen: Observation) -> None:
    if seen.subject.device.type != "cuda":
        raise NotApplicable("needs a CUDA device")
    if seen.is_random or seen.subject.op.mutates:
        raise NotApplicable("the op writes to its arguments or is random")
    _needs_plain_hit(seen)


def check_side_stream(seen: Observation) -> None:
    """It works on the current stream, whichever that is."""
    _needs_cuda(seen)
    call = seen.sample.call()
    late = [(tensor, tensor.clone()) for tensor in call.tensors() if tensor.device.type == "cuda"]
    for tensor, _ in late:
        tensor.zero_()
    torch.cuda.synchronize(seen.subject.device)
    stream = torch.cuda.Stream(seen.subject.device)
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would run before the values come
        for tensor, values in late:
            tensor.copy_(values)
        result = run(call)
    torch.cuda.synchronize(seen.subject.device)
    _compare_late(seen, result, "on a side stream")


def check_cuda_graph(seen: Observation) -> None:
    """Captured into a CUDA graph and replayed, it computes from the values that are there then."""
    _needs_cuda(seen)
    call = seen.sample.call()
    values = [tensor.clone() for tensor in call.tensors()]
    with torch.no_grad():
        for _ in range(3):
            run(call)
        torch.cuda.synchronize(seen.subject.device)
        hits = seen.subject.override.hits
        graph = torch.cuda.CUDAGraph()
        for tensor in call.tensors():
            if tensor.device.type == "cuda":
                tensor.zero_()
        with torch.cuda.graph(graph):
            result = run(call)
        if seen.subject.override.hits == hits:
            raise Failed("the call had run before, and was declined while a graph was captured")
        for tensor, value in zip(call.tensors(), values, strict=True):
            if tensor.device.type == "cuda":
                tensor.copy_(value)
        graph.replay()
        torch.cuda.synchronize(seen.subject.device)
    _compare_late(seen, result, "replayed from a CUDA graph")


def check_other_device(seen: Observation) -> None:
    """It works on tensors of a device that is not the current one."""
    _needs_cuda(seen)
    if torch.cuda.device_count() < 2:
        raise NotApplicable("needs two CUDA devices")
    other = torch.device("cuda", 1 if torch.cuda.current_device() == 0 else 0)
    call = seen.sample.call()
    moved = Call(call.op, tuple(_moved(value, other) for value in call.values))
    with torch.no_grad():
        result = run(moved)
    torch.cuda.synchronize(other)
    back = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    for each in back:
        if isinstance(each, torch.Tensor) and each.device not in (other, torch.device("cpu")):
            raise Failed(f"an output is on {each.device}, the arguments are on {other}")
    _compare_late(
        seen,
        tuple(_moved(each, seen.subject.device) for each in back)
        if len(back) > 1
        else _moved(back[0], seen.subject.device),
        f"on {other}, which is not the current device",
    )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.device.type == "cuda" else value
    return [_moved(each, device) for each in value] if isinstance(value, (list, tuple)) else value


def _compare_late(seen: Observation, result: Any, where: str) -> None:
    index = _first_unlike_mine(seen, result)
    if index is not None:
        raise Failed(f"{where}, {output_name(seen, index)} differs from an ordinary call's")


Check = Callable[[Observation], None]

#: On every sample, in this order.
EACH: dict[str, Check] = {
    "hit": check_hit,
    "miss": check_miss,
    "dtype": check_dtype,
    "shape": check_shape,
    "strides": check_strides,
    "aliasing": check_aliasing,
    "inputs": check_inputs,
    "values": check_values,
}
#: On a few samples that it takes: one of each dtype.
SOME: dict[str, Check] = {
    "determinism": check_determinism,
    "uninitialized": check_uninitialized,
    "out": check_out,
    "gradients": check_gradients,
    "gradcheck": check_gradcheck,
    "front": check_front,
    "fake": check_fake,
    "opcheck": check_opcheck,
    "autocast": check_autocast,
    "threads": check_threads,
    "replay": check_replay,
    "compile": check_compile,
    "side_stream": check_side_stream,
    "cuda_graph": check_cuda_graph,
    "other_device": check_other_device,
}
#: Seconds each: only when asked for.
SLOW = frozenset({"compile"})
#: Once per override: seconds each, and nothing in them depends on the dtype.
ONCE = frozenset({"opcheck", "compile", "threads", "gradcheck"})
CHECKS = {**EACH, **SOME}
