"""The worker processes: started at the first need, ended when idle. No call waits for one."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import math
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from opgraft.ready import claims, request
from opgraft.ready.request import Request

log = logging.getLogger(__name__)

#: Requests that wait for a worker. Of more, the one that fewest calls wanted is let go.
MAX_WAITING = 256
#: Seconds that a worker may take for one request, and to start.
COMPILE_SECONDS = 300.0
START_SECONDS = 120.0
#: Seconds in which a worker that is killed must have ended.
END_SECONDS = 5.0
#: Seconds without a request after which a worker ends.
IDLE_SECONDS = 60.0
#: Seconds between two looks at whether a claim of another process is gone.
POLL_SECONDS = 0.05


class WorkerFailed(Exception):
    """A worker could not be started, did not answer in time, or ended."""


@dataclass(eq=False)
class Job:
    """A request, and whom to tell what became of it. All are called by a thread of the pool's."""

    asked: Request
    #: How many calls wanted it so far.
    wanted: Callable[[], int]
    started: Callable[[int], None]
    #: With the names of the kernels.
    compiled: Callable[[list[str]], None]
    #: With the reason, and whether the impl may be run in this process instead.
    failed: Callable[[str, bool], None]
    #: It was let go, and may be asked for again.
    dropped: Callable[[], None]
    since: float = field(default_factory=time.monotonic)


def most_workers() -> int:
    """How many workers of a machine compile at a time, those of all its processes together."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(8, (cores or 2) // 2))


class Pool:
    """A queue of jobs and the threads that have workers do them."""

    def __init__(self, command: list[str] | None = None, *, workers: int | None = None) -> None:
        self._command = command or [sys.executable, "-m", "opgraft.ready.worker"]
        self._most = workers or most_workers()
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._attendants: list[_Attendant] = []
        self._closed = False

    def submit(self, job: Job) -> None:
        """Have a job done. Returns at once."""
        dropped: Job | None = None
        with self._changed:
            if self._closed:
                dropped = job
            else:
                self._waiting.append(job)
                if len(self._waiting) > MAX_WAITING:
                    dropped = min(self._waiting, key=lambda each: each.wanted())
                    self._waiting.remove(dropped)
                idle = sum(each.is_idle for each in self._attendants)
                if idle < len(self._waiting) and len(self._attendants) < self._most:
                    attendant = _Attendant(self, self._command, self._most)
                    self._attendants.append(attendant)
                    attendant.start()
                self._changed.notify()
        if dropped is not None:
            dropped.dropped()

    def next(self, attendant: _Attendant) -> Job | None:
        """The job that most calls want; None where there was none for a while: then it ends."""
        deadline = time.monotonic() + IDLE_SECONDS
        with self._changed:
            attendant.is_idle = True
            while not self._waiting and not self._closed and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            attendant.is_idle = False
            if not self._waiting or self._closed:
                self._leave(attendant)
                return None
            job = max(self._waiting, key=lambda each: each.wanted())
            self._waiting.remove(job)
            return job

    def left(self, attendant: _Attendant) -> None:
        """An attendant has ended, however it did."""
        with self._changed:
            self._leave(attendant)

    def _leave(self, attendant: _Attendant) -> None:
        if attendant in self._attendants:
            self._attendants.remove(attendant)

    def workers(self) -> list[int]:
        """The process numbers of the workers that there are."""
        with self._changed:
            found = [each.process for each in self._attendants]
        return [process.pid for process in found if process is not None]

    def close(self) -> None:
        """End the workers; what is waiting is let go."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            attendants = list(self._attendants)
            self._changed.notify_all()
        for each in attendants:
            each.interrupt()
        for each in attendants:  # they give back what they claimed
            each.join(END_SECONDS)
        for job in waiting:
            job.dropped()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is compiled any more."""
        return self._closed


class _Attendant(threading.Thread):
    """Starts one worker, sends it requests, reads its answers, and ends it."""

    def __init__(self, pool: Pool, command: list[str], slots: int) -> None:
        super().__init__(name="opgraft: attends a worker", daemon=True)
        self.is_idle = False
        self.process: subprocess.Popen[bytes] | None = None
        self._pool = pool
        self._command = command
        self._slots = [claims.Claim(f"worker-{n}") for n in range(slots)]
        self._unread = b""
        self._errors: IO[bytes] = io.BytesIO()

    def run(self) -> None:
        try:
            while (job := self._pool.next(self)) is not None:
                self._do(job)
        finally:
            self.kill()
            self._pool.left(self)

    def _do(self, job: Job) -> None:
        claim = claims.Claim(request.digest(job.asked))
        try:
            # Another rank may be at it: what it compiles is in the DSL's cache then. One that takes
            # longer than it may is not waited for.
            self._wait_for(claim.take, COMPILE_SECONDS)
            try:
                self._wait_for(lambda: any(slot.take() for slot in self._slots), math.inf)
                self._start()
                process = self.process
                job.started(0 if process is None else process.pid)
                answer = self._ask(job.asked, COMPILE_SECONDS)
            finally:
                for each in (*self._slots, claim):
                    each.release()
        except (WorkerFailed, OSError) as error:
            self.kill()
            if self._pool.is_closed:
                job.dropped()
            else:
                job.failed(str(error), False)
            return
        if "compiled" in answer:
            job.compiled(answer["compiled"])
        else:
            job.failed(str(answer.get("failed")), True)

    def _wait_for(self, take: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not take() and time.monotonic() < deadline:
            if self._pool.is_closed:
                raise WorkerFailed("the process ends")
            time.sleep(POLL_SECONDS)

    def _start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self.kill()
        # A worker has no GPU, no packs and no overrides, whatever this process has.
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OPGRAFT_DISABLE": "1",
            "OPGRAFT_PACKS": "none",
        }
        pipe = subprocess.PIPE
        self._unread = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (kept as long as the process)
        self.process = subprocess.Popen(
            [*self._command, str(os.getpid())],
            stdin=pipe,
            stdout=pipe,
            stderr=self._errors,
            env=environment,
            bufsize=0,
        )
        self._ask(sys.path, START_SECONDS)

    def _ask(self, message: Any, seconds: float) -> dict[str, Any]:
        process = self.process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerFailed(self._why(process)) from None
        return dict(json.loads(self._line(process, time.monotonic() + seconds)))

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerFailed("the worker that compiled it did not answer in time")
                read = os.read(process.stdout.fileno(), 1 << 16)
                if not read:
                    raise WorkerFailed(self._why(process))
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _why(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        why = f"the worker that compiled it ended with {process.returncode}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{why}: {said[-1]}" if said else why

    def interrupt(self) -> None:
        """End the worker's process, from another thread: this one then finds it gone."""
        process = self.process
        if process is not None:
            process.kill()

    def kill(self) -> None:
        """End the worker, if there is one, and wait until it has."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            self._errors.close()


_lock = threading.Lock()
_pool: Pool | None = None


def shared() -> Pool:
    """The pool of this process."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = Pool()
            atexit.register(_pool.close)
        return _pool


def _forget_in_child() -> None:
    """The workers are the parent's, and so are the threads."""
    global _pool, _lock
    _lock = threading.Lock()
    if _pool is not None:
        atexit.unregister(_pool.close)
    _pool = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
