"""Loads packs: which pack owns a registration, which packs are active, and why others are not."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from opgraft.base import env, garbage
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
        pack: the pack.
        state: `"active"`: it has registered; `"inactive"`: nothing has activated it, or it is
            switched off; `"unmet"`: a requirement is not met; `"failed"`: it raised.
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
        # By DSL: each override asks, and the answer may have to be read from disk.
        self._missing = cache(self._look_up)

    def missing(self, dsl: str) -> str | None:
        """Which of the pack's requirements for a DSL are not met; None where all are."""
        return self._missing(dsl)

    def _look_up(self, dsl: str) -> str | None:
        if not self._requires:
            return None
        from opgraft.packs import requirements

        problems = requirements.unmet_for_dsl(self._requires, dsl)
        return f"pack {self.name} {'; '.join(problems)}" if problems else None


_loading: ContextVar[Owner | None] = ContextVar("opgraft_pack", default=None)
# The packs that something tried to load, by name.
_statuses: dict[str, Status] = {}
# Packs that are being loaded. This is no lock: a thread that waited for it could hold the import
# lock of a module that the pack is about to import.
_being_loaded: set[str] = set()
# Whether `activate` ran.
_activated = False


def owner() -> Owner | None:
    """The pack whose registration function is running; None in the user's own code."""
    return _loading.get()


@contextmanager
def owning(name: str, requires: tuple[str, ...] = ()) -> Iterator[None]:
    """A scope in which registered overrides belong to the pack of that name."""
    token = _loading.set(Owner(name, requires))
    try:
        yield
    finally:
        _loading.reset(token)


def activate_or_defer() -> None:
    """Activate packs, or install placeholders for their overrides. `import torch` calls this.

    Placeholders take a third of the time. They need to know which ops the packs override, so all
    packs must declare their ops, and the compiled core must route calls.
    """
    global _activated
    wanted = [pack for pack in _first_of_each_name() if _is_wanted(pack)]
    if _activated or not wanted or not _can_wait(wanted):
        activate()
        return
    from opgraft.packs import waiting

    _log_obstacles(wanted)
    _activated = True
    ops = {each for pack in wanted for each in pack.ops or ()}
    waiting.install_placeholders(
        {each for each in ops if waiting.op_exists(each[0])}, _activate_late
    )
    if waiting.are_waiting():
        log.info("opgraft: waiting for a call: %s", ", ".join(map(str, wanted)))


def _can_wait(wanted: list[Pack]) -> bool:
    # In Triton's interpreter packs register at the CPU key what they declare elsewhere.
    if env.interprets_triton() or env.wants_python_router():
        return False
    if "opgraft.registry" in sys.modules:  # overrides and routers may be there already
        return False
    if any(pack.ops is None for pack in wanted) or _why_no_core() is not None:
        return False
    from opgraft.packs import waiting

    # A missing op of aten belongs to another torch; a missing op of a library may be defined later.
    ops = {op for pack in wanted for op, _ in pack.ops or ()}
    return all(op.startswith("aten::") or waiting.op_exists(op) for op in ops)


def _activate_late() -> bool:
    """Activate waiting packs; false where one of them, or opgraft, is still being imported."""
    packages = {"opgraft", *(pack.package for pack in _first_of_each_name() if _is_wanted(pack))}
    if (name := next(_modules_being_imported(packages), None)) is not None:
        log.debug("packs wait on: %s is being imported", name)
        return False
    activate()
    return True


def activate() -> list[Status]:
    """Load every installed pack that `OPGRAFT_PACKS` does not leave out.

    `import torch` does this. A program that switched that off can do it here. A pack that fails is
    logged and left out. Without a compiled core nothing is loaded, because routing in Python would
    slow down calls that no override takes. `OPGRAFT_ROUTER=python` loads packs all the same.

    Returns:
        What became of each pack.

    >>> all(status.state in ("active", "inactive", "unmet", "failed") for status in activate())
    True
    """
    global _activated
    _register_waiting()
    again, _activated = _activated, True
    if env.installs_nothing():
        return statuses()
    wanted = [pack for pack in _first_of_each_name() if _is_wanted(pack)]
    if not again:
        _log_obstacles(wanted)
    if wanted and _why_no_core() is None:
        with garbage.collection_paused():
            for pack in wanted:
                if pack.name not in _statuses:  # an earlier failure has been reported already
                    _load_or_log(pack)
    active = [str(status.pack) for status in statuses() if status.state == "active"]
    if active:
        log.info("opgraft: active: %s", ", ".join(active))
    return statuses()


