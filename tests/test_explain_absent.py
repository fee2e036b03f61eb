"""`explain` of calls on a device that is not here: of a torch without CUDA, or without a GPU.

In processes of their own: what goes wrong with autograd there ends the process.
"""

from __future__ import annotations

import subprocess

import pytest
import torch

from opgraft.ops.dispatch_keys import is_built_for
from tests import forked_programs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")

PROGRAM = """
import sys
import torch
import opgraft
from opgraft import cli, when
for op, argument in (("_softmax", "self"), ("_fused_rms_norm", "input")):
    opgraft.register_op_override(
        "aten", op, "CUDA", lambda *args: None, cond=when.size(argument, -1) == 8, name="mine",
    )
sys.exit(cli.main(["explain", *sys.argv[1:]]))
"""


def explained(*words: str) -> subprocess.CompletedProcess[str]:
    return forked_programs.run(PROGRAM, *words)


@pytest.mark.parametrize("option", [[], ["--requires-grad"]], ids=str)
@pytest.mark.parametrize("op", ["aten::_softmax", "aten::_fused_rms_norm"])
@pytest.mark.parametrize(
    ("shape", "verdict"), [("4x8", "takes it"), ("4x9", "declines: when.size(")], ids=str
)
def test_a_condition_is_asked_as_where_there_is_one(
    op: str, option: list[str], shape: str, verdict: str
) -> None:
    done = explained(op, "--shape", shape, "--device", "cuda", *option)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("mine\t")]
    assert line.split("\t")[-1].startswith(verdict)
    if not is_built_for("CUDA"):
        assert "this torch is built without CUDA" in done.stdout
        assert "RegisterCompositeImplicitAutograd" not in done.stdout  # as it is at this build


def test_what_is_made_of_ops_is_followed() -> None:
    done = explained("aten::rms_norm", "--shape", "4x8", "--device", "cuda")
    assert done.returncode == 0, done.stderr
    assert "Reaches aten::_fused_rms_norm: 1 call." in done.stdout
    assert "Runs: mine" in done.stdout


@pytest.mark.parametrize(
    ("option", "status", "told"),
    [
        ("--real", 2, "--real allocates tensors, and there is no CUDA device here"),
        ("--backward", 2, "--backward needs torch's device threads, and there is no CUDA device"),
        ("--requires-grad", 1, "there is no cuda device here, and autograd cannot be followed"),
    ],
)
def test_what_needs_the_device_is_refused_with_the_mend(
    option: str, status: int, told: str
) -> None:
    done = explained("aten::rms_norm", "--shape", "4x8", "--device", "cuda", option)
    assert (done.returncode, done.stdout) == (status, "")
    assert told in done.stderr
    assert "leave" in done.stderr and "Traceback" not in done.stderr


def test_overrides_at_another_key_are_told() -> None:
    """As README's own line has it, on a machine without a GPU."""
    done = explained("aten::_fused_rms_norm", "--shape", "8192x4096", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    told = "Note: its overrides are at CUDA, and this call is at CPU: --device cuda"
    assert told in done.stdout.splitlines()
