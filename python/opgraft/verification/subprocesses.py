"""Verifies each override in its own process, several at a time.

If an override breaks the device or the process (an illegal address, a crash), the others are not
affected. And on a machine with many cores, kernels are compiled in parallel.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from opgraft.registry import Override
from opgraft.router.failure import loses_device
from opgraft.verification import journal
from opgraft.verification.runner import report_of
from opgraft.verification.verification_report import (
    Check,
    Failure,
    OverrideReport,
    VerificationReport,
)

#: After so many samples on which native ends the process, the override's report is a crash's.
_MAX_LEFT_OUT = 8
#: How many lines of a crashed process's stderr are reported.
_STDERR_LINES = 12


def verify_in_subprocesses(
    overrides: Sequence[Override],
    arguments: Sequence[str],
    jobs: int,
    *,
    k: float,
    seed: int,
    log: Callable[[str], None] = lambda line: None,
) -> VerificationReport:
    """Verify overrides by `opgraft verify`, each in a process of its own.

    SIGINT and SIGTERM end the processes: what is not done then is reported as not run.

    Args:
        overrides: the overrides to verify.
        arguments: the command's arguments that register the overrides and set the options.
        jobs: how many processes run at a time.
        k, seed: the same values as in the arguments.
        log: called with a line for each override that is done, and for its failures.

    Returns:
        The report, as of :func:`opgraft.verify`; a process that crashed is a failure in it.
    """
    processes = _Processes()

    def verify(override: Override) -> OverrideReport:
        report = _verify(override, arguments, processes)
        log(f"{report.name}: {report.verdict}, {report.seconds:.0f} s")
        for failure in report.failures:  # at once: the other overrides may take minutes
            log(f"  {failure}".replace("\n", "\n  "))
        return report

    with ThreadPoolExecutor(jobs) as pool, _sigterm_interrupts():
        futures: list[Future[OverrideReport]] = []
        done: list[OverrideReport] = []
        try:
            for override in overrides:
                futures.append(pool.submit(verify, override))
            wait(futures)
            for override, future in zip(overrides, futures, strict=True):
                report = future.result()
                if jobs > 1 and _lacked_memory(report):
                    log(f"{report.name}: again, alone")
                    report = verify(override)
                done.append(report)
        except KeyboardInterrupt:
            processes.end()
        done += [future.result() for future in futures[len(done) :]]
        return report_of([*done, *map(_interrupted, overrides[len(done) :])], k, seed)


def _lacked_memory(report: OverrideReport) -> bool:
    """Whether a process ended for want of memory, which others beside it may have taken."""
    return any("out of memory" in each.message for each in report.failures)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM (of a time limit) act like Ctrl-C; only the main thread may set a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Processes:
    """The running processes, which can be ended all at once."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = threading.Event()

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
        """Run a process to its end and capture its output; None if it was ended before."""
        if self._ended.is_set():
            return None
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
            self._running.add(process)
            if self._ended.is_set():  # in between
                process.terminate()
            out, err = process.communicate()
            self._running.discard(process)
        if self._ended.is_set():
            return None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def end(self) -> None:
        self._ended.set()
        for process in list(self._running):
            process.terminate()


def _verify(override: Override, arguments: Sequence[str], processes: _Processes) -> OverrideReport:
    command = [sys.executable, "-m", "opgraft", "verify", *arguments, "--json"]
    command += ["--op", override.op, "--dispatch-key", override.dispatch_key]
    command += ["--name", override.name]
    start = time.perf_counter()
    left_out: list[str] = []
    done, sample = _run(command, left_out, processes)
    while len(left_out) < _MAX_LEFT_OUT and _is_natives(done, sample, command, processes):
        left_out.append(sample)
        done, sample = _run(command, left_out, processes)
    if done is None:
        return _interrupted(override)
    try:
        (found,) = json.loads(done.stdout)["overrides"]
    except (ValueError, KeyError):
        report = _crash_report(override, done, command, sample)
        report.seconds = time.perf_counter() - start
    else:
        report = OverrideReport.of_dict(found)
    report.notes += [f"left out, as native ends the process on it: {each}" for each in left_out]
    return report


_Done: TypeAlias = "subprocess.CompletedProcess[str] | None"


def _run(
    command: Sequence[str], left_out: Sequence[str], processes: _Processes
) -> tuple[_Done, str]:
    """Verify without some samples; the process, and the sample that it made last."""
    without = [f"--leave-out={sample}" for sample in left_out]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sample")
        done = processes.run([*command, f"--journal={path}", *without])
        return done, journal.read(path)


def _is_natives(done: _Done, sample: str, command: Sequence[str], processes: _Processes) -> bool:
    """Whether a process died on a sample on which the native kernel alone ends one, too."""
    if not sample or not _is_broken(done):
        return False
    return _is_broken(processes.run([*command, f"--only-native={sample}"]))


def _is_broken(done: _Done) -> bool:
    """Whether a process died, or ended because its device was lost."""
    if done is None:
        return False
    return done.returncode < 0 or (done.returncode > 0 and loses_device(done.stderr))


def lost_its_device(error: Exception) -> bool:
    """Whether an error says that this process cannot use its device any more."""
    return loses_device(str(error))


def _empty(override: Override) -> OverrideReport:
    return OverrideReport(
        override.name, override.op, override.dispatch_key, override.dsl, override.pack
    )


def _interrupted(override: Override) -> OverrideReport:
    report = _empty(override)
    report.skipped = "interrupted before it was done"
    return report


def _crash_report(
    override: Override,
    done: subprocess.CompletedProcess[str],
    command: Sequence[str],
    sample: str,
) -> OverrideReport:
    how = f"ended with {done.returncode}"
    if done.returncode < 0:
        how = f"died of {signal.Signals(-done.returncode).name}"
    last = "\n".join(done.stderr.splitlines()[-_STDERR_LINES:])
    message = f"the process that verified it {how}:\n{last}"
    report = _empty(override)
    report.checks["process"] = Check("process", failures=1)
    report.failures.append(Failure("process", sample, message, " ".join(command)))
    return report