def load(name: str) -> None:
    """Let an installed pack register its overrides; does nothing while they are registered.

    If a pack fails, the overrides that it has already registered are removed: nobody has tested
    half of a pack.

    Args:
        name: the pack's name, as :func:`installed` lists it.

    Raises:
        RegistrationError: there is no such pack, a requirement is not met, or it tried to end the
            process.
        Exception: whatever the pack's own code raises.

    >>> load("no-such-pack")
    Traceback (most recent call last):
    opgraft.errors.RegistrationError: there is no pack 'no-such-pack' ...
    """
    _register_waiting()
    if name not in discovery.installed():
        discovery.scan.cache_clear()  # it may have been installed since
    pack = next((pack for pack in _first_of_each_name() if pack.name == name), None)
    if pack is None:
        known = ", ".join(discovery.installed()) or "none"
        raise RegistrationError(f"there is no pack {name!r} installed; there is: {known}")
    _load(pack)


def statuses() -> list[Status]:
    """What became of each installed pack in this process, by name.

    >>> [status.reason for status in statuses() if status.state == "failed"]
    []
    """
    _register_waiting()
    known = [_statuses.get(pack.name) or _inactive(pack) for pack in _first_of_each_name()]
    duplicates = [Status(pack, "failed", reason) for pack, reason in _duplicates()]
    return sorted(known + duplicates, key=lambda status: status.pack.name)


def misdeclared(pack: Pack) -> list[str]:
    """Where an active pack's metadata disagrees with what it registered.

    Returns a text for each difference; none for a pack whose metadata declares no ops.
    """
    # In Triton's interpreter packs register at another key, and wait for nothing.
    if pack.ops is None or env.interprets_triton():
        return []
    from opgraft import router

    found = []
    for override in _overrides(pack):
        if override.op.startswith(f"{pack.package}::_"):
            continue  # an op for the pack alone: nothing calls it before the pack is active
        if (override.op, override.dispatch_key) not in pack.ops:
            group = f"{discovery.OPS}{override.dispatch_key}"
            value = override.op.replace("::", ":", 1)
            found.append(
                f"overrides {override.op} and does not declare it: name it in the entry-point "
                f'group "{group}" as "{value}", or a call of it does not activate the pack'
            )
        elif override.derivative is not None and router.has_own_kernel(
            override.operator, override.dispatch_key
        ):
            found.append(
                f"declares {override.op}, whose override has autograd= and which is no composite "
                "op: such a pack must be active before the first call, so let it declare no ops"
            )
    return list(dict.fromkeys(found))


def unregistered(pack: Pack) -> list[str]:
    """The ops that an active pack declares but did not override. That is no mistake.

    They may be meant for another torch or another DSL. Until the pack is active, they activate it.
    """
    if env.interprets_triton():
        return []
    registered = {(override.op, override.dispatch_key) for override in _overrides(pack)}
    missing = sorted((pack.ops or frozenset()) - registered)
    return [f"{op} at {dispatch_key}" for op, dispatch_key in missing]


def _register_waiting() -> None:
    """Register the packs that wait for a first call, if any do."""
    if (waiting_module := _waiting_module()) is not None:
        waiting_module.register_waiting()


def _waiting_module() -> ModuleType | None:
    # Looked up, not imported: where no pack waits, nothing needs its imports.
    return sys.modules.get("opgraft.packs.waiting")


def _load_or_log(pack: Pack) -> None:
    try:
        _load(pack)
    except Exception as error:
        # While the interpreter ends, much fails on other threads, and no call needs the pack.
        level = logging.WARNING if threading.main_thread().is_alive() else logging.DEBUG
        reason = _one_line(_statuses[pack.name].reason)
        log.log(level, "opgraft: %s is left out: %s", pack, reason)
        log.debug("%s", pack, exc_info=error)


