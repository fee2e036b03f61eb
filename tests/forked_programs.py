"""Programs in processes that are forked from one that has imported torch, and nothing of ours.

The import takes most of what a short program takes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks._environment import Environment

#: What a child does is what `python -c` does, with `import torch` before the program: that looks
#: for backends at its end, by the child's variables. It ends as an interpreter does.
_SERVER = """
import json, os, sys, torch

def requests():
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)
    os._exit(0)

request = requests()
for number, (path, flags) in enumerate(request["files"]):
    os.dup2(os.open(path, flags), number)
os.environ.clear()
os.environ.update(request["variables"])
sys.path[1:1] = request["paths"]
program = request["program"]
del request, requests, number, path, flags
if torch._is_device_backend_autoload_enabled():
    torch._import_device_backends()
exec(compile(program, "<string>", "exec"))
"""


class EnvironmentWithTorch(Environment):
    """An environment with a process that has imported torch, for programs that begin so."""

    def __init__(self, folder: Path, server: subprocess.Popen[str], written: Path) -> None:
        super().__init__(folder)
        self._server = server
        self._written = [written / "stdout", written / "stderr"]

    def after_torch(self, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program as `program` does, in a process that has just imported torch."""
        assert self._server.stdin is not None and self._server.stdout is not None
        paths = variables.get("PYTHONPATH", "").split(os.pathsep)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        request = {
            "program": text,
            "variables": self.variables() | variables,
            "paths": [path for path in paths if path],
            "files": [(os.devnull, os.O_RDONLY), *((str(file), flags) for file in self._written)],
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(text, status, *(f.read_text() for f in self._written))


@contextmanager
def with_torch_imported(environment: Environment, written: Path) -> Iterator[EnvironmentWithTorch]:
    """The environment, while this lasts with such a process.

    Args:
        environment: whose interpreter and packages programs have.
        written: a folder for what they write.
    """
    with subprocess.Popen(
        [environment.python, "-c", _SERVER],
        env=environment.variables() | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        cwd=environment.folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield EnvironmentWithTorch(environment.folder, server, written)
