"""Worker processes that are forked from one that has imported torch, and nothing of ours.

Importing torch, and what it imports when it first runs without memory, takes nearly all of what a
worker takes that compiles for a small impl. All else is as it is with a process that is started:
the worker's program, variables, folder, streams, session and parent.

Programs of `forked_programs` import this before anything of opgraft is imported.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.garbage import OBJECTS

#: What must be the same in the process that is forked as it would be in one that is started: Triton
#: reads it when it is imported, which Dynamo does.
_AT_IMPORT = "TRITON_INTERPRET"

_PR_SET_CHILD_SUBREAPER = 36

#: Forks twice, and the one between ends: so the worker is a child of whoever asked, which takes on
#: what is left by the processes that it has started. The worker's program begins when it is.
_SERVE = """
import array, json, os, socket, sys, torch

def requests():
    asking = socket.socket(fileno=0)
    while True:
        text, control, _, _ = asking.recvmsg(1 << 20, socket.CMSG_SPACE(3 * 4))
        if not text:
            os._exit(0)
        files = array.array("i", control[0][2])
        begin, told = os.pipe(), os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                os.close(begin[1])
                os.setsid()
                os.write(told[1], str(os.getpid()).encode())
                os.read(begin[0], 1)  # until the one between has ended
                for each in *begin[:1], *told:
                    os.close(each)
                asking.close()
                return json.loads(text), files
            os._exit(0)
        os.close(begin[0])
        os.close(told[1])
        worker = os.read(told[0], 100)
        os.waitpid(between, 0)
        for each in begin[1], told[0], *files:
            os.close(each)
        asking.send(worker)

request, files = requests()
for number, each in enumerate(files):
    os.dup2(each, number)
    os.close(each)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["variables"])
sys.argv[1:] = request["arguments"]
program = request["program"]
del request, requests, files, number, each
if torch._is_device_backend_autoload_enabled():
    torch._import_device_backends()
exec(compile(program, "<string>", "exec"))
"""

#: What a worker's first run without memory imports.
FIRST_RUN = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(), torch.no_grad():
    0 - torch.empty(4)
"""

_SERVER = f"""
import gc, sys
gc.set_threshold({OBJECTS})
{FIRST_RUN}
assert "opgraft" not in sys.modules
gc.collect()
gc.freeze()
{_SERVE}
"""


class _Server:
    """A process that forks workers."""

    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking
        self._one_at_a_time = threading.Lock()

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Have a worker forked: its process number."""
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        with self._one_at_a_time:
            self._asking.sendmsg([json.dumps(request).encode()], control)
            answer = self._asking.recv(100)
        if not answer:
            raise OSError("the process that forks workers has ended")
        return int(answer)


@functools.cache
def _of_this_process(interpreter: str, at_import: str | None) -> _Server:
    """One that lasts until this process ends.

    Args:
        interpreter: of its workers.
        at_import: the value of the variable that must be the same.
    """
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", _AT_IMPORT)}
    variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if at_import is not None:
        variables[_AT_IMPORT] = at_import
    asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [interpreter, "-c", _SERVER], env=variables, stdin=theirs, start_new_session=True
        )
    atexit.register(process.wait)
    atexit.register(asking.close)
    return _Server(asking)


class _Forked(subprocess.Popen[bytes]):
    """A worker, where it can be forked: else a process that is started."""

    server: Callable[[str, str | None], _Server] = staticmethod(_of_this_process)

    def _execute_child(self, *given: Any) -> None:
        interpreter, *options = given[0]
        variables, files = given[6], [given[10], given[13], given[15]]
        is_worker = options[:1] == ["-c"] and "opgraft.ready.worker" in options[1]
        if interpreter != sys.executable or not is_worker or -1 in files:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        request = {
            "program": options[1],
            "arguments": options[2:],
            "variables": dict(variables),
            "folder": os.getcwd(),
        }
        try:
            server = self.server(interpreter, variables.get(_AT_IMPORT))
            self.pid = server.fork(request, files)
            self._child_created = True
        finally:
            self._close_pipe_fds(*given[10:16])  # type: ignore[attr-defined]


def _take_on_orphans(whether: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether))


@contextmanager
def forked_workers() -> Iterator[None]:
    """A scope in which this process forks the workers that it needs."""
    import pytest

    from opgraft.ready import pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "subprocess", SimpleNamespace(Popen=_Forked, PIPE=subprocess.PIPE))
        _take_on_orphans(True)
        try:
            yield
        finally:
            _take_on_orphans(False)


def fork_those_of_this_program() -> None:
    """Have this program fork its workers, from a process that is as it is now. Not where there is a
    GPU, whose driver no process shares with a forked one."""
    import torch

    if torch.cuda.is_available():
        return
    asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        asking.close()
        os.dup2(theirs.fileno(), 0)
        theirs.close()
        exec(_SERVE, {"__name__": "__main__"})
        os._exit(0)
    theirs.close()
    server = _Server(asking)
    _Forked.server = staticmethod(lambda *_: server)
    subprocess.Popen = _Forked  # type: ignore[misc]
    _take_on_orphans(True)
