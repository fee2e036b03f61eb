"""Who compiles: worker processes, or else a thread of this one. Started at the first need, ended
when idle. No call waits for them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from opgraft.ready import claims, request, worker
from opgraft.ready.request import Compiled, Request

log = logging.getLogger(__name__)

#: Requests that wait for a worker. Of more, the one that fewest calls wanted is let go.
MAX_WAITING = 256
#: Seconds that a worker may take for one request, and to start.
COMPILE_SECONDS = 300.0
START_SECONDS = 300.0
#: Seconds in which a worker that is killed must have ended.
END_SECONDS = 5.0
#: Seconds without a request after which a worker ends.
IDLE_SECONDS = 60.0
#: Seconds between two looks at whether a claim of another process is gone: at first, and at most.
#: What that one has compiled is loaded so much later.
POLL_SECONDS = 0.05
MAX_POLL_SECONDS = 0.2
#: Seconds between two looks whether another process's worker is at work in an idle one's place.
LOOK_SECONDS = 1.0
#: What a worker runs, with this process's path. It is set before anything is imported: a worker
#: finds what this process finds, and nothing of the folder that it happens to be started in.
_PROGRAM = """
import sys
sys.path[:] = {path!r}
import runpy
runpy.run_module("opgraft.ready.worker", run_name="__main__", alter_sys=True)
"""


class WorkerFailed(Exception):
    """A worker did not answer in time, or ended."""


class WorkerEnded(WorkerFailed):
    """A worker ended while something was asked of it."""


class CannotStart(Exception):
    """No worker can be started here."""


class EndedAtStart(CannotStart):
    """A worker ended before it could be asked anything, which says nothing of what is asked."""


class ImplFailed(Exception):
    """A worker cannot run the impl without memory."""


class LetGo(Exception):
    """A job cannot be done now, which says nothing of the job."""


@dataclass(eq=False)
class Job:
    """What is to be compiled, and whom to tell what became of it.

    All are called by a thread of the pool's.
    """

    #: What a worker is told; or what this process runs instead.
    work: Request | Callable[[], None]
    #: How many calls wanted it so far; 0 where none will any more.
    wanted: Callable[[], int]
    #: With who compiles, for people.
    started: Callable[[str], None]
    #: With the kernels.
    compiled: Callable[[Compiled], None]
    #: With the reason, and whether the impl may be run in this process instead.
    failed: Callable[[str, bool], None]
    #: It was let go, and may be asked for again.
    dropped: Callable[[], None]
    #: Whether it is done however many wait, because it may not be asked for again.
    is_kept: bool = False
    #: Whether another process has done it since it was asked for; then whom to tell has been told.
    done_elsewhere: Callable[[], bool] = lambda: False


#: However many cores a machine has: a program has other things to do with its memory.
_most = 8
#: Whether this process's workers have places of their own. Of two processes that are at work for
#: long, each would end the other one's workers again and again.
_has_own_places = False


def most_workers() -> int:
    """How many workers a machine has at a time, those of all its processes together."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_most, (cores or 2) // 2))


def allow_workers(most: int) -> None:
    """Let this process start more workers from now on, as far as there are cores.

    Args:
        most: beside those of all other processes.
    """
    global _most, _has_own_places
    _most, _has_own_places = max(_most, most), True


def why_no_worker() -> str:
    """Why no worker can be started here, as far as one can tell without; empty where one can."""
    if not sys.executable:
        return "no worker can be started: sys.executable names no Python"
    # The program itself, in place of an interpreter: it would do once more what it does.
    name = os.path.basename(sys.executable).lower()
    if getattr(sys, "frozen", False) or not ("python" in name or "pypy" in name):
        return f"no worker can be started: {sys.executable} is a program that has Python in it"
    if not os.access(sys.executable, os.X_OK):
        return f"no worker can be started: {sys.executable} cannot be run"
    return ""


