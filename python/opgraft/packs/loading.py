"""Loading packs: whose overrides a registration is, what was loaded, and what was not and why."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from opgraft.base import env
from opgraft.errors import RegistrationError
from opgraft.packs import discovery
from opgraft.packs.discovery import Pack

if TYPE_CHECKING:
    from opgraft.registry import Override

log = logging.getLogger(__name__)

State = Literal["active", "inactive", "unmet", "failed"]


class Status:
    """What became of an installed pack in this process.

    Attributes:
        pack: which.
        state: `"active"`: it has registered; `"inactive"`: nobody asked for it, or something
            switches it off; `"unmet"`: it needs what is not here; `"failed"`: it raised.
        reason: why it is not active; empty where it is.
    """

    def __init__(self, pack: Pack, state: State, reason: str = "") -> None:
        self.pack = pack
        self.state = state
        self.reason = reason

    def __repr__(self) -> str:
        return f"<Status of {self.pack}: {self.state}{self.reason and f', {self.reason}'}>"


class Owner:
    """A pack while it registers: its overrides carry its name.

    Attributes:
        name: the pack's name.
    """

    def __init__(self, name: str, requires: tuple[str, ...] = ()) -> None:
        self.name = name
        self._requires = requires
        # By DSL: asked for every override, and the answer may have to be read from disk.
        self._missing = cache(self._look_up)

    def missing(self, dsl: str) -> str | None:
        """What the pack needs of a DSL that is not met here; None where everything is."""
        return self._missing(dsl)

    def _look_up(self, dsl: str) -> str | None:
        if not self._requires:
            return None
        from opgraft.packs import requirements

        problems = requirements.unmet_for_dsl(self._requires, dsl)
        return f"pack {self.name} {'; '.join(problems)}" if problems else None


_loading: ContextVar[Owner | None] = ContextVar("opgraft_pack", default=None)
# Of the packs that somebody tried to load, by name.
_statuses: dict[str, Status] = {}
# Packs that are being loaded. Not a lock: who waited for it could hold the import lock of a module
# that the pack is about to import.
_busy: set[str] = set()
# Whether `activate` ran.
_activated = False


def owner() -> Owner | None:
    """The pack whose registering function runs now; None in the user's own code."""
    return _loading.get()


@contextmanager
def owning(name: str, requires: tuple[str, ...] = ()) -> Iterator[None]:
    """While this lasts, what is registered belongs to the pack of that name."""
    token = _loading.set(Owner(name, requires))
    try:
        yield
    finally:
        _loading.reset(token)


def activate_or_defer() -> None:
    """What `import torch` does: activate packs, or keep the place for what they will register.

    The latter takes a third of the time. It needs to know which ops the packs override, so it is
    done where all of them say it, and a compiled core routes.
    """
    global _activated
    wanted = [pack for pack in _unique() if _is_wanted(pack)]
    if _activated or not wanted or not _can_wait(wanted):
        activate()
        return
    from opgraft.packs import waiting

    _report(wanted)
    _activated = True
    ops = {each for pack in wanted for each in pack.ops or ()}
    waiting.keep_places({each for each in ops if waiting.exists(each[0])}, _activate_late)
    if waiting.waits():
        log.info("opgraft: waiting for a call: %s", ", ".join(map(str, wanted)))


def _can_wait(wanted: list[Pack]) -> bool:
    # In Triton's interpreter packs register at the CPU key what they declare elsewhere.
    if env.interprets_triton() or env.wants_python_router():
        return False
    if "opgraft.registry" in sys.modules:  # somebody has registered, and routers may be in
        return False
    if any(pack.ops is None for pack in wanted) or _without_core() is not None:
        return False
    from opgraft.packs import waiting

    # An op of torch that is not there is one of another torch; another one may be defined later.
    ops = {op for pack in wanted for op, _ in pack.ops or ()}
    return all(op.startswith("aten::") or waiting.exists(op) for op in ops)


def _activate_late() -> bool:
    """Activate packs that were waiting; false where one of them, or opgraft, is half imported."""
    packages = {"opgraft", *(_package(pack) for pack in _unique() if _is_wanted(pack))}
    if (name := next(_half_imported(packages), None)) is not None:
        log.debug("packs wait on: %s is being imported", name)
        return False
    activate()
    return True


