"""Has the kernels of many calls compiled at the same time, before the calls are made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import torch

from opgraft.ops.schema import Call
from opgraft.ready import here, pool, request, triton_kernels
from opgraft.ready.request import Compiled
from opgraft.registry import Override
from opgraft.router import device

log = logging.getLogger(__name__)

_STEP_SECONDS = 0.2


def compile_ahead(
    calls: Iterable[tuple[Override, Call]],
    tell: Callable[[int, int], None],
    is_over: Callable[[], bool],
) -> None:
    """Have workers compile what calls need. Returns when they are done.

    A kernel that none of them can compile, for whatever reason, is compiled by the call itself.

    Args:
        calls: the overrides that they go to, and the calls. A generator needs no memory for all of
            them: none is kept.
        tell: called with how many calls are done, and how many there are.
        is_over: whether to wait no longer.
    """
    waiting = _Waiting(is_over)
    for override, call in calls:
        waiting.submit(override, call)
    while not waiting.wait(_STEP_SECONDS) and not is_over():
        tell(*waiting.counts())


class _Waiting:
    """What was submitted, and how much of it is done."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._lock = threading.Lock()
        self._done = threading.Event()
        #: What workers were asked, and what of it is not done, by digests.
        self._asked: set[str] = set()
        self._pending: set[str] = set()

    def submit(self, override: Override, call: Call) -> None:
        """Have a worker compile for a call, unless one was asked the same before."""
        keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, override.dispatch_key))
        try:
            asked = request.request(override, call, keyset)
        except request.CannotAsk:
            return
        digest = request.digest(asked)
        if digest in self._asked:
            return
        where = device.of_tensors(call) or torch.device("cpu")

        def finish(reason: str = "") -> None:
            self._finish(digest, reason)

        def compiled(answer: Compiled) -> None:
            try:
                here.import_ahead(override)
                if where.type == "cuda":
                    triton_kernels.load(answer["triton"], where)
            except BaseException as error:  # whatever a module raises while it is imported
                finish(f"{type(error).__name__}: {error}")
            else:
                finish()

        job = pool.Job(
            asked,
            wanted=lambda: int(not self._is_over()),
            started=lambda by: None,
            compiled=compiled,
            failed=lambda reason, may_run_here: finish(reason),
            dropped=finish,
            is_kept=True,
        )
        with self._lock:
            self._asked.add(digest)
            self._pending.add(digest)
            self._done.clear()
        try:
            pool.shared().submit(job)
        except Exception as error:  # no thread can be started
            finish(str(error))

    def _finish(self, digest: str, reason: str) -> None:
        if reason:
            log.debug("a call compiles its kernels itself: %s", reason)
        with self._lock:
            self._pending.discard(digest)
            if not self._pending:
                self._done.set()

    def counts(self) -> tuple[int, int]:
        """How many are done, and how many there are."""
        with self._lock:
            return len(self._asked) - len(self._pending), len(self._asked)

    def wait(self, seconds: float) -> bool:
        """Whether all are done, which is waited for so long."""
        done, asked = self.counts()
        return done == asked or self._done.wait(seconds)