class Pool:
    """A queue of jobs and the threads that have them done."""

    def __init__(self, attendant: type[_Attendant], most: Callable[[], int]) -> None:
        self._attendant = attendant
        self._most = most
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._attendants: list[_Attendant] = []
        self._closed = False

    def submit(self, job: Job) -> None:
        """Have a job done. Returns at once.

        Raises:
            Exception: no thread can be started.
        """
        dropped: Job | None = None
        with self._changed:
            if self._closed:
                dropped = job
            else:
                self._waiting.append(job)
                self._attend(job)
                others = [each for each in self._waiting if not each.is_kept]
                if len(others) > MAX_WAITING:
                    dropped = min(others, key=lambda each: each.wanted())
                    self._waiting.remove(dropped)
                self._changed.notify()
        if dropped is not None:
            dropped.dropped()

    def _attend(self, job: Job) -> None:
        idle = sum(each.is_idle for each in self._attendants)
        if idle >= len(self._waiting) or len(self._attendants) >= self._most():
            return
        attendant = self._attendant(self)
        self._attendants.append(attendant)
        try:
            attendant.start()
        except BaseException as error:  # too many threads, the interpreter ends, or an interrupt
            if attendant.ident is None:  # else it runs
                self._leave(attendant)
            if not self._attendants or not isinstance(error, Exception):
                self._waiting.remove(job)
                raise

    def next(self, attendant: _Attendant) -> Job | None:
        """The job that most calls want; None where there was none for a while: then it ends."""
        while (job := self._next(attendant)) is not None and job.wanted() == 0:
            job.dropped()
        return job

    def _next(self, attendant: _Attendant) -> Job | None:
        deadline = time.monotonic() + IDLE_SECONDS
        is_superseded = False
        while True:
            with self._changed:
                attendant.is_idle = True
                left = deadline - time.monotonic()
                if not (self._waiting or self._closed or is_superseded) and left > 0:
                    self._changed.wait(min(LOOK_SECONDS, left))
                    left = deadline - time.monotonic()
                if self._waiting and not self._closed:
                    attendant.is_idle = False
                    job = max(self._waiting, key=lambda each: each.wanted())
                    self._waiting.remove(job)
                    return job
                if self._closed or is_superseded or left <= 0:
                    attendant.is_idle = False
                    self._leave(attendant)
                    return None
            is_superseded = attendant.is_superseded()  # calls that submit do not wait for this

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
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = self._waiting, []
            attendants = list(self._attendants)
            self._changed.notify_all()
        for each in attendants:
            each.interrupt()
        for each in attendants:  # they give back what they claimed
            if each.ident is not None:  # else it is just being started
                each.join(END_SECONDS)
        for job in waiting:
            job.dropped()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is compiled any more."""
        return self._closed


class _Attendant(threading.Thread):
    """Has jobs done, one after the other."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(name="opgraft: has kernels compiled", daemon=True)
        self.is_idle = False
        self.process: subprocess.Popen[bytes] | None = None
        self._pool = pool

    def run(self) -> None:
        try:
            while (job := self._pool.next(self)) is not None:
                self._do(job)
        finally:
            self.end()
            self._pool.left(self)

    def _do(self, job: Job) -> None:
        try:
            compiled = self.have_done(job)
        except LetGo:
            job.dropped()
        except BaseException as error:  # whatever an impl raises, or its module, SystemExit too
            self._tell(job, error)
        else:
            if compiled is not None:
                job.compiled(compiled)

    def _tell(self, job: Job, error: BaseException) -> None:
        if self._pool.is_closed:
            job.dropped()
            return
        says_it = isinstance(error, (WorkerFailed, CannotStart, ImplFailed))
        reason = str(error) if says_it else f"{type(error).__name__}: {error}"
        job.failed(reason, isinstance(error, (CannotStart, ImplFailed)))

    def have_done(self, job: Job) -> Compiled | None:
        """Have a job done. None where another process has done it.

        Raises:
            LetGo: not now.
            BaseException: it failed.
        """
        raise NotImplementedError

    def is_superseded(self) -> bool:
        """Whether this one, which is idle, is to end since another process needs its place."""
        return False

    def interrupt(self) -> None:
        """Have this thread end soon; called by another one."""

    def end(self) -> None:
        """Called by this thread when it ends."""


