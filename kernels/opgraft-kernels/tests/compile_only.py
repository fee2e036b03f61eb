"""Compile Triton kernels for a GPU that is not there, and read what they use.

A driver stands in for CUDA's, so this has to run in a process of its own, without
`TRITON_INTERPRET`:

    python compile_only.py FAMILY

compiles a sample of `configurations.launches(FAMILY, CAPABILITY)` for each compute capability, or
all with `COMPILE_ALL=1`. In the sample each kernel is compiled for each capability, and each value
of a constexpr, each number of warps, each bound on a thread's registers and each kind of argument
of a kernel for one of them. It prints one JSON object a line: the capability, the kernel's name,
its constexprs, its warps, and the registers, spilled bytes and shared memory of the machine code,
how many bytes its narrowest and its widest access to global memory have, how many a thread has of
each width, also of copies into shared memory, and whether it asserts anything.

Without a family it does so for each that it is asked for on its standard input: see `_serve`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

# Dynamic shared memory that a program may ask for, in bytes. Triton checks it at launch alone.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def compiled_launches(family: str, hopper: Collection[str] = ()) -> list[dict[str, Any]]:
    """What the launches of a family of kernels compile to, from a process of its own.

    Every kernel is among them for every capability; those of `hopper` for 9.0 alone.
    """
    compiled = [json.loads(line) for line in _output_of_family(family).splitlines()]
    kernels = {found["kernel"] for found in compiled}
    for capability in SHARED_MEMORY:
        there = kernels if capability == 90 else kernels - set(hopper)
        assert {f["kernel"] for f in compiled if f["capability"] == capability} == there
    return compiled


def output_of(*command: str) -> str:
    """What a command prints, without `TRITON_INTERPRET`."""
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return environment


def _output_of_family(family: str) -> str:
    """What this program prints of a family, in a process that `_serve` forks."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        printed, errors = Path(folder, "printed"), Path(folder, "errors")
        try:
            print(json.dumps([family, str(printed), str(errors)]), file=server.stdin, flush=True)
            status = server.stdout.readline().strip()
        except BaseException:  # such as the end of a test's time
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise
        assert status == "0", errors.read_text()[-4000:] if errors.exists() else "it has ended"
        return printed.read_text()


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Imports what all families need once: that takes longer than compiling most of them."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what it forks ends with it
    )
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    """Run this program for each family that is asked for, in a process that is forked for it."""
    import torch

    import configurations  # noqa: F401
    import opgraft_kernels.attention.triton_kernels  # noqa: F401

    torch.empty(1, device="meta") + 1  # imports more
    gc.freeze()  # a collection would copy the memory of all that
    for line in sys.stdin:
        family, *files = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, file in enumerate(files, start=1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            main(family)
            sys.stdout.flush()
            os._exit(0)  # an interpreter's end would look through all that was imported
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)


def use_driver(capability: int) -> None:
    """Make Triton compile for `capability` from now on, on no device."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class CompileOnly(DriverBase):
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability  # a kernel keeps what it compiled, and for which target, by device

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise RuntimeError("nothing can be run here")

    triton.runtime.driver.set_active(CompileOnly())


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of local memory: what was spilled."""
    import triton.backends.nvidia

    tool = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def _accesses(ptx: str, kind: str = "(?:ld|st)") -> list[int]:
    """Bytes of a thread's loads (``"ld"``) and stores (``"st"``)."""
    found = re.findall(rf"\b{kind}\.global\S*?(?:\.v(\d))?\.[bfus](\d+)\b", ptx)
    return [int(vector or 1) * int(bits) // 8 for vector, bits in found]


def _copies(ptx: str) -> list[int]:
    """Bytes of a thread's loads into shared memory."""
    found = re.findall(r"\bcp\.async\.c[ag]\.shared\.global\S*(?: \[[^]]*\],){2} (\w+)", ptx)
    return [int(size, base=0) for size in found]


def _compile(launch: Any, capability: int) -> dict[str, Any]:
    compiled = launch.kernel.warmup(*launch.arguments, grid=(launch.grid,), **launch.keywords)
    if hasattr(compiled, "result"):
        compiled = compiled.result()
    return {
        "capability": capability,
        "kernel": launch.kernel.__name__,
        "constexprs": launch.constexprs,
        "num_warps": launch.num_warps,
        "arguments": [str(getattr(each, "dtype", each)) for each in launch.arguments],
        "shared": compiled.metadata.shared,
        "narrowest": min(_accesses(compiled.asm["ptx"])),
        "widest": max(_accesses(compiled.asm["ptx"])),
        "loads": Counter(_accesses(compiled.asm["ptx"], "ld")),
        "copies": Counter(_copies(compiled.asm["ptx"])),
        "stores": Counter(_accesses(compiled.asm["ptx"], "st")),
        "asserts": "__assertfail" in compiled.asm["ptx"],
        **_resources(compiled.asm["cubin"]),
    }


def _specialization(argument: Any) -> object:
    """What of an argument Triton compiles for."""
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1
    if isinstance(argument, tuple):
        return tuple(map(_specialization, argument))
    return str(getattr(argument, "dtype", argument))


def _values(launch: Any, capability: int) -> Iterator[tuple[object, ...]]:
    """What is to be met by a sample of launches."""
    kernel = launch.kernel.__name__
    yield kernel, "capability", capability
    yield kernel, "num_warps", launch.num_warps
    yield kernel, "maxnreg", launch.options.get("maxnreg")
    for name, value in launch.constexprs.items():
        yield kernel, name, value
    for position, argument in enumerate(launch.arguments):
        yield kernel, position, _specialization(argument)


def _distinct(launches: Iterator[Any]) -> list[Any]:
    """Launches that differ in what they compile to: not in sizes, but in their divisibility."""
    found: dict[str, Any] = {}
    for launch in launches:
        key = repr(
            (
                launch.kernel.__name__,
                [_specialization(each) for each in launch.arguments],
                launch.constexprs,
                launch.num_warps,
                launch.options.get("maxnreg"),
            )
        )
        found.setdefault(key, launch)
    return list(found.values())


def _begin_kernels_early(capability: int) -> None:
    """Plan and launch as a device of `capability` would: the tensors here are on none."""
    from opgraft_kernels import devices, launches

    begins_early = devices.begins_early(capability // 10, capability % 10)
    vars(launches)["can_begin_early"] = lambda _: begins_early


def main(family: str) -> None:
    use_driver(min(SHARED_MEMORY))  # planning asks for one
    import configurations
    from covering import sample

    there_is = []
    for capability in SHARED_MEMORY:
        _begin_kernels_early(capability)
        there_is += [
            (launch, capability)
            for launch in _distinct(configurations.launches(family, capability))
        ]
    for launch, capability in sample(there_is, lambda each: _values(*each)):
        use_driver(capability)
        _begin_kernels_early(capability)
        print(json.dumps(_compile(launch, capability)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] else _serve()
