"""Every snippet of README.md and docs/ runs.

The Python blocks of a document run in one namespace, one after the other; a comment behind a
`print` is what it prints. The console blocks run in an environment with opgraft and
opgraft-kernels, in a folder of the document's own; the lines below a `$ command` are what it
prints, where `...` stands for anything. TOML blocks are read. What stands in front of a block says
what it needs:

    <!-- test: cuda -->             runs on a GPU only
    <!-- test: skip, the reason --> is not run
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import opgraft
from benchmarks import summary
from benchmarks._environment import Environment
from opgraft.core import loader

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- test: (?P<mark>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
#: What is no snippet: output, diagrams.
PLAIN = ("", "text")


class Block(NamedTuple):
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"

    def reason_to_skip(self) -> str:
        if self.mark == "cuda" and not torch.cuda.is_available():
            return "needs a CUDA device"
        return self.mark.removeprefix("skip, ") if self.mark.startswith("skip, ") else ""


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(
            document,
            text.count("\n", 0, found.start("text")) + 1,
            found["language"],
            found["text"],
            found["mark"] or "",
        )
        for found in BLOCK.finditer(text)
    ]


def to_run(document: Path, language: str) -> list[Block]:
    """The blocks of a language that run on this machine, in their order."""
    found = blocks(document)
    return [block for block in found if block.language == language and not block.reason_to_skip()]


def having(language: str) -> list[Path]:
    return [
        document
        for document in DOCUMENTS
        if any(block.language == language for block in blocks(document))
    ]


def names(document: Path) -> str:
    return document.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_every_block_is_of_a_kind_that_is_tested(document: Path) -> None:
    found = blocks(document)
    assert document.read_text().count("```") == 2 * len(found), "a block is not closed"
    assert {block.language for block in found} <= {"python", "console", "toml", *PLAIN}
    marks = {block.mark.partition(",")[0] for block in found}
    assert marks <= {"", "cuda", "skip"}
    # A command in an indented block would not be run.
    text = BLOCK.sub("", document.read_text())
    assert not re.findall(r"^ {4}(?:\$|pip|python|opgraft|make|import) .*", text, re.M)


@pytest.mark.parametrize(
    "block",
    [block for each in DOCUMENTS for block in blocks(each) if block.reason_to_skip()],
    ids=str,
)
def test_blocks_that_are_not_run_say_why(block: Block) -> None:
    pytest.skip(block.reason_to_skip())


def test_tests_that_documents_name_exist() -> None:
    named = {
        found
        for document in DOCUMENTS
        for found in re.findall(r"`([\w/-]*\btests/[\w/]+\.py)::(\w+)`", document.read_text())
    }
    assert len(named) > 20
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), f"{file}::{name}"


def test_the_readmes_figures_are_those_of_the_results() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- summary -->\n(.*)\n<!-- end of summary -->", text, re.S)
    assert found is not None and found[1].splitlines() == summary.lines()


def test_every_public_name_is_in_the_reference() -> None:
    named = re.findall(r"^::: opgraft\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(named) == sorted(opgraft.__all__)


def test_every_page_is_in_the_site() -> None:
    listed = re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


# ----------------------------------------------------------------------------------- Python


@pytest.mark.parametrize("document", having("python"), ids=names)
def test_python(document: Path, tmp_path: Path, fake_modules: None) -> None:
    if document.name == "plans.md" and loader.in_use() is None:
        pytest.skip("launch plans are the core's")
    namespace: dict[str, Any] = {"__name__": "snippet"}
    with mock.patch.dict(os.environ):  # what an example sets there ends with it
        for block in to_run(document, "python"):
            file = tmp_path / f"{document.stem}_{block.line}.py"  # Triton reads a kernel's source
            file.write_text(block.text)
            namespace["__file__"] = str(file)
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compile(block.text, file, "exec"), namespace)
            except Exception as error:
                raise AssertionError(f"{block} raises {error!r}") from error
            check_prints(block, printed.getvalue())


def check_prints(block: Block, printed: str) -> None:
    """What the comments behind `print(...)` say is printed, in that order."""
    lines = iter(printed.splitlines())
    for expected in re.findall(r"^print\(.*\)  # (.*)$", block.text, re.M):
        assert any(matches(expected, line) for line in lines), f"{block}: {expected!r}: {printed}"


def matches(expected: str, got: str) -> bool:
    """Whether a text is as expected, with `...` for anything and any run of blanks for one."""
    checker = doctest.OutputChecker()
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return checker.check_output(f"{expected}\n", f"{got}\n", options)


@pytest.fixture
def fake_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The modules that snippets call a reader's own."""
    (tmp_path / "my_kernels.py").write_text(
        "from opgraft_kernels.norms.triton_kernels import rms_norm_forward as forward\n"
        "def rms_norm_forward(input, weight, eps):\n"
        "    return forward(input, [input.shape[-1]], weight, eps)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_kernels", None)


# ---------------------------------------------------------------------------------- console


@pytest.mark.slow
@pytest.mark.skipif(loader.load() is None, reason="without a compiled core packs are not activated")
@pytest.mark.parametrize("document", having("console"), ids=names)
def test_console(document: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    found = to_run(document, "console")
    changes_it = any(re.search(r"\b(pip|make)\b", block.text) for block in found)
    environment: Environment | None = None
    for block in found:
        for command, expected in commands(block.text):
            if environment is None:
                name = "own_environment" if changes_it else "environment"
                environment = request.getfixturevalue(name)
            code, printed, folder = shell(command, environment, folder)
            assert code == 0, f"{block}: $ {command}\n{printed}"
            if expected:
                assert matches(expected, printed), f"{block}: $ {command}\n{printed}"


SCRIPT = """
import torch
import torch.nn.functional as F
with torch.no_grad():
    F.rms_norm(torch.randn(128, 256), (256,))
"""


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command with what it is said to print."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, expected = part.partition("\n")
        while command.endswith("\\"):
            more, _, expected = expected.partition("\n")
            command = f"{command[:-1]}{more}"
        yield command, expected.strip("\n")


def shell(command: str, environment: Environment, folder: Path) -> tuple[int, str, Path]:
    """Run a command; returns its exit status, what it printed, and the folder that it ended in."""
    here = folder / ".here"
    done = subprocess.run(
        ["bash", "-c", f"{command}\nstatus=$?\npwd > '{here}'\nexit $status"],
        cwd=folder,
        env=environment.variables() | offline() | interpreted(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    after = Path(here.read_text().strip())
    here.unlink()
    return done.returncode, done.stdout.strip("\n"), after


def interpreted() -> dict[str, str]:
    """Without a GPU, the shipped kernels run in Triton's interpreter."""
    return {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}


def offline() -> dict[str, str]:
    """pip takes what is here, for building as well: a 0 here means no isolation."""
    return {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_WARN_SCRIPT_LOCATION": "0"}


# ------------------------------------------------------------------------------------- TOML


@pytest.mark.parametrize("document", having("toml"), ids=names)
def test_toml(document: Path) -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    for block in blocks(document):
        if block.language == "toml":
            assert tomllib.loads(block.text)