class _Runner(_Attendant):
    """Does jobs itself, in this process."""

    #: Whether it is at a job. Elsewhere an interrupt would leave a lock held, for good.
    _is_working = False

    def run(self) -> None:
        with contextlib.suppress(SystemExit):  # of `interrupt`
            super().run()

    def have_done(self, job: Job) -> Compiled:
        assert callable(job.work)
        job.started("this process")
        self._is_working = True
        try:
            job.work()
        finally:
            self._is_working = False
        return {"compiled": [], "triton": [], "no_plan": "it is compiled in this process"}

    def interrupt(self) -> None:
        # Note [A thread in C++ when the interpreter ends]
        # Before Python 3.14 a daemon thread that comes back from C++ then is made to exit, and the
        # C++ frames below it abort the process. So it is told to end at its next step in Python.
        if self.ident is not None and self._is_working:
            end = ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), end)


class _Loader(_Runner):
    """Loads launch plans, in this process."""

    def interrupt(self) -> None:
        pass  # it is soon done, and holds locks meanwhile


class _Overseer(_Attendant):
    """Starts one worker, sends it requests, reads its answers, and ends it."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._unread = b""
        self._errors: IO[bytes] = io.BytesIO()
        #: The worker's place among the machine's. While it is idle, nobody holds it.
        self._place = ""
        #: The compute capability for which it compiles with CuteDSL, which can be one alone.
        self._properties: dict[str, Any] | None = None

    def have_done(self, job: Job) -> Compiled | None:
        assert not callable(job.work)
        held: list[claims.Claim] = []
        try:
            # Another rank may be at it: what it compiles is on disk then. One that takes longer
            # than it may is not waited for. Calls with one plan may begin elsewhere in memory.
            digest = request.digest(job.work["plan"] or job.work)
            held += self._claim([claims.Claim(digest)], COMPILE_SECONDS)
            if job.done_elsewhere():
                return None
            (place,) = self._claim(self._places(), math.inf)
            held.append(place)
            self._place = place.name
            try:
                answer = self._answer(job, job.work)
            except (WorkerEnded, EndedAtStart):
                # An earlier request may have broken it, or memory was short: a fresh one tries.
                self.end()
                if self._pool.is_closed:
                    raise
                answer = self._answer(job, job.work)
        except BaseException:
            self.end()
            raise
        finally:
            for each in held:
                each.release()
        if "compiled" not in answer:
            raise ImplFailed(answer.get("failed"))
        return {name: answer[name] for name in Compiled.__required_keys__}  # type: ignore[return-value]

    def _answer(self, job: Job, asked: Request) -> Any:
        if asked["device"] is not None:
            # Whatever caches what it knows of a device knows one by its name, which all have there.
            properties = asked["device"]["properties"]
            if self._properties not in (None, properties):
                self.end()
            self._properties = properties
        process = self._start()
        job.started(f"worker {process.pid}")
        return self._ask(process, asked, COMPILE_SECONDS)

    def _places(self) -> list[claims.Claim]:
        """Those of the machine's workers, this one's first. Processes begin at different ones: else
        each would end another one's idle worker."""
        most, first = most_workers(), os.getpid()
        label = f"worker-of-{os.getpid()}" if _has_own_places else "worker"
        some = [claims.Claim(f"{label}-{(first + n) % most}") for n in range(most)]
        return sorted(some, key=lambda each: each.name != self._place)

    def is_superseded(self) -> bool:
        return bool(self._place) and claims.Claim(self._place).owner() is not None

    def _claim(self, some: list[claims.Claim], seconds: float) -> list[claims.Claim]:
        """Hold one of these, as soon as no other process does; none when the time is over."""
        deadline, pause = time.monotonic() + seconds, POLL_SECONDS
        while (held := next((each for each in some if each.take()), None)) is None:
            if self._pool.is_closed:
                raise LetGo
            if time.monotonic() > deadline:
                return []
            if self.is_superseded():
                self.end()
            time.sleep(pause)
            pause = min(MAX_POLL_SECONDS, 1.2 * pause)
        return [held]

    def _start(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.end()
        if reason := why_no_worker():
            raise CannotStart(reason)
        path = [each for each in sys.path if isinstance(each, str)]  # as importing takes it
        # A worker has no GPU, no packs and no overrides, whatever this process has.
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "OPGRAFT_DISABLE": "1",
            "OPGRAFT_PACKS": "none",
        }
        # What Python does not read of the environment here, it must not read there.
        flags = ["-I"] if sys.flags.isolated else ["-E"] if sys.flags.ignore_environment else []
        pipe = subprocess.PIPE
        self._unread = b""
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (kept as long as the process)
            process = self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", _PROGRAM.format(path=path), str(os.getpid())],
                stdin=pipe,
                stdout=pipe,
                stderr=self._errors,
                env=environment,
                bufsize=0,
                start_new_session=True,  # Ctrl-C, which goes to the whole group, is the parent's
            )
        except OSError as error:
            raise CannotStart(f"no worker can be started: {error}") from error
        if self._pool.is_closed:  # whoever closed it may have found no process to end
            raise LetGo
        deadline = time.monotonic() + START_SECONDS
        try:
            while self._line(process, deadline) != worker.READY:
                pass  # what modules print that Python imports when it starts
        except WorkerEnded as error:
            raise EndedAtStart(f"no worker can be started: {error}") from None
        return process

    def _ask(self, process: subprocess.Popen[bytes], asked: Request, seconds: float) -> Any:
        assert process.stdin is not None
        self._forget_errors()
        try:
            with _without_sigpipe():
                process.stdin.write(json.dumps(asked).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerEnded(self._why(process)) from None
        return json.loads(self._line(process, time.monotonic() + seconds))

    def _forget_errors(self) -> None:
        """Empty the file of what the worker printed: only the present request explains its end."""
        file = self._errors.fileno()
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)  # the worker's own position, too: the two share it

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerFailed("the worker that compiled it did not answer in time")
                read = os.read(process.stdout.fileno(), 1 << 16)
                if not read:
                    raise WorkerEnded(self._why(process))
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _why(self, process: subprocess.Popen[bytes]) -> str:
        deadline = time.monotonic() + 1
        with contextlib.suppress(ChildProcessError):
            while not _has_ended(process) and time.monotonic() < deadline:
                time.sleep(0.01)
        _kill(process)
        why = f"the worker that compiled it ended with {process.wait()}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{why}: {said[-1]}" if said else why

    def interrupt(self) -> None:
        process = self.process
        if process is not None:
            _kill(process)

    def end(self) -> None:
        """End the worker, if there is one, and wait until it has."""
        process, self.process = self.process, None
        if process is not None:
            _kill(process)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._errors.close()


