"""`import torch` is enough: packs in an environment of their own, installed as wheels."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _environment
from benchmarks._environment import Environment
from opgraft.core import loader
from opgraft.crossover import models, tables
from opgraft.crossover.tables import Cell
from tests.forked_programs import EnvironmentWithTorch

pytestmark = pytest.mark.skipif(
    loader.load() is None, reason="without a compiled core packs are not activated"
)

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("triton", "cutlass", "tvm_ffi", "torch._inductor", "torch._dynamo", "packaging.specifiers")
NOT_NEEDED_TO_REGISTER = (
    *("cli", "control", "explanation", "verification", "ops.wrapped_number"),
    "router.saved_calls",
)
# A user's script. What comes after it is the test's.
SCRIPT = """
import torch
import torch.nn.functional as F
x = torch.randn(128, 64)
with torch.no_grad():
    y = F.rms_norm(x, (64,))
torch.testing.assert_close(y, x * torch.rsqrt(x.square().mean(-1, True) + torch.finfo().eps))
"""
REPORT = """
import json, sys
before = set(sys.modules)
import opgraft
print(json.dumps({
    "hits": {o.name: o.hits for o in opgraft.overrides()},
    "packs": {s.pack.name: [s.state, s.reason] for s in opgraft.packs.statuses()},
    "kernel": torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CPU"),
    "modules": sorted(before),
}))
"""


@pytest.fixture(scope="session")
def scaffold(shared_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack that `opgraft new` made."""
    place = tmp_path_factory.mktemp("scaffold")
    made = shared_environment.run("opgraft", "new", "fast-softmax", "--json", cwd=place)
    assert made.returncode == 0, made.stderr
    return place / json.loads(made.stdout)["folder"]


def report(environment: Environment, program: str, **variables: str) -> dict[str, Any]:
    """What a program finds. One that begins with `import torch` may have it imported before."""
    is_after = isinstance(environment, EnvironmentWithTorch)
    runs = environment.after_torch if is_after else environment.program  # type: ignore[attr-defined]
    done = runs(program + REPORT, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_script_that_only_imports_torch_is_routed(environment: Environment) -> None:
    found = report(environment, SCRIPT, TRITON_INTERPRET="1")
    assert found["hits"]["opgraft_kernels.rms_norm.forward"] == 1
    assert found["packs"] == {"opgraft-kernels": ["active", ""]}


def test_a_script_that_needs_none_of_its_ops_imports_no_pack(
    environment_with_torch: EnvironmentWithTorch,
) -> None:
    found = report(environment_with_torch, SCRIPT)
    assert found["packs"] == {"opgraft-kernels": ["active", ""]}
    imported = ("opgraft_kernels", "opgraft.registration", "opgraft.registry", "opgraft.when")
    assert not [name for name in found["modules"] if name.startswith(imported)]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"OPGRAFT_DISABLE": "1"}, "OPGRAFT_DISABLE=1"),
        ({"OPGRAFT_PACKS": "none"}, "OPGRAFT_PACKS leaves it out"),
        (
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "TORCH_DEVICE_BACKEND_AUTOLOAD switches activation off",
        ),
    ],
)
def test_every_switch_makes_it_stock(
    environment_with_torch: EnvironmentWithTorch, variables: dict[str, str], reason: str
) -> None:
    found = report(environment_with_torch, SCRIPT, TRITON_INTERPRET="1", **variables)
    assert found["hits"] == {}
    assert not found["kernel"]
    assert found["packs"] == {"opgraft-kernels": ["inactive", reason]}
    loaded = ("opgraft.router", "opgraft._C_", "opgraft_kernels")
    assert not [name for name in found["modules"] if name.startswith(loaded)]


def test_a_pack_can_start_disabled(environment_with_torch: EnvironmentWithTorch) -> None:
    variables = {"TRITON_INTERPRET": "1", "OPGRAFT_DISABLE": "pack:opgraft-kernels"}
    found = report(environment_with_torch, SCRIPT, **variables)
    assert set(found["hits"].values()) == {0}
    assert found["packs"] == {"opgraft-kernels": ["active", ""]}


@pytest.mark.parametrize(
    "first",
    [
        "import torch",
        "import opgraft",
        "from opgraft import when",
        "import opgraft.registration",
        "import opgraft_kernels",
    ],
)
def test_whatever_a_program_imports_first(environment: Environment, first: str) -> None:
    program = f"""
{first}
import opgraft
names = [each.name for each in opgraft.overrides(pack="opgraft-kernels")]
assert "opgraft_kernels.rms_norm.forward" in names and len(names) == len(set(names))
opgraft.packs.load("opgraft-kernels")
opgraft.packs.activate()
assert [each.name for each in opgraft.overrides()] == names
import torch
"""
    found = report(environment, program)
    assert found["packs"] == {"opgraft-kernels": ["active", ""]}
    assert not set(HEAVY) & set(found["modules"])


