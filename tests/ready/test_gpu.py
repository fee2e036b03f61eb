"""On a GPU: the pack's calls before their kernels are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

#: A call is native's twice more once its launch plan is there, which is compared with that.
IMPORTED = """
DSLS = {"triton", "cutlass", "flash_attn", "quack"}
"""
NORMS = """
import sys, torch, torch.nn.functional as F, opgraft
x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

def step():
    out = F.rms_norm(x, [4096], weight, 1e-6)
    out.sum().backward()
    return out

first = step()
assert "triton" not in sys.modules, "a call imported the DSL"
(forward,) = opgraft.overrides(name="opgraft_kernels.rms_norm.forward")
(backward,) = opgraft.overrides(name="opgraft_kernels.rms_norm.backward")
assert (forward.hits, backward.hits) == (0, 0)
assert opgraft.wait_until_ready(200)
states = forward.plans.readiness.states() + backward.plans.readiness.states()
assert states and all(state.status == "ready" for state in states), states
assert all(state.by.startswith("worker") for state in states), [str(state) for state in states]
for _ in range(8):
    out = step()
    torch.cuda.synchronize()
plans = [*forward.plans, *backward.plans]
assert plans and all(plan.is_proven for plan in plans), plans
assert forward.hits >= 4 and backward.hits >= 4, (forward.hits, backward.hits)
assert not DSLS & set(sys.modules), "a hit imported a DSL"
torch.testing.assert_close(out, first, rtol=2e-2, atol=2e-2)
"""

ATTENTION = """
import sys, torch, torch.nn.functional as F, opgraft
q, k, v = (
    torch.randn(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3)
)

def step():
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.backward(torch.ones_like(out))
    return out.detach()

first = step()
assert not {"cutlass", "flash_attn", "triton"} & set(sys.modules), "a call imported a DSL"
assert opgraft.wait_until_ready(400)
plans = [each.plans for each in opgraft.overrides() if each.plans is not None]
states = [state for each in plans for state in each.readiness.states()]
print([str(state) for state in states])
assert states and all(state.status == "ready" for state in states)
assert all(state.by.startswith("worker") for state in states)
for _ in range(8):
    out = step()
    torch.cuda.synchronize()
hit = {each.name for each in opgraft.overrides() if each.hits >= 4}
print("hit", hit, "imported", DSLS & set(sys.modules))
assert any("cutedsl" in name for name in hit), hit
assert not DSLS & set(sys.modules), "a hit imported a DSL"
torch.testing.assert_close(out, first, rtol=2e-2, atol=2e-2)
"""

CROSS_ENTROPY = """
import sys, torch, torch.nn.functional as F, opgraft
logits = torch.randn(8192, 32000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
target = torch.randint(32000, (8192,), device="cuda")

def step():
    logits.grad = None
    loss = F.cross_entropy(logits, target)
    loss.backward()
    return loss.detach(), logits.grad

with opgraft.disabled():
    expected = step()
torch.testing.assert_close(step(), expected, rtol=2e-2, atol=2e-5)
override, *parts = [each for each in opgraft.overrides() if "cross_entropy" in each.name]
assert override.hits == 1 and len(parts) == 2
assert [part.hits for part in parts] == [0, 0], "their native kernels serve"
assert opgraft.wait_until_ready(200)
states = [state for part in parts for state in part.plans.readiness.states()]
assert states and all(state.status == "ready" for state in states), [str(s) for s in states]
assert all(state.by.startswith("worker") for state in states), [str(s) for s in states]
for _ in range(8):
    found = step()
    torch.cuda.synchronize()
plans = [plan for part in parts for plan in part.plans]
assert plans and all(plan.is_proven for plan in plans), plans
assert all(part.hits >= 4 for part in parts), parts
assert not DSLS & set(sys.modules), "a hit imported a DSL"
torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-5)
"""

GRAPHED = """
import torch, torch.nn.functional as F, opgraft
q, k, v = (torch.randn(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

@torch.compile(mode="reduce-overhead")
def step(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

with torch.no_grad():
    outs = [step(q, k, v).clone() for _ in range(4)]
    waited = {each.name: each.hits for each in opgraft.overrides() if each.hits}
    outs.append(step(q, k, v).clone())
assert waited, "the run before the capture did not wait"
assert waited == {each.name: each.hits for each in opgraft.overrides() if each.hits}, "no replay"
with opgraft.disabled():
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2
for out in outs:
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
"""

CAPTURED = """
import warnings
import torch, torch.nn.functional as F, opgraft
x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
F.rms_norm(x, [4096])  # another process compiles for it
torch.cuda.synchronize()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        F.rms_norm(x, [4096])
        F.rms_norm(x, [4096])
(said,) = [str(each.message) for each in told if "captured" in str(each.message)]
assert "rms_norm.forward" in said, said
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(NORMS, id="norms"),
        pytest.param(ATTENTION, id="attention in CuteDSL"),
        pytest.param(CROSS_ENTROPY, id="an op with a derivative of its own"),
        pytest.param(GRAPHED, id="a run of torch.compile before it captures"),
        pytest.param(CAPTURED, id="a capture before they are ready"),
    ],
)
def test_the_packs_ops_become_ready_in_workers(program: str, tmp_path: Path) -> None:
    environment = os.environ | {
        **{"OPGRAFT_WHEN_NOT_READY": "native", "OPGRAFT_PACKS": "opgraft-kernels"},
        **{"TRITON_CACHE_DIR": str(tmp_path / "triton"), "OPGRAFT_CACHE": str(tmp_path)},
    }
    command = [sys.executable, "-c", IMPORTED + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


#: The calls of the programs above in a second process: the first one of each kind loads.
SECOND = """
import sys, time, torch, torch.nn.functional as F, opgraft
x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
q, k, v = (
    torch.randn(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3)
)
logits = torch.randn(8192, 32000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
target = torch.randint(32000, (8192,), device="cuda")
for _ in range(10):
    F.cross_entropy(logits, target).backward()
    F.rms_norm(x, [4096], weight, 1e-6).sum().backward()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    assert opgraft.wait_until_ready(60)
from opgraft.ready import pool
assert not pool.shared().workers(), "a worker was started"
plans = {each.name: list(each.plans) for each in opgraft.overrides() if each.plans}
hits = {name: sum(plan.hits for plan in found) for name, found in plans.items() if found}
print(hits)
# An override that is asked while the one before it is not ready has plans, and need not be hit.
parts = ("rms_norm.", "cross_entropy.", "attention.cutedsl.")
wanted = [name for name in hits if name.startswith(tuple(f"opgraft_kernels.{p}" for p in parts))]
assert len(wanted) == 6 and all(hits[name] >= 6 for name in wanted), (hits, plans)
assert not DSLS & set(sys.modules), DSLS & set(sys.modules)
"""


def test_a_second_process_hits_and_imports_no_dsl(tmp_path: Path) -> None:
    environment = os.environ | {
        **{"OPGRAFT_WHEN_NOT_READY": "native", "OPGRAFT_PACKS": "opgraft-kernels"},
        **{"TRITON_CACHE_DIR": str(tmp_path / "triton"), "OPGRAFT_CACHE": str(tmp_path)},
    }
    for program in (NORMS, ATTENTION, CROSS_ENTROPY, SECOND):
        command = [sys.executable, "-c", IMPORTED + program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
