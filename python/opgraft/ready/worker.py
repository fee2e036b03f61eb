"""The program of a worker process. Its argument is the number of the process that it works for.

It reads requests from its standard input, one JSON line each, and writes one line for each to what
its standard output was when it began. What impls and compilers print goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import Any, TextIO

#: The first line that a worker writes.
READY = b'{"ready": true}'

_PR_SET_PDEATHSIG = 1

#: Added to the parent's. Several workers that start at a time would slow the program down, whose
#: first steps keep the processor as busy.
_NICENESS = 10


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this one
    _end_with(int(sys.argv[1]))
    _be_killed_first()
    _be_nice()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # nobody else reads requests
    _say(answers, json.loads(READY))
    for line in requests:
        _say(answers, _answer(json.loads(line)))


def _end_with(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def _be_killed_first() -> None:
    """Where memory runs out, let the kernel kill this process, and not the program."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _be_nice() -> None:
    """Leave the processor to the program, where a sandbox allows it."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    from opgraft.core import loader
    from opgraft.ready import dry

    try:
        if (core := loader.load()) is not None:
            core.end_group_with_parent()
        return {**dry.run(asked)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}


if __name__ == "__main__":
    main()
