"""Shadow mode: for a fraction of hits the native kernel runs as well, and results are compared.

Production sees what a kernel's tests do not: other shapes, other values, other drivers. While the
mode is on, routers hold overrides that compare their own hits. While it is off, it costs nothing.
It applies to the whole process, so backwards and other threads are sampled too.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.utils._pytree import tree_map_only

from opgraft.base import env, events, interrupts
from opgraft.base.locks import fork_safe_lock
from opgraft.errors import ContractError, RegistrationError
from opgraft.ops.schema import Call, Op
from opgraft.registry import Override, registry
from opgraft.router import composite, contract, copies, device, failure, outputs, threads
from opgraft.router.call_keys import kind_of
from opgraft.router.outputs import OpResult

log = logging.getLogger(__name__)

OnMismatch = Literal["log", "quarantine", "raise"]

#: Differences of each override that are logged in full. Later ones are only counted.
MAX_LOGGED = 10


class Settings(NamedTuple):
    """What :func:`shadow` was given."""

    rate: float
    on_mismatch: OnMismatch
    tolerance: float
    save: Path | None


class Comparison(NamedTuple):
    """A hit that is being compared: its arguments, and the settings."""

    call: Call
    kind: Hashable
    native_call: Call  # for native: copies of what the op writes to, from before the hit
    settings: Settings


class _OnThisThread(threading.local):
    comparing = False


_this_thread = _OnThisThread()
_lock = fork_safe_lock()
# The last one applies.
_settings: list[Settings] = []
_random = random.Random()
_logged: dict[tuple[str, str, str], int] = {}


@contextmanager
def shadow(
    rate: float = 0.01,
    *,
    on_mismatch: OnMismatch = "log",
    tolerance: float = 1.0,
    save: str | Path | None = None,
) -> Iterator[None]:
    """Run a fraction of all hits, on every thread, natively too, and compare the results.

    A difference beyond rounding is logged with everything about the call but its values.
    `Override.mismatches` counts differences, and `Override.shadowed` counts comparisons. Contexts
    nest, and the innermost applies. `OPGRAFT_SHADOW=0.01` does the same for a whole process.

    Some calls are not compared: those whose native result changes from run to run (dropout), those
    that are captured into a CUDA graph, and those for which native runs out of memory. A comparison
    waits for the device.

    Args:
        rate: the fraction of hits that are compared, up to 1.
        on_mismatch: `"log"`; `"quarantine"`: the caller gets native's result, and the override is
            quarantined for calls of that kind; `"raise"`: :class:`ContractError`.
        tolerance: multiplies the allowed difference (float32: 1e-4 of native's largest value).
        save: a folder for the arguments of calls that differed, which
            `opgraft.router.saved_calls.load` reads. A folder that does not exist is created with
            private permissions. One that others can write to is refused. By default no values are
            written anywhere.

    Raises:
        RegistrationError: `rate` is not in (0, 1], or another argument makes no sense.

    >>> import torch, opgraft
    >>> override = opgraft.register_op_override(
    ...     "aten", "relu", "CPU", lambda self: self.clamp(min=0), unconditional_override=True
    ... )
    >>> with opgraft.shadow(rate=1.0):
    ...     _ = torch.relu(torch.ones(3))
    >>> override.shadowed, override.mismatches
    (1, 0)
    >>> override.remove()
    """
    settings = Settings(rate, on_mismatch, tolerance, None if save is None else Path(save))
    _check(settings)
    _set(_settings.append, settings)
    try:
        yield
    finally:
        _set(_settings.remove, settings)


def current() -> Settings | None:
    """The settings that apply; None while shadow mode is off."""
    return _settings[-1] if _settings else None


def _check(settings: Settings) -> None:
    if not 0 < settings.rate <= 1:
        raise RegistrationError(f"rate={settings.rate!r}: give a share of hits in (0, 1]")
    if settings.on_mismatch not in get_args(OnMismatch):
        choices = get_args(OnMismatch)
        raise RegistrationError(f"on_mismatch={settings.on_mismatch!r}: choose one of {choices}")
    if not settings.tolerance > 0:
        raise RegistrationError(f"tolerance={settings.tolerance!r}: give a positive factor")
    if settings.save is not None:
        from opgraft.router import saved_calls  # only now: most programs never get here

        saved_calls.make_private(settings.save)


def _set(change: Callable[[Settings], None], settings: Settings) -> None:
    with _lock:
        change(settings)
    registry.republish()


def _from_environment() -> None:
    rate = env.shadow()
    if rate is None:
        return
    _settings.append(Settings(rate[0], rate[1], 1.0, None))  # type: ignore[arg-type]


# ------------------------------------------------------------------ one hit


def begin_if_sampled(override: Override, call: Call) -> Comparison | None:
    """As :func:`begin`, for a random fraction of hits. (The core does its own sampling.)"""
    settings = current()
    if settings is None or _random.random() >= settings.rate:
        return None
    return begin(override, call)


def begin(override: Override, call: Call) -> Comparison | None:
    """Start comparing a sampled hit, before it runs; None if it is not to be compared."""
    settings = current()
    if settings is None or _this_thread.comparing or device.is_capturing(device.of_tensors(call)):
        return None
    if not call.writes:
        return Comparison(call, kind_of(call), call, settings)
    if override.is_differentiated and composite.needs_grad(call):
        return None  # to replace the result, native would run on what it wrote already
    with threads.scope(threads.EVERYTHING):
        return Comparison(call, kind_of(call), copies.copy_call(call), settings)


def end(
    override: Override, comparison: Comparison, result: Any, run_native: Callable[[Call], Any]
) -> Any | None:
    """After the hit: compare, log, count.

    Args:
        override: whose impl ran.
        comparison: what :func:`begin` returned.
        result: what the impl returned.
        run_native: runs the native kernel on a call.

    Returns:
        The result for the caller instead of `result`; None to leave it.

    Raises:
        ContractError: they differ, and the settings say to raise.
        Exception: what native raised, if the call is invalid.
    """
    differentiated = override.is_differentiated and any(
        tensor.requires_grad for tensor in _tensors(comparison.call.op, result)
    )
    compared = result
    if differentiated:  # native is not, here, and the router looks for a lost derivative
        compared = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
    _this_thread.comparing = True
    try:
        with threads.scope(threads.EVERYTHING), torch.no_grad():
            expected, difference = _compare(override, comparison, compared, run_native)
    except _NativeRejected as rejected:
        with threads.scope(threads.EVERYTHING):
            copies.restore(comparison.call, comparison.native_call)
        raise rejected.error from None
    except Exception as error:
        if interrupts.is_interrupt(error):
            raise
        # Native failed, or the comparison ran out of memory. That must not end a program that was
        # running.
        log.debug("%s: a hit was not compared: %r", contract.display_name(override), error)
        return None
    finally:
        _this_thread.comparing = False
    override.state.shadowed.add()
    if difference is None:
        return None
    override.state.mismatches.add()
    with threads.scope(threads.EVERYTHING):
        _report(override, comparison, difference)
    if comparison.settings.on_mismatch == "raise":
        raise ContractError(f"{contract.display_name(override)} differs from native: {difference}")
    if comparison.settings.on_mismatch != "quarantine":
        return None
    failure.quarantine(override, comparison.kind, ContractError(f"differs: {difference}"))
    override.state.fallbacks.add()
    with threads.scope(threads.EVERYTHING):
        copies.restore(comparison.call, comparison.native_call)
    if differentiated:
        with threads.scope(threads.EVERYTHING):
            return run_native(comparison.call)  # again: the first run has no derivative
    return _with_callers_tensors(comparison, expected)


class _NativeRejected(Exception):
    """Native raised because the call is invalid."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _compare(
    override: Override, comparison: Comparison, result: Any, run_native: Callable[[Call], Any]
) -> tuple[Any, str | None]:
    call, native_call, op = comparison.call, comparison.native_call, comparison.call.op
    with contract.preserving_rng(native_call):
        try:
            expected = run_native(native_call)
        except Exception as error:
            if contract.is_invalid_call(error):
                raise _NativeRejected(error) from error
            raise
        # The generator's state has advanced by now: a second run of dropout differs, one of
        # attention without dropout does not.
        if op.is_random and (
            native_call.writes or not _same(op, expected, run_native(native_call))
        ):
            raise NotImplementedError("the call is random")
    actual = OpResult(op, outputs.as_outputs(op, result), call.tensors())
    native = OpResult(op, outputs.as_outputs(op, expected), native_call.tensors())

    def strides_promised(index: int, item: int | None, output: torch.Tensor) -> bool:
        return contract.promises_strides(native_call, index, item, output)

    for label, difference in outputs.compare(actual, native, strides_promised):
        return expected, f"{label}: {difference.removeprefix('with ')}"
    for label, one, other in _comparable_values(actual, native, comparison):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            found = _value_difference(one, other, comparison.settings.tolerance)
        else:
            found = None if one == other else f"{one!r}, native returns {other!r}"
        if found is not None:
            return expected, f"{label}: {found}"
    return expected, None