def activate() -> list[Status]:
    """Load every pack that is installed and that `OPGRAFT_PACKS` does not leave out.

    `import torch` does this; a program that switched that off can do it here. What fails is logged
    and left out. Without a compiled core nothing is loaded, as routing in Python would slow calls
    down that no override wants; `OPGRAFT_ROUTER=python` asks for it all the same.

    Returns:
        What became of each pack.

    >>> all(status.state in ("active", "inactive", "unmet", "failed") for status in activate())
    True
    """
    global _activated
    _settle()
    again, _activated = _activated, True
    if env.installs_nothing():
        return statuses()
    wanted = [pack for pack in _unique() if _is_wanted(pack)]
    if not again:
        _report(wanted)
    if wanted and _without_core() is None:
        for pack in wanted:
            if pack.name not in _statuses:  # what failed before has been reported
                _load_or_report(pack)
    active = [str(status.pack) for status in statuses() if status.state == "active"]
    if active:
        log.info("opgraft: active: %s", ", ".join(active))
    return statuses()


def load(name: str) -> None:
    """Let an installed pack register its overrides; does nothing while they are there.

    What a pack registered before it failed is taken back: half of a pack is nothing that anybody
    has tested.

    Args:
        name: the pack's name, as :func:`installed` lists it.

    Raises:
        RegistrationError: there is no such pack, what it needs is not here, or it tried to end the
            process.
        Exception: whatever the pack's own code raises.

    >>> load("no-such-pack")
    Traceback (most recent call last):
    opgraft.errors.RegistrationError: there is no pack 'no-such-pack' ...
    """
    _settle()
    if name not in discovery.installed():
        discovery.scan.cache_clear()  # it may have been installed since
    pack = next((pack for pack in _unique() if pack.name == name), None)
    if pack is None:
        known = ", ".join(discovery.installed()) or "none"
        raise RegistrationError(f"there is no pack {name!r} installed; there is: {known}")
    _load(pack)


def statuses() -> list[Status]:
    """What became of each installed pack in this process, by name.

    >>> [status.reason for status in statuses() if status.state == "failed"]
    []
    """
    _settle()
    known = [_statuses.get(pack.name) or _inactive(pack) for pack in _unique()]
    doubles = [Status(pack, "failed", reason) for pack, reason in _doubles()]
    return sorted(known + doubles, key=lambda status: status.pack.name)


def misdeclared(pack: Pack) -> list[str]:
    """What an active pack registered that its metadata should have said, or should not have.

    A text each; none for a pack whose metadata declares nothing.
    """
    # In Triton's interpreter packs register at another key, and wait for nothing.
    if pack.ops is None or env.interprets_triton():
        return []
    found = []
    for override in _overrides(pack):
        if (override.op, override.dispatch_key) not in pack.ops:
            group = f"{discovery.OPS}{override.dispatch_key}"
            value = override.op.replace("::", ":", 1)
            found.append(
                f"overrides {override.op} and does not declare it: name it in the entry-point "
                f'group "{group}" as "{value}", or a call of it does not activate the pack'
            )
        elif override.autograd is not None:
            found.append(
                f"declares {override.op}, whose override has autograd=: such a pack must be there "
                "before the first call, so let it declare no ops"
            )
    return list(dict.fromkeys(found))


def unregistered(pack: Pack) -> list[str]:
    """The ops that an active pack declares and registered nothing for, which is no mistake.

    They may be another torch's or another DSL's; until the pack is active, they activate it.
    """
    if env.interprets_triton():
        return []
    registered = {(override.op, override.dispatch_key) for override in _overrides(pack)}
    missing = sorted((pack.ops or frozenset()) - registered)
    return [f"{op} at {dispatch_key}" for op, dispatch_key in missing]


def _settle() -> None:
    """Activate packs that wait, if any do."""
    if (deferred := _deferral()) is not None:
        deferred.settle()


def _deferral() -> ModuleType | None:
    # It imports what nobody needs whose packs do not wait.
    return sys.modules.get("opgraft.packs.waiting")


def _load_or_report(pack: Pack) -> None:
    try:
        _load(pack)
    except Exception as error:
        log.warning("opgraft: %s is left out: %s", pack, _one_line(_statuses[pack.name].reason))
        log.debug("%s", pack, exc_info=error)


def _load(pack: Pack) -> None:
    done = _statuses.get(pack.name)
    is_active = done is not None and done.state == "active" and _overrides(pack)
    if is_active or pack.name in _busy:
        return
    _busy.add(pack.name)
    try:
        if problem := _unmet(pack):
            _statuses[pack.name] = Status(pack, "unmet", problem)
            raise RegistrationError(f"{pack} {problem}")
        _register(pack)
    finally:
        _busy.discard(pack.name)


