"""Calls that may end the process, or leave its device unusable: each in a process of its own.

On the CPU a fork of this one, which has the override as it is. A process that has used a CUDA
device cannot be forked and use it again: there a new one registers the override first.
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

#: Memory that a fork may have beyond what there is, and seconds that all its calls may take.
_MORE_MEMORY = 2**31
_SECONDS = 60
#: Seconds that a new process may take: it imports torch, and initialises the device.
_SECONDS_ANEW = 180


@dataclass(frozen=True)
class Fate:
    """What became of one call: `"returned"`, `"raised"`, `"died"`, or `"no process"`."""

    what: str
    error: str = ""  #: its type, or the signal
    message: str = ""


def forked(calls: Sequence[Callable[[], Any]]) -> list[Fate]:
    """Make calls one after the other, in a fork of this process; another one after each death."""
    fates: list[Fate] = []
    while len(fates) < len(calls):
        before = len(fates)
        fates += _one_fork(calls[before:])
        if len(fates) == before:
            return [*fates, *[Fate("no process")] * (len(calls) - before)]
    return fates


def _one_fork(calls: Sequence[Callable[[], Any]]) -> list[Fate]:
    """Of the calls up to the first that ends the process."""
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
        _work(calls, writing)
    os.close(writing)
    lines, in_time = _lines(reading)
    os.close(reading)
    if not in_time:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    fates = [Fate(**json.loads(line)) for line in lines]
    if len(fates) < len(calls):
        how = "ran for too long" if not in_time else _how(os.waitstatus_to_exitcode(status))
        fates.append(Fate("died", how))
    return fates


def _work(calls: Sequence[Callable[[], Any]], writing: int) -> None:
    """What the fork does; it never returns."""
    try:
        # A fork has none of OpenMP's threads, and would wait for them.
        torch.set_num_threads(1)
        faulthandler.disable()  # a death is expected, and told by its signal
        _limit_memory()
        for call in calls:
            os.write(writing, json.dumps(asdict(fate_of(call))).encode() + b"\n")
    finally:
        os._exit(0)


def _limit_memory() -> None:
    """An index that is a size to the op asks for more than there is."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MORE_MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _lines(reading: int) -> tuple[list[str], bool]:
    """What is written until the other end is closed; and whether that was in time."""
    text, end = b"", time.monotonic() + _SECONDS
    while True:
        ready, _, _ = select.select([reading], [], [], max(end - time.monotonic(), 0))
        if not ready:
            return text.decode().splitlines(), False
        part = os.read(reading, 2**16)
        if not part:
            return text.decode().splitlines(), True
        text += part


def fate_of(call: Callable[[], Any]) -> Fate:
    """Make a call, to the end of what it has the device do."""
    try:
        with torch.no_grad():
            call()
            if torch.cuda.is_initialized() and torch.cuda.is_available():
                torch.cuda.synchronize()
    except Exception as error:
        return Fate("raised", type(error).__name__, str(error)[:500])
    return Fate("returned")


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


# ------------------------------------------------------------------ a new process


def anew(override: Override, sample: Sample, *, natively: bool) -> Fate:
    """Make a call in a process of its own, which registers the override first.

    Args:
        override: of a pack, or of a module whose import registers it.
        sample: the call.
        natively: with every override off.
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
            timeout=_SECONDS_ANEW,
        )
    except subprocess.TimeoutExpired:
        return Fate("died", "ran for too long")
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return Fate(**json.loads(line))
    if done.returncode < 0:
        return Fate("died", _how(done.returncode), done.stderr[-500:])
    return Fate("no process", message=done.stderr[-500:])


def candidates_of(sizes: Sequence[int]) -> Iterator[int]:
    """Indices that are out of a range of one of these sizes."""
    yield from sorted({size for size in sizes if size > 0})
    yield from (-1, -(max(sizes, default=0) + 1), 2**31, 2**32)
