"""Comparing a plan that another process recorded with native, before it serves calls.

Who recorded it had no device, or was another process on another day: nothing has shown that it does
here what it should. So native serves the first calls, and the plan is replayed beside it. What the
two returned and wrote is compared on the device, and no call waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from opgraft.ops.schema import Call
from opgraft.router import contract, copies, device, outputs, threads
from opgraft.router.outputs import OpResult

if TYPE_CHECKING:
    from opgraft.core.interface import Plan, Router

__all__ = ["MAX_SKIPPED", "REPLAYS", "Proof"]

#: Replays that must agree with native. Each fills the plan's memory with another byte first: what
#: no kernel wrote agrees by chance once at most.
_POISONS = (0xFF, 0x00)
REPLAYS = len(_POISONS)
#: Comparisons for which there was no memory, before a plan is given up.
MAX_SKIPPED = 8


class Proof:
    """A plan that must agree with native.

    Args:
        plan: the plan.
        waits: whether a call waits until the comparisons of the calls before are done. If not, how
            many calls are native's depends on the device's queue, and differs between ranks.
    """

    def __init__(self, plan: Plan, *, waits: bool = False) -> None:
        self._plan = plan
        self._waits = waits
        self._lock = threading.Lock()
        #: What fills the plan's memory in the replays that are left.
        self._poisons = list(_POISONS)
        # Between ranks it must not depend on their numbers which calls are native's.
        self._finite = not waits
        self._skipped = 0
        self._verdicts: list[_Verdict] = []
        #: How the plan differs from native; empty as long as it does not.
        self.difference = ""

    @property
    def is_done(self) -> bool:
        """Whether the plan has agreed as often as it must."""
        with self._lock:
            return len(self._verdicts) == REPLAYS and all(each.agrees for each in self._verdicts)

    def run(self, router: Router, call: Call, run_native: Callable[[Call], Any]) -> Any:
        """Run native for a call, and the plan beside it.

        Args:
            router: the core's router.
            call: the arguments.
            run_native: runs the native kernel on a call.

        Returns:
            Native's result.

        Raises:
            Exception: native's.
        """
        with self._lock:
            poison = self._poisons.pop(0) if self._poisons else None
        if poison is None:
            result = run_native(call)
            self._look()
            return result
        ours = self._copied(call, poison)
        if ours is None:
            return run_native(call)
        try:
            result = run_native(call)
        except BaseException:
            self._leave(poison)  # nothing was compared: a later call is
            raise
        try:
            self._compare(router, ours, call, result, poison)
        except Exception as error:  # a launch that fails, a dtype that few ops support
            self._note(error, poison)
        except BaseException:  # an interrupt, which says nothing of the plan
            self._leave(poison)
            raise
        return result

    def _copied(self, call: Call, poison: int) -> Call | None:
        """The call with copies of what it writes to; None where there are none, which is noted."""
        if not call.op.writes:
            return call
        try:
            with threads.scope(threads.EVERYTHING):
                return copies.copy_call(call)
        except Exception as error:  # what cannot be copied is native's, and no error
            self._note(error, poison)
        except BaseException:
            self._leave(poison)
            raise
        return None

    def _compare(self, router: Router, ours: Call, call: Call, native: Any, poison: int) -> None:
        op = call.op
        with threads.scope(threads.EVERYTHING), torch.no_grad():
            replayed = router.replay(self._plan, ours.values, poison=poison)
            actual = OpResult(op, outputs.as_outputs(op, replayed), ours.tensors())
            expected = OpResult(op, outputs.as_outputs(op, native), call.tensors())

            def strides_promised(index: int, item: int | None, output: torch.Tensor) -> bool:
                return contract.promises_strides(call, index, item, output)

            for label, difference in outputs.compare(actual, expected, strides_promised):
                self.difference = f"{label}: {difference.removeprefix('with ')}"
                return
            pairs = [
                *outputs.comparable_outputs(actual, expected),
                *outputs.comparable_writes(ours, call),
            ]
            verdict = _Verdict(pairs, poison, finite=self._finite)
        with self._lock:
            self._verdicts.append(verdict)

    def _note(self, error: Exception, poison: int) -> None:
        """Note why a replay was not compared, which memory that is short leaves to a later call."""
        if device.is_out_of_memory(error):
            self._skip(poison)
        else:
            self.difference = f"{type(error).__name__}: {error}"

    def _leave(self, poison: int) -> None:
        """Leave a replay to a later call."""
        with self._lock:
            self._poisons.append(poison)

    def _skip(self, poison: int) -> None:
        self._leave(poison)
        with self._lock:
            self._skipped += 1
            if self._skipped >= MAX_SKIPPED:
                self.difference = "there was no memory to compare it"

    def _look(self) -> None:
        with self._lock:
            verdicts = list(self._verdicts)
        for each in verdicts:
            each.look(waits=self._waits)
            if each.difference:
                self.difference = each.difference
            elif each.is_open:
                self._compare_again(each)

    def _compare_again(self, verdict: _Verdict) -> None:
        """Have a later call compared with whatever numbers there are."""
        with self._lock:
            if verdict in self._verdicts:  # else another thread was faster
                self._verdicts.remove(verdict)
                self._poisons.append(verdict.poison)
                self._finite = False


class _Verdict:
    """Whether two results agree: what the device finds out, once it has.

    Args:
        pairs: what is compared, with its name.
        poison: what filled the plan's memory.
        finite: whether all numbers are expected to be finite.
    """

    def __init__(self, pairs: list[tuple[str, Any, Any]], poison: int, *, finite: bool) -> None:
        self.poison = poison
        # Without it a thread would see the list that another one clears, and no difference there.
        self._lock = threading.Lock()
        self._found: list[tuple[str, outputs.Difference]] = []
        #: What differs; empty as long as nothing is known to.
        self.difference = ""
        self.agrees = False
        #: Whether it is known that nothing can be said, because not all numbers were finite.
        self.is_open = False
        for label, one, other in pairs:
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                self._found.append((label, outputs.Difference(one, other, finite=finite)))
            elif one != other and not (one != one and other != other):
                self.difference = f"{label}: {one!r}, native returns {other!r}"
        devices = (found.device for _, found in self._found)
        self._device = next((each for each in devices if each.type != "cpu"), None)
        self._event = None if self._device is None else torch.cuda.Event()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        else:
            self.look()

    def look(self, *, waits: bool = False) -> None:
        """Find out, if the device is done."""
        with self._lock:
            self._look(waits=waits)

    def _look(self, *, waits: bool) -> None:
        if self.agrees or self.difference or self.is_open:
            return
        if self._event is None:
            self._read()
            return
        if waits:
            self._event.synchronize()
        elif not self._event.query():
            return
        # On a stream with nothing in it: to read a value waits for what its stream has to do.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._read()

    def _read(self) -> None:
        found = [(label, difference.found()) for label, difference in self._found]
        if labels := [label for label, differs in found if differs]:
            self.difference = f"{', '.join(labels)}: values differ by more than rounding"
        elif any(differs is None for _, differs in found):
            self.is_open = True
        else:
            self.agrees = True
        self._found.clear()