def _unmet(pack: Pack) -> str:
    if not pack.requires:
        return ""
    from opgraft.packs import requirements

    return "; ".join(requirements.unmet(pack.requires))


def _register(pack: Pack) -> None:
    try:
        function = _registering_function(pack)
        with owning(pack.name, pack.requires):
            function()
    except BaseException as error:
        _take_back(pack)
        reason = f"{type(error).__name__}: {error}{_hint(pack)}"
        _statuses[pack.name] = Status(pack, "failed", reason)
        if isinstance(error, SystemExit):
            raise RegistrationError(f"{pack} tried to end the process: {error!r}") from error
        raise
    _statuses[pack.name] = Status(pack, "active")
    for text in misdeclared(pack):
        log.warning("opgraft: %s %s", pack, text)
    if names := unregistered(pack):
        log.info("opgraft: %s declares, and does not override here: %s", pack, ", ".join(names))


def _hint(pack: Pack) -> str:
    """What to do where a pack failed because a part of it was being imported: by importing torch,
    which activates packs, it came to be asked for what it did not have yet.
    """
    name = next(_half_imported({_package(pack)}), None)
    return f" ({name} was being imported when torch was: import torch before it)" if name else ""


def _package(pack: Pack) -> str:
    return pack.entry.module.partition(".")[0]


def _half_imported(packages: set[str]) -> Iterator[str]:
    """The modules of some packages that are being imported at this moment."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and getattr(
            getattr(module, "__spec__", None), "_initializing", False
        ):
            yield name


def _registering_function(pack: Pack) -> Callable[[], object]:
    function = pack.entry.load()
    if not callable(function):
        raise RegistrationError(
            f"{pack}: the entry point's value, {pack.entry.value}, is {function!r}: name a "
            "function that takes nothing and registers"
        )
    return function  # type: ignore[no-any-return]


def _take_back(pack: Pack) -> None:
    for override in _overrides(pack):
        override.remove()


def _overrides(pack: Pack) -> list[Override]:
    from opgraft.registry import Selector, registry

    return registry.overrides(Selector(pack=pack.name))


def _unique() -> list[Pack]:
    """The packs, the first of each name."""
    return list({pack.name: pack for pack in reversed(discovery.scan())}.values())[::-1]


def _doubles() -> Iterator[tuple[Pack, str]]:
    """Packs whose name another one has, and what is wrong with that."""
    firsts = {pack.name: pack for pack in _unique()}
    for pack in discovery.scan():
        first = firsts[pack.name]
        if pack is not first:
            yield pack, f"{first.distribution} has a pack of that name, which goes before it"


def _is_wanted(pack: Pack) -> bool:
    wanted = env.packs()
    return wanted is None or pack.name in wanted


def _report(wanted: list[Pack]) -> None:
    """Say in a line each what keeps packs out that is no pack's own failure."""
    for pack, reason in _doubles():
        log.warning("opgraft: %s is left out: %s", pack, reason)
    if wanted and (obstacle := _without_core()):
        names = ", ".join(pack.name for pack in wanted)
        log.warning("opgraft: packs are installed and not active (%s): %s", names, obstacle)
    unknown = sorted(set(env.packs() or ()) - set(discovery.installed()))
    if unknown:
        log.warning(
            "opgraft: OPGRAFT_PACKS names what is not installed: %s; there is: %s",
            ", ".join(unknown),
            ", ".join(discovery.installed()) or "none",
        )


def _without_core() -> str | None:
    """Why nothing is activated where calls would be routed in Python; None where something is."""
    from opgraft.core import loader

    if env.wants_python_router() or loader.load() is not None:
        return None
    return f"no compiled core: {loader.status().reason}"


def _inactive(pack: Pack) -> Status:
    """The status of a pack that nobody tried to load."""
    if env.installs_nothing():
        return Status(pack, "inactive", "OPGRAFT_DISABLE=1")
    if not _is_wanted(pack):
        return Status(pack, "inactive", "OPGRAFT_PACKS leaves it out")
    if (deferred := _deferral()) is not None and deferred.waits():
        return Status(pack, "inactive", "it waits for a call of one of its ops")
    if _activated and (obstacle := _without_core()):
        return Status(pack, "unmet", obstacle)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return Status(pack, "inactive", "TORCH_DEVICE_BACKEND_AUTOLOAD switches activation off")
    return Status(pack, "inactive", "nothing has activated it")


def _one_line(text: str) -> str:
    return " ".join(text.split())
