"""Exported programs: free of opgraft unless they are asked to hold overrides."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opgraft
from opgraft import Override, when
from tests import forked_programs, ops
from tests.pt2 import models

pytestmark = pytest.mark.filterwarnings("ignore")

REGISTER = """
import torch, opgraft
from tests import ops
from tests.pt2 import models
softmax = models.override("_softmax", ops.softmax, opgraft.when.size("self", 0) >= 4)
"""


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1) + 1


@pytest.fixture
def override() -> Override:
    return models.override("_softmax", ops.softmax, when.size("self", 0) >= 4)


def an_input(rows: int = 4) -> torch.Tensor:
    return torch.linspace(0, 1, rows * 8).reshape(rows, 8)


def export() -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=2, max=64)
    return torch.export.export(Model(), (an_input(),), dynamic_shapes=({0: rows},))


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def expected(rows: int = 4) -> torch.Tensor:
    with opgraft.disabled():
        return Model()(an_input(rows))


def in_a_process(code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that knows nothing of opgraft until it imports it."""
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return forked_programs.run(code, *arguments, env=env, cwd=Path(__file__).parents[2])


def test_an_exported_program_holds_no_op_of_ours_and_still_reaches_overrides(
    override: Override,
) -> None:
    program = export()
    for each in (program, program.run_decompositions()):
        assert not any("opgraft" in target for target in targets(each))
        hits = override.hits
        torch.testing.assert_close(each.module()(an_input()), expected())
        torch.testing.assert_close(each.module()(an_input(2)), expected(2))
        assert override.hits == hits + 1


def test_asked_to_a_decomposed_program_holds_overrides(override: Override, tmp_path: Path) -> None:
    with opgraft.pt2.export_overrides():
        program = export().run_decompositions()
    assert "opgraft.aten___softmax.default" in targets(program)
    path = tmp_path / "program.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path)
    for rows, hits in ((4, 1), (2, 1)):
        torch.testing.assert_close(loaded.module()(an_input(rows)), expected(rows))
        assert override.hits == hits


def test_the_scope_ends(override: Override) -> None:
    with opgraft.pt2.export_overrides():
        pass
    assert not any("opgraft" in target for target in targets(export().run_decompositions()))


def test_a_program_that_holds_overrides_can_be_trained_and_batched(override: Override) -> None:
    with opgraft.pt2.export_overrides():
        module = export().run_decompositions().module()
    x = an_input().requires_grad_()
    module(x).pow(2).sum().backward()
    assert override.hits == 1
    with opgraft.disabled():
        (wanted,) = torch.autograd.grad(Model()(x).pow(2).sum(), x)
    torch.testing.assert_close(x.grad, wanted)
    stack = torch.stack([an_input(), -an_input()] * 2)
    opaque = torch.ops.opgraft.aten___softmax
    batched = torch.vmap(lambda each: opaque(each, -1, False))(stack)
    torch.testing.assert_close(batched, torch.softmax(stack, -1))
    assert override.hits > 1


def test_a_program_that_holds_overrides_loads_where_none_is_registered(
    override: Override, tmp_path: Path
) -> None:
    with opgraft.pt2.export_overrides():
        torch.export.save(export().run_decompositions(), tmp_path / "program.pt2")
    ran = in_a_process(
        "import sys, torch, opgraft\n"
        "program = torch.export.load(sys.argv[1])\n"
        "torch.save(program.module()(torch.linspace(0, 1, 32).reshape(4, 8)), sys.argv[2])",
        tmp_path / "program.pt2",
        tmp_path / "result.pt",
    )
    assert ran.returncode == 0, ran.stderr
    torch.testing.assert_close(torch.load(tmp_path / "result.pt"), expected())


def test_without_opgraft_the_error_names_it(override: Override, tmp_path: Path) -> None:
    with opgraft.pt2.export_overrides():
        torch.export.save(export().run_decompositions(), tmp_path / "program.pt2")
    ran = in_a_process(
        "import sys, torch; torch.export.load(sys.argv[1])", tmp_path / "program.pt2"
    )
    assert ran.returncode != 0
    assert "torch.ops.opgraft.aten___softmax" in ran.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """AOTInductor packages: as ever, and holding overrides."""
    folder = tmp_path_factory.mktemp("packages")
    override = models.override("_softmax", ops.softmax, when.size("self", 0) >= 4)
    made = {"stock": folder / "stock.pt2", "overrides": folder / "overrides.pt2"}
    package(made["stock"])
    with opgraft.pt2.export_overrides():
        package(made["overrides"])
    override.remove()
    return made


def package(path: Path) -> None:
    torch._inductor.aoti_compile_and_package(
        export(),
        package_path=str(path),
        inductor_configs={
            "aot_inductor.compile_wrapper_opt_level": "O0",  # compiles in half the time
            "aot_inductor.precompile_headers": False,  # for two packages not worth it
        },
    )


def run(package: Path, rows: int) -> torch.Tensor:
    result: Any = torch._inductor.aoti_load_package(str(package))(an_input(rows))
    return result


def test_an_aotinductor_package_is_free_of_opgraft(
    packages: dict[str, Path], override: Override
) -> None:
    torch.testing.assert_close(run(packages["stock"], 4), expected())
    assert override.hits == 0
    ran = in_a_process(
        "import sys, torch\n"
        "print(torch._inductor.aoti_load_package(sys.argv[1])(torch.ones(4, 8)).shape)",
        packages["stock"],
    )
    assert "torch.Size([4, 8])" in ran.stdout, ran.stderr


def test_asked_to_an_aotinductor_package_holds_overrides(
    packages: dict[str, Path], override: Override
) -> None:
    for rows, hits in ((4, 1), (2, 1), (9, 2)):
        torch.testing.assert_close(run(packages["overrides"], rows), expected(rows))
        assert override.hits == hits


def test_a_package_with_overrides_loads_where_they_are_registered(
    packages: dict[str, Path],
) -> None:
    ran = in_a_process(
        f"import sys{REGISTER}"
        "torch._inductor.aoti_load_package(sys.argv[1])(torch.ones(4, 8))\n"
        "print('hits', softmax.hits)",
        packages["overrides"],
    )
    assert "hits 1" in ran.stdout, ran.stderr


def test_a_package_with_overrides_says_what_it_needs_where_opgraft_is_not(
    packages: dict[str, Path],
) -> None:
    ran = in_a_process(
        "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])", packages["overrides"]
    )
    assert ran.returncode != 0
    assert "opgraft::aten___softmax" in ran.stderr
