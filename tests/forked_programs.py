"""Programs in processes that are forked from one that has imported torch, and nothing of ours.

The import takes most of what a short program takes. What is about an interpreter's start, its
options or what comes before the import has a process of its own.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks._environment import Environment
from tests import forked_workers
from tests.garbage import OBJECTS

#: Before all else.
_SELDOM = f"import gc; gc.set_threshold({OBJECTS})"
#: What a child does is what `python -c` does, with `import torch` before the program: that looks
#: for backends at its end, by the child's variables. It ends as an interpreter does.
#: What is there before the fork is frozen: at its end an interpreter looks through all objects that
#: it knows, and would copy the memory of all of torch's. What is about tensors of several processes
#: is what `torch.testing.assert_close` imports, and sympy with it.
_SERVER = """
import gc, json, os, sys, torch
if torch.distributed.is_available():
    import torch.distributed.tensor
# Here: more that its programs import, or their workers.
gc.collect()
gc.freeze()

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
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["variables"])
sys.path[1:1] = request["paths"]
sys.argv[1:] = request["arguments"]
program = request["program"]
del gc, request, requests, number, path, flags
if torch._is_device_backend_autoload_enabled():
    torch._import_device_backends()
exec(compile(program, "<string>", "exec"))
"""

#: What a program begins with that forks opgraft's workers.
FORKS_WORKERS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests import forked_workers
del sys.path[0]
forked_workers.fork_those_of_this_program()
"""
_FILE = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_MODULE = "import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


class Programs:
    """Programs of one interpreter, one after the other."""

    def __init__(self, server: subprocess.Popen[str], written: Path) -> None:
        self._server = server
        self._written = [written / "stdout", written / "stderr"]

    def run(
        self, text: str, *arguments: object, env: Mapping[str, str], cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as `python -c` does, in a process that has just imported torch."""
        assert self._server.stdin is not None and self._server.stdout is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        request = {
            "program": text,
            "arguments": list(map(str, arguments)),
            "variables": dict(env),
            "paths": [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each],
            "folder": str(cwd),
            "files": [(os.devnull, os.O_RDONLY), *((str(file), flags) for file in self._written)],
        }
        try:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            status = int(self._server.stdout.readline())
        except BaseException:  # such as the end of a test's time
            os.killpg(self._server.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(text, status, *(f.read_text() for f in self._written))


@contextmanager
def programs(
    python: Path | str, env: Mapping[str, str], written: Path, more: str = ""
) -> Iterator[Programs]:
    """Programs of an interpreter while this lasts.

    Args:
        python: the interpreter.
        env: with what torch is imported; a program has variables of its own.
        written: a folder for what they write.
        more: that is imported before.
    """
    with subprocess.Popen(
        [python, "-c", _SELDOM + _SERVER.replace("# Here:", f"{more}\n#")],
        env={**env, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        cwd=written,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its programs end with it
    ) as server:
        yield Programs(server, written)


@functools.cache
def _of_this_interpreter(fork_workers: bool) -> Programs:
    """Until this process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    written = stack.enter_context(tempfile.TemporaryDirectory())
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    more = forked_workers.FIRST_RUN if fork_workers else ""
    return stack.enter_context(programs(sys.executable, env, Path(written), more))


def run(
    text: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    forks_workers: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program with this interpreter, as `subprocess.run` would `python -c`.

    Args:
        text: the program.
        arguments: of the program.
        env: its variables.
        cwd: its folder.
        forks_workers: whether opgraft's workers are forked, too.
    """
    given = os.environ if env is None else env
    if forks_workers:
        text = FORKS_WORKERS + text
    try:
        return _of_this_interpreter(forks_workers).run(
            text, *arguments, env=given, cwd=cwd or Path.cwd()
        )
    except BaseException:
        _of_this_interpreter.cache_clear()  # the next test has another
        raise


def run_module(
    name: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    forks_workers: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a module with this interpreter, as `subprocess.run` would `python -m`; see `run`."""
    text = _MODULE.format(name=name)
    return run(text, *arguments, env=env, cwd=cwd, forks_workers=forks_workers)


def run_file(
    path: Path, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script with this interpreter, as `subprocess.run` would `python path`; see `run`."""
    return run(_FILE, path, *arguments, env=env)


class EnvironmentWithTorch(Environment):
    """An environment with a process that has imported torch, for programs that begin so."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        super().__init__(folder)
        self._programs = programs

    def after_torch(
        self, text: str, *arguments: object, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as `program` does, in a process that has just imported torch."""
        env = self.variables() | variables
        return self._programs.run(text, *arguments, env=env, cwd=self.folder)

    def module_after_torch(
        self, name: str, *arguments: object, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a module as `python -m` does, in a process that has just imported torch."""
        return self.after_torch(_MODULE.format(name=name), *arguments, **variables)


@contextmanager
def with_torch_imported(environment: Environment, written: Path) -> Iterator[EnvironmentWithTorch]:
    """The environment, while this lasts with such a process.

    Args:
        environment: whose interpreter and packages programs have.
        written: a folder for what they write.
    """
    with programs(environment.python, environment.variables(), written) as found:
        yield EnvironmentWithTorch(environment.folder, found)