@contextlib.contextmanager
def _without_sigpipe() -> Iterator[None]:
    """A scope in which a write to a process that has ended raises. A program that lets SIGPIPE end
    it, as filters do, would end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait({signal.SIGPIPE}, 0)  # this thread's own
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker, if it has not ended, and the compilers that it runs: else one that hangs would
    stay behind."""
    if process.returncode is not None:
        return  # its number may be another's
    try:
        _has_ended(process)
    except ChildProcessError:
        return  # the program itself has waited for it
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended. Its number stays its own until somebody waits for it.

    Raises:
        ChildProcessError: somebody has.
    """
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


# Of its own thread's also: a signal's handler may make a call.
_lock = threading.RLock()
_pools: dict[type[_Attendant], Pool] = {}


def shared() -> Pool:
    """The pool of this process whose jobs workers do."""
    return _shared(_Overseer, most_workers)


def here() -> Pool:
    """The pool of this process whose jobs are done in it, one at a time."""
    return _shared(_Runner, lambda: 1)


def loading() -> Pool:
    """The pool of this process that loads what others compiled: no compilation keeps it waiting."""
    return _shared(_Loader, lambda: 1)


def _shared(attendant: type[_Attendant], most: Callable[[], int]) -> Pool:
    with _lock:
        if attendant not in _pools:
            pool = _pools[attendant] = Pool(attendant, most)
            atexit.register(pool.close)
        return _pools[attendant]


def close_all() -> None:
    """End what the pools of this process do."""
    with _lock:
        pools = list(_pools.values())
    for each in pools:
        each.close()


def _forget_in_child() -> None:
    """The workers are the parent's, and so are the threads."""
    global _lock
    _lock = threading.RLock()
    for each in _pools.values():
        atexit.unregister(each.close)
    _pools.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
