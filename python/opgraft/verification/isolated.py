"""Runs calls that may crash the process or its device, in separate processes.

On the CPU that is a fork of this process, in which the override is registered. A process that has
used a CUDA device cannot use it after a fork. There a new process registers the override first.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from opgraft.registry import Override
from opgraft.verification.samples import Sample

#: How much more memory a fork may allocate, and how many seconds all its calls may take.
_MORE_MEMORY = 2**31
_FORK_SECONDS = 60
#: Seconds that a new process may take; it imports torch and initialises the device.
_NEW_PROCESS_SECONDS = 180


@dataclass(frozen=True)
class CallOutcome:
    """What became of one call: `"returned"`, `"raised"`, `"died"`, or `"no process"`."""

    what: str
    error: str = ""  #: its type, or the signal
    message: str = ""


def run_in_forks(calls: Sequence[Callable[[], Any]]) -> list[CallOutcome]:
    """Make calls one after another in a fork of this process; after a crash, in a new fork."""
    outcomes: list[CallOutcome] = []
    while len(outcomes) < len(calls):
        before = len(outcomes)
        outcomes += _run_in_one_fork(calls[before:])
        if len(outcomes) == before:
            return [*outcomes, *[CallOutcome("no process")] * (len(calls) - before)]
    return outcomes


def _run_in_one_fork(calls: Sequence[Callable[[], Any]]) -> list[CallOutcome]:
    """The outcomes of the calls up to the first that ends the process."""
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12's, of forks beside threads
            process = os.fork()
    except OSError:  # there is no room for one
        os.close(reading)
        os.close(writing)
        return []
    if process == 0:
        os.close(reading)
        _child_main(calls, writing)
    os.close(writing)
    lines, in_time = _read_lines(reading)
    os.close(reading)
    if not in_time:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    outcomes = [CallOutcome(**json.loads(line)) for line in lines]
    if len(outcomes) < len(calls):
        how = (
            "ran for too long" if not in_time else _describe_exit(os.waitstatus_to_exitcode(status))
        )
        outcomes.append(CallOutcome("died", how))
    return outcomes


def _child_main(calls: Sequence[Callable[[], Any]], writing: int) -> None:
    """What the fork does; it never returns."""
    try:
        # A fork has none of OpenMP's threads, and would wait for them.
        torch.set_num_threads(1)
        faulthandler.disable()  # a crash is expected, and reported by its signal
        _limit_memory()
        for call in calls:
            os.write(
                writing, json.dumps(asdict(outcome_of(call, synchronize=False))).encode() + b"\n"
            )
    finally:
        os._exit(0)


def _limit_memory() -> None:
    """Limit the fork's memory: an op may take a wrong index for a size, and allocate it."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MORE_MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read_lines(reading: int) -> tuple[list[str], bool]:
    """The lines until the other end is closed, and whether that was in time."""
    text, end = b"", time.monotonic() + _FORK_SECONDS
    while True:
        ready, _, _ = select.select([reading], [], [], max(end - time.monotonic(), 0))
        if not ready:
            return text.decode().splitlines(), False
        part = os.read(reading, 2**16)
        if not part:
            return text.decode().splitlines(), True
        text += part


def outcome_of(call: Callable[[], Any], *, synchronize: bool = True) -> CallOutcome:
    """Make a call, and wait for the device to finish it.

    Args:
        call: what to call.
        synchronize: whether the process may use its device; a fork may not.
    """
    try:
        with torch.no_grad():
            call()
            if synchronize and torch.cuda.is_initialized() and torch.cuda.is_available():
                torch.cuda.synchronize()
    except Exception as error:
        return CallOutcome("raised", type(error).__name__, str(error)[:500])
    return CallOutcome("returned")


def _describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


# ------------------------------------------------------------------ a new process


def run_in_new_process(override: Override, sample: Sample, *, natively: bool) -> CallOutcome:
    """Make a call in a process of its own, which registers the override first.

    Args:
        override: of a pack, or of a module whose import registers it.
        sample: the call.
        natively: whether to disable every override.
    """
    module = getattr(override.impl, "__module__", None)
    given = {
        "pack": override.pack,
        "module": None if module == "__main__" else module,
        "path": sys.path,
        "op": override.op,
        "dispatch_key": override.dispatch_key,
        "name": override.name,
        "sample": sample.id,
        "seed": sample.seed,
        "natively": natively,
    }
    command = [sys.executable, "-W", "ignore", "-m", "opgraft.verification.isolated_call"]
    try:
        done = subprocess.run(
            command,
            check=False,
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=_NEW_PROCESS_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return CallOutcome("died", "ran for too long")
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return CallOutcome(**json.loads(line))
    if done.returncode < 0:
        return CallOutcome("died", _describe_exit(done.returncode), done.stderr[-500:])
    return CallOutcome("no process", message=done.stderr[-500:])


def out_of_range_indices(sizes: Sequence[int]) -> Iterator[int]:
    """Indices that are out of range for one of these sizes."""
    yield from sorted({size for size in sizes if size > 0})
    yield from (-1, -(max(sizes, default=0) + 1), 2**31, 2**32)
