"""Shared by all tests: a clean registry around each, and what GPU tests need."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

# Before torch is imported: packs that are installed here would be active in every test. The tests
# that are about activation start programs of their own.
os.environ["OPGRAFT_PACKS"] = "none"

# Before Inductor is: it makes C++ without vector instructions, whose headers take a compiler longer
# than its loops. To know whether there are any, each process that compiles would start one more,
# which imports torch, and compile what that loads.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import torch

# Before Triton is first imported: without a GPU its kernels run in its interpreter, at the CPU key.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
for variable in ("OPGRAFT_DISABLE", "OPGRAFT_STRICT", "OPGRAFT_LOG"):
    os.environ.pop(variable, None)

from benchmarks import _environment
from benchmarks._environment import Environment
from opgraft.registry import registry
from opgraft.verification.opinfo import seed_torch
from tests.forked_programs import EnvironmentWithTorch, with_torch_imported
from tests.garbage import collect_seldom

collect_seldom()


def _longest_first(items: list[pytest.Item]) -> None:
    """Begin each worker's part of the tests with its share of those marked `longest`.

    A worker is given one part after the other of the list, and when it is through takes over from
    others what they have not begun: not what they are at, nor their last one.
    """
    longest = [item for item in items if "longest" in item.keywords]
    others = [item for item in items if "longest" not in item.keywords]
    workers, count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), len(items)
    items.clear()
    for worker in range(workers):
        own = longest[worker::workers]
        room = (count - len(items)) // (workers - worker) - len(own)  # as xdist divides them
        items += own + others[: max(room, 0)]
        del others[: max(room, 0)]
    items += others


# After pytest's own, which puts tests together that share a fixture.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _longest_first(items)
    for marker, devices in (("gpu", 1), ("multigpu", 2)):
        if torch.cuda.device_count() < devices:
            needed = "a CUDA device" if devices == 1 else f"{devices} CUDA devices"
            skip = pytest.mark.skip(reason=f"needs {needed}")
            for item in items:
                if marker in item.keywords:
                    item.add_marker(skip)


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """No override and no rule of one test reaches the next."""
    registry.reset()
    yield
    registry.reset()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Whether a bound holds is not left to chance, nor to the tests that ran before."""
    seed_torch(0)


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """For tests that collect garbage often: that of a module alone, not all that was imported."""
    if gc.get_freeze_count():  # in a process that was forked
        yield
        return
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of tests, one for all processes that take part."""
    folder = tmp_path_factory.getbasetemp()
    # One of several has a folder in the shared one.
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def wheels(of_all_workers: Path) -> list[Path]:
    """The wheels of opgraft and opgraft-kernels, built once for all processes that run tests."""
    with filelock.FileLock(of_all_workers / "wheels.lock"):
        return _environment.wheels(of_all_workers / "built")


@pytest.fixture(scope="session")
def shared_environment(of_all_workers: Path, wheels: list[Path]) -> Environment:
    """A virtual environment with both installed, for all processes. Tests leave it as it is."""
    folder, whole = of_all_workers / "environment", of_all_workers / "environment.whole"
    with filelock.FileLock(of_all_workers / "environment.lock"):
        if whole.exists():
            return Environment(folder)
        made = _environment.with_opgraft(folder, wheels)
        whole.touch()
        return made


@pytest.fixture
def environment(shared_environment: Environment) -> Environment:
    return shared_environment


@pytest.fixture(scope="session")
def environment_with_torch(
    shared_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnvironmentWithTorch]:
    """The same, with a process that has imported torch."""
    written = tmp_path_factory.mktemp("programs")
    with with_torch_imported(shared_environment, written) as with_torch:
        yield with_torch


@pytest.fixture
def own_environment(tmp_path: Path, wheels: list[Path]) -> Environment:
    """A virtual environment with both installed, for one test to change."""
    return _environment.with_opgraft(tmp_path / "venv", wheels)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that is there: one test body for all."""
    return torch.device(request.param)


@pytest.fixture
def dispatch_key(device: torch.device) -> str:
    return device.type.upper()
