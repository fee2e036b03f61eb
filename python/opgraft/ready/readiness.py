"""What has become of the kernels of each call that an override was asked for and had none.

`import torch` imports this where a pack is installed: what is for compiling alone is imported by
the first call that has something to compile.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch

from opgraft.base import env
from opgraft.base.locks import fork_safe_lock
from opgraft.core import deferred
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Call
from opgraft.registry import Override, WhenNotReady
from opgraft.router import decision, device

if TYPE_CHECKING:
    from opgraft.cache import entries
    from opgraft.core.interface import Core, Plan, PlanKey, PlanTable
    from opgraft.ready.here import Metadata
    from opgraft.ready.pool import Job
    from opgraft.ready.request import Compiled, Request

log = logging.getLogger(__name__)

Status = Literal["waiting", "compiling", "loading", "ready", "failed", "dropped"]

#: Who compiles what nobody can compile ahead: a later call, or the one that asked.
A_LATER_CALL = "the call that needs them"
_THE_CALL = "the call itself"

#: Kinds of calls of an override whose state is remembered for people.
MAX_STATES = 1024


class Kind(NamedTuple):
    """A kind of call whose kernels are ready, or are not."""

    #: The core's `PlanKey` of it.
    key: PlanKey
    #: Of each argument whether it gets a gradient; empty where nothing is differentiated.
    needs: tuple[bool, ...] = ()


class State:
    """What became of the kernels of one kind of call."""

    def __init__(self, call: str, status: Status, by: str = "", reason: str = "") -> None:
        #: The kind of call, for people.
        self.call = call
        self.status = status
        #: `time.time()` of the change.
        self.since = time.time()
        #: Who compiles, or compiled: "worker 1234", "this process", "another process" whose plan
        #: was in the cache, or "whoever made the bundle".
        self.by = by
        #: Why it failed, or why it is compiled in this process.
        self.reason = reason
        #: Whether it has a launch plan that another process recorded.
        self.is_loaded = False

    @property
    def is_pending(self) -> bool:
        """Whether its kernels wait to be compiled or loaded, or are being so."""
        return self.status in ("waiting", "compiling", "loading")

    @property
    def why_no_worker(self) -> str:
        """Why no worker compiles, as the end of a sentence; empty where one does, or did."""
        reason = self.reason.partition("\n")[0]  # of an error: `as_dict` has all of it
        return f", as no worker can: {reason}" if reason else ""

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "call": self.call,
            "status": self.status,
            "since": self.since,
            "by": self.by,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        seconds = f"for {time.time() - self.since:.0f} s"
        if self.status == "waiting":
            by = f", by {self.by}" if self.by else ""
            return f"its kernels wait to be compiled, {seconds}{by}{self.why_no_worker}"
        if self.status == "compiling":
            return f"its kernels are being compiled, {seconds}, by {self.by}{self.why_no_worker}"
        if self.status == "loading":
            return f"its launch plan is being loaded, {seconds}"
        if self.status == "ready":
            return f"its kernels are ready, compiled by {self.by}{self.why_no_worker}"
        if self.status == "dropped":
            return f"its launch plan is not used: {self.reason}"
        return f"its kernels could not be compiled: {self.reason}"


#: Each status as a summary has it.
_IN_WORDS: dict[Status, str] = {
    "ready": "ready",
    "compiling": "being compiled",
    "loading": "being loaded",
    "waiting": "waiting",
    "failed": "failed",
    "dropped": "dropped",
}


def summary(states: Iterable[State]) -> str:
    """How many states have each status, for people; empty where there are none."""
    counts = Counter(state.status for state in states)
    return ", ".join(f"{counts[each]} {word}" for each, word in _IN_WORDS.items() if counts[each])


#: Takes a launch plan that another process recorded, the kind of call that it is for, and the same
#: for people.
Install = Callable[["Plan", Kind, str], None]


class Readiness:
    """The kernels of an override's calls: which are ready, and who makes the others so."""

    def __init__(self, override: Override, table: PlanTable, core: Core, install: Install) -> None:
        self.override = override
        self._table = table
        self._core = core
        self._install = install
        # Of its own thread's also: a signal's handler may make a call.
        self._lock = threading.RLock()
        self._states: dict[Kind, State] = {}
        self._said: set[str] = set()
        #: Whether calls without a launch plan run in Python, whatever `unplanned` says.
        self.runs_all = False
        #: The entries of the cache whose plans were loaded, by their names.
        self.kept: dict[str, entries.Entry] = {}
        _attach_to_process()
        with _lock:
            _all.add(self)
            self.apply()

    @property
    def policy(self) -> WhenNotReady:
        """What a call does whose kernels are not ready."""
        scope = _innermost()
        said = None if scope is None else scope.policy
        return said or env.when_not_ready() or self.override.when_not_ready  # type: ignore[return-value]

    def apply(self) -> None:
        """Tell the core of the policy, which may have changed."""
        self._table.only_loaded = env.needs_bundle()
        self._table.gated = self.policy == "native" or self._table.only_loaded
        is_captured = any(scope.is_captured for scope in _scopes) and not self._table.only_loaded
        self._table.runs_all = self.runs_all or is_captured

    def state(self, call: str) -> State | None:
        """What became of the kernels of a kind of call, as :attr:`State.call` has it.

        None where nobody asked, or it was long ago.
        """
        return next((state for state in self.states() if state.call == call), None)

    def states(self) -> list[State]:
        """What became of each key that was asked for."""
        with self._lock:
            return list(self._states.values())

    def is_pending(self) -> bool:
        """Whether something is being compiled, or waits for it."""
        if self.override.state.removed:
            return False
        return any(state.is_pending for state in self.states())

    def ask(self, call: Call, keyset: torch.DispatchKeySet, kind: Kind, label: str) -> bool:
        """Have the kernels of a call made ready.

        Args:
            call: the call.
            keyset: its dispatch keys.
            kind: of the call.
            label: the same for people.

        Returns:
            Whether the call is to run as it is.
        """
        if _is_ending:
            self._table.forget(kind.key)
            return False
        try:
            with self._lock:
                known = self._states.get(kind)
                if known is None and self._table.is_ready(kind.key):
                    return True  # which is remembered for more kinds than their states
                if known is not None and known.is_loaded:
                    known = None  # its plan was dropped: there is no room for all
                if known is None:
                    self._states[kind] = State(label, "waiting")
            if known is None:
                self._ask(call, keyset, kind)
        except (MemoryError, RecursionError):  # it is this call's alone: a later one asks again
            self._states.pop(kind, None)  # in this frame: there may be no room for another
            self._table.forget(kind.key)
            return False
        except Exception as error:  # it is the program's call, which has done nothing wrong
            self._fail(kind, f"{type(error).__name__}: {error}")
            return False
        except BaseException:
            self._dropped(kind)
            raise
        if known is not None:
            # Another thread was faster, or a CUDA graph is being captured, or the core forgot: its
            # table is bounded.
            if known.status == "ready":
                self._table.set_ready(kind.key)
            elif known.is_pending:
                self.warn_if_captured(call)
            return known.status == "ready"
        with self._lock:
            state = self._states.get(kind)
        if state is not None and state.by == _THE_CALL and _is_ahead():
            return True  # there may be no later call that compiles them
        self.warn_if_captured(call)
        return False

    def _ask(self, call: Call, keyset: torch.DispatchKeySet, kind: Kind) -> None:
        from opgraft.cache import plans
        from opgraft.ready import pool, request
        from opgraft.ready.here import Metadata
        from opgraft.ready.plan_keys import plan_key

        metadata = Metadata(call, kind.needs)
        where = device.of_tensors(call) or torch.device("cpu")
        try:
            asked = request.request(self.override, call, keyset, kind.needs)
        except request.CannotAsk as error:
            if self._table.only_loaded:
                self._load_from_bundle(None, kind, where)
            elif _is_ahead():  # stand-ins would be compiled for one after the other, too
                self._leave_to(_THE_CALL, kind, str(error))
            else:
                self._compile_here(metadata, keyset, kind, str(error))
            return
        key = asked["plan"] = plan_key(self._core, self.override, call, asked)

        def failed(reason: str, may_run_here: bool) -> None:
            if not may_run_here:
                self._fail(kind, reason)
                return
            try:
                self._compile_here(metadata, keyset, kind, reason)
            except Exception as error:  # no thread can be started
                self._fail(kind, f"{reason}; and in this process: {error}")

        if self._table.only_loaded:
            self._load_from_bundle(key, kind, where)
            return
        compiling = self._job(kind, asked, failed, where)
        places = _places(self.override)
        if key is None or not any(plans.exists(key, place) for place in places):
            if key is not None:  # another process may record it before it is this one's turn
                compiling.done_elsewhere = lambda: self._load_plan(key, kind, where)
            pool.shared().submit(compiling)
            return

        def load() -> None:
            if not any(self._load_plan(key, kind, where, place) for place in places):
                self._note(kind, "waiting")
                pool.shared().submit(compiling)

        self._note(kind, "loading")
        pool.loading().submit(
            pool.Job(
                load,
                wanted=compiling.wanted,
                started=lambda by: None,
                compiled=lambda compiled: None,
                failed=lambda reason, may_run_here: self._fail(kind, reason),
                dropped=compiling.dropped,
                is_kept=compiling.is_kept,
            )
        )

    def _load_from_bundle(
        self, key: dict[str, Any] | None, kind: Kind, where: torch.device
    ) -> None:
        """Load a plan before the call goes on: on every rank calls after it take the same route."""
        places = _bundles(self.override)
        if key is None or not any(self._load_plan(key, kind, where, place) for place in places):
            self._note(kind, "dropped", reason="the bundle has none for it (OPGRAFT_READY=bundle)")

    def _load_plan(
        self,
        key: dict[str, Any],
        kind: Kind,
        where: torch.device,
        place: entries.Place | None = None,
    ) -> bool:
        """Load a plan that was kept.

        Args:
            key: by which it is kept.
            kind: of the calls that it is for.
            where: where their tensors are.
            place: where to look; None: in the user's cache.

        Returns:
            Whether there is one. Why one that is there is not loaded is logged, in one line.
        """
        from opgraft.cache import plans

        try:
            entry = plans.find(key, place)
            if entry is None:
                return False
            with device.guard(where):
                plan = plans.load(self._core, entry, self.override.operator, where)
            with self._lock:
                state = self._states.get(kind)
                if state is not None:
                    state.is_loaded = True  # calls may drop it as soon as it is installed
            self._install(plan, kind, "" if state is None else state.call)
        except Exception as error:  # the driver's, or of a file that is damaged
            log.warning("%s: a launch plan is not loaded: %s", self.override.name, error)
            return False
        by_others = "another process" if entry.place.is_cache else "whoever made the bundle"
        by = (state.by if state is not None else "") or by_others
        self._note(kind, "ready", by=by, is_loaded=True)
        with self._lock:
            if entry.place.is_cache and len(self.kept) < MAX_STATES:
                self.kept[entry.name] = entry
        return True

    def _compile_here(
        self, metadata: Metadata, keyset: torch.DispatchKeySet, kind: Kind, reason: str
    ) -> None:
        """Compile by running the impl on stand-ins, on a thread that no call waits for."""
        from opgraft.ready import here, pool

        if not here.may_run(self.override, metadata):
            self._leave_to(A_LATER_CALL, kind, reason)
            return
        self._note(kind, "waiting", by="this process", reason=reason)

        def failed(error: str, may_run_here: bool) -> None:
            self._fail(kind, f"{reason}; and in this process: {error}")

        def run() -> None:
            here.run(self.override, metadata, keyset)

        pool.here().submit(self._job(kind, run, failed))

    def _leave_to(self, by: str, kind: Kind, reason: str) -> None:
        self._table.set_ready(kind.key)
        self._note(kind, "ready", by=by, reason=reason)

    def _job(
        self,
        kind: Kind,
        work: Request | Callable[[], None],
        failed: Callable[[str, bool], None],
        where: torch.device | None = None,
    ) -> Job:
        # It holds no tensors: it must not keep them alive.
        from opgraft.ready import pool

        is_kept = _is_ahead()

        def wanted() -> int:
            if self.override.state.removed:
                return 0
            return max(int(is_kept), self._table.times_asked(kind.key))  # the core may forget

        return pool.Job(
            work,
            wanted=wanted,
            started=lambda by: self._note(kind, "compiling", by=by),
            compiled=lambda compiled: self._compiled(kind, work, compiled, where),
            failed=failed,
            dropped=lambda: self._dropped(kind),
            is_kept=is_kept,
        )

    def drop(self, kind: Kind, reason: str) -> None:
        """Native serves the calls of a kind for good, since the plan that was loaded is not right.

        Args:
            kind: the kind of call.
            reason: what is wrong.
        """
        log.warning(
            "%s: a launch plan is dropped, and native serves its calls: %s",
            self.override.name,
            reason,
        )
        self._note(kind, "dropped", reason=reason)

    def forget_loaded(self) -> None:
        """Forget all plans that were loaded: calls ask for them again."""
        with self._lock:
            loaded = [each for each, state in self._states.items() if state.is_loaded]
        for each in loaded:
            self._dropped(each)

    def _note(
        self,
        kind: Kind,
        status: Status,
        *,
        by: str = "",
        reason: str = "",
        is_loaded: bool = False,
    ) -> None:
        with self._lock:
            before = self._states.get(kind)
            if is_loaded and (before is None or not before.is_loaded):
                return  # it was dropped since it was installed
            self._states.pop(kind, None)
            if len(self._states) >= MAX_STATES:
                over = [each for each, state in self._states.items() if not state.is_pending]
                for each in over[:1]:
                    del self._states[each]
            label = "" if before is None else before.call
            if before is not None:
                by, reason = by or before.by, reason or before.reason
            state = self._states[kind] = State(label, status, by, reason)
            state.is_loaded = is_loaded
        if status in ("ready", "failed", "dropped"):
            with _changed:
                _changed.notify_all()

    def _compiled(
        self,
        kind: Kind,
        work: Request | Callable[[], None],
        compiled: Compiled,
        where: torch.device | None,
    ) -> None:
        from opgraft.ready import here, triton_kernels

        if not callable(work) and work["plan"] is not None:
            assert where is not None  # it is a call's
            if not compiled["no_plan"] and self._load_plan(work["plan"], kind, where):
                return
            log.debug("%s: no launch plan is kept: %s", self.override.name, compiled["no_plan"])
        try:
            here.import_ahead(self.override)
            if where is not None and where.type == "cuda":
                triton_kernels.load(compiled["triton"], where)
        except BaseException as error:  # whatever a module raises while it is imported
            self._fail(kind, f"{type(error).__name__}: {error}")
            return
        self._table.set_ready(kind.key)
        self._note(kind, "ready")
        names = ", ".join(compiled["compiled"]) or "nothing"
        log.debug("%s: compiled %s for a call", self.override.name, names)

    def _dropped(self, kind: Kind) -> None:
        with self._lock:
            self._states.pop(kind, None)
        self._table.forget(kind.key)

    def _fail(self, kind: Kind, reason: str) -> None:
        level = logging.DEBUG if reason in self._said else logging.WARNING
        if len(self._said) < MAX_STATES:
            self._said.add(reason)
        log.log(
            level,
            "%s: the kernels of a call could not be compiled, and native serves it: %s",
            self.override.name,
            reason,
        )
        self._note(kind, "failed", reason=reason)

    def warn_if_captured(self, call: Call) -> None:
        """Warn once of a call that is not ready and is captured in a CUDA graph."""
        if self.override.state.warned_of_capture:
            return
        if device.is_capturing(device.of_tensors(call)):
            decision.warn_captured(self.override)