def _load(pack: Pack) -> None:
    done = _statuses.get(pack.name)
    is_active = done is not None and done.state == "active" and _overrides(pack)
    if is_active or pack.name in _being_loaded:
        return
    _being_loaded.add(pack.name)
    try:
        if problem := _unmet(pack):
            _statuses[pack.name] = Status(pack, "unmet", problem)
            raise RegistrationError(f"{pack} {problem}")
        _register(pack)
    finally:
        _being_loaded.discard(pack.name)


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
        _remove_overrides(pack)
        reason = f"{type(error).__name__}: {error}{_import_order_hint(pack)}"
        _statuses[pack.name] = Status(pack, "failed", reason)
        if isinstance(error, SystemExit):
            raise RegistrationError(f"{pack} tried to end the process: {error!r}") from error
        raise
    _statuses[pack.name] = Status(pack, "active")
    for text in misdeclared(pack):
        log.warning("opgraft: %s %s", pack, text)
    if names := unregistered(pack):
        log.info("opgraft: %s declares, and does not override here: %s", pack, ", ".join(names))


def _import_order_hint(pack: Pack) -> str:
    """What to do if a pack failed because it was still being imported: its import of torch
    activated packs, before it had defined what it registers.
    """
    name = next(_modules_being_imported({pack.package}), None)
    return f" ({name} was being imported when torch was: import torch before it)" if name else ""


def _modules_being_imported(packages: set[str]) -> Iterator[str]:
    """The modules of some packages that are being imported now."""
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


def _remove_overrides(pack: Pack) -> None:
    for override in _overrides(pack):
        override.remove()


def _overrides(pack: Pack) -> list[Override]:
    from opgraft.registry import Selector, registry

    return registry.overrides(Selector(pack=pack.name))


def _first_of_each_name() -> list[Pack]:
    """The packs; of several with the same name, the first."""
    return list({pack.name: pack for pack in reversed(discovery.scan())}.values())[::-1]


def _duplicates() -> Iterator[tuple[Pack, str]]:
    """Packs with the name of an earlier one, and what is wrong with that."""
    firsts = {pack.name: pack for pack in _first_of_each_name()}
    for pack in discovery.scan():
        first = firsts[pack.name]
        if pack is not first:
            yield pack, f"{first.distribution} has a pack of that name, which comes first"


def _is_wanted(pack: Pack) -> bool:
    wanted = env.packs()
    return wanted is None or pack.name in wanted


def _log_obstacles(wanted: list[Pack]) -> None:
    """Log a line for each reason that keeps packs inactive and is not their own failure."""
    for pack, reason in _duplicates():
        log.warning("opgraft: %s is left out: %s", pack, reason)
    if wanted and (obstacle := _why_no_core()):
        names = ", ".join(pack.name for pack in wanted)
        log.warning("opgraft: packs are installed and not active (%s): %s", names, obstacle)
    unknown = sorted(set(env.packs() or ()) - set(discovery.installed()))
    if unknown:
        log.warning(
            "opgraft: OPGRAFT_PACKS names what is not installed: %s; there is: %s",
            ", ".join(unknown),
            ", ".join(discovery.installed()) or "none",
        )


def _why_no_core() -> str | None:
    """Why no pack is activated, because calls would be routed in Python; None where packs are."""
    from opgraft.core import loader

    if env.wants_python_router() or loader.load() is not None:
        return None
    return f"no compiled core: {loader.status().reason}"


def _inactive(pack: Pack) -> Status:
    """The status of a pack that nothing tried to load."""
    if env.installs_nothing():
        return Status(pack, "inactive", "OPGRAFT_DISABLE=1")
    if not _is_wanted(pack):
        return Status(pack, "inactive", "OPGRAFT_PACKS leaves it out")
    if (waiting_module := _waiting_module()) is not None and waiting_module.are_waiting():
        return Status(pack, "inactive", "it waits for a call of one of its ops")
    if _activated and (obstacle := _why_no_core()):
        return Status(pack, "unmet", obstacle)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return Status(pack, "inactive", "TORCH_DEVICE_BACKEND_AUTOLOAD switches activation off")
    return Status(pack, "inactive", "nothing has activated it")


def _one_line(text: str) -> str:
    return " ".join(text.split())
