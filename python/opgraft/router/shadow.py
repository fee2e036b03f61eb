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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from opgraft import env, events
from opgraft._lock import fork_safe_lock
from opgraft.errors import ContractError, RegistrationError
from opgraft.registry import Override, registry
from opgraft.router import contract, device, failure, threads
from opgraft.router.signature import signature
from opgraft.schema import Call

log = logging.getLogger(__name__)

OnMismatch = Literal["log", "quarantine", "raise"]

#: Differences of each override that are logged in full; later ones are counted.
MAX_LOGGED = 10

# How far two right results may be apart, as a share of the native one's largest value: rounding of
# the dtype, and sums of many thousand terms that were added up in another order.
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}


class Settings(NamedTuple):
    """What :func:`shadow` was given."""

    rate: float
    on_mismatch: OnMismatch
    tolerance: float
    save: Path | None


class Token(NamedTuple):
    """A hit that is to be compared: its arguments as they were, and under which settings."""

    call: Call
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
        save: a folder, made private, to write the arguments of calls that differed to; what
            `opgraft.router.saved_calls.load` reads. By default no values are written anywhere.

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
        settings.save.mkdir(mode=0o700, parents=True, exist_ok=True)


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


def draw() -> Settings | None:
    """The settings, if this hit is to be compared: what the Python router asks."""
    settings = current()
    if settings is None or _random.random() >= settings.rate:
        return None
    return settings


def begin(override: Override, call: Call) -> Token | None:
    """Before a hit that was drawn: what to compare it with, None where it is not to be compared."""
    settings = current()
    if settings is None or _here.comparing or device.is_capturing(device.of(call)):
        return None
    if not call.op.mutates:
        return Token(call, settings)
    return Token(_kept(call), settings)


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
    """
    _here.comparing = True
    try:
        with threads.scope(threads.EVERYTHING), torch.no_grad():
            expected, difference = _compare(override, token, result, run_native)
    except Exception as error:
        # Native cannot say, or a comparison needs more memory than there is: that is no reason to
        # end a program that was running.
        log.debug("%s: a hit was not compared: %r", contract.who(override), error)
        return None
    finally:
        _here.comparing = False
    override._shadowed.add()
    if difference is None:
        return None
    override._mismatches.add()
    _report(override, token, difference)
    if token.settings.on_mismatch == "raise":
        raise ContractError(f"{contract.who(override)} differs from native: {difference}")
    if token.settings.on_mismatch != "quarantine":
        return None
    failure.quarantine(override, signature(token.call), ContractError(f"differs: {difference}"))
    override._fallbacks.add()
    return _put_back(token.call, result, expected)


def _compare(
    override: Override, token: Token, result: Any, run_native: Callable[[Call], Any]
) -> tuple[Any, str | None]:
    call, op = token.call, token.call.op
    with contract.keeping_rng(call):
        expected = run_native(call)
        # Another state of the generator by now: dropout's result is another, attention's without
        # dropout is not.
        if op.is_random and (op.mutates or not _same(op, expected, run_native(call))):
            raise NotImplementedError("the call is random")
    mine, theirs = (_outputs(op, each) for each in (result, expected))
    for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if op.returns[index].name in contract.RNG_OUTPUTS:
            continue
        difference = _difference(one, other, token.settings.tolerance)
        if difference is not None:
            return expected, f"{contract.output_name(op, index)}: {difference}"
    return expected, None


def _same(op: Any, one: Any, other: Any) -> bool:
    pairs = zip(_outputs(op, one), _outputs(op, other), strict=True)
    return all(
        not isinstance(a, torch.Tensor) or torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in pairs
    )


def _outputs(op: Any, result: Any) -> tuple[Any, ...]:
    return (result,) if len(op.returns) == 1 else tuple(result or ())


def _difference(mine: Any, native: Any, factor: float) -> str | None:
    if isinstance(native, (list, tuple)):
        found = (_difference(a, b, factor) for a, b in zip(mine, native, strict=True))
        return next((each for each in found if each is not None), None)
    if not isinstance(mine, torch.Tensor) or not isinstance(native, torch.Tensor):
        same = mine == native or (mine is None) == (native is None)
        return None if same else f"{mine!r}, native returns {native!r}"
    for what in ("dtype", "shape", "device"):
        if getattr(mine, what) != getattr(native, what):
            return f"{what} {getattr(mine, what)}, native's is {getattr(native, what)}"
    if mine.numel() == 0:
        return None
    if mine.dtype not in _TOLERANCES:
        count = int((mine != native).sum())
        return f"{count} of {mine.numel()} elements" if count else None
    return _distance(mine, native, _TOLERANCES[mine.dtype] * factor)


def _distance(mine: torch.Tensor, native: torch.Tensor, tolerance: float) -> str | None:
    finite = native.isfinite()
    elsewhere = int((finite != mine.isfinite()).sum())
    if elsewhere:
        return f"{elsewhere} of {mine.numel()} elements are NaN or infinite on one side only"
    apart = torch.where(finite, (mine - native).abs(), 0).double()
    size = float(torch.where(finite, native.abs(), 0).max())
    allowed = tolerance * size
    largest = float(apart.max())
    if largest <= allowed:
        return None
    count = int((apart > allowed).sum())
    return (
        f"{count} of {mine.numel()} elements are up to {largest:.3g} off, of values up to "
        f"{size:.3g}; allowed are {allowed:.3g}"
    )


def _put_back(call: Call, result: Any, expected: Any) -> Any:
    """Native's result for the caller; what the op wrote to gets native's values."""
    op = call.op
    if not op.mutates:
        return expected
    # An op that writes to its arguments returns them: those of the caller, not our copies.
    for mine, native in zip(_outputs(op, result), _outputs(op, expected), strict=True):
        if isinstance(mine, torch.Tensor) and mine is not native:
            mine.copy_(native)
    return None


def _kept(call: Call) -> Call:
    """The call as it is now: what the op writes to is copied, and what shares memory with that.

    The copies share memory as the arguments do: in `x.add_(x)` both are one tensor.
    """
    pairs = zip(call.op.arguments, call.values, strict=True)
    written = {t.untyped_storage()._cdata for a, v in pairs if a.written for t in _tensors(v)}
    count = Counter(tensor.untyped_storage()._cdata for tensor in call.tensors())
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [keep(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage._cdata not in written:
            return value
        if count[storage._cdata] == 1:
            return value.detach().clone()
        copied = storages.setdefault(storage._cdata, storage.clone())
        place = (value.storage_offset(), value.shape, value.stride())
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(copied, *place)

    return Call(call.op, tuple(map(keep, call.values)))


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


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
