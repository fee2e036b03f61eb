"""The source files that a compiled kernel was made of, and whether they are what they were."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opgraft.cache import origins

#: A package whose module reaches another module, one of the standard library's, and torch.
SOURCES = {
    "cached_pack/__init__.py": "from .sizes import TILE\n",
    "cached_pack/sizes.py": "TILE = 8\n",
    "cached_pack/local.py": "",
    "cached_pack/compile.py": "import json, torch\n"
    "from cached_other import helper\n"
    "from . import TILE\n"
    "def compile(kind):\n    from .local import each\n",
    "cached_pack/neighbour.py": "",
    # In no package, where some of its imports fail.
    "cached_other.py": "import cached_third\n"
    "try:\n    from .utils import helper\nexcept ImportError:\n    def helper(): pass\n"
    "try:\n    from ... import helper\nexcept ImportError:\n    pass\n",
    "cached_third.py": "",
    "cached_fourth.py": "",
}
#: What it does not: modules that the process has imported for another reason.
OTHERS = {"cached_fourth.py", "cached_pack/neighbour.py"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (time.time() - 1e6,) * 2)  # before this process began
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    importlib.import_module("cached_pack.compile")
    for name in ("cached_fourth", "cached_pack.neighbour", "cached_pack.local"):
        importlib.import_module(name)
    origins._hash.cache_clear()
    yield tmp_path
    for name in list(sys.modules):
        if name.startswith("cached_"):
            del sys.modules[name]


def test_all_that_a_module_reaches_counts(place: Path) -> None:
    found = origins.hashes("cached_pack.compile")
    assert sorted(found) == sorted(SOURCES.keys() - OTHERS)
    assert origins.are_unchanged(found)


def test_another_process_finds_them_elsewhere(
    place: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = origins.hashes("cached_pack.compile")
    moved = tmp_path_factory.mktemp("moved")
    place.rename(moved / "here")
    origins._hash.cache_clear()
    assert not origins.are_unchanged(found)
    monkeypatch.syspath_prepend(moved / "here")
    assert origins.are_unchanged(found)


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - OTHERS))
def test_a_change_of_any_is_seen(place: Path, name: str) -> None:
    found = origins.hashes("cached_pack.compile")
    (place / name).write_text(SOURCES[name] + "\n")
    origins._hash.cache_clear()  # in another process
    assert not origins.are_unchanged(found)
    (place / name).unlink()
    origins._hash.cache_clear()
    assert not origins.are_unchanged(found)


def test_what_it_does_not_reach_may_have_no_source(place: Path) -> None:
    sys.modules["cached_pack.neighbour"].__file__ = str(place / "neighbour.so")
    assert origins.hashes("cached_pack.compile")


def test_what_was_changed_since_it_was_imported_is_refused(place: Path) -> None:
    (place / "cached_third.py").write_text("factor = 2\n")
    with pytest.raises(ValueError, match=r"cached_third.py was changed since this process began"):
        origins.hashes("cached_pack.compile")


def test_a_module_without_a_source_is_refused(place: Path) -> None:
    sys.modules["cached_other"].__file__ = str(place / "cached_other.so")
    with pytest.raises(ValueError, match="no Python source"):
        origins.hashes("cached_pack.compile")


def test_a_module_may_have_no_package(place: Path) -> None:
    """Python takes what its spec or its name says, as for one that was made by hand."""
    module = sys.modules["cached_pack.compile"]
    for name in ("__package__", "__spec__"):
        setattr(module, name, None)
        assert sorted(origins.hashes("cached_pack.compile")) == sorted(SOURCES.keys() - OTHERS)


def test_what_modules_do_when_they_are_looked_at_does_not_matter(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise LookupError(name)

    fail.__module__ = "builtins"  # this module is not to be reached by it
    monkeypatch.setitem(vars(sys.modules["cached_third"]), "__getattr__", fail)
    lazy = type(
        "Lazy", (), {"__module__": "builtins", "__getattribute__": lambda _, name: fail(name)}
    )
    monkeypatch.setitem(vars(sys.modules["cached_third"]), "made_when_used", lazy())
    monkeypatch.setitem(sys.modules, "cached_pack.local", None)  # its import is forbidden
    found = origins.hashes("cached_pack.compile")
    assert sorted(found) == sorted(SOURCES.keys() - OTHERS - {"cached_pack/local.py"})


def test_a_source_that_is_no_python_any_more_is_refused(place: Path) -> None:
    (place / "cached_third.py").write_text("def\n")
    os.utime(place / "cached_third.py", (time.time() - 1e6,) * 2)
    origins._import_statements.cache_clear()
    with pytest.raises(ValueError, match=r"cached_third\.py is not what was imported"):
        origins.hashes("cached_pack.compile")


def test_versions_stand_for_what_is_not_looked_at() -> None:
    assert "torch" in origins.versions()


def test_a_file_of_a_package_that_came_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is installed while the process runs, or another folder joins a namespace."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "earlier")
    (tmp_path / "earlier" / "late_space").mkdir(parents=True)
    for folder in ("late_pack", "late_space"):
        assert origins.absolute(f"{folder}/one.py") == f"{folder}/one.py"
        (tmp_path / folder).mkdir()
        other = tmp_path / folder / "other.py"
        other.touch()
        assert origins.absolute(f"{folder}/other.py") == str(other)
