"""What type checkers are told of the compiled core is what it has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from opgraft.core import loader

core = loader.in_use()
if core is None:
    pytest.skip("there is no compiled core", allow_module_level=True)


def names(body: list[ast.stmt]) -> set[str]:
    found = set()
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            found.add(each.name)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(each.target.id)
    return found


STUB = {
    each.name: each
    for each in ast.parse((Path(loader.__file__).parent / "interface.pyi").read_text()).body
    if isinstance(each, ast.ClassDef)
}
CLASSES = sorted(STUB.keys() - {"Core", "_Context"})


def public(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def test_the_module_has_what_the_stub_names() -> None:
    assert {name for name in names(STUB["Core"].body) if name[0] != "_"} | set(CLASSES) == (
        public(core)
    )


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_what_the_stub_names(name: str) -> None:
    named = {each for each in names(STUB[name].body) if each[0] != "_"}
    assert named == public(getattr(core, name))
