"""Random programs end as they do without overrides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import opgraft
from opgraft.core import loader
from tests.fuzz import campaign, grafts, programs

ROOT = Path(__file__).parents[2]


def fuzz(count: int, seed: int, device: str = "cpu", **environment: str) -> dict[str, object]:
    """Run the command, in processes in which no other test has registered anything."""
    command = [sys.executable, "-m", "tests.fuzz", "--json", "--device", device]
    done = subprocess.run(
        [*command, "--programs", str(count), "--seed", str(seed)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    print(f"seeds {seed} to {seed + count - 1}")
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.slow
@pytest.mark.skipif(loader.in_use() is None, reason="the same as the other, without a core")
def test_programs_end_as_in_stock_pytorch() -> None:
    # As many reach each op, each mode and each kind of call; campaigns of more are run by hand.
    result = fuzz(1000, seed=0)
    assert (result["programs"], result["failures"]) == (1000, [])
    assert result["hits"] > 4_000 and result["misses"] > 500 and result["shadowed"] > 250
    assert set(result["modes"]) == {"plain", "shadow", "threads"}  # type: ignore[call-overload]
    assert len(result["hit_ops"]) > 25  # type: ignore[arg-type]


@pytest.mark.slow
def test_programs_end_as_in_stock_pytorch_where_python_routes() -> None:
    result = fuzz(200, seed=10_000, OPGRAFT_ROUTER="python")
    assert (result["programs"], result["failures"]) == (200, [])
    assert result["hits"] > 700


@pytest.mark.gpu
@pytest.mark.slow
def test_programs_on_a_gpu() -> None:
    result = fuzz(1000, seed=0, device="cuda")
    print("left out, as stock PyTorch does not outlive them:", result["stock_died"])
    assert result["failures"] == []
    assert result["programs"] >= 990  # type: ignore[operator]
    assert result["hits"] > 2_000


def test_the_same_seed_makes_the_same_program() -> None:
    one, again, other = (programs.make(seed, "exact", grafts.OPS["exact"]) for seed in (5, 5, 6))
    assert one == again != other


def wrong(kind: str, op: str) -> opgraft.Override:
    """An override of an op in programs that is wrong in a way that the fuzzer must see."""
    native = opgraft.native(op)

    def impl(*args: object) -> object:
        result = native(*args)
        return result * 1.01 if kind == "values" else result.double()

    return opgraft.register_op_override(
        *op.split("::"), "CPU", impl, unconditional_override=True
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["exact", "smooth"])
def test_a_wrong_override_is_found_and_its_program_shrinks(kind: programs.Kind) -> None:
    steps = (
        programs.Step("leaf", (), ((3, 4), torch.float32, "contiguous", True, 1), 0),
        programs.Step("leaf", (), ((2, 2), torch.float32, "contiguous", False, 2), 1),
        programs.Step("softmax", (0,), (-1,), 2),
        programs.Step("transpose", (2,), (0, 1), 3),
        programs.Step("mean", (1,), (0, True), 4),
    )
    program = programs.Program(0, kind, "cpu", steps)
    reference = programs.run(program, wide=True) if kind == "smooth" else None
    stock = campaign.Stock(program, programs.run(program), reference)
    assert campaign.compare(stock, programs.run(program)) is None
    override = wrong("values", "aten::_softmax")
    difference = campaign.compare(stock, programs.run(program))
    assert difference is not None and difference.startswith("r2: values")
    assert [step.output for step in campaign.shrunk(program).steps] == [0, 2]
    assert override.hits > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda left: left._replace(value=left.value + 1), "r0: values"),
        (lambda left: left._replace(facts=(*left.facts[:-1], 9)), "r0: "),
        (lambda left: None, "r0: None, stock leaves"),
        (lambda left: left._replace(grad=None), "r0: grad"),
    ],
    ids=["values", "version", "missing", "gradient"],
)
def test_what_a_program_leaves_is_compared(change: object, message: str) -> None:
    leaf = programs.Step("leaf", (), ((3,), torch.float32, "contiguous", True, 1), 0)
    backward = programs.Step("backward", (0,), (), 1)
    program = programs.Program(0, "exact", "cpu", (leaf, backward))
    outcome = programs.run(program)
    stock = campaign.Stock(program, outcome, None)
    (first, second) = outcome.registers
    changed = outcome._replace(registers=(change(first), second))  # type: ignore[operator]
    assert (campaign.compare(stock, changed) or "").startswith(message)
    assert campaign.compare(stock, outcome._replace(errors=("one",))) is not None
    assert campaign.compare(stock, outcome._replace(aliases=(0, 0))) is not None
