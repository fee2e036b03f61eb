"""Has the kernels of many calls compiled at the same time, before the calls are made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable

import torch

from opgraft.ops.schema import Call
from opgraft.ready import here, pool, request, triton_kernels
from opgraft.ready.request import Compiled
from opgraft.registry import Override
from opgraft.router import device

log = logging.getLogger(__name__)

_STEP_SECONDS = 0.2


class Ahead:
    """What workers compile, by what it is for. Only one thread uses it.

    A worker's answer is stored, and taken up by the thread that waits for it: that thread measures
    meanwhile, and no other one is to keep it from the interpreter. A kernel that no worker can
    compile, for whatever reason, is compiled by the call itself.

    Args:
        is_over: whether to compile and to wait no longer.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._was_closed = False
        self._is_over = lambda: self._was_closed or is_over()
        self._lock = threading.Lock()
        #: Set when one more job is done.
        self._progress = threading.Event()
        #: The digests of what was asked for each purpose.
        self._purposes: dict[Hashable, set[str]] = {}
        #: By the digest of what was asked: the job's end, None while there is none.
        self._ends: dict[str, Callable[[], None] | None] = {}

    def close(self) -> None:
        """Let go what no worker has begun."""
        self._was_closed = True

    def submit(self, purpose: Hashable, override: Override, call: Call) -> None:
        """Have a worker compile for a call, unless one was asked the same before. No call is kept.

        Args:
            purpose: what to :meth:`wait` for.
            override: that the call goes to.
            call: a call like those that are to come.
        """
        keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, override.dispatch_key))
        try:
            asked = request.request(override, call, keyset)
        except request.CannotAsk:
            return
        asked["builds_launchers"] = True  # else each is built here, by a C compiler
        digest = request.digest(asked)
        self._purposes.setdefault(purpose, set()).add(digest)
        with self._lock:
            if digest in self._ends:
                return
            self._ends[digest] = None
        where = device.of_tensors(call) or torch.device("cpu")

        def compiled(answer: Compiled) -> None:
            self._end(digest, lambda: _load(override, answer, where))

        def failed(reason: str = "") -> None:
            self._end(digest, lambda: log.debug("a call compiles its kernels itself: %s", reason))

        job = pool.Job(
            asked,
            wanted=lambda: int(not self._is_over()),
            started=lambda by: None,
            compiled=compiled,
            failed=lambda reason, may_run_here: failed(reason),
            dropped=failed,
            is_kept=True,
        )
        try:
            pool.shared().submit(job)
        except Exception as error:  # no thread can be started
            failed(str(error))

    def _end(self, digest: str, take_up: Callable[[], None]) -> None:
        with self._lock:
            self._ends[digest] = take_up
        self._progress.set()

    def wait(self, purpose: Hashable, tell: Callable[[int, int], None]) -> None:
        """Wait until all that a purpose needs is compiled, and load it.

        Args:
            purpose: of `submit`; one for which nothing was submitted is not waited for.
            tell: called with how many calls are done, and how many there are, while it waits.
        """
        needed = self._purposes.pop(purpose, set())
        while needed:
            self._progress.clear()
            with self._lock:
                ends = {digest: self._ends[digest] for digest in needed}
            for digest, take_up in ends.items():
                if take_up is not None:
                    needed.discard(digest)
                    self._ends[digest] = _nothing
                    take_up()
            if needed and not self._progress.wait(_STEP_SECONDS):
                if self._is_over():
                    return
                tell(*self._counts())

    def _counts(self) -> tuple[int, int]:
        with self._lock:
            return sum(end is not None for end in self._ends.values()), len(self._ends)


def _nothing() -> None:
    """What was compiled is loaded already."""


def _load(override: Override, answer: Compiled, where: torch.device) -> None:
    try:
        here.import_ahead(override)
        if where.type == "cuda":
            triton_kernels.load(answer["triton"], where)
    except (Exception, SystemExit) as error:  # whatever a module raises while it is imported
        log.debug("a call loads its kernels itself: %s: %s", type(error).__name__, error)
