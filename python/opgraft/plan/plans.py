"""The launch plans of one override, what was refused, and whether more can be recorded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from opgraft.base import env, imports
from opgraft.base.locks import fork_safe_lock
from opgraft.core import loader
from opgraft.ops.describing import accelerator, describe, strides
from opgraft.ops.schema import Call
from opgraft.plan.proof import Proof
from opgraft.ready import captures, warm_up
from opgraft.ready.readiness import Kind, Readiness, State
from opgraft.registry import Override
from opgraft.router import saved_tensors
from opgraft.router.randomness import depends_on_random_numbers

if TYPE_CHECKING:
    from opgraft.core.interface import Core, Plan, PlanKey, Router
    from opgraft.plan.recording import Recording

log = logging.getLogger(__name__)

#: Plans of one override. When full, the plan that was replayed least since the last eviction is
#: evicted.
MAX_PLANS = 256
#: Free recordings of one override: two for each plan.
FREE_RECORDINGS = 2 * MAX_PLANS
#: Replays that earn one more recording. A recording takes about a millisecond, and a replay saves
#: at least two microseconds. So if shapes keep changing, recordings cost less than a tenth of what
#: replays save.
REPLAYS_PER_RECORDING = 1024
#: Runs of a key in which a recording and an equal trial must be found. The first runs of an
#: autotuned kernel differ from later ones.
MAX_ATTEMPTS = 4
#: Refused keys after which the override is given up, if none could ever be recorded.
MAX_REFUSALS = 16
#: Keys that were recorded and await their trial.
MAX_CANDIDATES = 64


#: Held while a plan is installed that must be proven.
_installing = fork_safe_lock()


class PlanInfo:
    """One plan: the calls that it is for, and its steps."""

    def __init__(self, key: str, hits: int, bytes: int, steps: str, is_proven: bool = True) -> None:
        #: The calls' metadata, such as `"input bfloat16[64, 1024], normalized_shape [1024]"`.
        self.key = key
        #: How often it was replayed.
        self.hits = hits
        #: The plan's host memory. It owns no device memory.
        self.bytes = bytes
        #: The steps of a replay.
        self.steps = steps
        #: Whether it serves calls. One that another process recorded must agree with native first.
        self.is_proven = is_proven

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "key": self.key,
            "hits": self.hits,
            "bytes": self.bytes,
            "steps": self.steps,
            "is_proven": self.is_proven,
        }

    def __repr__(self) -> str:
        size = f"{self.bytes} bytes" + ("" if self.is_proven else ", compared with native first")
        return f"<plan for {self.key}: {self.hits} hits, {size}; {self.steps}>"


class _Candidate:
    """A key that is being recorded."""

    def __init__(self) -> None:
        self.attempts = 0
        #: The plan of the last recording; None if it was refused or has been tried.
        self.plan: Plan | None = None


class Plans:
    """The launch plans of an override. Iterating gives a :class:`PlanInfo` for each."""

    def __init__(self, override: Override, core: Core) -> None:
        self.override = override
        #: The core's table, which calls read. It counts trials as recordings.
        self.table = core.PlanTable(
            plans=MAX_PLANS,
            free_recordings=FREE_RECORDINGS,
            replays_per_recording=REPLAYS_PER_RECORDING,
            # None is recorded where the table only says whose kernels are ready.
            refusals=MAX_REFUSALS if override.launch_plan else 0,
        )
        self._core = core
        self._candidates: dict[Any, _Candidate] = {}
        #: Why calls with a key run in Python, by :attr:`PlanInfo.key`.
        self.refusals: dict[str, str] = {}
        self._logged_stopped = False
        #: Which calls' kernels are compiled.
        self.readiness = Readiness(override, self.table, core, self._install_loaded)
        #: Plans that others recorded, until they agree with native.
        self._proofs: dict[PlanKey, Proof] = {}
        captures.attach(core)
        warm_up.attach()

    def __len__(self) -> int:
        return len(self.table.entries())

    def __iter__(self) -> Iterator[PlanInfo]:
        for entry in self.table.entries():
            yield PlanInfo(entry.key, entry.hits, entry.bytes, entry.steps, entry.proven)

    def __repr__(self) -> str:
        return f"<Plans of {self.override.name!r}: {self.summary()}>"

    @property
    def hits(self) -> int:
        """Replays of the present plans."""
        return sum(plan.hits for plan in self)

    @property
    def bytes(self) -> int:
        """Host memory of the present plans."""
        return sum(plan.bytes for plan in self)

    @property
    def recordings(self) -> int:
        """The recorded runs that count against the limit. Dropping the plans sets it to what
        replays have earned, at most once in ten seconds.
        """
        return int(self.table.recordings)

    @property
    def stopped(self) -> bool:
        """Whether recording has stopped: shapes changed too often, or nothing could be recorded."""
        stopped = self.table.stopped or self.table.given_up
        return bool(self.override.launch_plan and stopped)

    def clear(self) -> None:
        """Drop every plan. Calls that replay one finish. Later calls are recorded again, as far as
        recordings are left. The free ones are restored at most once in ten seconds.
        """
        self.table.clear()
        self._candidates.clear()
        self._proofs.clear()
        self.readiness.forget_loaded()
        self._logged_stopped = False

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict that `json` can write."""
        return {
            "plans": [plan.as_dict() for plan in self],
            "refusals": dict(self.refusals),
            "recordings": self.recordings,
            "stopped": self.stopped,
            "readiness": [state.as_dict() for state in self.readiness.states()],
        }

    def summary(self) -> str:
        """One line for people: how many plans, what was refused and why."""
        if not self.override.launch_plan:
            return "no launch plans"
        parts = [
            f"{_counted(len(self), 'plan')}, {_counted(self.hits, 'replay')}, {self.bytes} bytes"
        ]
        if self.refusals:
            reason = next(reversed(self.refusals.values()))
            kinds = _counted(len(self.refusals), "kind")
            parts.append(f"{kinds} of calls without one, the last because: {reason}")
        if self.table.given_up:
            parts.append("given up")
        elif self.table.stopped:
            parts.append("stopped recording, its calls' shapes change too often")
        return "; ".join(parts)

    def predict(self, call: Call, *, differentiated: bool = False) -> tuple[bool, str]:
        """Predict what happens to a call for which the override's condition holds.

        Args:
            call: the call.
            differentiated: whether the override's own derivative would be the call's, so that the
                kernels of its backward have to be ready, too.

        Returns:
            Whether the override takes it, and how, or why not, as text.
        """
        takes, how = self._predict(call, differentiated)
        state = self.readiness.state(describe_call(call))
        if takes and state is not None and state.why_no_worker:
            return True, f"{how}; {state}"
        return takes, how

    def predict_derivative(self, call: Call) -> bool:
        """Predict what :meth:`may_differentiate` answers, but ask for no kernels."""
        # Without a key the core has nobody asked.
        return not self._has_key(call) or self._why_not_differentiated(call) is None

    def _has_key(self, call: Call) -> bool:
        schema = call.op.overload._schema
        return self._core.has_plan_key(call.values, schema.name, schema.overload_name)

    def _predict(self, call: Call, differentiated: bool) -> tuple[bool, str]:
        label = describe_call(call)
        if (plan := next((each for each in self if each.key == label), None)) is not None:
            compared = "natively so far: its launch plan is compared with native"
            return (True, "by a launch plan") if plan.is_proven else (False, compared)
        has_key = self._has_key(call)
        why_not = self._why_not_differentiated if differentiated else self._why_not_ready
        if has_key and (not_ready := why_not(call)) is not None:
            return False, not_ready
        unplanned = self.override.unplanned
        runs_in_python = unplanned is None or unplanned.holds(call.named)
        only = "" if runs_in_python else self._why_not_python(call)
        reason = self.refusals.get(label)
        if depends_on_random_numbers(call):
            reason = "it depends on random numbers"
        elif not has_key:
            reason = (
                "an argument is of a kind that a plan's key cannot hold, there are too many, or "
                "two share memory but no storage"
            )
        if not self.override.launch_plan:
            return runs_in_python, f"in Python{only}"
        if reason is None and self.table.given_up:
            reason = "none of the override's calls could be"
        if reason is not None:
            return runs_in_python, f"in Python: no launch plan can be recorded, {reason}{only}"
        if self.table.stopped:
            return (
                unplanned is not None and runs_in_python,
                "in Python: it has no launch plan, and recording has stopped, since the calls' "
                f"shapes change too often{only}",
            )
        return runs_in_python, f"in Python until its launch plan is recorded{only}"

    def _why_not_python(self, call: Call) -> str:
        """Why a call is not worth running in Python, as the end of a sentence."""
        unplanned = self.override.unplanned
        if unplanned is None or self.override.declaration.unplanned is not None:
            return f", and only {unplanned!r} is worth running in Python"
        return f", which is {unplanned.failure(call.named)}"  # its table says so

    def _why_not_ready(self, call: Call) -> str | None:
        """Why native runs a call until its kernels are compiled; None if they are."""
        if not self.table.gated or _is_routed_by_itself(call):
            return None
        label = describe_call(call)
        # Below autograd nothing tells whether the call is differentiated.
        state = self.readiness.state(label) or self.readiness.state(label + _DIFFERENTIATED)
        return _why_not(state)

    def _why_not_differentiated(self, call: Call) -> str | None:
        """Why native runs a call until its kernels and those of its backward are compiled."""
        if not self._waits_to_differentiate(call):
            return None
        return _why_not(self.readiness.state(describe_call(call) + _DIFFERENTIATED))

    def _waits_to_differentiate(self, call: Call) -> bool:
        """Whether a call gets the override's own derivative only once its kernels are ready."""
        if not self.table.gated or self.table.runs_all or _is_routed_by_itself(call):
            return False
        # Checkpointing runs it again, and expects as many tensors saved.
        return not saved_tensors.are_hooked()

    # Called by the router.

    def ask_for_kernels(self, call: Call, keyset: torch.DispatchKeySet, key: PlanKey) -> bool:
        """Have the kernels of a call made ready.

        Args:
            call: the arguments.
            keyset: the call's dispatch keys.
            key: the core's `PlanKey` of the call.

        Returns:
            Whether the call is to run as it is.
        """
        if self.is_unproven(key):  # in a capture nothing can be compared with native
            self.readiness.warn_if_captured(call)
            return False
        return self.readiness.ask(call, keyset, Kind(key), describe_call(call))

    def may_differentiate(self, call: Call, keyset: torch.DispatchKeySet, key: PlanKey) -> bool:
        """Whether the kernels of a call and of its backward are ready; else they are made so.

        Args:
            call: the arguments, of which some get a gradient by the override's own derivative.
            keyset: the call's dispatch keys.
            key: the core's `PlanKey` of the call.
        """
        if not self._waits_to_differentiate(call):
            return True
        self.table.set_asked(key)
        label = f"{describe_call(call)}{_DIFFERENTIATED}"
        return self.readiness.ask(call, keyset, Kind(key, _needs(call)), label)

    def _install_loaded(self, plan: Plan, kind: Kind, label: str) -> None:
        """Take a plan that another process recorded."""
        if plan.watches_hooks:
            _watch_hooks()
        with _installing:
            if len(self._proofs) >= MAX_PLANS:  # those of plans that were evicted
                for each in filter(lambda key: not self.table.find(key), list(self._proofs)):
                    self._proofs.pop(each, None)
            self._proofs[kind.key] = Proof(plan, waits=self.table.only_loaded)
            self.table.install(kind.key, plan, label, self.table.generation, proven=False)

    def is_unproven(self, key: PlanKey) -> bool:
        """Whether a plan for this key must agree with native before it serves calls."""
        # One that was evicted, or is of a process that was forked, is not there.
        return key in self._proofs and self.table.find(key)

    def prove(
        self, router: Router, call: Call, key: PlanKey, run_native: Callable[[Call], Any]
    ) -> Any:
        """Have native serve a call, and compare what the plan of its key does with that.

        Args:
            router: the core's router.
            call: the arguments.
            key: the core's `PlanKey` of the call.
            run_native: runs the native kernel on a call.

        Returns:
            Native's result.
        """
        proof = self._proofs.get(key)
        if proof is None:  # another thread has finished it
            return run_native(call)
        result = proof.run(router, call, run_native)
        if self._proofs.get(key) is not proof:  # the plans were dropped meanwhile
            return result
        if proof.difference:
            self._proofs.pop(key, None)
            self.table.drop(key)
            self.readiness.drop(Kind(key), f"it differs from native: {proof.difference}")
        elif proof.is_done:
            self._proofs.pop(key, None)
            self.table.prove(key)
        return result

    def begin(self, router: Router, call: Call) -> Recording:
        """Start recording a call of a key that has no plan.

        Args:
            router: the core's router.
            call: the arguments.
        """
        from opgraft.plan.recording import Recording
        from opgraft.router import device

        self.table.count_recording()
        where = device.of_tensors(call) or torch.device("cpu")
        return Recording(self._core, router, call, where)

    def end(self, recording: Recording, key: PlanKey, result: Any) -> None:
        """Finish a recording. Its plan awaits a trial.

        Args:
            recording: what :meth:`begin` returned.
            key: the core's `PlanKey` of the call.
            result: what the impl returned.
        """
        candidate = self._candidate(key)
        candidate.attempts += 1
        candidate.plan = recording.finish(result)
        if candidate.plan is None:
            self._handle_refusal(key, recording.call, candidate, recording.refusal)
        self._log_stopped()

    def awaits_trial(self, key: PlanKey) -> bool:
        """Whether a call with this key was recorded, and its plan was not tried yet."""
        candidate = self._candidates.get(key)
        return candidate is not None and candidate.plan is not None

    def try_out(
        self, router: Router, call: Call, key: PlanKey, impl: Callable[[Call], Any]
    ) -> Plan | None:
        """Try the recorded plan of a call's key, and install it.

        Args:
            router: the core's router.
            call: the arguments, which do not change.
            key: the core's `PlanKey` of the call.
            impl: runs the impl on a call.

        Returns:
            The plan; None if there is none, so that the call must run in Python.
        """
        from opgraft.plan.trial import Trial, TrialFailed

        candidate = self._candidate(key)
        recorded, candidate.plan = candidate.plan, None
        if recorded is None:  # another thread has taken it
            return None
        candidate.attempts += 1
        self.table.count_recording()
        generation = self.table.generation
        try:
            Trial(self._core, router, call, key).run(impl, recorded)
        except TrialFailed as failure:
            self._handle_refusal(key, call, candidate, str(failure), is_final=failure.is_final)
            self._log_stopped()
            return None
        self._candidates.pop(key, None)
        label = describe_call(call)
        # It is not installed if the plans were dropped since.
        if not self.table.install(key, recorded, label, generation):
            return None
        log.debug("%s: recorded a launch plan for %s: %s", self.override.name, label, recorded)
        self._log_stopped()
        return recorded

    def _handle_refusal(
        self,
        key: PlanKey,
        call: Call,
        candidate: _Candidate,
        reason: str,
        *,
        is_final: bool = False,
    ) -> None:
        if is_final or candidate.attempts >= MAX_ATTEMPTS:
            self._refuse(key, call, reason)

    def _candidate(self, key: PlanKey) -> _Candidate:
        candidate = self._candidates.pop(key, None) or _Candidate()
        while len(self._candidates) >= MAX_CANDIDATES:
            # Evict the oldest. `pop` has a default because another thread may evict it first.
            self._candidates.pop(next(iter(self._candidates), key), None)
        self._candidates[key] = candidate
        return candidate

    def _refuse(self, key: PlanKey, call: Call, reason: str) -> None:
        self._candidates.pop(key, None)
        self.table.refuse(key)
        said = reason in self.refusals.values()
        if len(self.refusals) < MAX_PLANS:
            self.refusals[describe_call(call)] = reason
        if not said:
            log.debug(
                "%s: calls with %s run in Python, no launch plan can be recorded: %s",
                self.override.name,
                describe_call(call),
                reason,
            )
        if self.table.given_up:
            log.info(
                "%s: given up recording launch plans, every call runs in Python: %s",
                self.override.name,
                reason,
            )

    def _log_stopped(self) -> None:
        if not self.table.stopped or self._logged_stopped:
            return
        self._logged_stopped = True
        log.info(
            "%s: stopped recording launch plans after %d recordings: its calls' shapes change too "
            "often; replays earn further recordings",
            self.override.name,
            self.recordings,
        )


