"""Shared by the tests of compiled graphs: fresh compiles, shared C++ objects, warm log levels."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Compiled C++ is shared by content between the tests of one session; graphs are not cached, so that
# every test traces. What is said of caches is tested in processes of their own.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


#: Names the folder to the processes that tests start to run others once more. opgraft would warn of
#: a name like its own that it does not know.
_SHARED = "TESTS_INDUCTOR_CACHE"


@pytest.fixture(scope="session", autouse=True)
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for what Inductor compiles, one for all workers of the session."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "inductor"
    folder = Path(os.environ.get(_SHARED, folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setenv(_SHARED, str(folder))
        yield folder


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No compiled graph of one test reaches the next."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def decisions(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What was logged about compiled graphs."""
    caplog.set_level(logging.DEBUG, logger="opgraft.pt2")
    yield caplog
