"""The names that `import opgraft` gives, which are looked up when they are asked for."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import opgraft


def imported_for_type_checkers() -> dict[str, str]:
    """Each public name and the module that the `TYPE_CHECKING` block imports it from."""
    tree = ast.parse(Path(str(opgraft.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("name", opgraft.__all__)
def test_a_name_is_what_type_checkers_take_it_for(name: str) -> None:
    module = imported_for_type_checkers()[name]
    if module == "opgraft":
        expected = importlib.import_module(f"opgraft.{name}")
    else:
        expected = getattr(importlib.import_module(module), name)
    assert getattr(opgraft, name) is expected


def test_type_checkers_know_the_same_names() -> None:
    assert set(imported_for_type_checkers()) == set(opgraft.__all__)
    assert set(opgraft.__all__) <= set(dir(opgraft))
    assert sorted(opgraft.__all__) == opgraft.__all__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'overide'"):
        opgraft.overide  # noqa: B018
    assert not hasattr(opgraft, "_private")


@pytest.mark.parametrize("name", opgraft.__all__)
def test_a_name_can_be_the_first_one_that_is_asked_for(name: str) -> None:
    # In one process each would cost an import of torch: what is asked is asked of modules anew.
    before = {module for module in sys.modules if module.startswith("opgraft.")}
    opgraft.__dict__.pop(name, None)
    assert getattr(opgraft, name) is not None
    assert before <= set(sys.modules)


def test_importing_opgraft_alone_imports_little_of_it() -> None:
    program = "import torch, sys, opgraft; print([m for m in sys.modules if 'opgraft.' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    # conftest switches packs off; the autoload looks who is there all the same.
    assert "opgraft.when" not in done.stdout
    assert "opgraft.router" not in done.stdout
    assert "opgraft.base.env" in done.stdout