def test_it_imports_nothing_heavy_and_starts_no_cuda(
    environment: Environment, scaffold: Path
) -> None:
    environment.run(environment.python, "-m", "compileall", "-q", scaffold)
    # As installed, without an installation that the other tests would see.
    info = scaffold / "src" / "fast_softmax-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: fast-softmax\nVersion: 1\nRequires-Dist: torch>=2.11\n")
    (info / "entry_points.txt").write_text("[opgraft.packs]\nfast-softmax = fast_softmax:register")
    program = "import torch\nassert not torch.cuda.is_initialized()"
    found = report(environment, program, PYTHONPATH=str(scaffold / "src"))
    assert found["packs"] == {"fast-softmax": ["active", ""], "opgraft-kernels": ["active", ""]}
    assert {"fast_softmax.softmax", "opgraft_kernels.rms_norm.backward"} < set(found["hits"])
    assert not set(HEAVY) & set(found["modules"])
    # Every `import torch` pays for these. What only some programs need is imported by them.
    ours = {name for name in found["modules"] if name.startswith("opgraft.")}
    assert not ours & {f"opgraft.{name}" for name in NOT_NEEDED_TO_REGISTER}


def test_every_process_that_is_spawned_has_them(environment: Environment, tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, torch

        def child():
            import opgraft
            return [override.name for override in opgraft.overrides()]

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(child) == child() != [])
        """)
    )
    done = environment.run(environment.python, script)
    assert (done.stdout.strip(), done.stderr) == ("True", "")


@pytest.mark.parametrize("flags", [["-I"], ["-OO"], ["-W", "error"], ["-S"]])
def test_flags_of_python(environment: Environment, flags: list[str]) -> None:
    program = """
import sys
sys.path += sys.argv[1:]
import torch, opgraft
print({each.pack for each in opgraft.overrides()})
"""
    paths = [str(environment.packages), str(environment.folder / "borrowed")]
    extra = paths if flags == ["-S"] else []  # without site, nothing is found by itself
    done = environment.run(environment.python, *flags, "-c", program, *extra)
    assert (done.stdout.strip(), done.stderr) == ("{'opgraft-kernels'}", "")


def test_without_a_compiled_core_it_says_so_and_installs_nothing(
    environment_with_torch: EnvironmentWithTorch, tmp_path: Path
) -> None:
    environment = environment_with_torch
    without = shutil.ignore_patterns("_C_torch*")
    shutil.copytree(environment.packages / "opgraft", tmp_path / "opgraft", ignore=without)
    variables = {"PYTHONPATH": str(tmp_path), "OPGRAFT_CACHE": str(tmp_path / "cache")}
    done = environment.program("import torch, opgraft; print(opgraft.overrides())", **variables)
    assert done.stdout.strip() == "[]"
    (line,) = done.stderr.splitlines()
    assert line.startswith("opgraft: packs are installed and not active (opgraft-kernels): no c")
    assert "opgraft build` compiles one" in line
    done = environment.module_after_torch("opgraft", "doctor", "--json", **variables)
    assert done.returncode == 1
    (core,) = [c for c in json.loads(done.stdout)["checks"] if c["topic"] == "core"]
    assert core["level"] == "problem"
    assert core["mend"] == "opgraft build"


# ---------------------------------------------------------------------- packs that do not work

BROKEN = {
    "crashes": ("raise RuntimeError('no way')", "RuntimeError: no way"),
    "exits": ("import sys; sys.exit(7)", "SystemExit: 7"),
    "too-new": ("", "needs torch>=99, and this is"),
    "typo": (
        "import opgraft\n"
        "def register():\n"
        "    impl = lambda self, dim, half: self\n"
        "    opgraft.register_op_override('aten', '_softmax', 'CPU', impl,\n"
        "        unconditional_override=True)\n"
        "    opgraft.register_op_override('aten', '_sofmax', 'CPU', impl,\n"
        "        unconditional_override=True)\n",
        "there is no op aten::_sofmax; did you mean aten::_softmax",
    ),
}
LACKING = """
import opgraft
def register():
    opgraft.register_op_override("aten", "_softmax", "CPU", lambda self, dim, half: self,
        unconditional_override=True, dsl="{dsl}", name="{dsl}")
