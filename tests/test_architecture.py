"""What imports what: arrows between rooms that docs/design.md allows, and no circle of files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import opgraft

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "python"
#: What is built on the public API alone: packs, examples, the template of a pack.
ON_TOP = sorted(
    path
    for folder in ("kernels", "examples", "python/opgraft/cli/templates")
    for path in (ROOT / folder).rglob("*.py")
    if not {"tests", "build", ".venv"} & set(path.relative_to(ROOT).parts)
)


@dataclass(frozen=True)
class Import:
    """An import of a module, or of something from it."""

    module: str
    name: str | None  #: None: the module itself
    line: int


def imports(source: str) -> Iterator[Import]:
    """What a module imports, inside functions and by name too; not what type checkers alone do."""
    return _imports(ast.parse(source))


def _imports(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for each in node.orelse:
            yield from _imports(each)
        return
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, None, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        yield from (Import(module, alias.name, node.lineno) for alias in node.names)
    else:
        yield from (Import(name, None, node.lineno) for name in _named(node))  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        yield from _imports(child)


def _named(node: ast.AST) -> Iterator[str]:
    """Modules that are named in a string: `import_module("a.b")`, `sys.modules["a.b"]`."""
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        is_import = called.rpartition(".")[2] in ("import_module", "__import__")
        operands = node.args[:1] if is_import or called.startswith("sys.modules.") else []
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
        operands = [node.slice]
    else:
        return
    for operand in operands:
        if isinstance(operand, ast.Constant) and isinstance(operand.value, str):
            yield operand.value


def modules() -> dict[str, Path]:
    """Every module of the framework, by name."""
    found = {}
    for path in sorted(PACKAGES.rglob("*.py")):
        parts = path.relative_to(PACKAGES).with_suffix("").parts
        if "templates" not in parts and path.name != "conftest.py":
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def target(each: Import) -> str | None:
    """The module of the framework that an import is of; None for anybody else's."""
    name = each.module if each.name is None else f"{each.module}.{each.name}"
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


@cache
def arrows() -> dict[str, dict[str, int]]:
    """Every module of the framework, with those that it imports and the line where it does."""
    found: dict[str, dict[str, int]] = {}
    for name, path in MODULES.items():
        own = found[name] = {}
        for each in imports(path.read_text()):
            to = target(each)
            if to is not None and to != name:
                own.setdefault(to, each.line)
    return found


def room(module: str) -> str:
    """The room of a module: a folder of opgraft, or a file beside them."""
    parts = module.split(".")
    return parts[1] if parts[0] == "opgraft" and len(parts) > 1 else parts[0]


def allowed() -> dict[str, set[str]]:
    """docs/design.md's table: each room, and those that it may import."""
    text = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text, flags=re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows}


ALLOWED = allowed()


def test_the_table_names_each_room_and_no_other() -> None:
    assert sorted(ALLOWED) == sorted({room(module) for module in MODULES})
    assert set().union(*ALLOWED.values()) <= set(ALLOWED)


def test_the_table_has_no_circle() -> None:
    assert list(TopologicalSorter(ALLOWED).static_order())


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_a_room_imports_what_the_table_allows(name: str) -> None:
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {to}"
        for module, found in arrows().items()
        for to, line in found.items()
        if room(module) == name and room(to) not in {name, *ALLOWED[name]}
    ]
    assert not wrong, f"docs/design.md does not allow: {wrong}"


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        # Each of what graphlib names is imported by the one behind it.
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_no_module_has_a_private_name() -> None:
    private = [name for name in MODULES if re.search(r"\._(?!_)", name)]
    assert not private, "what is public is said by __all__ and the documentation"


# ------------------------------------------------------------------ what is built on the API


def public(each: Import) -> bool:
    """Whether an import is of something that opgraft's `__all__` makes public."""
    parts = each.module.split(".")
    if parts[0] != "opgraft":
        return True
    names = [*parts[1:], *([each.name] if each.name is not None else [])]
    if not names:
        return True
    if names[0] not in opgraft.__all__:
        return False
    home = getattr(opgraft, names[0])
    return len(names) == 1 or (len(names) == 2 and names[1] in getattr(home, "__all__", ()))


def attributes(source: str) -> Iterator[Import]:
    """`opgraft.NAME`, wherever it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "opgraft":
            yield Import("opgraft", node.attr, node.lineno)


@pytest.mark.parametrize("path", ON_TOP, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_packs_and_examples_use_the_public_api_alone(path: Path) -> None:
    source = path.read_text()
    wrong = [each for each in (*imports(source), *attributes(source)) if not public(each)]
    assert not wrong


# ------------------------------------------------------------------ this file's own eyes


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import opgraft.registry", ["opgraft.registry"]),
        ("from opgraft import registry", ["opgraft.registry"]),
        ("from opgraft.registry import Chain", ["opgraft.registry"]),
        ("from opgraft.router import threads", ["opgraft.router.threads"]),
        ("from opgraft.router import install", ["opgraft.router"]),
        ("def f():\n    from opgraft import router", ["opgraft.router"]),
        ("import importlib\nimportlib.import_module('opgraft.router')", ["opgraft.router"]),
        ("import sys\nsys.modules.get('opgraft.registry')", ["opgraft.registry"]),
        ("import sys\nsys.modules['opgraft.registry']", ["opgraft.registry"]),
        ("import sys\n'opgraft.registry' in sys.modules", []),  # it asks whether somebody did
        ("if TYPE_CHECKING:\n    from opgraft import router", []),
        ("import torch", []),
    ],
)
def test_an_import_is_seen(source: str, found: list[str]) -> None:
    assert [to for each in imports(source) if (to := target(each))] == found


@pytest.mark.parametrize(
    ("source", "is_public"),
    [
        ("from opgraft import when, lazy", True),
        ("from opgraft.when import Condition", True),
        ("import opgraft", True),
        ("import opgraft.when", True),
        ("from opgraft import registry", False),
        ("from opgraft.registry import Override", False),
        ("from opgraft.when import nodes", False),
        ("import opgraft.ops.schema", False),
    ],
)
def test_what_is_public_is_told(source: str, is_public: bool) -> None:
    assert all(map(public, imports(source))) == is_public