def for_override(override: Override) -> Plans | None:
    """The plans of an override; None if there can be none.

    There are none without `launch_plan=True`, with `OPGRAFT_PLANS=0`, without the compiled core.
    With a derivative of its own and `when_not_ready="native"` it has a table of what is ready.
    """
    wanted = override.launch_plan or override.when_not_ready == "native"
    if not wanted or override.unavailable or not env.plans():
        return None
    core = loader.in_use()
    return None if core is None else Plans(override, core)


@functools.cache
def _watch_hooks() -> None:
    """Notice when Triton's launch hooks are set, which the process may import at any time."""
    from opgraft.plan import triton_launches

    imports.after("triton.knobs", lambda _: triton_launches.watch_hooks())


#: What a kind of call is called for people whose backward's kernels are to be ready, too.
_DIFFERENTIATED = ", with its derivative"


def _why_not(state: State | None) -> str | None:
    """Why native runs a call whose kernels are in this state; None if they are ready."""
    if state is not None and state.status == "ready":
        return None
    return f"natively so far: {state or 'nobody has asked for its kernels yet'}"


def _needs(call: Call) -> tuple[bool, ...]:
    return tuple(isinstance(each, torch.Tensor) and each.requires_grad for each in call.values)


def _is_routed_by_itself(call: Call) -> bool:
    """Whether what runs a call depends on the call alone, as the core has it."""
    return torch.are_deterministic_algorithms_enabled() or depends_on_random_numbers(call)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def describe_call(call: Call) -> str:
    """A call's metadata as text.

    >>> import torch
    >>> from opgraft.ops.schema import resolve
    >>> describe_call(resolve("aten::_softmax").bind((torch.ones(2, 3), -1, False), {}))
    'self float32[2, 3], dim -1, half_to_float False'
    """
    named = call.named.items()
    return ", ".join(f"{name} {describe(value, strides, accelerator)}" for name, value in named)
