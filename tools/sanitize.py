"""Runs the compiled core under sanitizers: `make sanitize`.

    python tools/sanitize.py            # all of it: 5 to 10 minutes on two cores
    python tools/sanitize.py parts      # seconds: what threads share without a lock, alone

`parts` compiles tests/sanitize/stress.cpp, which needs neither torch nor Python at run time, for
the thread sanitizer, and for the address and undefined-behaviour sanitizers.
`core` compiles the whole core for the latter two and runs the stress tests with it. torch and
Python are not compiled for a sanitizer. The address sanitizer only has to be loaded first. But the
thread sanitizer would report every reference count that torch's own code changes as a race, so the
whole core does not run under it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: With a `-fsanitize=`. `vptr` would look for type information of torch's, which it hides.
FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
KINDS = ("thread", "address,undefined")
#: The tests that the whole core is run by.
TESTS = ("tests/test_router_stress.py", "tests/test_scopes.py")
OPTIONS = {
    # What Python and torch keep to the end is no leak of ours, and memory that they got by one
    # allocator and gave back by another is theirs.
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:new_delete_type_mismatch=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # CUDA's addresses and the sanitizer's do not go together.
    "CUDA_VISIBLE_DEVICES": "",
    "OPGRAFT_SANITIZED": "1",  # for tests that measure memory
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["parts", "core", "all"], default="all")
    what = parser.parse_args().what
    if what != "core":
        with tempfile.TemporaryDirectory() as place:
            for kind in KINDS:
                print(f"== what threads share, under {kind}", flush=True)
                subprocess.run(under(kind, parts(kind, Path(place)), "5000"), check=True)
    if what != "parts":
        core()


def parts(kind: str, place: Path, *, sources: Path = ROOT / "csrc") -> Path:
    """The stress test of what threads share, compiled for a sanitizer into a folder."""
    import torch

    program = place / f"stress-{kind.replace(',', '-')}"
    headers = Path(torch.__file__).parent / "include"
    command = [
        *("c++", "-std=c++20", *FLAGS, f"-fsanitize={kind}", "-Wno-tsan", "-pthread"),
        *(f"-isystem{headers}", f"-I{sources}", str(ROOT / "tests/sanitize/stress.cpp")),
    ]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def under(kind: str, program: Path, *arguments: str) -> list[str]:
    """The command that runs a program compiled for a sanitizer."""
    # Where the kernel spreads addresses wide, an older compiler's thread sanitizer finds no room.
    setarch = shutil.which("setarch") if kind == "thread" else None
    return [*([setarch, "-R"] if setarch else []), str(program), *arguments]


def core() -> None:
    """The whole core, compiled for the address and undefined-behaviour sanitizers, under test."""
    cache = ROOT / "build" / "sanitize"
    os.environ["OPGRAFT_CACHE"] = str(cache)
    os.environ["CXXFLAGS"] = " ".join((*FLAGS, f"-fsanitize={KINDS[1]}", "-fno-sanitize=vptr"))
    os.environ["LDFLAGS"] = f"-fsanitize={KINDS[1]}"
    import torch

    from opgraft.core import building, store

    print("== compiling the core for address,undefined", flush=True)
    target = store.core_path(torch.__version__)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    include = Path(torch.__file__).parent / "include"
    building.compile_core(include, target, folder=building.sources(), objects=cache / "objects")
    print("== the stress tests, with it", flush=True)
    check = "from opgraft.core import loader; core = loader.load(); assert core, loader.status(); "
    check += f"assert core.__file__ == {str(target)!r}, core.__file__"
    settings = OPTIONS | {"LD_PRELOAD": " ".join(map(_library, ("asan", "ubsan")))}
    for command in (["-c", check], ["-m", "pytest", "-n", "0", "-q", *TESTS]):
        subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | settings, check=True)


def _library(name: str) -> str:
    """The compiler's own library for a sanitizer."""
    found = subprocess.run(
        ["c++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"c++ has no lib{name}.so: install it")
    return found


if __name__ == "__main__":
    main()