@functools.cache
def _attach_to_process() -> None:
    """Have nothing compiled, and no thread run, from when the interpreter ends.

    What is registered for its end after this may make calls before, and what was registered before
    this makes them after.
    """
    atexit.register(_end)
    deferred.add_preparation(_prepare_asking)


def _prepare_asking() -> None:
    """Import, and look up, what the first call needs whose kernels are asked for."""
    from opgraft.cache import plans  # noqa: F401
    from opgraft.ready import here, pool, request  # noqa: F401
    from opgraft.ready.plan_keys import versions

    versions()


def _end() -> None:
    global _is_ending
    _is_ending = True
    # Which is not imported for its end.
    if pool := sys.modules.get("opgraft.ready.pool"):
        pool.close_all()


_is_ending = False


def _places(override: Override) -> list[entries.Place | None]:
    """Where an override's plans are looked for: in bundles, and then in the user's cache."""
    return [*_bundles(override), None]


def _bundles(override: Override) -> list[entries.Place]:
    """The bundle that the environment names, and the one that the override's pack ships."""
    from opgraft.cache import bundles
    from opgraft.packs import discovery

    found: list[entries.Place | None] = []
    try:
        found.append(bundles.in_use())
    except bundles.BundleError as error:
        env.warn_once(f"OPGRAFT_KERNELS: {error}")
    module = override.pack and discovery.module_of(override.pack)
    if module:
        try:
            found.append(bundles.of_module(module))
        except bundles.BundleError as error:
            env.warn_once(f"the bundle of pack {override.pack!r}: {error}")
    return [each for each in found if each is not None]


