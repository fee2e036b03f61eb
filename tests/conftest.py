"""Shared by all tests: a clean registry around each, and what GPU tests need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

# Before torch is imported: packs that are installed here would be active in every test. The tests
# that are about activation start programs of their own.
os.environ["OPGRAFT_PACKS"] = "none"

import torch

# Before Triton is first imported: without a GPU its kernels run in its interpreter, at the CPU key.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
for variable in ("OPGRAFT_DISABLE", "OPGRAFT_STRICT", "OPGRAFT_LOG"):
    os.environ.pop(variable, None)

from benchmarks import _environment
from benchmarks._environment import Environment
from opgraft.registry import registry


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels of opgraft and opgraft-kernels, built once for all processes that run tests."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one of several, whose folder is in the shared one
        shared = shared.parent
    with filelock.FileLock(shared / "wheels.lock"):
        return _environment.wheels(shared / "built")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, wheels: list[Path]) -> Environment:
    """A virtual environment with both installed. Tests leave it as it is."""
    return _environment.with_opgraft(tmp_path_factory.mktemp("environment") / "venv", wheels)


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
