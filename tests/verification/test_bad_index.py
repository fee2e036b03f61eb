"""Indices out of range, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft.ops.schema import resolve
from opgraft.verification import boundaries, isolated
from opgraft.verification.isolated import CallOutcome
from opgraft.verification.samples import CannotMake, parse
from tests import forked_programs

ROOT = Path(__file__).parent.parent.parent


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse() -> None:
    raise IndexError("out of range")


def test_what_becomes_of_a_call_is_told_and_the_others_are_made() -> None:
    outcomes = isolated.run_in_forks([refuse, crash, lambda: None, crash, refuse])
    assert [(outcome.what, outcome.error) for outcome in outcomes] == [
        ("raised", "IndexError"),
        ("died", "SIGSEGV"),
        ("returned", ""),
        ("died", "SIGSEGV"),
        ("raised", "IndexError"),
    ]
    assert outcomes[0].message == "out of range"


def test_a_call_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_FORK_SECONDS", 0.5)
    assert isolated.run_in_forks([lambda: time.sleep(600)]) == [
        CallOutcome("died", "ran for too long")
    ]


def test_a_call_that_asks_for_too_much_memory_is_refused_it() -> None:
    (outcome,) = isolated.run_in_forks([lambda: torch.ones(2**34)])
    assert outcome.what == "raised"


@pytest.mark.parametrize("weights", [5, 6])
def test_an_index_that_the_cpu_leaves_out_is_out_of_range_too(weights: int) -> None:
    """CUDA's kernel writes there."""
    op = resolve("aten::embedding_dense_backward")
    call = op.bind((torch.ones(3, 2), torch.tensor([0, 5, 2]), weights, -1, False), {})
    with pytest.raises(CannotMake, match="5 rows") if weights == 5 else nullcontext():
        boundaries._check_indices(call)


@pytest.mark.parametrize(("classes", "ignored"), [(5, -1), (6, -1), (5, 5)])
def test_a_class_that_the_cpu_writes_out_of_bounds_with_is_out_of_range(
    classes: int, ignored: int
) -> None:
    """Of the gradient: the forward's kernel looks at it."""
    op, one = resolve("aten::nll_loss_backward"), torch.ones(())
    targets = torch.tensor([0, 5, 2])
    call = op.bind((one, torch.ones(3, classes), targets, None, 1, ignored, one), {})
    is_wrong = classes == 5 and ignored != 5
    with pytest.raises(CannotMake, match="5 rows") if is_wrong else nullcontext():
        boundaries._check_indices(call)


def select(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return torch.stack([self.select(dim, i) for i in index.tolist()], dim).contiguous()


def test_a_reproducer_makes_the_bad_index_again() -> None:
    override = opgraft.register_op_override(
        *("aten", "index_select", "CPU", select),
        cond=opgraft.when.ndim("self") == 2,
        name="selects",
    )
    report = opgraft.verify(override, checks=["hit", "bad_index"], max_samples=20)
    (failure,) = report.failures
    assert failure.check == "bad_index"
    assert "with -1 in 'index' it returned a result" in failure.message
    with pytest.raises(AssertionError, match="with -1 in 'index'"):
        exec(failure.reproducer, {})
    assert override.hits > 0


def test_a_bad_index_reaches_the_impl_alone_on_a_kinds_first_hits() -> None:
    """Native runs beside those, and its error would be taken for the impl's."""
    override = opgraft.register_op_override(
        *("aten", "index_select", "CPU"),
        lambda self, dim, index: select(self, dim, index.clamp(0, self.shape[dim] - 1)),
        cond=opgraft.when.ndim("self") == 2,
        name="clamps",
    )
    report = opgraft.verify(override, checks=["bad_index"], max_samples=20)
    (failure,) = report.failures
    assert failure.check == "bad_index" and "it returned a result" in failure.message
    assert override.hits > 0


def test_a_sample_holds_a_bad_index_by_its_id() -> None:
    base, _, layouts = parse("opinfo:gather:float32:0.0 self[0]=3 @index:holding-7")
    assert (base, list(layouts.values())) == ("opinfo:gather:float32:0.0", ["holding-7"])


@pytest.mark.parametrize(
    ("natively", "outcome"),
    [
        (True, CallOutcome("returned")),
        (False, CallOutcome("raised", "ValueError", "of this process alone")),
    ],
)
def test_another_process_registers_an_override_by_its_module(
    natively: bool, outcome: CallOutcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the impl refuses what is good natively: what is raised shows that it is registered."""
    (tmp_path / "mine_in_a_process.py").write_text(
        "import opgraft\n"
        "def impl(self, dim, index):\n"
        "    raise ValueError('of this process alone')\n"
        "override = opgraft.register_op_override('aten', 'index_select', 'CPU', impl,\n"
        "    cond=opgraft.when.ndim('self') == 2, name='mine', on_error='raise')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    override: Any = import_module("mine_in_a_process").override
    try:
        sample = opgraft.verification.sample(
            "opinfo:index_select:float32:2.0", op=override.op, name="mine"
        ).sample
        assert isolated.run_in_new_process(override, sample, natively=natively) == outcome
    finally:
        del sys.modules["mine_in_a_process"]  # which registers it: another test's own


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("clamped", "verdict"), [(True, "failed"), (False, "passed")])
def test_on_cuda_an_assertion_is_asked_for(clamped: bool, verdict: str, tmp_path: Path) -> None:
    """In other processes: this one's device is as good as before."""
    indices = "indices.reshape(-1)" + (".clamp(0, weight.shape[0] - 1)" if clamped else "")
    (tmp_path / "mine.py").write_text(
        "import opgraft, torch\n"
        "def impl(weight, indices, padding_idx, scale_grad_by_freq, sparse):\n"
        f"    rows = weight.index_select(0, {indices})\n"
        "    return rows.view(*indices.shape, *weight.shape[1:])\n"
        "opgraft.register_op_override('aten', 'embedding', 'CUDA', impl,\n"
        "                             unconditional_override=True, name='mine')\n"
    )
    done = forked_programs.run_module(
        *("opgraft", "verify", "aten::embedding", "--import", "mine"),
        *("--check", "hit", "--check", "bad_index", "--max-samples", "20", "--json"),
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OPGRAFT_PACKS": "none"},
        cwd=ROOT,
    )
    assert done.stdout, done.stderr
    (override,) = json.loads(done.stdout)["overrides"]
    assert override["checks"]["bad_index"]["verdict"] == verdict, done.stdout + done.stderr
    assert override["hits"] > 0
    if clamped:
        (failure,) = override["failures"]
        assert "reads out of bounds" in failure["message"]
    assert float(torch.ones(3, device="cuda").sum()) == 3.0