def kept_plans(pack: str | None = None, dsl: str | None = None) -> list[entries.Entry]:
    """The entries of the cache whose plans this process has loaded.

    Args:
        pack: only those of overrides of this pack.
        dsl: only those of overrides of this DSL.
    """
    found: dict[str, entries.Entry] = {}
    for each in _everyone():
        if pack in (None, each.override.pack) and dsl in (None, each.override.dsl):
            found |= each.kept
    return list(found.values())


_all: weakref.WeakSet[Readiness] = weakref.WeakSet()
_changed = threading.Condition()
_scopes: list[_Scope] = []
_lock = fork_safe_lock()


class _Scope:
    """One `with when_not_ready(...)` that is open, or another statement about all overrides."""

    def __init__(
        self,
        policy: WhenNotReady | None,
        *,
        is_ahead: bool = False,
        is_captured: bool = False,
    ) -> None:
        #: None: it says nothing of that.
        self.policy = policy
        #: Whether calls are made to have their kernels compiled for other processes.
        self.is_ahead = is_ahead
        #: Whether calls are, or will be, captured in a CUDA graph: no replay pays the host's time.
        self.is_captured = is_captured
        #: The thread that opened it.
        self.thread = threading.get_ident()


@contextmanager
def when_not_ready(policy: WhenNotReady) -> Iterator[None]:
    """Say for all overrides what a call does whose kernels are not compiled yet.

    It holds for every thread of the process, whatever overrides were registered with and
    `OPGRAFT_WHEN_NOT_READY` says.

    Args:
        policy: `"wait"`: the call waits until they are compiled; `"native"`: it is native's, and
            they are compiled in the background.

    Raises:
        RegistrationError: there is no such policy.

    >>> import opgraft
    >>> with opgraft.when_not_ready("wait"):
    ...     pass  # every call that an override takes runs it
    """
    choices = get_args(WhenNotReady)
    if policy not in choices:
        raise RegistrationError(f"when_not_ready({policy!r}): choose one of {choices}")
    with _open(_Scope(policy)):
        yield


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Have the kernels of all calls compiled by workers while it lasts, whatever the policy is.

    Each call is taken to be the last of its kind: nothing that was asked for is let go, and a call
    that no worker can compile for waits.
    """
    with _open(_Scope("native", is_ahead=True)):
        yield


@contextmanager
def for_a_capture(*, wait: bool) -> Iterator[None]:
    """Run impls in Python where they have no launch plan, however long that takes, while it lasts.

    Args:
        wait: whether a call waits until its kernels are compiled.
    """
    with _open(_Scope("wait" if wait else None, is_captured=True)):
        yield


@contextmanager
def _open(scope: _Scope) -> Iterator[None]:
    with _lock:
        _scopes.append(scope)
        _apply()
    try:
        yield
    finally:
        with _lock:
            if scope in _scopes:  # or it was another thread's, and this is the child of a fork
                _scopes.remove(scope)
            _apply()


def _innermost() -> _Scope | None:
    """The scope that says what a call does whose kernels are not ready."""
    # One look: another thread may close it.
    return next((scope for scope in reversed(_scopes) if scope.policy is not None), None)


def _is_ahead() -> bool:
    scope = _innermost()
    return scope is not None and scope.is_ahead


def _apply() -> None:
    for each in _everyone():
        each.apply()


def _everyone() -> list[Readiness]:
    with _lock:  # others are registered meanwhile
        return list(_all)


def wait_until_ready(timeout: float | None = None) -> bool:
    """Wait until nothing is being compiled in the background, and nothing waits for it.

    Args:
        timeout: seconds; None: as long as it takes.

    Returns:
        Whether that is so; False where the time was over before.

    >>> import opgraft
    >>> opgraft.wait_until_ready(timeout=60)
    True
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    with _changed:
        while any(each.is_pending() for each in _everyone()):
            left = 0.1 if deadline is None else min(0.1, deadline - time.monotonic())
            if left <= 0:
                return False
            _changed.wait(left)
    return True


def progress() -> tuple[int, int]:
    """How many kinds of calls nothing has to be compiled for any more, and how many there are."""
    states = [state for each in _everyone() for state in each.states()]
    return sum(not state.is_pending for state in states), len(states)


def _forget_in_child() -> None:
    """A fork's child has neither the workers nor the other threads of its parent."""
    global _changed
    _changed = threading.Condition()
    with _lock:
        # Nobody would end those of other threads.
        _scopes[:] = [each for each in _scopes if each.thread == threading.get_ident()]
        _apply()
    for each in _everyone():
        each._lock = threading.RLock()
        done = {key: state for key, state in each._states.items() if not state.is_pending}
        each._states = done
        each._table.forget_asked()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