def _comparable_values(
    actual: OpResult, native: OpResult, comparison: Comparison
) -> Iterator[tuple[str, Any, Any]]:
    """The pairs whose values are compared: outputs, and what the call writes to."""
    yield from outputs.comparable_outputs(actual, native)
    yield from outputs.comparable_writes(comparison.call, comparison.native_call)


def _value_difference(actual: torch.Tensor, native: torch.Tensor, factor: float) -> str | None:
    for difference in outputs.dtype_device_shape_differences(actual, native):
        return difference
    if actual.layout != torch.strided:
        actual, native = actual.to_dense(), native.to_dense()
    return outputs.value_difference(actual, native, factor)


def _same(op: Op, one: Any, other: Any) -> bool:
    first, second = (OpResult(op, outputs.as_outputs(op, each), ()) for each in (one, other))
    return all(
        not isinstance(a, torch.Tensor) or outputs.same_bits(a, b)
        for _, a, b in outputs.comparable_outputs(first, second)
    )


def _tensors(op: Op, result: Any) -> Iterator[torch.Tensor]:
    return OpResult(op, outputs.as_outputs(op, result), ()).tensors()


def _with_callers_tensors(comparison: Comparison, expected: Any) -> Any:
    """Native's result for the caller, with our copies replaced by the caller's tensors."""
    pairs = zip(comparison.call.written(), comparison.native_call.written(), strict=True)
    own = {id(native): actual for (_, actual), (_, native) in pairs}

    return _swapped(expected, own)


def _swapped(value: Any, own: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_swapped(each, own) for each in value)
    return own.get(id(value), value)


# ------------------------------------------------------------------ reporting


def _report(override: Override, comparison: Comparison, difference: str) -> None:
    key = (override.op, override.dispatch_key, override.name)
    from opgraft.router import saved_calls  # only now: most programs never get here

    count = _logged[key] = _logged.get(key, 0) + 1
    if count > MAX_LOGGED:
        log.debug("%s differs from native: %s", contract.display_name(override), difference)
        return
    facts = saved_calls.describe(override, comparison.call, difference)
    if comparison.settings.save is not None:
        try:
            facts["saved"] = str(saved_calls.save(comparison.settings.save, facts, comparison.call))
        except OSError as error:  # a full disk must not end a program that was running
            facts["saved"] = f"no: {error}"
    text = json.dumps(facts)
    more = "; it is counted, and no longer logged" if count == MAX_LOGGED else ""
    log.warning(
        "%s differs from native: %s%s. The call: %s",
        contract.display_name(override),
        difference,
        more,
        text,
    )
    events.emit("opgraft_shadow", lambda: facts)


_from_environment()
