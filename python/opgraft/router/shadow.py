"""Shadow mode: a share of hits is run by the native kernel as well, and the results are compared.

What the tests of a kernel do not see, production does: other shapes, other values, other drivers.
While it is on, routers are published with overrides that shadow themselves; while it is off,
nothing is left of it. It is the process's, not a thread's: backwards and other threads are sampled
too.
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

from opgraft.base import env, events
from opgraft.base.locks import fork_safe_lock
from opgraft.errors import ContractError, RegistrationError
from opgraft.ops.schema import Call, Op
from opgraft.registry import Override, registry
from opgraft.router import contract, copies, device, failure, outputs, threads
from opgraft.router.outputs import Returned
from opgraft.router.signature import signature

log = logging.getLogger(__name__)

OnMismatch = Literal["log", "quarantine", "raise"]

#: Differences of each override that are logged in full; later ones are counted.
MAX_LOGGED = 10


class Settings(NamedTuple):
    """What :func:`shadow` was given."""

    rate: float
    on_mismatch: OnMismatch
    tolerance: float
    save: Path | None


class Token(NamedTuple):
    """A hit that is to be compared: its arguments, and under which settings."""

    call: Call
    signature: Hashable
    kept: Call  # as it was before: copies of what the op writes to
    settings: Settings


class _OnThisThread(threading.local):
    comparing = False


_here = _OnThisThread()
_lock = fork_safe_lock()
# The last one holds.
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
    """While this lasts, a share of all hits, on every thread, is run natively too and compared.

    A difference beyond what rounding explains is logged with everything about the call but its
    values, and counted in `Override.mismatches` (`Override.shadowed` counts comparisons). Scopes
    nest; the innermost holds. `OPGRAFT_SHADOW=0.01` does the same for a whole process.

    Not compared: calls whose native result changes from run to run (dropout), what is captured into
    a CUDA graph, and calls for which native runs out of memory. A comparison waits for the device.

    Args:
        rate: the share of hits that are compared, up to 1.
        on_mismatch: `"log"`; `"quarantine"`: the caller gets native's result, and the override is
            kept from calls of that kind; `"raise"`: :class:`ContractError`.
        tolerance: a factor on what may differ (float32: 1e-4 of native's largest value).
        save: a folder to write the arguments of calls that differed to, which
            `opgraft.router.saved_calls.load` reads. It is made, private, where it does not exist;
            one that others can write to is refused. By default no values are written anywhere.

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
    _change(_settings.append, settings)
    try:
        yield
    finally:
        _change(_settings.remove, settings)


def current() -> Settings | None:
    """The settings that hold; None while shadow mode is off."""
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


def _change(change: Callable[[Settings], None], settings: Settings) -> None:
    with _lock:
        change(settings)
    registry.republish()


def _from_environment() -> None:
    rate = env.shadow()
    if rate is None:
        return
    settings = Settings(rate[0], rate[1], 1.0, None)  # type: ignore[arg-type]
    try:
        _check(settings)
    except RegistrationError as error:
        log.warning("OPGRAFT_SHADOW is ignored: %s", error)
    else:
        _settings.append(settings)


# ------------------------------------------------------------------ one hit


def begin_if_drawn(override: Override, call: Call) -> Token | None:
    """As :func:`begin`, for the share of hits that is to be compared; the core draws itself."""
    settings = current()
    if settings is None or _random.random() >= settings.rate:
        return None
    return begin(override, call)


def begin(override: Override, call: Call) -> Token | None:
    """Before a hit that was drawn: what to compare it with, None where it is not to be compared."""
    settings = current()
    if settings is None or _here.comparing or device.is_capturing(device.of(call)):
        return None
    if not call.writes:
        return Token(call, signature(call), call, settings)
    with threads.scope(threads.EVERYTHING):
        return Token(call, signature(call), copies.of(call), settings)


def end(
    override: Override, token: Token, result: Any, run_native: Callable[[Call], Any]
) -> Any | None:
    """After it: compare, log, count.

    Args:
        override: whose impl ran.
        token: of :func:`begin`.
        result: what the impl returned.
        run_native: runs the native kernel on a call.

    Returns:
        What the caller gets instead of `result`; None to leave it.

    Raises:
        ContractError: they differ, and the settings say so.
        Exception: native's own, where it refuses the call.
    """
    _here.comparing = True
    try:
        with threads.scope(threads.EVERYTHING), torch.no_grad():
            expected, difference = _compare(override, token, result, run_native)
    except _Refused as refused:
        with threads.scope(threads.EVERYTHING):
            copies.restore(token.call, token.kept)
        raise refused.error from None
    except Exception as error:
        # Native cannot say, or a comparison needs more memory than there is: that is no reason to
        # end a program that was running.
        log.debug("%s: a hit was not compared: %r", contract.who(override), error)
        return None
    finally:
        _here.comparing = False
    override.state.shadowed.add()
    if difference is None:
        return None
    override.state.mismatches.add()
    with threads.scope(threads.EVERYTHING):
        _report(override, token, difference)
    if token.settings.on_mismatch == "raise":
        raise ContractError(f"{contract.who(override)} differs from native: {difference}")
    if token.settings.on_mismatch != "quarantine":
        return None
    failure.quarantine(override, token.signature, ContractError(f"differs: {difference}"))
    override.state.fallbacks.add()
    with threads.scope(threads.EVERYTHING):
        copies.restore(token.call, token.kept)
    return _handed_on(token, expected)


class _Refused(Exception):
    """Native raised for a call that nobody can make."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _compare(
    override: Override, token: Token, result: Any, run_native: Callable[[Call], Any]
) -> tuple[Any, str | None]:
    call, kept, op = token.call, token.kept, token.call.op
    with contract.keeping_rng(kept):
        try:
            expected = run_native(kept)
        except Exception as error:
            if contract.is_refusal(error):
                raise _Refused(error) from error
            raise
        # Another state of the generator by now: dropout's result is another, attention's without
        # dropout is not.
        if op.is_random and (kept.writes or not _same(op, expected, run_native(kept))):
            raise NotImplementedError("the call is random")
    mine = Returned(op, outputs.as_outputs(op, result), call.tensors())
    native = Returned(op, outputs.as_outputs(op, expected), kept.tensors())

    def promises(index: int, place: int | None, output: torch.Tensor) -> bool:
        return contract.promises_strides(kept, index, place, output)

    for label, difference in outputs.compare(mine, native, promises):
        return expected, f"{label}: {difference.removeprefix('with ')}"
    for label, one, other in _pairs(mine, native, token):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            found = _difference(one, other, token.settings.tolerance)
        else:
            found = None if one == other else f"{one!r}, native returns {other!r}"
        if found is not None:
            return expected, f"{label}: {found}"
    return expected, None


def _pairs(mine: Returned, native: Returned, token: Token) -> Iterator[tuple[str, Any, Any]]:
    """What is compared by its values: outputs, and what the call writes to."""
    yield from outputs.with_values(mine, native)
    yield from outputs.written_values(token.call, token.kept)


def _difference(mine: torch.Tensor, native: torch.Tensor, factor: float) -> str | None:
    for difference in outputs.place_differences(mine, native):
        return difference
    if mine.layout != torch.strided:
        mine, native = mine.to_dense(), native.to_dense()
    return outputs.distance(mine, native, factor)


def _same(op: Op, one: Any, other: Any) -> bool:
    first, second = (Returned(op, outputs.as_outputs(op, each), ()) for each in (one, other))
    return all(
        not isinstance(a, torch.Tensor) or outputs.same_bits(a, b)
        for _, a, b in outputs.with_values(first, second)
    )


def _handed_on(token: Token, expected: Any) -> Any:
    """Native's result for the caller: with the caller's tensors for our copies of them."""
    pairs = zip(token.call.written(), token.kept.written(), strict=True)
    own = {id(native): mine for (_, mine), (_, native) in pairs}

    def swapped(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(swapped(each) for each in value)
        return own.get(id(value), value)

    return swapped(expected)


# ------------------------------------------------------------------ what is told of it


def _report(override: Override, token: Token, difference: str) -> None:
    key = (override.op, override.dispatch_key, override.name)
    from opgraft.router import saved_calls  # only now: most programs never get here

    count = _logged[key] = _logged.get(key, 0) + 1
    if count > MAX_LOGGED:
        log.debug("%s differs from native: %s", contract.who(override), difference)
        return
    facts = saved_calls.describe(override, token.call, difference)
    if token.settings.save is not None:
        try:
            facts["saved"] = str(saved_calls.save(token.settings.save, facts, token.call))
        except OSError as error:  # a full disk is no reason to end a program that was running
            facts["saved"] = f"no: {error}"
    text = json.dumps(facts)
    more = "; it is counted, and no longer logged" if count == MAX_LOGGED else ""
    log.warning(
        "%s differs from native: %s%s. The call: %s",
        contract.who(override),
        difference,
        more,
        text,
    )
    events.emit("opgraft_shadow", lambda: facts)


_from_environment()