"""


def test_packs_that_do_not_work_are_reported_and_none_is_fatal(
    environment_with_torch: EnvironmentWithTorch, tmp_path: Path
) -> None:
    environment = environment_with_torch
    for name, (code, _) in BROKEN.items():
        needs = "Requires-Dist: torch>=99\n" if name == "too-new" else ""
        put_pack(tmp_path, name, code, needs)
    lacking = 'Requires-Dist: no-such-dsl; extra == "mydsl"\n'
    put_pack(tmp_path, "no-dsl", LACKING.format(dsl="mydsl"), lacking)
    old = 'Requires-Dist: triton>=99; extra == "triton"\n'
    put_pack(tmp_path, "old-dsl", LACKING.format(dsl="triton"), old)

    variables = {"PYTHONPATH": str(tmp_path)}
    done = environment.program("import torch; print(torch.ones(2, 2).softmax(-1))", **variables)
    assert done.returncode == 0
    assert "[0.5000, 0.5000]" in done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == len(BROKEN), done.stderr
    for name, (_, reason) in BROKEN.items():
        (line,) = [line for line in lines if f"pack '{name}' ({name} 1)" in line]
        assert reason in line

    done = environment.module_after_torch("opgraft", "list", "--json", **variables)
    listed = json.loads(done.stdout)
    states = {row["name"]: row["state"] for row in listed["packs"]}
    assert states == {name: "failed" for name in BROKEN} | {
        "too-new": "unmet",
        "no-dsl": "active",
        "old-dsl": "active",
        "opgraft-kernels": "active",
    }
    reasons = {row["name"]: row["reason"] for row in listed["overrides"]}
    assert reasons["mydsl"] == "pack no-dsl needs no-such-dsl, which is not installed"
    assert "pack old-dsl needs triton>=99, and this is 3." in reasons["triton"]
    assert "aten::_softmax" in {row["op"] for row in listed["overrides"]}

    done = environment.module_after_torch("opgraft", "doctor", "--json", **variables)
    assert done.returncode == 1
    problems = [c["text"] for c in json.loads(done.stdout)["checks"] if c["level"] == "problem"]
    for reason in (
        *(reason for _, reason in BROKEN.values()),
        "pack no-dsl needs no-such-dsl",
        "pack old-dsl needs triton>=99",
    ):
        assert any(reason in problem for problem in problems), (reason, problems)


def put_pack(folder: Path, name: str, code: str, needs: str) -> None:
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1\n{needs}")
    (info / "entry_points.txt").write_text(f"[opgraft.packs]\n{name} = {module}:register\n")


# ------------------------------------------------------------------------------- the scaffold


@pytest.mark.slow
def test_what_opgraft_new_makes_passes_its_tests_and_can_be_installed(
    environment: Environment, scaffold: Path, tmp_path: Path
) -> None:
    done = environment.run("make", "test", cwd=scaffold)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    target = tmp_path / "target"
    tuned = tmp_path / "tuned"
    shutil.copytree(scaffold, tuned)
    put_table(tuned / "src" / "fast_softmax" / "tables")
    environment.install(tuned, target=target)
    program = """
import torch
for rows in (16, 32):
    y = torch.softmax(torch.randn(rows, 64), -1)
"""
    variables = {"PYTHONPATH": str(target), "TRITON_INTERPRET": "1"}
    found = report(environment, program, **variables)
    assert found["packs"]["fast-softmax"] == ["active", ""]
    its_own = {name: hits for name, hits in found["hits"].items() if "fast_softmax" in name}
    assert its_own == {"fast_softmax.softmax": 1}


def put_table(folder: Path) -> None:
    """A table for this CPU, by which the scaffold's kernel is faster on [32, 64] alone."""
    features = {"rows": {"steps": 1}, "columns": {"steps": 1}, "dtype": "exact"}
    entry = {"version": 1, "features": features, "measured": {"date": "2026-11-24"}}
    cell = tables.line_of([32, 64, "float32"], Cell(10, 5, 1, None, 1, None, None))
    cells = {"columns": tables.columns_of(features), "cells": [cell]}
    model = models.of_device(torch.device("cpu"))
    table = {"format": tables.FORMAT, "device": model.name, "capability": model.capability}
    content = table | {"overrides": {"fast_softmax.softmax": entry | cells}}
    (folder / models.file_name(model.name)).write_text(json.dumps(content))


def test_the_minimal_pack_is_installed_and_routes(environment: Environment, tmp_path: Path) -> None:
    built = _environment.wheel(ROOT / "examples" / "minimal_pack", tmp_path / "built")
    environment.install(built, target=tmp_path)
    program = """
import torch
import torch.nn.functional as F
x = torch.randn(64, 64)
torch.testing.assert_close(F.silu(x), x * torch.sigmoid(x))
"""
    variables = {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    found = report(environment, program, **variables)
    assert found["packs"]["minimal-pack"] == ["active", ""]
    assert found["hits"]["minimal_pack.silu"] == 1
