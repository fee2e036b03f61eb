"""`opgraft.lazy`: impls that are named, and imported by their first call."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import RegistrationError, when
from opgraft.pt2 import caches, fingerprint

SOURCE = """
import torch
imports = globals().get("imports", 0) + 1
def softmax(self, dim, half_to_float):
    return torch.ones_like(self)
def with_keyset(keyset, self, dim, half_to_float):
    assert isinstance(keyset, torch.DispatchKeySet)
    return torch.ones_like(self)
def of_one(self):
    return self
class Namespace:
    softmax = staticmethod(softmax)
"""
WHOLE = {"cond": when.ndim("self") == 2}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that nobody has imported."""
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "lazily.kernels"
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazily"]:
        del sys.modules[name]


def register(impl: Any, **options: Any) -> opgraft.Override:
    return opgraft.register_op_override("aten", "_softmax", "CPU", impl, **options)


@pytest.mark.parametrize("name", ["softmax", "Namespace.softmax"])
def test_the_first_hit_imports_it(module: str, name: str) -> None:
    override = register(opgraft.lazy(f"{module}:{name}"), **WHOLE)
    torch.softmax(torch.zeros(3), 0)
    assert override.misses == 1 and module not in sys.modules
    for hits in (1, 2):
        assert torch.equal(torch.softmax(torch.zeros(2, 3), 1), torch.ones(2, 3))
        assert override.hits == hits
    assert sys.modules[module].imports == 1


def test_it_may_take_the_keyset(module: str) -> None:
    override = register(opgraft.lazy(f"{module}:with_keyset"))
    assert torch.equal(torch.softmax(torch.zeros(2, 3), 1), torch.ones(2, 3))
    assert override.hits == 1


def test_its_name_is_the_overrides(module: str) -> None:
    override = register(opgraft.lazy(f"{module}:softmax"), **WHOLE)
    assert override.name == f"{module}.softmax"


@pytest.mark.parametrize(
    "target",
    ["", "math", ":sqrt", "math:", "math sqrt", "math:sqrt:x", ".math:sqrt", "a-b:c", "a:1"],
)
def test_what_names_no_function_is_refused(target: str) -> None:
    with pytest.raises(RegistrationError, match=r"write 'package\.module:function'"):
        opgraft.lazy(target)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("lazily.missing:softmax", ModuleNotFoundError, r"No module named 'lazily\.missing'"),
        ("lazily.kernels:missing", AttributeError, r"lazy\('lazily\.kernels:missing'\).*missing"),
        ("lazily.kernels:of_one", TypeError, r"of_one\(\) takes 1 positional argument"),
    ],
)
def test_what_cannot_be_called_fails_at_the_first_hit(
    module: str, target: str, error: type[Exception], message: str
) -> None:
    register(opgraft.lazy(target), **WHOLE)
    with pytest.raises(error, match=message):
        torch.softmax(torch.zeros(2, 3), 1)


@pytest.mark.filterwarnings("ignore::opgraft.OverrideWarning")
def test_what_cannot_be_imported_falls_back(module: str) -> None:
    override = register(opgraft.lazy("lazily.missing:softmax"), on_error="fallback", **WHOLE)
    expected = torch.full((2, 2), 0.5)
    assert torch.equal(torch.softmax(torch.zeros(2, 2), 1), expected)
    assert override.fallbacks == 1


@pytest.mark.parametrize(
    "duplicate", [lambda impl: pickle.loads(pickle.dumps(impl)), copy.copy, copy.deepcopy]
)
@pytest.mark.parametrize("called", [False, True])
def test_a_copy_is_as_good(module: str, duplicate: Any, called: bool) -> None:
    impl = opgraft.lazy(f"{module}:softmax")
    if called:
        impl(torch.zeros(2), 0, False)
    other = duplicate(impl)
    assert repr(other) == repr(impl)
    assert torch.equal(other(torch.zeros(2), 0, False), torch.ones(2))


@pytest.mark.parametrize("called", [False, True])
def test_a_forked_child_can_call_it(module: str, called: bool) -> None:
    impl = opgraft.lazy(f"{module}:of_one")
    if called:
        impl(1)
    child = os.fork()
    if child == 0:
        os._exit(impl(7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_threads_that_call_it_first_import_it_once(module: str) -> None:
    impl = opgraft.lazy(f"{module}:softmax")
    barrier = threading.Barrier(8)
    results: list[torch.Tensor] = []

    def call() -> None:
        barrier.wait()
        results.append(impl(torch.zeros(2), 0, False))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and sys.modules[module].imports == 1


# ------------------------------------------------------------------------- caches


def test_caches_are_salted_with_its_sources(module: str, tmp_path: Path) -> None:
    source = tmp_path / "lazily" / "kernels.py"

    def salt() -> str:
        override = register(opgraft.lazy(f"{module}:softmax"), **WHOLE)
        state = caches.registry_state()
        override.remove()
        return state

    before = salt()
    assert before == salt()
    source.write_text(SOURCE.replace("ones_like", "zeros_like"))
    changed = salt()
    (tmp_path / "lazily" / "helpers.py").write_text("helped = True")
    assert len({before, changed, salt()}) == 3
    assert module not in sys.modules, "the salt imported it"


def test_two_functions_of_a_module_differ(module: str) -> None:
    digests = {
        fingerprint.digest_code(opgraft.lazy(f"{module}:{n}")) for n in ("softmax", "of_one")
    }
    assert len(digests) == 2


def test_a_digest_is_the_same_before_and_after_the_import(module: str) -> None:
    impl = opgraft.lazy(f"{module}:softmax")
    before = fingerprint.digest_code(impl)
    impl(torch.zeros(2), 0, False)
    assert fingerprint.digest_code(impl) == before


def test_a_module_that_is_nowhere_has_a_digest() -> None:
    assert fingerprint.digest_code(opgraft.lazy("nowhere_at_all.kernels:softmax"))
